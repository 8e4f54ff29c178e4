"""These tests grade in one process, one after the other, also behind one that has profiled. Users cannot do that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def unprofiled() -> Iterator[None]:
    yield
    from pdl_stress.cuda import profiler

    profiler.used = False
