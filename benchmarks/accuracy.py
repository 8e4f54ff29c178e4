"""How far the fused projections are from exact, next to what their contracts allow. Measured on the GPU at hand.

    python -m benchmarks.accuracy [--out FILE.json]

The worst element of every path, for several numbers of tokens, as a share of the bound in docs/fusions.md; whether TF32
ran, from the error it leaves in weights with a full mantissa; and how much of a top-k selection of keys stays the same
as with exact scores. Weights and hidden states are random, the reference is FP64. cuBLAS sums in FP32 throughout, as
the contract asks for.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fusions.csa2 import HiddenStateProjections
from fusions.indexer import IndexerProjection
from fusions.models.check import topk_overlap
from fusions.ops import OPS
from fusions.qkv_a import FusedQkvA
from pdl_stress.cuda.device import environment

BF16, FP32 = torch.bfloat16, torch.float32
CSA2 = (5120, 1280, 512)
V32 = (7168, {"q_a": 1536, "kv_a": 576, "wk": 128, "weights_proj": 64})
TOKENS = (1, 2, 4, 8, 16, 64, 256)
ROUNDING, SMALLEST = 2.0**-8, 2.0**-133
HIDDEN_SEED = 1000  # apart from the weights' seeds: a token that equals a row of weights gives a one-signed sum
TOP_K, KEYS, QUERIES = 2048, 4096, 64


@dataclass(frozen=True)
class Accuracy:
    """One output of one path.

    Attributes:
        worst: largest absolute error of an element.
        share: largest error as a share of its bound; the contract is kept up to 1.
        rms: root mean square of the errors, each in units of ``sqrt(sum of x^2 w^2)``.
    """

    section: str
    path: str
    output: str
    bound: str
    tokens: int
    worst: float
    share: float
    rms: float


Outputs = dict[str, tuple[torch.Tensor, torch.Tensor, float, bool]]
"""By name: result ``[M, N]``, weight ``[N, K]``, slack of its sums, whether it is rounded to BF16."""
Run = tuple[str, str, Callable[[torch.Tensor], Outputs]]
"""(section, path, its outputs for hidden states)."""


def normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator)


def linear(k: int, rows: int, seed: int, dtype: torch.dtype = BF16, exact_in: torch.dtype = FP32) -> torch.nn.Linear:
    made = torch.nn.Linear(k, rows, bias=False, device="cuda", dtype=dtype).requires_grad_(False)
    made.weight.copy_((normal(rows, k, seed=seed) * k**-0.5).to(exact_in))
    return made


def power(slack: float) -> str:
    """``slack`` as text, for the two kinds there are: one power of two, or TF32's beside that of the sums."""
    mantissa, exponent = math.frexp(slack)
    return f"2^{exponent - 1} S" if mantissa == 0.5 else "(2^-10 + 2^-18) S"


def csa2() -> Iterator[Run]:
    k, n_q, n_kv = CSA2
    for name in ("native", "flashinfer", "trtllm"):
        op = OPS[name]
        if why := op.refusal(torch.device("cuda"), k):
            print(f"left out of A: {why}")
            continue
        parts = linear(k, n_q, 1), linear(k, n_kv, 2)
        front = HiddenStateProjections(*parts, policy="*", op=op)
        front.post_load_weights()

        def run(x: torch.Tensor, front: HiddenStateProjections = front, parts: Any = parts) -> Outputs:
            q, kv = front.project(x)
            return {"q": (q, parts[0].weight, 2.0**-18, True), "kv": (kv, parts[1].weight, 2.0**-18, True)}

        yield "A", name, run


def indexer() -> Iterator[Run]:
    k, rows = V32
    for path, compute, weights, slack in (
        ("TF32, full mantissa", "tf32", FP32, 2.0**-10 + 2.0**-18),
        ("TF32, weights of BF16", "tf32", BF16, 2.0**-18),
        ("FP32, full mantissa", "fp32", FP32, 2.0**-18),
        ("BF16 to FP32", "bf16_fp32out", BF16, 2.0**-18),
        ("BF16", "bf16", BF16, 2.0**-17),
    ):
        held = BF16 if compute.startswith("bf16") else FP32
        for fused in (True, False):
            wk, heads = (linear(k, rows[name], at, held, weights) for at, name in enumerate(("wk", "weights_proj")))
            front = IndexerProjection(wk, heads, compute=compute)
            front.post_load_weights()
            if not fused:
                front.release()

            def run(
                x: torch.Tensor,
                front: IndexerProjection = front,
                pair: tuple[Any, Any] = (wk, heads),
                slack: float = slack,
                rounded: bool = compute == "bf16",
            ) -> Outputs:
                keys, head_weights = front.project(x)
                return {
                    "key": (keys, pair[0].weight, slack, True),
                    "weights": (head_weights, pair[1].weight, slack, rounded),
                }

            yield "B", f"{path}, {'one GEMM' if fused else 'two GEMMs'}", run


def qkv_a() -> Iterator[Run]:
    k, rows = V32
    for preset in ("nvfp4_all", "wk_only", "unfused"):
        parts = [(name, linear(k, count, 10 + at), count) for at, (name, count) in enumerate(rows.items())]
        front = FusedQkvA(parts, preset=preset)
        front.post_load_weights()

        def run(x: torch.Tensor, front: FusedQkvA = front, parts: list[Any] = parts) -> Outputs:
            found = front.project(x)
            return {name: (found[name], module.weight, 2.0**-17, True) for name, module, _ in parts}

        yield "C", preset, run


def accuracy(paths: Iterator[Run]) -> Iterator[Accuracy]:
    for section, path, run in paths:
        for tokens in TOKENS:
            hidden = normal(tokens, CSA2[0] if section == "A" else V32[0], seed=HIDDEN_SEED + tokens).to(BF16)
            for output, (found, weight, slack, rounded) in run(hidden).items():
                x, w = hidden.double(), weight.double()
                exact = x @ w.t()
                error = (found.double() - exact).abs()
                bound = slack * (x.abs() @ w.abs().t()) + SMALLEST + (exact.abs() * ROUNDING if rounded else 0.0)
                spread = (x.square() @ w.square().t()).sqrt()
                rms = (error / spread).square().mean().sqrt()
                text = f"2^-8 |r| + {power(slack)}" if rounded else power(slack)
                yield Accuracy(
                    section, path, output, text, tokens, float(error.max()), float((error / bound).max()), float(rms)
                )


def selections() -> Iterator[dict[str, Any]]:
    """Of 4096 keys the 2048 best of 64 queries each, by the indexer's scores, against those by exact scores."""
    k, rows = V32
    heads, size = rows["weights_proj"], rows["wk"]
    queries = normal(QUERIES, heads, size, seed=4).double()
    hidden = normal(KEYS, k, seed=HIDDEN_SEED).to(BF16)

    def scores(keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(QUERIES, KEYS, device="cuda", dtype=torch.float64)
        for head in range(heads):
            total += weights[:, head, None].double() * torch.relu(queries[:, head] @ keys.double().t())
        return total

    for compute in ("tf32", "fp32", "bf16_fp32out", "bf16"):
        held = BF16 if compute.startswith("bf16") else FP32
        wk, proj = linear(k, size, 1, held), linear(k, heads, 2, held)
        front = IndexerProjection(wk, proj, compute=compute)
        front.post_load_weights()
        keys, weights = front.project(hidden)
        exact = [hidden.double() @ module.weight.double().t() for module in (wk, proj)]
        wanted, found = scores(exact[0], exact[1][:QUERIES]), scores(keys, weights[:QUERIES])
        best = [each.topk(TOP_K, 1) for each in (found, wanted)]
        threshold = best[1].values[:, -1:]
        chosen = torch.zeros(2, *wanted.shape, dtype=torch.bool, device="cuda")
        for mask, ranked in zip(chosen, best, strict=True):
            mask.scatter_(1, ranked.indices, True)
        apart = ((wanted - threshold).abs() / wanted.std(1, keepdim=True))[chosen[0] != chosen[1]]
        yield {
            "compute": compute,
            "overlap": topk_overlap(best[0].indices, best[1].indices),
            "farthest_swap": float(apart.max()) if apart.numel() else 0.0,
        }


def show(rows: list[Accuracy], overlaps: list[dict[str, Any]]) -> None:
    """The worst number of tokens of each output; the overlaps."""
    table = Table(title=f"worst of {', '.join(map(str, TOKENS))} tokens")
    for column in ("", "path", "output", "bound", "worst error", "share of bound", "rms / E"):
        table.add_column(column, justify="right" if column in ("worst error", "share of bound", "rms / E") else "left")
    for key in dict.fromkeys((r.section, r.path, r.output) for r in rows):
        group = [r for r in rows if (r.section, r.path, r.output) == key]
        worst = max(group, key=lambda r: r.share)
        error, rms = max(r.worst for r in group), max(r.rms for r in group)
        table.add_row(*key, worst.bound, f"{error:.2e}", f"{worst.share:.2f}", f"{rms:.1e}")
    Console(width=140).print(table)
    table = Table(title=f"top {TOP_K} of {KEYS} keys, {QUERIES} queries, against exact scores")
    for column in ("arithmetic", "in common", "farthest swap, in spreads of the scores"):
        table.add_column(column, justify="left" if column == "arithmetic" else "right")
    for one in overlaps:
        table.add_row(one["compute"], f"{one['overlap']:.5f}", f"{one['farthest_swap']:.1e}")
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    out = parser.parse_args().out
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    rows = [row for paths in (csa2(), indexer(), qkv_a()) for row in accuracy(paths)]
    overlaps = list(selections())
    show(rows, overlaps)
    if out:
        result = {
            "command": "python -m benchmarks.accuracy",
            "environment": environment(machine="cuda"),
            "accuracy": [asdict(row) for row in rows],
            "selection": overlaps,
        }
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
