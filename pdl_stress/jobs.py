"""What a campaign asks of a GPU: jobs and their answers, plain data that travels between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .chain import Chain
from .faults import Control, perturbation
from .results import ArmResult, ControlResult, EdgeResult

Changes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ArmJob:
    """Run one clean arm of a chain.

    Args:
        chain, fingerprint: its name, and what it must look like where the job runs.
        name: as deployed, delayed, serialized, back to back.
        changes: the perturbation (see :meth:`pdl_stress.chain.Chain.varied`).
        step, delay_us: the delayed step, for reports.
        rotated: rotate weight sets, so that weights come from memory if they are large enough.
        planted: a fault that the user asked to plant; then the arm is expected to fail.
    """

    chain: str
    fingerprint: str
    name: str
    replays: int
    changes: Changes = field(default_factory=dict)
    step: str | None = None
    delay_us: float | None = None
    rotated: bool = False
    serialized: bool = False
    back_to_back: bool = False
    planted: Control | None = None

    def variant(self, chain: Chain) -> Chain:
        return self.planted.apply(chain) if self.planted else chain.varied(self.changes)

    def describe(self) -> str:
        return f"arm {self.name}" + (f" ({self.step}, {self.delay_us:g} us)" if self.step else "")


@dataclass
class ArmAnswer:
    """The arm's result, the graph edges that were captured for it, and what the machine code of its kernels holds."""

    arm: ArmResult
    edges: list[EdgeResult]
    pool: int
    sass: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ExposureJob:
    """Stamp some replays of an arm: which edges overlapped, which data edges were exposed."""

    chain: str
    fingerprint: str
    name: str
    changes: Changes = field(default_factory=dict)
    back_to_back: bool = False

    def describe(self) -> str:
        return f"exposure, {self.name}"


@dataclass
class ExposureAnswer:
    """Shares per (source, target) and per (writer, reader, buffer); empty if an op of the chain has no stamps."""

    overlap: dict[tuple[str, str], float] = field(default_factory=dict)
    exposed: dict[tuple[str, str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class ControlJob:
    """Run one control, and its serialized twin if it kills."""

    chain: str
    fingerprint: str
    control: Control
    expected: str
    reason: str
    replays: int

    def describe(self) -> str:
        return f"control {self.control.name}"


@dataclass
class ControlAnswer:
    """The control's result, and per rebuilt kernel one line of evidence that its machine code holds the fault."""

    result: ControlResult
    sass: dict[str, str] = field(default_factory=dict)


Job = ArmJob | ExposureJob | ControlJob


def delayed_changes(chain: Chain, step: str, delay_us: float) -> dict[str, dict[str, Any]]:
    """The perturbation that exposes every data edge of writer ``step`` at once."""
    changes: dict[str, dict[str, Any]] = {step: {"trigger": "entry", "delay_us": delay_us}}
    for edge in chain.data_edges:
        if edge.writer == step:
            for name, fields in perturbation(edge, delay_us).items():
                if chain[name].op.rebuildable:  # another one keeps its trigger, and the edge may stay unexposed
                    changes.setdefault(name, dict(fields))
    return changes


def plan_arms(chain: Chain, replays: int, delays_us: tuple[float, ...]) -> list[ArmJob]:
    """The clean arms of a chain: as deployed (one weight set, and several in turn), serialized, back to back, and each
    step delayed in turn by every delay above zero. The last step is delayed back to back as well: only then does the
    next replay start while this one still runs."""
    base = (chain.name, chain.fingerprint)
    jobs = [
        ArmJob(*base, "as deployed", replays),
        ArmJob(*base, "as deployed, weights rotated", replays, rotated=True),
        ArmJob(*base, "serialized", replays, serialized=True),
        ArmJob(*base, "back to back", replays, back_to_back=True),
    ]
    last = chain.steps[-1]
    for step in chain.steps:
        for delay in delays_us:
            if delay > 0 and step.op.rebuildable:
                changes = delayed_changes(chain, step.name, delay)
                jobs.append(ArmJob(*base, "delayed", replays, changes, step.name, delay))
                if step is last:
                    name = "back to back, delayed"
                    jobs.append(ArmJob(*base, name, replays, changes, step.name, delay, back_to_back=True))
    return jobs
