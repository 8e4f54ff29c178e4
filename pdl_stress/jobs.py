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
        chain: its name.
        name: as deployed, delayed, serialized, back to back.
        changes: the perturbation (see :meth:`pdl_stress.chain.Chain.varied`).
        step, delay_us: the delayed step, for reports.
        planted: a fault that the user asked to plant; then the arm is expected to fail.
    """

    chain: str
    name: str
    replays: int
    changes: Changes = field(default_factory=dict)
    step: str | None = None
    delay_us: float | None = None
    cold: bool = False
    serialized: bool = False
    back_to_back: bool = False
    planted: Control | None = None

    def variant(self, chain: Chain) -> Chain:
        return self.planted.apply(chain) if self.planted else chain.varied(self.changes)


@dataclass
class ArmAnswer:
    """The arm's result, and the graph edges that were captured for it."""

    arm: ArmResult
    edges: list[EdgeResult]
    pool: int


@dataclass(frozen=True)
class ExposureJob:
    """Stamp some replays of an arm: which edges overlapped, which data edges were exposed."""

    chain: str
    name: str
    changes: Changes = field(default_factory=dict)


@dataclass
class ExposureAnswer:
    """Shares per (source, target) and per (writer, reader, buffer); empty if an op of the chain has no stamps."""

    overlap: dict[tuple[str, str], float] = field(default_factory=dict)
    exposed: dict[tuple[str, str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class ControlJob:
    """Run one control, and its serialized twin if it kills."""

    chain: str
    control: Control
    expected: str
    reason: str
    replays: int


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
    """The clean arms of a chain: as deployed (weights in the L2, and not), serialized, back to back, and each step
    delayed in turn by every delay above zero."""
    jobs = [
        ArmJob(chain.name, "as deployed", replays),
        ArmJob(chain.name, "as deployed, cold weights", replays, cold=True),
        ArmJob(chain.name, "serialized", replays, serialized=True),
        ArmJob(chain.name, "back to back", replays, back_to_back=True),
    ]
    for step in chain.steps:
        for delay in delays_us:
            if delay > 0 and step.op.rebuildable:
                changes = delayed_changes(chain, step.name, delay)
                jobs.append(ArmJob(chain.name, "delayed", replays, changes, step.name, delay))
    return jobs
