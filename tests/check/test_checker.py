"""The check, on kernels whose every access is known: what is found, named and blamed, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import Kernel, Memory, SimulatedObserver, examine, on_the_cpu, shot_of

from pdl_stress import Outcome, Patch
from pdl_stress.cuda.subject import memory
from pdl_stress.cuda.subject.capturing import NotCheckable
from pdl_stress.results import CaseResult

BEFORE, AFTER = "before the wait", "after the wait"


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)


def good(m: Memory) -> Iterator[None]:
    yield
    m["o"].copy_(2 * m["x"] + 1)


def never(m: Memory) -> Iterator[None]:
    m["o"].copy_(2 * m["x"] + 1)
    return
    yield


def early_read(m: Memory) -> Iterator[None]:
    x = m["x"].clone()
    yield
    m["o"].copy_(2 * x + 1)


def early_store(m: Memory) -> Iterator[None]:
    m["o"].fill_(7)
    yield
    m["o"].add_(m["x"])


def measured(case: CaseResult, step: str) -> dict[tuple[str, str], str]:
    (contract,) = [c for c in case.contracts if c.step == step]
    return {(o.buffer, o.access): o.measured for o in contract.operands}


def blamed(case: CaseResult) -> set[tuple[str, str, str, str]]:
    return {
        (a.mismatch.order, a.mismatch.writer, a.mismatch.reader, a.mismatch.buffer) for a in case.arms if a.mismatch
    }


def controls(case: CaseResult) -> set[tuple[str, str, str, str, str]]:
    return {(c.fault, c.writer, c.reader, c.buffer, c.verdict) for c in case.controls if c.expected == "caught"}


# -- one kernel --------------------------------------------------------------------------------------------------------


def test_a_kernel_that_waits_passes() -> None:
    case, _ = examine([Kernel(good)], "xo", "xo")
    assert case.verdict is Outcome.PASS, case.reasons
    assert measured(case, "good") == {("x", "read"): AFTER, ("o", "written"): AFTER}
    assert controls(case) == {
        ("F02", "producer", "good", "x", "caught"), ("F09", "producer", "good", "o, written twice", "caught"),
    }  # fmt: skip
    assert [(arm.name, arm.step) for arm in case.arms] == [
        ("x late before good", "producer"), ("o rewritten before good", "producer"), ("as deployed", None),
        ("serialized", None), ("early release", "producer"),
    ]  # fmt: skip
    assert {c.modelled for c in case.contracts} == {"ordered"}


@pytest.mark.parametrize(("run", "store"), [(never, BEFORE), (early_read, AFTER)])
def test_a_kernel_that_reads_early_fails_and_is_named(run: object, store: str) -> None:
    kernel = Kernel(run, waits=0 if run is never else 1)  # type: ignore[arg-type]
    case, _ = examine([kernel], "xo", "xo")
    assert case.verdict is Outcome.FAIL
    assert measured(case, kernel.label) == {("x", "read"): BEFORE, ("o", "written"): store}
    assert ("read", "producer", kernel.label, "x") in blamed(case)
    (first, *_) = case.arms
    assert first.mismatch is not None
    assert (first.mismatch.wrong_buffer, first.mismatch.element) == ("o", [0])
    assert float(first.mismatch.got) != float(first.mismatch.expected)
    assert not first.mismatch.also_serialized
    assert case.contracts[0].modelled.startswith("not promised: x (producer)")


def test_a_kernel_that_writes_early_fails_where_somebody_may_still_touch_it() -> None:
    case, _ = examine([Kernel(early_store)], "xo", "xo")
    assert case.verdict is Outcome.FAIL
    assert blamed(case) == {("written twice", "producer", "early_store", "o")}
    case, _ = examine([Kernel(early_store)], "xo", "x")  # o belongs to nobody else
    assert case.verdict is Outcome.PASS, case.reasons
    assert measured(case, "early_store") == {("x", "read"): AFTER, ("o", "written"): BEFORE}


def test_an_independent_input_may_be_read_early() -> None:
    def prefetches(m: Memory) -> Iterator[None]:
        w = m["w"].clone()
        yield
        m["o"].copy_(w * m["x"])

    case, _ = examine([Kernel(prefetches)], "xwo", "xwo", "w")
    assert case.verdict is Outcome.PASS, case.reasons
    assert measured(case, "prefetches") == {("x", "read"): AFTER, ("w", "read"): BEFORE, ("o", "written"): AFTER}
    assert [o.declared for o in case.contracts[0].operands if o.buffer == "w"] == ["independent"]
    case, _ = examine([Kernel(prefetches)], "xwo", "xwo")
    assert case.verdict is Outcome.FAIL
    assert ("read", "producer", "prefetches", "w") in blamed(case)


# -- what a verdict needs ----------------------------------------------------------------------------------------------


def test_the_window_is_widened_until_the_twin_is_caught() -> None:
    case, _ = examine([Kernel(good, busy_us=50)], "xo", "x")
    assert case.verdict is Outcome.PASS, case.reasons
    assert {c.delay_us for c in case.controls} == {100.0}
    assert {arm.delay_us for arm in case.arms if arm.name == "x late before good"} == {100.0}
    assert case.window_us == 100.0


def test_a_twin_that_no_window_catches_and_code_that_is_not_found_are_no_pass() -> None:
    case, _ = examine([Kernel(good, busy_us=1e9)], "xo", "x")
    assert case.verdict is Outcome.INCONCLUSIVE
    assert any("must be caught and was not" in reason for reason in case.reasons)
    case, _ = examine([Kernel(good, code=False)], "xo", "x")
    assert case.verdict is Outcome.INCONCLUSIVE
    assert any("give its machine code with code=" in reason for reason in case.reasons)


def test_what_was_seen_once_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that goes wrong in the first probe and never again."""
    import simulated

    probe, calls = simulated.SimulatedProber.probe, []

    def flaky(self: object, index: int, what: str, *arguments: object, **settings: object) -> object:
        counts = probe(self, index, what, *arguments, **settings)  # type: ignore[arg-type]
        calls.append(what)
        if len(calls) == 1:
            counts.mismatches, counts.marks = 1, torch.zeros(9, dtype=torch.uint8)
            counts.seen = counts.want = torch.zeros(144, dtype=torch.uint8)
        return counts

    monkeypatch.setattr(simulated.SimulatedProber, "probe", flaky)
    case, _ = examine([Kernel(good)], "xo", "xo")
    assert case.verdict is Outcome.FAIL
    assert any(arm.mismatches == 1 for arm in case.arms)


@pytest.mark.parametrize(
    ("which", "text"),
    [
        (lambda patch, serialized: patch == Patch(None) and serialized, "also with full edges"),
        (lambda patch, serialized: patch == Patch(()), "its machine code cannot be exchanged like that"),
    ],
    ids=["the twin goes wrong behind a full edge too", "the code that was only loaded again goes wrong"],
)
def test_a_twin_that_is_caught_for_another_reason_shows_nothing(
    which: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import simulated

    probe = simulated.SimulatedProber.probe

    def spoilt(self: Any, *arguments: Any, patch: Any = None, serialized: bool = False) -> Any:
        counts = probe(self, *arguments, patch=patch, serialized=serialized)
        counts.mismatches += which(patch, serialized)
        return counts

    monkeypatch.setattr(simulated.SimulatedProber, "probe", spoilt)
    case, _ = examine([Kernel(good)], "xo", "xo")
    assert case.verdict is Outcome.INCONCLUSIVE, case.reasons
    assert any(text in reason for reason in case.reasons), case.reasons


def test_how_machine_code_was_changed_is_kept() -> None:
    case, _ = examine([Kernel(good)], "xo", "x")
    assert case.sass == {"good, all waits removed": "checked", "good, loaded again": "checked"}


def test_all_reads_are_late_together_in_the_widest_window() -> None:
    def two(m: Memory) -> Iterator[None]:
        yield
        m["o"].copy_(m["x"] + m["w"])

    case, _ = examine([Kernel(two, busy_us=50)], "xwo", "xw")
    assert case.verdict is Outcome.PASS, case.reasons
    (arm,) = [arm for arm in case.arms if arm.name == "all that it reads late before two"]
    assert arm.delay_us == 100.0


def test_too_few_replays_are_no_pass() -> None:
    case, _ = examine([Kernel(good)], "xo", "x", replays=500)
    assert case.verdict is Outcome.INCONCLUSIVE


def test_a_kernel_that_reads_nothing_that_could_be_late_leaves_nothing_to_test() -> None:
    def fills(m: Memory) -> Iterator[None]:
        yield
        m["o"].fill_(3)

    case, _ = examine([Kernel(good, overlaps=False), Kernel(fills)], "xop", "x")
    assert case.verdict is not Outcome.PASS or case.data_edges


# -- several kernels ---------------------------------------------------------------------------------------------------


def step(name: str, source: str, target: str, *, reads: str = AFTER, writes: str = AFTER) -> object:
    """A kernel ``target = 2 source + c``. One that writes early goes on from what it wrote."""
    c = float(sum(map(ord, name)))  # no two kernels write the same

    def run(m: Memory) -> Iterator[None]:
        early = m[source].clone() if reads == BEFORE else None
        if writes == BEFORE:
            m[target].fill_(7)
        yield
        value = 2 * (m[source] if early is None else early) + c
        if writes == BEFORE:
            m[target].add_(value - 7)
        else:
            m[target].copy_(value)

    run.__name__ = name
    return run


def kernel(name: str, source: str, target: str, *, late: bool = True, overlaps: bool = True, **when: str) -> Kernel:
    return Kernel(step(name, source, target, **when), late=late, overlaps=overlaps)  # type: ignore[arg-type]


def test_the_pair_that_raced_is_named() -> None:
    a = kernel("a", "x", "m")
    for second, wanted in (
        (kernel("b", "m", "o", reads=BEFORE), ("read", "a", "b", "m")),
        (kernel("b", "o", "x", writes=BEFORE), ("overwritten", "b", "a", "x")),
        (kernel("b", "o", "m", writes=BEFORE), ("written twice", "a", "b", "m")),
    ):
        case, _ = examine([a, second], "xmo", "xo")
        assert case.verdict is Outcome.FAIL
        assert wanted in blamed(case)
        assert not any(m[:3] == ("read", "producer", "a") for m in blamed(case)), "the first one waits"


def test_repaired_pairs_pass() -> None:
    a = kernel("a", "x", "m")
    for second in (kernel("b", "m", "o"), kernel("b", "o", "x"), kernel("b", "o", "m")):
        case, _ = examine([a, second], "xmo", "xo")
        assert case.verdict is Outcome.PASS, case.reasons


def test_behind_a_full_edge_everything_is_complete() -> None:
    case, _ = examine([kernel("a", "x", "m"), kernel("b", "m", "o", reads=BEFORE, overlaps=False)], "xmo", "x")
    assert case.verdict is Outcome.PASS, case.reasons
    assert [c.step for c in case.contracts] == ["a"]
    early = kernel("c", "m", "p", reads=BEFORE)
    case, _ = examine([kernel("a", "x", "m"), kernel("b", "x", "o", overlaps=False), early], "xmop", "x")
    assert measured(case, "c")["m", "read"] == "complete before it starts"
    assert case.verdict is Outcome.PASS, case.reasons


def test_early_reads_that_only_a_late_trigger_protects_are_no_pass_and_no_fail() -> None:
    """F07: the data is two kernels old, and the kernel between triggers late here."""
    between = Kernel(step("b", "m", "n"), late=False)  # type: ignore[arg-type]
    case, _ = examine([kernel("a", "x", "m"), between, kernel("c", "m", "o", reads=BEFORE)], "xmno", "x")
    assert case.verdict is Outcome.INCONCLUSIVE, case.reasons
    assert any("F07" in reason for reason in case.reasons)


def test_a_wrong_result_that_a_later_kernel_overwrites_is_a_wrong_result() -> None:
    last = kernel("c", "x", "w", overlaps=False)
    case, _ = examine([kernel("a", "w", "x"), kernel("b", "y", "w", reads=BEFORE), last], "wxy", "wxy")
    assert case.verdict is Outcome.FAIL, case.reasons
    assert ("read", "producer", "b", "y") in blamed(case)


def test_a_wait_behind_a_kernel_that_never_waits_is_no_promise() -> None:
    """R8."""

    def bystander(m: Memory) -> Iterator[None]:
        m["n"].copy_(3 * m["w"])
        return
        yield

    chain = [kernel("a", "x", "m"), Kernel(bystander, waits=0), kernel("c", "m", "o")]
    case, _ = examine(chain, "xwmno", "xw", "w")
    assert case.verdict is Outcome.INCONCLUSIVE, case.reasons
    assert any("c waits, but not for a" in reason and "R8" in reason for reason in case.reasons)


def test_only_the_nearest_conflicts_are_probed() -> None:
    """Ten kernels over two buffers: with all pairs it would be hundreds."""
    chain = [kernel(f"k{i}", "xy"[i % 2], "yx"[i % 2]) for i in range(10)]
    case, _ = examine(chain, "xy", "xy", replays=1000)
    assert case.verdict is Outcome.PASS, case.reasons
    assert len(case.data_edges) <= 4 * len(chain)


# -- observation -------------------------------------------------------------------------------------------------------


def observed(kernels: list[Kernel], buffers: str, given: str) -> tuple[object, Memory]:
    shot, tensors, blocks = shot_of(kernels, buffers, given)
    return SimulatedObserver(shot, kernels, tensors).observe(blocks), tensors


def test_a_state_is_put_back_and_everything_else_holds_another_generation() -> None:
    def bumps(m: Memory) -> Iterator[None]:
        yield
        m["o"].copy_(m["x"] + m["s"])
        m["s"].add_(1)

    seen, tensors = observed([Kernel(bumps)], "xso", "x")
    state = seen.state  # type: ignore[attr-defined]
    assert state & memory.extent(tensors["s"])
    assert not state & memory.extent(tensors["o"]), "which may hold anything before"
    assert not state & memory.extent(tensors["x"])
    case, _ = examine([Kernel(bumps)], "xso", "x")
    assert case.verdict is Outcome.PASS, case.reasons


def test_a_state_never_runs_away_while_it_is_looked_at() -> None:
    """A position in a cache, say. One more step is as a second call; with each look another, it would be outside."""

    def steps_on(m: Memory) -> Iterator[None]:
        yield
        assert m["s"][0] < 2, "it ran away"
        m["o"].copy_(m["x"] + m["s"])
        m["s"].add_(1)

    case, _ = examine([Kernel(steps_on)], "xso", "x")
    assert case.verdict is Outcome.PASS, case.reasons


def test_gaps_are_not_filled_with_what_others_write() -> None:
    def even(m: Memory) -> Iterator[None]:
        yield
        m["o"][::2].copy_(m["x"][::2])

    def odd(m: Memory) -> Iterator[None]:
        yield
        m["o"][1::2].copy_(m["x"][1::2])

    seen, tensors = observed([Kernel(even), Kernel(odd)], "xo", "x")
    start = tensors["o"].data_ptr()
    writes = seen.writes  # type: ignore[attr-defined]
    assert not writes[1] & writes[2]
    assert all(address < start + 32 - 4 for address, _ in writes[1].spans())


def test_partial_writes_are_known_to_the_byte() -> None:
    def half(m: Memory) -> Iterator[None]:
        yield
        m["o"][3:5].copy_(m["x"][:2])

    seen, tensors = observed([Kernel(half)], "xo", "x")
    start = tensors["o"].data_ptr() + 12
    assert seen.writes[1].spans() == [(start, 8)]  # type: ignore[attr-defined]
    (group,) = seen.reads[1]  # type: ignore[attr-defined]
    assert group.buffer == "x"


def test_kernels_that_do_not_repeat_themselves_are_said() -> None:
    def rolls(m: Memory) -> Iterator[None]:
        yield
        m["o"].copy_(m["x"] + torch.rand(1))

    with pytest.raises(NotCheckable, match=r"rolls is not deterministic.* o differs in"):
        observed([Kernel(rolls)], "xo", "xo")


# -- the law -----------------------------------------------------------------------------------------------------------

WHEN = st.sampled_from((BEFORE, AFTER, AFTER))
STEPS = st.lists(
    st.tuples(st.sampled_from("wxyz"), st.sampled_from("wxyz"), WHEN, WHEN, st.booleans()), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_a_check_fails_if_and_only_if_something_is_touched_before_its_time(
    steps: list[tuple[str, str, str, str, bool]],
) -> None:
    """Against what follows from the program text. All of them trigger early, all buffers are late inputs."""
    chain = [
        kernel(f"k{n}", a, b, reads=reads, writes=writes, overlaps=overlaps)
        for n, (a, b, reads, writes, overlaps) in enumerate(steps)
        if a != b
    ]
    program = [one for one in steps if one[0] != one[1]]
    if not any(overlaps for *_, overlaps in program):
        return
    bad, kept = set(), set()
    for n, (source, target, reads, writes, _) in enumerate(program):
        flying, left, unwritten = [], {target}, {source}
        for m in range(n, -1, -1):  # what is before a programmatic edge may be in flight behind it
            if not program[m][4]:
                break
            flying.append(m - 1)  # -1: the producer
        for m in flying:  # nearest first
            writer, reader = (set("wxyz"), set()) if m == -1 else ({program[m][1]}, {program[m][0]})
            for early, touched in ((reads, writer & unwritten), (writes, left & (writer | reader))):
                if touched:
                    (bad if early == BEFORE else kept).add(n)
            unwritten -= writer
            left -= writer
    case, _ = examine(chain, "wxyz", "wxyz")
    wanted = Outcome.FAIL if bad else Outcome.PASS if kept else Outcome.INCONCLUSIVE
    assert case.verdict is wanted, (case.reasons, bad, kept)
