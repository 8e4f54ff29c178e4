"""What a campaign asks of a GPU, in which order, and what becomes of answers, failures and blockers.

No GPU: a fake executor answers as a healthy device would, or misbehaves as told.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from pdl_stress import (
    Chain,
    DeviceError,
    KernelContract,
    Op,
    Outcome,
    PdlStressError,
    Trigger,
    UsageError,
    Wait,
    catalog,
    faults,
)
from pdl_stress.campaign import MOST_FAILURES, new_case, run_on_gpu, run_on_model
from pdl_stress.chain import Patch, Step
from pdl_stress.collect import power_window
from pdl_stress.faults import ALL_DELAYS_US, DELAYS_US, RELOADED, plan_controls
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
    delayed_variants,
    plan_arms,
)
from pdl_stress.model import DOCUMENTED, OBSERVED_SM90, find_races
from pdl_stress.plan import CONTROL_REPLAYS, Plan, clean_jobs, control_jobs, exposure_jobs
from pdl_stress.results import ArmResult, CaseResult, ControlResult, EdgeResult, NodeResult
from pdl_stress.statistics import upper_bound

VERDICTS = {"caught": "caught", "clean": "clean", "unpromised": "not seen"}
REPLAYS = 2000
Library = Callable[..., Chain]


pytestmark = pytest.mark.usefixtures("remembered_model")


@pytest.fixture(autouse=True)
def no_blockers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests may have a profiler attached; these tests are not about it."""
    monkeypatch.setattr("pdl_stress.cuda.device.verdict_blockers", list)


def kernel_of(step: Step) -> str:
    return (step.op.kernels or (step.op.name,))[0]


_PLANNED: dict[Any, list[ControlJob]] = {}


@pytest.fixture(autouse=True)
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls of one chain, plan and census are planned once for all tests: which they are is for `test_plan`."""

    def planned(chain: Chain, plan: Plan, nodes: list[NodeResult] | None = None) -> list[ControlJob]:
        kinds = [step.op.rebuildable for step in chain.steps]
        key = (chain.fingerprint, str(kinds), plan, str(nodes), faults._twins)
        if key not in _PLANNED:
            _PLANNED[key] = control_jobs(chain, plan, nodes)
        return list(_PLANNED[key])

    monkeypatch.setattr("pdl_stress.campaign.control_jobs", planned)


def kernel_node(step: Step, waits: int | None) -> NodeResult:
    """As a census finds it: behind a full edge, such as the producer's, machine code is not looked for."""
    made = NodeResult("kernel", kernel_of(step), step=step.name, incoming=["programmatic"], waits=waits, code="lib.so")
    if step.name == "producer":
        vars(made).update(incoming=["full"], waits=None, code="not looked for")
    return made


class Fake:
    """A healthy GPU. ``twist`` gets every job with its answer and may change it, replace it or raise."""

    def __init__(
        self, *chains: Chain, twist: Callable[[Job, Any], Any] = lambda job, answer: answer, waits: int | None = 1
    ) -> None:
        self.chains = {chain.name: chain for chain in chains}
        self.twist, self.waits = twist, waits
        self.jobs: list[Job] = []

    def execute(self, job: Job) -> Any:
        self.jobs.append(job)
        return self.twist(job, self._answer(job))

    def _answer(self, job: Job) -> Any:
        chain = self.chains[job.chain]
        if isinstance(job, CensusJob):
            return CensusAnswer([kernel_node(step, self.waits) for step in chain.steps])
        if isinstance(job, ArmJob):
            variant = job.variant(chain)
            pairs = list(variant.edges)
            if job.back_to_back:
                pairs.append((pairs[-1][1], pairs[0][0]))
            kind = "full" if job.serialized else "programmatic"
            bound = upper_bound(job.replays)
            arm = ArmResult(job.name, job.replays, 0, bound, job.delay_us, job.step, job.replays / 80_000)
            return ArmAnswer(arm, [EdgeResult(source, target, kind) for source, target in pairs], 256)
        if isinstance(job, ExposureJob):
            variant = chain.varied(job.changes)
            delayed = [step.name for step in variant.steps if step.delay_us]
            pairs = list(variant.edges)
            if job.back_to_back:
                pairs.append((pairs[-1][1], pairs[0][0]))
            return ExposureAnswer(
                dict.fromkeys(pairs, 0.75),
                {(e.writer, e.reader, e.buffer): 1.0 for e in variant.data_edges if e.writer in delayed},
                "profiler" if job.profiled else "time stamps",
            )
        step = job.control.apply(chain)[job.control.edge.reader]
        evidence = str(step.patch) if step.patch else "no ACQBULK"
        edge, kills = job.control.edge, job.replays if job.expected == "caught" else 0
        result = ControlResult(
            job.control.fault, job.control.variant, edge.reader, edge.writer, edge.reader, edge.buffer,
            job.control.delay_us, job.expected, job.reason, job.replays, kills, True if kills else None,
            VERDICTS[job.expected], patched=str(step.patch or ""),
        )  # fmt: skip
        return ControlAnswer(result, {f"{edge.reader}, {job.control.fault}": evidence})


def only(kind: type, **fields: Any) -> Callable[[Job], bool]:
    return lambda job: isinstance(job, kind) and all(getattr(job, name) == value for name, value in fields.items())


def fails(which: Callable[[Job], bool], error: Exception) -> Callable[[Job, Any], Any]:
    def twist(job: Job, answer: Any) -> Any:
        if which(job):
            raise error
        return answer

    return twist


def run(*names: str, twist: Callable[[Job, Any], Any] = lambda job, answer: answer, **plan: Any) -> Any:
    chains = [catalog.load(name) for name in names or ("csa2-fused-m1",)]
    fake = Fake(*chains, twist=twist)
    return run_on_gpu(chains, Plan(**{"replays": REPLAYS, **plan}), fake), fake


# --- jobs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.CSA2)
@pytest.mark.parametrize("delays", [DELAYS_US, ALL_DELAYS_US])
def test_the_arms_are_six_plain_ones_and_every_step_delayed_by_every_window(
    name: str, delays: tuple[float, ...]
) -> None:
    chain = catalog.load(name)
    jobs = plan_arms(chain, 500, delays)
    assert [(j.name, j.rotated, j.serialized, j.back_to_back, j.neighbour) for j in jobs[:6]] == [
        ("as deployed", False, False, False, ""),
        ("as deployed, weights rotated", True, False, False, ""),
        ("serialized", False, True, False, ""),
        ("back to back", False, False, True, ""),
        ("beside a kernel that holds SMs", False, False, False, "holds SMs"),
        ("beside a kernel that streams memory", False, False, False, "streams memory"),
    ]
    assert all(not j.changes and j.step is None for j in jobs[:6])
    last = chain.steps[-1].name
    wanted = []
    for step in chain.steps:
        for delay in sorted(delays):
            if delay > 0:
                wanted.append(("delayed", step.name, delay, False))
                wanted += [("back to back, delayed", last, delay, True)] if step.name == last else []
    assert [(j.name, j.step, j.delay_us, j.back_to_back) for j in jobs[6:]] == wanted
    assert not any(j.neighbour or j.serialized or j.rotated for j in jobs[6:])
    assert all(j.replays == 500 and j.planted is None for j in jobs)
    assert all((j.chain, j.fingerprint) == (name, chain.fingerprint) for j in jobs)
    for job in jobs[6:]:
        variant = job.variant(chain)
        assert {s.name: s.delay_us for s in variant.steps if s.delay_us is not None} == {job.step: job.delay_us}
        assert job.step is not None
        assert variant[job.step].contract.trigger is Trigger.ENTRY


def test_a_delayed_arm_opens_the_way_to_every_reader_of_the_step() -> None:
    chain = catalog.load("csa2-separate-m1")
    ((name, changes),) = delayed_variants(chain, chain["input_norm"], 2.0)
    assert name == "delayed"
    assert changes == {
        "input_norm": {"trigger": "entry", "delay_us": 2.0},
        "q_projection": {"trigger": Trigger.ENTRY},  # stands before kv_projection, which reads x as well
    }
    assert all(s.contract.wait == chain[s.name].contract.wait for s in chain.varied(changes).steps)


def test_a_reader_behind_a_stand_in_gets_an_arm_of_its_own(library: Library) -> None:
    """A stand-in for a step between does not read what the writer wrote: that edge would go untested."""
    chain = library("csa2-separate-m1")
    late = {"trigger": "entry", "delay_us": 2.0}
    assert delayed_variants(chain, chain["input_norm"], 2.0) == [
        ("early release", {"input_norm": late}),
        ("early release, read by kv_projection", {"input_norm": late, "q_projection": {"trigger": Trigger.ENTRY}}),
    ]
    assert delayed_variants(chain, chain["q_norm"], 2.0) == [("early release", {"q_norm": late})], "nothing reads it"
    behind = {"q_projection": late, "kv_projection": {"trigger": Trigger.ENTRY}}
    assert delayed_variants(chain, chain["q_projection"], 2.0) == [
        ("early release", {"q_projection": late}),  # kept: the step between, which is no stand-in here, may be hurt
        ("early release, read by q_norm", behind),
    ]
    for only, names in (
        (("input_norm", "kv_projection"), ["early release"]),
        (("q_projection",), ["delayed", "delayed, read by kv_projection"]),
    ):
        mixed = library("csa2-separate-m1", only=only)
        assert [name for name, _ in delayed_variants(mixed, mixed["input_norm"], 2.0)] == names


@pytest.mark.parametrize("name", catalog.CSA2)
def test_the_late_arms_of_a_step_have_each_of_its_data_edges_whole(name: str, library: Library) -> None:
    native = catalog.load(name)
    for chain in (native, library(name), *(library(name, only=(step.name,)) for step in native.steps[1:])):
        for step in chain.steps:
            edges = {(e.reader, e.buffer) for e in chain.data_edges if e.writer == step.name}
            variants = [chain.varied(changes) for _, changes in delayed_variants(chain, step, 2.0)]
            opened = {
                (e.reader, e.buffer)
                for variant in variants
                for e in variant.data_edges
                if e.writer == step.name
                and all(variant[between].contract.trigger is Trigger.ENTRY for between in e.between)
            }
            assert opened == edges


@pytest.mark.parametrize("name", catalog.CSA2)
def test_no_clean_arm_is_disordered(name: str, library: Library) -> None:
    """A perturbation changes timing and nothing else; nor does a stand-in."""
    for chain in (catalog.load(name), library(name)):
        for job in plan_arms(chain, 1, (10.0,)):
            assert find_races(job.variant(chain), DOCUMENTED, replays=2) == []


def mixed_chain() -> Chain:
    """native -> library -> native: the library step in the middle cannot be rebuilt."""
    chain = Chain("mixed")
    contract = KernelContract(("a",), ("o",))
    native = Op("native", contract, lambda **_: None, contract, waits=frozenset(Wait))
    library = Op("library", contract, lambda **_: None, contract)
    x, y, z = (chain.buffer(name, (4,), "float32") for name in "xyz")
    chain.step("first", native, a=chain.input("h", (4,), "float32"), o=x)
    chain.step("middle", library, a=x, o=y)
    chain.step("last", native, a=x, o=z)
    return chain


def test_a_step_that_cannot_be_rebuilt_gives_way_to_a_stand_in_where_it_must_be_late_or_let_by() -> None:
    chain = mixed_chain()
    jobs = plan_arms(chain, 1, (2.0,))
    assert [(job.name, job.step, job.variant(chain)["middle"].delay_us) for job in jobs[6:]] == [
        ("delayed", "producer", None),
        ("delayed", "first", None),
        ("delayed, read by last", "first", None),
        ("early release", "middle", 2.0),
        ("delayed", "last", None),
        ("back to back, delayed", "last", None),
    ]
    for job in jobs:
        middle = job.variant(chain)["middle"]
        assert middle.source is (job.step == "middle" or job.name.endswith("read by last"))
        assert middle.source or middle.op is chain["middle"].op
    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain))
    assert (case.verdict, case.reasons) == (Outcome.PASS, [])


@pytest.mark.parametrize("name", catalog.CSA2)
def test_arms_of_library_kernels_release_early_what_they_cannot_delay(name: str, library: Library) -> None:
    chain = library(name)
    jobs, native = plan_arms(chain, 7, DELAYS_US), plan_arms(catalog.load(name), 7, DELAYS_US)
    assert jobs[:6] == native[:6]

    def shape(job: ArmJob) -> tuple[Any, ...]:
        return job.name.replace("early release", "delayed"), job.step, job.delay_us, job.back_to_back

    common = [shape(j) for j in jobs if "read by" not in j.name]
    assert common == [shape(j) for j in native if shape(j) in common]
    assert {(j.step, j.delay_us, j.back_to_back) for j in jobs} == {
        (j.step, j.delay_us, j.back_to_back) for j in native
    }
    for job in jobs:
        variant = job.variant(chain)
        assert not any(step.patch for step in variant.steps), "a clean arm runs no changed machine code"
        assert ("early release" in job.name) is (job.step not in (None, "producer"))
        if job.step:
            assert (variant[job.step].source, variant[job.step].delay_us) == (True, job.delay_us)
            assert variant[job.step].contract.trigger is Trigger.ENTRY


def test_a_healthy_gpu_passes_every_shipped_chain() -> None:
    cases, fake = run(*catalog.CSA2)
    assert {case.chain: (case.verdict, case.reasons) for case in cases} == {
        name: (Outcome.PASS, []) for name in catalog.CSA2
    }
    for case in cases:
        chain = catalog.load(case.chain)
        mine = [job for job in fake.jobs if job.chain == chain.name]
        assert [j for j in mine if isinstance(j, ArmJob)] == plan_arms(chain, REPLAYS, DELAYS_US)
        assert [j.control for j in mine if isinstance(j, ControlJob)] == plan_controls(chain, None, DELAYS_US)
        assert [j.name for j in mine if isinstance(j, ExposureJob)] == [
            "as deployed",
            *(f"delayed ({step.name}, 10 us)" for step in chain.steps[:-1]),
            f"back to back, delayed ({chain.steps[-1].name}, 10 us)",
        ]
        assert case.planned == (len(case.arms), len(case.controls))


def test_controls_are_told_what_the_model_expects_of_them() -> None:
    _, fake = run(control_replays=64)
    chain = catalog.load("csa2-fused-m1")
    controls = [job for job in fake.jobs if isinstance(job, ControlJob)]
    assert controls
    for job in controls:
        expectation = job.control.expectation(chain)
        assert (job.expected, job.reason, job.replays) == (expectation.expected, expectation.reason, 64)
    assert CONTROL_REPLAYS >= 256


def phase(job: Job) -> int:
    if isinstance(job, ControlJob):
        return 2 if job.patched else 1
    return 3 if isinstance(job, ExposureJob) and job.profiled else 0


def test_what_profiles_comes_last_and_nothing_is_graded_after_it(library: Library) -> None:
    """A library's chain before a native one: its profiler must wait for the other's controls too."""
    chains = [library("csa2-fused-m1"), catalog.load("csa2-separate-m1")]
    fake = Fake(*chains)
    cases = run_on_gpu(chains, Plan(REPLAYS), fake)
    assert [case.verdict for case in cases] == [Outcome.PASS] * 2
    phases = [phase(job) for job in fake.jobs]
    assert phases == sorted(phases)
    assert set(phases) == {0, 1, 2, 3}
    profiled = [job for job in fake.jobs if phase(job) == 3]
    assert {job.chain for job in profiled} == {"csa2-fused-m1"}
    stamped = [job for job in fake.jobs if isinstance(job, ExposureJob) and not job.profiled]
    assert {job.chain for job in stamped} == {"csa2-separate-m1"}
    assert [case.exposure for case in cases] == ["profiler", "time stamps"]
    assert profiled == exposure_jobs(chains[0], Plan(REPLAYS))


def test_broken_machine_code_runs_after_everything_that_could_suffer_from_it(library: Library) -> None:
    """A library may keep state. So first all chains run all else, then each its reloaded kernels before its broken."""
    chains = [library("csa2-fused-m1"), library("csa2-separate-m1"), catalog.load("csa2-separate-m4")]
    fake = Fake(*chains, waits=2)
    cases = run_on_gpu(chains, Plan(REPLAYS), fake)
    assert [case.verdict for case in cases] == [Outcome.PASS] * 3
    graded = [job for job in fake.jobs if not (isinstance(job, ExposureJob) and job.profiled)]
    is_patched = [isinstance(job, ControlJob) and job.patched != "" for job in graded]
    assert is_patched == sorted(is_patched)
    last = [job for job, patched in zip(graded, is_patched, strict=True) if patched]
    assert list(dict.fromkeys(job.chain for job in last)) == ["csa2-fused-m1", "csa2-separate-m1"]
    for name in ("csa2-fused-m1", "csa2-separate-m1"):
        mine = [job.patched != "loaded again" for job in last if isinstance(job, ControlJob) and job.chain == name]
        assert mine == sorted(mine)
        assert set(mine) == {False, True}
    for chain in chains:
        here = [job for job in fake.jobs if isinstance(job, ControlJob) and job.chain == chain.name]
        assert all(job.patched == str(job.control.patch(chain) or "") for job in here)


def test_each_case_begins_with_its_census(library: Library) -> None:
    chains = [library("csa2-fused-m1"), catalog.load("csa2-separate-m1")]
    fake = Fake(*chains)
    run_on_gpu(chains, Plan(REPLAYS), fake)
    for chain in chains:
        mine = [job for job in fake.jobs if job.chain == chain.name]
        assert [isinstance(job, CensusJob) for job in mine] == [True, *[False] * (len(mine) - 1)]


def test_no_broken_kernel_runs_before_the_last_clean_arm() -> None:
    _, fake = run("csa2-fused-m1", "csa2-separate-m4")
    kinds = [isinstance(job, ControlJob) for job in fake.jobs]
    assert kinds == sorted(kinds)
    assert {job.chain for job in fake.jobs[: kinds.index(True)]} == {"csa2-fused-m1", "csa2-separate-m4"}


def test_chosen_faults_and_none() -> None:
    _, fake = run(faults=("F02@q_norm", "F07"))
    controls = [job.control for job in fake.jobs if isinstance(job, ControlJob)]
    assert {(c.fault, c.edge.reader) for c in controls} == {("F02", "q_norm"), ("F07", "kv_norm")}
    cases, fake = run(faults=())
    assert not any(isinstance(job, ControlJob) for job in fake.jobs)
    assert cases[0].verdict is Outcome.INCONCLUSIVE, "without controls nothing was shown"


def test_progress_counts_every_job_and_ends_full() -> None:
    chain = catalog.load("csa2-fused-m1")
    fake, seen = Fake(chain), []
    run_on_gpu([chain], Plan(REPLAYS), fake, lambda text, done, total: seen.append((text, done, total)))
    assert [done for _, done, _ in seen] == list(range(len(fake.jobs) + 1))
    assert {total for _, _, total in seen} == {len(fake.jobs)}
    assert seen[0][0] == "csa2-fused-m1: census of the graph"
    assert seen[1][0] == "csa2-fused-m1: arm as deployed"
    assert "csa2-fused-m1: arm delayed (projection, 2 us)" in {text for text, _, _ in seen}
    assert "csa2-fused-m1: exposure, as deployed" in {text for text, _, _ in seen}
    assert any(text.startswith("csa2-fused-m1: control F02 never waits @") for text, _, _ in seen)


@pytest.mark.parametrize("waits", [None, 0, 1, 3])
def test_progress_ends_full_although_the_census_changes_what_is_planned(waits: int | None, library: Library) -> None:
    chains = [library("csa2-fused-m1"), catalog.load("csa2-separate-m1"), library("csa2-separate-m4")]
    fake = Fake(*chains, waits=waits)
    seen: list[tuple[str, int, int]] = []
    cases = run_on_gpu(
        chains, Plan(REPLAYS, faults=("F02",)), fake, lambda text, done, total: seen.append((text, done, total))
    )
    assert seen[-1] == ("done", len(fake.jobs), len(fake.jobs))
    assert [done for _, done, _ in seen] == list(range(len(fake.jobs) + 1)), "each job counts once"
    assert all(done < total for _, done, total in seen[:-1]), "never full before the end"
    assert {total for text, _, total in seen if "exposure" in text and "early" in text} == {len(fake.jobs)}
    for case in cases:
        assert case.planned == (len(case.arms), len(case.controls))
        assert not any("planned" in reason for reason in case.reasons)


def test_progress_ends_full_although_a_case_was_given_up() -> None:
    seen: list[tuple[str, int, int]] = []
    chain = catalog.load("csa2-fused-m1")
    fake = Fake(chain, twist=fails(only(ArmJob, step="q_norm"), DeviceError("it hung")))
    run_on_gpu([chain], Plan(REPLAYS), fake, lambda text, done, total: seen.append((text, done, total)))
    text, done, total = seen[-1]
    assert (text, done) == ("done", total)


# --- what becomes of answers ---------------------------------------------------------------------------------------


def test_answers_end_up_in_the_case() -> None:
    (case,), fake = run()
    assert [(arm.name, arm.step, arm.delay_us) for arm in case.arms] == [
        (job.name, job.step, job.delay_us) for job in fake.jobs if isinstance(job, ArmJob)
    ]
    assert case.replays == REPLAYS * len(case.arms)
    assert case.mismatches == 0
    assert case.pool == 256
    assert case.window_us == 10.0, "the fake shows a fault only where it must"
    assert case.replays_per_second == pytest.approx(80_000), "of the arm as deployed"
    assert case.requested_replays == REPLAYS
    assert len(case.controls) == sum(isinstance(job, ControlJob) for job in fake.jobs)
    assert case.sass["q_norm, F02"] == "no ACQBULK"
    assert case.kernels == ["pdl_stress_source", "rmsnorm", "tinygemm2"]
    assert "ordered under «documented»" in case.model
    edges = {(e.source, e.target): e for e in case.edges}
    assert set(edges) == {*catalog.load("csa2-fused-m1").edges, ("kv_norm", "producer")}, "and the back-to-back one"
    assert all(e.kind == "programmatic" for e in case.edges)
    assert edges["projection", "q_norm"].overlap == 0.75
    assert edges["projection", "q_norm"].overlapped_in[0] == "as deployed"
    exposed = {(e.writer, e.reader): e.exposed_by for e in case.data_edges}
    assert exposed["projection", "kv_norm"] == ["delayed (projection, 10 us)"]


def change(which: Callable[[Job], bool], edit: Callable[[Any], Any]) -> Callable[[Job, Any], Any]:
    def twist(job: Job, answer: Any) -> Any:
        if which(job):
            edit(answer)
        return answer

    return twist


@pytest.mark.parametrize(
    ("twist", "outcome", "words"),
    [
        (
            change(only(ArmJob, name="back to back"), lambda a: vars(a.arm).update(mismatches=1)),
            Outcome.FAIL,
            "1 of 2000 replays differ in arm «back to back»",
        ),
        (
            change(only(ArmJob, step="kv_norm", delay_us=2.0), lambda a: vars(a.arm).update(counters_agree=False)),
            Outcome.INCONCLUSIVE,
            "device and host counts differ in arm «delayed (kv_norm, 2 us)»",
        ),
        (
            change(only(ArmJob, name="serialized"), lambda a: vars(a.edges[1]).update(kind="programmatic")),
            Outcome.ERROR,
            "the serialized arm still has programmatic edges",
        ),
        (
            change(only(ArmJob, step="q_norm"), lambda a: vars(a.edges[0]).update(kind="full")),
            Outcome.INCONCLUSIVE,
            "graph edge producer->input_norm is programmatic/full",
        ),
        (
            change(only(ArmJob, name="as deployed"), lambda a: vars(a.edges[2]).update(kind="missing")),
            Outcome.INCONCLUSIVE,
            "graph edge projection->q_norm is missing/programmatic",
        ),
        (
            change(only(ExposureJob), lambda a: a.exposed.pop(("projection", "kv_norm", "qkv"), None)),
            Outcome.INCONCLUSIVE,
            "data edge projection->kv_norm through qkv was never exposed",
        ),
        (
            change(only(ExposureJob), lambda a: a.overlap.update({("q_norm", "kv_norm"): 0.0})),
            Outcome.INCONCLUSIVE,
            "graph edge q_norm->kv_norm overlapped in no arm",
        ),
        (
            change(only(ControlJob, expected="clean"), lambda a: vars(a.result).update(kills=1, verdict="dirty")),
            Outcome.FAIL,
            "must be clean, and 1 of 256 replays differ",
        ),
        (
            change(only(ControlJob, expected="caught"), lambda a: vars(a.result).update(kills=17, verdict="missed")),
            Outcome.INCONCLUSIVE,
            "must be caught and was not: 17 kills of 256",
        ),
    ],
)
def test_a_bad_answer_costs_the_pass(twist: Callable[[Job, Any], Any], outcome: Outcome, words: str) -> None:
    (case,), _ = run(twist=twist)
    assert case.verdict is outcome
    assert any(words in reason for reason in case.reasons), case.reasons


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["native", "library"])
@pytest.mark.parametrize("error", [DeviceError("no such node"), RuntimeError("no such node")])
def test_a_failing_census_is_an_error_and_nothing_else_runs_for_its_case(
    what: str, error: Exception, library: Library
) -> None:
    """Without it nobody knows what the graph holds; and what breaks the simplest capture breaks every other."""
    chains = [library("csa2-fused-m1") if what == "library" else catalog.load("csa2-fused-m1")]
    chains.append(library("csa2-separate-m1"))
    fake = Fake(*chains, twist=fails(only(CensusJob, chain="csa2-fused-m1"), error))
    broken, whole = run_on_gpu(chains, Plan(REPLAYS), fake)
    assert broken.verdict is Outcome.ERROR
    assert broken.errors[0].startswith("census of the graph: ")
    assert broken.errors[0].endswith("no such node")
    assert [type(job) for job in fake.jobs if job.chain == "csa2-fused-m1"] == [CensusJob]
    assert (broken.arms, broken.controls, broken.nodes, broken.uncontrolled) == ([], [], [], {})
    skipped = [text for text in broken.errors if "jobs not run after that, from " in text]
    assert len(skipped) == (4 if what == "library" else 2), "arms, controls, patched ones, and what profiles"
    assert broken.untested == [], "nothing is known of its graph"
    assert (whole.verdict, whole.reasons) == (Outcome.PASS, [])


def test_a_census_that_answers_with_nothing_of_the_kind_is_an_error() -> None:
    (case,), fake = run(twist=lambda job, answer: None if isinstance(job, CensusJob) else answer)
    assert case.verdict is Outcome.ERROR
    assert case.errors[0] == "census of the graph: NoneType is no answer to CensusJob."
    assert len(fake.jobs) == 1


def test_an_interrupted_census_leaves_an_error(library: Library) -> None:
    chains = [library("csa2-fused-m1"), catalog.load("csa2-separate-m1")]
    kept: list[list[CaseResult]] = []

    def twist(job: Job, answer: Any) -> Any:
        if isinstance(job, CensusJob):
            raise KeyboardInterrupt
        return answer

    fake = Fake(*chains, twist=twist)
    with pytest.raises(KeyboardInterrupt):
        run_on_gpu(chains, Plan(REPLAYS), fake, keep=lambda c: kept.append(copy.deepcopy(c)))
    ((first, second),) = kept
    assert first.verdict is Outcome.ERROR
    assert first.nodes == []
    assert first.reasons[0] == f"0 of {len(plan_arms(chains[0], REPLAYS, DELAYS_US))} planned arms have a result"
    assert (second.verdict, second.arms) == (Outcome.INCONCLUSIVE, [])
    assert len(fake.jobs) == 1


@pytest.mark.parametrize(
    "which",
    [
        only(ArmJob, chain="csa2-fused-m1", name="serialized"),
        only(ArmJob, chain="csa2-fused-m1", step="q_norm", delay_us=10.0),
        only(ExposureJob, chain="csa2-fused-m1", name="as deployed"),
        only(ControlJob, chain="csa2-fused-m1", expected="clean"),
        only(ControlJob, chain="csa2-fused-m1", expected="unpromised"),
        lambda job: job.chain == "csa2-fused-m1",
    ],
    ids=["arm", "delayed arm", "exposure", "twin", "unpromised control", "every job"],
)
def test_a_failing_job_is_an_error_of_its_case_and_the_others_finish(which: Callable[[Job], bool]) -> None:
    (broken, whole), fake = run("csa2-fused-m1", "csa2-separate-m1", twist=fails(which, DeviceError("it hung")))
    assert broken.verdict is Outcome.ERROR
    assert any("it hung" in reason for reason in broken.reasons)
    assert whole.verdict is Outcome.PASS
    planned = [job for job in fake.jobs if job.chain == "csa2-fused-m1"]
    assert len(broken.arms) == sum(isinstance(job, ArmJob) for job in planned), "a failed arm is listed, with nothing"
    assert len(broken.controls) == sum(isinstance(job, ControlJob) for job in planned)


def test_a_failed_arm_is_named_and_grades_nothing() -> None:
    (case,), _ = run(
        faults=(), twist=fails(only(ArmJob, step="q_norm", delay_us=2.0), DeviceError("no answer within 7 s"))
    )
    assert case.errors[0] == "arm delayed (q_norm, 2 us): no answer within 7 s"
    (arm,) = (arm for arm in case.arms if (arm.step, arm.delay_us) == ("q_norm", 2.0))
    assert (arm.replays, arm.mismatches, arm.upper_bound_95) == (0, 0, None)


def test_a_failed_control_keeps_what_it_was_about() -> None:
    which = only(ControlJob, expected="caught")
    (case,), _ = run(faults=("F02@q_norm",), twist=fails(which, DeviceError("the worker died (exit code -9).")))
    (control,) = (c for c in case.controls if c.expected == "caught")
    assert (control.fault, control.reader, control.delay_us) == ("F02", "q_norm", 10.0)
    assert (control.verdict, control.note, control.kills) == ("error", "the worker died (exit code -9).", 0)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PdlStressError("no such kernel"), "no such kernel"),
        (RuntimeError("no such kernel"), "RuntimeError: no such kernel"),
        (KeyError("gain"), "KeyError: 'gain'"),
    ],
)
def test_an_op_may_raise_anything(error: Exception, text: str) -> None:
    (case,), _ = run(faults=(), twist=fails(only(ArmJob, name="as deployed"), error))
    assert case.errors[0] == f"arm as deployed: {text}"
    assert case.verdict is Outcome.ERROR


def test_a_case_with_a_failed_arm_is_given_up_and_says_what_did_not_run() -> None:
    """A kernel that hangs would hang in every job, for minutes each."""
    which = only(ArmJob, chain="csa2-fused-m1", step="q_norm", delay_us=2.0)
    (broken, whole), fake = run("csa2-fused-m1", "csa2-separate-m1", twist=fails(which, DeviceError("it hung")))
    ran = [job for job in fake.jobs if job.chain == "csa2-fused-m1"]
    assert which(ran[-1]), "neither a later arm nor a control"
    arms = len(clean_jobs(catalog.load("csa2-fused-m1"), Plan(REPLAYS)))
    controls = len(plan_controls(catalog.load("csa2-fused-m1"), None, DELAYS_US))
    arms += len(exposure_jobs(catalog.load("csa2-fused-m1"), Plan(REPLAYS)))
    assert broken.errors[1] == f"{arms - len(ran)} jobs not run after that, from «arm delayed (q_norm, 10 us)» on"
    assert broken.errors[2].startswith(f"{controls} jobs not run after that, from «control F00 ")
    assert whole.verdict is Outcome.PASS


def test_a_few_failing_controls_do_not_stop_the_others_and_many_do() -> None:
    chain = catalog.load("csa2-fused-m1")
    controls = len(plan_controls(chain, None, DELAYS_US))
    for failing, ran in ((MOST_FAILURES, controls), (MOST_FAILURES + 1, MOST_FAILURES + 1)):
        left = list(range(failing))

        def twist(job: Job, answer: Any, left: list[int] = left) -> Any:
            if isinstance(job, ControlJob) and left:
                left.pop()
                raise DeviceError("it hung")
            return answer

        (case,), _ = run(twist=twist)
        assert case.verdict is Outcome.ERROR
        assert len(case.controls) == ran
        assert bool(case.errors) is (ran < controls)
        assert sum(control.verdict == "error" for control in case.controls) == failing


def test_an_interrupt_is_not_swallowed() -> None:
    chain = catalog.load("csa2-fused-m1")
    with pytest.raises(KeyboardInterrupt):
        run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=_interrupt))


def _interrupt(job: Job, answer: Any) -> Any:
    raise KeyboardInterrupt


def test_what_has_finished_is_kept_after_each_phase_of_each_case() -> None:
    chains = [catalog.load("csa2-fused-m1"), catalog.load("csa2-separate-m1")]
    kept: list[list[CaseResult]] = []
    cases = run_on_gpu(chains, Plan(REPLAYS), Fake(*chains), keep=lambda found: kept.append(copy.deepcopy(found)))
    assert len(kept) == 8
    assert all([case.chain for case in cases_] == [chain.name for chain in chains] for cases_ in kept)
    assert kept[-1] == cases
    assert kept[0][0].arms == cases[0].arms
    assert kept[0][0].controls == []
    assert kept[0][1].arms == []
    assert kept[0][0].verdict is Outcome.ERROR, "planned controls have no result yet"
    assert kept[0][1].verdict is Outcome.INCONCLUSIVE, "half a run must not read as a pass"
    assert kept[2][0].verdict is Outcome.PASS
    assert kept[2][1].verdict is Outcome.ERROR


def test_a_library_case_passes_only_once_its_exposure_was_measured(library: Library) -> None:
    chain = library("csa2-fused-m1")
    kept: list[list[CaseResult]] = []
    run_on_gpu([chain], Plan(REPLAYS), Fake(chain), keep=lambda found: kept.append(copy.deepcopy(found)))
    arms, controls, patched, profiled = (found[0] for found in kept)
    assert (arms.verdict, controls.verdict) == (Outcome.ERROR, Outcome.ERROR), "patched ones are planned, and missing"
    assert (patched.verdict, profiled.verdict) == (Outcome.INCONCLUSIVE, Outcome.PASS)
    assert all("overlapped in no arm" in text or "never exposed (not measured)" in text for text in patched.reasons)


def test_a_mismatch_counted_before_an_interrupt_is_judged_and_kept() -> None:
    chains = [catalog.load("csa2-fused-m1"), catalog.load("csa2-separate-m1")]
    kept: list[list[CaseResult]] = []

    def twist(job: Job, answer: Any) -> Any:
        if job.chain == "csa2-fused-m1" and only(ArmJob, name="as deployed")(job):
            answer.arm.mismatches = 1
        if only(ArmJob, name="back to back")(job):
            raise KeyboardInterrupt
        return answer

    with pytest.raises(KeyboardInterrupt):
        run_on_gpu(chains, Plan(REPLAYS), Fake(*chains, twist=twist), keep=lambda c: kept.append(copy.deepcopy(c)))
    ((first, second),) = kept
    assert first.verdict is Outcome.FAIL
    assert any("1 of 2000 replays differ in arm «as deployed»" in reason for reason in first.reasons)
    assert any(reason.startswith("3 of 18 planned arms have a result") for reason in first.reasons), first.reasons
    assert (second.verdict, second.arms) == (Outcome.INCONCLUSIVE, []), "it had not begun"


def test_an_interrupt_among_controls_leaves_an_error() -> None:
    chain = catalog.load("csa2-fused-m1")
    kept: list[list[CaseResult]] = []
    left = [None] * 5

    def twist(job: Job, answer: Any) -> Any:
        if isinstance(job, ControlJob):
            if not left:
                raise KeyboardInterrupt
            left.pop()
        return answer

    with pytest.raises(KeyboardInterrupt):
        run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=twist), keep=lambda c: kept.append(copy.deepcopy(c)))
    (case,) = kept[-1]
    assert len(case.controls) == 5
    assert case.verdict is Outcome.ERROR
    assert any(reason.startswith("5 of ") and "planned controls" in reason for reason in case.reasons)


# --- answers that are none -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "which",
    [
        only(ArmJob, name="as deployed"),
        only(ArmJob, name="serialized"),
        only(ArmJob, step="kv_norm", delay_us=2.0),
        only(ExposureJob, name="as deployed"),
        only(ControlJob, expected="caught"),
        only(ControlJob, expected="clean"),
        only(ControlJob, expected="unpromised"),
        lambda job: True,
    ],
    ids=["an arm", "serialized", "delayed", "exposure", "caught", "clean", "unpromised", "all"],
)
def test_answers_that_get_lost_are_an_error(which: Callable[[Job], bool]) -> None:
    (case,), _ = run(twist=lambda job, answer: None if which(job) else answer)
    assert case.verdict is Outcome.ERROR
    assert any("NoneType is no answer to " in reason for reason in case.reasons), case.reasons


def test_the_last_answer_given_again_is_an_error() -> None:
    """As an executor would that is one answer behind."""
    before: list[Any] = []

    def late(job: Job, answer: Any) -> Any:
        if not isinstance(job, ArmJob):
            return answer
        before.append(answer)
        return before[-2] if len(before) > 1 else answer

    (case,), _ = run(twist=late)
    assert case.verdict is Outcome.ERROR
    assert any("an answer to another job" in reason for reason in case.reasons)


def test_a_chain_that_is_not_the_one_that_was_judged_is_an_error() -> None:
    """The real executor, which refuses before it touches a GPU."""
    from pdl_stress.cuda.executor import Executor

    judged = mixed_chain()
    built = judged.varied({"last": {"wait": Wait.NEVER}})
    (case,) = run_on_gpu([judged], Plan(REPLAYS), Executor(lambda name: built))
    assert case.verdict is Outcome.ERROR
    assert "is not the one that was judged" in case.reasons[0]
    assert (case.arms, case.controls) == ([], []), "it shows with the first job"


# --- chains that controls cannot cover -----------------------------------------------------------------------------


def native(*reads: str, **contract: Any) -> Op:
    made = KernelContract(reads, ("o",), **contract)
    return Op("native", made, lambda **_: None, made, waits=frozenset(Wait))


def war_chain() -> Chain:
    """s1 writes x, s2 reads it, s3 overwrites it."""
    chain = Chain("war")
    hidden = chain.input("h", (4,), "float32")
    x, y = chain.buffer("x", (4,), "float32"), chain.buffer("y", (4,), "float32")
    chain.step("s1", native("a"), a=hidden, o=x)
    chain.step("s2", native("a"), a=x, o=y)
    chain.step("s3", native("a"), a=y, o=x)
    return chain


def test_a_buffer_that_is_written_again_is_inconclusive_on_a_perfect_gpu() -> None:
    """No control breaks the order of a write behind a read: a clean run says nothing about it."""
    chain = war_chain()
    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain))
    assert case.verdict is Outcome.INCONCLUSIVE
    assert case.reuses == ["s3 writes x, which s1 wrote", "s3 writes x, which s2 reads"]
    assert case.reasons[:2] == [f"{text}: no control covers that order yet" for text in case.reuses]


def test_twins_of_a_residual_chain_may_kill_and_it_passes(residual_chain: Chain) -> None:
    """The twin of F07 skips the wait that also orders B's y: what it shows is no fault of the chain."""
    chain = residual_chain

    def kills(job: Job, answer: Any) -> Any:
        # No assertion in here: run_on_gpu would take it for a job that failed.
        if isinstance(job, ControlJob) and "twin" in job.control.variant and job.control.fault == "F07":
            vars(answer.result).update(kills=job.replays, verdict="seen")
        return answer

    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=kills))
    assert (case.verdict, case.reasons) == (Outcome.PASS, [])
    found = [c for c in case.controls if c.fault == "F07"]
    assert {(c.writer, c.reader) for c in found} == {("A", "R")}
    assert [c.expected for c in found if c.delay_us == 10.0] == ["caught", "unpromised", "unpromised"]
    twins = [c for c in found if "twin" in c.variant]
    assert [c.kills > 0 for c in twins] == [True] * 3
    assert all(c.reason.startswith("not attributable: another race is possible, stale read: R reads y") for c in twins)


# --- chains of kernels that cannot be rebuilt ------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.CSA2)
@pytest.mark.parametrize("waits", [1, 3])
def test_a_healthy_gpu_passes_every_chain_of_library_kernels(name: str, waits: int, library: Library) -> None:
    chain = library(name)
    fake = Fake(chain, waits=waits)
    (case,) = run_on_gpu([chain], Plan(REPLAYS), fake)
    assert (case.verdict, case.reasons) == (Outcome.PASS, [])
    assert case.uncontrolled == {}
    assert [node.step for node in case.nodes] == [step.name for step in chain.steps]
    assert [job for job in fake.jobs if isinstance(job, ArmJob)] == plan_arms(chain, REPLAYS, DELAYS_US)
    assert [j for j in fake.jobs if isinstance(j, ControlJob)] == control_jobs(chain, Plan(), case.nodes)
    assert case.planned == (len(case.arms), len(case.controls))
    single = [c for c in case.controls if c.variant.startswith("wait ")]
    assert len(single) == (0 if waits == 1 else waits * len(chain.data_edges) * len(DELAYS_US))
    assert case.window_us == 10.0, "what promises nothing has no say in it"
    assert case.sass["q_norm, F02"] in ("all waits removed", "loaded again", "wait 2 removed")


@pytest.mark.parametrize(
    ("waits", "why"),
    [(None, "lib.so"), (0, "the machine code of {} (lib.so) holds no wait")],
)
def test_kernels_whose_waits_cannot_be_removed_are_inconclusive_and_named(
    waits: int | None, why: str, library: Library
) -> None:
    """Where a wait cannot be taken away, nothing shows that its absence would have been seen."""
    chain = library("csa2-fused-m1")
    fake = Fake(chain, waits=waits)
    (case,) = run_on_gpu([chain], Plan(REPLAYS), fake)
    steps = ["input_norm", "projection", "q_norm", "kv_norm"]
    assert case.uncontrolled == {name: why.format(kernel_of(chain[name])) for name in steps}
    assert case.verdict is Outcome.INCONCLUSIVE
    assert case.reasons[:4] == [f"no control of {name} is possible: {case.uncontrolled[name]}" for name in steps]
    assert case.planned == (len(case.arms), len(case.controls))
    assert case.controls
    assert not any(step.patch for j in fake.jobs if isinstance(j, ControlJob) for step in j.control.apply(chain).steps)
    assert case.errors == []


def test_one_kernel_without_code_costs_the_pass_and_the_others_keep_their_controls(library: Library) -> None:
    def twist(job: Job, answer: Any) -> Any:
        if isinstance(job, CensusJob):
            (found,) = (node for node in answer.nodes if node.step == "q_norm")
            found.waits, found.code = None, "no library holds it"
        return answer

    chain = library("csa2-fused-m1")
    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=twist))
    assert case.verdict is Outcome.INCONCLUSIVE
    assert case.uncontrolled == {"q_norm": "no library holds it"}
    assert case.reasons[0] == "no control of q_norm is possible: no library holds it"
    assert len(case.reasons) == 2
    assert case.reasons[1].startswith("no control was caught on projection->q_norm through qkv")
    assert {c.reader for c in case.controls if c.verdict == "caught"} >= {"input_norm", "projection", "kv_norm"}


@pytest.mark.parametrize("name", catalog.CSA2)
def test_a_census_without_machine_code_is_no_matter_to_kernels_that_are_rebuilt(name: str) -> None:
    chain = catalog.load(name)
    fake = Fake(chain, waits=None)
    (case,) = run_on_gpu([chain], Plan(REPLAYS), fake)
    assert (case.verdict, case.reasons, case.uncontrolled) == (Outcome.PASS, [], {})
    assert len(case.controls) == len(plan_controls(chain, None, DELAYS_US))


def test_a_kernel_that_cannot_be_exchanged_for_itself_is_inconclusive_not_failed(library: Library) -> None:
    """What differs is then the loading again, not the wait."""
    chain = library("csa2-fused-m1")
    which = lambda job: isinstance(job, ControlJob) and job.control.variant == RELOADED  # noqa: E731
    dirty = change(which, lambda answer: vars(answer.result).update(kills=256, verdict="dirty"))
    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=dirty))
    assert case.verdict is Outcome.INCONCLUSIVE
    dirty_ones = [reason for reason in case.reasons if "its machine code cannot be exchanged like that" in reason]
    assert len(dirty_ones) == len(chain.data_edges) * len(DELAYS_US)
    caught = [c for c in case.controls if c.patched and c.verdict == "caught"]
    assert sorted(set(case.reasons) - set(dirty_ones)) == sorted(map(alone, caught)), (
        "and what was caught shows nothing"
    )


def alone(control: ControlResult) -> str:
    return (
        f"control {control.fault} ({control.variant}) on {control.writer}->{control.reader}, {control.delay_us:g} us, "
        "was caught with patched machine code; the same code unpatched was not shown to be clean there"
    )


def test_what_machine_code_shows_without_its_twin_is_inconclusive(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdl_stress.faults._twins", lambda chain, controls: [])
    for chain in (library("csa2-fused-m1"), library("csa2-fused-m1", only=("q_norm",))):
        (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain))
        assert case.verdict is Outcome.INCONCLUSIVE
        assert case.reasons
        assert case.reasons == [alone(c) for c in case.controls if c.patched and c.verdict == "caught"]


@pytest.mark.parametrize("delay", [0.0, 2.0, 10.0])
def test_one_twin_that_was_not_clean_costs_the_pass(delay: float, library: Library) -> None:
    chain = library("csa2-fused-m1")
    which = lambda j: isinstance(j, ControlJob) and j.patched == "loaded again" and j.control.delay_us == delay  # noqa: E731
    one = change(which, lambda a: vars(a.result).update(kills=int(a.result.reader == "kv_norm"), verdict="clean"))
    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=one))
    assert case.verdict is Outcome.INCONCLUSIVE
    assert all("projection->kv_norm" in reason for reason in case.reasons)
    assert any("was caught with patched machine code" in reason for reason in case.reasons) is (delay == 10.0)


@pytest.mark.parametrize("faults", [("F00",), ("F00", "F07", "F28")])
def test_chosen_faults_bring_the_twins_of_what_they_patch(faults: tuple[str, ...], library: Library) -> None:
    """They came with F02 alone, and a run of F00 passed without them."""
    chain = library("csa2-fused-m1")
    (case,) = run_on_gpu([chain], Plan(REPLAYS, faults=faults), Fake(chain))
    assert (case.verdict, case.reasons) == (Outcome.PASS, [])
    twins = [(c.writer, c.reader, c.delay_us) for c in case.controls if c.variant == RELOADED]
    assert sorted(twins) == sorted((e.writer, e.reader, delay) for e in chain.data_edges for delay in DELAYS_US)
    assert {c.fault for c in case.controls if c.variant == RELOADED} == {"F00"}


# --- what the census shows and nothing tests -------------------------------------------------------------------------


def add_kernel(step: str, waits: int | None, **fields: Any) -> Callable[[Job, Any], Any]:
    """One more kernel of the step, behind its own."""

    def edit(answer: CensusAnswer) -> None:
        (place,) = (index for index, node in enumerate(answer.nodes) if node.step == step)
        more = copy.copy(answer.nodes[place])
        vars(more).update(name="second", waits=waits, **fields)
        answer.nodes.insert(place + 1, more)

    return change(only(CensusJob), edit)


@pytest.mark.parametrize("what", ["native", "library"])
@pytest.mark.parametrize("waits", [0, 1, None])
def test_a_second_kernel_of_a_step_that_overlaps_the_first_is_inconclusive(
    what: str, waits: int | None, library: Library
) -> None:
    """A split-K kernel and its reduction. What the one hands to the other is no buffer of the chain: the reduction need
    not wait, every control of the first one is caught, and every arm is clean as long as the GPU is kind."""
    chain = library("csa2-fused-m1") if what == "library" else catalog.load("csa2-fused-m1")
    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=add_kernel("projection", waits)))
    assert case.verdict is Outcome.INCONCLUSIVE
    first = kernel_of(chain["projection"])
    several = f"projection launches several nodes that overlap ({first}, second): what they hand to each other is not"
    assert any(reason.startswith(several) for reason in case.reasons)
    never = (
        "projection: the contract says that it waits (loaders), and the machine code of second (lib.so) holds no wait"
    )
    assert (never in case.reasons) is (waits == 0)
    assert case.untested == [reason for reason in case.reasons if reason in case.untested]


@pytest.mark.parametrize("what", ["native", "library"])
def test_a_second_kernel_behind_a_full_edge_is_ordered(what: str, library: Library) -> None:
    chain = library("csa2-fused-m1") if what == "library" else catalog.load("csa2-fused-m1")
    full = add_kernel("projection", 0 if what == "library" else None, incoming=["full"])
    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=full))
    assert (case.verdict, case.reasons, case.untested) == (Outcome.PASS, [], [])


def test_a_step_between_that_never_waits_although_its_contract_says_so_is_inconclusive(library: Library) -> None:
    """q_norm's readers lie elsewhere, and every control of kv_norm, whose wait covers the projection only through
    q_norm's, puts a stand-in in its place, which waits. No mismatch, no missed control: only the census can tell."""
    chain = library("csa2-fused-m1", only=("q_norm",))
    never = change(only(CensusJob), lambda a: [vars(node).update(waits=0) for node in a.nodes if node.step == "q_norm"])
    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=never))
    assert case.verdict is Outcome.INCONCLUSIVE
    text = (
        f"q_norm: the contract says that it waits (all), and the machine code of {kernel_of(chain['q_norm'])} (lib.so)"
    )
    assert any(reason.startswith(text) for reason in case.untested)
    assert set(case.untested) <= set(case.reasons)


def test_a_step_that_reads_constants_and_never_waits_is_inconclusive_too() -> None:
    """It has no data edge that a control could break; but what comes behind it relies on its wait (R8)."""
    chain = Chain("between")
    x, y, z = (chain.buffer(name, (4,), "float32") for name in "xyz")
    contract = KernelContract(("a",), ("o",))
    fixed = Op("library", contract, lambda **_: None, contract)
    chain.step("first", fixed, a=chain.input("h", (4,), "float32"), o=x)
    chain.step("between", fixed, a=chain.constant("w", (4,), "float32"), o=y)
    chain.step("last", fixed, a=x, o=z)
    (whole,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain))
    assert (whole.verdict, whole.reasons) == (Outcome.PASS, [])
    never = change(
        only(CensusJob), lambda a: [vars(node).update(waits=0) for node in a.nodes if node.step == "between"]
    )
    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=never))
    text = "between: the contract says that it waits (all), and the machine code of library (lib.so) holds no wait"
    assert (case.verdict, case.reasons, case.uncontrolled) == (Outcome.INCONCLUSIVE, [text], {})


def test_a_census_that_holds_nothing_costs_the_pass() -> None:
    """What was not looked at may be anything."""
    empty = change(only(CensusJob), lambda answer: answer.nodes.clear())
    (case,), _ = run(twist=empty)
    assert case.verdict is Outcome.INCONCLUSIVE
    assert case.reasons == [f"{step.name} launches no kernel" for step in catalog.load("csa2-fused-m1").steps]


def test_a_census_that_lacks_a_step_costs_the_pass() -> None:
    def edit(answer: CensusAnswer) -> None:
        answer.nodes[:] = [node for node in answer.nodes if node.step != "kv_norm"]

    (case,), _ = run(twist=change(only(CensusJob), edit))
    assert (case.verdict, case.reasons) == (Outcome.INCONCLUSIVE, ["kv_norm launches no kernel"])


# --- chains that not every perturbation leaves ordered ---------------------------------------------------------------


@pytest.mark.parametrize("waits", [1, 2, 3])
def test_an_update_in_place_by_library_kernels_is_inconclusive_not_an_error(waits: int, in_place: Chain) -> None:
    """No stand-in can take gemm's place, since its output is changed behind it; planning must survive that."""
    (case,) = run_on_gpu([in_place], Plan(REPLAYS), Fake(in_place, waits=waits))
    assert case.verdict is Outcome.INCONCLUSIVE
    assert case.errors == []
    assert case.planned == (len(case.arms), len(case.controls))
    assert any("no control was caught on gemm->scale through x" in reason for reason in case.reasons)
    assert any("data edge gemm->scale through x was never exposed" in reason for reason in case.reasons)
    assert {c.writer for c in case.controls} == {"producer", "scale"}


@pytest.mark.parametrize("fixed", [False, True])
def test_a_chain_that_relies_on_a_fence_is_inconclusive_on_a_healthy_gpu(fixed: bool) -> None:
    """Told to trigger early its writer would be wrong, and rightly so: it FAILed. So it is not exposed."""
    chain = Chain("fence")
    waits = frozenset() if fixed else frozenset(Wait)

    def kernel(**contract: Any) -> Op:
        made = KernelContract(("a",), ("o",), **contract)
        return Op("kernel", made, lambda **_: None, made, waits=waits)

    x, y = chain.buffer("x", (4,), "float32"), chain.buffer("y", (4,), "float32")
    chain.step("writer", kernel(fence=True), a=chain.input("h", (4,), "float32"), o=x)
    chain.step("reader", kernel(independent=("a",)), a=x, o=y)

    def wrong(job: Job, answer: Any) -> Any:
        """A GPU that shows whatever race there is."""
        if isinstance(job, ArmJob) and find_races(job.variant(chain), OBSERVED_SM90, 2):
            vars(answer.arm).update(mismatches=job.replays)
        return answer

    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=wrong))
    assert (case.mismatches, case.errors, case.timeline) == (0, [], [])
    assert case.verdict is Outcome.INCONCLUSIVE
    assert any("data edge writer->reader through x was never exposed" in reason for reason in case.reasons)
    assert any(reason.startswith("no clean arm delays writer by 10 us") for reason in case.reasons)


def test_what_one_removed_wait_of_several_shows_changes_no_verdict(library: Library) -> None:
    chain = library("csa2-fused-m1")
    which = lambda job: isinstance(job, ControlJob) and job.control.variant.startswith("wait ")  # noqa: E731
    seen = change(which, lambda answer: vars(answer.result).update(kills=256, verdict="seen", cause_checked=True))
    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=seen, waits=2))
    assert (case.verdict, case.reasons) == (Outcome.PASS, [])
    assert sum(c.verdict == "seen" for c in case.controls) == 2 * len(chain.data_edges) * len(DELAYS_US)


def test_a_profiler_that_gives_nothing_is_inconclusive_and_says_why(library: Library) -> None:
    chain = library("csa2-fused-m1")
    why = "the profiler gave no valid records: it recorded no kernel"
    none = change(only(ExposureJob), lambda a: vars(a).update(overlap={}, exposed={}, method=why))
    (case,) = run_on_gpu([chain], Plan(REPLAYS), Fake(chain, twist=none))
    assert case.verdict is Outcome.INCONCLUSIVE
    assert case.exposure == why
    assert f"data edge projection->q_norm through qkv was never exposed ({why})" in case.reasons
    assert "graph edge projection->q_norm overlapped in no arm" in case.reasons
    assert all(edge.overlap is None for edge in case.edges)


def test_a_failing_profiler_is_an_error_that_costs_no_count(library: Library) -> None:
    chain = library("csa2-fused-m1")
    fake = Fake(chain, twist=fails(only(ExposureJob, name="as deployed"), DeviceError("the worker died")))
    (case,) = run_on_gpu([chain], Plan(REPLAYS), fake)
    assert case.verdict is Outcome.ERROR
    assert case.errors[0] == "exposure, as deployed: the worker died"
    assert case.planned == (len(case.arms), len(case.controls))
    assert all(c.verdict in VERDICTS.values() for c in case.controls)


def test_controls_may_be_chosen_after_the_census_too(library: Library) -> None:
    chain = library("csa2-fused-m1")
    fake = Fake(chain, waits=2)
    (case,) = run_on_gpu([chain], Plan(REPLAYS, faults=("F02@q_norm",)), fake)
    assert {(c.fault, c.reader) for c in case.controls} == {("F02", "q_norm")}
    assert {c.variant for c in case.controls} == {"never waits", RELOADED, "wait 0 removed", "wait 1 removed"}
    assert case.planned == (len(case.arms), len(case.controls))
    (case,) = run_on_gpu([chain], Plan(REPLAYS, faults=()), Fake(chain, waits=2))
    assert (case.controls, case.planned[1], case.verdict) == ([], 0, Outcome.INCONCLUSIVE)


def test_a_fault_planted_in_a_library_kernel_runs_alone(library: Library) -> None:
    chain = library("csa2-fused-m1")
    fake = Fake(chain, waits=None)
    (case,) = run_on_gpu([chain], Plan(REPLAYS, planted="F02@q_norm"), fake)
    assert case.verdict is Outcome.FAIL
    assert (case.nodes, case.uncontrolled, case.untested, case.planned) == ([], {}, [], (2, 0))
    assert [job.variant(chain)["q_norm"].patch for job in fake.jobs if isinstance(job, ArmJob)] == [Patch(None)] * 2


@pytest.mark.parametrize("name", catalog.CSA2)
def test_the_model_judges_library_kernels_by_their_contracts_as_native_ones(name: str, library: Library) -> None:
    (native,), (fixed,) = run_on_model([catalog.load(name)], Plan()), run_on_model([library(name)], Plan())
    assert fixed.verdict is Outcome.ORDERED
    assert fixed.controls == native.controls


# --- blockers ------------------------------------------------------------------------------------------------------


def test_a_blocker_stops_everything_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdl_stress.cuda.findings import Finding, Status

    finding = Finding("profiler", Status.BLOCKS_VERDICT, "nsys is attached", "Run without it.")
    monkeypatch.setattr("pdl_stress.cuda.device.verdict_blockers", lambda: [finding])
    cases, fake = run("csa2-fused-m1", "csa2-separate-m1")
    assert fake.jobs == []
    for case in cases:
        assert case.verdict is Outcome.INCONCLUSIVE
        assert case.reasons == ["nothing ran: profiler: nsys is attached. Run without it."]


def test_launch_blocking_is_a_blocker(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdl_stress.cuda import interference
    from pdl_stress.cuda.findings import Status

    def blockers() -> list[Any]:
        return [finding for finding in interference.inspect() if finding.status is Status.BLOCKS_VERDICT]

    monkeypatch.setattr("pdl_stress.cuda.device.verdict_blockers", blockers)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    (case,), fake = run()
    assert fake.jobs == []
    assert case.verdict is Outcome.INCONCLUSIVE
    assert any("CUDA_LAUNCH_BLOCKING" in reason for reason in case.reasons)


# --- planted chains ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["model", "cuda"])
@pytest.mark.parametrize("text", ["F00@q_norm", "F02@q_norm", "F04@kv_norm", "F07@kv_norm", "F28@projection"])
def test_a_planted_fault_fails_and_names_writer_and_reader(text: str, machine: str) -> None:
    chain = catalog.load("csa2-fused-m1")
    fault, _, reader = text.partition("@")
    plan = Plan(REPLAYS, planted=text)
    if machine == "model":
        (case,) = run_on_model([chain], plan)
    else:
        fake = Fake(chain)
        (case,) = run_on_gpu([chain], plan, fake)
        assert [(job.name.split(" ")[0], job.serialized) for job in fake.jobs if isinstance(job, ArmJob)] == [
            ("planted", False),
            ("planted,", True),
        ]
        assert len(fake.jobs) == 2
        assert all(isinstance(job, ArmJob) and job.planted and job.planted.fault == fault for job in fake.jobs)
    writer = {"q_norm": "projection", "kv_norm": "projection", "projection": "late_weight"}[reader]
    assert case.verdict is Outcome.FAIL
    assert case.planted.startswith(f"{fault} ")
    assert case.controls == []
    assert case.model.startswith(f"{reader} may read ")
    assert f"before {writer} writes it" in case.model
    assert any(f"<-- before {writer} writes it" in line for line in case.timeline)


def test_a_plant_that_cannot_be_is_refused_before_anything_runs() -> None:
    chain = catalog.load("csa2-fused-m1")
    fake = Fake(chain)
    with pytest.raises(UsageError, match="cannot be caught"):
        run_on_gpu([chain], Plan(REPLAYS, planted="F07@q_norm"), fake)
    assert fake.jobs == []


# --- the model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [DOCUMENTED, OBSERVED_SM90], ids=["documented", "observed"])
def test_the_shipped_chains_are_ordered_and_every_control_is_refuted(rules: Any) -> None:
    cases = run_on_model([catalog.load(name) for name in catalog.SHIPPED], Plan(rules=rules))
    for case in cases:
        assert (case.verdict, case.reasons, case.timeline) == (Outcome.ORDERED, [], [])
        verdicts = {(c.expected, c.verdict) for c in case.controls}
        assert verdicts == {("caught", "refuted"), ("clean", "ordered"), ("unpromised", "allowed")}
        assert case.model.startswith(f"ordered under «{rules.name}»")


def test_the_model_gives_no_rates_and_no_bounds() -> None:
    (case,) = run_on_model([catalog.load("csa2-fused-m1")], Plan())
    assert (case.machine, case.arms, case.edges) == ("model", [], [])
    assert (case.replays, case.replays_per_second, case.pool) == (0, None, None)
    assert all((c.replays, c.kills) == (0, 0) for c in case.controls)
    assert {c.delay_us for c in case.controls} == {10.0}, "time does not exist on the model: one window is enough"


def test_the_model_tells_how_far_it_is_and_keeps_each_case() -> None:
    chains = [catalog.load("csa2-fused-m1"), catalog.load("csa2-separate-m1")]
    seen: list[tuple[str, int, int]] = []
    kept: list[list[CaseResult]] = []
    cases = run_on_model(
        chains,
        Plan(faults=("F02", "F07")),
        lambda text, done, total: seen.append((text, done, total)),
        lambda found: kept.append(copy.deepcopy(found)),
    )
    assert [[case.chain for case in found] for found in kept] == [[chains[0].name], [chain.name for chain in chains]]
    assert kept[-1] == cases
    controls = sum(len(case.controls) for case in cases)
    assert {total for _, _, total in seen} == {controls + 2}
    counts = [done for _, done, _ in seen]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, controls + 2)
    assert [text for text, _, _ in seen if text.endswith(": model")] == [f"{chain.name}: model" for chain in chains]
    assert sum(": control F02 never waits @" in text for text, _, _ in seen) == 9
    assert all(case.planned == (0, len(case.controls)) for case in cases)


def test_the_model_controls_what_has_no_kernels_to_control() -> None:
    """A third party's ops cannot be rebuilt; their contracts can be varied all the same."""
    chain = mixed_chain()
    for step in chain.steps:
        if not step.source:
            assert step.op.rebuildable is (step.name != "middle")
    (case,) = run_on_model([chain], Plan())
    assert case.verdict is Outcome.ORDERED
    assert {(c.writer, c.reader) for c in case.controls if c.verdict == "refuted"} >= {
        (e.writer, e.reader) for e in chain.data_edges
    }


def test_a_long_chain_is_modelled() -> None:
    """Forty steps, every control of one fault and its twin: what was quadratic in the events would take minutes."""
    chain = Chain("long")
    last = chain.input("h", (4,), "float32")
    for number in range(40):
        out = chain.buffer(f"x{number}", (4,), "float32")
        chain.step(f"s{number}", native("a"), a=last, o=out)
        last = out
    (case,) = run_on_model([chain], Plan(faults=("F04",)))
    assert case.verdict is Outcome.ORDERED
    assert len(case.controls) == 80


def broken_chain(wait: Wait = Wait.NEVER, middle: Wait | None = None) -> Chain:
    chain = Chain("broken")

    def kernel(**contract: Any) -> Op:
        made = KernelContract(("a",), ("o",), **contract)
        return Op("kernel", made, lambda **_: None, made, waits=frozenset(Wait))

    x, y, z = (chain.buffer(name, (4,), "float32") for name in "xyz")
    hidden, free = chain.input("h", (4,), "float32"), chain.constant("free", (4,), "float32")
    chain.step("first", kernel(trigger=Trigger.ENTRY), a=hidden, o=x)
    if middle:
        chain.step("middle", kernel(wait=middle, trigger=Trigger.ENTRY), a=free, o=z)
    chain.step("last", kernel(wait=wait), a=x, o=y)
    return chain


def test_a_broken_contract_fails_on_the_model_with_a_timeline() -> None:
    (case,) = run_on_model([broken_chain()], Plan())
    assert case.verdict is Outcome.FAIL
    assert "stale read: last may overtake first on x under «documented»" in case.model
    assert "ordered only under" not in case.model
    assert any("reads x, which holds poison   <-- before first writes it" in line for line in case.timeline)


def test_a_chain_that_only_hardware_orders_is_told_apart() -> None:
    """R8: ordered by what H200s do, not by what is promised."""
    chain = broken_chain(wait=Wait.ALL, middle=Wait.NEVER)
    (documented,) = run_on_model([chain], Plan())
    assert documented.verdict is Outcome.FAIL
    assert documented.model.endswith("; ordered only under «observed:sm_90»")
    (observed,) = run_on_model([chain], Plan(rules=OBSERVED_SM90))
    assert observed.timeline == []
    assert observed.model.endswith("; NOT ordered by the documented rules")


def test_a_race_between_replays_is_found_too() -> None:
    """F22: one replay alone is ordered; two in a row are not."""
    chain = Chain("state")
    made = KernelContract(("a",), ("o",), trigger=Trigger.ENTRY)
    kernel = Op("kernel", made, lambda **_: None, made, waits=frozenset(Wait))
    early = KernelContract(("a",), ("o",), independent=("o",))
    writer = Op("writer", early, lambda **_: None, early, waits=frozenset(Wait))
    state, y = chain.buffer("state", (4,), "float32"), chain.buffer("y", (4,), "float32")
    chain.step("init", writer, a=chain.input("h", (4,), "float32"), o=state)
    chain.step("use", kernel, a=state, o=y)
    case = new_case(chain, Plan(rules=OBSERVED_SM90), "model")
    assert "read after overwrite: init may overtake use on state" in case.model
    assert any("(replay 1)" in line for line in case.timeline)


# --- the power window ----------------------------------------------------------------------------------------------


def windows(kills: dict[float, int], *, expected: str = "caught", variant: str = "v") -> list[ControlResult]:
    return [
        ControlResult("F02", variant, "c", "p", "c", "x", delay, expected if delay >= 10 else "unpromised", "", 256, n)
        for delay, n in kills.items()
    ]


@pytest.mark.parametrize(
    ("kills", "window"),
    [
        ({0.0: 0, 2.0: 256, 10.0: 256}, 2.0),
        ({0.0: 256, 2.0: 256, 10.0: 256}, 0.0),
        ({0.0: 0, 2.0: 2, 10.0: 256}, 10.0),
        ({0.0: 256, 2.0: 0, 10.0: 256}, 10.0),
        ({0.0: 0, 2.0: 0, 10.0: 0}, None),
        ({0.0: 0, 2.0: 256, 10.0: 2}, None),
    ],
)
def test_the_power_window_is_the_smallest_from_which_on_a_fault_shows(
    kills: dict[float, int], window: float | None
) -> None:
    assert power_window(windows(kills)) == window


def test_the_power_window_is_that_of_the_weakest_control() -> None:
    strong, weak = windows({0.0: 256, 10.0: 256}), windows({0.0: 0, 10.0: 256}, variant="w")
    never = windows({0.0: 0, 10.0: 0}, variant="u", expected="unpromised")
    assert power_window(strong + never) == 0.0
    assert power_window(strong + weak + never) == 10.0
    assert power_window(strong + windows({0.0: 0, 10.0: 0}, variant="w")) is None
    assert power_window([]) is None
