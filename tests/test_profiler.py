"""From kernel records of a profiler to times of steps: made-up records, and what is refused. No GPU, no profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdl_stress.cuda import profiler as module
from pdl_stress.cuda.profiler import NoProfile, Record, by_step

STEPS = ("producer", "norm", "gemm")


@dataclass
class FakeCaptured:
    """Two replays of three steps; ``boundaries`` as a captured chain has them."""

    unroll: int = 2
    back_to_back: bool = False
    boundaries: set[int] = field(default_factory=set)
    chain: Any = field(default_factory=lambda: SimpleNamespace(steps=[SimpleNamespace(name=name) for name in STEPS]))

    def __post_init__(self) -> None:
        if not self.boundaries:
            self.boundaries = {1000, 1001} if self.back_to_back else {1000 + i for i in range(self.unroll)}


def names_of(captured: FakeCaptured, kernels: dict[str, int]) -> list[str]:
    """The kernels of one launch, in stream order."""
    names = []
    for _ in range(captured.unroll):
        names += [f"{step} kernel {number}" for step in STEPS for number in range(kernels[step])]
        names += [] if captured.back_to_back else ["boundary"]
    return names + ["boundary"] * (len(captured.boundaries) if captured.back_to_back else 0)


def made(captured: FakeCaptured, kernels: dict[str, int], launches: int) -> list[Record]:
    """Records of launches: number n starts at 100 (n + 1) and runs for 150 ns, into its successor."""
    names = names_of(captured, kernels) * launches
    return [Record(name, 100 * (n + 1), 100 * (n + 1) + 150) for n, name in enumerate(names)]


ONE = dict.fromkeys(STEPS, 1)


def test_each_step_gets_its_start_and_end_in_stream_order() -> None:
    captured = FakeCaptured()
    starts, ends, resolution = by_step(made(captured, ONE, 2), captured, ONE, 2)  # type: ignore[arg-type]
    assert starts.dtype == ends.dtype == np.int64, "nanoseconds since 1970 need every bit"
    assert starts.tolist() == [
        [[100, 200, 300], [500, 600, 700]],  # 400 and 800 are boundaries
        [[900, 1000, 1100], [1300, 1400, 1500]],
    ]
    assert (ends - starts == 150).all()
    assert resolution == 50, "the smallest distance of two times"


def test_a_step_of_several_kernels_runs_from_its_first_start_to_its_last_end() -> None:
    captured, kernels = FakeCaptured(unroll=1), {**ONE, "gemm": 2}
    records = made(captured, kernels, 1)
    assert [record.name for record in records[2:4]] == ["gemm kernel 0", "gemm kernel 1"]
    starts, ends, _ = by_step(records, captured, kernels, 1)  # type: ignore[arg-type]
    assert (starts[0, 0, 2], ends[0, 0, 2]) == (300, 550)
    records[2] = replace(records[2], end=9000)  # the first one may end last: PDL within the step
    _, ends, _ = by_step(records, captured, kernels, 1)  # type: ignore[arg-type]
    assert ends[0, 0, 2] == 9000


def test_back_to_back_the_boundaries_come_once_at_the_end_of_a_launch() -> None:
    for boundaries in ({7}, {7, 8}):
        captured = FakeCaptured(back_to_back=True, boundaries=boundaries)
        starts, _, _ = by_step(made(captured, ONE, 2), captured, ONE, 2)  # type: ignore[arg-type]
        second = 700 + 100 * len(boundaries)
        assert starts.tolist() == [
            [[100, 200, 300], [400, 500, 600]],
            [[second, second + 100, second + 200], [second + 300, second + 400, second + 500]],
        ]


def test_times_of_today_lose_no_nanosecond() -> None:
    captured = FakeCaptured(unroll=1)
    now = 1_790_000_000_000_000_001
    records = [replace(r, start=r.start + now, end=r.end + now) for r in made(captured, ONE, 1)]
    starts, ends, resolution = by_step(records, captured, ONE, 1)  # type: ignore[arg-type]
    assert starts[0, 0].tolist() == [now + 100, now + 200, now + 300]
    assert ends[0, 0].tolist() == [now + 250, now + 350, now + 450]
    assert resolution == 50


def test_the_resolution_is_never_zero() -> None:
    """Records of equal times would otherwise have one of nothing at all."""
    captured = FakeCaptured(unroll=1)
    records = [replace(record, start=100, end=100) for record in made(captured, ONE, 1)]
    assert by_step(records, captured, ONE, 1)[2] == 1  # type: ignore[arg-type]
    records[-1] = replace(records[-1], end=132)
    assert by_step(records, captured, ONE, 1)[2] == 32  # type: ignore[arg-type]


def swap(records: list[Record], a: int, b: int) -> list[Record]:
    """Two kernels exchange their places in time."""
    first, second = records[a], records[b]
    return [replace(r, name={a: second.name, b: first.name}.get(n, r.name)) for n, r in enumerate(records)]


REFUSED: dict[str, tuple[Callable[[list[Record]], list[Record]], str]] = {
    "none": (lambda records: [], "0 kernel records, expected 16"),
    "one missing": (lambda records: records[:-1], "15 kernel records, expected 16"),
    "a first one missing": (lambda records: records[1:], "15 kernel records, expected 16"),
    "one too many": (lambda records: [*records, records[-1]], "17 kernel records, expected 16"),
    "a whole launch missing": (lambda records: records[:8], "8 kernel records, expected 16"),
    "two steps the wrong way round": (lambda records: swap(records, 1, 2), "do not start in stream order"),
    "a step and a boundary the wrong way round": (lambda records: swap(records, 2, 3), "do not start in stream order"),
    "a boundary and the next replay": (lambda records: swap(records, 3, 4), "do not start in stream order"),
    "a kernel that is not the chain's": (
        lambda records: [replace(records[0], name="elementwise"), *records[1:]],
        "kernels of producer do not start in stream order",
    ),
    "a record without times": (
        lambda records: [*records[:5], replace(records[5], start=0, end=0), *records[6:]],
        "a record ends before it starts, or has no time",
    ),
    "a record without a start": (
        lambda records: [replace(records[0], start=0), *records[1:]],
        "a record ends before it starts, or has no time",
    ),
    "a record that ends before it starts": (
        lambda records: [*records[:-1], replace(records[-1], end=records[-1].start - 1)],
        "a record ends before it starts, or has no time",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_records_that_cannot_be_what_ran_are_refused(what: str) -> None:
    captured = FakeCaptured()
    damage, words = REFUSED[what]
    with pytest.raises(NoProfile, match=words):
        by_step(damage(made(captured, ONE, 2)), captured, ONE, 2)  # type: ignore[arg-type]


def test_back_to_back_a_boundary_in_the_wrong_place_is_refused() -> None:
    captured = FakeCaptured(back_to_back=True)
    records = made(captured, ONE, 1)
    with pytest.raises(NoProfile, match="do not start in stream order"):
        by_step(swap(records, 5, 6), captured, ONE, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("back_to_back", [False, True])
def test_a_boundary_that_is_none_is_refused(back_to_back: bool) -> None:
    """A record that got lost and a foreign one make the right number."""
    captured = FakeCaptured(back_to_back=back_to_back)
    records = made(captured, ONE, 1)
    records[-1] = replace(records[-1], name="elementwise")
    with pytest.raises(NoProfile, match="kernels of boundary do not start in stream order"):
        by_step(records, captured, ONE, 1)  # type: ignore[arg-type]


def test_a_step_that_launches_nothing_is_refused() -> None:
    captured, kernels = FakeCaptured(), {**ONE, "norm": 0}
    with pytest.raises(NoProfile, match="step norm launches no kernel"):
        by_step(made(captured, kernels, 1), captured, kernels, 1)  # type: ignore[arg-type]


@given(
    unroll=st.integers(1, 4),
    launches=st.integers(1, 3),
    counts=st.tuples(*[st.integers(1, 3)] * 3),
    back_to_back=st.booleans(),
    data=st.data(),
)
def test_whatever_a_chain_launches_its_records_find_their_steps(
    unroll: int, launches: int, counts: tuple[int, ...], back_to_back: bool, data: st.DataObject
) -> None:
    kernels = dict(zip(STEPS, counts, strict=True))
    captured = FakeCaptured(unroll, back_to_back, {1} if back_to_back else set())
    gaps = data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=5))
    records, clock = [], 1
    for number, record in enumerate(made(captured, kernels, launches)):
        clock += gaps[number % len(gaps)] if gaps else 1
        records.append(Record(record.name, clock, clock + data.draw(st.integers(0, 40))))
    starts, ends, resolution = by_step(records, captured, kernels, launches)  # type: ignore[arg-type]
    assert starts.shape == ends.shape == (launches, unroll, 3)
    assert (np.diff(starts.reshape(-1)) > 0).all()
    times = {time for record in records for time in (record.start, record.end)}
    assert set(starts.reshape(-1).tolist()) | set(ends.reshape(-1).tolist()) <= times
    assert resolution >= 1
    by_time = {record.start: record for record in records}
    for index, step in enumerate(STEPS):
        for start in starts[..., index].reshape(-1).tolist():
            assert by_time[start].name == f"{step} kernel 0"


# --- a session -----------------------------------------------------------------------------------------------------


class FakeSession:
    """torch's profiler with these kernels, memsets and copies in it; and a GPU on which nothing happens."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.launched = names, 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch = pytest.importorskip("torch")
        cuda = torch.profiler.ProfilerActivity.CUDA
        monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {cuda} if self.names else set())
        monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(self))
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(module.graphs, "Executable", lambda raw: nullcontext(self))
        monkeypatch.setattr(module, "used", False)

    def launch(self, handle: Any) -> None:
        self.launched += 1

    @property
    def profiler(self) -> Any:
        def event(number: int, name: str) -> Any:
            kind = SimpleNamespace(name="CPU" if name == "launch" else "CUDA")
            return SimpleNamespace(
                name=lambda: name, start_ns=lambda: 100 - number, end_ns=lambda: 200, device_type=lambda: kind
            )

        events = [event(number, name) for number, name in enumerate(self.names)]
        return SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))


BENCH = SimpleNamespace(stream=None, handle=0, prime=lambda captured: None, finish=lambda: None)


def records_of(names: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    session = FakeSession(names)
    session.install(monkeypatch)
    try:
        found = module.records(BENCH, SimpleNamespace(raw="graph"), 3)  # type: ignore[arg-type]
    finally:
        assert session.launched == (4 if names else 0), "one more, which uploads the graph"
    assert [record.start for record in found] == sorted(record.start for record in found)
    return [record.name for record in found]


def test_memsets_and_copies_are_no_kernels_and_kernels_of_such_names_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler writes `Memset (Device)` and `Memcpy HtoD (Pinned -> Device)`; libraries have `Memset_kernel`."""
    names = ["gemm", "launch", "Memset (Device)", "Memset_kernel", "Memcpy DtoD (Device -> Device)", "MemcpyAsync<4>"]
    assert records_of(names, monkeypatch) == ["MemcpyAsync<4>", "Memset_kernel", "gemm"]


def test_a_process_that_has_profiled_remembers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the profiler gave nothing: it was there."""
    for names in (["gemm"], ["launch"]):
        FakeSession(names).install(monkeypatch)
        assert module.used is False
        if names == ["launch"]:
            with pytest.raises(NoProfile, match="it recorded no kernel"):
                records_of(names, monkeypatch)
        else:
            records_of(names, monkeypatch)
        assert module.used is True


def test_without_a_profiler_nothing_was_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoProfile, match="built without a CUDA profiler"):
        records_of([], monkeypatch)
    assert module.used is False
