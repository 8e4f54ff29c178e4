"""From counts to verdicts of single jobs: when a kill counts, and what a serialized twin has to show.

The bench, which needs a GPU, is replaced by one that returns the counts it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdl_stress import Chain, KernelContract, Op, PdlStressError, Trigger, Wait
from pdl_stress.chain import DataEdge, Patch
from pdl_stress.cuda import executor as module
from pdl_stress.cuda.bench import Counts
from pdl_stress.cuda.captured import Captured
from pdl_stress.cuda.executor import Executor
from pdl_stress.faults import RELOADED, Control
from pdl_stress.jobs import (
    NEIGHBOURS,
    ArmAnswer,
    ArmJob,
    CensusAnswer,
    CensusJob,
    ControlAnswer,
    ControlJob,
    ExposureAnswer,
    ExposureJob,
)
from pdl_stress.results import NodeResult
from pdl_stress.statistics import MIN_KILLS, upper_bound

EDGE = DataEdge("first", "last", "x", "a")
BROKEN: dict[str, dict[str, Any]] = {"first": {"trigger": "entry", "delay_us": 10.0}, "last": {"wait": "never"}}


def chain(verify: Any = None, fixed: bool = False) -> Chain:
    made = Chain("chain")
    contract = KernelContract(("a",), ("o",))
    waits = frozenset() if fixed else frozenset(Wait)
    kernel = Op("kernel", contract, lambda **_: None, contract, waits=waits, verify=verify)
    x, y = made.buffer("x", (4,), "float32"), made.buffer("y", (4,), "float32")
    made.step("first", kernel, a=made.input("h", (4,), "float32"), o=x)
    made.step("last", kernel, a=x, o=y)
    return made


class FakeCaptured:
    def __init__(
        self, variant: Chain, back_to_back: bool = False, rotated: bool = False, neighbour: str = "", unroll: int = 16
    ) -> None:
        self.chain, self.back_to_back, self.rotated, self.serialized = variant, back_to_back, rotated, False
        self.neighbour, self.unroll, self.raw = neighbour, unroll, "graph"
        self.patched = {f"{s.op.name} ({s.name}), {s.patch}": "no wait" for s in variant.steps if s.patch}

    def nodes_of(self, replay: int) -> dict[str, list[int]]:
        """Two nodes for the last step, one for the others."""
        assert replay < self.unroll
        names = [step.name for step in self.chain.steps]
        found = {name: [100 * replay + number] for number, name in enumerate(names)}
        return {**found, names[-1]: [*found[names[-1]], 100 * replay + 50]}

    def serialize(self) -> int:
        self.serialized = True
        return 1

    def after(self, step: str) -> list[Any]:
        return [SimpleNamespace(kind="full" if self.serialized else "programmatic")] * 2


class FakeBench:
    """Answers each run with the next of ``mismatches``; remembers what was captured and run."""

    def __init__(
        self, mismatches: Sequence[int], agree: bool | list[bool] = True, verify: Any = None, fixed: bool = False
    ) -> None:
        self.chain, self.finder = chain(verify, fixed), "finder"
        self.memory = SimpleNamespace(pool=256, weights_note=lambda: "3 weight sets")
        self.mismatches, self.agree = list(mismatches), agree if isinstance(agree, list) else [agree] * len(mismatches)
        self.ran: list[tuple[FakeCaptured, int]] = []

    def capture(self, variant: Chain, **how: Any) -> FakeCaptured:
        return FakeCaptured(variant, **how)

    def run(self, captured: FakeCaptured, replays: int) -> Counts:
        self.ran.append((captured, replays))
        bad = self.mismatches.pop(0)
        return Counts(replays, bad, self.agree.pop(0), 0.5, 3 if bad else None)


def executor(monkeypatch: pytest.MonkeyPatch, bench: FakeBench) -> Executor:
    made = Executor(lambda name: bench.chain)
    monkeypatch.setattr(module, "Bench", lambda chain, **_: bench)
    monkeypatch.setattr(Executor, "_arch", "sm_90a")
    return made


def run_control(
    monkeypatch: pytest.MonkeyPatch, mismatches: Sequence[int], expected: str = "caught", **bench: Any
) -> tuple[Any, FakeBench]:
    fake = FakeBench(mismatches, **bench)
    control = Control("F02", "never waits", EDGE, 10.0, BROKEN)
    job = ControlJob("chain", fake.chain.fingerprint, control, expected, "the rules", 256)
    answer = executor(monkeypatch, fake).execute(job)
    assert isinstance(answer, ControlAnswer)
    return answer.result, fake


# --- benches -------------------------------------------------------------------------------------------------------


def test_a_bench_is_kept_until_others_were_used_since(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"chain {number}" for number in range(module.BENCHES + 1)]
    chains = {name: chain() for name in names}
    for name, one in chains.items():
        one.name = name
    made: list[str] = []

    def bench(built: Chain, **_: Any) -> FakeBench:
        made.append(built.name)
        return FakeBench([0] * 9)

    monkeypatch.setattr(module, "Bench", bench)
    runs = Executor(chains.__getitem__)

    def run(*wanted: str) -> list[str]:
        made.clear()
        for name in wanted:
            runs.execute(ArmJob(name, chains[name].fingerprint, "as deployed", 10))
        return list(made)

    kept, last = names[:-1], names[-1]
    assert run(*kept, *kept) == kept
    assert run(kept[0], last) == [last], "the one used longest ago went: the second"
    assert run(kept[0], kept[2]) == []
    assert run(kept[1]) == [kept[1]]


# --- the chain that was judged -------------------------------------------------------------------------------------


def other_chain() -> Chain:
    """Of the same name; its last step never waits."""
    made = chain()
    last = made["last"]
    never = last.contract.but(wait=Wait.NEVER)
    made._steps[-1] = replace(last, op=replace(last.op, contract=never, deployed=never))
    return made


JOBS: list[Any] = [
    lambda mark: ArmJob("chain", mark, "as deployed", 10),
    lambda mark: CensusJob("chain", mark),
    lambda mark: ExposureJob("chain", mark, "as deployed"),
    lambda mark: ControlJob("chain", mark, Control("F02", "never waits", EDGE, 10.0, BROKEN), "caught", "", 10),
]


@pytest.mark.parametrize("job", JOBS, ids=["arm", "census", "exposure", "control"])
def test_another_chain_of_the_same_name_does_not_run(monkeypatch: pytest.MonkeyPatch, job: Any) -> None:
    """A child that reads a global or the clock may build another chain than the parent judged."""
    fake = FakeBench([0])
    monkeypatch.setattr(module, "Bench", lambda *_, **__: pytest.fail("a bench was built for it"))
    with pytest.raises(PdlStressError, match=r"the chain 'chain' that was built .* is not the one that was judged"):
        Executor(lambda name: fake.chain).execute(job(other_chain().fingerprint))
    renamed = Executor(lambda name: Chain("renamed"))
    with pytest.raises(PdlStressError, match="the chain 'renamed' that was built"):
        renamed.execute(job(fake.chain.fingerprint))
    assert fake.ran == []


@pytest.mark.parametrize("job", JOBS, ids=["arm", "census", "exposure", "control"])
def test_nor_once_a_bench_stands(monkeypatch: pytest.MonkeyPatch, job: Any) -> None:
    fake = FakeBench([0, 0])
    made = executor(monkeypatch, fake)
    made.execute(JOBS[0](fake.chain.fingerprint))
    with pytest.raises(PdlStressError, match="is not the one that was judged"):
        made.execute(job(other_chain().fingerprint))
    assert len(fake.ran) == 1
    made.execute(JOBS[0](fake.chain.fingerprint))


def test_a_chain_is_built_once_for_all_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, loaded = FakeBench([0, 0]), []
    made = executor(monkeypatch, fake)
    monkeypatch.setattr(made, "_load", lambda name: loaded.append(name) or fake.chain)
    for _ in range(2):
        made.execute(JOBS[0](fake.chain.fingerprint))
    assert loaded == ["chain"]


# --- controls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kills", "with_full_edges", "expected", "verdict", "cause_checked"),
    [
        (256, 0, "caught", "caught", True),
        (MIN_KILLS, 0, "caught", "caught", True),
        (MIN_KILLS - 1, 0, "caught", "missed", True),
        (1, 0, "caught", "missed", True),
        (0, None, "caught", "missed", None),
        (256, 1, "caught", "missed", False),
        (256, 256, "caught", "missed", False),
        (0, None, "clean", "clean", None),
        (1, 0, "clean", "dirty", True),
        (256, 256, "clean", "dirty", False),
        (0, None, "unpromised", "not seen", None),
        (1, 0, "unpromised", "seen", True),
    ],
)
def test_the_verdict_on_a_control(
    monkeypatch: pytest.MonkeyPatch,
    kills: int,
    with_full_edges: int | None,
    expected: str,
    verdict: str,
    cause_checked: bool | None,
) -> None:
    answers = [kills] + ([] if with_full_edges is None else [with_full_edges])
    result, bench = run_control(monkeypatch, answers, expected)
    assert (result.verdict, result.kills, result.replays) == (verdict, kills, 256)
    assert result.cause_checked is cause_checked
    assert bench.mismatches == [], "the twin with full edges runs if and only if there is a kill to explain"
    assert [captured.serialized for captured, _ in bench.ran] == [False, True][: len(answers)]
    assert {replays for _, replays in bench.ran} == {256}, "the twin must have as many chances to fail"


def test_five_nines_need_eighteen_kills() -> None:
    assert MIN_KILLS == 18


def test_a_serialized_twin_whose_counters_differ_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not have run at all; then the kills could have any cause."""
    result, _ = run_control(monkeypatch, [256, 0], agree=[True, False])
    assert (result.verdict, result.cause_checked, result.kills) == ("missed", False, 256)


@pytest.mark.parametrize("expected", ["caught", "clean", "unpromised"])
def test_counters_that_differ_are_noted_and_catch_nothing(monkeypatch: pytest.MonkeyPatch, expected: str) -> None:
    kills = [256, 0] if expected == "caught" else [0]
    result, _ = run_control(monkeypatch, kills, expected, agree=False)
    assert result.note == "device and host counts differ"
    assert result.verdict != "caught"


def test_a_control_runs_the_chain_with_its_fault_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result, bench = run_control(monkeypatch, [256, 0])
    for captured, _ in bench.ran:
        assert captured.chain["last"].contract.wait is Wait.NEVER
        assert captured.chain["first"].contract.trigger is Trigger.ENTRY
        assert captured.chain["first"].delay_us == 10.0
    assert (result.fault, result.variant, result.step, result.writer, result.reader, result.buffer) == (
        "F02",
        "never waits",
        "last",
        "first",
        "last",
        "x",
    )
    assert (result.delay_us, result.expected, result.reason) == (10.0, "caught", "the rules")


def test_the_machine_code_of_what_was_rebuilt_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[str, bool]] = []

    def verify(contract: KernelContract, arch: str, delayed: bool) -> str:
        checked.append((str(contract), delayed))
        return f"{arch}: no ACQBULK"

    fake = FakeBench([256, 0, 256, 0], verify=verify)
    made = executor(monkeypatch, fake)
    control = Control("F02", "never waits", EDGE, 10.0, BROKEN)
    job = ControlJob("chain", fake.chain.fingerprint, control, "caught", "", 256)
    answers = [made.execute(job), made.execute(job)]
    assert checked == [("waits: all, triggers: entry", True), ("waits: never, triggers: after_stores", False)]
    for answer in answers:
        assert isinstance(answer, ControlAnswer)
        assert answer.sass == {
            "kernel, waits: all, triggers: entry, delay point": "sm_90a: no ACQBULK",
            "kernel, waits: never, triggers: after_stores": "sm_90a: no ACQBULK",
        }


def test_a_delay_point_makes_another_binary_which_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the contract as deployed: what is deployed has no delay point."""
    checked: list[tuple[str, bool]] = []

    def verify(contract: KernelContract, arch: str, delayed: bool) -> str:
        checked.append((str(contract), delayed))
        return "fine"

    fake = FakeBench([0] * 5, verify=verify)
    made = executor(monkeypatch, fake)
    deployed = "waits: all, triggers: after_stores"
    mark = fake.chain.fingerprint
    plain = ArmJob("chain", mark, "as deployed", 10)
    delayed = ArmJob("chain", mark, "delayed", 10, {"first": {"delay_us": 2.0}}, "first", 2.0)
    early = ArmJob("chain", mark, "early", 10, {"first": {"trigger": "entry"}})
    both = ArmJob("chain", mark, "both", 10, {"first": {"trigger": "entry", "delay_us": 0.0}}, "first", 0.0)
    answers = [made.execute(job) for job in (plain, delayed, delayed, early, both)]
    assert checked == [
        (deployed, True),
        ("waits: all, triggers: entry", False),
        ("waits: all, triggers: entry", True),
    ]
    assert [answer.sass for answer in answers if isinstance(answer, ArmAnswer)] == [
        {},
        {f"kernel, {deployed}, delay point": "fine"},
        {f"kernel, {deployed}, delay point": "fine"},
        {"kernel, waits: all, triggers: entry": "fine"},
        {"kernel, waits: all, triggers: entry, delay point": "fine"},
    ]


def test_two_ops_of_one_name_are_checked_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def verifier(word: str) -> Any:
        def verify(contract: KernelContract, arch: str, delayed: bool) -> str:
            checked.append(word)
            return word

        return verify

    fake = FakeBench([0], verify=verifier("one"))
    second = fake.chain["last"]
    fake.chain._steps[-1] = replace(second, op=replace(second.op, verify=verifier("two")))
    changes = {name: {"trigger": "entry"} for name in ("first", "last")}
    executor(monkeypatch, fake).execute(ArmJob("chain", fake.chain.fingerprint, "early", 10, changes))
    assert checked == ["one", "two"]


def test_machine_code_without_the_fault_stops_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that undid the fault would make every control a clean one."""

    def verify(contract: KernelContract, arch: str, delayed: bool) -> str:
        raise AssertionError("expected no ACQBULK, found 1")

    with pytest.raises(PdlStressError, match=r"machine code of kernel \(waits: .*expected no ACQBULK, found 1"):
        run_control(monkeypatch, [256, 0], verify=verify)
    fake = FakeBench([0], verify=verify)
    job = ArmJob("chain", fake.chain.fingerprint, "delayed", 10, {"first": {"delay_us": 2.0}}, "first", 2.0)
    with pytest.raises(PdlStressError, match="machine code of kernel"):
        executor(monkeypatch, fake).execute(job)
    assert fake.ran == [], "nor an arm"


# --- arms ----------------------------------------------------------------------------------------------------------


def run_arm(monkeypatch: pytest.MonkeyPatch, mismatches: int, **job: Any) -> tuple[ArmAnswer, FakeBench]:
    fake = FakeBench([mismatches])
    monkeypatch.setattr(module, "diagnose", lambda bench, capture, counts: f"diagnosed {counts.first_bad}")
    answer = executor(monkeypatch, fake).execute(ArmJob("chain", fake.chain.fingerprint, "an arm", 5000, **job))
    assert isinstance(answer, ArmAnswer)
    return answer, fake


def test_a_clean_arm_has_a_bound_and_its_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, fake = run_arm(monkeypatch, 0, step="first", delay_us=2.0)
    arm = answer.arm
    assert (arm.name, arm.step, arm.delay_us, arm.replays, arm.mismatches) == ("an arm", "first", 2.0, 5000, 0)
    assert arm.upper_bound_95 == upper_bound(5000)
    assert (arm.seconds, arm.counters_agree, arm.mismatch) == (0.5, True, None)
    assert [(e.source, e.target, e.kind) for e in answer.edges] == [
        ("producer", "first", "programmatic"),
        ("first", "last", "programmatic"),
    ]
    assert answer.pool == 256
    assert not fake.ran[0][0].serialized


def test_an_arm_with_a_mismatch_has_no_bound_and_a_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, _ = run_arm(monkeypatch, 1)
    assert answer.arm.mismatches == 1
    assert answer.arm.upper_bound_95 is None
    assert answer.arm.mismatch == "diagnosed 3"  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("error", [RuntimeError("no memory"), StopIteration(), PdlStressError("no memory")])
def test_what_was_counted_stands_if_it_cannot_be_explained(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(*_: Any) -> None:
        raise error

    fake = FakeBench([7])
    monkeypatch.setattr(module, "diagnose", broken)
    answer = executor(monkeypatch, fake).execute(ArmJob("chain", fake.chain.fingerprint, "an arm", 5000))
    assert isinstance(answer, ArmAnswer)
    assert (answer.arm.mismatches, answer.arm.mismatch, answer.arm.upper_bound_95) == (7, None, None)
    assert answer.arm.note == f"not explained: {type(error).__name__}: {error}"


def test_arms_are_captured_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, fake = run_arm(monkeypatch, 0, serialized=True)
    assert fake.ran[0][0].serialized
    assert {e.kind for e in answer.edges} == {"full"}
    answer, fake = run_arm(monkeypatch, 0, back_to_back=True)
    assert fake.ran[0][0].back_to_back
    assert ("last", "producer") in {(e.source, e.target) for e in answer.edges}
    answer, fake = run_arm(monkeypatch, 0, rotated=True)
    assert fake.ran[0][0].rotated
    assert answer.arm.note == "3 weight sets", "whether they are cold depends on their size"
    for neighbour in NEIGHBOURS:
        _, fake = run_arm(monkeypatch, 0, neighbour=neighbour)
        assert fake.ran[0][0].neighbour == neighbour
    assert (fake.ran[0][0].rotated, fake.ran[0][0].back_to_back) == (False, False)
    _, fake = run_arm(monkeypatch, 0, changes={"first": {"delay_us": 4.0}})
    assert fake.ran[0][0].chain["first"].delay_us == 4.0
    _, fake = run_arm(monkeypatch, 0, planted=Control("F02", "never waits", EDGE, 10.0, BROKEN))
    assert fake.ran[0][0].chain["last"].contract.wait is Wait.NEVER


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (["programmatic", "programmatic"], "programmatic"),
        (["programmatic", "full"], "full/programmatic"),
        ([], "missing"),
    ],
)
def test_edges_of_several_replays_are_joined(monkeypatch: pytest.MonkeyPatch, kinds: list[str], text: str) -> None:
    monkeypatch.setattr(FakeCaptured, "after", lambda self, step: [SimpleNamespace(kind=kind) for kind in kinds])
    answer, _ = run_arm(monkeypatch, 0)
    assert {e.kind for e in answer.edges} == {text}


def test_the_edge_behind_a_step_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a step in the graph is its successor, so one name is enough."""
    kinds = {"producer": "programmatic", "first": "full", "last": "port 1->0 type 7"}
    monkeypatch.setattr(FakeCaptured, "after", lambda self, step: [SimpleNamespace(kind=kinds[step])])
    answer, _ = run_arm(monkeypatch, 0, back_to_back=True)
    assert [(e.source, e.target, e.kind) for e in answer.edges] == [
        ("producer", "first", "programmatic"),
        ("first", "last", "full"),
        ("last", "producer", "port 1->0 type 7"),
    ]


def test_the_edge_around_leads_from_the_last_step_to_the_first_whichever_are_under_test() -> None:
    made = chain()
    made._steps[-1] = replace(made._steps[-1], pdl=False)
    found = module._edges(cast(Captured, FakeCaptured(made, back_to_back=True)))
    assert [(e.source, e.target) for e in found] == [("producer", "first"), ("last", "producer")]


# --- kernels that cannot be rebuilt --------------------------------------------------------------------------------


def run_library_control(
    monkeypatch: pytest.MonkeyPatch, reader: dict[str, Any], mismatches: Sequence[int], expected: str, variant: str
) -> tuple[ControlAnswer, FakeBench]:
    fake = FakeBench(mismatches, fixed=True)
    control = Control("F02", variant, EDGE, 10.0, {**BROKEN, "last": reader})
    patched = str(control.patch(fake.chain) or "")
    job = ControlJob("chain", fake.chain.fingerprint, control, expected, "the rules", 256, patched)
    answer = executor(monkeypatch, fake).execute(job)
    assert isinstance(answer, ControlAnswer)
    assert answer.result.patched == patched
    return answer, fake


def test_a_patched_control_runs_beside_a_stand_in_and_brings_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, fake = run_library_control(monkeypatch, {"wait": "never"}, [256, 0], "caught", "never waits")
    assert (answer.result.verdict, answer.result.cause_checked) == ("caught", True)
    assert answer.sass == {"kernel (last), all waits removed": "no wait"}
    for captured, _ in fake.ran:
        assert captured.chain["first"].source
        assert captured.chain["last"].patch == Patch(None)


def test_a_reloaded_kernel_that_differs_is_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, fake = run_library_control(monkeypatch, {"patch": Patch(())}, [1, 0], "clean", RELOADED)
    assert (answer.result.verdict, answer.result.variant, answer.result.kills) == ("dirty", RELOADED, 1)
    assert answer.sass == {"kernel (last), loaded again": "no wait"}
    assert fake.ran[0][0].chain["last"].contract.wait is Wait.ALL


def test_a_planted_arm_of_a_library_brings_the_evidence_of_its_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeBench([0], fixed=True)
    control = Control("F02", "never waits", EDGE, 10.0, BROKEN)
    job = ArmJob("chain", fake.chain.fingerprint, "planted", 10, planted=control)
    answer = executor(monkeypatch, fake).execute(job)
    assert isinstance(answer, ArmAnswer)
    assert answer.sass == {"kernel (last), all waits removed": "no wait"}


def test_evidence_of_machine_code_that_was_rebuilt_and_patched_stands_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeBench([256, 0], verify=lambda contract, arch, delayed: "fine")
    last = fake.chain["last"]
    fake.chain._steps[-1] = replace(last, op=replace(last.op, name="library", waits=frozenset()))
    control = Control("F02", "never waits", EDGE, 10.0, BROKEN)
    job = ControlJob("chain", fake.chain.fingerprint, control, "caught", "", 256)
    answer = executor(monkeypatch, fake).execute(job)
    assert isinstance(answer, ControlAnswer)
    assert answer.sass["library (last), all waits removed"] == "no wait"
    assert answer.sass["kernel, waits: all, triggers: entry, delay point"] == "fine"


# --- census and exposure -------------------------------------------------------------------------------------------


def test_the_census_describes_each_node_of_the_second_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replay of a graph has nothing before it, so its first edge is missing."""
    described: list[tuple[Any, ...]] = []

    def describe(node: int, kinds: list[str], finder: Any, step: str) -> NodeResult:
        described.append((node, kinds, finder, step))
        return NodeResult("kernel", f"node {node}", step=step, incoming=kinds)

    edges = {100: ["full"], 101: ["programmatic"], 150: ["programmatic", "full"]}
    incoming = {node: [SimpleNamespace(kind=kind) for kind in kinds] for node, kinds in edges.items()}
    monkeypatch.setattr(module, "describe", describe)
    monkeypatch.setattr(module.nodes, "incoming", lambda graph: incoming if graph == "graph" else {})
    fake = FakeBench([])
    answer = executor(monkeypatch, fake).execute(CensusJob("chain", fake.chain.fingerprint))
    assert isinstance(answer, CensusAnswer)
    assert described == [
        (100, ["full"], None, "producer"),  # its machine code matters behind programmatic edges only
        (101, ["programmatic"], "finder", "first"),
        (102, [], None, "last"),
        (150, ["programmatic", "full"], "finder", "last"),
    ]
    assert [node.name for node in answer.nodes] == ["node 100", "node 101", "node 102", "node 150"]
    assert fake.ran == [], "nothing is launched for it"


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("back_to_back", [False, True])
def test_exposure_is_measured_as_the_job_says(
    monkeypatch: pytest.MonkeyPatch, profiled: bool, back_to_back: bool
) -> None:
    asked: list[tuple[Any, ...]] = []

    def measure(name: str) -> Any:
        def found(bench: Any, variant: Chain, *, back_to_back: bool) -> Any:
            asked.append((name, bench, variant["first"].delay_us, back_to_back))
            return SimpleNamespace(overlap={("first", "last"): 0.5}, exposed={}, method=f"by {name}")

        return found

    for name in ("profiled", "stamped"):
        monkeypatch.setattr(module.exposure, name, measure(name))
    fake = FakeBench([])
    job = ExposureJob("chain", fake.chain.fingerprint, "late", {"first": {"delay_us": 3.0}}, back_to_back, profiled)
    answer = executor(monkeypatch, fake).execute(job)
    name = "profiled" if profiled else "stamped"
    assert asked == [(name, fake, 3.0, back_to_back)]
    assert answer == ExposureAnswer({("first", "last"): 0.5}, {}, f"by {name}")
