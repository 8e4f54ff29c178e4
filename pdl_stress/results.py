"""What a run found, as plain data. ``report`` writes it; ``verdict`` judges it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .outcome import Outcome

SCHEMA = 1


@dataclass
class Mismatch:
    """Where the first bad replay of an arm went wrong.

    Args:
        writer, reader, buffer: the data edge that raced.
        wrong_buffer, element, got, expected: first wrong element, in the order in which the chain fills its buffers.
        held: what the reader's operand held.
        cured_by: graph edges whose serialization alone removes the mismatch.
        also_serialized: it mismatches with full edges too, so it is not PDL's.
    """

    writer: str
    reader: str
    buffer: str
    wrong_buffer: str
    element: list[int]
    got: str
    expected: str
    held: str
    replay: int
    cured_by: list[str]
    also_serialized: bool
    order: str = "read"
    """``read``: the reader read before the writer wrote. ``overwritten``: ``writer`` wrote before ``reader`` had read
    what was there. ``written twice``: ``reader`` wrote before ``writer``, which came first, had written."""

    def __str__(self) -> str:
        where = f"{self.wrong_buffer}{self.element} is {self.got}, expected {self.expected}"
        if self.order == "overwritten" and not self.also_serialized:
            return (
                f"{self.writer} wrote {self.buffer} before its wait, while {self.reader} could still read it; {where}."
            )
        if self.order == "written twice" and not self.also_serialized:
            return (
                f"{self.reader} wrote {self.buffer} before its wait, while {self.writer}, which comes first, could "
                f"still write it; {where}."
            )
        if self.also_serialized:
            return f"{where}; it differs with full edges too: not a PDL ordering fault."
        cure = ", ".join(self.cured_by) or "no single graph edge"
        return (
            f"{self.reader} read {self.buffer} before {self.writer} had written it (it held {self.held}); {where}; "
            f"serializing {cure} removes it."
        )


@dataclass
class ArmResult:
    """One clean arm. ``step`` is the delayed step, if any; ``upper_bound_95`` is of the mismatch probability."""

    name: str
    replays: int
    mismatches: int
    upper_bound_95: float | None
    delay_us: float | None = None
    step: str | None = None
    seconds: float = 0.0
    counters_agree: bool = True
    mismatch: Mismatch | None = None
    note: str = ""
    """What the arm really was, such as how large the rotated weights are; or why a mismatch could not be explained."""


@dataclass
class ControlResult:
    """One control. ``kills`` are bad replays of ``replays``; on the model both are zero and ``verdict`` says all.

    Args:
        expected: ``caught``, ``clean`` or ``unpromised``, decided by the model before the run; ``reason`` says why.
        patched: what was done to the reader's machine code, if anything.
        cause_checked: the same binaries with full edges were bitwise clean. ``None``: nothing to check.
        verdict: ``caught``, ``missed``, ``clean``, ``dirty``, ``seen``, ``not seen``, ``refuted``, ``ordered``,
            ``allowed`` or ``error``.
    """

    fault: str
    variant: str
    step: str
    writer: str
    reader: str
    buffer: str
    delay_us: float
    expected: str
    reason: str
    replays: int = 0
    kills: int = 0
    cause_checked: bool | None = None
    verdict: str = ""
    note: str = ""
    patched: str = ""


@dataclass
class EdgeResult:
    """A graph edge under test.

    ``overlap``: share of sampled replays, as deployed, whose secondary started before its primary ended.
    ``overlapped_in``: the arms in which that was seen at all.
    """

    source: str
    target: str
    kind: str
    overlap: float | None = None
    overlapped_in: list[str] = field(default_factory=list)


@dataclass
class NodeResult:
    """One node of a captured graph, as the census found it.

    Args:
        step: the step of the chain that it belongs to; in a graph that is no chain, the child graph that it lies in.
        kind: ``kernel``, ``memset``, ``memcpy``, ``host``, ``child graph``, ...
        name: kernels: the demangled name; ``symbol`` is the mangled one.
        grid, block: CTAs and threads; ``shared_bytes``: dynamic shared memory.
        attributes: further properties of the launch, such as ``cluster 2x1x1`` or ``cooperative``.
        incoming: kinds of its incoming edges, ``programmatic`` or ``full``. That is what a capture makes of the PDL
            attribute (R9); the node itself does not carry it.
        waits, triggers: PDL instructions in its machine code; ``None``: no machine code was found.
        code: where the machine code was found, or why not.
    """

    kind: str
    name: str = ""
    symbol: str = ""
    step: str = ""
    grid: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    shared_bytes: int = 0
    attributes: list[str] = field(default_factory=list)
    incoming: list[str] = field(default_factory=list)
    waits: int | None = None
    triggers: int | None = None
    code: str = ""


@dataclass
class DataEdgeResult:
    """A data edge, and the arms in which the reader was seen to run before the writer's last store."""

    writer: str
    reader: str
    buffer: str
    exposed_by: list[str] = field(default_factory=list)


@dataclass
class OperandResult:
    """What was measured of one buffer of a kernel.

    Args:
        access: ``read`` or ``written``.
        measured: ``after the wait``, ``before the wait``, or why it was not measured.
        writer: of a read buffer: who wrote it; ``lag_us``: of a written one: how long after a dependent could start it
            was still being written, at most, as seen.
        declared: what the declared contract says of it, if there is one: ``dependent`` or ``independent``.
    """

    buffer: str
    access: str
    measured: str
    writer: str = ""
    lag_us: float | None = None
    declared: str = ""


@dataclass
class ContractResult:
    """The measured contract of one kernel, which may be undeclared: what it touches, and when."""

    step: str
    operands: list[OperandResult] = field(default_factory=list)
    modelled: str = ""
    """What the rules say of its orders: ``ordered``, or which of them nothing promises."""
    audited: str = ""
    """What the static audit of its machine code says."""
    waits: int | None = None
    triggers: int | None = None


@dataclass
class CaseResult:
    """One chain, or one callable that was checked."""

    chain: str
    ops: str
    kernels: list[str]
    machine: str
    verdict: Outcome = Outcome.INCONCLUSIVE
    reasons: list[str] = field(default_factory=list)
    arms: list[ArmResult] = field(default_factory=list)
    replays_per_second: float | None = None
    window_us: float | None = None
    """The power of the run: from this window between trigger and stores on, every kind of broken twin was caught often
    enough to be caught again with 95 % probability. What a PASS is worth. ``None``: no window was that telling."""
    pool: int | None = None
    nodes: list[NodeResult] = field(default_factory=list)
    """Census of the graph as deployed: the nodes of one replay."""
    uncontrolled: dict[str, str] = field(default_factory=dict)
    """Steps whose waits cannot be taken away, with the reason: no control of theirs is possible."""
    untested: list[str] = field(default_factory=list)
    """What the census shows that no arm and no control could: reasons against a PASS."""
    edges: list[EdgeResult] = field(default_factory=list)
    data_edges: list[DataEdgeResult] = field(default_factory=list)
    controls: list[ControlResult] = field(default_factory=list)
    contracts: list[ContractResult] = field(default_factory=list)
    """Measured contracts of a callable's kernels."""
    model: str = ""
    timeline: list[str] = field(default_factory=list)
    rules: str = "documented"
    faults: list[str] | None = None
    """The controls that were asked for; ``None``: all."""
    exposure: str = ""
    """How overlap and exposure were measured, or why they could not be."""
    reuses: list[str] = field(default_factory=list)
    """Buffers that a later step writes again: no control covers those orders yet, so no PASS is possible."""
    planned: tuple[int, int] = (0, 0)
    """Arms and controls that the campaign set out to run."""
    errors: list[str] = field(default_factory=list)
    blockers: list[str] = field(default_factory=list)
    """What made a verdict impossible before anything ran, such as ``CUDA_LAUNCH_BLOCKING=1``."""
    planted: str = ""
    requested_replays: int = 0
    sass: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def replays(self) -> int:
        """Sum over the clean arms."""
        return sum(arm.replays for arm in self.arms)

    @property
    def mismatches(self) -> int:
        """Sum over the clean arms."""
        return sum(arm.mismatches for arm in self.arms)


@dataclass
class RunResult:
    """A whole run."""

    verdict: Outcome
    command: str
    started: str
    seconds: float
    environment: dict[str, Any]
    cases: list[CaseResult]
    errors: list[str] = field(default_factory=list)
