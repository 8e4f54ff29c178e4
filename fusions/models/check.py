"""Fusion on against fusion off: whether two fronts with the same weights give the same answer within the contract."""

from __future__ import annotations

import torch

from fusions.models.csa2_front import Csa2Front
from fusions.models.layers import BF16, FP32
from fusions.models.mla_front import MlaFront
from fusions.qkv_plan import KV_A, Q_A, WEIGHTS_PROJ, WK

BF16_ROUNDING = 2.0**-8
"""Of a result, relative: one rounding to BF16."""

ACCUMULATION = {BF16: 2.0**-17, FP32: 2.0**-18}
"""Of a sum in FP32, relative to the sum of the terms' magnitudes; by the weights' type, as the fused GEMMs state it."""

TF32_ROUNDING = 2.0**-10
"""Of a product, relative, where FP32 weights are not exact in TF32."""

SMALLEST = 2.0**-133
"""Below BF16's subnormal numbers."""


def bound(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far each element of ``hidden weight^T``, given as ``dtype``, may be from the exact one: FP64 ``[M, N]``."""
    exact = hidden.double() @ weight.double().t()
    magnitude = hidden.double().abs() @ weight.double().abs().t()
    share = ACCUMULATION.get(weight.dtype, ACCUMULATION[BF16])
    if weight.dtype is FP32 and not torch.equal(weight, weight.to(BF16).float()):
        share += TF32_ROUNDING
    return magnitude * share + SMALLEST + (exact.abs() * BF16_ROUNDING if dtype is not FP32 else 0.0)


def mla_share(on: MlaFront, off: MlaFront, hidden: torch.Tensor) -> float:
    """The largest difference between the projections of two fronts, as a share of what the contract allows: at most 1
    keeps it. Each may be off by its own bound, on its own side."""
    projected = [front.project(hidden) for front in (on, off)]
    rows = {Q_A: [found.q for found in projected], WK: [found.indexer_k for found in projected]}
    rows[KV_A] = [torch.cat((found.compressed_kv, found.k_pe), -1) for found in projected]
    rows[WEIGHTS_PROJ] = [found.indexer_weights for found in projected]
    shares = []
    for name, linear in off.parts.items():
        first, second = rows[name]
        assert first is not None
        assert second is not None
        shares.append(_share(hidden, linear.weight, first, second))
    return max(shares)


def csa2_share(on: Csa2Front, off: Csa2Front, hidden: torch.Tensor) -> float:
    """:func:`mla_share` for CSA2's two projections."""
    pairs = zip((off.wq_a, off.wkv), on.project(hidden), off.project(hidden), strict=True)
    return max(_share(hidden, linear.weight, first, second) for linear, first, second in pairs)


def topk_overlap(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """The part of two selections ``[M, k]`` that they have in common; 0.0 if one was not made."""
    if first is None or second is None:
        return 0.0
    size = int(max(first.max(), second.max())) + 2
    chosen = []
    for selection in (first, second):
        marks = torch.zeros((len(selection), size), dtype=torch.bool, device=selection.device)
        marks.scatter_(1, selection.long() + 1, True)
        chosen.append(marks[:, 1:])  # what -1 marked says nothing
    common, larger = (chosen[0] & chosen[1]).sum(), max(int(marks.sum()) for marks in chosen)
    return float(common) / larger if larger else 1.0


def _share(hidden: torch.Tensor, weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> float:
    allowed = bound(hidden, weight, first.dtype) + bound(hidden, weight, second.dtype)
    return float(((first.double() - second.double()).abs() / allowed).max())
