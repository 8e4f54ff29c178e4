"""The arithmetic of the indexer's projections: which tensor cores, which type in, which type out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from functools import reduce
from typing import Any, TypeGuard

import torch
from torch.nn.functional import linear

from fusions.ops.choice import capability
from fusions.tf32 import tf32

COMPUTES = ("tf32", "fp32", "bf16", "bf16_fp32out")
"""What the products are made with. ``bf16`` stands for the type of the weights, with one rounding to it at the end."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()  # torch.mm(..., out_dtype=): 2.8
_AMPERE = 80


class Arithmetic(StrEnum):
    """How a product is made."""

    TF32 = "TF32 tensor cores"
    FP32 = "FP32"
    NATIVE = "a GEMM of the weights' type"
    FP32_OUT = "BF16 with FP32 results"


def arithmetic(x: torch.Tensor, weights: Sequence[torch.Tensor], compute: str) -> tuple[Arithmetic, str]:
    """How ``x[T, K]`` is multiplied by these weights; and, where that is not what ``compute`` asks for, why."""
    if compute == "bf16":
        types = (x.dtype, *(weight.dtype for weight in weights))
        mixed = f"{', '.join(map(str, types))} are mixed: computed in {result_dtype(types, compute)}"
        return Arithmetic.NATIVE, "" if len(set(types)) == 1 else mixed
    if compute == "fp32":
        return Arithmetic.FP32, ""
    if not x.is_cuda or capability(x.device) < _AMPERE:
        return Arithmetic.FP32, f"{x.device} has no TF32" if compute == "tf32" else f"{x.device} has no BF16 GEMM"
    if compute == "tf32":
        off = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
        return Arithmetic.TF32, "NVIDIA_TF32_OVERRIDE=0 turns TF32 off" if off else ""
    for operand, name in ((x, "hidden"), *((weight, "a weight") for weight in weights)):
        if operand.dtype is not torch.bfloat16:
            return Arithmetic.FP32, f"{name} is {operand.dtype}, not torch.bfloat16"
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in (x, *weights)):
        return Arithmetic.FP32, "a gradient is needed"
    if not _HAS_OUT_DTYPE:
        return Arithmetic.FP32, f"torch.mm of torch {torch.__version__} has no out_dtype"
    return Arithmetic.FP32_OUT, ""


def products(x: torch.Tensor, weights: Sequence[torch.Tensor], compute: str) -> list[torch.Tensor]:
    """``x weight^T`` for ``x[T, K]`` and each ``weight[N, K]``, each a new ``[T, N]``, dense, of :func:`result_dtype`.

    One GEMM for each weight, and one cast of ``x`` at most. Autocast does not change the types; the process's TF32
    setting does not change the arithmetic. Differentiable; a backward pass follows that setting.
    """
    how, _ = arithmetic(x, weights, compute)
    with _no_autocast(x.device):
        if how is Arithmetic.FP32_OUT and x.shape[0]:
            return [torch.mm(x, weight.t(), out_dtype=torch.float32) for weight in weights]
        dtype = result_dtype((x.dtype, *(weight.dtype for weight in weights)), compute)
        x = x.to(dtype)
        with precision(x, compute):
            return [linear(x, weight.to(dtype)) for weight in weights]


def traced_products(x: torch.Tensor, weights: Sequence[torch.Tensor], compute: str) -> list[torch.Tensor]:
    """:func:`products` for a compiler that has to differentiate it: without TF32, which it cannot switch."""
    dtype = result_dtype((x.dtype, *(weight.dtype for weight in weights)), compute)
    return [linear(x.to(dtype), weight.to(dtype)) for weight in weights]


def own_forwards(x: torch.Tensor, modules: Sequence[Any], compute: str | None) -> list[torch.Tensor]:
    """What each module makes of ``x[T, K]``, which is cast to its weight's type if that has 16 or 32 bits.

    Args:
        compute: for the FP32 products in it; ``None``: as the process is set.
    """
    found = []
    for module in modules:
        weight = getattr(module, "weight", None)
        operand = x.to(weight.dtype) if isinstance(weight, torch.Tensor) and weight.dtype in FLOATS else x
        with precision(operand, compute) if compute else nullcontext():
            found.append(module(operand))
    return found


def precision(x: torch.Tensor, compute: str) -> AbstractContextManager[None]:
    """The scope for products of ``x``: TF32 as ``compute`` says, where there is a choice."""
    switchable = x.is_cuda and x.dtype is torch.float32 and capability(x.device) >= _AMPERE
    return tf32(compute == "tf32") if switchable else nullcontext()


def result_dtype(dtypes: Sequence[torch.dtype], compute: str) -> torch.dtype:
    """What a product of operands of these types comes out as, before it is cast any further."""
    return reduce(torch.promote_types, dtypes) if compute == "bf16" else torch.float32


def is_plain(weight: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a weight ``[N, K]`` of 16 or 32 bits that is not empty."""
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.dtype in FLOATS and weight.numel() > 0


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def joined(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor whose rows these weights are, one behind the other in one storage; ``None`` if they are not."""
    first, address = weights[0], weights[0].data_ptr()
    for weight in weights:
        if (
            weight.data_ptr() != address
            or not weight.is_contiguous()
            or (weight.dtype, weight.device, weight.shape[1]) != (first.dtype, first.device, first.shape[1])
            or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return None
        address += weight.numel() * weight.itemsize
    k = first.shape[1]
    return first.as_strided((sum(weight.shape[0] for weight in weights), k), (k, 1))


@torch.library.custom_op("fusions::indexer_projection", mutates_args=())
def indexer_projection(
    hidden: torch.Tensor, wk: torch.Tensor, weights_proj: torch.Tensor, compute: str
) -> torch.Tensor:
    """Both projections of ``hidden[T, K]`` as one ``[T, Dk + Nh]``, of :func:`result_dtype`: a custom op may not return
    two views of one tensor. One GEMM if the weights are rows of one tensor when it runs, else two."""
    fused = joined((wk, weights_proj))
    found = products(hidden, (wk, weights_proj) if fused is None else (fused,), compute)
    return torch.cat(found, 1) if fused is None else found[0]


@indexer_projection.register_fake
def _(hidden: torch.Tensor, wk: torch.Tensor, weights_proj: torch.Tensor, compute: str) -> torch.Tensor:
    dtype = result_dtype((hidden.dtype, wk.dtype, weights_proj.dtype), compute)
    return hidden.new_empty((hidden.shape[0], wk.shape[0] + weights_proj.shape[0]), dtype=dtype)
