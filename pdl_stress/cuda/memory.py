"""The memory of a chain under test: one arena, weight sets, and references for a pool of inputs.

The arena holds every graded buffer, inputs first, then intermediates, then outputs, each aligned to 256 bytes. A
reference is the arena after a synchronized eager run: the same kernels, launched one by one with a device
synchronization after each. (They are launched with the chain's own PDL attribute, which means nothing on an idle
device: libraries pick another kernel without it.)
"""

from __future__ import annotations

from math import prod
from typing import Any

from ..buffers import Buffer, Role, View
from ..chain import Chain, Step
from ..errors import DeviceError, UsageError
from .waiting import finish

WORD = 16
"""Bytes of a word: the unit in which the harness grades."""

ALIGNMENT = 256
"""Bytes to which buffers are aligned in the arena: kernels take for granted what an allocator gives them."""

POOL = 256
"""Inputs of a pool."""

NAN_PATTERN = 0x7FC1
"""Poison of floating-point buffers: repeated 16-bit pattern, a NaN as bfloat16, float16 and float32. Its low bit tells
it from the NaN (0x7fff) that arithmetic on poison makes."""


POISONABLE = ("bfloat16", "float16", "float32")


class WeakReference(UsageError):
    """The references cannot tell a right result from a wrong one; what a run over them shows is worth nothing."""


class Memory:
    """Buffers and references of one chain on the current CUDA device.

    Args:
        chain: the chain as deployed.
        stream: torch stream on which everything runs.
        seed: of inputs and weights.
        pool: number of inputs; a multiple of ``unroll``.
        unroll: replays in a graph; replay ``u`` of a graph uses weight set ``u % sets`` when rotated.
        time_limit: seconds that an eager step may take before it counts as hung.
    """

    def __init__(
        self, chain: Chain, stream: Any, seed: int, pool: int = POOL, unroll: int = 16, time_limit: float = 60.0
    ) -> None:
        import torch

        if pool % unroll:
            raise UsageError(f"pool {pool} is no multiple of the {unroll} replays of a graph.")
        self.chain, self.stream, self.pool, self.unroll = chain, stream, pool, unroll
        self.device, self.time_limit = stream.device, time_limit
        read = {view.buffer.name for step in chain.steps for _, view in step.reads()}
        ordered = sorted(
            chain.graded, key=lambda b: (b.role is not Role.INPUT, b.role is Role.INTERMEDIATE and b.name not in read)
        )
        self.layout: dict[str, tuple[int, int]] = {}
        place = 0
        for buffer in ordered:
            size = prod(buffer.shape) * _itemsize(buffer)
            self.layout[buffer.name] = (place, size)
            place += -(-size // ALIGNMENT) * ALIGNMENT
            if buffer.role is Role.INPUT:
                self.input_words = place // WORD
            if buffer.role is Role.INPUT or buffer.name in read:
                self.output_start = place // WORD
        self.words = place // WORD
        self.arena = torch.zeros(place, dtype=torch.uint8, device=self.device)
        self.ring = torch.zeros(unroll, place - self.output_start * WORD, dtype=torch.uint8, device=self.device)
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self.inputs = {b.name: self._random(b, (pool + 1, *b.shape)) for b in chain.inputs}
        self.constants: list[dict[str, Any]] = [self._weights()]
        self.references: dict[bool, Any] = {}
        self._views: dict[tuple[View, int, int | None], Any] = {}
        self._tables: dict[tuple[str, int | None], Any] = {}
        self.poison = self._poison_image()

    # -- content -----------------------------------------------------------------------------------------------------

    def _random(self, buffer: Buffer, shape: tuple[int, ...]) -> Any:
        import torch

        dtype = torch_dtype(buffer)
        if not dtype.is_floating_point:
            raise UsageError(f"input {buffer.name!r}: no generator for dtype {buffer.dtype}; use a floating dtype.")
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def _weights(self) -> dict[str, Any]:
        import torch

        made = {}
        for buffer in self.chain.constants:
            if isinstance(buffer.make, torch.Tensor):
                tensor = buffer.make.to(self.device, copy=True)  # a control may poison rows of it
            elif buffer.make is None:
                tensor = self._random(buffer, buffer.shape)
            else:
                tensor = buffer.make(self.generator, self.device)
            if tuple(tensor.shape) != buffer.shape or tensor.dtype != torch_dtype(buffer):
                raise UsageError(
                    f"constant {buffer.name!r}: got {tuple(tensor.shape)} {tensor.dtype}, "
                    f"declared {buffer.shape} {buffer.dtype}."
                )
            made[buffer.name] = tensor.contiguous()
        return made

    def _poison_image(self) -> Any:
        import torch

        image = torch.full((self.words * WORD // 2,), NAN_PATTERN, dtype=torch.int16, device=self.device).view(
            torch.uint8
        )
        for buffer in self.chain.graded:
            if buffer.dtype not in POISONABLE:
                raise UsageError(
                    f"buffer {buffer.name!r}: dtype {buffer.dtype} has no poison; expected {', '.join(POISONABLE)}."
                )
        return image

    def weight_sets(self, rotated: bool) -> int:
        """How many weight sets a graph's replays rotate over: one, or enough to fill the L2 twice over."""
        import torch

        if not rotated:
            return 1
        size = sum(t.numel() * t.element_size() for t in self.constants[0].values()) or 1
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        wanted = 1
        while wanted < self.unroll and wanted * size < 2 * cache:
            wanted *= 2
        if any(callable(b.make) or b.make is None for b in self.chain.constants):
            while len(self.constants) < wanted:
                self.constants.append(self._weights())
        return min(wanted, len(self.constants))

    def weights_note(self) -> str:
        """How the rotated weights compare with the L2: cold only if they fill it twice over."""
        import torch

        size = sum(t.numel() * t.element_size() for t in self.constants[0].values())
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        count = self.weight_sets(True)
        word = "cold" if count * size >= 2 * cache else "NOT cold"
        return f"{count} weight sets of {size / 1e6:.1f} MB, L2 {cache / 1e6:.0f} MB: {word}"

    def reference(self, rotated: bool) -> Any:
        """References of the whole pool, ``[pool, words * 16]`` bytes; made at the first call.

        Raises:
            TimeLimit: an eager step hangs.
            WeakReference: two neighbours of the pool agree in a row of a buffer, or a reference is not finite.
        """
        import torch

        if rotated in self.references:
            return self.references[rotated]
        sets = self.weight_sets(rotated)
        made = torch.empty(self.pool, self.words * WORD, dtype=torch.uint8, device=self.device)
        with torch.cuda.stream(self.stream):
            for index in range(self.pool):
                self.arena.copy_(self.poison)
                for name, values in self.inputs.items():
                    self.tensor(name).copy_(values[index])
                for step in self.chain.steps:
                    if not step.source:
                        self._synchronize()
                        operands = self.operands(step, index % self.unroll % sets)
                        for name, tensor in launch(step, operands, pdl=step.pdl).items():
                            operands[name].copy_(tensor)
                self._synchronize()
                made[index].copy_(self.arena)
            torch.cuda.synchronize(self.device)
        self._check_reference(made)
        self.references[rotated] = made
        return made

    def _synchronize(self) -> None:
        import torch

        finish(self.stream, self.time_limit)
        torch.cuda.synchronize(self.device)  # what an op does on a stream of its own

    def _check_reference(self, reference: Any) -> None:

        for buffer in self.chain.graded:
            start, size = self.layout[buffer.name]
            values = reference[:, start : start + size].contiguous().view(torch_dtype(buffer))
            if not bool(values.isfinite().all()):
                raise WeakReference(
                    f"the eager run leaves values in {buffer.name!r} that are not finite; scale its inputs."
                )
            rows = values.view(self.pool, -1, buffer.shape[-1])
            same = (rows == rows.roll(1, 0)).all(-1)
            if bool(same.any()):
                index, row = same.nonzero()[0].tolist()
                raise WeakReference(
                    f"inputs {index} and {(index - 1) % self.pool} give the same row {row} of {buffer.name!r}: "
                    "a stale read there would go unseen. Use inputs that differ in every row."
                )

    # -- addressing --------------------------------------------------------------------------------------------------

    def tensor(self, name: str, store: Any = None) -> Any:
        """The buffer ``name`` as a tensor over the arena, or over another store of the arena's layout."""
        buffer = self.chain.buffers[name]
        start, size = self.layout[name]
        flat = (self.arena if store is None else store)[start : start + size]
        return flat.view(torch_dtype(buffer)).view(buffer.shape)

    def operands(self, step: Step, weight_set: int = 0, ring_slot: int | None = None) -> dict[str, Any]:
        """Tensors for the operands of ``step``. With ``ring_slot`` outputs live in that slot of the ring."""
        found = {}
        for name, view in step.operands.items():
            slot = None if view.buffer.role is Role.CONSTANT else ring_slot  # an op may keep what it made for a weight
            key = (view, weight_set, slot)  # a capture needs hundreds of views, the same ones every time
            if key not in self._views:
                self._views[key] = self._operand(view, weight_set, ring_slot)
            found[name] = self._views[key]
        return found

    def scatter_table(self, step: Step, ring_slot: int | None = None) -> Any:
        """Where a stand-in for ``step`` writes: int64 ``[words, 2]`` on the device, see ``csrc/harness.cu``.

        With ``ring_slot`` outputs go to that slot of the ring.
        """
        import torch

        key = (step.name, ring_slot)
        if key not in self._tables:
            place = torch.cat([self._bytes_of(view) for _, view in step.writes()]).unique()
            words, entry = torch.unique(place // WORD, return_inverse=True)
            mask = torch.zeros_like(words).index_add_(0, entry, torch.ones_like(place) << (place % WORD))
            address = self.arena.data_ptr() + words * WORD
            if ring_slot is not None:
                in_ring = self.ring[ring_slot].data_ptr() + (words - self.output_start) * WORD
                address = torch.where(words >= self.output_start, in_ring, address)
            self._tables[key] = torch.stack([address, words | mask << 32], dim=1).to(self.device)
        return self._tables[key]

    def _bytes_of(self, view: View) -> Any:
        """Numbers of the arena's bytes that a view covers, each once."""
        import torch

        start, size = self.layout[view.buffer.name]
        numbers = torch.arange(start, start + size, dtype=torch.int64)
        return numbers.view(*view.buffer.shape, _itemsize(view.buffer))[(*view.slices, slice(None))].reshape(-1)

    def _operand(self, view: View, weight_set: int, ring_slot: int | None) -> Any:
        buffer = view.buffer
        if buffer.role is Role.CONSTANT:
            return self.constants[weight_set][buffer.name][view.slices]
        start, size = self.layout[buffer.name]
        behind = start - self.output_start * WORD
        if ring_slot is not None and behind >= 0:
            flat = self.ring[ring_slot][behind : behind + size]
            return flat.view(torch_dtype(buffer)).view(buffer.shape)[view.slices]
        return self.tensor(buffer.name)[view.slices]


def launch(step: Step, operands: dict[str, Any], *, pdl: bool, stamps: Any = None) -> dict[str, Any]:
    """Runs one step (not a source) on torch's current stream.

    Returns:
        The tensors that the op returned instead of writing to its operand, by the operand's name.

    Raises:
        UsageError: the op returned something else than its contract says.
    """
    if step.op.rebuildable:
        delay_ns = None if step.delay_us is None else round(step.delay_us * 1000)
        step.op.run(**operands, **step.params, pdl=pdl, contract=step.contract, delay_ns=delay_ns, stamps=stamps)
        return {}
    if step.delay_us is not None or stamps is not None:
        raise DeviceError(f"step {step.name!r}: {step.op.name} has no delay point and no time stamps.")
    given = {name: tensor for name, tensor in operands.items() if name not in step.op.returns}
    result = step.op.run(**given, **step.params, pdl=pdl)
    if not step.op.returns:
        return {}
    returned = result if isinstance(result, (tuple, list)) else (result,)
    if len(returned) != len(step.op.returns):
        raise UsageError(f"step {step.name!r}: {step.op.name} returned {len(returned)} values, not {step.op.returns}.")
    for name, tensor in zip(step.op.returns, returned, strict=True):
        want = operands[name]
        if _layout(tensor) != _layout(want) or not _is_whole(tensor):
            raise UsageError(
                f"step {step.name!r}: {step.op.name} returned {name!r} as {_layout(tensor)}, "
                f"the chain's buffer is {_layout(want)} (dtype, shape, strides); and it must be a tensor of its own, "
                "no part of another."
            )
    return dict(zip(step.op.returns, returned, strict=True))


def _is_whole(tensor: Any) -> bool:
    """True if nothing but the tensor lies in its storage: a kernel that writes more would write behind the buffer."""
    size = tensor.numel() * tensor.element_size()
    return bool(tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size)


def _layout(tensor: Any) -> tuple[Any, ...]:
    """What two tensors must share for one kernel to write either: dtype, shape, strides of dimensions above one."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        return (type(tensor).__name__, (), ())
    strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return (tensor.dtype, tuple(tensor.shape), strides)


def torch_dtype(buffer: Buffer) -> Any:
    """The torch dtype of a buffer. Raises UsageError for an unknown name."""
    import torch

    dtype = getattr(torch, buffer.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"buffer {buffer.name!r}: {buffer.dtype!r} is no torch dtype.")
    return dtype


def _itemsize(buffer: Buffer) -> int:
    return int(torch_dtype(buffer).itemsize)
