"""The A-projection in one GEMM on a GPU: its numbers, the way to the min-latency op, graphs."""

from __future__ import annotations

import pytest
import torch

from fusions.ops import fused_a
from fusions.qkv_a import FusedQkvA, Path, split_mla

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sums_in_fp32")]

BF16, FP32 = torch.bfloat16, torch.float32
K = 7168
ROWS = {"q_a": 1536, "kv_a": 576, "wk": 128, "weights_proj": 64}
WIDTH = {"nvfp4_all": 2304, "wk_only": 2240, "unfused": 2112}
TOKENS = (1, 4, 8, 16, 17, 300)


def normal(*shape, seed=0, dtype=BF16):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def projection(preset, *, seed=0, fp32=(), names=tuple(ROWS)):
    parts = []
    for at, name in enumerate(names):
        made = torch.nn.Linear(K, ROWS[name], bias=False, device="meta")
        weight = normal(ROWS[name], K, seed=100 + seed + at, dtype=FP32 if name in fp32 else BF16)
        made.weight = torch.nn.Parameter(weight, requires_grad=False)
        parts.append((name, made, ROWS[name]))
    return FusedQkvA(parts, preset=preset)


def weight_of(fused, name):
    return fused._linears[name].weight


def same_bits(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def assert_close(out, hidden, weight, rounding, accumulation):
    exact = hidden.double() @ weight.double().t()
    magnitude = hidden.double().abs() @ weight.double().abs().t()
    assert ((out.double() - exact).abs() <= exact.abs() * rounding + magnitude * accumulation).all()


@pytest.fixture
def calls(monkeypatch):
    """A stand-in for TensorRT-LLM's op that, like the real one, takes x as dense."""
    if hasattr(torch.ops.trtllm, fused_a.OP):
        pytest.skip("a real TensorRT-LLM is loaded")
    if torch.cuda.get_device_capability() in ((12, 0), (12, 1)):
        pytest.skip("the op does not support this GPU")
    made = []

    def op(x, weight, bias, out_dtype):
        assert (bias, out_dtype) == (None, None)
        assert (weight.shape, weight.stride()) == ((K, 2112), (1, K))
        assert torch.cuda.current_device() == x.get_device()
        made.append(x.shape[0])
        return torch.nn.functional.linear(x.as_strided(x.shape, (x.shape[1], 1)), weight.t())

    monkeypatch.setattr(torch.ops.trtllm, fused_a.OP, op, raising=False)
    return made


@pytest.mark.parametrize("preset", WIDTH)
def test_results_are_within_the_bound_fused_or_not(preset):
    fused = projection(preset)
    for path in (Path.SEPARATE, Path.LINEAR):
        for tokens in TOKENS:
            hidden = normal(tokens, K, seed=tokens)
            assert fused.explain(hidden)[0] is path
            results = fused.project(hidden)
            assert list(results) == list(ROWS)
            for name, out in results.items():
                assert out.dtype is BF16
                assert_close(out, hidden, weight_of(fused, name), 2.0**-8, 2.0**-17)
        assert fused.post_load_weights() is True
        assert fused._views.weight.shape == (WIDTH[preset], K)


def test_weights_proj_apart_keeps_fp32():
    fused = projection("wk_only", fp32=("weights_proj",))
    assert fused.post_load_weights()
    for tokens in TOKENS:
        hidden = normal(tokens, K, seed=tokens)
        out = fused.project(hidden)["weights_proj"]
        assert out.dtype is FP32
        assert_close(out, hidden, weight_of(fused, "weights_proj"), 0.0, 2.0**-18)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_results_are_columns_of_one_tensor_or_dense(tokens):
    fused = projection("nvfp4_all")
    fused.post_load_weights()
    hidden = normal(tokens, K)
    results = fused.project(hidden)
    split = split_mla(results)
    assert [part.shape for part in split] == [(tokens, columns) for columns in (1536, 512, 64, 128, 64)]
    if tokens:
        assert [part.storage_offset() for part in split] == [0, 1536, 2048, 2112, 2240]
        assert all(part.stride() == (2304, 1) for part in split)
    dense = fused.project(hidden, dense=True)
    assert all(out.stride() == (ROWS[name], 1) for name, out in dense.items())
    assert same_bits(results, dense)


def test_one_to_sixteen_dense_tokens_of_2112_rows_go_to_the_op(calls):
    fused = projection("unfused")
    assert fused.post_load_weights()
    wide = normal(20, K + 8)
    for tokens in (0, 1, 2, 16, 17, 20):
        for hidden in (wide[:tokens, :K].contiguous(), wide[:tokens, :K]):
            calls.clear()
            results = fused.project(hidden)
            taken = tokens == 1 or (hidden.is_contiguous() and 1 <= tokens <= 16)
            assert calls == [tokens] * taken
            assert fused.explain(hidden)[0] is (Path.MIN_LATENCY if taken else Path.LINEAR)
            for name, out in results.items():
                assert_close(out, hidden, weight_of(fused, name), 2.0**-8, 2.0**-17)
    calls.clear()
    for preset in ("nvfp4_all", "wk_only"):
        other = projection(preset)
        other.post_load_weights()
        other.project(normal(1, K))
    fused.project(normal(1, K).requires_grad_(True))
    assert calls == []


def capture(fused, hidden):
    for _ in range(3):
        fused.project(hidden)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = fused.project(hidden)
    return graph, results


@pytest.mark.parametrize("preset", WIDTH)
@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_a_captured_call_equals_an_eager_one_also_behind_a_reload(preset, tokens, calls):
    fused = projection(preset, fp32=("weights_proj",) if preset == "wk_only" else ())
    assert fused.post_load_weights()
    hidden = normal(tokens, K)
    graph, results = capture(fused, hidden)
    assert bool(calls) is (preset == "unfused" and tokens <= 16)
    for seed in range(3):
        hidden.copy_(normal(tokens, K, seed=seed))
        for out in results.values():
            out.fill_(float("nan"))
        graph.replay()
        assert same_bits(results, fused.project(hidden))
        for at, name in enumerate(ROWS):
            weight_of(fused, name).copy_(normal(ROWS[name], K, seed=10 * seed + at))
        torch.cuda.synchronize()
        graph.replay()
        assert same_bits(results, fused.project(hidden))
        assert_close(results["wk"], hidden, normal(128, K, seed=10 * seed + 2), 2.0**-8, 2.0**-17)


def test_weights_are_not_moved_in_a_capture():
    fresh, fused = projection("nvfp4_all"), projection("nvfp4_all")
    fused.post_load_weights()
    hidden = normal(1, K)
    fused.project(hidden)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fused.project(hidden)
        for call in (fresh.post_load_weights, fused.post_load_weights, fused.release, lambda: fused.load_weights({})):
            with pytest.raises(RuntimeError, match="being captured"):
                call()
    assert fused.is_fused
    assert fresh.post_load_weights()


def requested():
    """Bytes that tensors hold, without what the allocator adds to them."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_fusing_takes_no_memory_and_releasing_gives_exact_weights():
    fused = projection("nvfp4_all")
    before = {name: weight_of(fused, name).clone() for name in ROWS}
    held = requested()
    assert fused.post_load_weights()
    assert requested() == held
    assert fused.post_load_weights()
    assert requested() == held
    fused.release()
    assert requested() == held
    assert all(torch.equal(weight_of(fused, name), weight) for name, weight in before.items())


def test_a_round_trip_over_the_cpu_leaves_the_layout_and_stays_right():
    fused = projection("nvfp4_all")
    assert fused.post_load_weights()
    hidden = normal(4, K)
    want = fused.project(hidden)
    for linear in fused._linears.values():
        linear.cpu()
    assert fused.explain(hidden)[0] is Path.SEPARATE
    for name, out in fused.project(hidden.cpu()).items():
        assert_close(out, hidden.cpu(), weight_of(fused, name), 2.0**-8, 2.0**-17)
    with pytest.raises(RuntimeError):
        fused.project(hidden)
    for linear in fused._linears.values():
        linear.cuda()
    assert fused.post_load_weights()
    assert same_bits(fused.project(hidden), want)


def test_a_replaced_weight_is_used_at_once():
    fused = projection("nvfp4_all")
    fused.post_load_weights()
    hidden, new = normal(4, K), normal(128, K, seed=50)
    fused._linears["wk"].weight = torch.nn.Parameter(new, requires_grad=False)
    results = fused.project(hidden)
    assert torch.equal(results["wk"], torch.nn.functional.linear(hidden, new))
    assert results["q_a"].stride() == (2304, 1)
    for name, out in results.items():
        assert_close(out, hidden, weight_of(fused, name), 2.0**-8, 2.0**-17)


def test_gradients_flow():
    fused = projection("nvfp4_all")
    fused.post_load_weights()
    hidden = normal(3, K).requires_grad_(True)
    upstream = {name: normal(3, rows, seed=rows) for name, rows in ROWS.items()}
    results = fused.project(hidden)
    torch.autograd.backward([results[name] for name in ROWS], [upstream[name] for name in ROWS])
    exact, allowed = torch.zeros(2, 3, K, device="cuda", dtype=torch.float64)
    for name in ROWS:  # each part's gradient is rounded, and so is each sum of them
        one, weight = upstream[name].double(), weight_of(fused, name).double()
        exact += one @ weight
        allowed += (one @ weight).abs() * (len(ROWS) * 2.0**-8) + (one.abs() @ weight.abs()) * 2.0**-17
    assert ((hidden.grad.double() - exact).abs() <= allowed).all()
