"""Each kernel behind an early-release stand-in: what it touches before its wait, and when its own stores end.

A probe is a graph of its own: *restore, stand-in, kernel, grade*. The stand-in triggers at once, lets the delay pass
and only then does what a late predecessor would: it writes what the kernel reads (*late*), overwrites what the kernel
writes with what was there before (*rewrite*), or reads that (*reread*). The kernel is as it was captured, or patched.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ...chain import Patch
from ...region import WORD, Region
from ..kernels import COUNTERS, NEVER
from ..surgery import Surgeon
from ..waiting import finish
from . import kernels, memory
from .capturing import POOL, Shot
from .observe import Observed, Observer
from .variants import Variant

SYNC_EVERY = 128
"""Graph launches between two host synchronizations."""

LATE, REWRITE, REREAD = "late", "rewrite", "reread"

WATCHED_US = 500.0
"""How long a watcher waits for stores behind a trigger."""


@dataclass
class Counts:
    """What a run of a variant counted; ``agree``: device and host counts do.

    ``seen``, ``want``, ``marks``: content of the first bad replay, what it should have been, and which words of it were
    wrong (CPU tensors).
    """

    replays: int
    mismatches: int
    agree: bool
    seconds: float
    seen: Any = None
    marks: Any = None
    want: Any = None


class Runner:
    """Runs graphs that end in a grade kernel, and reads its counters."""

    def __init__(self, stream: Any, own: memory.OwnMemory, counters: Any, device: int, time_limit: float) -> None:
        import torch

        self.stream, self.own, self.counters, self.device, self.time_limit = stream, own, counters, device, time_limit
        with own.use():
            self.last_bad = torch.full((1,), -1, dtype=torch.int64, device=stream.device)

    def grade(self, table: Any, expected: Any, seen: Any, marks: Any) -> kernels.Launch:
        return kernels.grade(self.device, table, expected, self.counters, self.last_bad, seen, marks)

    def run(self, variant: Variant, replays: int, words: int, expected: Any, seen: Any, marks: Any) -> Counts:
        """Raises TimeLimit, DeviceError. ``words``: how many are compared with ``expected`` in a replay."""
        import torch

        with torch.cuda.stream(self.stream):
            self.counters.zero_()
            self.counters[COUNTERS.index("first_bad")] = -1
            self.last_bad.fill_(-1)
            marks.zero_()
            finish(self.stream, self.time_limit)
            with variant.executable() as executable:
                started = time.perf_counter()
                for index in range(replays):
                    executable.launch(self.stream.cuda_stream)
                    if index % SYNC_EVERY == SYNC_EVERY - 1:
                        finish(self.stream, self.time_limit)
                finish(self.stream, self.time_limit)
                seconds = time.perf_counter() - started
            values = dict(zip(COUNTERS, (int(v) % 2**64 for v in self.counters.tolist()), strict=True))
            self.counters.zero_()
            finish(self.stream, self.time_limit)
        agree = values["replay"] == replays and values["words"] == replays * words and not values["ticket"]
        agree = agree and (values["first_bad"] == NEVER) == (values["bad"] == 0)
        counts = Counts(values["replay"], values["bad"], agree, seconds)
        if values["bad"]:
            counts.want = expected[values["first_bad"] % POOL].cpu()
            counts.seen, counts.marks = seen.cpu(), marks.cpu()
        return counts


class Prober:
    """Probes single kernels of a captured graph."""

    def __init__(self, shot: Shot, seen: Observed, observer: Observer, runner: Runner, surgeon: Surgeon) -> None:
        import torch

        self.shot, self.seen, self.runner, self.surgeon = shot, seen, runner, surgeon
        self._observer = observer
        self.patched: dict[str, str] = {}  # what was done to machine code, and how that was checked
        self._device = runner.device
        with runner.own.use():
            self.everything = memory.table(seen.whole)
            self.seen_words = torch.zeros(max(1, len(seen.whole)) * WORD, dtype=torch.uint8, device=memory.DEVICE)
            self.marks = torch.zeros(max(1, len(seen.whole)), dtype=torch.uint8, device=memory.DEVICE)

    def probe(
        self, index: int, what: str, region: Region, delay_us: float, replays: int, *,
        patch: Patch | None = None, serialized: bool = False,
    ) -> Counts:  # fmt: skip
        """One probe of node ``index``.

        Args:
            what: ``late``, ``rewrite`` or ``reread``.
            region: what the stand-in writes or reads.
            patch: how the kernel's machine code is changed.
            serialized: with a full edge between the stand-in and the kernel.

        Raises:
            PdlStressError: its machine code is not found; TimeLimit; DeviceError.
        """
        import torch

        stream = self.runner.stream
        with torch.cuda.stream(stream), self.runner.own.use():
            before = self.seen.rows[index]
            initial, late = before, memory.table(region, self.seen.whole)
            table, expected = self.everything, self._observer.behind(index, before, self.seen)
            if what == LATE:
                chosen = memory.selection(region, self.seen.whole)
                initial = before.clone()
                initial[:, chosen] = before.roll(-1, 0)[:, chosen]
            stand_in = self._copy(late, before, early=True, delay_us=delay_us)
            if what == REREAD:
                scratch = memory.rows(1, region)
                stand_in = self._copy(memory.table(region), scratch, gather=True, early=True, delay_us=delay_us)
                table = memory.table(
                    Region(Region.span(scratch.data_ptr(), len(region) * WORD).addresses, region.masks)
                )
                expected = before.view(POOL, -1, WORD)[:, region.places_in(self.seen.whole)].reshape(POOL, -1)
                expected = expected.contiguous()
            finish(stream, self.runner.time_limit)
        variant = Variant(self.shot.raw, self.shot.order)
        try:
            variant.only([index])
            if patch is not None:
                lines = self.surgeon.operate([variant.nodes[index]], patch)
                self.patched[f"{self.shot.labels[index]}, {patch}"] = "; ".join(lines)
            restore, first = variant.add(self._copy(self.everything, initial)), variant.add(stand_in)
            last = variant.add(self.runner.grade(table, expected, self.seen_words, self.marks))
            variant.edge(restore, first)
            variant.edge(first, variant.nodes[index], programmatic=not serialized)
            variant.edge(variant.nodes[index], last)
            variant.edge(first, last)  # a kernel that never waits may complete before the stand-in does (R8)
            return self.runner.run(variant, replays, len(table), expected, self.seen_words, self.marks)
        finally:
            variant.destroy()

    def lag_us(self, index: int, region: Region, launches: int = 8) -> float | None:
        """How long after a dependent could start the node still was storing into ``region``: the longest that was seen.
        ``None``: its stores did not end while the watcher looked."""
        import torch

        stream = self.runner.stream
        with torch.cuda.stream(stream), self.runner.own.use():
            before = self.seen.rows[index]
            expected = self._observer.behind(index, before, self.seen)
            lag = torch.zeros(2, dtype=torch.int64, device=memory.DEVICE)
            watched = memory.table(region, self.seen.whole)
            watcher = kernels.watch(self._device, watched, expected, self.runner.counters, WATCHED_US, lag)
            self.runner.counters.zero_()
            finish(stream, self.runner.time_limit)
        variant = Variant(self.shot.raw, self.shot.order)
        try:
            variant.only([index])
            restore, watch = variant.add(self._copy(self.everything, before)), variant.add(watcher)
            variant.edge(restore, variant.nodes[index])
            variant.edge(variant.nodes[index], watch, programmatic=True)
            with variant.executable() as executable:
                for _ in range(launches):
                    executable.launch(stream.cuda_stream)
                finish(stream, self.runner.time_limit)
        finally:
            variant.destroy()
        longest, late = lag.tolist()
        return None if late else longest / 1000

    def _copy(self, table: Any, packed: Any, **how: Any) -> kernels.Launch:
        return kernels.copy(self._device, table, packed, self.runner.counters, **how)
