"""Tensor maps: what the TMA unit knows of a matrix."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from fusions.ops.native.launch import LaunchError

_BF16, _NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_256B, _FILL_ZERO = 9, 0, 3, 3, 0  # values of the driver's enums
BOX_COLUMNS = 64  # 128 bytes of BF16: the width of the swizzle


@functools.lru_cache(maxsize=1024)
def tensor_map(address: int, rows: int, columns: int, row_stride: int, box_rows: int) -> Any:
    """The 128 bytes of a tensor map for a BF16 matrix, read in boxes of `box_rows` x 64; outside it reads as zero.

    address: 16-byte aligned. row_stride: in elements, a multiple of 8. Raises LaunchError where the driver refuses it.
    """
    # Not through cuda.bindings' wrapper: its result need not lie at the 64-byte boundary that the driver demands.
    storage = (ctypes.c_uint64 * 24)()
    offset = -ctypes.addressof(storage) % 64
    encoded = (ctypes.c_uint64 * 16).from_buffer(storage, offset)
    error = _encode()(
        ctypes.addressof(encoded),
        _BF16,
        2,
        address,
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(row_stride * 2),
        (ctypes.c_uint32 * 2)(BOX_COLUMNS, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128B,
        _PROMOTE_256B,
        _FILL_ZERO,
    )
    if error:
        raise LaunchError(
            f"cuTensorMapEncodeTiled: error {error} for {rows} x {columns} at {address:#x}, row stride {row_stride}"
        )
    return encoded


@functools.cache
def _encode() -> Any:
    from cuda.bindings import driver

    flag = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    error, address, _ = driver.cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, flag)
    if int(error) != 0 or not address:
        raise LaunchError(f"cuTensorMapEncodeTiled is missing ({error.name}); it needs a CUDA 12 driver or newer")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    dims, sizes = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
    prototype = ctypes.CFUNCTYPE(
        number, pointer, number, ctypes.c_uint32, pointer, dims, dims, sizes, sizes, number, number, number, number
    )
    return prototype(int(address))
