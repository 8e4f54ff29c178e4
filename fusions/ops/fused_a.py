"""TensorRT-LLM's min-latency GEMM for DeepSeek-V3's A-projection: 7168 -> 2112 for 1 to 16 tokens, and nothing else.

**It has been tested against stand-ins registered under the op's name. It has not met a real TensorRT-LLM.**

The op is looked up under ``torch.ops.trtllm`` at every call, and never imported for: whoever runs TensorRT-LLM has it.
Outside of its one shape the op runs a general GEMM, for which it is not called here.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from fusions.ops import choice, trtllm

OP = "dsv3_fused_a_gemm_op"

ROWS, K, MAX_TOKENS = 2112, 7168, 16
"""The shape that the kernel is compiled for."""

UNSUPPORTED = (120, 121)
"""Compute capabilities above 9.0 without what the kernel needs."""

_ALIGNMENT = 16  # bytes: vector loads


def refusal(x: torch.Tensor, weight: torch.Tensor) -> str:
    """Why ``x weight^T`` should not go to the op; empty if it may. On the host alone, about two microseconds.

    The op takes the rows of x as K elements apart whatever their stride is, so a view with wider rows would give
    wrong numbers and no error: x must be dense. It has no backward, and autocast does not reach it.
    """
    if weight.shape != (ROWS, K):
        return f"the op is for {ROWS} rows of K = {K}, the fused weight is {tuple(weight.shape)}"
    if type(x) is not torch.Tensor:
        return f"hidden is a {type(x).__name__}"
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_TOKENS:
        return f"the op is for 1 to {MAX_TOKENS} tokens as [M, K], hidden is {tuple(x.shape)}"
    if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        return f"the op is for torch.bfloat16, hidden is {x.dtype} and the weight {weight.dtype}"
    if torch.is_grad_enabled() and x.requires_grad:
        return "a gradient is needed"
    number = _capability(x.device)
    if number is None or x.device != weight.device:
        return f"the op runs on one CUDA device, hidden is on {x.device} and the weight on {weight.device}"
    if number < 90 or number in UNSUPPORTED:
        return f"the op does not support compute capability {number // 10}.{number % 10}"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    if not x.is_contiguous():
        return f"hidden has strides {x.stride()}, and the op ignores them"
    if x.data_ptr() % _ALIGNMENT or weight.data_ptr() % _ALIGNMENT or not weight.is_contiguous():
        return f"hidden or the weight is not dense from a {_ALIGNMENT}-byte boundary on"
    return "" if trtllm.registered(OP) else f"torch.ops.trtllm.{OP} is not registered; import tensorrt_llm first"


def fused_a(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x weight^T`` as a new dense BF16 tensor ``[M, 2112]``.

    Only for operands that :func:`refusal` has let pass; they are not looked at again. On torch's current stream of the
    device of x. The kernel is launched with the PDL attribute if ``TRTLLM_ENABLE_PDL=1``, and then reads both operands
    behind its wait (reported).

    Raises:
        TypeError: the op returned no tensor.
    """
    # The op launches on the current device, whatever the device of its operands.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        out = torch.ops.trtllm.dsv3_fused_a_gemm_op(x, weight.t(), None, None)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"{OP} returned {type(out).__name__}, expected a tensor: the op is of another version")
    return out


def _capability(device: torch.device) -> int | None:
    """90 for compute capability 9.0; ``None`` for what is no GPU."""
    return choice.capability(device) if device.type == "cuda" else None
