"""The CSA2 chain: RMSNorm -> tinygemm2 -> RMSNorm, as DeepSeek-V4.1's attention runs it at decode sizes.

``hidden`` (5120) is normalised, projected to ``q_a`` (1280) and ``kv`` (512), and each part is normalised again.
*Fused* is one projection over the concatenated weight (one token); *separate* is one per part (1 to 8 tokens).
Either takes its kernels from an op set, and runs them as :class:`fusions.csa2.HiddenStateProjections` would: what it
launches and from which rows of its one weight.
"""

from __future__ import annotations

from typing import Any

from ..chain import Chain
from ..op import Op
from .ops import NATIVE, OpSet
from .projections import projected

HIDDEN, N_Q, N_KV = 5120, 1280, 512
EPS = 1e-6


def projection_weight(rows: int) -> Any:
    """Makes a projection weight whose outputs have about unit scale (the inputs are normalised)."""

    def make(generator: Any, device: Any) -> Any:
        import torch

        values = torch.randn(rows, HIDDEN, generator=generator, device=device) / HIDDEN**0.5
        return values.to(torch.bfloat16)

    return make


def gain(size: int) -> Any:
    """Makes a norm's gain: around one, never zero, so that no lane of the chain is blind."""

    def make(generator: Any, device: Any) -> Any:
        import torch

        values = 1 + 0.25 * torch.rand(size, generator=generator, device=device)
        return values.to(torch.bfloat16)

    return make


def _norm(chain: Chain, op: Op, name: str, source: Any, size: int, out: Any) -> None:
    weight = chain.constant(f"{name}_gain", (size,), "bfloat16", gain(size))
    chain.step(name, op, input=source, weight=weight, out=out, params={"eps": EPS})


def fused(tokens: int = 1, ops: OpSet = NATIVE) -> Chain:
    """One projection of 1792 columns; both norms read their part of its output."""
    chain = Chain(f"csa2-fused-m{tokens}", f"norm, fused projection 5120 -> 1792, two norms; {tokens} token(s)")
    hidden = chain.input("hidden", (tokens, HIDDEN), "bfloat16")
    x = chain.buffer("x", (tokens, HIDDEN), "bfloat16")
    qkv = chain.buffer("qkv", (tokens, N_Q + N_KV), "bfloat16")
    q, kv = chain.buffer("q", (tokens, N_Q), "bfloat16"), chain.buffer("kv", (tokens, N_KV), "bfloat16")
    _norm(chain, ops.rmsnorm, "input_norm", hidden, HIDDEN, x)
    weight = chain.constant("wqkv", (N_Q + N_KV, HIDDEN), "bfloat16", projection_weight(N_Q + N_KV))
    both = projected(ops.projection(N_Q + N_KV), "wq_a and wkv", N_Q)
    chain.step("projection", both, input=x, weight=weight, out=qkv)
    _norm(chain, ops.rmsnorm, "q_norm", qkv[:, :N_Q], N_Q, q)
    _norm(chain, ops.rmsnorm, "kv_norm", qkv[:, N_Q:], N_KV, kv)
    return chain


def separate(tokens: int, ops: OpSet = NATIVE) -> Chain:
    """One projection per part."""
    chain = Chain(f"csa2-separate-m{tokens}", f"norm, projections 5120 -> 1280 and 512, two norms; {tokens} token(s)")
    hidden = chain.input("hidden", (tokens, HIDDEN), "bfloat16")
    x = chain.buffer("x", (tokens, HIDDEN), "bfloat16")
    q_a, kv_a = chain.buffer("q_a", (tokens, N_Q), "bfloat16"), chain.buffer("kv_a", (tokens, N_KV), "bfloat16")
    q, kv = chain.buffer("q", (tokens, N_Q), "bfloat16"), chain.buffer("kv", (tokens, N_KV), "bfloat16")
    _norm(chain, ops.rmsnorm, "input_norm", hidden, HIDDEN, x)
    weight = chain.constant("wqkv", (N_Q + N_KV, HIDDEN), "bfloat16", projection_weight(N_Q + N_KV))
    wq_a, wkv = (projected(ops.projection(n), name, N_Q, False) for n, name in ((N_Q, "wq_a"), (N_KV, "wkv")))
    chain.step("q_projection", wq_a, input=x, weight=weight[:N_Q], out=q_a)
    chain.step("kv_projection", wkv, input=x, weight=weight[N_Q:], out=kv_a)
    _norm(chain, ops.rmsnorm, "q_norm", q_a, N_Q, q)
    _norm(chain, ops.rmsnorm, "kv_norm", kv_a, N_KV, kv)
    return chain
