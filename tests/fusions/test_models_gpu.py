"""The model fronts on a GPU at the models' sizes, with the native ops: fusion on against off, and decode steps in CUDA
graphs."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusions.csa2 import Path as Csa2Path
from fusions.models import Csa2Front, MlaConfig, MlaFront, __main__, check, decode_step_csa2, decode_step_mla, randomize
from fusions.models.layers import RMSNorm
from fusions.ops import OPS, choice
from fusions.qkv_a import Path

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sums_in_fp32")]

BF16, FP32 = torch.bfloat16, torch.float32
CUDA = torch.device("cuda")
PRESETS = ("nvfp4_all", "wk_only", "unfused", "indexer_pair")
CONTEXT = 4096


@pytest.fixture(autouse=True)
def native_on_every_gpu(monkeypatch):
    monkeypatch.setenv(choice.CHOICE, "native")
    monkeypatch.setenv(choice.POLICY, "*")


def normal(*shape, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(BF16)


def mla(fusion, config, seed=0):
    front = MlaFront(config, fusion, device=CUDA)
    randomize(front, seed)
    assert front.post_load_weights() is (fusion is not None)
    return front


def csa2(fusion, seed=0):
    front = Csa2Front(fusion=fusion, device=CUDA)
    randomize(front, seed)
    assert front.post_load_weights() is fusion
    return front


def assert_close(out, hidden, weight, rounding, accumulation):
    exact = hidden.double() @ weight.double().t()
    magnitude = hidden.double().abs() @ weight.double().abs().t()
    error = (out.double() - exact).abs()
    assert (error <= exact.abs() * rounding + magnitude * accumulation + 2.0**-133).all(), float(error.max())


def same(first, second):
    """The same bits; selections in any order."""
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            assert a is b
        elif a.dtype is torch.int32:
            assert torch.equal(a.sort().values, b.sort().values)
        else:
            assert torch.equal(a, b)


def copied(found):
    return [None if part is None else part.clone() for part in found]


def captured(step):
    """A graph of one step on a stream of its own, and the tensors that a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, found


def norms(front):
    return [module for module in front.modules() if isinstance(module, RMSNorm)]


@pytest.mark.parametrize("preset", PRESETS)
def test_mla_on_and_off_are_within_the_contract(preset):
    config = MlaConfig().suiting(preset)
    on, off = mla(preset, config), mla(None, config)
    for tokens in (1, 4, 17):
        hidden = normal(tokens, config.hidden_size, seed=tokens)
        assert on.fused.explain(hidden)[0] in (Path.LINEAR, Path.MIN_LATENCY)
        with torch.no_grad():
            for front in (on, off):
                found = front.project(hidden)
                kv_a = torch.cat((found.compressed_kv, found.k_pe), -1)
                results = {"q_a": found.q, "kv_a": kv_a, "wk": found.indexer_k, "weights_proj": found.indexer_weights}
                for name, linear in front.parts.items():
                    out, share = results[name], 2.0**-17 if linear.weight.dtype is BF16 else 2.0**-18
                    assert out.dtype is (FP32 if name == "weights_proj" and preset != "nvfp4_all" else BF16)
                    assert_close(out, hidden, linear.weight, 0.0 if out.dtype is FP32 else 2.0**-8, share)
            assert check.mla_share(on, off, hidden) <= 1
            first, second = (decode_step_mla(front, tokens, CONTEXT)() for front in (on, off))
        for a, b in zip(first[:3], second[:3], strict=True):
            assert (a.double() - b.double()).abs().max() <= 2.0**-6 * b.double().abs().max()
        assert first.topk.shape == (tokens, 2048)
        assert check.topk_overlap(first.topk, second.topk) >= 0.99


@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("context", [CONTEXT, 2048])
def test_an_mla_step_replays_like_eager_over_new_inputs_and_weights(preset, context):
    front = mla(preset, MlaConfig().suiting(preset))
    step = decode_step_mla(front, 4, context)
    graph, found = captured(step)
    assert (found.topk is None) is (context == 2048)
    seen = []
    for seed in range(4):
        step.hidden.copy_(normal(*step.hidden.shape, seed=seed))
        # Rows of their own for each sequence; one has fewer keys than are selected.
        step.positions.copy_(torch.tensor([[context - 1 - seed], [context // 2 + seed], [17 + seed], [context - 1]]))
        if seed == 3:
            randomize(front, seed)  # waits
        graph.replay()
        replayed, written = copied(found), copied(step.caches)
        same(replayed, step())
        same(written, step.caches)
        seen.append(replayed)
    assert all(not torch.equal(a[0], b[0]) for a, b in itertools.pairwise(seen))


@pytest.mark.parametrize(("tokens", "path"), [(1, Csa2Path.FUSED), (4, Csa2Path.SEPARATE), (9, Csa2Path.LINEAR)])
def test_csa2_on_and_off_are_within_the_contract(tokens, path):
    on, off, hidden = csa2(True), csa2(False), normal(tokens, 5120)
    assert on.fused.explain(hidden)[0] is path
    assert path is Csa2Path.LINEAR or on.explain(hidden) == f"{path}: native tinygemm2"
    with torch.no_grad():
        for front in (on, off):
            for linear, out in zip((front.wq_a, front.wkv), front.project(hidden), strict=True):
                assert_close(out, hidden, linear.weight, 2.0**-8, 2.0**-18)
        assert check.csa2_share(on, off, hidden) <= 1
        for a, b in zip(on(hidden), off(hidden), strict=True):
            assert (a.double() - b.double()).abs().max() <= 2.0**-6 * b.double().abs().max()


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_csa2_step_replays_like_eager_over_new_inputs_and_weights(fusion, tokens):
    front = csa2(fusion)
    step = decode_step_csa2(front, tokens)
    graph, found = captured(step)
    seen = []
    for seed in range(4):
        step.hidden.copy_(normal(*step.hidden.shape, seed=seed))
        if seed == 3:
            randomize(front, seed)  # waits
            assert not fusion or front.fused.is_fused
        graph.replay()
        replayed = copied(found)
        same(replayed, step())
        seen.append(replayed)
    assert all(not torch.equal(a[0], b[0]) for a, b in itertools.pairwise(seen))


def test_the_norms_are_native_and_agree_with_torch():
    fronts = [csa2(True), mla("unfused", MlaConfig.small())]
    for norm in (norm for front in fronts for norm in norms(front)):
        wide = normal(5, norm.weight.shape[0] + 24, seed=1)
        for x in (wide[:, 8:-16], wide[:1, 8:-16]):
            assert norm.is_native(x)
            exact = x.double() * (x.double().square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
            assert ((norm(x).double() - exact).abs() <= exact.abs() * (2.0**-8 + 2.0**-16) + 2.0**-133).all()


def test_norms_that_the_kernel_does_not_take_go_through_torch():
    norm = RMSNorm(64, 1e-6, device=CUDA)
    x = normal(2, 64)
    assert norm.is_native(x)
    assert not norm.is_native(x.float())
    assert not norm.is_native(x[None])
    assert not norm.is_native(normal(64, 2).t())
    trained = x.clone().requires_grad_()
    assert not norm.is_native(trained)
    norm(trained).sum().backward()
    assert trained.grad is not None
    with torch.no_grad():
        assert norm.is_native(trained)


def test_the_program_measures_a_step(capsys):
    assert "native" in OPS
    assert __main__.main(["--context", str(CONTEXT)]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("us on", "us off", "fused: native tinygemm2", "full fronts"))
    assert __main__.main(["--size", "small", "--tokens", "4"]) == 0
