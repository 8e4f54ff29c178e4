"""The nodes of a captured graph: what they are, what a kernel node launches, whose graph edges lead to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from .calls import checked
from .graphs import GraphEdge, edges

_KINDS = {
    "KERNEL": "kernel",
    "MEMCPY": "memcpy",
    "MEMSET": "memset",
    "HOST": "host",
    "GRAPH": "child graph",
    "EMPTY": "empty",
    "WAIT_EVENT": "event wait",
    "EVENT_RECORD": "event record",
    "MEM_ALLOC": "allocation",
    "MEM_FREE": "free",
    "CONDITIONAL": "conditional",
}


@dataclass(frozen=True)
class Kernel:
    """What a kernel node launches. ``params``: the driver's ``CUDA_KERNEL_NODE_PARAMS``."""

    node: Any
    symbol: str
    params: Any

    @property
    def grid(self) -> list[int]:
        return [int(getattr(self.params, f"gridDim{axis}")) for axis in "XYZ"]

    @property
    def block(self) -> list[int]:
        return [int(getattr(self.params, f"blockDim{axis}")) for axis in "XYZ"]

    @property
    def shared_bytes(self) -> int:
        return int(self.params.sharedMemBytes)


def nodes(graph: Any) -> list[Any]:
    """All nodes of a graph (``cudaGraph_t`` or ``CUgraph``), without those of its child graphs."""
    from cuda.bindings import driver

    handle = driver.CUgraph(int(graph))
    *_, count = checked(driver.cuGraphGetNodes(handle), "cuGraphGetNodes")
    if not count:
        return []
    found, count = checked(driver.cuGraphGetNodes(handle, count), "cuGraphGetNodes")
    return list(found)[: int(count)]


def kind(node: Any) -> str:
    """``kernel``, ``memset``, ``child graph``, ...: what the driver calls it for anything rare."""
    from cuda.bindings import driver

    found = checked(driver.cuGraphNodeGetType(driver.CUgraphNode(int(node))), "cuGraphNodeGetType")
    word = str(driver.CUgraphNodeType(int(found)).name).removeprefix("CU_GRAPH_NODE_TYPE_")
    return _KINDS.get(word, word.lower().replace("_", " "))


def child(node: Any) -> Any:
    """The graph inside a child graph node."""
    from cuda.bindings import driver

    return checked(driver.cuGraphChildGraphNodeGetGraph(driver.CUgraphNode(int(node))), "cuGraphChildGraphNodeGetGraph")


def kernel_of(node: Any) -> Kernel | None:
    """What a kernel node launches; ``None`` for another kind of node."""
    from cuda.bindings import driver

    if kind(node) != "kernel":
        return None
    handle = driver.CUgraphNode(int(node))
    params = checked(driver.cuGraphKernelNodeGetParams(handle), "cuGraphKernelNodeGetParams")
    if int(params.func):
        name = checked(driver.cuFuncGetName(params.func), "cuFuncGetName")
    else:
        name = checked(driver.cuKernelGetName(params.kern), "cuKernelGetName")
    return Kernel(handle, name.decode(), params)


def attributes(node: Any) -> list[str]:
    """Properties of a kernel node's launch beyond its grid: ``cluster 2x1x1``, ``cooperative``."""
    from cuda.bindings import driver

    names = driver.CUlaunchAttributeID
    handle, found = driver.CUgraphNode(int(node)), []
    code, value = driver.cuGraphKernelNodeGetAttribute(handle, names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    cluster = [int(getattr(value.clusterDim, axis)) for axis in "xyz"] if int(code) == 0 else []
    if any(size > 1 for size in cluster):
        found.append(f"cluster {'x'.join(map(str, cluster))}")
    code, value = driver.cuGraphKernelNodeGetAttribute(handle, names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
    if int(code) == 0 and int(value.cooperative):
        found.append("cooperative")
    return found


def incoming(graph: Any) -> dict[int, list[GraphEdge]]:
    """Edges by the node that they lead to."""
    found: dict[int, list[GraphEdge]] = {}
    for edge in edges(graph):
        found.setdefault(int(edge.target), []).append(edge)
    return found


def walk(graph: Any, inside: str = "") -> Iterator[tuple[str, Any, list[str]]]:
    """``(path, node, kinds of incoming edges)`` of every node, those of child graphs behind the node that holds them.

    ``path`` is empty on top, else the numbers of the nodes that lead there, such as ``3/0``.
    """
    into = incoming(graph)
    for number, node in enumerate(nodes(graph)):
        yield inside, node, [edge.kind for edge in into.get(int(node), [])]
        if kind(node) == "child graph":
            yield from walk(child(node), f"{inside}/{number}".lstrip("/"))


@cache
def demangled(symbol: str) -> str:
    """A kernel's name as in its source, without its parameter list."""
    import torch

    demangle = getattr(torch._C, "_demangle", None)  # not public: where it is gone, the mangled name must do
    name = str(demangle(symbol)) if demangle else symbol
    return _without_parameters(name.removeprefix("void "))


def _without_parameters(name: str) -> str:
    """Cuts ``f<g(int)>(int, ...)`` behind the bracket of the template: the parameters are the last group of depth 0."""
    depth = 0
    for place in range(len(name) - 1, -1, -1):
        depth += (name[place] in ")>") - (name[place] in "(<")
        if depth == 0 and name[place] == "(" and name.endswith(")"):
            return name[:place]
    return name
