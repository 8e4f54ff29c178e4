"""The model fronts on a CPU: what they compute, and that fusion on and off give the same."""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parent))

from recording import Recording, normal, same_bits, whole

from fusions.csa2 import Path as Csa2Path
from fusions.models import (
    Csa2Config,
    Csa2Front,
    IndexerUse,
    MlaCaches,
    MlaConfig,
    MlaFront,
    __main__,
    check,
    decode_step_csa2,
    decode_step_mla,
    randomize,
    sparse_indexer,
)
from fusions.models.layers import RMSNorm, Rope, rotate
from fusions.models.sparse_indexer import SparseIndexer, index_scores

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
SMALL, TOPK = MlaConfig.small(), MlaConfig.small().index_topk
PRESETS = ("nvfp4_all", "wk_only", "unfused", "indexer_pair")
ROWS = {"q_a": 96, "kv_a": 136, "wk": 128, "weights_proj": 16, "q_b": 448, "wq_b": 2048}
# Rows of the weights that one call reads, by preset: with the whole indexer, with its keys only, without it.
ALWAYS = [ROWS["q_b"]]
GEMMS = {
    None: ([96, 136, 128, 16], [96, 136]),
    "nvfp4_all": ([376], [376]),
    "wk_only": ([360, 16], [360]),
    "unfused": ([232, 128, 16], [232]),
    "indexer_pair": ([232, 144], [232]),
}
KEYS = [
    "q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight",
    "indexer.wq_b.weight", "indexer.wk.weight", "indexer.k_norm.weight", "indexer.k_norm.bias",
    "indexer.weights_proj.weight",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The matrices are small, and threads of a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Linears(TorchFunctionMode):
    """Remembers the rows of the weight of every F.linear."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            self.rows.append(args[1].shape[0])
        return func(*args, **(kwargs or {}))


def mla(fusion, config=SMALL, seed=0, **more):
    front = MlaFront(config, fusion, **more)
    randomize(front, seed)
    assert front.post_load_weights() is (fusion is not None)
    return front


def make_whole(front, seed=0):
    """Weights of -1, 0 and 1 for the projections of the hidden states: their results have no rounding of sums."""
    for place, part in enumerate(front.parts.values()):
        part.weight.data.copy_(whole(*part.weight.shape, seed=seed + place))
    return front


def places(batch, tokens, start=0):
    return (start + torch.arange(tokens)).repeat(batch, 1)


def chosen(topk):
    return [set(row.tolist()) - {-1} for row in topk]


def equal(first, second):
    return all(
        (a is None and b is None) or (a.shape == b.shape and torch.equal(a, b))
        for a, b in zip(first, second, strict=True)
    )


# -- fusion on and off -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("preset", PRESETS)
def test_projections_on_and_off_are_within_the_contract(preset, tokens):
    config = SMALL.suiting(preset)
    on, off = mla(preset, config), mla(None, config)
    hidden = normal(tokens, config.hidden_size, seed=3)
    for front in (on, off):
        found = front.project(hidden)
        kv_a = torch.cat((found.compressed_kv, found.k_pe), -1)
        results = {"q_a": found.q, "kv_a": kv_a, "wk": found.indexer_k, "weights_proj": found.indexer_weights}
        for name, linear in front.parts.items():
            out, weight = results[name], linear.weight
            assert out.shape == (tokens, ROWS[name])
            assert out.dtype is (FP32 if name == "weights_proj" and preset != "nvfp4_all" else BF16)
            exact, magnitude = hidden.double() @ weight.double().t(), hidden.double().abs() @ weight.double().abs().t()
            share = 2.0**-17 if weight.dtype is BF16 else 2.0**-18
            rounding = 0.0 if out.dtype is FP32 else 2.0**-8
            assert ((out.double() - exact).abs() <= exact.abs() * rounding + magnitude * share).all(), name
    assert check.mla_share(on, off, hidden) <= 1


@pytest.mark.parametrize("preset", PRESETS)
def test_where_sums_are_exact_on_and_off_are_equal(preset):
    config = SMALL.suiting(preset)
    on, off = make_whole(mla(preset, config)), make_whole(mla(None, config))
    hidden = whole(2 * 70, config.hidden_size, seed=9)
    caches = [front.caches(2, 80) for front in (on, off)]
    outputs = [front(hidden, places(2, 70), cache) for front, cache in zip((on, off), caches, strict=True)]
    assert equal(*outputs)
    assert equal(*caches)
    assert outputs[0].topk.shape == (140, TOPK)


@pytest.mark.parametrize("preset", PRESETS)
def test_on_and_off_give_the_same_answer(preset):
    config = SMALL.suiting(preset)
    on, off = mla(preset, config), mla(None, config)
    hidden = normal(2 * 70, config.hidden_size, seed=5)
    first, second = (front(hidden, places(2, 70), front.caches(2, 80)) for front in (on, off))
    for a, b in zip(first[:3], second[:3], strict=True):
        assert (a.double() - b.double()).abs().max() <= 2.0**-6 * b.double().abs().max()
    assert check.topk_overlap(first.topk, second.topk) >= 0.999


@pytest.mark.parametrize("preset", PRESETS)
def test_gemms_that_run_with_the_whole_indexer(preset):
    config = SMALL.suiting(preset)
    for front in (mla(preset, config), mla(None, config)):
        with Linears() as linears:
            front(normal(1, 256), places(1, 1, 60), front.caches(1, 64))
        expected = GEMMS[front.fusion][0] + ALWAYS + [ROWS["wq_b"]]
        assert Counter(linears.rows) == Counter(expected)


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_state_dict_is_that_of_plain_linears(preset):
    config = SMALL.suiting(preset)
    front, plain = mla(preset, config, seed=1), mla(None, config, seed=2)
    state = front.state_dict()
    assert list(state) == KEYS
    assert {key: (value.shape, value.dtype) for key, value in state.items()} == {
        key: (value.shape, value.dtype) for key, value in plain.state_dict().items()
    }
    plain.load_state_dict(state)
    hidden = normal(3, 256)
    assert check.mla_share(front, plain, hidden) <= 1
    assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_reload_in_place_is_seen(preset):
    config = SMALL.suiting(preset)
    front, fresh = mla(preset, config, seed=1), mla(preset, config, seed=2)
    hidden, before = normal(3, 256), None
    if preset != "indexer_pair":
        before = front.project(hidden)
    front.load_state_dict(fresh.state_dict())
    assert front.fused.is_fused
    assert equal(front.project(hidden), fresh.project(hidden))
    assert before is None or not torch.equal(before.q, front.project(hidden).q)
    randomize(front, 1)
    assert front.fused.is_fused
    assert not torch.equal(front.project(hidden).q, fresh.project(hidden).q)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_copy_has_weights_of_its_own_and_is_fused_by_its_own_hook(preset):
    front = mla(preset, SMALL.suiting(preset))
    twin, hidden = copy.deepcopy(front), normal(3, 256)
    before = front.project(hidden)
    assert not twin.fused.is_fused  # torch clones each Parameter by itself
    assert check.mla_share(front, twin, hidden) <= 1
    assert twin.post_load_weights()
    assert equal(twin.project(hidden), before)
    randomize(twin, 7)
    assert equal(front.project(hidden), before)
    assert front.fused.is_fused
    assert not torch.equal(twin.project(hidden).indexer_k, before.indexer_k)


def test_the_hook_runs_those_below_once_each_and_says_whether_all_fused(monkeypatch):
    for front in (MlaFront(SMALL, "unfused"), Csa2Front(Csa2Config.small(), op=Recording(), policy="*")):
        calls, real = [], front.fused.post_load_weights
        monkeypatch.setattr(front.fused, "post_load_weights", lambda real=real, calls=calls: calls.append(1) or real())
        assert front.post_load_weights() is True
        assert calls == [1]
        monkeypatch.setattr(front.fused, "post_load_weights", lambda: False)
        assert front.post_load_weights() is False


def test_types_that_suit_a_preset():
    types = {name: SMALL.suiting(name) for name in (None, *PRESETS)}
    assert {name: (config.wk_dtype, config.weights_proj_dtype) for name, config in types.items()} == {
        None: (BF16, BF16),
        "nvfp4_all": (BF16, BF16),
        "wk_only": (BF16, FP32),
        "unfused": (BF16, FP32),
        "indexer_pair": (FP32, FP32),
    }
    assert types["indexer_pair"].suiting("12055") == types["indexer_pair"]
    with pytest.raises(KeyError):
        SMALL.suiting("no such preset")
    with pytest.raises(ValueError, match="no such preset"):
        MlaFront(SMALL, "no such preset")


def test_default_sizes_are_those_of_the_models():
    front = MlaFront(device=torch.device("meta"))
    shapes = {name: tuple(part.weight.shape) for name, part in front.parts.items()}
    assert shapes == {"q_a": (1536, 7168), "kv_a": (576, 7168), "wk": (128, 7168), "weights_proj": (64, 7168)}
    assert front.q_b_proj.weight.shape == (24576, 1536)
    assert front.indexer.wq_b.weight.shape == (8192, 1536)
    assert front.indexer.factor == 0.011048543456039806
    csa2 = Csa2Front(device=torch.device("meta"))
    assert (csa2.wq_a.weight.shape, csa2.wkv.weight.shape) == ((1280, 5120), (512, 5120))


# -- the indexer -------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_a_loop():
    batch, tokens, heads, dim, keys = 2, 3, 4, 8, 11
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, tokens, heads, dim, generator=generator)
    k = torch.randn(batch, keys, dim, generator=generator)
    weights = torch.randn(batch, tokens, heads, generator=generator)
    found = index_scores(q, k, weights)
    assert (found.shape, found.dtype) == ((batch, tokens, keys), FP32)
    for b in range(batch):
        for t in range(tokens):
            for s in range(keys):
                score = 0.0
                for h in range(heads):
                    dot = sum(float(q[b, t, h, d]) * float(k[b, s, d]) for d in range(dim))
                    score += float(weights[b, t, h]) * max(dot, 0.0)
                assert found[b, t, s].item() == pytest.approx(score, abs=1e-5)


def test_scores_do_not_round_to_the_type_of_queries_and_keys():
    q, k = normal(1, 2, 16, 128).unflatten(0, (1, 1)).view(1, 2, 16, 128), normal(1, 40, 128, seed=1)
    weights = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(2))
    dots = torch.einsum("bthd,bsd->bths", q.double(), k.double()).relu()
    exact = torch.einsum("bths,bth->bts", dots, weights.double())
    assert (index_scores(q, k, weights).double() - exact).abs().max() < 1e-3
    assert (index_scores(q, k, weights).double() - exact).abs().max() / exact.abs().max() < 2.0**-18


def bare_indexer(topk):
    return SparseIndexer(8, 8, 2, 4, 2, topk, dtype=FP32, wk_dtype=FP32, weights_proj_dtype=FP32)


def test_selection_is_of_the_largest_visible_scores_with_the_factor():
    indexer = bare_indexer(2)
    keys = torch.tensor([5.0, 1.0, 4.0, 2.0, 9.0])[None, :, None] * torch.tensor([1.0, 0, 0, 0])
    queries = torch.zeros(1, 3, 2, 4)
    queries[..., 0] = 1
    weights = torch.ones(1, 3, 2)
    weights[0, 2] = -1  # largest score: the smallest product
    positions = torch.tensor([[0, 3, 3]])
    found = indexer.select(queries, keys, weights, positions)
    assert (found.dtype, found.shape) == (torch.int32, (1, 3, 2))
    assert chosen(found[0]) == [{0}, {0, 2}, {1, 3}]
    assert found[0, 0].tolist().count(-1) == 1


def test_scores_scaled_by_the_factor_reach_the_selection(monkeypatch):
    indexer, seen, real = bare_indexer(2), [], index_scores
    monkeypatch.setattr(sparse_indexer, "index_scores", lambda q, k, w: seen.append(w) or real(q, k, w))
    weights = torch.randn(1, 1, 2, generator=torch.Generator().manual_seed(0)).to(BF16)
    indexer.select(torch.ones(1, 1, 2, 4), torch.ones(1, 3, 4), weights, torch.tensor([[2]]))
    assert torch.equal(seen[0], weights.float() * (4**-0.5 * 2**-0.5))


# -- RoPE and norms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_keeps_norms_and_depends_on_distance_alone(interleaved):
    rope = Rope(64, 10000.0)
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, generator=generator), torch.randn(64, generator=generator)

    def at(x, place):
        return rotate(x[None], rope(torch.tensor([place])), interleaved=interleaved)[0]

    assert torch.equal(at(a, 0), a)
    assert not torch.allclose(at(a, 1), a, atol=0.1)
    for place in (1, 17, 300):
        assert at(a, place).norm().item() == pytest.approx(a.norm().item(), rel=1e-5)
        assert (at(a, place + 5) @ at(b, place)).item() == pytest.approx((at(a, 5) @ b).item(), abs=1e-3)
    assert (at(a, 5) @ b).item() != pytest.approx((at(a, 6) @ b).item(), abs=1e-1)


@pytest.mark.parametrize(("interleaved", "other"), [(False, 32), (True, 1)])
def test_rope_turns_the_pairs_of_its_order(interleaved, other):
    x = torch.zeros(2, 3, 64)
    x[:, :, 0] = 1
    turned = rotate(x, Rope(64, 10000.0)(torch.tensor([1, 2])), interleaved=interleaved)
    for row, angle in enumerate((1.0, 2.0)):
        expected = torch.zeros(3, 64)
        expected[:, 0], expected[:, other] = math.cos(angle), math.sin(angle)
        assert torch.allclose(turned[row], expected, atol=1e-6)
    last = Rope(64, 10000.0).frequencies[-1].item()
    assert last == pytest.approx(10000.0 ** (-62 / 64))


def test_rope_over_an_odd_number_is_refused():
    for dim in (0, 7):
        with pytest.raises(ValueError, match="even"):
            Rope(dim, 10000.0)


def test_rmsnorm_rounds_once_and_takes_rows_of_any_distance():
    norm, x = RMSNorm(48, 1e-3), normal(3, 100)[:, 4:52]
    randomize(norm)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt() * norm.weight.double()
    assert not norm.is_native(x)
    found = norm(x)
    assert found.dtype is BF16
    assert (found.double() - exact).abs().max() <= (exact.abs() * 2.0**-8).max()
    assert torch.equal(found, exact.to(BF16))
    assert torch.equal(norm(torch.zeros(1, 48, dtype=BF16)), torch.zeros(1, 48, dtype=BF16))


# -- the MLA front -----------------------------------------------------------------------------------------------------


def turned_as_complex(x, positions, interleaved):
    """RoPE by complex numbers, in FP64."""
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
    turns = torch.polar(
        torch.ones(len(positions), half, dtype=FP64),
        positions.double()[:, None] * 10000.0 ** (-torch.arange(half, dtype=FP64) / half),
    )
    number = torch.view_as_complex(pairs.contiguous()) * (turns if x.dim() == 2 else turns[:, None])
    pairs = torch.view_as_real(number)
    return (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)


def reference(state, hidden, c):
    """The front for one sequence from position 0 on, in FP64 and in other words."""
    w = {key: value.double() for key, value in state.items()}
    x, positions = hidden.double(), torch.arange(len(hidden))

    def rms(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.eps).sqrt() * weight

    kv = x @ w["kv_a_proj_with_mqa.weight"].t()
    latent = rms(x @ w["q_a_proj.weight"].t(), w["q_a_layernorm.weight"])
    q = (latent @ w["q_b_proj.weight"].t()).view(len(x), c.num_heads, -1)
    q[..., c.qk_nope_head_dim :] = turned_as_complex(q[..., c.qk_nope_head_dim :], positions, True)
    compressed = rms(kv[:, : c.kv_lora_rank], w["kv_a_layernorm.weight"])
    k_pe = turned_as_complex(kv[:, c.kv_lora_rank :], positions, True)

    key = x @ w["indexer.wk.weight"].t()
    key = (key - key.mean(-1, keepdim=True)) / (key.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    key = key * w["indexer.k_norm.weight"] + w["indexer.k_norm.bias"]
    key[:, :64] = turned_as_complex(key[:, :64], positions, False)
    query = (latent @ w["indexer.wq_b.weight"].t()).view(len(x), c.index_n_heads, -1)
    query[..., :64] = turned_as_complex(query[..., :64], positions, False)
    heads = x @ w["indexer.weights_proj.weight"].t() * c.index_head_dim**-0.5 * c.index_n_heads**-0.5
    scores = torch.einsum("th,ths->ts", heads, torch.einsum("thd,sd->ths", query, key).clamp(min=0))
    selected = [set(row[: t + 1].argsort(descending=True)[: c.index_topk].tolist()) for t, row in enumerate(scores)]
    return q, compressed, k_pe, key, selected


@pytest.mark.parametrize("preset", [None, "nvfp4_all"])
def test_a_prefill_is_what_another_wording_of_it_gives(preset):
    config = replace(SMALL, dtype=FP32, wk_dtype=FP32, weights_proj_dtype=FP32)
    front = mla(preset, config)
    hidden = normal(90, 256, seed=4).float()
    caches = front.caches(1, 100)
    found = front(hidden, places(1, 90), caches)
    q, compressed, k_pe, key, selected = reference(front.state_dict(), hidden, config)
    for out, exact in ((found.q, q), (found.compressed_kv, compressed), (found.k_pe, k_pe)):
        assert (out.double() - exact).abs().max() < 1e-4
    for cache, exact in zip(caches, (compressed, k_pe, key), strict=True):
        assert (cache[0, :90].double() - exact).abs().max() < 1e-4
        assert not cache[0, 90:].any()
    assert chosen(found.topk) == selected


@pytest.mark.parametrize("preset", [None, "nvfp4_all", "indexer_pair"])
def test_decode_steps_are_a_prefill_in_one_go(preset):
    """In FP32, where one token and many round alike; from no token to more than the indexer selects, so that keys are
    there which were not needed when their tokens came."""
    config = replace(SMALL, dtype=FP32, wk_dtype=FP32, weights_proj_dtype=FP32, index_topk=12)
    front, batch, tokens = mla(preset, config), 2, 20
    hidden = normal(batch * tokens, 256, seed=6).float()
    caches, stepwise = front.caches(batch, 24), front.caches(batch, 24)
    at_once = front(hidden, places(batch, tokens), caches)
    for t in range(tokens):
        now = hidden.view(batch, tokens, -1)[:, t]
        step = front(now, places(batch, 1, t), stepwise, context=t + 1)
        assert (step.topk is None) == (t + 1 <= 12)
        rows = torch.arange(batch) * tokens + t
        for out, whole_run in zip(step[:3], at_once[:3], strict=True):
            assert torch.allclose(out, whole_run[rows], atol=1e-4)
        every = [set(range(t + 1))] * batch
        assert chosen(at_once.topk[rows]) == (every if step.topk is None else chosen(step.topk))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(caches, stepwise, strict=True))


def test_sequences_have_lengths_of_their_own():
    config = replace(SMALL, dtype=FP32, wk_dtype=FP32, weights_proj_dtype=FP32)
    front, hidden = mla("nvfp4_all", config), normal(2, 256, seed=8).float()
    filled = MlaCaches(*(normal(*cache.shape, seed=i).float() for i, cache in enumerate(front.caches(2, 64))))
    both = front(hidden, torch.tensor([[59], [20]]), MlaCaches(*(cache.clone() for cache in filled)))
    for row, place in enumerate((59, 20)):
        own = MlaCaches(*(cache[row : row + 1].clone() for cache in filled))
        one = front(hidden[row : row + 1], torch.tensor([[place]]), own)
        assert torch.allclose(one.q, both.q[row : row + 1], atol=1e-4)
        assert chosen(one.topk)[0] == chosen(both.topk)[row]
        assert max(chosen(one.topk)[0]) <= place
        assert len(chosen(one.topk)[0]) == min(place + 1, TOPK)


# -- the short path ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("capacity", [TOPK, TOPK + 1])
def test_what_a_short_context_leaves_out(preset, capacity):
    config = SMALL.suiting(preset)
    short, long = mla(preset, config), mla(preset, config, short_path=False)
    hidden, positions = normal(TOPK, 256, seed=2), places(1, TOPK)
    outputs, caches, rows = [], [], []
    for front in (short, long):
        caches.append(front.caches(1, capacity))
        with Linears() as linears:
            outputs.append(front(hidden, positions, caches[-1], context=TOPK))
        rows.append(Counter(linears.rows))
    grows = capacity > TOPK
    assert short.indexer_use(TOPK, capacity) is (IndexerUse.KEYS if grows else IndexerUse.NONE)
    assert long.indexer_use(TOPK, capacity) is IndexerUse.SELECT
    assert rows[0] == Counter(GEMMS[preset][0 if grows else 1] + ALWAYS)
    assert rows[1] == Counter(GEMMS[preset][0] + ALWAYS + [ROWS["wq_b"]])
    # The selection that was left out is of every key there is.
    assert outputs[0].topk is None
    assert chosen(outputs[1].topk) == [set(range(t + 1)) for t in range(TOPK)]
    assert equal(outputs[0][:3], outputs[1][:3])
    assert equal(caches[0][:2], caches[1][:2])
    assert bool(caches[0].index_k.any()) is grows
    assert not grows or torch.equal(caches[0].index_k, caches[1].index_k)


def test_a_context_longer_than_the_selection_needs_the_indexer():
    front = mla(None)
    assert front.indexer_use(TOPK + 1, TOPK + 1) is IndexerUse.SELECT
    found = front(normal(1, 256), places(1, 1, TOPK), front.caches(1, TOPK + 1))
    assert found.topk.shape == (1, TOPK)


@pytest.mark.parametrize(
    ("rows", "positions", "batch", "context", "match"),
    [
        (3, (1, 2), 1, None, "hidden"),
        (2, (1, 2), 2, None, "caches"),
        (2, (1, 2), 1, 0, "context=0"),
        (2, (1, 2), 1, 9, "context=9"),
    ],
)
def test_shapes_that_do_not_belong_together(rows, positions, batch, context, match):
    front = mla("unfused", SMALL)
    with pytest.raises(ValueError, match=match):
        front(normal(rows, 256), places(*positions), front.caches(batch, 8), context=context)
    caches = front.caches(1, 8)
    with pytest.raises(ValueError, match="caches"):
        front(normal(2, 256), places(1, 2), caches._replace(k_pe=caches.k_pe[:, :4]))


# -- decode steps ------------------------------------------------------------------------------------------------------


def test_a_decode_step_follows_its_inputs_and_can_be_repeated():
    step = decode_step_mla(mla("nvfp4_all"), 3, 60)
    first, before = step(), [cache.clone() for cache in step.caches]
    assert (first.q.shape, first.topk.shape) == ((3, 4, 112), (3, TOPK))
    assert torch.equal(step.positions, torch.full((3, 1), 59))
    assert equal(first, step())
    assert equal(before, step.caches)
    assert all(cache.any() for cache in step.caches)
    assert len(step.caches.latent[0].unique()) > 100
    step.hidden.copy_(normal(3, 256, seed=11))
    step.positions.fill_(20)
    other = step()
    assert not torch.equal(other.compressed_kv, first.compressed_kv)
    assert chosen(other.topk) == [set(range(21))] * 3
    assert decode_step_mla(step.front, 2, TOPK)().topk is None
    same = decode_step_mla(step.front, 3, 60)
    assert equal(same(), first)


def test_a_decode_step_of_csa2_follows_its_input():
    step = decode_step_csa2(csa2(fusion=False)[0], 2)
    first = step()
    assert equal(first, step())
    step.hidden.copy_(normal(2, 256, seed=11))
    assert not torch.equal(step().q, first.q)
    assert equal(first, decode_step_csa2(step.front, 2)())


# -- the CSA2 front ----------------------------------------------------------------------------------------------------


def csa2(fusion=True, seed=0):
    op = Recording()
    front = Csa2Front(Csa2Config.small(), fusion, op=op, policy="*")
    randomize(front, seed)
    assert front.post_load_weights() is fusion
    return front, op


@pytest.mark.parametrize(
    ("tokens", "calls", "path"), [(1, 1, "fused"), (2, 2, "separate"), (8, 2, "separate"), (9, 0, "linear")]
)
def test_csa2_on_and_off_give_the_same_answer(tokens, calls, path):
    (on, op), (off, _) = csa2(), csa2(fusion=False)
    hidden = normal(tokens, 256, seed=1)
    outputs = [front(hidden) for front in (on, off)]
    assert len(op.taken()) == calls
    assert on.fused.explain(hidden)[0] is Csa2Path(path)
    assert on.explain(hidden).startswith(path)
    assert off.explain(hidden) == "plain Linears"
    for front in (on, off):
        for weight, out in zip((front.wq_a.weight, front.wkv.weight), front.project(hidden), strict=True):
            exact, magnitude = hidden.double() @ weight.double().t(), hidden.double().abs() @ weight.double().abs().t()
            assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8 + magnitude * 2.0**-18).all()
    assert check.csa2_share(on, off, hidden) <= 1
    for a, b in zip(*outputs, strict=True):
        assert (a.double() - b.double()).abs().max() <= 2.0**-6 * b.double().abs().max()


def test_csa2_norms_what_belongs_to_them():
    front, _ = csa2()
    hidden = normal(1, 256, seed=1)
    q, kv = (hidden.double() @ weight.double().t() for weight in (front.wq_a.weight, front.wkv.weight))
    found = front(hidden)
    for out, x, norm in ((found.q, q, front.q_norm), (found.kv, kv, front.kv_norm)):
        exact = x / x.square().mean(-1, keepdim=True).sqrt() * norm.weight.double()
        assert (out.double() - exact).abs().max() < 2.0**-5
        assert norm.eps == 1e-20


def test_csa2_state_dict_and_reload():
    (front, op), (plain, _) = csa2(seed=1), csa2(fusion=False, seed=2)
    assert list(front.state_dict()) == ["wq_a.weight", "wkv.weight", "q_norm.weight", "kv_norm.weight"]
    assert list(plain.state_dict()) == list(front.state_dict())
    front.load_state_dict(plain.state_dict())
    hidden = whole(1, 256)
    assert front.fused.is_fused
    assert check.csa2_share(front, plain, hidden) <= 1
    assert len(op.taken()) == 1
    copied = copy.deepcopy(front)
    assert copied.post_load_weights()
    assert copied.wq_a.weight.data_ptr() != front.wq_a.weight.data_ptr()
    assert all(same_bits(a, b) for a, b in zip(copied(hidden), front(hidden), strict=True))


# -- the comparison, and the program -----------------------------------------------------------------------------------


def test_the_comparison_sees_a_wrong_projection():
    for name in ("q_a", "kv_a", "wk", "weights_proj"):
        on, off, hidden = mla("nvfp4_all"), mla(None), normal(2, 256)
        assert check.mla_share(on, off, hidden) <= 1
        on.parts[name].weight.data[3] *= 1.1
        assert check.mla_share(on, off, hidden) > 1, name
    for place in range(2):
        (on, _), (off, _), hidden = csa2(), csa2(fusion=False), normal(1, 256)
        (on.wq_a, on.wkv)[place].weight.data[3] *= 1.1
        assert check.csa2_share(on, off, hidden) > 1


def test_the_bound_by_types():
    hidden, weight = whole(1, 256), whole(4, 256, seed=1)
    exact, magnitude = (hidden.double() @ weight.double().t()).abs(), hidden.double().abs() @ weight.double().abs().t()
    full = weight.float() * 1.0001
    for given, dtype, rounding, share in (
        (weight, BF16, 2.0**-8, 2.0**-17),
        (weight.float(), FP32, 0.0, 2.0**-18),
        (weight.float(), BF16, 2.0**-8, 2.0**-18),
        (full, FP32, 0.0, 2.0**-18 + 2.0**-10),
    ):
        assert torch.allclose(check.bound(hidden, given, dtype), exact * rounding + magnitude * share, rtol=1e-3)


def test_the_overlap_of_selections():
    def overlap(first, second):
        return check.topk_overlap(torch.tensor(first).int(), torch.tensor(second).int())

    assert overlap([[0, 3, 5]], [[5, 0, 3]]) == 1
    assert overlap([[0, 3, 5, -1]], [[5, 0, 7, -1]]) == pytest.approx(2 / 3)
    assert overlap([[0, 1], [2, 3]], [[0, 1], [4, 5]]) == 0.5
    assert overlap([[0, -1]], [[0, 1]]) == overlap([[0, 1]], [[0, -1]]) == 0.5
    assert overlap([[-1]], [[-1]]) == 1
    assert check.topk_overlap(torch.tensor([[1]]), None) == 0


def test_the_program_compares_every_front(capsys, monkeypatch):
    assert __main__.main(["--device", "cpu", "--tokens", "2"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("CSA2", "policy", "1.0000", *PRESETS))
    monkeypatch.setattr(check, "csa2_share", lambda *_: 1.5)
    monkeypatch.setattr(__main__, "mla_row", lambda *_: __main__.Row("MLA", "", 0.5, 1.0, (3.25, 4.5)))
    assert __main__.main(["--device", "cpu", "--size", "small", "--context", "8"]) == 1
    text = capsys.readouterr().out
    assert all(part in text for part in ("1.500", "3.2", "4.5", "us off", "stay in the L2"))


def test_the_program_refuses_what_it_cannot_do(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["--tokens", "0"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            __main__.main(["--device", "cuda"])
        assert "no GPU" in capsys.readouterr().err
