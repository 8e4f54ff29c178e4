"""The indexer's projections on a GPU: that TF32 runs where it should and nowhere else, bounds, launches, graphs.

Sizes are DeepSeek-V3.2's. A random FP32 weight has 23 bits of mantissa and TF32 keeps 10, so the error tells which of
the two ran; weights that came from BF16 cannot tell.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path as File

import pytest
import torch

from fusions.checkpoint import dequantize_blocks
from fusions.indexer import COMPUTES, STORAGES, IndexerProjection, Path
from fusions.indexer_gemm import Arithmetic, arithmetic
from fusions.tf32 import is_on, tf32

pytestmark = pytest.mark.gpu

H, DK, NH = 7168, 128, 64
BF16, FP32 = torch.bfloat16, torch.float32
ROOT = File(__file__).parents[2]

TF32_ERROR = (5e-5, 2e-3)
"""RMS of the error, in units of E = sqrt(sum of x^2 w^2), that TF32 makes with full-mantissa weights."""
FP32_ERROR = 5e-6

TENSOR_CORES = re.compile(r"tf32|tensorop|s1688|nvjet", re.IGNORECASE)
"""In the names of cuBLAS's TF32 kernels; its FP32 ones have none of these."""


def normal(*shape, seed=0, dtype=FP32):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def linear(rows, seed, dtype=FP32):
    module = torch.nn.Linear(H, rows, bias=False, dtype=dtype, device="cuda").requires_grad_(False)
    module.weight.copy_(normal(rows, H, seed=seed) * 0.02)
    return module


def made(compute="tf32", storage="alias", fused=True, exact_in_bf16=False):
    dtype = BF16 if compute.startswith("bf16") else FP32
    projection = IndexerProjection(linear(DK, 1, dtype), linear(NH, 2, dtype), compute=compute, storage=storage)
    if exact_in_bf16:
        for module in projection._rows.linears:
            module.weight.copy_(module.weight.to(BF16))
    assert projection.post_load_weights() is True
    if not fused:
        projection.release()
    assert projection.is_fused is fused
    return projection


def weights_of(projection):
    return [module.weight for module in projection._rows.linears]


def errors(found, hidden, weight):
    """(|error|, |exact result|, sum of magnitudes S, error in units of E as RMS)."""
    x, w = hidden.double(), weight.double()
    exact = x @ w.t()
    error = found.double() - exact
    relative = error / (x.square() @ w.square().t()).sqrt()
    return error.abs(), exact.abs(), x.abs() @ w.abs().t(), relative.square().mean().sqrt().item()


def assert_within(projection, hidden, slack, results=None, rounded_weights=False):
    found = projection(hidden) if results is None else results
    for got, weight, rounded in zip(
        found, weights_of(projection), (hidden.dtype == BF16, rounded_weights), strict=True
    ):
        error, exact, magnitude, _ = errors(got, hidden, weight)
        bound = slack * magnitude + (2.0**-8 * exact if rounded else 0)
        assert (error <= bound).all(), (error / bound).max().item()


def rms(projection, hidden, results=None):
    """Of the heads' weights, which are not rounded."""
    found = projection(hidden) if results is None else results
    return errors(found[1], hidden, weights_of(projection)[1])[3]


# -- TF32 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("count", [16, 64, 300])
def test_tf32_runs_exactly_where_it_is_asked_for(count, storage, fused, process):
    """Whatever the process has set; and that setting is back."""
    hidden, before = normal(count, H, seed=count, dtype=BF16), is_on()
    with tf32(process):
        on, off = rms(made("tf32", storage, fused), hidden), rms(made("fp32", storage, fused), hidden)
        assert is_on() is process
        exact = rms(made("tf32", storage, fused, exact_in_bf16=True), hidden)
    assert is_on() is before
    assert TF32_ERROR[0] <= on <= TF32_ERROR[1]
    assert off < FP32_ERROR
    assert exact < FP32_ERROR  # BF16 fits into TF32


def test_the_setting_is_back_after_an_error():
    before = is_on()
    with pytest.raises(RuntimeError), tf32():
        torch.nn.functional.linear(normal(2, 3), normal(2, 4))
    assert is_on() is before


def test_explain_says_what_ran():
    hidden = normal(8, H, dtype=BF16)
    for compute, how in (
        ("tf32", Arithmetic.TF32),
        ("fp32", Arithmetic.FP32),
        ("bf16", Arithmetic.NATIVE),
        ("bf16_fp32out", Arithmetic.FP32_OUT),
    ):
        projection = made(compute)
        assert projection.explain(hidden) == (Path.FUSED, f"computed with {how}")
        assert arithmetic(hidden, weights_of(projection), compute) == (how, "")


PROGRAM = """
import torch
from fusions.indexer import IndexerProjection
from fusions.tf32 import is_on
{history}
torch.manual_seed(0)
parts = [torch.nn.Linear(7168, rows, bias=False, device="cuda").requires_grad_(False) for rows in (128, 64)]
projection = IndexerProjection(*parts, compute="{compute}")
assert projection.post_load_weights()
hidden = torch.randn(64, 7168, device="cuda").bfloat16()
before = is_on()
x, w = hidden.double(), parts[1].weight.double()
relative = (projection(hidden)[1].double() - x @ w.t()) / (x.square() @ w.square().t()).sqrt()
assert is_on() == before
print(relative.square().mean().sqrt().item())
"""

MIXED = "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cuda.matmul.fp32_precision = 'ieee'"
NEW = "torch.backends.cuda.matmul.fp32_precision = 'tf32'"


@pytest.mark.parametrize(
    ("compute", "history", "override", "is_tf32"),
    [
        ("tf32", MIXED, None, True),
        ("fp32", NEW, None, False),
        ("fp32", "torch.set_float32_matmul_precision('medium')", None, False),
        ("tf32", "", "0", False),
    ],
)
def test_every_switch_in_a_process_of_its_own(compute, history, override, is_tf32):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {} if override is None else {"NVIDIA_TF32_OVERRIDE": override}
    program = PROGRAM.format(history=history, compute=compute)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    error = float(done.stdout.split()[-1])
    assert (TF32_ERROR[0] <= error <= TF32_ERROR[1]) if is_tf32 else error < FP32_ERROR, error


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 8, 64, 300])
@pytest.mark.parametrize("fused", [True, False])
def test_bounds_of_the_fp32_weights(fused, count):
    hidden = normal(count, H, seed=count)
    for dtype, slack in ((BF16, 2.0**-10 + 2.0**-18), (FP32, 2.0**-9 + 2.0**-18)):  # FP32: both operands lose bits
        assert_within(made("tf32", fused=fused), hidden.to(dtype), slack)
        assert_within(made("fp32", fused=fused), hidden.to(dtype), 2.0**-18)
    assert_within(made("tf32", fused=fused, exact_in_bf16=True), hidden.to(BF16), 2.0**-18)


@pytest.mark.parametrize("count", [1, 2, 8, 64, 300])
@pytest.mark.parametrize("fused", [True, False])
def test_bounds_of_the_bf16_weights(sums_in_fp32, fused, count):
    hidden = normal(count, H, seed=count, dtype=BF16)
    assert_within(made("bf16", fused=fused), hidden, 2.0**-17, rounded_weights=True)
    projection = made("bf16_fp32out", fused=fused)
    _, weights = projection(hidden)
    assert_within(projection, hidden, 2.0**-18)
    assert not torch.equal(weights, weights.to(BF16).float())
    assert_within(projection, hidden.float(), 2.0**-18)  # FP32 hidden: in FP32


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("compute", COMPUTES)
def test_layout(compute, dtype, count):
    projection = made(compute)
    for hidden in (normal(count, H, dtype=dtype), normal(2, count, H, dtype=dtype)):
        key, weights = projection(hidden)
        assert (key.shape, key.dtype, key.is_contiguous()) == ((*hidden.shape[:-1], DK), dtype, True)
        assert (weights.shape, weights.dtype, weights.stride(-1)) == ((*hidden.shape[:-1], NH), FP32, 1)
        assert not count or key.untyped_storage().data_ptr() != weights.untyped_storage().data_ptr()
        scaled = projection.scale_weights(weights, torch.full((*weights.shape, 1), 2.0, device="cuda"))
        assert torch.equal(scaled, weights * 2 * projection.factor)
        assert scaled.is_contiguous()


@pytest.mark.parametrize("compute", COMPUTES)
def test_rows_need_not_be_dense(compute):
    wide, projection = normal(12, H + 9, dtype=BF16), made(compute)
    for hidden in (wide[::2, 3 : H + 3], wide[:, :H].t().contiguous().t()):
        for got, want in zip(projection(hidden), projection(hidden.contiguous()), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=2e-2)


def test_autocast_changes_nothing():
    projection, hidden = made(), normal(64, H, dtype=BF16)
    with torch.autocast("cuda", BF16):
        assert TF32_ERROR[0] <= rms(projection, hidden) <= TF32_ERROR[1]


@pytest.mark.parametrize("compute", COMPUTES)
def test_gradients(compute):
    projection = made(compute)
    hidden = normal(3, H, dtype=BF16).requires_grad_()
    key, weights = projection(hidden)
    (key.float().sum() + weights.sum()).backward()
    want = sum(weight.double().sum(0) for weight in weights_of(projection))
    torch.testing.assert_close(hidden.grad.double(), want.expand(3, -1), rtol=2e-2, atol=2e-2)


def test_codes_are_multiplied_out_on_the_gpu_as_on_the_cpu():
    projection = made()
    codes = (torch.randn(DK, H) * 50).to(torch.float8_e4m3fn)
    scales, heads = torch.rand(1, H // 128) + 0.1, torch.randn(NH, H).to(BF16)
    projection.load_weights(
        {"indexer.wk.weight": codes, "indexer.wk.weight_scale_inv": scales, "indexer.weights_proj.weight": heads}
    )
    wk, weights_proj = weights_of(projection)
    assert torch.equal(wk.cpu(), dequantize_blocks(codes, scales))
    assert torch.equal(weights_proj.cpu(), heads.float())
    assert projection.is_fused
    assert_within(projection, normal(8, H, dtype=BF16), 2.0**-10 + 2.0**-18)


# -- selection ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compute", "least"), [("tf32", 0.999), ("fp32", 0.999), ("bf16_fp32out", 0.999)])
def test_the_best_keys_are_those_of_fp64(compute, least, record_property):
    """64 tokens x 4096 keys, k = 2048. What differs lies at the threshold: how far is recorded, in units of the
    scores' spread."""
    count, keys, k = 64, 4096, 2048
    projection, hidden = made(compute), normal(keys, H, seed=3, dtype=BF16)
    queries = normal(count, NH, DK, seed=4).double()

    def scores(key, weights):
        total = torch.zeros(count, keys, device="cuda", dtype=torch.float64)
        for head in range(NH):
            total += weights[:, head, None].double() * torch.relu(queries[:, head] @ key.double().t())
        return total

    key, weights = projection(hidden)
    x = hidden.double()
    wk, weights_proj = (weight.double() for weight in weights_of(projection))
    wanted = scores(x @ wk.t(), x[:count] @ weights_proj.t())
    found = scores(key, projection.scale_weights(weights[:count]))
    chosen = [torch.zeros(count, keys, dtype=torch.bool, device="cuda") for _ in range(2)]
    for mask, ranked in zip(chosen, (found, wanted), strict=True):
        mask.scatter_(1, ranked.topk(k, 1).indices, True)
    overlap = (chosen[0] & chosen[1]).sum().item() / (count * k)
    threshold = wanted.topk(k, 1).values[:, -1:]
    distance = ((wanted - threshold).abs() / wanted.std(1, keepdim=True))[chosen[0] != chosen[1]]
    record_property("top_k_overlap", overlap)
    record_property("farthest_swap", distance.max().item() if distance.numel() else 0.0)
    assert overlap >= least
    assert not distance.numel() or distance.max().item() < 0.05


# -- launches and graphs -----------------------------------------------------------------------------------------------


def captured(call):
    """(graph, what the captured call returned). Warmed up on a stream of its own, as a capture needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        results = call()
    graph.instantiate()
    return graph, results


def kernels(projection, hidden):
    """The symbols of the kernels that a call launches, in no order."""
    from pdl_stress.cuda.nodes import kernel_of, nodes

    graph, _ = captured(lambda: projection(hidden))
    return [kernel.symbol for node in nodes(graph.raw_cuda_graph()) if (kernel := kernel_of(node)) is not None]


def gemms(symbols):
    """Without casts, and without the second half of a GEMM that was split along K."""
    return [name for name in symbols if not re.search(r"elementwise|splitkreduce|copy_kernel", name, re.IGNORECASE)]


@pytest.mark.parametrize("count", [8, 64, 512])
@pytest.mark.parametrize("compute", COMPUTES)
def test_one_gemm_is_saved(compute, count, record_property):
    """And with it one launch; but in BF16, where the key has to be copied out of the joined result."""
    hidden = normal(count, H, dtype=BF16)
    fused, apart = (kernels(made(compute, fused=each), hidden) for each in (True, False))
    record_property("fused", fused)
    record_property("apart", apart)
    # For some shapes cuBLAS adds a kernel of its own to a GEMM.
    assert 1 <= len(gemms(fused)) < len(gemms(apart)), (fused, apart)
    casts = {"tf32": (2, 2), "fp32": (2, 2), "bf16": (2, 1), "bf16_fp32out": (1, 1)}[compute]
    found = tuple(sum("elementwise" in name or "copy_kernel" in name for name in names) for names in (fused, apart))
    assert found == casts, (fused, apart)


@pytest.mark.parametrize("fused", [True, False])
def test_the_kernels_names_say_tensor_cores(fused):
    hidden = normal(64, H, dtype=BF16)
    on, off = (gemms(kernels(made(compute, fused=fused), hidden)) for compute in ("tf32", "fp32"))
    assert all(TENSOR_CORES.search(name) for name in on), on
    assert not any(TENSOR_CORES.search(name) for name in off), off


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("compute", COMPUTES)
def test_a_graph_computes_new_inputs_and_keeps_its_arithmetic(compute, storage, fused):
    projection, hidden = made(compute, storage, fused), normal(64, H, dtype=BF16)
    graph, results = captured(lambda: projection(hidden))
    with tf32(compute != "tf32"):  # of no matter: it was asked at the capture
        for seed in range(3):
            hidden.copy_(normal(64, H, seed=10 + seed, dtype=BF16))
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            slack = {"tf32": 2.0**-10 + 2.0**-18, "bf16": 2.0**-9}.get(compute, 2.0**-18)
            assert_within(projection, hidden, slack, results, rounded_weights=compute == "bf16")
            if compute == "tf32":
                assert TF32_ERROR[0] <= rms(projection, hidden, results) <= TF32_ERROR[1]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_graph_sees_a_reload(storage):
    """With an alias at once, with a copy after the hook."""
    projection, hidden = made(storage=storage), normal(8, H, dtype=BF16)
    graph, results = captured(lambda: projection(hidden))
    for seed in range(2):
        for at, weight in enumerate(weights_of(projection)):
            weight.copy_(normal(*weight.shape, seed=20 + 2 * seed + at) * 0.02)
        if storage == "copy":
            assert projection.post_load_weights() is True
        graph.replay()
        assert_within(projection, hidden, 2.0**-10 + 2.0**-18, results)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_hook_refuses_to_run_in_a_capture(storage):
    projection, hidden = made(storage=storage), normal(8, H, dtype=BF16)
    projection(hidden)
    stale = made(storage="copy")
    weights_of(stale)[0].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (projection.post_load_weights, projection.cache_derived_state, projection.release):
            with pytest.raises(RuntimeError, match="CUDA graph is being captured"):
                call()
        with pytest.raises(RuntimeError, match=r"call post_load_weights\(\) before the capture"):
            stale(hidden)
        results = projection(hidden)
    graph.replay()
    assert_within(projection, hidden, 2.0**-10 + 2.0**-18, results)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("compute", COMPUTES)
def test_compiled(compute, storage):
    torch.compiler.reset()
    projection, hidden = made(compute, storage), normal(64, H, dtype=BF16)
    function = torch.compile(projection, backend="aot_eager", fullgraph=True)
    results = function(hidden)
    slack = {"tf32": 2.0**-10 + 2.0**-18, "bf16": 2.0**-9}.get(compute, 2.0**-18)
    assert_within(projection, hidden, slack, results, rounded_weights=compute == "bf16")
    if compute == "tf32":
        assert TF32_ERROR[0] <= rms(projection, hidden, results) <= TF32_ERROR[1]
    weights_of(projection)[0].zero_()
    assert (function(hidden)[0] == 0).all()
    torch.compiler.reset()


@pytest.mark.parametrize("compute", COMPUTES)
def test_the_op_is_what_it_says_to_torch(compute):
    operands = (normal(4, H, dtype=BF16), *weights_of(made(compute)), compute)
    torch.library.opcheck(torch.ops.fusions.indexer_projection, operands)


def test_another_device_is_refused():
    projection = made()
    with pytest.raises(ValueError, match="hidden is on cpu, wk is on cuda:0; bring them to one device"):
        projection(torch.zeros(2, H, dtype=BF16))
    assert projection(torch.zeros(2, H, dtype=BF16, device="meta"))[0].shape == (2, DK)
