"""Launches native kernels on the caller's current torch stream, capturable, with little Python in the way."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from fusions.ops.native import code
from fusions.ops.native.code import Behaviour


class LaunchError(RuntimeError):
    """The CUDA driver refused a call; the message names the call and the error. The device may need a new process."""


class Arguments:
    """Storage for a kernel's parameters (`fields`), and the `address` of the pointers to them that the driver reads."""

    def __init__(self, parameters: type[ctypes.Structure]) -> None:
        self.fields: Any = parameters()
        base = ctypes.addressof(self.fields)
        offsets = [getattr(parameters, field[0]).offset for field in parameters._fields_]
        self._pointers = (ctypes.c_void_p * len(offsets))(*[base + offset for offset in offsets])
        self.address = ctypes.addressof(self._pointers)


class Launcher:
    """One kernel of one behaviour on one device.

    `shared_limit` is the dynamic shared memory a launch may ask for, in bytes. `handle` is the driver's CUkernel, which
    graph nodes take too; it lives as long as this object.
    """

    def __init__(self, kernel: str, behaviour: Behaviour, device: int, parameters: type[ctypes.Structure]) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        self._driver = driver
        self._device = Device(device)
        self._device.set_current()
        capability = self._device.compute_capability
        if capability.major < 9:
            raise ValueError(
                f"{kernel} needs a GPU of compute capability 9.0 or higher for programmatic dependent launch; device "
                f"{device} has {capability.major}.{capability.minor}"
            )
        cubin = code.cubin(kernel, behaviour, f"sm_{capability.major}{capability.minor}a")
        self._object = ObjectCode.from_cubin(cubin, name=kernel)  # keeps the kernel loaded
        self.handle = driver.CUkernel(int(self._object.get_kernel(kernel).handle))
        function = driver.CUfunction_attribute
        (opt_in,) = _done(
            driver.cuDeviceGetAttribute(
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, driver.CUdevice(device)
            ),
            "cuDeviceGetAttribute",
        )
        (fixed,) = _done(
            driver.cuKernelGetAttribute(
                function.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.handle, driver.CUdevice(device)
            ),
            "cuKernelGetAttribute",
        )
        self.shared_limit: int = opt_in - fixed
        _done(
            driver.cuKernelSetAttribute(
                function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                self.shared_limit,
                self.handle,
                driver.CUdevice(device),
            ),
            "cuKernelSetAttribute",
        )
        self._parameters = parameters
        self._local = threading.local()

    def here(self) -> Arguments:
        """This thread's storage for the kernel's parameters: fill `fields`, then launch."""
        return self._thread()[0]

    def __call__(self, grid: tuple[int, int], block: int, shared: int, pdl: bool, stream: int) -> None:
        """Launches with the parameters in `here().fields` on `stream` (a raw handle); reads them before it returns.

        pdl: launch as a secondary, that is with the attribute `programmaticStreamSerializationAllowed`.
        Raises LaunchError.
        """
        arguments, configs = self._thread()
        config = configs.get((grid, block, shared, pdl))
        if config is None:
            config = configs[grid, block, shared, pdl] = self._config(grid, block, shared, pdl)
        config.hStream = self._driver.CUstream(stream)
        _done(self._driver.cuLaunchKernelEx(config, self.handle, arguments.address, 0), "cuLaunchKernelEx")

    def _thread(self) -> tuple[Arguments, dict[Any, Any]]:
        """What this thread launches with. The driver call releases the interpreter, so threads share none of it."""
        try:
            state: tuple[Arguments, dict[Any, Any]] = self._local.state
        except AttributeError:
            self._device.set_current()  # a new thread has no CUDA context yet
            state = self._local.state = (Arguments(self._parameters), {})
        return state

    def _config(self, grid: tuple[int, int], block: int, shared: int, pdl: bool) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared
        if pdl:
            attribute = self._driver.CUlaunchAttribute()
            attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        return config


@functools.cache
def launcher(kernel: str, behaviour: Behaviour, device: int, parameters: type[ctypes.Structure]) -> Launcher:
    """The launcher of `kernel` for `behaviour`; compiles and loads it on first use, so warm up before a capture."""
    return Launcher(kernel, behaviour, device, parameters)


def _done(result: tuple[Any, ...], call: str) -> tuple[Any, ...]:
    """The values of a driver call without its error code."""
    if int(result[0]) != 0:
        raise LaunchError(f"{call} failed with {result[0].name}")
    return result[1:]
