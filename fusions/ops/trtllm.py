"""TensorRT-LLM's RMSNorm and tinygemm2 behind the interface of the native ops.

**This adapter has been tested against stand-ins registered under the ops' names. It has not met a real TensorRT-LLM.**

Both ops return a new tensor, and so do these functions: there is no ``out``. Nor is there ``pdl``, which cannot be
chosen: tinygemm2 is always launched with the PDL attribute, and the RMSNorm with it if ``TRTLLM_ENABLE_PDL=1`` (read
at every call; 0 if unset in the version read, and said to be 1 in later ones: set it to be sure).

Ops are looked up under ``torch.ops.trtllm`` at every call. Where they are registered already nothing is imported;
otherwise ``tensorrt_llm`` is, which starts MPI.
"""

from __future__ import annotations

import functools
import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fusions.libraries import TENSORRT_LLM, TRTLLM_BAD_ABOVE_K, KnownBad, Refusal, Unavailable, known_bad_allowed
from fusions.ops import preconditions

RMSNORM, TINYGEMM2 = "flashinfer_rmsnorm", "tinygemm2"

CAPABILITIES = (90, 100, 103)
"""Compute capabilities that tinygemm2 supports in every version seen."""

UNKNOWN_CAPABILITIES = (107,)
"""Those that some version may have added."""

_zeros: dict[tuple[torch.device, int], torch.Tensor] = {}


def available(*ops: str) -> None:
    """Returns if the ops (default: both) are registered, or TensorRT-LLM is installed, imports, and registers them.

    Raises:
        Unavailable: with the reason, and what to do.
    """
    wanted = ops or (RMSNORM, TINYGEMM2)
    if all(map(registered, wanted)):
        return
    if not TENSORRT_LLM.installed():
        raise Unavailable(str(TENSORRT_LLM.refusal()))
    if TENSORRT_LLM.module not in sys.modules:
        try:
            importlib.import_module(TENSORRT_LLM.module)
        except Exception as error:  # its native libraries and MPI may raise anything
            raise Unavailable(
                f"TensorRT-LLM does not import: {type(error).__name__}: {error}; reinstall tensorrt-llm and what it "
                "needs, for this Python, torch and CUDA"
            ) from error
    missing = [f"torch.ops.trtllm.{op}" for op in wanted if not registered(op)]
    if missing:
        version = TENSORRT_LLM.version() or "of unknown version"
        raise Unavailable(
            f"tensorrt-llm {version} registers no {' and no '.join(missing)}; use another version"
            + (" (this op comes with FlashInfer: is it installed?)" if missing[0].endswith(RMSNORM) else "")
        )


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """x[m, :] * rsqrt(mean(x[m, :]^2) + eps) * weight in FP32, rounded once to BF16, as a new tensor [M, H].

    The op calls ``flashinfer.norm.rmsnorm``, whose own choice of kernel holds: see :mod:`fusions.ops.flashinfer`, also
    for the operands. M >= 1. On torch's current stream.

    Raises:
        Unavailable: the op is not there.
        ValueError: operands that the kernels cannot take.
    """
    op = "TensorRT-LLM rmsnorm"
    preconditions.check_rmsnorm(op, x, weight, None)
    if x.shape[0] < 1:
        raise ValueError(f"{op}: x has no rows, expected at least one; skip the call where there is none")
    available(RMSNORM)
    with _device_of(x):
        return _tensor(op, torch.ops.trtllm.flashinfer_rmsnorm(x, weight, eps))


def tinygemm2(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, force: bool = False
) -> torch.Tensor:
    """x[M, K] @ weight[N, K]^T (+ bias[N]), BF16, FP32 accumulation, rounded once, as a new tensor [M, N].

    All contiguous; x and weight 16-byte aligned; M >= 1, K % 8 == 0, N % 16 == 0. The op checks none of these: M = 0
    shows as an error of some later call, an unaligned operand or an odd K as a bad tensor map, an odd N as reads past
    the end of the bias. On torch's current stream.

    The op demands a bias. Without one it gets zeros, made once per device and N, and kept; the first such call waits
    for the device, since the kernel reads its bias before its own wait, and must not be captured. The threads that load
    x wait; weight and bias are read with no wait, so no kernel in flight may write them. It triggers directly after the
    wait or, from pull request #14537 on, before its stores.

    force: run a version that is known bad, or on a GPU that is not known to be supported. A GPU that is known not to be
    is refused in any case, and never tried: without enough shared memory the op ends the process.

    Raises:
        KnownBad: K > 1024 in a version from before #15338 (``FUSIONS_ALLOW_KNOWN_BAD=1`` or ``force`` overrides).
        Unavailable: the op is not there, or not for this GPU.
        ValueError: operands that the kernel cannot take.
    """
    op = "TensorRT-LLM tinygemm2"
    preconditions.check_tinygemm2(op, x, weight, bias, None, smallest_m=1)
    _check_version(op, x.shape[1], force)  # before the import, which starts MPI
    if x.is_cuda:
        _check_capability(op, torch.cuda.get_device_capability(x.device), force)
    available(TINYGEMM2)
    _check_version(op, x.shape[1], force)  # and after it: without metadata, only the module tells its version
    with _device_of(x):
        if bias is None:
            bias = zero_bias(x.device, weight.shape[0])
        return _tensor(op, torch.ops.trtllm.tinygemm2(x, weight, bias))


def _check_version(op: str, k: int, force: bool) -> None:
    if k > TRTLLM_BAD_ABOVE_K and not force and not known_bad_allowed():
        refusal = version_refusal(TENSORRT_LLM.loaded())
        if refusal:
            raise KnownBad(f"{op} with K = {k}: {refusal}, and so does force=True")


@functools.cache
def version_refusal(loaded: bool) -> Refusal | None:
    """Read once before and once after the import: reading metadata takes a millisecond."""
    del loaded
    return TENSORRT_LLM.version_refusal("tinygemm2")


def registered(op: str) -> bool:
    """Whether ``torch.ops.trtllm`` has the op now. Imports nothing."""
    return hasattr(torch.ops.trtllm, op)


def _check_capability(op: str, capability: tuple[int, int], force: bool) -> None:
    """From the table: the op itself, asked, may end the process."""
    number = capability[0] * 10 + capability[1]
    if number in CAPABILITIES or (number in UNKNOWN_CAPABILITIES and force):
        return
    supported = ", ".join(f"{n // 10}.{n % 10}" for n in CAPABILITIES)
    what = f"{op}: the GPU has compute capability {capability[0]}.{capability[1]}, which the op"
    if number in UNKNOWN_CAPABILITIES:
        raise Unavailable(
            f"{what} supports in no version seen (they support {supported}); if yours does, pass force=True"
        )
    raise Unavailable(f"{what} does not support; expected one of {supported}; use other ops")


def zero_bias(device: torch.device, columns: int) -> torch.Tensor:
    """Zeros that are complete before any kernel that reads them without a wait can start."""
    bias = _zeros.get((device, columns))
    if bias is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"TensorRT-LLM tinygemm2: the first call without a bias for N = {columns} fills one, which a capture "
                "would only record; call it once before the capture, or pass a bias"
            )
        bias = torch.zeros(columns, dtype=torch.bfloat16, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        bias = _zeros.setdefault((device, columns), bias)
    return bias


def _device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's device the current one: the op asks the current one what it is."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _tensor(op: str, result: object) -> torch.Tensor:
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"{op} returned {type(result).__name__}, expected a tensor: the op is of another version")
    return result
