"""TensorRT-LLM's ops as a chain's kernels: functional, always with the attribute, known by name only.

The library itself is not there: kernels of ours are registered under its ops' names. What is tested is the way from an
op that returns a new tensor to a captured, redirected, graded and patched graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pdl_stress import Chain, Outcome, catalog
from pdl_stress.campaign import run_on_gpu
from pdl_stress.plan import Plan

pytestmark = pytest.mark.gpu


@pytest.fixture
def trtllm_ops() -> Iterator[None]:
    import torch

    from fusions.ops import native as ops

    if hasattr(torch.ops.trtllm, "tinygemm2"):
        pytest.skip("a real TensorRT-LLM is loaded")
    library = torch.library.Library("trtllm", "DEF")
    library.define("tinygemm2(Tensor input, Tensor weight, Tensor bias) -> Tensor")
    library.define("flashinfer_rmsnorm(Tensor input, Tensor weight, float eps) -> Tensor")
    library.impl("tinygemm2", lambda x, w, b: ops.tinygemm2(x, w, b, pdl=True), "CUDA")
    library.impl("flashinfer_rmsnorm", lambda x, w, eps: ops.rmsnorm(x, w, eps=eps, pdl=True), "CUDA")
    yield
    library._destroy()


def chain_of(name: str) -> Chain:
    """The chain with TensorRT-LLM's ops; the machine code of the kernels behind them is given, as no library has it."""
    from fusions.ops.native import code as native

    code = [native.cubin(kernel, native.DEPLOYED[kernel], "sm_90a") for kernel in native.KERNELS]
    chain = catalog.load(name, "trtllm")
    for number, step in enumerate(chain.steps[1:]):
        chain._steps[number] = replace(step, op=replace(step.op, code=lambda: code))
    return chain


@pytest.mark.parametrize("name", ["csa2-fused-m1", "csa2-separate-m8"])
def test_ops_that_return_new_tensors_pass(name: str, trtllm_ops: Any) -> None:
    import torch

    from pdl_stress.cuda.bench import Bench
    from pdl_stress.cuda.executor import Executor

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the machine code that is given here is of sm_90a")
    chain = chain_of(name)
    plan = Plan(replays=1024, delays_us=(10.0,))
    (case,) = run_on_gpu([chain], plan, Executor(lambda _: chain, time_limit=20.0))
    assert case.verdict is Outcome.PASS, case.reasons
    bench = Bench(chain)
    captured = bench.capture(chain)
    assert len(captured.returned) == bench.unroll * (len(chain.steps) - 1)
    native = Bench(catalog.load(name))
    assert torch.equal(bench.memory.reference(False), native.memory.reference(False)), "the same kernels, the same bits"


def test_a_result_that_is_not_redirected_is_graded_as_wrong(trtllm_ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdl_stress.cuda import bench as module

    monkeypatch.setattr(module, "redirect", lambda nodes, moves: None)
    chain = chain_of("csa2-fused-m1")
    bench = module.Bench(chain)
    counts = bench.run(bench.capture(chain), 256)
    assert counts.mismatches == 256
