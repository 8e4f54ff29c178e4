"""Kernels' machine code: finding it, reading it, taking waits out of it. No driver, no GPU, no torch.

`CodeFinder` finds the cubin that holds a kernel, `remove_waits` makes a mutant of it that is checked to differ in
nothing but the waits it should have lost.
"""

from __future__ import annotations

from pdl_stress.sass.cubin import BadCubin
from pdl_stress.sass.fatbin import CodeNotFound
from pdl_stress.sass.finder import CodeFinder, Found
from pdl_stress.sass.mutate import Mutant, MutationError, Site, remove_waits, triggers, wait_sites

__all__ = [
    "BadCubin",
    "CodeFinder",
    "CodeNotFound",
    "Found",
    "Mutant",
    "MutationError",
    "Site",
    "remove_waits",
    "triggers",
    "wait_sites",
]
