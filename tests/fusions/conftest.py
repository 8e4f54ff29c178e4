"""What the tests of several fusions need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def sums_in_fp32() -> Iterator[None]:
    """By default torch lets cuBLAS round the partial sums of a split K to BF16, which no bound allows for."""
    import torch

    matmul = torch.backends.cuda.matmul  # its attributes are no attributes, which monkeypatch cannot restore
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction = before
