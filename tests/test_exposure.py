"""From times to shares: what counts as overlap and as exposure. Made-up times; the bench is replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdl_stress import Chain, KernelContract, Op, Wait
from pdl_stress.cuda import exposure as module
from pdl_stress.cuda.exposure import profiled
from pdl_stress.cuda.profiler import NoProfile, Record


def chain(*, fixed: bool = False) -> Chain:
    """producer -> first -> last; last reads both the producer's input and what first wrote."""
    made = Chain("chain")
    waits = frozenset() if fixed else frozenset(Wait)

    def kernel(*reads: str) -> Op:
        contract = KernelContract(reads, ("o",))
        return Op("kernel", contract, lambda **_: None, contract, waits=waits)

    hidden = made.input("h", (4,), "float32")
    x, y = made.buffer("x", (4,), "float32"), made.buffer("y", (4,), "float32")
    made.step("first", kernel("a"), a=hidden, o=x)
    made.step("last", kernel("a", "b"), a=x, b=hidden, o=y)
    return made


def captured(variant: Chain, *, back_to_back: bool = False) -> Any:
    return SimpleNamespace(chain=variant, back_to_back=back_to_back)


def judged(starts: Any, ends: Any, stores: Any, *, back_to_back: bool = False) -> module.Exposure:
    """Times are ``[launch][replay][step]``."""
    times = [np.array(values, dtype=np.int64) for values in (starts, ends, stores)]
    return module._judge(captured(chain(), back_to_back=back_to_back), *times, "by hand")


def test_shares_count_over_all_launches_and_replays() -> None:
    found = judged(
        [[[0, 10, 40], [100, 120, 130]], [[200, 210, 220], [300, 330, 340]]],
        [[[20, 30, 50], [110, 140, 150]], [[205, 225, 230], [320, 350, 360]]],
        [[[15, 25, 45], [105, 125, 145]], [[204, 222, 228], [301, 345, 355]]],
    )
    assert found.method == "by hand"
    # first before the producer's end: 10 < 20, 120 < 110, 210 < 205, 330 < 320
    assert found.overlap == {("producer", "first"): 0.25, ("first", "last"): 0.75}
    assert found.exposed == {
        ("producer", "first", "h"): 0.25,
        ("first", "last", "x"): 0.5,  # 40 < 25, 130 < 125, 220 < 222, 340 < 345
        ("producer", "last", "h"): 0.0,
    }


@pytest.mark.parametrize(("gap", "share"), [(-1, 1.0), (0, 0.0), (1, 0.0)])
def test_equal_times_show_nothing(gap: int, share: float) -> None:
    """A coarse timer may only hide an overlap, never invent one."""
    found = judged([[[0, 100 + gap, 500]]], [[[100, 400, 600]]], [[[100, 300, 550]]])
    assert found.overlap["producer", "first"] == share
    assert found.exposed["producer", "first", "h"] == share
    assert found.overlap["first", "last"] == 0.0


def test_overlap_is_no_exposure() -> None:
    """The reader runs while the writer drains: its data was there."""
    found = judged([[[0, 90, 300]]], [[[100, 200, 400]]], [[[80, 150, 350]]])
    assert found.overlap["producer", "first"] == 1.0
    assert found.exposed["producer", "first", "h"] == 0.0


def test_back_to_back_the_last_step_meets_the_first_of_the_next_replay() -> None:
    starts = [[[0, 10, 20], [25, 40, 50], [70, 80, 90]], [[100, 110, 120], [140, 150, 160], [165, 180, 190]]]
    ends = [[[5, 15, 30], [35, 45, 60], [75, 85, 95]], [[105, 115, 130], [145, 155, 170], [175, 185, 195]]]
    found = judged(starts, ends, ends, back_to_back=True)
    # 25 < 30, 70 < 60; 140 < 130, 165 < 170: never from one launch to the next
    assert found.overlap["last", "producer"] == 0.5
    assert judged(starts, ends, ends).overlap.keys() == {("producer", "first"), ("first", "last")}


def test_a_stand_in_reads_nothing_so_no_edge_leads_to_it() -> None:
    variant = chain(fixed=True).varied({"first": {"delay_us": 2.0, "trigger": "entry"}})
    times = np.zeros((1, 1, 3), dtype=np.int64)
    found = module._judge(captured(variant), times, times, times, "")
    assert set(found.exposed) == {("first", "last", "x"), ("producer", "last", "h")}


def test_a_stand_in_that_starts_early_is_no_overlap_of_the_kernel_whose_place_it_takes() -> None:
    """It is launched with the attribute and is tiny; whether the kernel itself would have started is another matter."""
    early = np.zeros((1, 1, 3), dtype=np.int64)
    late = early + 100
    library = chain(fixed=True)
    for changed, overlap in (
        ({}, {("producer", "first"): 1.0, ("first", "last"): 1.0}),
        ({"producer": {"delay_us": 2.0}}, {("producer", "first"): 1.0, ("first", "last"): 1.0}),
        ({"first": {"delay_us": 2.0, "trigger": "entry"}}, {("first", "last"): 1.0}),
        ({"last": {"delay_us": 2.0, "trigger": "entry"}}, {("producer", "first"): 1.0}),
    ):
        variant = library.varied(changed)
        assert module._judge(captured(variant), early, late, late, "").overlap == overlap
    around = np.zeros((1, 2, 3), dtype=np.int64)
    found = module._judge(captured(library, back_to_back=True), around, around + 100, around + 100, "")
    assert found.overlap["last", "producer"] == 1.0, "the producer is the chain's own: back to back its start counts"


# --- the profiler --------------------------------------------------------------------------------------------------


class FakeBench:
    """Captures with two replays; each step is a memset and a kernel, of which the profiler records the kernel."""

    def __init__(self) -> None:
        self.captures: list[dict[str, Any]] = []

    def capture(self, variant: Chain, **how: Any) -> Any:
        self.captures.append(how)
        nodes = {step.name: ["memset", "kernel"] for step in variant.steps}
        return SimpleNamespace(
            chain=variant, unroll=2, boundaries={1} if how["back_to_back"] else {1, 2}, **how,
            nodes_of=lambda replay: nodes if replay == 1 else None,
        )  # fmt: skip


def run_profiled(
    monkeypatch: pytest.MonkeyPatch, variant: Chain, starts: list[int], *, back_to_back: bool = False, length: int = 90
) -> module.Exposure:
    """Each launch has two replays whose kernels start at these times, 100,000 ns apart."""
    asked: list[int] = []

    def records(bench: Any, captured: Any, launches: int) -> list[Record]:
        asked.append(launches)
        names = [step.name for step in variant.steps]
        found = []
        for launch in range(launches):
            for replay in range(2):
                base = 1_000_000 + 1_000_000 * launch + 100_000 * replay
                found += [
                    Record(n, base + start, base + start + length) for n, start in zip(names, starts, strict=True)
                ]
                found += [] if back_to_back else [Record("boundary", base + 90_000, base + 90_010)]
            found += [Record("boundary", base + 95_000, base + 95_010)] if back_to_back else []
        return found

    monkeypatch.setattr(module.profiler, "records", records)
    monkeypatch.setattr(module.nodes, "kind", str)
    bench = FakeBench()
    found = profiled(bench, variant, back_to_back=back_to_back, samples=7)  # type: ignore[arg-type]
    assert asked == [4], "at least as many replays as were asked for"
    assert bench.captures == [{"back_to_back": back_to_back}]
    return found


@pytest.mark.parametrize("fixed", [False, True])
def test_only_data_edges_of_delayed_writers_count_as_exposed(monkeypatch: pytest.MonkeyPatch, fixed: bool) -> None:
    """When a kernel stores cannot be seen from outside, but one that delays stores no earlier than after its delay."""
    starts = [0, 20, 40]
    late = chain(fixed=fixed).varied({"producer": {"delay_us": 1.0}})
    found = run_profiled(monkeypatch, late, starts)
    assert found.exposed == {
        ("producer", "first", "h"): 1.0,
        ("producer", "last", "h"): 1.0,
        ("first", "last", "x"): 0.0,
    }
    assert found.overlap == {("producer", "first"): 1.0, ("first", "last"): 1.0}
    found = run_profiled(monkeypatch, chain(fixed=fixed), starts)
    assert set(found.exposed.values()) == {0.0}, "nobody is late: overlap alone"
    assert found.overlap == {("producer", "first"): 1.0, ("first", "last"): 1.0}


@pytest.mark.parametrize(("start", "share"), [(1900, 1.0), (1990, 0.0), (2000, 0.0), (2500, 0.0)])
def test_a_reader_must_start_before_the_delay_is_over_by_more_than_the_timers_resolution(
    monkeypatch: pytest.MonkeyPatch, start: int, share: float
) -> None:
    late = chain().varied({"producer": {"delay_us": 2.0}})
    found = run_profiled(monkeypatch, late, [0, start, 5000], length=4000)
    assert found.exposed["producer", "first", "h"] == share
    assert "resolution 10 ns" in found.method


def test_an_overlap_no_wider_than_the_timers_resolution_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a timer rounds; what it cannot tell apart is not taken for an overlap."""
    for start, share in ((990, 0.0), (980, 1.0)):
        found = run_profiled(monkeypatch, chain(), [0, start, 5000], length=1000)
        assert "resolution 10 ns" in found.method
        assert found.overlap["producer", "first"] == share


def test_the_method_says_how_many_replays_were_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_profiled(monkeypatch, chain(), [0, 20, 40]).method == "profiler, 8 replays, resolution 10 ns"


def test_back_to_back_is_profiled_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = chain().varied({"last": {"delay_us": 1.0}})
    found = run_profiled(monkeypatch, variant, [0, 20, 40], back_to_back=True)
    assert found.overlap["last", "producer"] == 0.0
    assert set(found.overlap) == {("producer", "first"), ("first", "last"), ("last", "producer")}


def test_without_valid_records_nothing_is_claimed_and_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> list[Record]:
        raise NoProfile("it recorded no kernel")

    monkeypatch.setattr(module.nodes, "kind", str)
    monkeypatch.setattr(module.profiler, "records", none)
    found = profiled(FakeBench(), chain())  # type: ignore[arg-type]
    assert (found.overlap, found.exposed) == ({}, {})
    assert found.method == "the profiler gave no valid records: it recorded no kernel"
    monkeypatch.setattr(module.profiler, "records", lambda *_: [Record("k", 1, 2)])
    found = profiled(FakeBench(), chain())  # type: ignore[arg-type]
    assert (found.overlap, found.exposed) == ({}, {})
    assert found.method == "the profiler gave no valid records: 1 kernel records, expected 512"
