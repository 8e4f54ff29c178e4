"""A captured chain: its graph, and which nodes belong to which step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..chain import Chain
from . import graphs, nodes


@dataclass
class Captured:
    """A captured chain.

    Args:
        owner, raw: torch's graph object, kept alive for its memory, and its ``cudaGraph_t``.
        late: a control's late rows and a copy of their truth; empty without one.
        last: the last node of each (replay, step).
        boundaries: handles of the nodes that grade.
        patched: per step whose machine code was changed, how, and how that was checked.
        returned: per (replay, step) the tensors that its op returned, each with the buffer that it is led to.
    """

    owner: Any
    raw: Any
    chain: Chain
    unroll: int
    rotated: bool
    back_to_back: bool
    late: dict[str, Any] = field(default_factory=dict)
    last: dict[tuple[int, str], Any] = field(default_factory=dict)
    boundaries: set[int] = field(default_factory=set)
    patched: dict[str, str] = field(default_factory=dict)
    returned: dict[tuple[int, str], list[tuple[Any, Any]]] = field(default_factory=dict)

    def after(self, step: str) -> list[graphs.GraphEdge]:
        """The graph edges from ``step`` to its successor in the stream, one per replay that has one."""
        handles = {int(node) for (_, name), node in self.last.items() if name == step}
        return [e for e in graphs.edges(self.raw) if int(e.source) in handles and int(e.target) not in self.boundaries]

    def serialize(self, step: str | None = None) -> int:
        """Makes the graph edges behind one step (in every replay), or all of them, full. Returns how many changed."""
        return graphs.make_full(self.raw, self.after(step) if step else graphs.edges(self.raw))

    @cached_property
    def _before(self) -> dict[int, list[Any]]:
        """Predecessors of each node. Which they are never changes, unlike the kinds of the edges to them."""
        return {node: [edge.source for edge in into] for node, into in nodes.incoming(self.raw).items()}

    def nodes_of(self, replay: int) -> dict[str, list[Any]]:
        """The nodes of each step in one replay, in stream order. Most steps are one kernel."""
        others = {int(node) for node in self.last.values()} | self.boundaries
        found: dict[str, list[Any]] = {}
        before = self.last.get((replay - 1, self.chain.steps[-1].name))
        for step in self.chain.steps:
            last = self.last[replay, step.name]
            mine: list[Any] = []
            node = None if before is not None and int(last) == int(before) else last  # nothing launched
            while node is not None:
                mine.insert(0, node)
                node = next((n for n in self._before.get(int(node), []) if int(n) not in others), None)
            found[step.name], before = mine, last
        return found
