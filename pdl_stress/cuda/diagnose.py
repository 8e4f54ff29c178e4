"""Where it raced: the graph edge, the data edge, the first wrong element, and what the operand held."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ..chain import Chain, DataEdge
from ..results import Mismatch
from .bench import Bench, Counts
from .captured import Captured
from .memory import NAN_PATTERN, torch_dtype

REPLAYS = 256


def diagnose(bench: Bench, capture: Callable[[], Captured], counts: Counts) -> Mismatch:
    """Explains the first bad replay of a run.

    ``capture`` makes a fresh captured graph of the same chain and arm: each graph edge of it is serialized in turn, and
    an edge whose serialization removes every mismatch is on the racing path.
    """
    captured = capture()
    chain = captured.chain
    cured = [edge for edge in chain.edges if _clean_when_serialized(bench, capture, edge)]
    without_pdl = capture()
    without_pdl.serialize()
    also_serialized = bench.run(without_pdl, REPLAYS).mismatches > 0
    buffer, index, got, want, held = _first_wrong(bench, captured, counts)
    reader = _writer_of(chain, buffer, index)
    edge = _data_edge(chain, reader, cured)
    return Mismatch(
        writer=edge.writer if edge else "",
        reader=reader,
        buffer=edge.buffer if edge else "",
        wrong_buffer=buffer,
        element=index,
        got=got,
        expected=want,
        held=held,
        replay=counts.first_bad or 0,
        cured_by=[f"{a}->{b}" for a, b in cured],
        also_serialized=also_serialized,
    )


def _clean_when_serialized(bench: Bench, capture: Callable[[], Captured], edge: tuple[str, str]) -> bool:
    captured = capture()
    if not captured.serialize(edge[0]):
        return False
    return bench.run(captured, REPLAYS).mismatches == 0


def _first_wrong(bench: Bench, captured: Captured, counts: Counts) -> tuple[str, list[int], str, str, str]:
    """First wrong buffer in the order in which the chain fills them, its first wrong element, and what it suggests."""
    import torch

    memory, replay = bench.memory, counts.first_bad or 0
    reference = memory.reference(captured.rotated).cpu()
    right, previous = reference[replay % memory.pool], reference[(replay - 1) % memory.pool]
    for step in captured.chain.steps:
        for _, view in step.writes():
            buffer = view.buffer
            if buffer.name not in memory.layout:
                continue
            got, want, before = (memory.tensor(buffer.name, s)[view.slices] for s in (counts.snapshot, right, previous))
            wrong = (_bits(got) != _bits(want)).nonzero()
            if not len(wrong):
                continue
            local = tuple(int(i) for i in wrong[0])
            index = [i + start for i, (start, _) in zip(local, view.box, strict=True)]
            poison = torch.full((8,), NAN_PATTERN, dtype=torch.int16).view(torch_dtype(buffer))[0]
            if torch.equal(_bits(got[local]), _bits(poison)):
                held = f"{buffer.name} itself is still poison: graded before {step.name} had written it"
            elif bool(got[local].isnan()):
                held = "poison"
            elif torch.equal(_bits(got), _bits(before)):
                held = "the previous generation"
            else:
                held = "neither poison nor the previous generation: a mixture"
            return buffer.name, index, str(got[local].item()), str(want[local].item()), held
    return "", [], "", "", "nothing wrong in any written view: the difference lies in padding between buffers"


def _bits(tensor: Any) -> Any:
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def _writer_of(chain: Chain, buffer: str, index: list[int]) -> str:
    """The step that wrote the first wrong element, and so read something wrong; empty if no view holds it."""
    for step in chain.steps:
        if any(view.buffer.name == buffer and _contains(view.box, index) for _, view in step.writes()):
            return step.name
    return ""


def _contains(box: Any, index: list[int]) -> bool:
    return all(start <= i < stop for i, (start, stop) in zip(index, box, strict=True))


def _data_edge(chain: Chain, reader: str, cured: list[tuple[str, str]]) -> DataEdge | None:
    """The data edge into ``reader`` whose path through the graph matches the edges that cure it best."""
    order = [step.name for step in chain.steps]

    def path(edge: DataEdge) -> set[tuple[str, str]]:
        span = order[order.index(edge.writer) : order.index(edge.reader) + 1]
        return set(pairwise(span))

    def likeness(edge: DataEdge) -> float:
        found = path(edge)
        return len(found & set(cured)) / len(found | set(cured))

    edges = [edge for edge in chain.data_edges if edge.reader == reader]
    return max(edges, key=likeness) if edges else None
