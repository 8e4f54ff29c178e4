"""The whole captured graph, replayed: as deployed, with one node's stores late, serialized."""

from __future__ import annotations

from .. import graphs
from ..waiting import finish
from . import kernels, memory
from .capturing import Shot
from .observe import PRODUCER, Observed
from .probe import Counts, Runner
from .variants import Variant


class Trial:
    """Replays of a captured graph, each on the next generation of inputs, all that it writes compared."""

    def __init__(self, shot: Shot, seen: Observed, runner: Runner) -> None:
        import torch

        self.shot, self.seen, self.runner = shot, seen, runner
        with torch.cuda.stream(runner.stream), runner.own.use():
            self._everything = memory.table(seen.whole)
            self._tables = {PRODUCER: (memory.table(shot.late, shot.given), shot.truth)}
            self.seen_words = torch.zeros(seen.final.shape[1], dtype=torch.uint8, device=memory.DEVICE)
            self.marks = torch.zeros(max(1, len(seen.whole)), dtype=torch.uint8, device=memory.DEVICE)

    def run(
        self, replays: int, *, late: int = PRODUCER, delay_us: float = 0.0, serialized: bool = False,
        full_behind: int | None = None,
    ) -> Counts:  # fmt: skip
        """Runs one arm.

        Args:
            late: the node whose stores come late: it is replaced by an early-release stand-in that writes the same.
            delay_us: how late. Another node than the producer leaves the producer undelayed.
            serialized: with full edges only. ``full_behind``: with full edges behind one node.
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
            with torch.cuda.stream(self.runner.stream):
                restore = variant.add(
                    kernels.copy(self.runner.device, self._everything, self.seen.initial, self.runner.counters)
                )
                last = variant.add(self.runner.grade(self._everything, self.seen.final, self.seen_words, self.marks))
            variant.edge(restore, variant.nodes[PRODUCER])
            behind = {int(edge.source) for edge in graphs.edges(variant.raw) if edge.kind == graphs.PROGRAMMATIC}
            for (
                node
            ) in variant.nodes:  # whoever has a programmatic edge behind it may complete after its successor (R8)
                if int(node) in behind or int(node) == int(variant.nodes[-1]):
                    variant.edge(node, last)
            return self.runner.run(
                variant, replays, len(self._everything), self.seen.final, self.seen_words, self.marks
            )
        finally:
            variant.destroy()

    def _stand_in(self, index: int, delay_us: float) -> kernels.Launch:
        import torch

        if index not in self._tables:
            with torch.cuda.stream(self.runner.stream), self.runner.own.use():
                self._tables[index] = (memory.table(self.seen.writes[index]), self.seen.after[index])
                finish(self.runner.stream, self.runner.time_limit)
        table, content = self._tables[index]
        return kernels.copy(self.runner.device, table, content, self.runner.counters, early=True, delay_us=delay_us)
