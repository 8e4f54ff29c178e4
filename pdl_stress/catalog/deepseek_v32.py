"""The down-projections of DeepSeek-V3.2's attention and indexer, with the norms in front of and behind them.

Their GEMMs are cuBLAS's, launched without the PDL attribute; the norms are launched with it. So the edge into a GEMM is
full, and under test is what follows it: does a norm behind a library's kernel wait?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..chain import Chain
from ..contract import KernelContract, Trigger, Wait
from ..op import Op
from .csa2 import EPS, gain
from .ops import NATIVE, OpSet, layernorm
from .projections import in_place, linears, made_once

HIDDEN = 7168
PARTS = {"q_a": 1536, "kv_a": 576, "wk": 128, "weights_proj": 64}
KV_LORA = 512
N_K, N_HEADS = PARTS["wk"], PARTS["weights_proj"]


def _plain(name: str, writes: tuple[str, ...], run: Callable[..., None]) -> Op:
    """An op for steps with ``pdl=False``: its kernels need no wait, and have no trigger."""
    contract = KernelContract(("input", "weight"), writes, wait=Wait.NEVER, trigger=Trigger.NONE)
    return Op(name, contract, run, contract, kernels=(name,))


def _weight(rows: int, dtype: str) -> Callable[[Any, Any], Any]:
    def make(generator: Any, device: Any) -> Any:
        import torch

        values = torch.randn(rows, HIDDEN, generator=generator, device=device) / HIDDEN**0.5
        return values.to(getattr(torch, dtype))

    return make


@made_once
def _indexer_of(weight: Any) -> Any:
    from fusions.indexer import IndexerProjection

    return in_place(IndexerProjection(*linears(weight, (N_K, N_HEADS)), compute="tf32"), weight[:1])


@made_once
def _qkv_a_of(weight: Any) -> Any:
    from fusions.qkv_a import FusedQkvA

    rows = tuple(PARTS.values())
    return in_place(FusedQkvA(list(zip(PARTS, linears(weight, rows), rows, strict=True))), weight[:1])


def _run_indexer(*, input: Any, weight: Any, k: Any, weights: Any, pdl: bool) -> None:
    keys, head_weights = _indexer_of(weight).project(input)
    k.copy_(keys)
    weights.copy_(head_weights)


def _run_qkv_a(*, input: Any, weight: Any, out: Any, pdl: bool) -> None:
    import torch

    torch.cat(list(_qkv_a_of(weight).project(input).values()), dim=1, out=out)


INDEXER_PROJECTION = _plain("indexer projection (TF32 GEMM)", ("k", "weights"), _run_indexer)
QKV_A_PROJECTION = _plain("QK down-projection (GEMM)", ("out",), _run_qkv_a)


K_NORM = replace(layernorm, waits=layernorm.waits - {Wait.ONE_WARP})
"""Of 128 columns, which one warp normalises: there a single waiting warp is no fault."""


def _norm(chain: Chain, op: Op, name: str, source: Any, size: int, out: Any) -> None:
    weight = chain.constant(f"{name}_gain", (size,), "bfloat16", gain(size))
    chain.step(name, op, input=source, weight=weight, out=out, params={"eps": EPS})


def _k_norm(chain: Chain, source: Any, out: Any) -> None:
    weight, bias = (chain.constant(f"k_norm_{name}", (N_K,), "bfloat16", gain(N_K)) for name in ("gain", "bias"))
    chain.step("k_norm", K_NORM, input=source, weight=weight, bias=bias, out=out, params={"eps": EPS})


def indexer(tokens: int, ops: OpSet = NATIVE) -> Chain:
    """norm -> ``wk`` and ``weights_proj`` in one FP32 GEMM on TF32 tensor cores -> the keys' LayerNorm."""
    chain = Chain("indexer-tf32", f"norm, indexer projection 7168 -> 128 + 64 in TF32, k norm; {tokens} token(s)")
    hidden = chain.input("hidden", (tokens, HIDDEN), "bfloat16")
    x = chain.buffer("x", (tokens, HIDDEN), "bfloat16")
    k, weights = chain.buffer("k", (tokens, N_K), "bfloat16"), chain.buffer("weights", (tokens, N_HEADS), "float32")
    keys = chain.buffer("keys", (tokens, N_K), "bfloat16")
    _norm(chain, ops.rmsnorm, "input_norm", hidden, HIDDEN, x)
    weight = chain.constant("indexer_weight", (N_K + N_HEADS, HIDDEN), "float32", _weight(N_K + N_HEADS, "float32"))
    chain.step("projection", INDEXER_PROJECTION, pdl=False, input=x, weight=weight, k=k, weights=weights)
    _k_norm(chain, k, keys)
    return chain


def qkv_a(tokens: int, ops: OpSet = NATIVE) -> Chain:
    """norm -> all four down-projections in one GEMM -> the norms of the latent query, the latent KV and the keys."""
    width = sum(PARTS.values())
    chain = Chain(f"qkv-a-m{tokens}", f"norm, QK down-projection 7168 -> {width}, three norms; {tokens} token(s)")
    hidden = chain.input("hidden", (tokens, HIDDEN), "bfloat16")
    x, qkv = chain.buffer("x", (tokens, HIDDEN), "bfloat16"), chain.buffer("qkv", (tokens, width), "bfloat16")
    n_q, k_at = PARTS["q_a"], PARTS["q_a"] + PARTS["kv_a"]
    q, kv = chain.buffer("q", (tokens, n_q), "bfloat16"), chain.buffer("kv", (tokens, KV_LORA), "bfloat16")
    keys = chain.buffer("keys", (tokens, N_K), "bfloat16")
    _norm(chain, ops.rmsnorm, "input_norm", hidden, HIDDEN, x)
    weight = chain.constant("qkv_a_weight", (width, HIDDEN), "bfloat16", _weight(width, "bfloat16"))
    chain.step("projection", QKV_A_PROJECTION, pdl=False, input=x, weight=weight, out=qkv)
    _norm(chain, ops.rmsnorm, "q_norm", qkv[:, :n_q], n_q, q)
    _norm(chain, ops.rmsnorm, "kv_norm", qkv[:, n_q : n_q + KV_LORA], KV_LORA, kv)
    _k_norm(chain, qkv[:, k_at : k_at + N_K], keys)
    return chain
