"""The harness's own kernels: compiled at run time, launched on a torch stream."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from ..contract import Trigger
from ..errors import DeviceError
from ..jobs import HOLDS
from .calls import checked

BLOCK = 512
"""Threads per CTA of the harness kernels; one 16-byte word a thread."""

COUNTERS = ("replay", "bad", "words", "first_bad", "ticket")
"""Device counters, unsigned 64 bit, in the order of ``csrc/harness.cu``."""

NEVER = 2**64 - 1
"""Content of ``first_bad`` while no replay was bad."""

_PLACES = {place: index for index, place in enumerate(Trigger)}


class TorchStream:
    """Lets ``cuda.core`` use a torch stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.stream.cuda_stream)


@cache
def harness_code(device_index: int, file: str) -> Any:
    """Kernels of the harness: a file of ``csrc``, compiled for a device, kept for the life of the process."""
    from cuda.core import Device, Program, ProgramOptions

    device = Device(device_index)
    device.set_current()
    major, minor = device.compute_capability
    source = files("pdl_stress.cuda").joinpath(f"csrc/{file}").read_text()
    try:
        program = Program(source, "c++", ProgramOptions(std="c++17", arch=f"sm_{major}{minor}"))
        return program.compile("cubin")
    except Exception as error:
        raise DeviceError(f"NVRTC could not compile the harness kernels for sm_{major}{minor}: {error}") from error


class Harness:
    """Launches the harness kernels on one torch stream of one device."""

    def __init__(self, torch_stream: Any, device_index: int) -> None:
        from cuda.core import Device

        self.module = harness_code(device_index, "harness.cu")
        self._source = self.module.get_kernel("pdl_stress_source")
        self._boundary = self.module.get_kernel("pdl_stress_boundary")
        self._stream = Device(device_index).create_stream(TorchStream(torch_stream))

    def _launch(self, kernel: Any, grid: tuple[int, int], pdl: bool, *args: Any) -> None:
        from cuda.core import LaunchConfig, launch

        config = LaunchConfig(grid=(*grid, 1), block=(BLOCK, 1, 1), programmatic_stream_serialization=pdl)
        launch(self._stream, config, kernel, *args)

    def source(
        self,
        truth: int,
        out: int,
        words: int,
        *,
        table: int,
        stride: int,
        pool: int,
        counters: int,
        offset: int,
        trigger: Trigger,
        fence: bool,
        delay_us: float,
        stamps: int,
        pdl: bool,
    ) -> None:
        """Writes ``words`` 16-byte words of true data: to ``out``, or, unless it is 0, where ``table`` says; see
        ``csrc/harness.cu``. Pointers are integers."""
        u32, u64, i32 = np.uint32, np.uint64, np.int32
        self._launch(
            self._source, (-(-words // BLOCK), 1), pdl,
            truth, out, table, u32(words), u32(stride), u32(pool), counters, u32(offset),
            i32(_PLACES[trigger]), i32(fence), u64(round(delay_us * 1000)), stamps,
        )  # fmt: skip

    def boundary(
        self,
        rows: int,
        words: int,
        *,
        count: int,
        reference: int,
        stride: int,
        poison: int,
        pool: int,
        first_row: int,
        advance: int,
        counters: int,
        last_bad: int,
        snapshot: int,
        marks: int,
        extra: int = 0,
        extra_words: int = 0,
        grade: bool = True,
    ) -> None:
        """Grades ``count`` rows of ``words`` words, poisons them, counts; see ``csrc/harness.cu``."""
        u32, i32 = np.uint32, np.int32
        blocks = -(-max(words, extra_words) // BLOCK)
        self._launch(
            self._boundary, (blocks, count), False,
            rows, u32(words), reference, u32(stride), poison, u32(pool), u32(first_row), u32(advance), counters,
            last_bad, snapshot, marks, extra, u32(extra_words), i32(grade),
        )  # fmt: skip


NEIGHBOUR_US = 10.0
"""How long a neighbour runs in each replay: about as long as a short chain."""

STREAMED_BYTES = 1 << 28
"""What the streaming neighbour rewrites: several times any L2."""


class Neighbour:
    """A kernel that runs beside the chain, on its own stream, and touches none of its memory.

    Args:
        what: one of :data:`pdl_stress.jobs.NEIGHBOURS`.
        torch_stream: another stream than the chain's.
    """

    def __init__(self, what: str, harness: Harness, torch_stream: Any, device_index: int) -> None:
        import torch
        from cuda.core import Device

        self.stream = torch_stream
        self._stream = Device(device_index).create_stream(TorchStream(torch_stream))
        properties = torch.cuda.get_device_properties(device_index)
        sms, nanoseconds = properties.multi_processor_count, np.uint64(round(NEIGHBOUR_US * 1000))
        self._shared, self._data = 0, None
        self._arguments: tuple[Any, ...]
        if what == HOLDS:
            self._kernel, self._grid, self._block = harness.module.get_kernel("pdl_stress_hold"), sms // 2, 32
            self._shared = _all_shared_memory(self._kernel, device_index)
            self._arguments = (nanoseconds,)
        else:
            self._kernel, self._grid, self._block = harness.module.get_kernel("pdl_stress_stream"), sms, BLOCK
            self._data = torch.zeros(STREAMED_BYTES // 4, dtype=torch.int32, device=torch_stream.device)
            self._arguments = (self._data.data_ptr(), np.uint64(STREAMED_BYTES // 16), nanoseconds)

    def launch(self) -> None:
        """One launch on the neighbour's stream."""
        from cuda.core import LaunchConfig, launch

        config = LaunchConfig(grid=self._grid, block=self._block, shmem_size=self._shared)
        launch(self._stream, config, self._kernel, *self._arguments)


def _all_shared_memory(kernel: Any, device_index: int) -> int:
    """Lets a kernel have all the shared memory that a CTA of this device may have; returns the bytes."""
    from cuda.bindings import driver

    device = driver.CUdevice(device_index)
    which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    size = int(checked(driver.cuDeviceGetAttribute(which, device), "cuDeviceGetAttribute"))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(
        driver.cuKernelSetAttribute(limit, size, driver.CUkernel(int(kernel.handle)), device), "cuKernelSetAttribute"
    )
    return size
