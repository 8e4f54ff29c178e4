"""The harness's own kernels: compiled at run time, launched on a torch stream."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from ..contract import Trigger
from ..errors import DeviceError

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
def _module(device_index: int) -> Any:
    from cuda.core import Device, Program, ProgramOptions

    device = Device(device_index)
    device.set_current()
    major, minor = device.compute_capability
    source = files("pdl_stress.cuda").joinpath("csrc/harness.cu").read_text()
    try:
        program = Program(source, "c++", ProgramOptions(std="c++17", arch=f"sm_{major}{minor}"))
        return program.compile("cubin")
    except Exception as error:
        raise DeviceError(f"NVRTC could not compile the harness kernels for sm_{major}{minor}: {error}") from error


class Harness:
    """Launches the harness kernels on one torch stream of one device."""

    def __init__(self, torch_stream: Any, device_index: int) -> None:
        from cuda.core import Device

        module = _module(device_index)
        self._source = module.get_kernel("pdl_stress_source")
        self._boundary = module.get_kernel("pdl_stress_boundary")
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
        """Writes ``words`` 16-byte words of true data; see ``csrc/harness.cu``. Pointers are integers."""
        u32, u64, i32 = np.uint32, np.uint64, np.int32
        self._launch(
            self._source, (-(-words // BLOCK), 1), pdl,
            truth, out, u32(words), u32(stride), u32(pool), counters, u32(offset), i32(_PLACES[trigger]), i32(fence),
            u64(round(delay_us * 1000)), stamps,
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
