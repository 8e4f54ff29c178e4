"""FlashInfer's RMSNorm and tinygemm2 behind the interface of the native ops.

Which kernel runs is FlashInfer's choice (``kernel="library"``) or the one that the native kernels are compared with
(``kernel="reference"``). What follows was read in the sources of FlashInfer 0.7.4.

rmsnorm (``flashinfer/norm/__init__.py``): a CuTe DSL kernel, or the CUDA one of ``include/flashinfer/norm.cuh`` where
nvidia-cutlass-dsl is missing, where it does not know the GPU, and where ``FLASHINFER_USE_CUDA_NORM=1``. That variable
is read once, when ``flashinfer.norm`` is imported, so one process has one choice.

tinygemm2 (``flashinfer/gemm/routergemm.py``): generated wgmma programs (sm_90) and tcgen05 programs (sm_100, 103, 107)
for the shapes of a table, a generated kernel with a bias on sm_100, 103 and 107, and ``csrc/tinygemm2.cu`` elsewhere:
the reference. Three variables, read at every call, turn the others off. All give the same bits, says FlashInfer.

Kernels are built with nvcc and ninja, or by the CuTe DSL, at the first call for a shape: warm up before a capture.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from fusions.libraries import FLASHINFER, OpFailed, Unavailable
from fusions.ops import preconditions

KERNELS = ("library", "reference")

CUDA_NORM = "FLASHINFER_USE_CUDA_NORM"
TINYGEMM2_OTHERS = (
    "FLASHINFER_DISABLE_TINYGEMM2_WGMMA",
    "FLASHINFER_DISABLE_TINYGEMM2_TCGEN05",
    "FLASHINFER_DISABLE_TINYGEMM2_SM100",
)
LOG_LINES = 20

_SMALLEST_K = 64  # of the generated sm_100 kernel, with a bias; FlashInfer documents multiples of 64, and tests 360
_ENVIRONMENT = threading.RLock()
_norm_imported: tuple[Any, str] = (None, "")  # flashinfer.norm as we imported it, and for which kernel
_good: dict[str, Any] = {}  # modules whose version was checked: reading metadata takes a millisecond


def available(kernel: str = "library") -> None:
    """Returns if FlashInfer is installed, new enough, and imports. It is imported as ``rmsnorm(kernel=kernel)`` needs.

    Raises:
        Unavailable: with the reason, and what to do.
    """
    _check_kernel("FlashInfer", kernel)
    _norm(kernel)
    _import("flashinfer.gemm")


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor,
    eps: float = 1e-6,
    pdl: bool = True,
    kernel: str = "library",
) -> torch.Tensor:
    """out[m, :] = x[m, :] * rsqrt(mean(x[m, :]^2) + eps) * weight in FP32, rounded once to BF16; returns ``out``.

    x, out: BF16 [M, H], unit last stride, any row stride that is a multiple of gcd(8, H); weight: BF16 [H]; all 16-byte
    aligned. M = 0 launches nothing. On torch's current stream.

    pdl: launch with the PDL attribute. The CUDA kernel holds its wait and its trigger either way; the CuTe one has them
    only then. Every thread waits before its first read, of the weight too, and triggers after its own stores; no
    barrier stands between, so one warp of a CTA may trigger while another still stores.

    kernel: ``library``, what FlashInfer picks by itself; ``reference``, its CUDA kernel. For that the variable
    ``FLASHINFER_USE_CUDA_NORM`` is set while FlashInfer is imported, and put back.

    Raises:
        Unavailable: no usable FlashInfer, or one that was imported with the other choice in effect: it is made once a
            process. If somebody else imported FlashInfer with the variable set and then unset it, ``library`` cannot
            tell that from its own choice.
        ValueError: operands that the kernels cannot take.
        OpFailed: FlashInfer could not build the kernel.
    """
    op = "FlashInfer rmsnorm"
    _check_kernel(op, kernel)
    preconditions.check_rmsnorm(op, x, weight, out)
    norm = _norm(kernel)
    if x.shape[0]:
        with _device_of(x), _build_failures(op):
            norm.rmsnorm(x, weight, eps=eps, out=out, enable_pdl=pdl)
    return out


def tinygemm2(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    pdl: bool = True,
    kernel: str = "library",
) -> torch.Tensor:
    """out[M, N] = x[M, K] @ weight[N, K]^T (+ bias[N]), BF16, FP32 accumulation, rounded once; returns ``out``.

    All contiguous; x, weight and out 16-byte aligned; K % 8 == 0 and K >= 64, N % 16 == 0. FlashInfer checks neither K
    nor alignment. M = 0 launches nothing. On torch's current stream.

    pdl: launch with the PDL attribute. Without it another instantiation runs, that has neither wait nor trigger. With
    it the threads that load x wait and trigger directly after; weight and bias are read with no wait, so no kernel in
    flight may write them.

    kernel: ``library``, what FlashInfer picks; ``reference``, tinygemm2 proper. For that three variables are set around
    the call and put back, under a lock of this module. Calls of FlashInfer's own function from other threads see them
    meanwhile, and get the reference too.

    Raises:
        Unavailable: no usable FlashInfer; or ``library``, and the environment forbids FlashInfer one of its kernels.
        ValueError: operands that the kernels cannot take.
        OpFailed: FlashInfer could not build the kernel.
    """
    op = "FlashInfer tinygemm2"
    _check_kernel(op, kernel)
    preconditions.check_tinygemm2(op, x, weight, bias, out, smallest_k=_SMALLEST_K)
    gemm = _import("flashinfer.gemm")
    forced = [name for name in TINYGEMM2_OTHERS if os.environ.get(name) == "1"]
    if kernel == "library" and forced:
        raise Unavailable(
            f"{op}: {forced[0]}=1 keeps FlashInfer from choosing a kernel by itself; unset it, or choose "
            'kernel="reference" (--ops flashinfer-reference)'
        )
    if x.shape[0]:
        chosen = _environment(dict.fromkeys(TINYGEMM2_OTHERS, "1")) if kernel == "reference" else nullcontext()
        with _device_of(x), _build_failures(op), chosen:
            gemm.tinygemm_bf16(_dense_row(x), weight, _dense_row(out), bias=bias, use_pdl=pdl)
    return out


def kept_cubins() -> list[Path]:
    """The machine code that the CuTe DSL kept for this process's environment: only where ``CUTE_DSL_KEEP`` names
    ``cubin`` (or ``all``) and ``CUTE_DSL_DUMP_DIR`` a folder; else it keeps none, and there is nothing to be found."""
    folder = os.environ.get("CUTE_DSL_DUMP_DIR")
    kept = os.environ.get("CUTE_DSL_KEEP", "").replace(" ", "").split(",")
    return sorted(Path(folder).glob("**/*.cubin")) if folder and {"cubin", "all"} & set(kept) else []


def _norm(kernel: str) -> Any:
    """``flashinfer.norm`` with the choice of ``kernel`` in effect."""
    global _norm_imported
    with _ENVIRONMENT:
        forced = os.environ.get(CUDA_NORM) == "1"
        loaded = sys.modules.get("flashinfer.norm")
        cuda = getattr(loaded, "_USE_CUDA_NORM", None)  # private: a version without it is believed to read the variable
        if kernel == "library" and forced and cuda is not False:
            raise Unavailable(
                f"FlashInfer rmsnorm: {CUDA_NORM}=1 keeps FlashInfer from choosing a kernel by itself; unset it, or "
                'choose kernel="reference" (--ops flashinfer-reference)'
            )
        if loaded is None:
            with _environment({CUDA_NORM: "1"} if kernel == "reference" else {}):
                loaded = _import("flashinfer.norm")
            _norm_imported = (loaded, kernel)
            cuda = getattr(loaded, "_USE_CUDA_NORM", None)
    norm = _import("flashinfer.norm")
    ours = _norm_imported[1] if _norm_imported[0] is norm else ""
    if kernel == "reference" and not (cuda or (cuda is None and (ours == "reference" or forced))):
        raise Unavailable(
            "FlashInfer rmsnorm: FlashInfer was imported with its own choice of kernel, which cannot be changed later; "
            f"set {CUDA_NORM}=1 before the process starts, or call this before anything imports FlashInfer"
        )
    if kernel == "library" and ours == "reference":
        raise Unavailable(
            'FlashInfer rmsnorm: FlashInfer was imported for kernel="reference", which cannot be changed later; '
            'use kernel="reference", or a new process for kernel="library"'
        )
    return norm


def _import(name: str) -> Any:
    """A module of FlashInfer, once its version is known to be good. Raises Unavailable."""
    if sys.modules.get(name) is None:
        refusal = FLASHINFER.refusal()
        if refusal:
            raise Unavailable(str(refusal))
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken native part may raise anything
            raise Unavailable(
                f"FlashInfer does not import: {type(error).__name__}: {error}; reinstall flashinfer-python and what it "
                "needs, for this Python, torch and CUDA"
            ) from error
    module = sys.modules[name]
    if module is not _good.get(name):
        refusal = FLASHINFER.version_refusal()
        if refusal:
            raise Unavailable(str(refusal))
        _good[name] = module
    return module


def _dense_row(tensor: torch.Tensor) -> torch.Tensor:
    """A single row may have any stride and is dense all the same; FlashInfer's tensor maps go by the stride."""
    columns = tensor.shape[1]
    if tensor.shape[0] == 1 and tensor.stride(0) != columns:
        return tensor.as_strided((1, columns), (columns, 1))
    return tensor


def _check_kernel(op: str, kernel: str) -> None:
    if kernel not in KERNELS:
        raise ValueError(f"{op}: kernel={kernel!r} is unknown; choose one of {', '.join(KERNELS)}")


def _device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's device the current one: FlashInfer asks the current one for its limits."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables, and puts back what was there. One thread of ours at a time: else one could restore another's."""
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextmanager
def _build_failures(op: str) -> Iterator[None]:
    """Turns a failed build into OpFailed. Everything else, such as a CUDA error, is not ours to explain."""
    try:
        yield
    except (RuntimeError, FileNotFoundError) as error:
        if not _is_build_failure(error):
            raise
        log = "\n".join(f"  {line}" for line in str(error).rstrip().splitlines()[-LOG_LINES:])
        raise OpFailed(
            f"{op}: FlashInfer could not build its kernel. The end of its log:\n{log}\n"
            "It needs ninja, and nvcc of torch's CUDA version: set CUDA_HOME to the toolkit. Where the linker does not "
            "find -lcudart or -lcuda, put the toolkit's lib and lib/stubs (or lib64 and lib64/stubs) in LIBRARY_PATH. "
            "FLASHINFER_JIT_VERBOSE=1 prints the whole log; FLASHINFER_DISABLE_JIT must not be set."
        ) from error


def _is_build_failure(error: Exception) -> bool:
    if isinstance(error, FileNotFoundError):
        return os.path.basename(str(error.filename)) in ("ninja", "nvcc", "which")
    text = str(error)
    # FlashInfer has no class for them, except where building is forbidden and the kernel is not there.
    words = ("Ninja build failed", "Could not find nvcc", "nvcc not found")
    return type(error).__name__ == "MissingJITCacheError" or any(word in text for word in words)
