"""Triton kernels with PDL: one that waits, one that does not."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def waits(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait()
    gdc_launch_dependents()
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2 + 1, mask=i < n)


@triton.jit
def never(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gdc_launch_dependents()
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2 + 1, mask=i < n)


@triton.jit
def row_norm(x, weight, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    w = tl.load(weight + i, mask=i < n, other=0.0)
    gdc_wait()
    row = tl.load(x + tl.program_id(0) * n + i, mask=i < n, other=0.0)
    gdc_launch_dependents()
    tl.store(out + tl.program_id(0) * n + i, row / tl.sqrt(tl.sum(row * row, 0) / n + 1e-6) * w, mask=i < n)


@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    gdc_wait()
    row = tl.load(x + tl.program_id(0) * n + i, mask=i < n, other=float("-inf"))
    top = tl.exp(row - tl.max(row, 0))
    tl.store(out + tl.program_id(0) * n + i, top / tl.sum(top, 0), mask=i < n)
    gdc_launch_dependents()


@triton.jit
def matmul(a, b, out, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    gdc_wait()
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * K + start + k[None, :])
        right = tl.load(b + (start + k)[:, None] * N + n[None, :])
        total += tl.dot(left, right)
    gdc_launch_dependents()
    tl.store(out + m[:, None] * N + n[None, :], total.to(tl.bfloat16))


@triton.jit
def gather(x, index, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait()
    at = tl.load(index + i, mask=i < n, other=0)
    tl.store(out + i, tl.load(x + at, mask=i < n), mask=i < n)
    gdc_launch_dependents()


def launch(kernel: Any, grid: int, *args: Any, **sizes: int) -> None:
    kernel[(grid,)](*args, **sizes, launch_pdl=True)
