"""From answers to a case: an answer that is not the job's is refused; a failure leaves a trace that grades nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdl_stress import DeviceError, Outcome, catalog
from pdl_stress.collect import control_result, take, take_error
from pdl_stress.jobs import (
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
from pdl_stress.model import Expectation
from pdl_stress.plan import Plan, clean_jobs, control_jobs, exposure_jobs
from pdl_stress.results import ArmResult, CaseResult, DataEdgeResult, EdgeResult, NodeResult
from pdl_stress.verdict import judge_hardware

CHAIN = catalog.load("csa2-fused-m1")


def case() -> CaseResult:
    made = CaseResult(CHAIN.name, "native", [], "cuda")
    made.data_edges = [DataEdgeResult(e.writer, e.reader, e.buffer) for e in CHAIN.data_edges]
    return made


def answer(job: Job) -> Any:
    if isinstance(job, ArmJob):
        edges = [EdgeResult(a, b, "full" if job.serialized else "programmatic") for a, b in CHAIN.edges]
        arm = ArmResult(job.name, job.replays, 0, 0.1, job.delay_us, job.step, 0.5)
        return ArmAnswer(arm, edges, 256, {"kernel": "evidence"})
    if isinstance(job, ExposureJob):
        return ExposureAnswer(dict.fromkeys(CHAIN.edges, 0.5), {("projection", "q_norm", "qkv"): 1.0}, "by hand")
    if isinstance(job, CensusJob):
        return CensusAnswer([NodeResult("kernel", "gemm", step="projection"), NodeResult("memset", step="q_norm")])
    result = control_result(job.control, Expectation(job.expected, job.reason))
    result = replace(result, replays=job.replays, verdict="not seen", patched=job.patched)
    return ControlAnswer(result, {"broken kernel": "evidence"})


CHOSEN = Plan(faults=("F02", "F04", "F28"))
JOBS: list[Job] = [*clean_jobs(CHAIN, CHOSEN), *exposure_jobs(CHAIN, CHOSEN), *control_jobs(CHAIN, CHOSEN)]
CENSUS = next(job for job in JOBS if isinstance(job, CensusJob))
ARM = next(job for job in JOBS if isinstance(job, ArmJob) and job.step)
EXPOSURE = next(job for job in JOBS if isinstance(job, ExposureJob))
CONTROL = next(job for job in JOBS if isinstance(job, ControlJob))


def test_the_answers_of_all_jobs_are_taken() -> None:
    made = case()
    for job in JOBS:
        take(made, job, answer(job))
    assert len(made.arms) == sum(isinstance(job, ArmJob) for job in JOBS)
    assert len(made.controls) == sum(isinstance(job, ControlJob) for job in JOBS)
    assert made.sass == {"kernel": "evidence", "broken kernel": "evidence"}, "of arms and of controls"
    assert made.errors == []
    assert made.kernels == ["gemm"], "what really ran, and kernels only"
    assert [node.kind for node in made.nodes] == ["kernel", "memset"]
    assert made.exposure == "by hand"


KINDS = (CENSUS, ARM, EXPOSURE, CONTROL)


@pytest.mark.parametrize("job", KINDS, ids=lambda job: type(job).__name__)
@pytest.mark.parametrize("thing", [None, 5, "answer", (), CHAIN, *[answer(job) for job in KINDS]])
def test_an_answer_of_another_kind_is_refused(job: Job, thing: Any) -> None:
    if type(thing) is type(answer(job)):
        return
    made = case()
    with pytest.raises(DeviceError, match=f"{type(thing).__name__} is no answer to {type(job).__name__}"):
        take(made, job, thing)
    assert made == case(), "a refused answer leaves nothing behind"


@pytest.mark.parametrize("field", ["name", "step", "delay_us"])
def test_the_answer_of_another_arm_is_refused(field: str) -> None:
    other = answer(ARM)
    setattr(other.arm, field, 7.0 if field == "delay_us" else "another")
    made = case()
    with pytest.raises(DeviceError, match=r"an answer to another job: .*, expected "):
        take(made, ARM, other)
    assert made == case()


FIELDS = ("fault", "variant", "writer", "reader", "buffer", "delay_us", "expected", "patched")


@pytest.mark.parametrize("field", FIELDS)
def test_the_answer_of_another_control_is_refused(field: str) -> None:
    """A patched control that was answered as an unpatched one would need no twin."""
    job = replace(CONTROL, patched="all waits removed")
    for value in ("another", ""):
        other = answer(job)
        setattr(other.result, field, 7.0 if field == "delay_us" else value)
        made = case()
        with pytest.raises(DeviceError, match=r"an answer to another job: .*, expected "):
            take(made, job, other)
        assert made == case()


def test_what_was_done_to_the_machine_code_stays_with_the_control() -> None:
    job = replace(CONTROL, patched="wait 1 removed")
    made = case()
    take(made, job, answer(job))
    take_error(made, job, DeviceError("it hung"))
    assert [c.patched for c in made.controls] == ["wait 1 removed"] * 2


def test_the_answers_of_two_controls_cannot_be_swapped() -> None:
    controls = [job for job in JOBS if isinstance(job, ControlJob)]
    for job in controls:
        for other in controls:
            if other is not job:
                with pytest.raises(DeviceError, match="another job"):
                    take(case(), job, answer(other))


@pytest.mark.parametrize("job", KINDS, ids=lambda job: type(job).__name__)
def test_a_failure_leaves_a_trace_that_grades_nothing(job: Job) -> None:
    made = case()
    take_error(made, job, DeviceError("it hung"))
    if isinstance(job, ControlJob):
        (control,) = made.controls
        assert (control.verdict, control.note, control.replays, control.kills) == ("error", "it hung", 0, 0)
        assert (control.fault, control.expected, control.reason) == (job.control.fault, job.expected, job.reason)
    else:
        assert made.errors == [f"{job.describe()}: it hung"]
    if isinstance(job, ArmJob):
        (arm,) = made.arms
        assert (arm.name, arm.step, arm.delay_us, arm.replays) == (job.name, job.step, job.delay_us, 0)
    assert judge_hardware(made)[0] is Outcome.ERROR


def test_a_failed_census_leaves_its_reason_and_no_nodes() -> None:
    made = case()
    take_error(made, CENSUS, RuntimeError("no such node"))
    assert made.errors == ["census of the graph: RuntimeError: no such node"]
    assert (made.nodes, made.kernels, made.arms) == ([], [], [])


def test_the_kernels_that_the_census_found_replace_those_that_ops_claim() -> None:
    """What a library launches depends on the GPU and the shapes."""
    made = case()
    made.kernels = ["rmsnorm", "tinygemm2"]
    names = ["source", "norm", "gemm<128>", "norm", ""]
    nodes = [NodeResult("kernel" if name else "memset", name, step="s") for name in names]
    take(made, CENSUS, CensusAnswer(nodes))
    assert made.kernels == ["source", "norm", "gemm<128>"], "each once, in stream order"
    assert made.nodes == nodes


def test_exposure_is_entered_by_arm_and_only_where_it_was_seen() -> None:
    made = case()
    made.edges = [EdgeResult(a, b, "programmatic") for a, b in CHAIN.edges]
    first, second = [job for job in JOBS if isinstance(job, ExposureJob)][:2]
    seen = ("projection", "q_norm")
    take(made, first, ExposureAnswer({seen: 0.5, ("q_norm", "kv_norm"): 0.0}, {(*seen, "qkv"): 0.0}, "one"))
    take(made, second, ExposureAnswer({seen: 0.25}, {(*seen, "qkv"): 0.01}, "two"))
    edges = {(edge.source, edge.target): edge for edge in made.edges}
    assert (edges[seen].overlap, edges[seen].overlapped_in) == (0.5, [first.name, second.name])
    assert (edges["q_norm", "kv_norm"].overlap, edges["q_norm", "kv_norm"].overlapped_in) == (0.0, [])
    assert (edges["producer", "input_norm"].overlap, edges["producer", "input_norm"].overlapped_in) == (None, [])
    assert {(e.writer, e.reader): e.exposed_by for e in made.data_edges if e.exposed_by} == {seen: [second.name]}
    assert made.exposure == "one"
    take(made, first, ExposureAnswer({}, {}, "it failed"))
    take(made, second, ExposureAnswer({seen: 0.25}, {}, "two"))
    assert made.exposure == "it failed", "what went wrong once is not forgotten"


def test_edges_of_a_serialized_arm_are_not_those_under_test() -> None:
    made = case()
    for job in JOBS:
        if isinstance(job, ArmJob) and job.serialized:
            take(made, job, answer(job))
    assert made.edges == []
    assert made.errors == []


def test_the_rate_is_that_of_the_arm_as_deployed() -> None:
    made = case()
    for job in JOBS:
        if isinstance(job, ArmJob):
            found = answer(job)
            found.arm.seconds = 0.25 if job.name == "as deployed" else 99.0
            take(made, job, found)
    assert made.replays_per_second == 80_000
