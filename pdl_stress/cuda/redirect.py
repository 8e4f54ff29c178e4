"""Lets a kernel of a captured graph write to another place.

Ops that return a new tensor (:attr:`pdl_stress.op.Op.returns`) would leave their result where the allocator put it. A
copy to the chain's buffer would be one more node between two kernels and end the overlap that is under test. So the
pointer itself is replaced, among the kernel's parameters. Nothing needs to be believed about them: were the wrong word
replaced, or did the address hide elsewhere too, the buffer would keep its poison, and every replay would mismatch.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ..errors import DeviceError, PdlStressError
from .nodes import Kernel, kernel_of

_POINTER = 8  # bytes


def redirect(nodes: list[Any], moves: dict[int, int]) -> None:
    """Replaces device pointers in the parameters of the kernel nodes of one step, before the graph is instantiated.

    Args:
        moves: new address by old address.

    Raises:
        PdlStressError: an old address stands in no parameter of the step's kernels.
        DeviceError: the driver does not say what the parameters are, or refuses new ones.
    """
    if len(nodes) != 1:  # a memset of the old place, or scratch memory with the result's old address
        raise PdlStressError(
            f"an op that returns its result launches {len(nodes)} nodes; only one kernel can be led to another place. "
            "Use an op that takes its output."
        )
    found: set[int] = set()
    for kernel in filter(None, map(kernel_of, nodes)):
        values = [_moved(value, moves, found) for value in _parameters(kernel)]
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = (ctypes.c_void_p * len(buffers))(*[ctypes.addressof(buffer) for buffer in buffers])
        _set(kernel, ctypes.addressof(pointers))
    if missing := set(moves) - found:
        raise PdlStressError(
            f"{len(missing)} returned tensor(s) stand in no parameter of the step's kernels, so the results cannot be "
            "led to the chain's buffers. Use an op that takes its output."
        )


def _moved(value: bytes, moves: dict[int, int], found: set[int]) -> bytes:
    """A parameter's bytes with every aligned word that is an old address replaced."""
    changed = bytearray(value)
    for offset in range(0, len(value) - _POINTER + 1, _POINTER):
        word = int.from_bytes(value[offset : offset + _POINTER], "little")
        if word in moves:
            changed[offset : offset + _POINTER] = moves[word].to_bytes(_POINTER, "little")
            found.add(word)
    return bytes(changed)


def _parameters(kernel: Kernel) -> list[bytes]:
    """The bytes of each parameter of a kernel node."""
    from cuda.bindings import driver

    if not int(kernel.params.kernelParams):
        raise DeviceError(f"{kernel.symbol} was launched with packed parameters; its output cannot be redirected.")
    pointers = ctypes.cast(int(kernel.params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
    values: list[bytes] = []
    while True:
        if int(kernel.params.func):
            code, _, size = driver.cuFuncGetParamInfo(kernel.params.func, len(values))
        else:
            code, _, size = driver.cuKernelGetParamInfo(kernel.params.kern, len(values))
        if int(code) != 0:  # the driver's way of saying that there are no more
            return values
        address = pointers[len(values)]
        if not address:
            raise DeviceError(f"{kernel.symbol}: parameter {len(values)} of its graph node has no value.")
        values.append(ctypes.string_at(address, int(size)))


def _set(kernel: Kernel, address: int) -> None:
    from cuda.bindings import driver

    kernel.params.kernelParams = address
    (code,) = driver.cuGraphKernelNodeSetParams(kernel.node, kernel.params)
    if int(code) != 0:
        raise DeviceError(f"the driver refuses other parameters for the graph node of {kernel.symbol}: {code.name}.")
