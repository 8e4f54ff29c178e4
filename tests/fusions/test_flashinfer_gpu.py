"""Bit for bit against FlashInfer, where it is installed: the same arithmetic in the same order, from other code.

``FLASHINFER_USE_CUDA_NORM=1`` chooses its CUDA RMSNorm; ``FLASHINFER_DISABLE_TINYGEMM2_WGMMA=1`` its tinygemm2 proper
(its wgmma program is meant to give the same bits).
"""

from __future__ import annotations

import os
import random

import pytest

from fusions.ops import rmsnorm, tinygemm2

pytestmark = pytest.mark.gpu

SHAPES = 200


@pytest.fixture(scope="module", autouse=True)
def flashinfer_is_there() -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed: pip install 'pdl-stress[flashinfer]'")


@pytest.mark.skipif(os.environ.get("FLASHINFER_USE_CUDA_NORM") != "1", reason="set FLASHINFER_USE_CUDA_NORM=1")
def test_rmsnorm_has_flashinfers_bits() -> None:
    import torch
    from flashinfer.norm import rmsnorm as theirs

    rng = random.Random(0)
    for _ in range(SHAPES):
        rows, width = rng.randint(1, 33), 8 * rng.randint(1, 1024)
        x = (torch.randn(rows, width, device="cuda") * 10 ** rng.uniform(-2, 2)).to(torch.bfloat16)
        weight = torch.randn(width, device="cuda").to(torch.bfloat16)
        got, want = rmsnorm(x, weight, eps=1e-6), theirs(x, weight, 1e-6)
        assert torch.equal(got, want), (rows, width, int((got != want).sum()))


def test_tinygemm2_has_flashinfers_bits() -> None:
    import torch
    from flashinfer.gemm import tinygemm_bf16

    rng = random.Random(1)
    for _ in range(SHAPES):
        rows, width, columns = rng.randint(1, 16), 64 * rng.randint(1, 112), 16 * rng.randint(1, 112)
        x = torch.randn(rows, width, device="cuda").to(torch.bfloat16)
        weight = torch.randn(columns, width, device="cuda").to(torch.bfloat16)
        bias = torch.randn(columns, device="cuda").to(torch.bfloat16) if rng.random() < 0.5 else None
        want = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
        tinygemm_bf16(x, weight, want, bias=bias, use_pdl=False)
        got = tinygemm2(x, weight, bias, pdl=False)
        assert torch.equal(got, want), (rows, width, columns, bias is not None, int((got != want).sum()))
