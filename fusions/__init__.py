"""Fused projections and the kernels they run on. Usable without the stress framework.

Importing this package imports neither torch nor any library of kernels; its names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusions.csa2 import HiddenStateProjections as HiddenStateProjections
    from fusions.indexer import IndexerProjection as IndexerProjection
    from fusions.qkv_a import FusedQkvA as FusedQkvA
    from fusions.qkv_a import split_mla as split_mla

_HOMES = {"HiddenStateProjections": "csa2", "IndexerProjection": "indexer", "FusedQkvA": "qkv_a", "split_mla": "qkv_a"}

__all__ = ["FusedQkvA", "HiddenStateProjections", "IndexerProjection", "split_mla"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"fusions.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fusions' has no attribute {name!r}")
