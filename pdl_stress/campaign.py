"""A campaign: chains x arms x controls, on the model or on a GPU, and a verdict for each chain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from . import model
from .chain import Chain
from .errors import PdlStressError
from .faults import ALL_DELAYS_US, DELAYS_US, Control, expectations, plan_controls, plant
from .jobs import (
    ArmAnswer,
    ArmJob,
    ControlAnswer,
    ControlJob,
    ExposureAnswer,
    ExposureJob,
    Job,
    delayed_changes,
    plan_arms,
)
from .results import ArmResult, CaseResult, ControlResult, DataEdgeResult, EdgeResult
from .statistics import reproducibility
from .verdict import judge_hardware, judge_model

__all__ = ["ALL_DELAYS_US", "DELAYS_US", "Executes", "Plan", "run_on_gpu", "run_on_model"]

CONTROL_REPLAYS = 256
"""Replays of a control. At least 18 of them must be killed; a control that is caught at all is caught nearly always."""

EXPOSING_DELAY_US = 10.0

MOST_FAILURES = 2
"""Controls of a case that may hang or fault before the rest of them is given up."""


@dataclass(frozen=True)
class Plan:
    """What a campaign does with each chain.

    Args:
        replays: graded replays of each clean arm.
        faults: ids of the faults whose controls run; ``None``: all; empty: none (no PASS is possible then).
        delays_us: windows between trigger and stores.
        planted: ``FAULT@STEP`` to plant in the chain under test, or empty.
    """

    replays: int = 20_000
    control_replays: int = CONTROL_REPLAYS
    rules: model.RuleSet = model.DOCUMENTED
    seed: int = 0
    faults: tuple[str, ...] | None = None
    delays_us: tuple[float, ...] = DELAYS_US
    planted: str = ""
    ops: str = "native"


class Executes(Protocol):
    """Carries out jobs: :class:`pdl_stress.cuda.executor.Executor` here, ``Worker`` in a child process."""

    def execute(self, job: Job) -> Any: ...


Progress = Callable[[str, int, int], None]
"""``progress(text, done, total)``, in jobs."""


def _silent(text: str, done: int, total: int) -> None:
    pass


def new_case(chain: Chain, plan: Plan, machine: str) -> CaseResult:
    """A case with what the model says of the chain: its judgement, and the data edges to cover."""
    case = CaseResult(chain.name, plan.ops, _kernels(chain), machine, requested_replays=plan.replays)
    control = plant(chain, plan.planted) if plan.planted else None
    case.planted = control.name if control else ""
    tested = control.apply(chain) if control else chain
    case.data_edges = [DataEdgeResult(e.writer, e.reader, e.buffer) for e in tested.data_edges]
    _judge_by_model(case, tested, plan, control)
    return case


def _judge_by_model(case: CaseResult, chain: Chain, plan: Plan, control: Control | None) -> None:
    if control:
        found = model.explain(chain, control.edge, plan.rules)
        if found:
            case.model = f"{found.reader} may read {found.buffer} before {found.writer} writes it"
            case.timeline = list(found.timeline)
            return
    replays = (1, 2)  # alone, and back to back with the next one
    judgements = [model.judge(chain, plan.rules, replays=n, seed=plan.seed) for n in replays]
    bad = next((j for j in judgements if j.counterexample), None)
    if bad is None or bad.counterexample is None:
        schedules = sum(j.schedules for j in judgements)
        case.model = f"ordered under «{plan.rules.name}»; {schedules} random schedules played, none contradicts it"
        if plan.rules != model.DOCUMENTED and not model.judge(chain, model.DOCUMENTED, seed=plan.seed).ordered:
            case.model += "; NOT ordered by the documented rules"
        return
    example = bad.counterexample
    case.model = (
        f"{example.kind}: {example.reader} may overtake {example.writer} on {example.buffer} under «{plan.rules.name}»"
    )
    if all(model.judge(chain, model.OBSERVED_SM90, replays=n, seed=plan.seed).ordered for n in replays):
        case.model += f"; ordered only under «{model.OBSERVED_SM90.name}»"
    case.timeline = list(example.timeline)


def _kernels(chain: Chain) -> list[str]:
    return list(dict.fromkeys(name for step in chain.steps for name in step.op.kernels))


# -- on a CPU ----------------------------------------------------------------------------------------------------------


def run_on_model(chains: Iterable[Chain], plan: Plan, progress: Progress = _silent) -> list[CaseResult]:
    """Judges chains and their controls from the contracts alone: no kernel runs, so no rates and no bounds."""
    cases = []
    chains = [chain.modelled() for chain in chains]
    for index, chain in enumerate(chains):
        progress(f"{chain.name}: model", index, len(chains))
        started = time.monotonic()
        case = new_case(chain, plan, "model")
        if not plan.planted:
            # Time does not exist on the model: one window stands for all.
            controls = plan_controls(chain, plan.faults, (max(plan.delays_us),))
            case.controls = [_model_control(chain, control) for control in controls]
        case.verdict, case.reasons = judge_model(case)
        case.seconds = time.monotonic() - started
        cases.append(case)
    progress("done", len(chains), len(chains))
    return cases


def _model_control(chain: Chain, control: Control) -> ControlResult:
    """A control on the model: must-catch ones have to be refuted by a schedule that really shows the stale read."""
    expectation = control.expectation(chain)
    result = _control_result(control, expectation)
    broken = control.apply(chain)
    if expectation.expected == "caught":
        result.verdict = "refuted" if model.explain(broken, control.edge, model.OBSERVED_SM90) else "missed"
    elif expectation.expected == "clean":
        result.verdict = "ordered" if model.explain(broken, control.edge, model.DOCUMENTED) is None else "dirty"
    else:
        result.verdict = "allowed"
    return result


def _control_result(control: Control, expectation: model.Expectation) -> ControlResult:
    edge = control.edge
    return ControlResult(
        control.fault, control.variant, edge.reader, edge.writer, edge.reader, edge.buffer, control.delay_us,
        expectation.expected, expectation.reason,
    )  # fmt: skip


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def run_on_gpu(
    chains: Iterable[Chain],
    plan: Plan,
    executor: Executes,
    progress: Progress = _silent,
    keep: Callable[[list[CaseResult]], None] = lambda cases: None,
) -> list[CaseResult]:
    """Runs all clean arms of all chains, then all controls: a broken kernel must not come before a clean arm.

    ``keep`` is called with all cases after each phase of a case, so that nothing finished is lost. A job that fails is
    an error of its case; the other cases go on.
    """
    from .cuda.device import verdict_blockers

    chains = list(chains)
    cases = [new_case(chain, plan, "cuda") for chain in chains]
    blockers = [f"{finding.name}: {finding.value}. {finding.advice}" for finding in verdict_blockers()]
    if blockers:
        for case in cases:
            case.blockers = blockers
            case.verdict, case.reasons = judge_hardware(case)
        return cases
    work = [
        (case, _clean_jobs(chain, plan), _control_jobs(chain, plan)) for case, chain in zip(cases, chains, strict=True)
    ]
    total = sum(len(clean) + len(controls) for _, clean, controls in work)
    done = 0
    for phase in ("arms", "controls"):
        for case, clean, controls in work:
            started = time.monotonic()
            jobs = clean if phase == "arms" else controls

            def tell(text: str, index: int, start: int = done) -> None:
                progress(text, start + index, total)

            _run_jobs(case, jobs, executor, tell)
            done += len(jobs)
            case.seconds += time.monotonic() - started
            case.window_us = power_window(case.controls)
            case.verdict, case.reasons = judge_hardware(case)
            keep(cases)
    progress("done", total, total)
    return cases


def _run_jobs(case: CaseResult, jobs: list[Job], executor: Executes, tell: Callable[[str, int], None]) -> None:
    """Runs one phase of a case. It ends early once the case is an ERROR beyond doubt: a kernel that hangs would hang in
    every job, for minutes each."""
    failures = 0
    for index, job in enumerate(jobs):
        if case.errors or failures > MOST_FAILURES:
            case.errors.append(f"{len(jobs) - index} jobs not run after that, from «{_describe(job)}» on")
            return
        tell(f"{case.chain}: {_describe(job)}", index)
        try:
            _take(case, job, executor.execute(job))
        except Exception as error:  # an op of the chain may raise anything; it costs its case, not the others
            _take_error(case, job, error)
            failures += 1


def _clean_jobs(chain: Chain, plan: Plan) -> list[Job]:
    if plan.planted:
        planted = plant(chain, plan.planted)
        return [
            ArmJob(chain.name, f"planted {planted.name}", plan.replays, planted=planted),
            ArmJob(chain.name, "planted, serialized", plan.replays, planted=planted, serialized=True),
        ]
    jobs: list[Job] = [*plan_arms(chain, plan.replays, plan.delays_us), ExposureJob(chain.name, "as deployed")]
    for step in chain.steps[:-1]:
        if step.op.rebuildable:
            changes = delayed_changes(chain, step.name, EXPOSING_DELAY_US)
            jobs.append(ExposureJob(chain.name, f"delayed ({step.name}, {EXPOSING_DELAY_US:g} us)", changes))
    return jobs


def _control_jobs(chain: Chain, plan: Plan) -> list[Job]:
    jobs: list[Job] = []
    if not plan.planted:
        for control, expectation in expectations(chain, plan_controls(chain, plan.faults, plan.delays_us)):
            jobs.append(ControlJob(chain.name, control, expectation.expected, expectation.reason, plan.control_replays))
    return jobs


def _describe(job: Job) -> str:
    if isinstance(job, ControlJob):
        return f"control {job.control.name}"
    if isinstance(job, ExposureJob):
        return f"exposure, {job.name}"
    return f"arm {job.name}" + (f" ({job.step}, {job.delay_us:g} us)" if job.step else "")


def _take(case: CaseResult, job: Job, answer: Any) -> None:
    if isinstance(answer, ArmAnswer) and isinstance(job, ArmJob):
        _take_arm(case, job, answer)
    elif isinstance(answer, ExposureAnswer) and isinstance(job, ExposureJob):
        _take_exposure(case, job.name, answer)
    elif isinstance(answer, ControlAnswer):
        case.controls.append(answer.result)
        case.sass.update(answer.sass)


def _take_arm(case: CaseResult, job: ArmJob, answer: ArmAnswer) -> None:
    case.arms.append(answer.arm)
    case.pool = answer.pool
    if job.serialized:
        if any(edge.kind == "programmatic" for edge in answer.edges):
            case.errors.append("the serialized arm still has programmatic edges")
        return
    if job.name == "as deployed" and answer.arm.seconds > 0:
        case.replays_per_second = answer.arm.replays / answer.arm.seconds
    known = {(edge.source, edge.target): edge for edge in case.edges}
    for edge in answer.edges:
        here = known.get((edge.source, edge.target))
        if here is None:
            case.edges.append(EdgeResult(edge.source, edge.target, edge.kind))
        elif here.kind != edge.kind:
            here.kind = f"{here.kind}/{edge.kind}"


def _take_exposure(case: CaseResult, arm: str, answer: ExposureAnswer) -> None:
    for edge in case.edges:
        share = answer.overlap.get((edge.source, edge.target))
        if share is not None:
            if arm == "as deployed":
                edge.overlap = share
            if share > 0:
                edge.overlapped_in.append(arm)
    for data_edge in case.data_edges:
        if answer.exposed.get((data_edge.writer, data_edge.reader, data_edge.buffer), 0.0) > 0:
            data_edge.exposed_by.append(arm)


POWER = 0.95


def power_window(controls: list[ControlResult]) -> float | None:
    """The smallest tested window from which on every control that can be caught is caught again with 95 % probability.

    Controls that no window can show (unpromised by the rules) have no say.
    """
    families: dict[tuple[str, ...], dict[float, ControlResult]] = {}
    for c in controls:
        families.setdefault((c.fault, c.variant, c.writer, c.reader, c.buffer), {})[c.delay_us] = c
    window = None
    for members in families.values():
        if not any(c.expected == "caught" for c in members.values()):
            continue
        strong = None
        for delay in sorted(members, reverse=True):
            if reproducibility(members[delay].kills, max(members[delay].replays, 1)) < POWER:
                break
            strong = delay
        if strong is None:
            return None
        window = max(strong, window or 0.0)
    return window


def _take_error(case: CaseResult, job: Job, error: Exception) -> None:
    text = str(error) if isinstance(error, PdlStressError) else f"{type(error).__name__}: {error}"
    if isinstance(job, ControlJob):
        result = _control_result(job.control, model.Expectation(job.expected, job.reason))
        result.verdict, result.note = "error", text
        case.controls.append(result)
    else:
        case.errors.append(f"{_describe(job)}: {text}")
        if isinstance(job, ArmJob):
            case.arms.append(ArmResult(job.name, 0, 0, None, job.delay_us, job.step))
