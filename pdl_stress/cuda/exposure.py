"""Exposure and overlap: did kernels really run side by side, and did a reader run before its data was there?

*Overlap* of a graph edge: the secondary's first CTA started before the primary's last CTA ended. *Exposure* of a data
edge: the reader's first CTA started before the writer's last store; only then did the replay test that edge.

Two clocks: in-kernel time stamps, where every kernel of the chain is our own, and the kernel activity profiler for
kernels that we cannot change. Neither is ever part of a verdict run: stamped kernels are other binaries, and a profiler
changes the timing of everything after it. Times are nanoseconds, compared strictly, so a coarse timer can only hide an
overlap, not invent one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..chain import Chain
from ..op import STAMP_FIELDS
from . import graphs, nodes, profiler
from .bench import Bench
from .captured import Captured

SAMPLES = 128
"""Watched replays per arm."""

START, _, STORE, END = range(len(STAMP_FIELDS))


@dataclass(frozen=True)
class Exposure:
    """Shares of the sampled replays.

    Args:
        overlap: per graph edge (source, target).
        exposed: per data edge (writer, reader, buffer).
        method: how it was measured, or why it could not be.
    """

    overlap: dict[tuple[str, str], float]
    exposed: dict[tuple[str, str, str], float]
    method: str


def stamped(bench: Bench, chain: Chain, *, back_to_back: bool = False, samples: int = SAMPLES) -> Exposure:
    """From in-kernel stamps; every op of the chain must be rebuildable.

    Back to back the edge from the last step to the first one of the next replay has an overlap too.
    """
    import torch

    steps = chain.steps
    fresh = torch.tensor([2**63 - 1, 2**63 - 1, 0, 0], device=bench.stream.device).repeat(bench.unroll, len(steps), 1)
    stamps = fresh.clone()
    captured = bench.capture(chain, back_to_back=back_to_back, stamps=stamps)
    rows = []
    with graphs.Executable(captured.raw) as executable, torch.cuda.stream(bench.stream):
        bench.prime(captured)
        for _ in range(-(-samples // bench.unroll)):
            stamps.copy_(fresh)
            torch.cuda.synchronize()
            executable.launch(bench.handle)
            bench.finish()
            rows.append(stamps.cpu().numpy())
    times = np.stack(rows)  # launch, replay, step, stamp
    return _judge(captured, times[..., START], times[..., END], times[..., STORE], f"time stamps, {samples} replays")


def profiled(bench: Bench, chain: Chain, *, back_to_back: bool = False, samples: int = SAMPLES) -> Exposure:
    """From the profiler's start and end of each kernel.

    The last store of a kernel cannot be seen from outside, but one that delays stores no earlier than its start plus
    its delay. So only data edges of delayed writers count as exposed.
    """
    captured = bench.capture(chain, back_to_back=back_to_back)
    here = captured.nodes_of(min(1, captured.unroll - 1))
    counts = {step: sum(nodes.kind(node) == "kernel" for node in found) for step, found in here.items()}
    launches = -(-samples // captured.unroll)
    try:
        records = profiler.records(bench, captured, launches)
        starts, ends, resolution = profiler.by_step(records, captured, counts, launches)
    except profiler.NoProfile as error:
        return Exposure({}, {}, f"the profiler gave no valid records: {error}")
    delays = np.array([round((step.delay_us or 0.0) * 1000) for step in chain.steps])
    stores = np.where(delays > 0, starts + delays, starts)
    method = f"profiler, {launches * captured.unroll} replays, resolution {resolution} ns"
    return _judge(captured, starts + resolution, ends, stores, method)


def _judge(captured: Captured, starts: Any, ends: Any, stores: Any, method: str) -> Exposure:
    """Shares from times ``[launch, replay, step]``."""
    chain = captured.chain
    place = {step.name: index for index, step in enumerate(chain.steps)}

    def share(later: str, earlier: str, times: Any) -> float:
        return float((starts[..., place[later]] < times[..., place[earlier]]).mean())

    # A stand-in that starts early says nothing of the kernel whose place it takes.
    own = {step.name for step in chain.steps if not step.source}
    overlap = {(a, b): share(b, a, ends) for a, b in pairwise(step.name for step in chain.steps) if b in own}
    if captured.back_to_back:
        around = starts[:, 1:, 0] < ends[:, :-1, -1]
        overlap[chain.steps[-1].name, chain.steps[0].name] = float(around.mean())
    exposed = {(e.writer, e.reader, e.buffer): share(e.reader, e.writer, stores) for e in chain.data_edges}
    return Exposure(overlap, exposed, method)
