"""Bit for bit against FlashInfer, where it is installed: the same arithmetic in the same order, from other code.

One process sees one of its RMSNorms. ``kernel="reference"`` (CUDA) is what these tests ask for, so run them in a
process that has not imported FlashInfer otherwise. Every shape may be another program that it builds first: minutes.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from fusions.ops.native import rmsnorm, tinygemm2
from pdl_stress import catalog

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

SHAPES = 200


@pytest.fixture(scope="module", autouse=True)
def theirs() -> Any:
    from fusions.libraries import Unavailable
    from fusions.ops import flashinfer

    try:
        flashinfer.available("reference")
    except Unavailable as reason:
        pytest.skip(f"FlashInfer: {reason}")
    return flashinfer


def bf16(*shape: int, scale: float = 1.0) -> Any:
    import torch

    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def kernels_of(launch: Any) -> list[str]:
    """Names of the kernels that a callable launches, read from a captured graph."""
    import torch

    from pdl_stress.cuda import nodes

    launch()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(capture_error_mode="thread_local")
        launch()
        graph.capture_end()
    found = [nodes.kernel_of(node) for node in nodes.nodes(graph.raw_cuda_graph())]
    return [kernel.symbol for kernel in found if kernel]


def test_rmsnorm_has_flashinfers_bits(theirs: Any) -> None:
    import torch

    rng = random.Random(0)
    for _ in range(SHAPES):
        rows, width = rng.randint(1, 33), 8 * rng.randint(1, 1024)
        x, weight = bf16(rows, width, scale=10 ** rng.uniform(-2, 2)), bf16(width)
        want = theirs.rmsnorm(x, weight, out=torch.empty_like(x), kernel="reference")
        got = rmsnorm(x, weight)
        assert torch.equal(got, want), (rows, width, int((got != want).sum()))


@pytest.mark.parametrize("kernel", ["reference", "library"])
def test_tinygemm2_has_flashinfers_bits(theirs: Any, kernel: str) -> None:
    """With the attribute: without it FlashInfer runs other programs. On sm_90 ``library`` is mostly wgmma programs."""
    import torch

    rng, wgmma, count = random.Random(1), 0, 0
    wanted = kernel == "library" and torch.cuda.get_device_capability() == (9, 0)
    while (wgmma if wanted else count) < SHAPES:
        count += 1
        assert count <= 2 * SHAPES, f"only {wgmma} wgmma programs among {count} shapes"
        rows, width, columns = rng.randint(1, 16), 64 * rng.randint(1, 112), 16 * rng.randint(1, 112)
        x, weight = bf16(rows, width), bf16(columns, width)
        bias = bf16(columns) if kernel == "reference" and count % 2 else None
        want = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)

        def launch(x: Any = x, weight: Any = weight, bias: Any = bias, want: Any = want) -> None:
            theirs.tinygemm2(x, weight, bias, out=want, kernel=kernel)

        names = kernels_of(launch)
        wgmma += any("wgmma" in name for name in names)
        got = tinygemm2(x, weight, bias)
        torch.cuda.synchronize()
        assert torch.equal(got, want), (rows, width, columns, names, int((got != want).sum()))
    assert wgmma == 0 or kernel == "library"


@pytest.mark.parametrize("spec", ["flashinfer-reference", "rmsnorm=native,tinygemm2=flashinfer"])
@pytest.mark.parametrize("name", catalog.CSA2)
def test_ops_can_be_exchanged_in_a_chain_without_a_bit_changing(name: str, spec: str) -> None:
    import torch

    from pdl_stress.cuda.bench import Bench

    native, other = Bench(catalog.load(name)), Bench(catalog.load(name, spec))
    assert native.memory.layout == other.memory.layout
    assert torch.equal(native.memory.reference(False), other.memory.reference(False))
