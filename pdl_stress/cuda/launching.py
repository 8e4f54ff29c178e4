"""Kernels from CUDA C++ source or a cubin, launched on torch's current stream, with or without the PDL attribute."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DeviceError, UsageError
from .kernels import TorchStream


class CudaKernel:
    """One kernel. Made by :func:`cuda_kernel` or :func:`cubin_kernel`; compiled at its first launch.

    Args of a call: tensors (passed as pointers), ``int`` (``int``), ``float`` (``float``), ``bool``, numpy scalars (as
    they are), in the order of the kernel's parameters.
    """

    def __init__(self, name: str, source: str = "", cubin: Path | None = None) -> None:
        self.name, self._source, self._cubin = name, source, cubin

    def __call__(
        self, *args: Any, grid: int | tuple[int, ...], block: int | tuple[int, ...], shared: int = 0,
        cluster: int | tuple[int, ...] | None = None, pdl: bool = True,
    ) -> None:  # fmt: skip
        """Launches it.

        Args:
            grid, block: CTAs, and threads of a CTA. ``shared``: dynamic shared memory, bytes. ``cluster``: CTAs.
            pdl: as a secondary: it may start while the kernel before it still runs.

        Raises:
            UsageError: an argument of a type that no parameter has. DeviceError: it does not compile or load.
        """
        import torch
        from cuda.core import Device, LaunchConfig, launch

        stream = Device(torch.cuda.current_device()).create_stream(TorchStream(torch.cuda.current_stream()))
        settings: dict[str, Any] = {"grid": grid, "block": block, "shmem_size": shared}
        if cluster is not None:
            settings["cluster"] = cluster
        config = LaunchConfig(**settings, programmatic_stream_serialization=pdl)
        launch(stream, config, self._kernel, *map(_argument, args))

    @cached_property
    def code(self) -> Any:
        """The ``cuda.core`` ObjectCode that holds it."""
        import torch
        from cuda.core import Device, ObjectCode, Program, ProgramOptions

        Device(torch.cuda.current_device()).set_current()
        try:
            if self._cubin is not None:
                return ObjectCode.from_cubin(self._cubin.read_bytes())
            major, minor = torch.cuda.get_device_capability()
            options = ProgramOptions(std="c++17", arch=f"sm_{major}{minor}a", **_headers())
            return Program(self._source, "c++", options).compile("cubin")
        except OSError as error:
            raise UsageError(f"{str(self._cubin)!r} cannot be read: {error.strerror}.") from error
        except Exception as error:
            raise DeviceError(f"{self.name} does not compile or load: {error}") from error

    @cached_property
    def _kernel(self) -> Any:
        try:
            return self.code.get_kernel(self.name)
        except Exception as error:
            raise UsageError(
                f'the code has no kernel {self.name!r} ({error}); declare it extern "C", or give its mangled name.'
            ) from error


def cuda_kernel(source: str, name: str) -> CudaKernel:
    """The kernel ``name`` (``extern "C"``) of CUDA C++ source, compiled with NVRTC for the GPU at hand."""
    if name not in source:
        raise UsageError(f"the source has no {name!r}.")
    return CudaKernel(name, source)


def cubin_kernel(path: str | Path, name: str) -> CudaKernel:
    """The kernel ``name`` (as mangled) of a cubin file. Raises UsageError if there is no such file."""
    if not Path(path).is_file():
        raise UsageError(f"{str(path)!r} is no file.")
    return CudaKernel(name, cubin=Path(path))


BUNDLED_SINCE = (13, 3)
"""The first NVRTC that brings ``cuda_bf16.h`` and its like along."""


def _headers() -> dict[str, Any]:
    """Where a source's includes come from: NVRTC itself, or a toolkit if there is one."""
    from cuda import pathfinder

    from .toolchain import nvrtc_version

    if tuple(int(part) for part in (nvrtc_version() or "0.0").split(".")[:2]) >= BUNDLED_SINCE:
        return {"use_bundled_headers": True}
    find = getattr(pathfinder, "find_nvidia_header_directory", None)
    folder = find("cudart") if find is not None else None
    return {"include_path": [folder]} if folder else {}


def _argument(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, bool | np.bool_):
        return np.bool_(value)
    if isinstance(value, int):
        return np.int32(value)
    if isinstance(value, float):
        return np.float32(value)
    if isinstance(value, np.generic):
        return value
    raise UsageError(f"{value!r} cannot be an argument of a kernel; give tensors, numbers or numpy scalars.")
