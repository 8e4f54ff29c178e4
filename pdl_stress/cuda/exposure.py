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


def measure(bench: Bench, chain: Chain, *, back_to_back: bool = False, samples: int = SAMPLES) -> Exposure | None:
    """Stamps ``samples`` replays of ``chain``; ``None`` if an op of it has no stamps.

    Back to back the edge from the last step to the first one of the next replay has an overlap too.
    """
    import torch

    steps = chain.steps
    if not all(step.op.rebuildable for step in steps):
        return None
    fresh = torch.tensor([2**63 - 1, 2**63 - 1, 0, 0], device=bench.stream.device).repeat(bench.unroll, len(steps), 1)
    stamps = fresh.clone()
    captured = bench.capture(chain, back_to_back=back_to_back, stamps=stamps)
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

    overlap = {(a, b): share(b, END, a) for a, b in chain.edges}
    if back_to_back:
        graphs_of = torch.stack(rows)  # launch, replay, step, stamp
        starts, ends = graphs_of[:, 1:, 0, START], graphs_of[:, :-1, -1, END]
        overlap[steps[-1].name, steps[0].name] = float((starts < ends).double().mean())
    return Exposure(
        overlap,
        {(e.writer, e.reader, e.buffer): share(e.reader, STORE, e.writer) for e in chain.data_edges},
        len(times),
    )
