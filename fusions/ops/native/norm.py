"""RMSNorm and LayerNorm of BF16 rows, each as one native kernel, one CTA a row."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from fusions.ops import arguments
from fusions.ops.native import code, parameters
from fusions.ops.native.code import Behaviour
from fusions.ops.native.launch import launcher

DEPLOYED = code.DEPLOYED["rmsnorm"]
DEPLOYED_LAYERNORM = code.DEPLOYED["layernorm"]


_ROW_FIELDS: list[tuple[str, Any]] = [
    ("out", ctypes.c_void_p),
    ("x_stride", ctypes.c_longlong),
    ("out_stride", ctypes.c_longlong),
    ("width", ctypes.c_int),
    ("vec", ctypes.c_int),
    ("eps", ctypes.c_float),
    *parameters.PDL_FIELDS,
]


class RmsnormParameters(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("weight", ctypes.c_void_p), *_ROW_FIELDS]


class LayernormParameters(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), *_ROW_FIELDS]


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    eps: float = 1e-6,
    pdl: bool = True,
    behaviour: Behaviour = DEPLOYED,
    delay_ns: int = 0,
    flag: int = 0,
    stamps: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[m, :] = x[m, :] * rsqrt(mean(x[m, :]^2) + eps) * weight in FP32, rounded once to BF16.

    x: BF16 [M, H], any row stride, unit last stride, any alignment. weight: BF16 [H] contiguous. out: BF16 [M, H] with
    separate rows; may be `x` itself. The result is deterministic, and depends not on M, strides or alignment.
    Its order of operations is meant to be that of FlashInfer's CUDA RMSNorm: the bits agree wherever no operand or
    intermediate is subnormal (that library flushes those).

    pdl: launch with the PDL attribute. behaviour: the PDL behaviour compiled in. delay_ns, flag, stamps (four 64-bit
    integers set to [max, max, 0, 0] by the caller): parameters of every behaviour, read by those compiled to.
    M = 0 launches nothing. Not differentiable. Raises ValueError for other arguments and for a GPU older than sm_90.
    """
    rows, width = _checked("rmsnorm", x, {"weight": weight}, out)
    parameters.check_pdl("rmsnorm", behaviour, delay_ns, stamps)
    device = parameters.check_devices("rmsnorm", x, {"weight": weight, "out": out, "stamps": stamps})
    if out is None:
        out = x.new_empty((rows, width))
    if rows == 0:
        return out
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return rmsnorm(
                x, weight, out=out, eps=eps, pdl=pdl, behaviour=behaviour, delay_ns=delay_ns, flag=flag, stamps=stamps
            )

    vec, threads = _block(width)
    launch = launcher("rmsnorm", behaviour, device, RmsnormParameters)
    fields = launch.here().fields
    fields.x, fields.weight, fields.out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    fields.x_stride, fields.out_stride = x.stride(0), out.stride(0)
    fields.width, fields.vec, fields.eps = width, vec, eps
    fields.delay_ns, fields.flag, fields.stamps = delay_ns, flag, None if stamps is None else stamps.data_ptr()
    launch((rows, 1), threads, 0, pdl, parameters.current_stream(device))
    return out


def layernorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    eps: float = 1e-6,
    pdl: bool = True,
    behaviour: Behaviour = DEPLOYED_LAYERNORM,
    delay_ns: int = 0,
    flag: int = 0,
    stamps: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[m, :] = (x[m, :] - mean) * rsqrt(var + eps) * weight + bias in FP32, rounded once to BF16.

    mean and var are those of x[m, :]; var (the biased one) is summed over the deviations, in a second pass.
    x: BF16 [M, H], any row stride, unit last stride, any alignment. weight, bias: BF16 [H] contiguous. out: BF16 [M, H]
    with separate rows; may be `x` itself. The result is deterministic, and depends not on M, strides or alignment.
    A row of equal elements gives the bias itself, up to 65536 columns.

    pdl, behaviour, delay_ns, flag and stamps are those of `rmsnorm`. Where H / gcd(8, H) is at most 32 (H = 128, say) a
    CTA is one warp, and the wait `one_warp` orders as much as `all`. M = 0 launches nothing. Not differentiable. Raises
    ValueError for other arguments and for a GPU older than sm_90.
    """
    rows, width = _checked("layernorm", x, {"weight": weight, "bias": bias}, out)
    parameters.check_pdl("layernorm", behaviour, delay_ns, stamps)
    operands = {"weight": weight, "bias": bias, "out": out, "stamps": stamps}
    device = parameters.check_devices("layernorm", x, operands)
    if out is None:
        out = x.new_empty((rows, width))
    if rows == 0:
        return out
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return layernorm(
                x, weight, bias, out=out, eps=eps, pdl=pdl, behaviour=behaviour, delay_ns=delay_ns, flag=flag,
                stamps=stamps,
            )  # fmt: skip

    vec, threads = _block(width)
    launch = launcher("layernorm", behaviour, device, LayernormParameters)
    fields = launch.here().fields
    fields.x, fields.weight, fields.bias, fields.out = x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr()
    fields.x_stride, fields.out_stride = x.stride(0), out.stride(0)
    fields.width, fields.vec, fields.eps = width, vec, eps
    fields.delay_ns, fields.flag, fields.stamps = delay_ns, flag, None if stamps is None else stamps.data_ptr()
    launch((rows, 1), threads, 0, pdl, parameters.current_stream(device))
    return out


def _checked(op: str, x: torch.Tensor, columns: dict[str, torch.Tensor], out: torch.Tensor | None) -> tuple[int, int]:
    """The rows and columns of x, whose operands fit it."""
    arguments.check_rows(op, "x", x)
    rows, width = x.shape
    if not 1 <= width < 1 << 30:
        raise ValueError(f"{op}: x has {width} columns, expected 1 to 2^30 - 1")
    for name, tensor in columns.items():
        arguments.check_rows(op, name, tensor, dims=1)
        arguments.check_shape(op, name, tensor, (width,), "one value a column of x")
    if out is not None:
        arguments.check_out(op, out, rows, width)
    return rows, width


def _block(width: int) -> tuple[int, int]:
    """How many adjacent elements a thread takes at once, and the threads of a CTA: whole warps."""
    vec = math.gcd(8, width)
    return vec, (min(1024, width // vec) + 31) // 32 * 32
