"""RMSNorm of BF16 rows as one native kernel, one CTA a row."""

from __future__ import annotations

import ctypes
import math

import torch

from fusions.ops import arguments
from fusions.ops.native import code, parameters
from fusions.ops.native.code import Behaviour
from fusions.ops.native.launch import launcher

DEPLOYED = code.DEPLOYED["rmsnorm"]


class _Parameters(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_longlong),
        ("out_stride", ctypes.c_longlong),
        ("width", ctypes.c_int),
        ("vec", ctypes.c_int),
        ("eps", ctypes.c_float),
        *parameters.PDL_FIELDS,
    ]


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
    arguments.check_rows("rmsnorm", "x", x)
    rows, width = x.shape
    if not 1 <= width < 1 << 30:
        raise ValueError(f"rmsnorm: x has {width} columns, expected 1 to 2^30 - 1")
    arguments.check_rows("rmsnorm", "weight", weight, dims=1)
    arguments.check_shape("rmsnorm", "weight", weight, (width,), "one gain a column of x")
    if out is not None:
        arguments.check_out("rmsnorm", out, rows, width)
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

    vec = math.gcd(8, width)
    threads = (min(1024, width // vec) + 31) // 32 * 32
    launch = launcher("rmsnorm", behaviour, device, _Parameters)
    fields = launch.here().fields
    fields.x, fields.weight, fields.out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    fields.x_stride, fields.out_stride = x.stride(0), out.stride(0)
    fields.width, fields.vec, fields.eps = width, vec, eps
    fields.delay_ns, fields.flag, fields.stamps = delay_ns, flag, None if stamps is None else stamps.data_ptr()
    launch((rows, 1), threads, 0, pdl, parameters.current_stream(device))
    return out
