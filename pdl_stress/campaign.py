"""A campaign: chains x arms x controls, on the model or on a GPU, and a verdict for each chain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from . import model
from .chain import Chain
from .collect import control_result, power_window, take, take_error
from .faults import MUST_CATCH_US, Control, expectations, plan_controls, plant
from .jobs import ArmJob, Job
from .plan import Plan, clean_jobs, control_jobs, exposure_jobs, uncontrolled, untested
from .results import CaseResult, ControlResult, DataEdgeResult
from .verdict import judge_hardware, judge_model

MOST_FAILURES = 2
"""Controls of a case that may hang or fault before the rest of them is given up."""


PHASES = ("arms", "controls", "patched", "profiled")


class Executes(Protocol):
    """Carries out jobs: :class:`pdl_stress.cuda.executor.Executor` here, ``Worker`` in a child process."""

    def execute(self, job: Job) -> Any: ...


Progress = Callable[[str, int, int], None]
"""``progress(text, done, total)``, in jobs."""

Keep = Callable[[list[CaseResult]], None]
"""Called with all cases whenever one of them has got further, so that nothing finished is lost."""


def _silent(text: str, done: int, total: int) -> None:
    pass


def _forget(cases: list[CaseResult]) -> None:
    pass


def new_case(chain: Chain, plan: Plan, machine: str) -> CaseResult:
    """A case with what the model says of the chain: its judgement, and the data edges to cover."""
    case = CaseResult(chain.name, _ops(chain), _kernels(chain), machine, requested_replays=plan.replays)
    case.rules = plan.rules.name
    case.faults = None if plan.faults is None else list(plan.faults)
    control = plant(chain, plan.planted) if plan.planted else None
    case.planted = control.name if control else ""
    tested = control.apply(chain) if control else chain
    case.data_edges = [DataEdgeResult(e.writer, e.reader, e.buffer) for e in tested.data_edges]
    case.reuses = tested.reuses
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
        if any(model.find_races(chain, model.DOCUMENTED, n) for n in replays):
            case.model += "; NOT ordered by the documented rules"
        return
    example = bad.counterexample
    case.model = (
        f"{example.kind}: {example.reader} may overtake {example.writer} on {example.buffer} under «{plan.rules.name}»"
    )
    shown = (example.writer, example.reader, example.buffer)
    races = dict.fromkeys((*race.steps, race.buffer) for race in bad.races)
    others = [f"{race[0]} -> {race[1]} on {race[2]}" for race in races if race != shown]
    if others:
        case.model += f"; also: {', '.join(others)}"
    if not any(model.find_races(chain, model.OBSERVED_SM90, n) for n in replays):
        case.model += f"; ordered only under «{model.OBSERVED_SM90.name}»"
    case.timeline = list(example.timeline)


def _ops(chain: Chain) -> str:
    """What the chain runs: ``native``, or the names of its ops."""
    names = dict.fromkeys(step.op.name for step in chain.steps if not step.source)
    return "native" if all(name.startswith("native ") for name in names) else ", ".join(names)


def _kernels(chain: Chain) -> list[str]:
    return list(dict.fromkeys(name for step in chain.steps for name in step.op.kernels))


# -- on a CPU ----------------------------------------------------------------------------------------------------------


def run_on_model(
    chains: Iterable[Chain], plan: Plan, progress: Progress = _silent, keep: Keep = _forget
) -> list[CaseResult]:
    """Judges chains and their controls from the contracts alone: no kernel runs, so no rates and no bounds."""
    cases: list[CaseResult] = []
    # Time does not exist on the model: one window that is wide enough stands for all.
    windows = (MUST_CATCH_US,)
    work = []
    for chain in (chain.modelled() for chain in chains):
        work.append((chain, [] if plan.planted else plan_controls(chain, plan.faults, windows)))
    total, done = sum(1 + len(controls) for _, controls in work), 0
    for chain, controls in work:
        progress(f"{chain.name}: model", done, total)
        started = time.monotonic()
        case = new_case(chain, plan, "model")
        if case.timeline:  # broken as it is: its twins would show its own fault
            controls = []
        case.planned = (0, len(controls))
        done += 1
        for control, expectation in expectations(chain, controls):
            case.controls.append(_model_control(chain, control, expectation))
            done += 1
            progress(f"{chain.name}: control {control.name}", done, total)
        case.verdict, case.reasons = judge_model(case)
        case.seconds = time.monotonic() - started
        cases.append(case)
        keep(cases)
    progress("done", total, total)
    return cases


def _model_control(chain: Chain, control: Control, expectation: model.Expectation) -> ControlResult:
    """A control on the model: must-catch ones have to be refuted by a schedule that really shows the stale read."""
    result = control_result(control, expectation)
    broken = control.apply(chain)
    if expectation.expected == "caught":
        result.verdict = "refuted" if model.explain(broken, control.edge, model.OBSERVED_SM90) else "missed"
    elif expectation.expected == "clean":
        result.verdict = "dirty" if model.find_races(broken, model.DOCUMENTED) else "ordered"
    else:
        result.verdict = "allowed"
    return result


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def run_on_gpu(
    chains: Iterable[Chain], plan: Plan, executor: Executes, progress: Progress = _silent, keep: Keep = _forget
) -> list[CaseResult]:
    """Runs all clean arms of all chains, then all controls: a broken kernel must not come before a clean arm. What
    needs a profiler comes last: nothing may be graded after it.

    A job that fails is an error of its case; the other cases go on. On an interrupt, what was counted so far is judged
    and kept, and the interrupt goes on.
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
    watched = {chain.name: exposure_jobs(chain, plan) for chain in chains}
    profiled = {name: [job for job in jobs if getattr(job, "profiled", False)] for name, jobs in watched.items()}
    planned = {chain.name: control_jobs(chain, plan) for chain in chains}

    def jobs_of(phase: str, chain: Chain) -> list[Job]:
        if phase == "arms":
            return clean_jobs(chain, plan) + ([] if profiled[chain.name] else watched[chain.name])
        if phase == "profiled":
            return profiled[chain.name]
        # Kernels whose machine code was broken run after every other control and arm: a library may keep state.
        return [job for job in planned[chain.name] if bool(job.patched) is (phase == "patched")]

    counts = {}
    for case, chain in zip(cases, chains, strict=True):
        counts.update({(phase, chain.name): len(jobs_of(phase, chain)) for phase in PHASES})
        case.planned = (sum(isinstance(job, ArmJob) for job in jobs_of("arms", chain)), len(planned[chain.name]))
    done = 0
    for phase in PHASES:
        for case, chain in zip(cases, chains, strict=True):
            started = time.monotonic()
            if phase == "controls":
                if case.nodes:  # now it is known which are possible
                    case.uncontrolled = uncontrolled(chain, case.nodes)
                    planned[chain.name] = control_jobs(chain, plan, case.nodes)
                case.untested = [] if plan.planted or case.errors else untested(chain, case.nodes)
                case.planned = (case.planned[0], len(planned[chain.name]))
                counts.update({(phase, chain.name): len(jobs_of(phase, chain)) for phase in PHASES})
            jobs = jobs_of(phase, chain)
            total = sum(counts.values())

            def tell(text: str, index: int, start: int = done, total: int = total) -> None:
                progress(text, start + index, total)

            try:
                _run_jobs(case, jobs, executor, tell)
            finally:
                done += len(jobs)
                case.seconds += time.monotonic() - started
                case.window_us = power_window(case.controls)
                case.verdict, case.reasons = judge_hardware(case)
                keep(cases)
    total = sum(counts.values())
    progress("done", total, total)
    return cases


def _run_jobs(case: CaseResult, jobs: list[Job], executor: Executes, tell: Callable[[str, int], None]) -> None:
    """Runs one phase of a case. It ends early once the case is an ERROR beyond doubt: a kernel that hangs would hang in
    every job, for minutes each."""
    failures = 0
    for index, job in enumerate(jobs):
        if case.errors or failures > MOST_FAILURES:
            case.errors.append(f"{len(jobs) - index} jobs not run after that, from «{job.describe()}» on")
            return
        tell(f"{case.chain}: {job.describe()}", index)
        try:
            take(case, job, executor.execute(job))
        except Exception as error:  # an op of the chain may raise anything; it costs its case, not the others
            take_error(case, job, error)
            failures += 1
