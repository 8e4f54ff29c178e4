"""What every native kernel is called with beside its operands: devices, stream, and the parameters of its behaviour."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from fusions.ops.native.code import Behaviour

# The parameters that end every native kernel's list, in every behaviour.
PDL_FIELDS: list[tuple[str, Any]] = [("delay_ns", ctypes.c_uint64), ("flag", ctypes.c_int), ("stamps", ctypes.c_void_p)]


def check_devices(op: str, x: torch.Tensor, others: dict[str, torch.Tensor | None]) -> int:
    """All on x's CUDA device, whose index is returned."""
    if not x.is_cuda:
        raise ValueError(f"{op}: x is on {x.device}, expected a CUDA device; move it with x.cuda()")
    device = x.get_device()
    for name, tensor in others.items():
        if tensor is not None and tensor.get_device() != device:
            raise ValueError(f"{op}: {name} is on {tensor.device} and x on {x.device}; move {name} to {x.device}")
    return device


def check_pdl(op: str, behaviour: Behaviour, delay_ns: int, stamps: torch.Tensor | None) -> None:
    """`delay_ns` in range; `stamps` a 4-element 64-bit buffer, present where the behaviour writes it."""
    if not 0 <= delay_ns < 1 << 63:
        raise ValueError(f"{op}: delay_ns={delay_ns}, expected 0 or more nanoseconds")
    if stamps is None:
        if behaviour.stamps:
            raise ValueError(
                f"{op}: the behaviour has stamps=True; pass stamps, four 64-bit integers set to [max, max, 0, 0]"
            )
    elif stamps.dtype not in (torch.int64, torch.uint64) or stamps.numel() != 4 or not stamps.is_contiguous():
        raise ValueError(
            f"{op}: stamps is {stamps.dtype} {tuple(stamps.shape)}, expected four contiguous 64-bit integers"
        )


def current_stream(device: int) -> int:
    """The raw handle of the caller's current stream on `device`."""
    if _raw_stream is not None:
        return int(_raw_stream(device))
    return int(torch.cuda.current_stream(device).cuda_stream)


# What torch's own generated code calls: it makes no Stream object. Absent from builds without CUDA.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
