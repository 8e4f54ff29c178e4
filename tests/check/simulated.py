"""A GPU for tests of the check: kernels are Python generators on the CPU's own memory, and ``yield`` is their wait.

What stands before the ``yield`` runs before a late predecessor has done its work, what stands behind it runs after. A
kernel whose waits are removed runs at once; one behind a full edge runs when all before it is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pdl_stress.chain import Patch
from pdl_stress.cuda.subject import memory
from pdl_stress.cuda.subject.capturing import POOL, Shot
from pdl_stress.cuda.subject.checker import Checker
from pdl_stress.cuda.subject.observe import PRODUCER, Observed, Observer
from pdl_stress.cuda.subject.probe import LATE, REREAD, Counts
from pdl_stress.errors import PdlStressError
from pdl_stress.judging import finish
from pdl_stress.region import WORD, Region
from pdl_stress.results import CaseResult, NodeResult
from pdl_stress.subjects import CheckPlan, Subject

SIZE = 8
"""Elements of a buffer, float32."""

Memory = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kernel:
    """``late``: it triggers at entry, before its own wait; else behind its stores. ``busy_us``: without its waits it
    still does other things first."""

    run: Callable[[Memory], Iterator[None]]
    overlaps: bool = True
    late: bool = False
    busy_us: float = 0.0
    code: bool = True
    waits: int | None = None
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or self.run.__name__


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, packed rows and the memory under observation lie in the CPU's memory."""
    monkeypatch.setattr(memory, "DEVICE", "cpu")
    monkeypatch.setattr(memory, "view_of", _view)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def _view(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def move(table: torch.Tensor, packed: torch.Tensor, generation: int, *, gather: bool) -> None:
    """What the copy kernel does."""
    row = packed[generation % len(packed)].numpy()
    for address, entry in table.numpy().view(np.uint64).tolist():
        word, mask = entry & 0xFFFFFFFF, entry >> 32
        live = np.ctypeslib.as_array((ctypes.c_uint8 * WORD).from_address(address))
        bits = [byte for byte in range(WORD) if mask >> byte & 1]
        there = row[word * WORD : (word + 1) * WORD]
        if gather:
            there[bits] = live[bits]
        else:
            live[bits] = there[bits]


class SimulatedObserver(Observer):
    def __init__(self, shot: Shot, kernels: list[Kernel], tensors: Memory) -> None:
        self.shot, self.kernels, self.tensors = shot, kernels, tensors
        self.stream = None
        self.own = type("Own", (), {"use": staticmethod(nullcontext)})()

    def run(self, index: int) -> None:
        list(self.kernels[index - 1].run(self.tensors))

    def put(self, table: Any, packed: Any, generation: int) -> None:
        move(table, packed, generation, gather=False)

    def take(self, table: Any, packed: Any, generation: int) -> None:
        move(table, packed, generation, gather=True)

    def finish(self) -> None: ...


class Counter:
    """Counts bad generations, and keeps the first bad one, as the grade kernel does."""

    def __init__(self, replays: int, words: int) -> None:
        self.replays, self._bad = replays, 0
        self.counts = Counts(replays, 0, True, 0.1)
        self._words = words

    def grade(self, got: torch.Tensor, want: torch.Tensor, region: Region) -> None:
        differs = (got != want).numpy().reshape(-1, WORD)[: len(region)] & region.bits
        if not differs.any():
            return
        self._bad += 1
        if self.counts.seen is None:
            marks = torch.zeros(max(1, self._words), dtype=torch.uint8)
            marks[: len(region)] = torch.from_numpy(differs.any(1).astype(np.uint8))
            self.counts.seen, self.counts.want, self.counts.marks = got.clone(), want.clone(), marks

    def result(self) -> Counts:
        self.counts.mismatches = self.replays * self._bad // POOL
        return self.counts


class SimulatedProber:
    def __init__(self, observer: SimulatedObserver, seen: Observed) -> None:
        self.observer, self.seen, self.asked = observer, seen, []  # type: ignore[var-annotated]
        self.everything = memory.table(seen.whole)
        self.patched: dict[str, str] = {}

    def probe(
        self, index: int, what: str, region: Region, delay_us: float, replays: int, *,
        patch: Patch | None = None, serialized: bool = False,
    ) -> Counts:  # fmt: skip
        self.asked.append((index, what, delay_us, patch, serialized))
        kernel, seen = self.observer.kernels[index - 1], self.seen
        if patch is not None and not kernel.code:
            raise PdlStressError(f"no machine code of {kernel.label}")
        if patch is not None:
            self.patched[f"{kernel.label}, {patch}"] = "checked"
        before = seen.rows[index]
        wanted = self.observer.behind(index, before, seen)
        initial, late = before, memory.table(region, seen.whole)
        if what == LATE:
            chosen = memory.selection(region, seen.whole)
            initial = before.clone()
            initial[:, chosen] = before.roll(-1, 0)[:, chosen]
        counter = Counter(replays, len(seen.whole))
        for generation in range(POOL):
            self.observer.put(self.everything, initial, generation)
            scratch = memory.rows(1, region)
            running = kernel.run(self.observer.tensors)

            def stand_in(generation: int = generation, scratch: torch.Tensor = scratch) -> None:
                if what == REREAD:
                    move(memory.table(region), scratch, 0, gather=True)
                else:
                    self.observer.put(late, before, generation)

            unordered = patch is not None and patch.remove is None and delay_us >= kernel.busy_us
            if serialized or (patch is not None and patch.remove is None and not unordered):
                stand_in()
            elif unordered:
                list(running)
                stand_in()
            else:
                with suppress(StopIteration):
                    next(running)
                stand_in()
            list(running)
            if what == REREAD:
                there = before[generation].view(-1, WORD)[region.places_in(seen.whole)].reshape(-1)
                counter.grade(scratch[0], there, region)
            else:
                end = memory.rows(POOL, seen.whole)
                self.observer.take(self.everything, end, generation)
                counter.grade(end[generation], wanted[generation], seen.whole)
        return counter.result()

    def lag_us(self, index: int, region: Region) -> float:
        return 5.0 if self.observer.kernels[index - 1].late else 0.0


class SimulatedTrial:
    def __init__(self, observer: SimulatedObserver, seen: Observed) -> None:
        self.observer, self.seen = observer, seen
        self._everything = memory.table(seen.whole)

    def run(
        self, replays: int, *, late: int = PRODUCER, delay_us: float = 0.0, serialized: bool = False,
        full_behind: int | None = None, until: int | None = None,
    ) -> Counts:  # fmt: skip
        shot, seen = self.observer.shot, self.seen
        counter = Counter(replays, len(seen.whole))
        for generation in range(POOL):
            self.observer.put(self._everything, seen.initial, generation)

            def store(index: int, generation: int = generation) -> Callable[[], object]:
                content = (memory.table(shot.late, shot.given), shot.truth) if index == PRODUCER else (
                    memory.table(seen.writes[index]), seen.after[index]
                )  # fmt: skip
                return lambda: self.observer.put(*content, generation)

            pending, released = [store(PRODUCER)], late == PRODUCER and delay_us > 0
            for index, kernel in enumerate(self.observer.kernels[:until], 1):
                running = kernel.run(self.observer.tensors)
                if serialized or not kernel.overlaps or full_behind == index - 1 or not released:
                    for rest in pending:
                        rest()
                    pending = []
                if index != late:
                    with suppress(StopIteration):
                        next(running)
                pending.append(store(index) if index == late else (lambda running=running: list(running)))  # type: ignore[misc]
                released = index == late or kernel.late
            for rest in pending:
                rest()
            end = memory.rows(POOL, seen.whole)
            self.observer.take(self._everything, end, generation)
            want, region = seen.final, seen.whole
            if until is not None:
                want = self.observer.behind(until, seen.rows[until], seen)
                region = Region.union((shot.given, *seen.writes[1 : until + 1]))
            chosen = memory.selection(region, seen.whole)
            counter.grade(torch.where(chosen, end[generation], 0), torch.where(chosen, want[generation], 0), seen.whole)
        return counter.result()


def shot_of(
    kernels: list[Kernel], buffers: str, given: str, independent: str = ""
) -> tuple[Shot, Memory, list[memory.Block]]:
    """A captured chain of kernels over one-letter buffers, of which some are inputs."""
    arena = torch.zeros(len(buffers) * SIZE * 4 + WORD, dtype=torch.uint8)
    start = -arena.data_ptr() % WORD
    tensors: Memory = {}
    for place, name in enumerate(buffers):
        begin = start + place * SIZE * 4
        tensors[name] = arena[begin : begin + SIZE * 4].view(torch.float32)
    tensors["_arena"] = arena
    inputs = {name: tensors[name] for name in given}
    region = Region.union(memory.extent(tensor) for tensor in inputs.values())
    late = region - Region.union(memory.extent(tensors[name]) for name in independent)
    truth, where = memory.rows(POOL, region), memory.table(region)
    generator = torch.Generator().manual_seed(5)
    for generation in range(POOL):
        for tensor in inputs.values():
            tensor.copy_(torch.randn(SIZE, generator=generator))
        move(where, truth, generation, gather=True)
    kinds = ["", *("programmatic" if kernel.overlaps else "full" for kernel in kernels)]
    labels = ["producer", *(kernel.label for kernel in kernels)]
    producer: Any = None
    outputs = {name: tensors[name] for name in buffers if name not in given}
    shot = Shot(None, None, [None] * len(kinds), kinds, labels, inputs, outputs, region, late, truth, [], producer)
    return shot, tensors, [memory.Block(arena.data_ptr() + start, len(buffers) * SIZE * 4, private=False)]


def examine(
    kernels: list[Kernel], buffers: str, given: str, independent: str = "", **plan: Any
) -> tuple[CaseResult, Checker]:
    """The check of a simulated chain, judged."""
    shot, tensors, blocks = shot_of(kernels, buffers, given, independent)
    observer = SimulatedObserver(shot, kernels, tensors)
    subject = Subject("simulated", lambda: None, lambda: None, tuple(independent))
    checker = Checker(subject, CheckPlan(**plan), lambda case: None)
    checker.shot = shot
    for kernel in kernels:
        waits = kernel.waits if kernel.waits is not None else 1
        found = NodeResult("kernel", kernel.label, kernel.label, kernel.label, [1, 1, 1], [32, 1, 1])
        found.incoming, found.waits = ["programmatic" if kernel.overlaps else "full"], waits if kernel.code else None
        checker.case.nodes.append(found)
    checker.seen = observer.observe(blocks)
    prober: Any = SimulatedProber(observer, checker.seen)
    trial: Any = SimulatedTrial(observer, checker.seen)
    checker.prober, checker.trial = prober, trial
    checker.examine()
    finish(checker.case, 1.0)
    return checker.case, checker
