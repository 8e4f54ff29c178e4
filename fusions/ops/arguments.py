"""Argument checks shared by the ops. Every message says what was wrong, what was expected, and what to do."""

from __future__ import annotations

import torch


def check_rows(op: str, name: str, tensor: torch.Tensor, dims: int = 2) -> None:
    """A BF16 tensor of `dims` dimensions whose last one has stride 1."""
    if tensor.dtype is not torch.bfloat16:
        raise ValueError(f"{op}: {name} is {tensor.dtype}, expected torch.bfloat16; convert it with {name}.bfloat16()")
    if tensor.dim() != dims:
        raise ValueError(
            f"{op}: {name} has {tensor.dim()} dimensions {tuple(tensor.shape)}, expected {dims}; reshape it"
        )
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{op}: the last dimension of {name} has stride {tensor.stride(-1)}, expected 1; call {name}.contiguous()"
        )


def check_shape(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], why: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {shape} ({why})")


def check_out(op: str, out: torch.Tensor, rows: int, columns: int) -> None:
    """A BF16 [rows, columns] result whose rows do not overlap."""
    check_rows(op, "out", out)
    check_shape(op, "out", out, (rows, columns), "rows of x by columns of the result")
    if rows > 1 and out.stride(0) < columns:
        raise ValueError(
            f"{op}: rows of out overlap (row stride {out.stride(0)}, {columns} columns); pass separate rows"
        )
