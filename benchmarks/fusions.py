"""What the fused projections cost, next to what else a model could call. Ratios of one run on one GPU.

    python -m benchmarks.fusions [--only A B C step] [--out FILE.json]

A: CSA2's hidden-state projections. B: the indexer's wk and weights_proj. C: the QK down-projection with and without the
indexer's parts. step: a whole decode step of the small model fronts, fusion on against off.

Every candidate is captured as one CUDA graph of 24 calls over 24 weight sets, far past the L2, and replayed; the figure
is the median. The floor is the time in which the measured read bandwidth delivers the weights of one call once. Peers
that are not installed are left out by name.
"""

from __future__ import annotations

import argparse
import json
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import Call, microseconds, read_bandwidth
from fusions.csa2 import HiddenStateProjections
from fusions.indexer import IndexerProjection
from fusions.libraries import Unavailable
from fusions.models import Csa2Front, MlaConfig, MlaFront, decode_step_csa2, decode_step_mla, randomize
from fusions.ops import OPS, flashinfer, native
from fusions.qkv_a import FusedQkvA
from pdl_stress.cuda.device import environment

SETS = 24
CSA2 = (5120, 1280, 512)
V32 = (7168, {"q_a": 1536, "kv_a": 576, "wk": 128, "weights_proj": 64})
PRESETS = ("nvfp4_all", "wk_only", "unfused", "indexer_pair")


def linear(k: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Linear:
    made = torch.nn.Linear(k, rows, bias=False, device="cuda", dtype=dtype).requires_grad_(False)
    torch.nn.init.normal_(made.weight, std=k**-0.5)
    return made


def hidden(tokens: int, k: int) -> torch.Tensor:
    return torch.randn(tokens, k, device="cuda").to(torch.bfloat16)


Candidates = Iterator[tuple[str, Call]]


def csa2_candidates(tokens: int) -> Candidates:
    """Both projections of 5120 to 1280 and 512 columns."""
    k, n_q, n_kv = CSA2
    x = hidden(tokens, k)
    pairs = [(linear(k, n_q), linear(k, n_kv)) for _ in range(SETS)]
    fronts = [HiddenStateProjections(*pair, policy="*", op=OPS["native"]) for pair in pairs]
    fused = [front.post_load_weights() for front in fronts]
    if not all(fused):
        raise RuntimeError(f"the projections are not fused: {fronts[0].explain(x)}")
    both = [front.launches(x[:1])[0].weight for front in fronts]
    out = torch.empty(tokens, n_q + n_kv, device="cuda", dtype=torch.bfloat16)
    q, kv = torch.empty(tokens, n_q, device="cuda").bfloat16(), torch.empty(tokens, n_kv, device="cuda").bfloat16()

    def two(gemm: Callable[..., object], **how: Any) -> Call:
        def call(i: int) -> None:
            gemm(x, pairs[i][0].weight, out=q, **how)
            gemm(x, pairs[i][1].weight, out=kv, **how)

        return call

    def one(gemm: Callable[..., object], **how: Any) -> Call:
        return lambda i: gemm(x, both[i], out=out, **how)

    def cublas(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
        torch.mm(x, weight.t(), out=out)

    yield "two cuBLAS", two(cublas)
    yield "one cuBLAS, concatenated", one(cublas)
    kinds: list[tuple[str, Callable[..., object], dict[str, Any]]] = [("native", native.tinygemm2, {})]
    try:
        flashinfer.available()
        kinds.append(("FlashInfer's choice", flashinfer.tinygemm2, {}))
        kinds.append(("FlashInfer reference", flashinfer.tinygemm2, {"kernel": "reference"}))
    except Unavailable as error:
        print(f"FlashInfer is left out: {error}")
    for name, gemm, how in kinds:
        for pdl in (False, True):
            label = f"tinygemm2, {name}{', PDL' if pdl else ''}"
            yield f"two {label}", two(gemm, pdl=pdl, **how)
            yield f"one {label}", one(gemm, pdl=pdl, **how)
    late = native.Behaviour("loaders", "after_stores")
    yield "one tinygemm2, native, PDL, trigger after its stores", one(native.tinygemm2, behaviour=late)
    yield "HiddenStateProjections.project", lambda i: fronts[i].project(x)


def alias_check() -> float:
    """Microseconds on the host that a call takes to see that both weights still are rows of one."""
    k, n_q, n_kv = CSA2
    front = HiddenStateProjections(linear(k, n_q), linear(k, n_kv), policy="*", op=OPS["native"])
    front.post_load_weights()
    return min(timeit.repeat(lambda: front.is_fused, number=10_000)) / 10_000 * 1e6


def indexer_candidates(tokens: int) -> Candidates:
    """wk and weights_proj of 7168 to 128 and 64 columns, from BF16 hidden states to BF16 keys and FP32 weights."""
    k, rows = V32
    x = hidden(tokens, k)

    def fronts(compute: str, *, fused: bool) -> list[IndexerProjection]:
        dtype = torch.float32 if compute in ("tf32", "fp32") else torch.bfloat16
        made = []
        for _ in range(SETS):
            front = IndexerProjection(
                linear(k, rows["wk"], dtype), linear(k, rows["weights_proj"], dtype), compute=compute
            )
            front.post_load_weights()
            if not fused:
                front.release()
            made.append(front)
        return made

    for name, compute, fused in (
        ("two GEMMs, TF32", "tf32", False),
        ("one GEMM, TF32", "tf32", True),
        ("two GEMMs, FP32", "fp32", False),
        ("one GEMM, FP32", "fp32", True),
        ("one GEMM, BF16", "bf16", True),
        ("one GEMM, BF16 to FP32", "bf16_fp32out", True),
    ):
        made = fronts(compute, fused=fused)
        yield name, lambda i, made=made: made[i].project(x)  # type: ignore[misc]


def qkv_a_candidates(tokens: int) -> Candidates:
    """All four parts of 7168 to 1536, 576, 128 and 64 columns."""
    k, rows = V32
    x = hidden(tokens, k)

    def parts(preset: str) -> list[tuple[str, torch.nn.Linear, int]]:
        single = {"nvfp4_all": (), "indexer_pair": ("wk", "weights_proj")}.get(preset, ("weights_proj",))
        return [
            (name, linear(k, count, torch.float32 if name in single else torch.bfloat16), count)
            for name, count in rows.items()
        ]

    linears = [parts("nvfp4_all") for _ in range(SETS)]
    yield "four cuBLAS", lambda i: [module(x) for _, module, _ in linears[i]]
    for preset in PRESETS:
        fronts = [FusedQkvA(parts(preset), preset=preset) for _ in range(SETS)]
        for front in fronts:
            front.post_load_weights()
        yield preset, lambda i, fronts=fronts: fronts[i].project(x)  # type: ignore[misc]
        if preset in ("unfused", "indexer_pair"):
            yield f"{preset}, indexer skipped", lambda i, fronts=fronts: fronts[i].project(x, indexer=False)  # type: ignore[misc]


def step_candidates(batch: int) -> Candidates:
    """A decode step of the model fronts: down-projections, norms, RoPE; for MLA also the indexer, over 4096 tokens.
    Each preset has its own base, since its checkpoint has other dtypes."""
    device = torch.device("cuda")

    def mla(preset: str, fusion: str | None) -> Call:
        steps = []
        for seed in range(3):
            front = MlaFront(MlaConfig().suiting(preset), fusion, device=device)
            randomize(front, seed)
            front.post_load_weights()
            steps.append(decode_step_mla(front, batch, 4096))
        return lambda i: steps[i % len(steps)]()

    def csa2(fusion: bool) -> Call:
        steps = []
        for seed in range(8):
            front = Csa2Front(fusion=fusion, policy="*", device=device)
            randomize(front, seed)
            front.post_load_weights()
            steps.append(decode_step_csa2(front, batch))
        return lambda i: steps[i % len(steps)]()

    yield "CSA2 front, off", csa2(False)
    yield "CSA2 front, on", csa2(True)
    for preset in PRESETS:
        yield f"MLA front, {preset}, off", mla(preset, None)
        yield f"MLA front, {preset}, on", mla(preset, preset)


SECTIONS: dict[str, tuple[str, Callable[[int], Candidates], tuple[int, ...], int]] = {
    "A": ("CSA2 projections, 5120 -> 1280 + 512", csa2_candidates, (1, 2, 4, 8), sum(CSA2[1:]) * CSA2[0] * 2),
    "B": ("indexer, 7168 -> 128 + 64", indexer_candidates, (1, 2, 4, 8, 16, 32, 64, 128, 256), 192 * 7168 * 4),
    "C": ("QK down-projection, 7168 -> 2304", qkv_a_candidates, (1, 4, 8, 16, 64, 256), 2304 * 7168 * 2),
    "step": ("decode step", step_candidates, (1, 4), 0),
}
"""By name: title, candidates for a number of tokens, those numbers, bytes of weights of one call."""


def measure(section: str, bandwidth: float) -> list[dict[str, Any]]:
    """Rows of one section: ``tokens``, ``what``, ``us``, ``over_floor``, and ``ratio`` to the base (the first one; of
    steps, fusion off)."""
    _, candidates, sizes, size = SECTIONS[section]
    floor = size / bandwidth * 1e6
    rows: list[dict[str, Any]] = []
    for tokens in sizes:
        base = 0.0
        for what, call in candidates(tokens):
            time = microseconds(call, SETS)
            if not base or what.endswith(", off"):
                base = time
            rows.append({
                "section": section, "tokens": tokens, "what": what, "us": time, "ratio": time / base,
                "over_floor": time / floor if floor else None,
            })  # fmt: skip
        torch.cuda.empty_cache()
    return rows


def show(section: str, rows: list[dict[str, Any]], bandwidth: float) -> None:
    title, _, _, size = SECTIONS[section]
    floor = f", floor {size / bandwidth * 1e6:.2f} us ({bandwidth / 1e12:.2f} TB/s)" if size else ""
    table = Table(title=f"{section}: {title}{floor}")
    for column in ("tokens", "what", "us a call", "of the base", "x floor"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for r in rows:
        over = f"{r['over_floor']:.2f}" if r["over_floor"] else ""
        table.add_row(str(r["tokens"]), r["what"], f"{r['us']:.2f}", f"{r['ratio']:.2f}", over)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to measure")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    arguments = parser.parse_args()
    bandwidth = read_bandwidth()
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.fusions --only {' '.join(arguments.only)}",
        "environment": environment(machine="cuda"),
        "bandwidth": bandwidth,
        "sets": SETS,
        "alias_check_us": alias_check(),
        "rows": [],
    }
    for section in arguments.only:
        rows = measure(section, bandwidth)
        show(section, rows, bandwidth)
        result["rows"] += rows
        if arguments.out:  # after each section: nothing finished is lost
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
