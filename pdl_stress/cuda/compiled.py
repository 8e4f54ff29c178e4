"""Kernels that this process compiled at run time: their machine code is in no file, but in Python objects."""

from __future__ import annotations

import gc
import sys
from typing import Any

from .surgery import MUTANT


def compiled_here() -> list[Any]:
    """Objects of ``cuda.core`` and Triton that hold machine code, for :meth:`pdl_stress.sass.CodeFinder.add`."""
    kinds: list[type] = []
    core, triton = sys.modules.get("cuda.core"), sys.modules.get("triton.runtime.jit")
    for module, name in ((core, "ObjectCode"), (triton, "JITFunction")):
        kind = getattr(module, name, None)
        if isinstance(kind, type):
            kinds.append(kind)
    # By type, not isinstance: some libraries keep objects that warn, or import, when they are asked what they are.
    return [obj for obj in gc.get_objects() if type(obj) in kinds and _holds_cubin(obj)] if kinds else []


def _holds_cubin(obj: Any) -> bool:
    """Not PTX, not LTO-IR, and no kernel that was broken here on purpose. A Triton function is asked later."""
    code = getattr(obj, "code", None)
    if getattr(obj, "name", None) == MUTANT:
        return False
    return code is None or (isinstance(code, bytes) and code[:4] == b"\x7fELF")
