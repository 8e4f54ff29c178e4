"""Chain and Step: what runs, in what order, on which buffers.

A chain is a list of steps on one stream. It is a description: building one touches neither torch's GPU side nor a
driver, so the model can judge it anywhere. ``chain.input`` makes a buffer that a *source* step writes: a small kernel
that triggers at once and then writes the true data (an early-release producer), so that the first step's wait is under
test as well.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any

from .buffers import DTYPES, Buffer, Role, View, box_within, covered
from .contract import KernelContract, Trigger, Wait
from .errors import UnsupportedVariant, UsageError
from .op import Op

PRODUCER = "producer"
"""Name of the source step that writes the chain's inputs."""

LATE_WEIGHT = "late_weight"
"""Name of the source step that a control inserts to write an independent operand late."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Patch:
    """A change of a step's machine code, for kernels that cannot be rebuilt: their cubin is found, its waits are
    removed, and the result takes the kernel's place in the captured graph.

    Args:
        remove: indices of the wait sites to remove; ``None``: all of them; empty: the cubin is only loaded again.
    """

    remove: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.remove is None:
            return "all waits removed"
        return f"wait {', '.join(map(str, self.remove))} removed" if self.remove else "loaded again"


@dataclass(frozen=True, eq=False)
class Step:
    """One launch of an op.

    Args:
        operands: views under the contract's operand names.
        params: further keyword arguments of the op, such as ``eps``.
        pdl: whether it is launched with the PDL attribute.
        delay_us: microseconds that its storing threads pass between trigger and stores; ``None``: no delay point
            compiled in (as deployed).
        source: True for a step that writes true data which the harness holds (producer, late weights, stand-ins).
        patch: how its machine code is changed in the captured graph, if at all.
    """

    name: str
    op: Op
    operands: Mapping[str, View]
    params: Mapping[str, Any] = field(default_factory=dict)
    pdl: bool = True
    delay_us: float | None = None
    source: bool = False
    patch: Patch | None = None

    @property
    def contract(self) -> KernelContract:
        return self.op.contract

    def reads(self) -> Iterator[tuple[str, View]]:
        return ((name, self.operands[name]) for name in self.contract.reads)

    def writes(self) -> Iterator[tuple[str, View]]:
        return ((name, self.operands[name]) for name in self.contract.writes)

    def varied(self, fields: Mapping[str, Any]) -> Step:
        """The same step with another PDL behaviour.

        A kernel that can be rebuilt is rebuilt. Another one keeps its binary, and two things can be done about it: as a
        *writer* it gets a stand-in, an early-release producer that writes the true data of the step's outputs (for a
        changed trigger, fence or delay); as a *reader* its waits can be removed from its machine code (for the wait
        ``never``, or ``patch``).

        Args:
            fields: ``delay_us``, ``patch``, and fields of the contract.

        Raises:
            UnsupportedVariant: neither way leads there.
        """
        wanted = dict(fields)
        delay_us, patch = wanted.pop("delay_us", self.delay_us), wanted.pop("patch", None)
        if self.op.rebuildable:
            if patch is not None:
                raise UnsupportedVariant(f"{self.op.name} is rebuilt, not patched.")
            return replace(self, op=self.op.rebuilt(**wanted), delay_us=delay_us)
        if patch is None and not wanted and delay_us == self.delay_us:
            return self
        if patch is None and delay_us == self.delay_us and wanted == {"wait": Wait.NEVER}:
            patch, wanted = Patch(None), {}
        if patch is not None and not wanted and delay_us == self.delay_us:
            contract = self.contract.but(wait=Wait.NEVER) if patch.remove is None else self.contract
            return replace(self, op=replace(self.op, contract=contract), patch=patch)
        if patch is None and set(wanted) <= {"trigger", "fence"} and self.contract.writes:
            stand_in = replace(source_step(self.name, dict(self.writes())), pdl=self.pdl)
            return stand_in.varied({**wanted, "delay_us": delay_us})
        raise UnsupportedVariant(
            f"{self.op.name} cannot be rebuilt (wanted: {dict(fields)}). Of such a kernel only the waits can be "
            "removed, and only its trigger and its stores can be moved, by a stand-in that writes its outputs."
        )

    @property
    def ctas(self) -> int:
        """Number of CTAs. Raises UsageError if the op claims less than one."""
        count = self.op.ctas({name: view.shape for name, view in self.operands.items()})
        if count < 1:
            raise UsageError(f"step {self.name!r}: {self.op.name} says it runs {count} CTAs; expected at least one.")
        return count


@dataclass(frozen=True)
class DataEdge:
    """A dependency through memory: ``reader`` reads what ``writer`` wrote. ``between`` lists the steps in between."""

    writer: str
    reader: str
    buffer: str
    operand: str
    between: tuple[str, ...] = ()

    def __str__(self) -> str:
        skips = f" (skips {', '.join(self.between)})" if self.between else ""
        return f"{self.writer} -> {self.reader} through {self.buffer}{skips}"


SOURCE_CONTRACT = KernelContract(writes=("out",), wait=Wait.ALL, trigger=Trigger.ENTRY)


def _not_launched_here(**_: Any) -> None:
    raise NotImplementedError("a source step is launched by the harness, which holds the true data")


def source_step(name: str, views: Mapping[str, View]) -> Step:
    """An early-release producer of ``views``: triggers at entry, waits, delays, writes the true data."""
    contract = SOURCE_CONTRACT.but(writes=tuple(views))
    source = Op(
        "early-release source",
        contract,
        _not_launched_here,
        contract,
        waits=frozenset({Wait.ALL}),
        kernels=("pdl_stress_source",),
    )
    return Step(name, source, dict(views), source=True)


class Chain:
    """A named sequence of steps over named buffers.

    Example::

        chain = Chain("norm-gemm")
        hidden = chain.input("hidden", (1, 5120), "bfloat16")
        gain = chain.constant("gain", (5120,), "bfloat16")
        x = chain.buffer("x", (1, 5120), "bfloat16")
        chain.step("norm", my_norm, input=hidden, weight=gain, out=x)
    """

    def __init__(self, name: str, title: str = "") -> None:
        _check_name("chain", name)
        self.name = name
        self.title = title
        self.buffers: dict[str, Buffer] = {}
        self._steps: list[Step] = []

    # -- building ----------------------------------------------------------------------------------------------------

    def input(self, name: str, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """A buffer whose content is new in every replay."""
        return self._add(name, shape, dtype, Role.INPUT)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """A buffer that a step of the chain writes. It is poisoned before each replay and graded after it."""
        return self._add(name, shape, dtype, Role.INTERMEDIATE)

    def constant(self, name: str, shape: tuple[int, ...], dtype: Any, make: Callable[..., Any] | Any = None) -> Buffer:
        """A buffer written before the chain runs. ``make``: see :class:`Buffer`; default: normal, unit scale."""
        return self._add(name, shape, dtype, Role.CONSTANT, make)

    def step(
        self, name: str, op: Op, *, pdl: bool = True, params: Mapping[str, Any] | None = None, **operands: Any
    ) -> Step:
        """Appends a launch of ``op``; operands are buffers or views of this chain, under the contract's names.

        Raises:
            UsageError: missing or unknown operands, a foreign buffer, a read of a buffer that nothing has written, or a
                write to an input or a constant.
        """
        _check_name("step", name)
        if not isinstance(op, Op):
            raise UsageError(f"step {name!r}: {op!r} is no op; declare its contract with pdl_stress.op(...) first.")
        if name in (PRODUCER, LATE_WEIGHT):
            raise UsageError(f"step name {name!r} is reserved: a kernel that the harness puts into the chain has it.")
        if any(name == s.name for s in self._steps):
            raise UsageError(f"step {name!r}: the name is taken; step names of a chain are unique.")
        if set(operands) != set(op.contract.operands):
            raise UsageError(
                f"step {name!r}: operands {sorted(operands)} given; "
                f"the contract of {op.name} names {sorted(op.contract.operands)}."
            )
        views = {key: value.whole if isinstance(value, Buffer) else value for key, value in operands.items()}
        for key, view in views.items():
            if not isinstance(view, View) or self.buffers.get(view.buffer.name) is not view.buffer:
                raise UsageError(f"step {name!r}: operand {key!r} is no buffer or view of chain {self.name!r}.")
        step = Step(name, op, views, dict(params or {}), pdl)
        written = [view for earlier in self._steps for _, view in earlier.writes()]
        for key, view in step.reads():
            boxes = [w.box for w in written if w.buffer is view.buffer]
            if view.buffer.role is Role.INTERMEDIATE and not covered(view.box, boxes):
                gap = "not all of which earlier steps have written" if boxes else "which no earlier step has written"
                raise UsageError(f"step {name!r}: operand {key!r} reads {view}, {gap}.")
        for key, view in step.writes():
            if view.buffer.role is not Role.INTERMEDIATE:
                raise UsageError(f"step {name!r}: operand {key!r} writes {view}, which is of role {view.buffer.role}.")
        self._steps.append(step)
        return step

    def _add(self, name: str, shape: tuple[int, ...], dtype: Any, role: Role, make: Any = None) -> Buffer:
        _check_name("buffer", name)
        if name in self.buffers:
            raise UsageError(f"buffer {name!r} exists already in chain {self.name!r}.")
        try:
            shape = tuple(operator.index(size) for size in shape)
        except TypeError:
            raise UsageError(f"buffer {name!r}: shape {shape!r}; expected a tuple of whole numbers.") from None
        if not shape or min(shape) < 1:
            raise UsageError(f"buffer {name!r}: shape {shape}; expected at least one element.")
        word = str(dtype).removeprefix("torch.")
        if word not in DTYPES:
            raise UsageError(f"buffer {name!r}: dtype {dtype!r}; expected one of {', '.join(DTYPES)}.")
        self.buffers[name] = Buffer(name, shape, word, role, make)
        return self.buffers[name]

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> list[Buffer]:
        return [buffer for buffer in self.buffers.values() if buffer.role is Role.INPUT]

    @property
    def constants(self) -> list[Buffer]:
        return [buffer for buffer in self.buffers.values() if buffer.role is Role.CONSTANT]

    @property
    def graded(self) -> list[Buffer]:
        """Inputs, intermediates and outputs, in the order in which the chain fills them."""
        return [buffer for buffer in self.buffers.values() if buffer.role is not Role.CONSTANT]

    @property
    def steps(self) -> list[Step]:
        """All steps in stream order, the producer of the inputs first."""
        if self._steps and self._steps[0].name == PRODUCER:
            return list(self._steps)
        producer = [source_step(PRODUCER, {b.name: b.whole for b in self.inputs})] if self.inputs else []
        return [*producer, *self._steps]

    def __getitem__(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        raise UsageError(f"chain {self.name!r} has no step {name!r}; its steps are {[s.name for s in self.steps]}.")

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Graph edges under test: each step that is launched with the PDL attribute, behind its predecessor in the
        stream. The edge to one that is not is full: nothing overlaps there."""
        return [(before.name, step.name) for before, step in pairwise(self.steps) if step.pdl]

    @property
    def data_edges(self) -> list[DataEdge]:
        """Every writer -> reader pair of the chain that PDL can break, in reader order.

        Not behind a full edge: a step without the PDL attribute starts when all before it is complete, and what comes
        behind it cannot start before it.
        """
        steps = self.steps
        found: list[DataEdge] = []
        for index, reader in enumerate(steps):
            for operand, view in reader.reads():
                for back in range(index - 1, -1, -1):
                    if not steps[back + 1].pdl:
                        break
                    writes = [w for _, w in steps[back].writes() if w.overlaps(view)]
                    if writes:
                        between = tuple(s.name for s in steps[back + 1 : index])
                        found.append(DataEdge(steps[back].name, reader.name, view.buffer.name, operand, between))
                    if any(box_within(view.box, w.box) for w in writes):
                        break
        return found

    @property
    def reuses(self) -> list[str]:
        """Buffers that a later step writes although an earlier one reads or wrote them (WAR and WAW hazards), in words.

        A step that itself reads what the earlier one wrote is ordered by that data edge, and not listed.
        """
        steps, found = self.steps, []
        for index, later in enumerate(steps):
            for _, written in later.writes():
                for earlier in steps[:index]:
                    if any(view.overlaps(written) for _, view in earlier.reads()):
                        found.append(f"{later.name} writes {written}, which {earlier.name} reads")
                        continue
                    before = [view for _, view in earlier.writes() if view.overlaps(written)]
                    if any(not any(read.overlaps(view) for _, read in later.reads()) for view in before):
                        found.append(f"{later.name} writes {written}, which {earlier.name} wrote")
        return found

    @property
    def fingerprint(self) -> str:
        """Tells this chain from another one of the same name: steps, contracts, parameters, views, shapes, dtypes.

        Addresses of objects do not count: they differ from process to process.
        """
        steps = [
            (s.name, s.op.name, s.op.kernels, str(s.contract), sorted(s.params.items()), s.pdl, s.delay_us,
             sorted((name, str(view)) for name, view in s.operands.items()))
            for s in self.steps
        ]  # fmt: skip
        buffers = [(b.name, b.shape, b.dtype, str(b.role)) for b in self.buffers.values()]
        text = _ADDRESS.sub("", repr((self.name, steps, buffers)))
        return sha256(text.encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raises UsageError unless the chain can be run: it has an input, a step, every buffer is used, every step has
        a CTA."""
        if not self._steps or not self.inputs:
            raise UsageError(f"chain {self.name!r}: it needs at least one input and one step.")
        # What the producer alone writes is used by nothing: such a chain has no data edge, and nothing would be tested.
        used = {view.buffer.name for step in self.steps if not step.source for view in step.operands.values()}
        if unused := set(self.buffers) - used:
            raise UsageError(f"chain {self.name!r}: no step uses {sorted(unused)}.")
        for step in self.steps:
            _ = step.ctas

    # -- derived chains ----------------------------------------------------------------------------------------------

    def varied(self, changes: Mapping[str, Mapping[str, Any]], insert: tuple[str, Step] | None = None) -> Chain:
        """The same chain over the same buffers with some steps changed.

        Args:
            changes: per step name: fields of its contract (``wait``, ``trigger``, ``fence``, ``independent``),
                ``delay_us`` and ``patch``; see :meth:`Step.varied`.
            insert: ``(before, step)``: one more step, before the one named.

        Raises:
            UnsupportedVariant: an op cannot be rebuilt that way.
            UsageError: no such step.
        """
        for name in changes:
            _ = self[name]
        other = Chain(self.name, self.title)
        other.buffers = self.buffers
        for step in self.steps:
            if insert and insert[0] == step.name:
                other._steps.append(insert[1])
            other._steps.append(step.varied(changes.get(step.name, {})))
            if other._steps[-1].source and not step.source:
                self._check_stand_in(step)
        return other

    def _check_stand_in(self, step: Step) -> None:
        """A stand-in writes what its step's outputs hold at the end of the chain; if a later step changes them, that is
        not what the step wrote."""
        later = self.steps[[s.name for s in self.steps].index(step.name) + 1 :]
        for after in later:
            for _, changed in after.writes():
                if any(changed.overlaps(view) for _, view in step.writes()):
                    raise UnsupportedVariant(
                        f"{step.op.name} cannot be rebuilt, and no stand-in can take the place of {step.name!r}: "
                        f"{after.name!r} changes {changed} behind it, so what {step.name!r} writes is not kept."
                    )

    def modelled(self) -> Chain:
        """The same chain with every op rebuildable: the model varies contracts, and needs no kernels that follow."""
        other = Chain(self.name, self.title)
        other.buffers = self.buffers
        other._steps = [replace(step, op=replace(step.op, waits=frozenset(Wait))) for step in self.steps]
        return other


def _check_name(what: str, name: str) -> None:
    if not _NAME.match(str(name)):
        raise UsageError(f"{what} name {name!r}: expected a letter, then letters, digits, '_', '-' or '.'.")
