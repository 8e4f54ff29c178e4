"""What a campaign is asked to do, checked once for the command line and for Python, and the jobs that follow."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from . import model
from .chain import Chain
from .errors import UsageError
from .faults import DELAYS_US, expectations, plan_controls, plant, select_faults
from .jobs import ArmJob, ControlJob, ExposureJob, Job, delayed_changes, plan_arms

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
    """The clean arms of a chain and their exposure; of a planted chain, the arms that show the fault."""
    mark = chain.fingerprint
    if plan.planted:
        planted = plant(chain, plan.planted)
        return [
            ArmJob(chain.name, mark, f"planted {planted.name}", plan.replays, planted=planted),
            ArmJob(chain.name, mark, "planted, serialized", plan.replays, planted=planted, serialized=True),
        ]
    jobs: list[Job] = [*plan_arms(chain, plan.replays, plan.delays_us), ExposureJob(chain.name, mark, "as deployed")]
    for step in chain.steps:
        if step.op.rebuildable:
            changes = delayed_changes(chain, step.name, EXPOSING_DELAY_US)
            last = step is chain.steps[-1]
            name = "back to back, delayed" if last else "delayed"
            label = f"{name} ({step.name}, {EXPOSING_DELAY_US:g} us)"
            jobs.append(ExposureJob(chain.name, mark, label, changes, back_to_back=last))
    return jobs


def control_jobs(chain: Chain, plan: Plan) -> list[Job]:
    """The controls of a chain, each with what the model expects of it."""
    if plan.planted:
        return []
    controls = expectations(chain, plan_controls(chain, plan.faults, plan.delays_us))
    return [
        ControlJob(chain.name, chain.fingerprint, control, expected.expected, expected.reason, plan.control_replays)
        for control, expected in controls
    ]
