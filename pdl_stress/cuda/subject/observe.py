"""Who writes and reads what, from runs of one node at a time: nothing is guessed from launch parameters.

A node writes the bytes that its run alone changes, over several generations of inputs. It reads a range if its results
differ once the range holds another generation's content.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import UsageError
from ...region import WORD, Region
from .. import graphs
from ..waiting import finish
from . import kernels, memory
from .capturing import POOL, NotCheckable, Shot
from .variants import Variant

GAP = 8
"""Bytes that may be missing between two changed ones: those of an element that were equal by chance."""

PRODUCER, GIVEN = 0, -1
"""Owners of bytes before any node has written them: late inputs, and other inputs."""


@dataclass(frozen=True)
class Group:
    """Bytes that one node (or the producer) wrote last and that lie in one named buffer.

    Args:
        owner: index of the node; ``PRODUCER`` or ``GIVEN`` for inputs.
        buffer: its name.
        region: the bytes.
    """

    owner: int
    buffer: str
    region: Region


@dataclass
class Observed:
    """What each node does to memory.

    Args:
        whole: all bytes that are given or written.
        writes: per node, its bytes; the producer's are the late inputs.
        reads: per node, the groups that its results depend on.
        before: packed rows over ``whole`` before the first node, with the inputs in place.
        initial: the same as a replay should find them: late inputs and what is only written hold another generation.
        after: per node, packed rows over its own bytes.
        final: packed rows over ``whole`` behind the last node.
        state: what is read before it is written, and no input.
        rows: per node with a programmatic edge to or from it, packed rows over ``whole`` before it.
    """

    whole: Region
    writes: list[Region]
    reads: list[list[Group]]
    before: Any
    initial: Any
    after: list[Any]
    final: Any
    names: Names
    state: Region
    rows: dict[int, Any] = field(default_factory=dict)


class Names:
    """Names of buffers by address: inputs, then returned tensors, then whatever the node that writes it is called."""

    def __init__(self, shot: Shot) -> None:
        self._regions = [
            (name, memory.extent(tensor)) for name, tensor in (*shot.inputs.items(), *shot.outputs.items())
        ]
        self._labels = shot.labels

    def split(self, owner: int, region: Region) -> list[Group]:
        found, rest = [], region
        for name, extent in self._regions:
            here = rest & extent
            if here:
                found.append(Group(owner, name, here))
                rest = rest - here
        if rest:
            label = self._labels[owner] if owner > 0 else "memory"
            found.append(Group(owner, f"scratch of {label}", rest))
        return found


class Observer:
    """Runs single nodes of a captured graph on one stream.

    Args:
        device: index. ``counters``: the harness's, all zero, so that row ``offset`` of a packed tensor is generation
            ``offset``.
    """

    def __init__(
        self, shot: Shot, stream: Any, own: memory.OwnMemory, counters: Any, device: int, time_limit: float
    ) -> None:
        self.shot, self.stream, self.own, self.counters = shot, stream, own, counters
        self.device, self.time_limit = device, time_limit
        self._open = ExitStack()
        self.nodes: list[graphs.Executable | None] = [None]
        for index in range(1, len(shot.order)):
            variant = Variant(shot.raw, shot.order)
            variant.only([index])
            self.nodes.append(self._open.enter_context(variant.executable()))
            variant.destroy()

    def close(self) -> None:
        self._open.close()

    # -- small steps ---------------------------------------------------------------------------------------------------

    def run(self, index: int) -> None:
        node = self.nodes[index]
        assert node is not None
        node.launch(self.stream.cuda_stream)

    def put(self, table: Any, packed: Any, generation: int) -> None:
        kernels.copy(self.device, table, packed, self.counters, offset=generation).run(self.stream.cuda_stream)

    def take(self, table: Any, packed: Any, generation: int) -> None:
        kernels.copy(self.device, table, packed, self.counters, offset=generation, gather=True).run(
            self.stream.cuda_stream
        )

    def finish(self) -> None:
        finish(self.stream, self.time_limit)

    # -- the observation -----------------------------------------------------------------------------------------------

    def observe(self, blocks: list[memory.Block]) -> Observed:
        """Raises NotCheckable where the serialized graph does not repeat itself, UsageError for too much memory."""
        import torch

        with torch.cuda.stream(self.stream), self.own.use():
            writes = self._writes(blocks)
            whole = Region.union([self.shot.given, *writes])
            check_size(whole)
            seen = self._states(whole, writes)
            seen.reads = [[], *(list(self._reads(index, groups, seen)) for index, groups in self._live(seen))]
            return seen

    def _writes(self, blocks: list[memory.Block]) -> list[Region]:
        given = memory.table(self.shot.given)
        before = memory.Snapshot([block for block in blocks if not block.private])
        now = memory.Snapshot(blocks)
        before.take()
        found = [self.shot.late] + [Region.empty()] * (len(self.shot.order) - 1)
        for generation in range(POOL):
            before.restore()
            self.put(given, self.shot.truth, generation)
            for index in range(1, len(found)):
                now.take()
                self.run(index)
                self.finish()
                found[index] = found[index] | now.changes()
        before.restore()
        self._outside = before
        raw = found[1:]
        for index in range(1, len(found)):
            foreign = Region.union(other for place, other in enumerate(raw, 1) if place != index)
            found[index] = found[index].filled(GAP, foreign)
        return found

    def _states(self, whole: Region, writes: list[Region]) -> Observed:
        """Content of memory before, between and behind the nodes, for each generation; twice, to see whether it is the
        same."""
        import torch

        given, everything = memory.table(self.shot.given), memory.table(whole)
        tables = [memory.table(region) for region in writes]
        before, final = memory.rows(POOL, whole), memory.rows(POOL, whole)
        after = [memory.rows(POOL, region) for region in writes]
        after[0].copy_(self._late_truth())
        for generation in range(POOL):
            self._outside.restore()
            self.put(given, self.shot.truth, generation)
            self.take(everything, before, generation)
            for index in range(1, len(writes)):
                self.run(index)
                self.take(tables[index], after[index], generation)
            self.take(everything, final, generation)
            self.finish()
        names = Names(self.shot)
        seen = Observed(whole, writes, [], before, before, after, final, names, Region.empty())
        again = [torch.zeros_like(rows) for rows in after]
        for generation in range(POOL):
            self.put(everything, before, generation)
            for index in range(1, len(writes)):
                self.run(index)
                self.take(tables[index], again[index], generation)
                self.finish()
                if not torch.equal(again[index][generation], after[index][generation]):
                    raise NotCheckable(self._unsteady(index, writes, again[index], after[index], generation, names))
        self._initial(seen, everything)
        return seen

    def _unsteady(self, index: int, writes: list[Region], one: Any, two: Any, generation: int, names: Names) -> str:
        differs = (one[generation] != two[generation]).cpu().numpy().reshape(-1, WORD)
        masks = (differs * (1 << np.arange(WORD))).sum(1).astype(np.uint16)
        wrong = Region.of(writes[index].addresses, masks[: len(writes[index])])
        where = ", ".join(group.buffer for group in names.split(index, wrong))
        return (
            f"{self.shot.labels[index]} is not deterministic: with the same inputs and every kernel run alone, {where} "
            f"differs in {wrong.bytes} bytes from one run to the next. A bitwise comparison needs kernels that repeat "
            "themselves (atomics on floats do not)."
        )

    def _late_truth(self) -> Any:
        """Packed rows of the late inputs over their own region, from those of all inputs."""
        late, given = self.shot.late, self.shot.given
        places = late.places_in(given)
        return self.shot.truth.view(POOL, -1, WORD)[:, places].reshape(POOL, -1)

    def _initial(self, seen: Observed, everything: Any) -> None:
        """What a replay should find: late inputs and what is only written hold another generation, so that who reads
        them early is seen. What is read before it is written (a state) must be as it was."""
        import torch

        fresh: list[tuple[int, Region]] = []
        owned = self.shot.given
        for index in range(1, len(seen.writes)):
            first = seen.writes[index] - owned
            fresh += [(index, group.region) for group in seen.names.split(index, first)]
            owned = owned | first
        poisoned = seen.before.clone()
        self.fill(poisoned, seen, self.shot.late, self.shot.given, self.shot.truth)
        state = Region.empty()
        for index, region in fresh:
            trial = seen.before.clone()
            self.fill(trial, seen, region, seen.writes[index], seen.after[index])
            if self._same_end(trial, seen, everything):
                self.fill(poisoned, seen, region, seen.writes[index], seen.after[index])
            else:
                state = state | region
        seen.initial, seen.state = poisoned, state
        torch.cuda.synchronize()

    def fill(self, rows: Any, seen: Observed, region: Region, source: Region, content: Any) -> None:
        """Puts the next generation's content of ``region`` (a part of ``source``) into packed rows over ``whole``."""
        chosen = memory.selection(region, seen.whole)
        wide = rows.new_zeros(rows.shape).view(POOL, -1, WORD)
        wide[:, source.places_in(seen.whole)] = content.view(POOL, -1, WORD)[:, : len(source)]
        rows[:, chosen] = wide.view(POOL, -1).roll(-1, 0)[:, chosen]

    def _same_end(self, initial: Any, seen: Observed, everything: Any) -> bool:
        """Whether the serialized graph ends in the same state from other initial content."""
        import torch

        end = torch.zeros_like(seen.final)
        for generation in range(2):
            self.put(everything, initial, generation)
            for index in range(1, len(seen.writes)):
                self.run(index)
            self.take(everything, end, generation)
        self.finish()
        return torch.equal(end[:2], seen.final[:2])

    # -- reads ---------------------------------------------------------------------------------------------------------

    def _live(self, seen: Observed) -> Iterator[tuple[int, list[Group]]]:
        """Per node, the groups that lie in memory before it runs. Advances ``self.rows`` to that state."""
        owned = {GIVEN: self.shot.given - self.shot.late, PRODUCER: self.shot.late}
        self.rows = seen.before.clone()
        for index in range(1, len(seen.writes)):
            if graphs.PROGRAMMATIC in self.shot.kinds[index : index + 2]:
                seen.rows[index] = self.rows
            yield index, [g for owner, region in owned.items() if region for g in seen.names.split(owner, region)]
            mine = seen.writes[index]
            owned = {owner: region - mine for owner, region in owned.items()}
            owned[index] = mine
            self.rows = self.behind(index, self.rows, seen)

    def behind(self, index: int, rows: Any, seen: Observed) -> Any:
        """Packed rows over ``whole`` behind a node, from those before it."""
        region = seen.writes[index]
        result = rows.clone()
        if region:
            wide = rows.clone().view(POOL, -1, WORD)
            wide[:, region.places_in(seen.whole)] = seen.after[index].view(POOL, -1, WORD)
            chosen = memory.selection(region, seen.whole)
            result[:, chosen] = wide.view(POOL, -1)[:, chosen]
        return result

    def _reads(self, index: int, groups: list[Group], seen: Observed) -> Iterator[Group]:
        import torch

        mine = seen.writes[index]
        if not mine:
            return
        everything, table = memory.table(seen.whole), memory.table(mine)
        found = torch.zeros_like(seen.after[index])
        for group in groups:
            chosen = memory.selection(group.region, seen.whole)
            trial = self.rows.clone()
            trial[:, chosen] = self.rows.roll(-1, 0)[:, chosen]
            for generation in range(POOL):
                self.put(everything, trial, generation)
                self.run(index)
                self.take(table, found, generation)
            self.finish()
            if not torch.equal(found, seen.after[index]):
                yield group


def check_size(region: Region) -> None:
    """Raises UsageError where tables would not fit: words are counted in 32 bits."""
    if len(region) >= 2**31:
        raise UsageError(f"{region.bytes / 2**30:.1f} GiB are given or written; expected less than 32 GiB.")
