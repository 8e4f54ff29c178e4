"""Which nodes of a captured graph belong to which step, and which edge lies behind one. Graphs are made up."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdl_stress.cuda import captured as module
from pdl_stress.cuda.captured import Captured

STEPS = ("producer", "norm", "gemm")


@dataclass(frozen=True)
class Edge:
    source: int
    target: int
    kind: str


class Made:
    """A graph as a capture leaves it: per replay each step's nodes one after the other, then a boundary.

    Args:
        counts: nodes of each step.
        beside: each replay has a neighbour on a branch of its own, from the last boundary to the next.
    """

    def __init__(
        self, counts: tuple[int, ...] = (1, 1, 1), unroll: int = 2, *, back_to_back: bool = False, beside: bool = False
    ) -> None:
        self.edges: list[Edge] = []
        self.nodes: dict[tuple[int, str], list[int]] = {}
        last: dict[tuple[int, str], int] = {}
        boundaries: set[int] = set()
        number, before = 0, None

        def node(after: int | None, kind: str) -> int:
            nonlocal number
            number += 1
            if after is not None:
                self.edges.append(Edge(after, number, kind))
            return number

        for replay in range(unroll):
            neighbour = node(before, "full") if beside else None
            for index, (step, count) in enumerate(zip(STEPS, counts, strict=True)):
                mine = []
                for place in range(count):
                    first = index == 0 and place == 0 and not (back_to_back and replay)
                    before = node(before, "full" if first else "programmatic")
                    mine.append(before)
                self.nodes[replay, step] = mine
                if before is not None:
                    last[replay, step] = before
            if not back_to_back or replay == unroll - 1:
                for _ in range(2 if back_to_back else 1):
                    before = node(before, "full")
                    boundaries.add(before)
                if neighbour is not None:
                    self.edges.append(Edge(neighbour, before, "full"))
        chain = SimpleNamespace(steps=[SimpleNamespace(name=name) for name in STEPS])
        self.captured = Captured(None, self, chain, unroll, False, back_to_back, {}, last, boundaries)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def made_up_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.graphs, "edges", lambda graph: graph.edges)
    monkeypatch.setattr(module.nodes, "edges", lambda graph: graph.edges)

    def make_full(graph: Made, chosen: list[Edge]) -> int:
        changed = [edge for edge in chosen if edge.kind == "programmatic"]
        graph.edges = [Edge(e.source, e.target, "full") if e in changed else e for e in graph.edges]
        return len(changed)

    monkeypatch.setattr(module.graphs, "make_full", make_full)


@pytest.mark.parametrize(("back_to_back", "beside"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 3), (1, 3, 1)])
def test_the_nodes_of_a_step_are_those_it_launched_in_stream_order(
    counts: tuple[int, ...], back_to_back: bool, beside: bool
) -> None:
    made = Made(counts, 3, back_to_back=back_to_back, beside=beside)
    for replay in range(3):
        assert made.captured.nodes_of(replay) == {step: made.nodes[replay, step] for step in STEPS}


@given(counts=st.tuples(*[st.integers(0, 3)] * 3), unroll=st.integers(1, 3), back_to_back=st.booleans())
def test_every_node_but_a_boundary_belongs_to_one_step(
    counts: tuple[int, int, int], unroll: int, back_to_back: bool
) -> None:
    if not counts[0]:
        return  # a chain has a producer
    made = Made(counts, unroll, back_to_back=back_to_back)
    found = [made.captured.nodes_of(replay) for replay in range(unroll)]
    assert found == [{step: made.nodes[replay, step] for step in STEPS} for replay in range(unroll)]


def test_a_step_that_launched_nothing_has_no_node() -> None:
    """Its last node is its predecessor's: that must not be counted twice."""
    made = Made((1, 0, 2), 2, back_to_back=True)
    assert made.captured.nodes_of(1)["norm"] == []
    assert made.captured.nodes_of(1)["gemm"] == made.nodes[1, "gemm"]


@pytest.mark.parametrize("back_to_back", [False, True])
def test_behind_a_step_lies_one_edge_a_replay_and_none_to_a_boundary(back_to_back: bool) -> None:
    made = Made((1, 2, 1), 3, back_to_back=back_to_back)
    nodes = made.nodes
    pairs = [(e.source, e.target) for e in made.captured.after("producer")]
    assert pairs == [(nodes[replay, "producer"][0], nodes[replay, "norm"][0]) for replay in range(3)]
    pairs = [(e.source, e.target) for e in made.captured.after("norm")]
    assert pairs == [(nodes[replay, "norm"][1], nodes[replay, "gemm"][0]) for replay in range(3)], "of the last node"
    around = [(nodes[n, "gemm"][0], nodes[n + 1, "producer"][0]) for n in range(2)] if back_to_back else []
    assert [(e.source, e.target) for e in made.captured.after("gemm")] == around
    assert made.captured.after("nowhere") == []


def test_one_edge_can_be_serialized_in_every_replay() -> None:
    made = Made((1, 2, 1), 3)
    assert made.captured.serialize("norm") == 3
    kinds = {step: {edge.kind for edge in made.captured.after(step)} for step in STEPS[:2]}
    assert kinds == {"producer": {"programmatic"}, "norm": {"full"}}
    assert made.captured.serialize("norm") == 0, "nothing is left to change"
    inside = [e for e in made.edges if (e.source, e.target) == tuple(made.nodes[0, "norm"])]
    assert [edge.kind for edge in inside] == ["programmatic"], "a step's own edges are not between steps"


def test_a_serialized_graph_has_no_programmatic_edge_left() -> None:
    made = Made((1, 2, 1), 2, back_to_back=True)
    expected = sum(edge.kind == "programmatic" for edge in made.edges)
    assert made.captured.serialize() == expected > 0
    assert {edge.kind for edge in made.edges} == {"full"}


def test_nodes_are_found_after_an_edge_was_replaced_too() -> None:
    made = Made((1, 2, 1), 2)
    before: Any = made.captured.nodes_of(1)
    made.captured.serialize()
    assert made.captured.nodes_of(1) == before
