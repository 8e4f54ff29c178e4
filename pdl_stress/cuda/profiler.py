"""Kernel records of graph launches, from the activity profiler (CUPTI, through torch).

A process that has profiled is no place to grade anything: see :class:`pdl_stress.jobs.ExposureJob`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import graphs
from .bench import Bench
from .captured import Captured

used = False
"""Whether this process has profiled: see :func:`pdl_stress.cuda.device.verdict_blockers`."""


class NoProfile(RuntimeError):
    """The profiler is not there, or its records cannot be what ran."""


@dataclass(frozen=True)
class Record:
    """One kernel: start and end in nanoseconds of the profiler's clock."""

    name: str
    start: int
    end: int


def records(bench: Bench, captured: Captured, launches: int) -> list[Record]:
    """The kernels of ``launches`` launches of a captured chain, by start.

    Raises:
        NoProfile: no profiler, or it recorded nothing.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    global used
    if ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        raise NoProfile("this torch was built without a CUDA profiler")
    used = True
    with graphs.Executable(captured.raw) as executable, torch.cuda.stream(bench.stream):
        bench.prime(captured)
        executable.launch(bench.handle)  # the first launch uploads the graph
        bench.finish()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a session forgets the one before it, as it should
            with profile(activities=[ProfilerActivity.CUDA]) as session:
                for _ in range(launches):
                    executable.launch(bench.handle)
                bench.finish()
                torch.cuda.synchronize()
    events = session.profiler.kineto_results.events()
    found = [
        Record(event.name(), int(event.start_ns()), int(event.end_ns()))
        for event in events
        if event.device_type().name == "CUDA" and not event.name().startswith(("Memset (", "Memcpy "))
    ]
    if not found:
        raise NoProfile("it recorded no kernel")
    return sorted(found, key=lambda record: record.start)


def by_step(found: list[Record], captured: Captured, kernels: dict[str, int], launches: int) -> tuple[Any, Any, int]:
    """Start of the first and end of the last kernel of each step: int64 ``[launch, replay, step]``, and the timer's
    resolution in nanoseconds.

    Args:
        found: all kernels of the launches, by start. A chain is one stream, so they start in stream order.
        kernels: how many each step launches.

    Raises:
        NoProfile: records are missing, are out of order, or have impossible times.
    """
    steps, unroll = captured.chain.steps, captured.unroll
    per_replay = sum(kernels.values()) + (0 if captured.back_to_back else 1)
    boundaries = len(captured.boundaries) if captured.back_to_back else 0
    per_launch = per_replay * unroll + boundaries
    if len(found) != per_launch * launches:
        raise NoProfile(f"{len(found)} kernel records, expected {per_launch * launches}")
    if any(record.start <= 0 or record.end < record.start for record in found):
        raise NoProfile("a record ends before it starts, or has no time")
    starts = np.zeros((launches, unroll, len(steps)), dtype=np.int64)
    ends = np.zeros_like(starts)
    names: dict[tuple[str, int], set[str]] = {}
    rest = iter(found)
    for launch in range(launches):
        for replay in range(unroll):
            for index, step in enumerate(steps):
                mine = [next(rest) for _ in range(kernels[step.name])]
                if not mine:
                    raise NoProfile(f"step {step.name} launches no kernel")
                starts[launch, replay, index] = mine[0].start
                ends[launch, replay, index] = max(record.end for record in mine)
                for number, record in enumerate(mine):
                    names.setdefault((step.name, number), set()).add(record.name)
            if not captured.back_to_back:
                names.setdefault(("boundary", 0), set()).add(next(rest).name)
        for _ in range(boundaries):
            names.setdefault(("boundary", 0), set()).add(next(rest).name)
    if mixed := [what for what, several in names.items() if len(several) != 1]:
        raise NoProfile(f"kernels of {mixed[0][0]} do not start in stream order")
    ticks = np.unique(np.array([time for record in found for time in (record.start, record.end)]))
    return starts, ends, int(np.diff(ticks).min()) if len(ticks) > 1 else 1
