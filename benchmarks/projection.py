"""How fast is the native projection, next to what else a model could call? Ratios of one run on one GPU.

    python -m benchmarks.projection [--out FILE.json]

Every candidate is captured as one CUDA graph of 24 calls over 24 weight sets (440 MB, far past the L2), replayed until
the median settles. The floor is the time in which the measured read bandwidth delivers the weights of one call once.
Peers that are not installed are left out by name.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import Call, microseconds, read_bandwidth
from fusions.ops.native import Behaviour, tinygemm2
from pdl_stress.cuda.device import environment

K, N_Q, N_KV, SETS = 5120, 1280, 512, 24
EARLY = Behaviour("loaders", "after_wait")


def candidates(tokens: int, weights: list[torch.Tensor]) -> dict[str, Call]:
    """Name -> call; every one computes ``x @ weight.T`` for both parts."""
    x = torch.randn(tokens, K, device="cuda").to(torch.bfloat16)
    both = torch.empty(tokens, N_Q + N_KV, device="cuda", dtype=torch.bfloat16)
    q, kv = torch.empty_like(both[:, :N_Q]), torch.empty_like(both[:, N_Q:])
    q, kv = q.contiguous(), kv.contiguous()
    parts = [(w[:N_Q], w[N_Q:]) for w in weights]

    def two(pdl: bool) -> Call:
        def call(i: int) -> None:
            tinygemm2(x, parts[i][0], out=q, pdl=pdl)
            tinygemm2(x, parts[i][1], out=kv, pdl=pdl)

        return call

    def two_cublas(i: int) -> None:
        torch.mm(x, parts[i][0].t(), out=q)
        torch.mm(x, parts[i][1].t(), out=kv)

    found: dict[str, Call] = {
        "two cuBLAS calls": two_cublas,
        "one cuBLAS call, concatenated": lambda i: torch.mm(x, weights[i].t(), out=both),
        "two native tinygemm2": two(False),
        "two native tinygemm2, PDL": two(True),
        "one native tinygemm2": lambda i: tinygemm2(x, weights[i], out=both, pdl=False),
        "one native tinygemm2, PDL": lambda i: tinygemm2(x, weights[i], out=both, pdl=True),
        "the same, trigger after its wait": lambda i: tinygemm2(x, weights[i], out=both, pdl=True, behaviour=EARLY),
    }
    try:
        from flashinfer.gemm import tinygemm_bf16
    except ImportError:
        return found
    kind = "tinygemm2" if os.environ.get("FLASHINFER_DISABLE_TINYGEMM2_WGMMA") == "1" else "its own choice"
    found[f"one FlashInfer tinygemm ({kind}), PDL"] = lambda i: tinygemm_bf16(x, weights[i], both, use_pdl=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    arguments = parser.parse_args()
    bandwidth = read_bandwidth()
    floor = (N_Q + N_KV) * K * 2 / bandwidth * 1e6
    scale = K**-0.5
    weights = [(torch.randn(N_Q + N_KV, K, device="cuda") * scale).to(torch.bfloat16) for _ in range(SETS)]
    rows: list[dict[str, Any]] = []
    for tokens in (1, 2, 4, 8):
        times = {name: microseconds(call, SETS) for name, call in candidates(tokens, weights).items()}
        base = times["two cuBLAS calls"]
        for name, time in times.items():
            row = {"tokens": tokens, "what": name, "us": time, "speedup": base / time, "over_floor": time / floor}
            rows.append(row)
    table = Table(title=f"projection 5120 -> 1280 + 512, floor {floor:.2f} us ({bandwidth / 1e12:.2f} TB/s)")
    for column in ("tokens", "what", "us a call", "x two cuBLAS", "x floor"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for r in rows:
        table.add_row(str(r["tokens"]), r["what"], f"{r['us']:.2f}", f"{r['speedup']:.2f}", f"{r['over_floor']:.2f}")
    Console(width=110).print(table)
    if arguments.out:
        result = {"environment": environment(machine="cuda"), "floor_us": floor, "bandwidth": bandwidth, "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
