"""TF32 tensor cores for the FP32 matrix products of a few lines, on or off, and what was set before afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.RLock()


@contextmanager
def tf32(enabled: bool = True) -> Iterator[None]:
    """FP32 matrix products on CUDA that are launched inside run on TF32 tensor cores (``enabled``), or in full FP32.

    On exit the former setting is back, after an exception too. Scopes nest. TF32 needs compute capability 8.0;
    elsewhere, and on the CPU, nothing changes. cuBLAS is told at launch: a graph captured inside keeps the choice, and
    a backward pass that runs later is not inside. ``NVIDIA_TF32_OVERRIDE=0`` in the environment keeps TF32 off.

    Threads: the setting is the process's, so FP32 products that *other* threads launch meanwhile follow it as well.
    Scopes of several threads exclude each other: one waits for the other to end, so neither restores the other's
    value. Keep a scope short, and do not wait for another thread inside.

    PyTorch has two switches, ``torch.backends.cuda.matmul.allow_tf32`` and, since 2.9,
    ``torch.backends.cuda.matmul.fp32_precision``. Once a process has mixed them, reading the first raises RuntimeError;
    then only the second is used. A value that ``fp32_precision`` had inherited is its own after a scope that changed
    it.
    """
    with _LOCK:
        restore = _switch(enabled)
        try:
            yield
        finally:
            restore()


def is_on() -> bool:
    """Whether FP32 matrix products may use TF32 now, by either switch."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return bool(torch.backends.cuda.matmul.allow_tf32) if precision is None else precision == "tf32"


def _switch(enabled: bool) -> Callable[[], None]:
    """Sets it, by the one switch that allows to restore everything.

    The older switch also sets what ``torch.get_float32_matmul_precision`` returns, to ``high`` or ``highest``. With it,
    both can be read by other threads meanwhile, such as a compiled function's guards; but ``medium`` would be lost.
    """
    if is_on() == enabled:
        return lambda: None
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # before 2.9 there is none
    level = _readable(torch.get_float32_matmul_precision)
    if precision is None:
        matmul.allow_tf32 = enabled
        return lambda: torch.set_float32_matmul_precision(str(level))
    if _readable(lambda: matmul.allow_tf32) is not None and (enabled or level == "high"):
        matmul.allow_tf32 = enabled

        def restore() -> None:
            matmul.allow_tf32 = not enabled
            matmul.fp32_precision = precision  # "none", which inherits, has become "ieee"

        return restore
    matmul.fp32_precision = "tf32" if enabled else "ieee"

    def restore_new() -> None:
        matmul.fp32_precision = precision

    return restore_new


def _readable(read: Callable[[], object]) -> object | None:
    """A setting, or ``None`` where reading it raises: the process has used both switches."""
    try:
        return read()
    except RuntimeError:
        return None
