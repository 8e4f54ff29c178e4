"""Exposure and overlap from in-kernel time stamps. Stamped kernels are other binaries: never part of a verdict run.

*Overlap* of a graph edge: the secondary's first CTA started before the primary's last CTA ended. *Exposure* of a data
edge: the reader's first CTA started before the writer's last store; only then did the replay test that edge. Times are
``%globaltimer`` nanoseconds, compared strictly, so a coarse timer can only hide exposure, not invent it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..chain import Chain
from ..op import STAMP_FIELDS
from . import graphs
from .bench import Bench

SAMPLES = 128
"""Stamped replays per arm."""

START, _, STORE, END = range(len(STAMP_FIELDS))


@dataclass(frozen=True)
class Exposure:
    """Shares of the sampled replays.

    Args:
        overlap: per graph edge (source, target).
        exposed: per data edge (writer, reader, buffer).
        samples: replays sampled.
    """

    overlap: dict[tuple[str, str], float]
    exposed: dict[tuple[str, str, str], float]
    samples: int


def measure(bench: Bench, chain: Chain, samples: int = SAMPLES) -> Exposure | None:
    """Stamps ``samples`` replays of ``chain``; ``None`` if an op of it has no stamps."""
    import torch

    steps = chain.steps
    if not all(step.op.rebuildable for step in steps):
        return None
    fresh = torch.tensor([2**63 - 1, 2**63 - 1, 0, 0], device=bench.stream.device).repeat(bench.unroll, len(steps), 1)
    stamps = fresh.clone()
    captured = bench.capture(chain, stamps=stamps)
    rows: list[torch.Tensor] = []
    with graphs.Executable(captured.raw) as executable, torch.cuda.stream(bench.stream):
        bench.prime(captured)
        for _ in range(-(-samples // bench.unroll)):
            stamps.copy_(fresh)
            torch.cuda.synchronize()
            executable.launch(bench.handle)
            bench.finish()
            rows.append(stamps.cpu())
    times = torch.cat(rows)
    place = {step.name: index for index, step in enumerate(steps)}

    def share(later: str, field: int, earlier: str) -> float:
        return float((times[:, place[later], START] < times[:, place[earlier], field]).double().mean())

    return Exposure(
        {(a, b): share(b, END, a) for a, b in chain.edges},
        {(e.writer, e.reader, e.buffer): share(e.reader, STORE, e.writer) for e in chain.data_edges},
        len(times),
    )
