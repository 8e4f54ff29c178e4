"""Several Linears, one weight: the Parameters of its parts are views of its rows.

Nothing is stored twice. A reload in place (``copy_``, ``load_state_dict``, a loader's ``load_weights``) writes through
the views, so the fused weight is never stale; and whoever replaces a Parameter breaks the alias, which is looked for at
every use. state_dict keeps its keys and shapes: the fused weight is no Parameter and no buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from fusions import linear as linears
from fusions.capturing import refuse_capture


@dataclass(frozen=True)
class Limits:
    """Which weights may be fused.

    Args:
        dtypes: of the weights; all parts have one dtype in any case. Empty: any floating dtype of 16 or 32 bits.
        k_multiple, row_multiple: K, and the rows of each part, are multiples of these.
        allow_foreign_views: fuse weights that are views of a larger storage of somebody else's, which is left behind.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    k_multiple: int = 1
    row_multiple: int = 1
    allow_foreign_views: bool = False


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class RowViews:
    """The parts of one fused weight ``[sum of rows, K]``, first part first.

    Args:
        parts: (name, LinearLike) pairs. The modules are not registered anywhere: their owner has them.
        limits: which weights may be fused.

    Not thread-safe against its own :meth:`fuse` and :meth:`release`; everything else only reads.
    """

    def __init__(self, parts: Sequence[tuple[str, Any]], limits: Limits | None = None) -> None:
        if len({name for name, _ in parts}) != len(parts):
            raise ValueError(f"parts {[name for name, _ in parts]}: two have one name; name each once")
        self.names = tuple(name for name, _ in parts)
        self.linears = tuple(linear for _, linear in parts)
        self.limits = limits or Limits()
        self.weight: torch.Tensor | None = None
        self._shapes: tuple[torch.Size, ...] = ()
        self._sizes: tuple[int, ...] = ()  # in bytes
        self._former: torch.Tensor | None = None  # a fused weight that parts may still be views of

    # -- what is there -------------------------------------------------------------------------------------------------

    def refusal(self) -> str:
        """Why the parts cannot be fused as they are now; empty if they can. Says which part and what it is."""
        for name, linear in zip(self.names, self.linears, strict=True):
            why = linears.refusal(linear) or _unfit(linear.weight, self.limits)
            if why:
                return f"{name} {why}"
        weights = [linear.weight for linear in self.linears]
        first = weights[0]
        for name, weight in zip(self.names[1:], weights[1:], strict=True):
            for what, got, want in (
                ("dtype", weight.dtype, first.dtype),
                ("device", weight.device, first.device),
                ("K", weight.shape[1], first.shape[1]),
            ):
                if got != want:
                    return f"{name} has {what} {got}, {self.names[0]} has {want}"
        return self._tied(weights) or ("" if self._consecutive() else self._foreign(weights))

    def broken(self) -> str:
        """Why the fused weight is not in place now; empty if every part is a view of its rows.

        On the host alone: no synchronization, no allocation; about a microsecond for two parts.
        """
        fused = self.weight
        if fused is None:
            return "not fused"
        address, dtype, shapes, sizes = fused.data_ptr(), fused.dtype, self._shapes, self._sizes
        if not address:  # resized to nothing, as weights that are offloaded: every part would seem to be in place
            return "the fused weight has no memory"
        for place, linear in enumerate(self.linears):
            try:
                held = getattr(linear, "__dict__", {})  # nn.Module's own look-up takes half a microsecond
                registered = held.get("_parameters")
                if registered is None:
                    weight = linear.weight
                else:
                    weight = registered["weight"]
                    if registered.get("bias") is not None or held["_forward_hooks"] or held["_forward_pre_hooks"]:
                        return f"{self.names[place]} has a bias or hooks by now"
                if (
                    weight.data_ptr() == address  # an address is one device's: the fused weight is alive
                    and weight.shape == shapes[place]
                    and weight.dtype is dtype
                    and weight.is_contiguous()
                ):
                    address += sizes[place]
                    continue
            except (AttributeError, KeyError, RuntimeError):  # no tensor at all, or one without memory
                pass
            return f"{self.names[place]} is no longer a view of the fused weight"
        return ""

    def intact(self, name: str) -> bool:
        """Whether this one part still is a view of its rows."""
        fused = self.weight
        if fused is None:
            return False
        weight, rows = getattr(self.linears[self.names.index(name)], "weight", None), fused[self.rows(name)]
        return (
            isinstance(weight, torch.Tensor)
            and not _is_more(self.linears[self.names.index(name)])
            and _storage(weight) is not None
            and weight.data_ptr() == rows.data_ptr()
            and (weight.shape, weight.dtype, weight.device) == (rows.shape, rows.dtype, rows.device)
            and weight.is_contiguous()
        )

    def rows(self, name: str) -> slice:
        """The rows of a part in the fused weight, which are the columns of its results in a fused output."""
        place = self.names.index(name)
        start = sum(shape[0] for shape in self._shapes[:place])
        return slice(start, start + self._shapes[place][0])

    # -- changes -------------------------------------------------------------------------------------------------------

    def fuse(self) -> str:
        """Puts all parts into one weight; does nothing where they are there already.

        Returns:
            Empty on success. Otherwise why not, as :meth:`refusal`; then no fused weight is held, and no Parameter was
            touched.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        refuse_capture("fusing weights")
        why = self.refusal()
        if why:
            self.forget()
            return why
        if self.detect():
            _wait(self.weight)  # for a reload through the views
            return ""
        parts = [linear.weight for linear in self.linears]
        first = parts[0]
        counts = tuple(part.shape[0] for part in parts)
        with torch.inference_mode(False), torch.no_grad():
            fused = torch.empty((sum(counts), first.shape[1]), dtype=first.dtype, device=first.device)
            views = fused.split(counts)
            for view, part in zip(views, parts, strict=True):
                view.copy_(part)
            for view, part in zip(views, parts, strict=True):
                part.data = view
        self.weight, self._former = fused, None
        self._note(parts)
        _wait(fused)
        return ""

    def detect(self) -> bool:
        """Takes the parts for fused if they lie one behind the other in one storage, as after loading a pickled model
        or in memory that somebody else laid out. Copies nothing and writes nothing.

        Returns:
            Whether they are in place.
        """
        if not self.broken():
            return True
        if not self._consecutive():
            return False
        parts = [linear.weight for linear in self.linears]
        self._note(parts)
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        with torch.inference_mode(False), torch.no_grad():
            self.weight = parts[0].data.as_strided(shape, (shape[1], 1))
        self._former = None
        return True

    def release(self) -> None:
        """Gives every part that is still a view a storage of its own, and lets the fused weight go.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        refuse_capture("releasing a fused weight")
        former = self.weight if self.weight is not None else self._former  # a refused fuse() forgot it, its views stay
        ours = None if former is None else former.untyped_storage().data_ptr()
        views = [linear.weight for linear in self.linears if ours and _storage(getattr(linear, "weight", None)) == ours]
        with torch.inference_mode(False), torch.no_grad():
            for part in views:
                part.data = part.data.clone()
        self.forget()

    def forget(self) -> None:
        """Forgets the fused weight. Parts that are views of it stay so, and it is known as ours if they come back."""
        former = self.weight if self.weight is not None else self._former
        self.weight, self._former = None, None
        self._note([])
        if former is not None:
            storages = [_storage(getattr(linear, "weight", None)) for linear in self.linears]
            if former.untyped_storage().data_ptr() in storages:
                self._former = former

    def _note(self, parts: list[torch.Tensor]) -> None:
        self._shapes = tuple(part.shape for part in parts)
        self._sizes = tuple(part.nbytes for part in parts)

    # -- checks --------------------------------------------------------------------------------------------------------

    def _tied(self, weights: list[torch.Tensor]) -> str:
        """A tie between parts is somebody's wish; fusing would undo it."""
        spans = sorted(
            (weight.data_ptr(), weight.data_ptr() + _extent(weight), name)
            for weight, name in zip(weights, self.names, strict=True)
        )
        for (_, end, before), (start, _, name) in pairwise(spans):
            if start < end:
                return f"{before} and {name} share memory"
        return ""

    def _foreign(self, weights: list[torch.Tensor]) -> str:
        if self.limits.allow_foreign_views:
            return ""
        former = self.weight if self.weight is not None else self._former
        ours = None if former is None else former.untyped_storage().data_ptr()
        for weight, name in zip(weights, self.names, strict=True):
            storage = weight.untyped_storage()
            if storage.nbytes() != weight.numel() * weight.itemsize and storage.data_ptr() != ours:
                return f"{name} is a view of a larger storage that somebody else may hold; clone its .data to free it"
        return ""

    def _consecutive(self) -> bool:
        if any(linears.refusal(linear) for linear in self.linears):
            return False
        parts = [linear.weight for linear in self.linears]
        first, address = parts[0], parts[0].data_ptr()
        for part in parts:
            if (
                _unfit(part, self.limits)
                or (part.dtype, part.device, part.shape[1]) != (first.dtype, first.device, first.shape[1])
                or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
                or part.data_ptr() != address
                or not part.is_contiguous()
            ):
                return False
            address += part.numel() * part.itemsize
        return True


def _is_more(linear: Any) -> bool:
    """Whether a module that was a plain product has become more than that; the cheap part of what the hook looks at."""
    found = linear.__dict__
    if "_parameters" not in found:
        return getattr(linear, "bias", None) is not None
    biased = found["_parameters"].get("bias") is not None
    return biased or bool(found["_forward_hooks"] or found["_forward_pre_hooks"])


def _storage(weight: Any) -> int | None:
    """The address of a tensor's storage, or ``None``: no tensor, or one that wraps others or is sparse."""
    try:
        return int(weight.untyped_storage().data_ptr()) if isinstance(weight, torch.Tensor) else None
    except (RuntimeError, NotImplementedError):
        return None


def _extent(weight: torch.Tensor) -> int:
    """Bytes from the first to the last element, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    return (last + 1) * weight.itemsize


def _wait(fused: torch.Tensor | None) -> None:
    """A kernel that reads weights before its own wait must not overtake what writes them."""
    if fused is not None and fused.is_cuda:
        torch.cuda.current_stream(fused.device).synchronize()


def _unfit(weight: torch.Tensor, limits: Limits) -> str:
    """Why a single weight cannot be rows of a fused one."""
    if weight.is_meta:
        return "is on the meta device"
    if weight.layout is not torch.strided:
        return f"has a weight of layout {weight.layout}"
    if weight.numel() == 0:
        return "has an empty weight"
    if weight.dim() != 2:
        return f"has a weight of {weight.dim()} dimensions"
    wanted = limits.dtypes or _FLOATS
    if weight.dtype not in wanted:
        return f"has a weight of {weight.dtype}, not {' or '.join(str(dtype) for dtype in wanted)}"
    if weight.requires_grad:
        return "is being trained (requires_grad)"
    rows, k = weight.shape
    if k % limits.k_multiple:
        return f"has K = {k}, no multiple of {limits.k_multiple}"
    if rows % limits.row_multiple:
        return f"has {rows} rows, no multiple of {limits.row_multiple}"
    return ""
