"""From counts to verdicts of single jobs: when a kill counts, and what a serialized twin has to show.

The bench, which needs a GPU, is replaced by one that returns the counts it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pdl_stress import Chain, KernelContract, Op, PdlStressError, Trigger, Wait
from pdl_stress.chain import DataEdge
from pdl_stress.cuda import executor as module
from pdl_stress.cuda.bench import Counts
from pdl_stress.cuda.executor import Executor
from pdl_stress.faults import Control
from pdl_stress.jobs import ArmAnswer, ArmJob, ControlAnswer, ControlJob
from pdl_stress.statistics import MIN_KILLS, upper_bound

EDGE = DataEdge("first", "last", "x", "a")
BROKEN: dict[str, dict[str, Any]] = {"first": {"trigger": "entry", "delay_us": 10.0}, "last": {"wait": "never"}}


def chain(verify: Any = None) -> Chain:
    made = Chain("chain")
    contract = KernelContract(("a",), ("o",))
    kernel = Op("kernel", contract, lambda **_: None, contract, waits=frozenset(Wait), verify=verify)
    x, y = made.buffer("x", (4,), "f"), made.buffer("y", (4,), "f")
    made.step("first", kernel, a=made.input("h", (4,), "f"), o=x)
    made.step("last", kernel, a=x, o=y)
    return made


class FakeCaptured:
    def __init__(self, variant: Chain, back_to_back: bool = False, cold: bool = False) -> None:
        self.chain, self.back_to_back, self.cold, self.serialized = variant, back_to_back, cold, False

    def serialize(self) -> int:
        self.serialized = True
        return 1

    def between(self, source: str, target: str) -> list[Any]:
        kind = "full" if self.serialized else "programmatic"
        return [SimpleNamespace(kind=kind)] * 2 if (source, target) != ("first", "missing") else []


class FakeBench:
    """Answers each run with the next of ``mismatches``; remembers what was captured and run."""

    def __init__(self, mismatches: Sequence[int], agree: bool = True, verify: Any = None) -> None:
        self.chain = chain(verify)
        self.memory = SimpleNamespace(pool=256)
        self.mismatches, self.agree = list(mismatches), agree
        self.ran: list[tuple[FakeCaptured, int]] = []

    def capture(self, variant: Chain, *, cold: bool = False, back_to_back: bool = False, **_: Any) -> FakeCaptured:
        return FakeCaptured(variant, back_to_back, cold)

    def run(self, captured: FakeCaptured, replays: int) -> Counts:
        self.ran.append((captured, replays))
        bad = self.mismatches.pop(0)
        return Counts(replays, bad, self.agree, 0.5, 3 if bad else None)


def executor(monkeypatch: pytest.MonkeyPatch, bench: FakeBench) -> Executor:
    made = Executor(lambda name: bench.chain)
    monkeypatch.setattr(made, "_bench_of", lambda name: bench)
    monkeypatch.setattr(Executor, "_arch", "sm_90a")
    return made


def run_control(
    monkeypatch: pytest.MonkeyPatch, mismatches: Sequence[int], expected: str = "caught", **bench: Any
) -> tuple[Any, FakeBench]:
    fake = FakeBench(mismatches, **bench)
    job = ControlJob("chain", Control("F02", "never waits", EDGE, 10.0, BROKEN), expected, "the rules", 256)
    answer = executor(monkeypatch, fake).execute(job)
    assert isinstance(answer, ControlAnswer)
    return answer.result, fake


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
    checked: list[str] = []

    def verify(contract: KernelContract, arch: str) -> str:
        checked.append(str(contract))
        return f"{arch}: no ACQBULK"

    fake = FakeBench([256, 0, 256, 0], verify=verify)
    made = executor(monkeypatch, fake)
    job = ControlJob("chain", Control("F02", "never waits", EDGE, 10.0, BROKEN), "caught", "", 256)
    answers = [made.execute(job), made.execute(job)]
    assert checked == ["waits: all, triggers: entry", "waits: never, triggers: after_stores"]
    for answer in answers:
        assert isinstance(answer, ControlAnswer)
        assert answer.sass["kernel, waits: never, triggers: after_stores"] == "sm_90a: no ACQBULK"


def test_machine_code_without_the_fault_stops_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that undid the fault would make every control a clean one."""

    def verify(contract: KernelContract, arch: str) -> str:
        raise AssertionError("expected no ACQBULK, found 1")

    with pytest.raises(PdlStressError, match=r"machine code of kernel \(waits: .*expected no ACQBULK, found 1"):
        run_control(monkeypatch, [256, 0], verify=verify)


# --- arms ----------------------------------------------------------------------------------------------------------


def run_arm(monkeypatch: pytest.MonkeyPatch, mismatches: int, **job: Any) -> tuple[ArmAnswer, FakeBench]:
    fake = FakeBench([mismatches])
    monkeypatch.setattr(module, "diagnose", lambda bench, capture, counts: f"diagnosed {counts.first_bad}")
    answer = executor(monkeypatch, fake).execute(ArmJob("chain", "an arm", 5000, **job))
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


def test_arms_are_captured_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, fake = run_arm(monkeypatch, 0, serialized=True)
    assert fake.ran[0][0].serialized
    assert {e.kind for e in answer.edges} == {"full"}
    answer, fake = run_arm(monkeypatch, 0, back_to_back=True)
    assert fake.ran[0][0].back_to_back
    assert ("last", "producer") in {(e.source, e.target) for e in answer.edges}
    _, fake = run_arm(monkeypatch, 0, cold=True)
    assert fake.ran[0][0].cold
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
    monkeypatch.setattr(
        FakeCaptured, "between", lambda self, source, target: [SimpleNamespace(kind=kind) for kind in kinds]
    )
    answer, _ = run_arm(monkeypatch, 0)
    assert {e.kind for e in answer.edges} == {text}
