"""Twins of a captured graph: nodes left out, replaced or patched, edges made full. The original stays as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import graphs, nodes
from ..calls import checked
from .kernels import Launch


class Variant:
    """A clone of a captured graph under change.

    Args:
        raw: the ``cudaGraph_t``.
        order: its nodes in stream order.
    """

    def __init__(self, raw: Any, order: list[Any]) -> None:
        from cuda.bindings import driver, runtime

        self.graph = checked(driver.cuGraphClone(driver.CUgraph(int(raw))), "cuGraphClone")
        self.raw = runtime.cudaGraph_t(int(self.graph))
        self._held: list[Launch] = []  # a graph holds addresses, not tensors
        self.nodes = [
            checked(driver.cuGraphNodeFindInClone(driver.CUgraphNode(int(node)), self.graph), "cuGraphNodeFindInClone")
            for node in order
        ]

    def only(self, kept: Iterable[int]) -> None:
        """Takes all nodes out but these, and their edges with them."""
        from cuda.bindings import driver

        keep = set(kept)
        for index, node in enumerate(self.nodes):
            if index not in keep:
                checked(driver.cuGraphDestroyNode(node), "cuGraphDestroyNode")

    def add(self, launch: Launch) -> Any:
        """A node of the harness, without edges."""
        from cuda.bindings import driver

        self._held.append(launch)
        return checked(driver.cuGraphAddKernelNode(self.graph, [], 0, launch.node_params()), "cuGraphAddKernelNode")

    def edge(self, source: Any, target: Any, *, programmatic: bool = False) -> None:
        from cuda.bindings import runtime

        data = runtime.cudaGraphEdgeData()
        if programmatic:
            data.from_port = 1
            data.type = runtime.cudaGraphDependencyType.cudaGraphDependencyTypeProgrammatic
        ends = ([runtime.cudaGraphNode_t(int(source))], [runtime.cudaGraphNode_t(int(target))])
        checked(runtime.cudaGraphAddDependencies(self.raw, *ends, [data], 1), "cudaGraphAddDependencies")

    def replace(self, index: int, launch: Launch) -> None:
        """Puts a kernel of the harness in the place of a node; it has the same edges."""
        from cuda.bindings import driver

        old, new = self.nodes[index], self.add(launch)
        for edge in graphs.edges(self.raw):
            programmatic = edge.kind == graphs.PROGRAMMATIC
            if int(edge.source) == int(old):
                self.edge(new, edge.target, programmatic=programmatic)
            elif int(edge.target) == int(old):
                self.edge(edge.source, new, programmatic=programmatic)
        checked(driver.cuGraphDestroyNode(old), "cuGraphDestroyNode")
        self.nodes[index] = new

    def serialize(self, source: int | None = None) -> int:
        """Makes the edges behind one node, or all, full; returns how many changed."""
        chosen = graphs.edges(self.raw)
        if source is not None:
            chosen = [edge for edge in chosen if int(edge.source) == int(self.nodes[source])]
        return graphs.make_full(self.raw, chosen)

    def kernel(self, index: int) -> nodes.Kernel | None:
        return nodes.kernel_of(self.nodes[index])

    def executable(self) -> graphs.Executable:
        """Instantiates it. Use as a context manager."""
        return graphs.Executable(self.raw)

    def destroy(self) -> None:
        from cuda.bindings import driver

        checked(driver.cuGraphDestroy(self.graph), "cuGraphDestroy")
