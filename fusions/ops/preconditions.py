"""What the libraries' kernels need of their operands, whether or not the libraries check it themselves.

Every message says what was wrong, what was expected, and what to do. Violations would be a misaligned address, a tensor
map that does not encode, or a read past the end: faults that end the process, or wrong numbers.
"""

from __future__ import annotations

import math

import torch

from fusions.ops import arguments

ALIGNMENT = 16
"""Bytes: vector loads of eight BF16, and the base address of a tensor map."""


def check_rmsnorm(op: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> None:
    """FlashInfer's RMSNorm (CUDA or CuTe): rows of BF16, any row stride that keeps their vectors aligned.

    Its CUDA kernel loads ``gcd(8, H)`` elements at a time from wherever it is told, and counts elements in 32 bits.
    Raises ValueError.
    """
    arguments.check_rows(op, "x", x)
    rows, width = x.shape
    if width < 1:
        raise ValueError(f"{op}: x has no columns, expected at least one")
    arguments.check_rows(op, "weight", weight, dims=1)
    arguments.check_shape(op, "weight", weight, (width,), "one gain a column of x")
    if out is not None:
        arguments.check_out(op, out, rows, width)
    vector = math.gcd(8, width)
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        if tensor is None:
            continue
        _check_aligned(op, name, tensor)
        if tensor.dim() == 2 and rows > 1 and tensor.stride(0) % vector:
            raise ValueError(
                f"{op}: rows of {name} are {tensor.stride(0)} elements apart, expected a multiple of {vector}, the "
                f"elements that the kernel loads at a time; pass {name}.contiguous()"
            )
        if tensor.dim() == 2 and rows * max(tensor.stride(0), width) >= 1 << 32:
            raise ValueError(f"{op}: {name} spans 2^32 elements or more, which the kernel cannot count; split the rows")
    _check_devices(op, x, {"weight": weight, "out": out})


def check_tinygemm2(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    smallest_k: int = 8,
    smallest_m: int = 0,
) -> None:
    """tinygemm2 of either library: contiguous BF16, K % 8 == 0 and N % 16 == 0, 16-byte aligned.

    x and weight are read through tensor maps, whose rows must be a multiple of 16 bytes apart. One CTA makes 16
    columns, and TensorRT-LLM's reads as many elements of the bias. Raises ValueError.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        arguments.check_rows(op, name, tensor)
        _check_contiguous(op, name, tensor)
        _check_aligned(op, name, tensor)
    rows, width = x.shape
    columns = weight.shape[0]
    if weight.shape[1] != width:
        raise ValueError(f"{op}: x has K = {width} and weight K = {weight.shape[1]}, expected [M, K] and [N, K]")
    if width < smallest_k or width % 8:
        raise ValueError(
            f"{op}: K = {width}, expected a multiple of 8, at least {smallest_k}; pad x and weight with zero columns"
        )
    if columns < 16 or columns % 16:
        raise ValueError(f"{op}: N = {columns}, expected a positive multiple of 16; pad weight with zero rows")
    if not smallest_m <= rows <= 65535 * 8:
        raise ValueError(
            f"{op}: M = {rows}, expected {smallest_m} to {65535 * 8}; "
            + ("skip the call where there is no row" if rows < smallest_m else "use a GEMM made for many rows")
        )
    if bias is not None:
        arguments.check_rows(op, "bias", bias, dims=1)
        arguments.check_shape(op, "bias", bias, (columns,), "one value a row of weight")
    if out is not None:
        arguments.check_out(op, out, rows, columns)
        _check_contiguous(op, "out", out)
        _check_aligned(op, "out", out)
    _check_devices(op, x, {"weight": weight, "bias": bias, "out": out})


def _check_contiguous(op: str, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} has strides {tensor.stride()}, expected a contiguous tensor; pass {name}.contiguous()"
        )


def _check_aligned(op: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{op}: {name} starts at an address that is no multiple of {ALIGNMENT} bytes; pass {name}.clone()"
        )


def _check_devices(op: str, x: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    """All on one device. Which devices an op runs on, the library says itself before it launches anything."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: {name} is on {tensor.device} and x on {x.device}; move {name} to {x.device}")
