"""The gate: every shipped chain must PASS, and every control must show what the rules say. INCONCLUSIVE fails.

``pytest tests/stress -m gpu --require-gpu --junitxml=report.xml``: one test per chain, per arm and per control, each
with its counts as JUnit properties. A chain's campaign runs once, in a child process, when its first test needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pdl_stress import Outcome, catalog
from pdl_stress.campaign import run_on_gpu
from pdl_stress.cuda.worker import Worker
from pdl_stress.faults import Control, plan_controls
from pdl_stress.jobs import ArmJob, plan_arms
from pdl_stress.plan import Plan
from pdl_stress.results import CaseResult

pytestmark = pytest.mark.gpu

PLAN = Plan()
CHAINS = list(catalog.SHIPPED)
ARMS = [(name, arm) for name in CHAINS for arm in plan_arms(catalog.load(name), PLAN.replays, PLAN.delays_us)]
CONTROLS = [(name, control) for name in CHAINS for control in plan_controls(catalog.load(name), None, PLAN.delays_us)]

Record = Callable[[str, object], None]


@pytest.fixture(scope="session")
def campaign() -> Iterator[Callable[[str], CaseResult]]:
    done: dict[str, CaseResult] = {}

    def case_of(name: str) -> CaseResult:
        if name not in done:
            with Worker(catalog.load, seed=PLAN.seed) as worker:
                (done[name],) = run_on_gpu([catalog.load(name)], PLAN, worker)
        return done[name]

    return case_of


@pytest.mark.parametrize("name", CHAINS)
def test_verdict(name: str, campaign: Callable[[str], CaseResult], record_property: Record) -> None:
    case = campaign(name)
    for key in ("replays", "mismatches", "replays_per_second"):
        record_property(key, getattr(case, key))
    assert case.verdict is Outcome.PASS, "\n".join(case.reasons)


def _arm_id(name: str, arm: ArmJob) -> str:
    return f"{name}-{arm.name}" + (f"-{arm.step}-{arm.delay_us:g}us" if arm.step else "")


@pytest.mark.parametrize(("name", "arm"), ARMS, ids=[_arm_id(*item) for item in ARMS])
def test_arm(name: str, arm: ArmJob, campaign: Callable[[str], CaseResult], record_property: Record) -> None:
    wanted = (arm.name, arm.step, arm.delay_us)
    (result,) = [a for a in campaign(name).arms if (a.name, a.step, a.delay_us) == wanted]
    record_property("replays", result.replays)
    record_property("upper_bound_95", result.upper_bound_95)
    assert result.mismatches == 0, result.mismatch
    assert result.replays >= PLAN.replays
    assert result.counters_agree


@pytest.mark.parametrize(("name", "control"), CONTROLS, ids=[f"{name}-{control.name}" for name, control in CONTROLS])
def test_control(name: str, control: Control, campaign: Callable[[str], CaseResult], record_property: Record) -> None:
    edge = control.edge
    wanted = (control.fault, control.variant, edge.writer, edge.reader, control.delay_us)
    (result,) = [c for c in campaign(name).controls if (c.fault, c.variant, c.writer, c.reader, c.delay_us) == wanted]
    for key in ("expected", "reason", "kills", "replays", "cause_checked"):
        record_property(key, getattr(result, key))
    # Unpromised outcomes are counted and listed, never judged.
    good = {"caught": ("caught",), "clean": ("clean",), "unpromised": ("seen", "not seen")}[result.expected]
    assert result.verdict in good, result
