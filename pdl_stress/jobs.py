"""What a campaign asks of a GPU: jobs and their answers, plain data that travels between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import model
from .chain import Chain, Step
from .errors import UnsupportedVariant
from .faults import Control, perturbation
from .results import ArmResult, ControlResult, EdgeResult, NodeResult

Changes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ArmJob:
    """Run one clean arm of a chain.

    Args:
        chain, fingerprint: its name, and what it must look like where the job runs.
        name: as deployed, delayed, early release, serialized, back to back, beside a kernel that ...
        changes: the perturbation (see :meth:`pdl_stress.chain.Chain.varied`).
        step, delay_us: the delayed step, for reports.
        rotated: rotate weight sets, so that weights come from memory if they are large enough.
        neighbour: one of :data:`NEIGHBOURS`: a kernel that runs beside the chain, on a parallel branch of the graph.
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
    neighbour: str = ""
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
class CensusJob:
    """Capture the chain as deployed and say what its graph consists of."""

    chain: str
    fingerprint: str

    def describe(self) -> str:
        return "census of the graph"


@dataclass
class CensusAnswer:
    """The nodes of one replay, in stream order."""

    nodes: list[NodeResult]


@dataclass(frozen=True)
class ExposureJob:
    """Watch some replays of an arm: which edges overlapped, which data edges were exposed.

    ``profiled``: by the profiler, since not all kernels of the chain have time stamps. A process that has done such a
    job may grade nothing any more: a profiler changes the timing of everything after it.
    """

    chain: str
    fingerprint: str
    name: str
    changes: Changes = field(default_factory=dict)
    back_to_back: bool = False
    profiled: bool = False

    def describe(self) -> str:
        return f"exposure, {self.name}"


@dataclass
class ExposureAnswer:
    """Shares per (source, target) and per (writer, reader, buffer), and how they were measured."""

    overlap: dict[tuple[str, str], float]
    exposed: dict[tuple[str, str, str], float]
    method: str


@dataclass(frozen=True)
class ControlJob:
    """Run one control, and its serialized twin if it kills. ``patched``: what is done to the reader's machine code."""

    chain: str
    fingerprint: str
    control: Control
    expected: str
    reason: str
    replays: int
    patched: str = ""

    def describe(self) -> str:
        return f"control {self.control.name}"


@dataclass
class ControlAnswer:
    """The control's result, and per rebuilt kernel one line of evidence that its machine code holds the fault."""

    result: ControlResult
    sass: dict[str, str] = field(default_factory=dict)


Job = CensusJob | ArmJob | ExposureJob | ControlJob


HOLDS, STREAMS = "holds SMs", "streams memory"
NEIGHBOURS = (HOLDS, STREAMS)
"""What a kernel beside the chain can do: keep half of the SMs from it, or keep the memory and the L2 busy."""


def delayed_variants(chain: Chain, step: Step, delay_us: float) -> list[tuple[str, Changes]]:
    """The perturbations that expose every data edge of writer ``step``, each with the name of its arm.

    One is enough if the steps between the writer and its readers can be told to trigger early. A stand-in for such a
    step would, however, not read what the writer wrote. So a reader behind steps that only a stand-in can hurry gets an
    arm of its own.
    """
    name = "delayed" if step.op.rebuildable else "early release"
    everywhere: dict[str, dict[str, Any]] = {step.name: {"trigger": "entry", "delay_us": delay_us}}
    apart: dict[str, Changes] = {}
    for edge in chain.data_edges:
        if edge.writer != step.name:
            continue
        changes = perturbation(edge, delay_us)
        if all(chain[between].op.rebuildable for between in edge.between):
            for between, fields in changes.items():
                everywhere.setdefault(between, dict(fields))
        else:
            apart[f"{name}, read by {edge.reader}"] = changes
    found = [(name, everywhere), *apart.items()]
    return [(label, changes) for label, changes in found if _is_sound(chain, changes)]


def _is_sound(chain: Chain, changes: Changes) -> bool:
    """False if some step can neither be rebuilt nor replaced, or if the chain relies on what is changed (such as a
    fence before a trigger): then it would be wrong under the perturbation, and rightly so. Its data edges stay
    unexposed, and that costs the PASS."""
    try:
        varied = chain.varied(changes)
    except UnsupportedVariant:
        return False
    return bool(model.find_races(chain, model.DOCUMENTED)) or not model.find_races(varied, model.DOCUMENTED)


def plan_arms(chain: Chain, replays: int, delays_us: tuple[float, ...]) -> list[ArmJob]:
    """The clean arms of a chain: as deployed (one weight set, and several in turn; beside each neighbour), serialized,
    back to back, and each step delayed in turn by every delay above zero; a step whose kernel cannot be delayed gives
    way to an early-release producer of its outputs. The last step is delayed back to back as well: only then does the
    next replay start while this one still runs."""
    base = (chain.name, chain.fingerprint)
    jobs = [
        ArmJob(*base, "as deployed", replays),
        ArmJob(*base, "as deployed, weights rotated", replays, rotated=True),
        ArmJob(*base, "serialized", replays, serialized=True),
        ArmJob(*base, "back to back", replays, back_to_back=True),
        *(ArmJob(*base, f"beside a kernel that {name}", replays, neighbour=name) for name in NEIGHBOURS),
    ]
    for step in chain.steps:
        for delay in delays_us:
            if delay > 0:
                for name, changes, back_to_back in delayed_arms(chain, step, delay):
                    jobs.append(ArmJob(*base, name, replays, changes, step.name, delay, back_to_back=back_to_back))
    return jobs


def delayed_arms(chain: Chain, step: Step, delay_us: float) -> list[tuple[str, Changes, bool]]:
    """``(name, changes, back to back)`` of the arms in which ``step`` is late."""
    variants = delayed_variants(chain, step, delay_us)
    arms = [(name, changes, False) for name, changes in variants]
    if step.name == chain.steps[-1].name and variants:
        name, changes = variants[0]
        arms.append((f"back to back, {name}", changes, True))
    return arms
