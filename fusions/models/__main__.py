"""Runs both fronts with random weights, fusion on and off, and compares them.

    python -m fusions.models [--device cpu|cuda] [--size small|full] [--tokens N] [--context N]

A decode step of a few tokens: the path that the fused projections take and why, the largest difference from plain
Linears as a share of what the contract allows (at most 1), the selections' overlap; and on a GPU the time of a step in
a CUDA graph. Exit code 1 if a difference is larger than allowed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from fusions.models import check
from fusions.models.csa2_front import Csa2Config, Csa2Front, decode_step_csa2
from fusions.models.layers import randomize
from fusions.models.mla_front import IndexerUse, MlaConfig, MlaFront, decode_step_mla

MLA_PRESETS = ("nvfp4_all", "wk_only", "unfused", "indexer_pair")


@dataclass(frozen=True)
class Row:
    """One front with fusion on, next to the same with fusion off. ``times``: microseconds, on and off."""

    front: str
    path: str
    share: float
    overlap: float | None
    times: tuple[float, float] | None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fusions.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    there = torch.cuda.is_available()
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if there else "cpu", help="default: %(default)s"
    )
    parser.add_argument("--size", choices=("small", "full"), help="default: full on a GPU, small on a CPU")
    parser.add_argument("--tokens", type=_positive, default=1, help="sequences of one token each; default: %(default)s")
    parser.add_argument("--context", type=_positive, help="tokens of each sequence; default: twice those selected")
    given = parser.parse_args(argv)
    if given.device == "cuda" and not there:
        parser.error("--device cuda: torch sees no GPU")
    full = (given.size or ("full" if given.device == "cuda" else "small")) == "full"
    mla, csa2 = (MlaConfig(), Csa2Config()) if full else (MlaConfig.small(), Csa2Config.small())
    context = given.context or 2 * mla.index_topk
    device = torch.device(given.device)
    with torch.no_grad(), _sums_in_fp32():
        rows = [csa2_row(csa2, given.tokens, device)]
        rows += [mla_row(mla, preset, given.tokens, context, device) for preset in MLA_PRESETS]
    size = "full" if full else "small"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 118)
    console.print(_table(rows, f"{size} fronts, {given.tokens} x 1 token, context {context}, {where}"))
    if any(row.times for row in rows):
        console.print("Times: one set of weights, replayed; small ones stay in the L2. On the CPU there are none.")
    return 0 if all(row.share <= 1 for row in rows) else 1


def csa2_row(config: Csa2Config, tokens: int, device: torch.device) -> Row:
    """CSA2's front; the policy is that of the environment."""
    on, off = Csa2Front(config, device=device), Csa2Front(config, fusion=False, device=device)
    for front in (on, off):
        randomize(front)
        front.post_load_weights()
    steps = [decode_step_csa2(front, tokens) for front in (on, off)]
    hidden = steps[0].hidden
    return Row("CSA2", on.explain(hidden), check.csa2_share(on, off, hidden), None, _times(*steps))


def mla_row(config: MlaConfig, preset: str, tokens: int, context: int, device: torch.device) -> Row:
    """MLA's front with a preset, and without in the same types."""
    config = config.suiting(preset)
    on, off = MlaFront(config, preset, device=device), MlaFront(config, device=device)
    for front in (on, off):
        randomize(front)
        front.post_load_weights()
    steps = [decode_step_mla(front, tokens, context) for front in (on, off)]
    hidden, use = steps[0].hidden, on.indexer_use(context, context)
    overlap = check.topk_overlap(*(step().topk for step in steps)) if use is IndexerUse.SELECT else None
    path = f"{on.explain(hidden)}; indexer: {use}"
    return Row(f"MLA, {preset}", path, check.mla_share(on, off, hidden), overlap, _times(*steps))


def _times(on: Callable[[], object], off: Callable[[], object]) -> tuple[float, float] | None:
    return (_microseconds(on), _microseconds(off)) if torch.cuda.is_available() and _on_gpu(on()) else None


def _on_gpu(found: object) -> bool:
    return isinstance(found, tuple) and any(isinstance(part, torch.Tensor) and part.is_cuda for part in found)


def _microseconds(step: Callable[[], object], replays: int = 50, rounds: int = 9) -> float:
    """Median time of one replay of a step's graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    times = []
    with torch.cuda.stream(stream):
        step()  # kernels are compiled and libraries set up before the capture
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step()
        for _ in range(rounds):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / replays)
    return float(median(times))


def _table(rows: list[Row], title: str) -> Table:
    table = Table(title=title)
    columns = ["front", "path with fusion on, and why", "difference / allowed", "top-k overlap"]
    timed = any(row.times for row in rows)
    for column in columns + (["us on", "us off"] if timed else []):
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for row in rows:
        overlap = "" if row.overlap is None else f"{row.overlap:.4f}"
        times = [f"{time:.1f}" for time in row.times] if row.times else []
        table.add_row(row.front, row.path, f"{row.share:.3f}", overlap, *times)
    return table


@contextmanager
def _sums_in_fp32() -> Iterator[None]:
    """By default torch lets cuBLAS round partial sums to BF16, which the contract does not allow for."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
