"""Timing on a GPU: graph replay over rotated weight sets, and the memory floor that times are compared with."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

REPEATS, ROUNDS = 20, 15
Call = Callable[[int], object]
"""Runs the candidate once on a weight set, by its number."""


def microseconds(call: Call, sets: int, *, repeats: int = REPEATS, rounds: int = ROUNDS) -> float:
    """Median time of one call, in microseconds, over replays of a graph that calls each weight set once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(sets):
            call(index)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(sets):
                call(index)
        times = []
        for _ in range(rounds):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / (sets * repeats))
    return median(times)


def read_bandwidth() -> float:
    """Bytes a second that a reduction over 4 GiB reads."""
    data = torch.ones(2**30, device="cuda", dtype=torch.float32)
    torch.sum(data)
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.sum(data)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return data.numel() * 4 / median(times)
