"""What a campaign is asked to do, checked once for the command line and for Python, and the jobs that follow."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from . import model
from .chain import Chain
from .errors import UnsupportedVariant, UsageError
from .faults import (
    DELAYS_US,
    RELOADED,
    Control,
    expectations,
    is_wanted,
    one_wait_removed,
    plan_controls,
    plant,
    select_faults,
)
from .jobs import ArmJob, CensusJob, ControlJob, ExposureJob, Job, delayed_arms, plan_arms
from .results import NodeResult

REPLAYS = 20_000
"""Graded replays of a clean arm: an upper bound of 1.5e-4 on the mismatch probability."""

CONTROL_REPLAYS = 256
"""Replays of a control. At least 18 of them must be killed; a control that is caught at all is caught nearly always."""

EXPOSING_DELAY_US = 10.0
TIME_LIMIT_S = 60.0
MOST_DELAY_US = 1000.0


@dataclass(frozen=True)
class Plan:
    """What a campaign does with each chain.

    Args:
        replays: graded replays of each clean arm.
        control_replays: replays of each control.
        rules: rule set of the model, or its name.
        seed: of inputs, weights and schedules.
        faults: ``FAULT`` or ``FAULT@STEP`` whose controls run; ``None``: all; empty: none (no PASS is possible then).
        delays_us: windows between trigger and stores, microseconds.
        planted: ``FAULT@STEP`` to plant in the chain under test, or empty.
        time_limit: seconds without progress after which a run of one captured graph counts as hung.

    Raises:
        UsageError: a value of the wrong type or out of range; the text names it.
    """

    replays: int = REPLAYS
    control_replays: int = CONTROL_REPLAYS
    rules: model.RuleSet = model.DOCUMENTED
    seed: int = 0
    faults: tuple[str, ...] | None = None
    delays_us: tuple[float, ...] = DELAYS_US
    planted: str = ""
    time_limit: float = TIME_LIMIT_S

    def __post_init__(self) -> None:
        for name, low, high in (("replays", 1, 2**40), ("control_replays", 1, 2**32), ("seed", 0, 2**63 - 1)):
            object.__setattr__(self, name, _whole(name, getattr(self, name), low, high))
        if isinstance(self.rules, str):
            if self.rules not in model.RULE_SETS:
                raise UsageError(f"unknown rule set {self.rules!r}; expected one of {', '.join(model.RULE_SETS)}.")
            object.__setattr__(self, "rules", model.RULE_SETS[self.rules])
        if not isinstance(self.rules, model.RuleSet):
            raise UsageError(f"rules is {self.rules!r}; expected one of {', '.join(model.RULE_SETS)}.")
        if self.faults is not None:
            object.__setattr__(self, "faults", _names(self.faults))
            select_faults(self.faults)
        delays = {_real("delays_us", delay, 0.0, MOST_DELAY_US) for delay in _listed("delays_us", self.delays_us)}
        if not delays:
            raise UsageError("delays_us is empty; expected at least one window in microseconds.")
        object.__setattr__(self, "delays_us", tuple(sorted(delays)))
        object.__setattr__(self, "time_limit", _real("time_limit", self.time_limit, 0.001, 86_400.0))


def _whole(name: str, value: Any, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}; expected a whole number.") from None
    if not low <= number <= high:
        raise UsageError(f"{name} is {number}; expected {low} to {high}.")
    return number


def _real(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or not low <= value <= high:
        raise UsageError(f"{name}: {value!r}; expected a number from {low:g} to {high:g}.")
    return float(value)


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(name, str) for name in _listed("faults", value)):
        raise UsageError(f"faults is {value!r}; expected names such as ('F00@q_norm', 'F02'), or None.")
    return tuple(value)


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}; expected a tuple.") from None


def clean_jobs(chain: Chain, plan: Plan) -> list[Job]:
    """The census and the clean arms of a chain; of a planted chain, the arms that show the fault."""
    mark = chain.fingerprint
    if plan.planted:
        planted = plant(chain, plan.planted)
        return [
            ArmJob(chain.name, mark, f"planted {planted.name}", plan.replays, planted=planted),
            ArmJob(chain.name, mark, "planted, serialized", plan.replays, planted=planted, serialized=True),
        ]
    return [CensusJob(chain.name, mark), *plan_arms(chain, plan.replays, plan.delays_us)]


def exposure_jobs(chain: Chain, plan: Plan) -> list[Job]:
    """Jobs that show which edges overlapped and which data edges were exposed. If every kernel can be stamped they need
    no profiler."""
    if plan.planted:
        return []
    mark, profiled = chain.fingerprint, not all(step.op.rebuildable for step in chain.steps)
    jobs: list[Job] = [ExposureJob(chain.name, mark, "as deployed", profiled=profiled)]
    for step in chain.steps:
        arms = delayed_arms(chain, step, EXPOSING_DELAY_US)
        readers = {edge.reader for edge in chain.data_edges if edge.writer == step.name}
        if not readers:
            arms = arms[-1:]  # only what comes behind the last step in the next replay is of interest
        elif len(arms) > len(readers):
            arms = arms[1:]  # every reader has an arm of its own, and the common one exposes none of them
        for name, changes, back_to_back in arms:
            label = f"{name} ({step.name}, {EXPOSING_DELAY_US:g} us)"
            jobs.append(ExposureJob(chain.name, mark, label, changes, back_to_back=back_to_back, profiled=profiled))
    return jobs


def uncontrolled(chain: Chain, nodes: list[NodeResult]) -> dict[str, str]:
    """The steps that read another's output, cannot be rebuilt, and whose waits cannot be removed from their machine
    code either, with the reason."""
    found = {}
    for step in chain.steps:
        if step.op.rebuildable or not any(edge.reader == step.name for edge in chain.data_edges):
            continue
        kernels = [node for node in nodes if node.step == step.name and node.kind == "kernel"]
        early = [node for node in kernels if "programmatic" in node.incoming]
        missing = next((node for node in early if node.waits is None), None)
        if missing is not None:  # its waits would stay
            found[step.name] = missing.code
        elif any(node.waits for node in early):
            continue
        elif early:
            found[step.name] = f"the machine code of {early[0].name} ({early[0].code}) holds no wait"
        elif kernels:
            found[step.name] = f"{kernels[0].name} is not launched to overlap what comes before it"
        else:
            found[step.name] = "it launches no kernel"
    return found


def untested(chain: Chain, nodes: list[NodeResult]) -> list[str]:
    """What the census shows that no arm and no control of the chain could: each costs the PASS.

    A step that launches nothing; one that is said to be launched without the PDL attribute, and has it; a kernel that
    is launched to overlap and holds no wait, although its contract says that it waits (the model, and every stand-in
    that takes its place, believe the contract); several kernels of one step that overlap (what they hand to each other
    is no data edge of the chain). Behind the first kernel of a step without the attribute, others may overlap it if
    they hold a wait: cuBLAS launches the kernel that adds up a split K like that. All of them come behind the full
    edge; with the wait the last one's completion is that of all (R8).
    """
    found = []
    for step in chain.steps:
        mine = [node for node in nodes if node.step == step.name]
        kernels = [node for node in mine if node.kind == "kernel"]
        overlapping = [node for node in kernels if "programmatic" in node.incoming]
        if not kernels:
            found.append(f"{step.name} launches no kernel")
        if not step.pdl:
            found += _overlap_of_plain(step.name, mine, overlapping)
            continue
        for node in overlapping:
            if step.contract.wait.holds_completion and node.waits == 0:
                found.append(
                    f"{step.name}: the contract says that it waits ({step.contract.wait}), "
                    f"and the machine code of {node.name} ({node.code}) holds no wait"
                )
        if any(node in mine[1:] for node in overlapping):
            names = ", ".join(node.name or node.kind for node in mine)
            found.append(
                f"{step.name} launches several nodes that overlap ({names}): what they hand to each other is not under "
                "test; make each a step"
            )
    return found


def _overlap_of_plain(name: str, nodes: list[NodeResult], overlapping: list[NodeResult]) -> list[str]:
    found = []
    for node in overlapping:
        if node is nodes[0]:
            found.append(
                f"{name} is declared with pdl=False, and {node.name} is launched to overlap what comes before it; "
                "declare it with pdl=True, and with a contract that says how it waits"
            )
        elif not node.waits:
            what = "holds no wait" if node.waits == 0 else "was not read"
            found.append(
                f"{name}: {node.name} is launched to overlap the kernels before it in the same step, and its machine "
                f"code ({node.code}) {what}, so it may complete before they do"
            )
    return found


def control_jobs(chain: Chain, plan: Plan, nodes: list[NodeResult] | None = None) -> list[ControlJob]:
    """The controls of a chain, each with what the model expects of it; those that patch machine code last, and of these
    the ones that change nothing first: whatever state a library keeps, no broken kernel has spoilt it for them.

    Args:
        nodes: census of the chain's graph: which kernels' waits can be removed, and how many waits they have. ``None``:
            not known yet; then every control that may turn out to be possible.
    """
    if plan.planted:
        return []
    planned = plan_controls(chain, plan.faults, plan.delays_us)
    if nodes is not None:
        without = set(uncontrolled(chain, nodes))
        planned = [c for c in planned if not (c.patch(chain) and c.edge.reader in without)]
        planned += _single_waits(chain, plan, nodes, without)
    jobs = []
    for control, expected in expectations(chain, planned):
        if control.variant == RELOADED and expected.expected == "caught":
            continue  # the kernel as it is goes wrong under this perturbation: no twin of anything
        patch = control.patch(chain)
        jobs.append(
            ControlJob(
                chain.name, chain.fingerprint, control, expected.expected, expected.reason, plan.control_replays,
                "" if patch is None else str(patch),
            )
        )  # fmt: skip
    return sorted(jobs, key=lambda job: (bool(job.patched), job.patched and job.control.variant != RELOADED))


def _single_waits(chain: Chain, plan: Plan, nodes: list[NodeResult], without: set[str]) -> list[Control]:
    """Controls with one wait removed, of kernels that have several and cannot be rebuilt."""
    found = []
    for edge in chain.data_edges:
        count = sum(node.waits or 0 for node in nodes if node.step == edge.reader)
        fixed = not chain[edge.reader].op.rebuildable and edge.reader not in without
        if count < 2 or not fixed or not is_wanted(plan.faults, "F02", edge):
            continue
        for control in (one_wait_removed(edge, delay, site) for site in range(count) for delay in plan.delays_us):
            try:
                control.apply(chain)
            except UnsupportedVariant:
                continue
            found.append(control)
    return found
