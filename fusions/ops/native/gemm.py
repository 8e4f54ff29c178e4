"""tinygemm2: a BF16 projection of few rows as one native kernel."""

from __future__ import annotations

import ctypes

import torch

from fusions.ops import arguments
from fusions.ops.native import code, parameters
from fusions.ops.native.code import Behaviour
from fusions.ops.native.launch import launcher
from fusions.ops.native.tensor_map import tensor_map

DEPLOYED = code.DEPLOYED["tinygemm2"]

_THREADS, _FEATURES, _ROWS = 384, 16, 8
_STAGE_BYTES = 4 * 64 * 2 * (_FEATURES + _ROWS)  # as in the source
_MAX_STAGES = 16


class _Parameters(ctypes.Structure):
    _fields_ = [
        ("weight_map", ctypes.c_uint64 * 16),
        ("x_map", ctypes.c_uint64 * 16),
        ("out", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out_stride", ctypes.c_longlong),
        ("rows", ctypes.c_int),
        ("width", ctypes.c_int),
        ("stages", ctypes.c_int),
        *parameters.PDL_FIELDS,
    ]


def tinygemm2(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = True,
    behaviour: Behaviour = DEPLOYED,
    delay_ns: int = 0,
    flag: int = 0,
    stamps: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[M, N] = x[M, K] @ weight[N, K]^T (+ bias[N]), BF16 in and out, FP32 accumulation, rounded once.

    x, weight: BF16, 16-byte aligned, unit last stride, row stride a multiple of 8 and at least K. bias: BF16 [N]
    contiguous. out: BF16 [M, N] with separate rows, unit last stride, any alignment; must not overlap x. K % 64 == 0,
    N % 16 == 0. Deterministic: an element's bits depend on its own row of x, row of weight and bias alone, not on M, N,
    strides or `pdl`. K is summed by four warps (warp w: k in [1024 i + 256 w, + 256), ascending), then
    ((w0 + w1) + w2) + w3, then bias: the order of TensorRT-LLM's and FlashInfer's kernel of this name.

    pdl: launch with the PDL attribute. By contract weight and bias are independent operands: as deployed they are read
    before the wait, so no kernel in flight may write them. behaviour: the PDL behaviour compiled in. delay_ns, flag,
    stamps (four 64-bit integers set to [max, max, 0, 0] by the caller): parameters of every behaviour, read by those
    compiled to. M = 0 launches nothing. Not differentiable. Raises ValueError for other arguments and for a GPU older
    than sm_90.
    """
    arguments.check_rows("tinygemm2", "x", x)
    arguments.check_rows("tinygemm2", "weight", weight)
    rows, width = x.shape
    features = weight.shape[0]
    if weight.shape[1] != width:
        raise ValueError(f"tinygemm2: x has K = {width} and weight K = {weight.shape[1]}, expected [M, K] and [N, K]")
    if width < 64 or width % 64:
        raise ValueError(
            f"tinygemm2: K = {width}, expected a positive multiple of 64; pad x and weight with zero columns"
        )
    if features < 16 or features % 16:
        raise ValueError(f"tinygemm2: N = {features}, expected a positive multiple of 16; pad weight with zero rows")
    if not rows <= 65535 * _ROWS:
        raise ValueError(f"tinygemm2: M = {rows}, expected at most {65535 * _ROWS}; use a GEMM made for many rows")
    if bias is not None:
        arguments.check_rows("tinygemm2", "bias", bias, dims=1)
        arguments.check_shape("tinygemm2", "bias", bias, (features,), "one value a row of weight")
    if out is not None:
        arguments.check_out("tinygemm2", out, rows, features)
    x_stride, weight_stride = _row_stride("x", x), _row_stride("weight", weight)
    parameters.check_pdl("tinygemm2", behaviour, delay_ns, stamps)
    device = parameters.check_devices("tinygemm2", x, {"weight": weight, "bias": bias, "out": out, "stamps": stamps})
    if out is None:
        out = x.new_empty((rows, features))
    if rows == 0:
        return out
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return tinygemm2(
                x, weight, bias, out=out, pdl=pdl, behaviour=behaviour, delay_ns=delay_ns, flag=flag, stamps=stamps
            )

    launch = launcher("tinygemm2", behaviour, device, _Parameters)
    stages, shared = _ring(width, launch.shared_limit)
    fields = launch.here().fields
    fields.weight_map = tensor_map(weight.data_ptr(), features, width, weight_stride, _FEATURES)
    fields.x_map = tensor_map(x.data_ptr(), rows, width, x_stride, _ROWS)
    fields.out, fields.bias = out.data_ptr(), None if bias is None else bias.data_ptr()
    fields.out_stride, fields.rows, fields.width, fields.stages = out.stride(0), rows, width, stages
    fields.delay_ns, fields.flag, fields.stamps = delay_ns, flag, None if stamps is None else stamps.data_ptr()
    launch(
        (features // _FEATURES, (rows + _ROWS - 1) // _ROWS), _THREADS, shared, pdl, parameters.current_stream(device)
    )
    return out


def _row_stride(name: str, tensor: torch.Tensor) -> int:
    """The row stride of an operand that TMA reads, in elements."""
    rows, width = tensor.shape
    if tensor.data_ptr() % 16:
        raise ValueError(f"tinygemm2: {name} starts at an address that is no multiple of 16 bytes; pass {name}.clone()")
    if rows <= 1:
        return width
    stride = tensor.stride(0)
    if stride % 8 or stride < width:
        raise ValueError(
            f"tinygemm2: rows of {name} are {stride} elements apart, expected a multiple of 8, at least K = {width}; "
            f"pass {name}.contiguous()"
        )
    return stride


def _ring(width: int, shared_limit: int) -> tuple[int, int]:
    """Stages of the ring (a multiple of 4: each compute warp owns every fourth), and the shared memory they take."""
    align = 1024
    turns = (width + 1023) // 1024
    stages = min(_MAX_STAGES, 4 * turns, (shared_limit - align) // _STAGE_BYTES // 4 * 4)
    if stages < 4:
        raise ValueError(
            f"tinygemm2: a CTA has {shared_limit} bytes of shared memory on this GPU, needed {4 * _STAGE_BYTES + align}"
        )
    return stages, stages * _STAGE_BYTES + align
