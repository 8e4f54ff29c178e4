"""The kernels of ``csrc/subject.cu``: launched on a stream, or put into a graph as nodes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..calls import checked
from ..kernels import harness_code

BLOCK = 512
COPY_CTAS, GRADE_CTAS, WATCH_CTAS = 16, 264, 16
"""Most CTAs of a launch. An early-release producer and a watcher must leave room for the kernel beside them."""


@dataclass(frozen=True)
class Launch:
    """One launch: a kernel's handle, its CTAs, its arguments with their C types, and the tensors that they point to."""

    kernel: Any
    ctas: int
    values: tuple[Any, ...]
    types: tuple[Any, ...]
    held: tuple[Any, ...] = ()

    def node_params(self) -> Any:
        from cuda.bindings import driver

        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.kern = self.kernel
        params.gridDimX, params.gridDimY, params.gridDimZ = self.ctas, 1, 1
        params.blockDimX, params.blockDimY, params.blockDimZ = BLOCK, 1, 1
        params.sharedMemBytes = 0
        params.kernelParams = (self.values, self.types)
        return params

    def run(self, stream: int) -> None:
        """Launches it on a stream (a raw handle), without the PDL attribute."""
        from cuda.bindings import driver

        checked(
            driver.cuLaunchKernel(
                driver.CUfunction(int(self.kernel)), self.ctas, 1, 1, BLOCK, 1, 1, 0, driver.CUstream(stream),
                (self.values, self.types), 0,
            ),
            "cuLaunchKernel",
        )  # fmt: skip


@cache
def _handle(device_index: int, name: str) -> Any:
    from cuda.bindings import driver

    return driver.CUkernel(int(harness_code(device_index, "subject.cu").get_kernel(name).handle))


_P, _U32, _U64, _I32 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int


def _ctas(words: int, most: int) -> int:
    return max(1, min(most, -(-words // BLOCK)))


def copy(
    device: int,
    table: Any,
    packed: Any,
    counters: Any,
    *,
    offset: int = 0,
    gather: bool = False,
    early: bool = False,
    delay_us: float = 0.0,
) -> Launch:
    """Between words and their packed content; see ``csrc/subject.cu``.

    Args:
        table: int64 ``[n, 2]``.
        packed: uint8 ``[pool, bytes]``, bytes a multiple of 16.
        counters: int64 ``[5]``.
    """
    words = len(table)
    values = (
        table.data_ptr(), words, packed.data_ptr(), packed.shape[1] // 16, packed.shape[0], counters.data_ptr(), offset,
        int(gather), int(early), round(delay_us * 1000),
    )  # fmt: skip
    types = (_P, _U32, _P, _U32, _U32, _P, _U32, _I32, _I32, _U64)
    most = COPY_CTAS if early else GRADE_CTAS
    return Launch(_handle(device, "pdl_stress_copy"), _ctas(words, most), values, types, (table, packed, counters))


def grade(device: int, table: Any, expected: Any, counters: Any, last_bad: Any, seen: Any, marks: Any) -> Launch:
    """Compares, counts, ends the replay. ``seen``: uint8 ``[bytes]``, ``marks``: uint8 ``[words of a packed row]``."""
    words = len(table)
    values = (
        table.data_ptr(), words, expected.data_ptr(), expected.shape[1] // 16, expected.shape[0], counters.data_ptr(),
        last_bad.data_ptr(), seen.data_ptr(), marks.data_ptr(),
    )  # fmt: skip
    types = (_P, _U32, _P, _U32, _U32, _P, _P, _P, _P)
    return Launch(
        _handle(device, "pdl_stress_grade"), _ctas(words, GRADE_CTAS), values, types, (table, expected, seen, marks)
    )


def watch(device: int, table: Any, expected: Any, counters: Any, limit_us: float, lag: Any) -> Launch:
    """Notes how long after its start the last word came to hold what is expected. ``lag``: int64 ``[2]``."""
    words = len(table)
    values = (
        table.data_ptr(), words, expected.data_ptr(), expected.shape[1] // 16, expected.shape[0], counters.data_ptr(),
        round(limit_us * 1000), lag.data_ptr(),
    )  # fmt: skip
    types = (_P, _U32, _P, _U32, _U32, _P, _U64, _P)
    return Launch(_handle(device, "pdl_stress_watch"), _ctas(words, WATCH_CTAS), values, types, (table, expected, lag))
