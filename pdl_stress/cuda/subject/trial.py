"""The whole captured graph, replayed: as deployed, with one node's stores late, serialized."""

from __future__ import annotations

from typing import Any

from ...region import Region
from .. import graphs
from ..waiting import finish
from . import kernels, memory
from .capturing import Shot
from .observe import PRODUCER, Observed, Observer
from .probe import Counts, Runner
from .variants import Variant


class Trial:
    """Replays of a captured graph, each on the next generation of inputs, all that it writes compared."""

    def __init__(self, shot: Shot, seen: Observed, observer: Observer, runner: Runner) -> None:
        import torch

        self.shot, self.seen, self.runner, self._observer = shot, seen, runner, observer
        with torch.cuda.stream(runner.stream), runner.own.use():
            self._everything = memory.table(seen.whole)
            self._tables = {PRODUCER: (memory.table(shot.late, shot.given), shot.truth)}
            self.seen_words = torch.zeros(seen.final.shape[1], dtype=torch.uint8, device=memory.DEVICE)
            self.marks = torch.zeros(max(1, len(seen.whole)), dtype=torch.uint8, device=memory.DEVICE)

    def run(
        self, replays: int, *, late: int = PRODUCER, delay_us: float = 0.0, serialized: bool = False,
        full_behind: int | None = None,
        until: int | None = None,
    ) -> Counts:  # fmt: skip
        """Runs one arm.

        Args:
            late: the node whose stores come late: it is replaced by an early-release stand-in that writes the same.
            delay_us: how late. Another node than the producer leaves the producer undelayed.
            serialized: with full edges only. ``full_behind``: with full edges behind one node.
            until: the last node to run, if not all; it must have rows in :attr:`Observed.rows`. What a later node
                overwrites is compared then.
        """
        import torch

        variant = Variant(self.shot.raw, self.shot.order)
        try:
            producer = self._stand_in(PRODUCER, delay_us if late == PRODUCER else 0.0)
            variant.replace(PRODUCER, producer)
            if late != PRODUCER:
                variant.replace(late, self._stand_in(late, delay_us))
            if serialized:
                variant.serialize()
            elif full_behind is not None:
                variant.serialize(full_behind)
            table, expected, kept = self._everything, self.seen.final, variant.nodes
            with torch.cuda.stream(self.runner.stream), self.runner.own.use():
                if until is not None:
                    variant.only(range(until + 1))
                    table, expected, kept = *self.behind(until), variant.nodes[: until + 1]
                copy = kernels.copy(self.runner.device, self._everything, self.seen.initial, self.runner.counters)
                grade = self.runner.grade(table, expected, self.seen_words, self.marks)
                finish(self.runner.stream, self.runner.time_limit)
            restore, last = variant.add(copy), variant.add(grade)
            variant.edge(restore, variant.nodes[PRODUCER])
            early = {int(edge.source) for edge in graphs.edges(variant.raw) if edge.kind == graphs.PROGRAMMATIC}
            for node in kept:  # one with a programmatic edge behind it may complete after its successor (R8)
                if int(node) in early or int(node) == int(kept[-1]):
                    variant.edge(node, last)
            return self.runner.run(variant, replays, len(table), expected, self.seen_words, self.marks)
        finally:
            variant.destroy()

    def behind(self, index: int) -> tuple[Any, Any]:
        """Table and packed rows of what is given or written up to a node, as it is behind that node."""
        region = Region.union((self.shot.given, *self.seen.writes[1 : index + 1]))
        rows = self._observer.behind(index, self.seen.rows[index], self.seen)
        return memory.table(region, self.seen.whole), rows

    def _stand_in(self, index: int, delay_us: float) -> kernels.Launch:
        import torch

        if index not in self._tables:
            with torch.cuda.stream(self.runner.stream), self.runner.own.use():
                self._tables[index] = (memory.table(self.seen.writes[index]), self.seen.after[index])
                finish(self.runner.stream, self.runner.time_limit)
        table, content = self._tables[index]
        return kernels.copy(self.runner.device, table, content, self.runner.counters, early=True, delay_us=delay_us)
