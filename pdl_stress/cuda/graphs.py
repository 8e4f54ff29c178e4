"""Captured graphs: their nodes and edges, serialized twins, instantiation.

Edge data is read through ``cuda.bindings``: ``{from_port: programmatic (1), type: programmatic (1)}`` is a programmatic
edge, zeros are a full one (R9).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import DeviceError
from .calls import checked

PROGRAMMATIC, FULL = "programmatic", "full"


@dataclass(frozen=True)
class GraphEdge:
    """One dependency of a graph. ``kind``: programmatic, full, or the raw numbers of anything else."""

    source: Any
    target: Any
    data: Any

    @property
    def kind(self) -> str:
        numbers = (int(self.data.from_port), int(self.data.to_port), int(self.data.type))
        return {(1, 0, 1): PROGRAMMATIC, (0, 0, 0): FULL}.get(
            numbers, f"port {numbers[0]}->{numbers[1]} type {numbers[2]}"
        )


def edges(graph: Any) -> list[GraphEdge]:
    """All edges of a ``cudaGraph_t``."""
    from cuda.bindings import runtime

    *_, count = checked(runtime.cudaGraphGetEdges(graph), "cudaGraphGetEdges")
    if not count:
        return []
    sources, targets, data, count = checked(runtime.cudaGraphGetEdges(graph, count), "cudaGraphGetEdges")
    return [GraphEdge(*edge) for edge in list(zip(sources, targets, data, strict=False))[: int(count)]]


def current_node(stream_handle: int) -> Any:
    """The node that the next captured launch on this stream will depend on.

    Raises:
        DeviceError: the stream is not capturing, or has forked (a chain is one stream).
    """
    from cuda.bindings import runtime

    status, _, _, nodes, _, count = checked(runtime.cudaStreamGetCaptureInfo(stream_handle), "cudaStreamGetCaptureInfo")
    if int(status) != int(runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive) or int(count) != 1:
        raise DeviceError(
            f"the stream is not capturing one chain of launches (status {status!r}, {count} dependencies)."
        )
    return nodes[0]


def make_full(graph: Any, chosen: Iterable[GraphEdge]) -> int:
    """Replaces programmatic edges by full ones; returns how many."""
    from cuda.bindings import runtime

    changed = 0
    for edge in chosen:
        if edge.kind != PROGRAMMATIC:
            continue
        checked(
            runtime.cudaGraphRemoveDependencies(graph, [edge.source], [edge.target], [edge.data], 1),
            "cudaGraphRemoveDependencies",
        )
        add_full(graph, edge.source, edge.target)
        changed += 1
    return changed


def add_full(graph: Any, source: Any, target: Any) -> None:
    """Adds a full edge."""
    from cuda.bindings import runtime

    checked(
        runtime.cudaGraphAddDependencies(graph, [source], [target], [runtime.cudaGraphEdgeData()], 1),
        "cudaGraphAddDependencies",
    )


class Executable:
    """An instantiated graph. Use as a context manager: executables hold device memory."""

    def __init__(self, graph: Any) -> None:
        from cuda.bindings import runtime

        self._handle = checked(runtime.cudaGraphInstantiate(graph, 0), "cudaGraphInstantiate")

    def launch(self, stream_handle: int) -> None:
        from cuda.bindings import runtime

        (code,) = runtime.cudaGraphLaunch(self._handle, stream_handle)
        if int(code) != 0:
            raise DeviceError(f"cudaGraphLaunch failed: {code.name} ({int(code)}).")

    def __enter__(self) -> Executable:
        return self

    def __exit__(self, *_: object) -> None:
        from cuda.bindings import runtime

        runtime.cudaGraphExecDestroy(self._handle)
