"""From answers of jobs to the result of a case. An answer that is not the job's is refused, never overlooked."""

from __future__ import annotations

from typing import Any

from . import model
from .errors import DeviceError, PdlStressError
from .faults import Control
from .jobs import (
    ArmAnswer,
    ArmJob,
    CensusAnswer,
    CensusJob,
    ControlAnswer,
    ControlJob,
    ExposureAnswer,
    ExposureJob,
    Job,
)
from .results import ArmResult, CaseResult, ControlResult, EdgeResult
from .statistics import reproducibility

POWER = 0.95


def take(case: CaseResult, job: Job, answer: Any) -> None:
    """Enters the answer of a job into its case.

    Raises:
        DeviceError: it is no answer to this job.
    """
    if isinstance(job, CensusJob) and isinstance(answer, CensusAnswer):
        case.nodes = answer.nodes
        case.kernels = list(dict.fromkeys(node.name for node in answer.nodes if node.kind == "kernel"))
    elif isinstance(job, ArmJob) and isinstance(answer, ArmAnswer):
        arm = answer.arm
        _same((arm.name, arm.step, arm.delay_us), (job.name, job.step, job.delay_us))
        _take_arm(case, job, answer)
    elif isinstance(job, ExposureJob) and isinstance(answer, ExposureAnswer):
        _take_exposure(case, job.name, answer)
    elif isinstance(job, ControlJob) and isinstance(answer, ControlAnswer):
        mine, theirs = _of_job(job), answer.result
        _same(
            *[
                (c.fault, c.variant, c.writer, c.reader, c.buffer, c.delay_us, c.expected, c.patched)
                for c in (theirs, mine)
            ]
        )
        case.controls.append(theirs)
        case.sass.update(answer.sass)
    else:
        raise DeviceError(f"{type(answer).__name__} is no answer to {type(job).__name__}.")


def _same(got: tuple[object, ...], wanted: tuple[object, ...]) -> None:
    if got != wanted:
        raise DeviceError(f"an answer to another job: {got}, expected {wanted}.")


def control_result(control: Control, expectation: model.Expectation) -> ControlResult:
    """An empty result of a control: what it is and what it must show."""
    edge = control.edge
    return ControlResult(
        control.fault, control.variant, edge.reader, edge.writer, edge.reader, edge.buffer, control.delay_us,
        expectation.expected, expectation.reason,
    )  # fmt: skip


def _of_job(job: ControlJob) -> ControlResult:
    result = control_result(job.control, model.Expectation(job.expected, job.reason))
    result.patched = job.patched
    return result


def _take_arm(case: CaseResult, job: ArmJob, answer: ArmAnswer) -> None:
    case.arms.append(answer.arm)
    case.pool = answer.pool
    case.sass.update(answer.sass)
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
    if not case.exposure or not answer.overlap:  # what went wrong once is not forgotten
        case.exposure = answer.method
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


def take_error(case: CaseResult, job: Job, error: Exception) -> None:
    """Enters the failure of a job. What the job was about stays visible; it grades nothing."""
    text = str(error) if isinstance(error, PdlStressError) else f"{type(error).__name__}: {error}"
    if isinstance(job, ControlJob):
        result = _of_job(job)
        result.verdict, result.note = "error", text
        case.controls.append(result)
        return
    case.errors.append(f"{job.describe()}: {text}")
    if isinstance(job, ArmJob):
        case.arms.append(ArmResult(job.name, 0, 0, None, job.delay_us, job.step))


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
