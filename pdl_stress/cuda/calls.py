"""Checked calls of the CUDA runtime: every return code is looked at."""

from __future__ import annotations

from typing import Any

from ..errors import DeviceError


def checked(result: tuple[Any, ...], what: str) -> Any:
    """Unpacks what a ``cuda.bindings`` call returned.

    Returns:
        ``None``, the single value, or a tuple of the values behind the error code.

    Raises:
        DeviceError: the code is not success; the text names the call.
    """
    code, *values = result
    if int(code) != 0:
        raise DeviceError(f"{what} failed: {getattr(code, 'name', code)} ({int(code)}).")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)
