"""Edge census of a captured graph: per node its kind, kernel, launch, incoming edges, and what its machine code holds.

Works on any captured graph::

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    ...                                           # capture
    for node in census(graph.raw_cuda_graph()):
        print(node.kind, node.name, node.incoming, node.waits)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import PdlStressError
from ..results import NodeResult
from ..sass.finder import CodeFinder
from ..sass.mutate import triggers, wait_sites
from . import nodes as graph_nodes


def architecture() -> str:
    """Of the current device, such as ``sm_90``."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def census(graph: Any, finder: CodeFinder | None = None) -> list[NodeResult]:
    """All nodes of a graph, those of child graphs behind their node; a child's nodes have its path in ``step``.

    Args:
        graph: a ``cudaGraph_t``, as ``torch.cuda.CUDAGraph(keep_graph=True).raw_cuda_graph()`` gives it.
        finder: where to look for machine code beside the libraries of this process.
    """
    finder = finder or CodeFinder()
    return [describe(node, kinds, finder, path) for path, node, kinds in graph_nodes.walk(graph)]


def describe(node: Any, incoming: Iterable[str], finder: CodeFinder | None, step: str = "") -> NodeResult:
    """One node. ``incoming``: kinds of its incoming edges; without a ``finder`` its machine code is not looked for."""
    result = NodeResult(graph_nodes.kind(node), step=step, incoming=sorted(incoming))
    kernel = graph_nodes.kernel_of(node)
    if kernel is None:
        return result
    result.symbol, result.name = kernel.symbol, graph_nodes.demangled(kernel.symbol)
    result.grid, result.block, result.shared_bytes = kernel.grid, kernel.block, kernel.shared_bytes
    result.attributes = graph_nodes.attributes(node)
    if finder is None:
        result.code = "not looked for"
        return result
    try:
        found = finder.find(kernel.symbol, architecture())
        result.waits = len(wait_sites(found.code, kernel.symbol))
        result.triggers = len(triggers(found.code, kernel.symbol))
        result.code = found.origin
    except PdlStressError as error:  # not found, or no cubin that can be read
        result.code = str(error)
    return result
