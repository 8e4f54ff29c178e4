"""The A-projection in one GEMM: which parts join, what their results look like, and that no weight is ever a stale one.

Weights and hidden states are small integers: their products and sums are exact in BF16, so that results can be
compared bit by bit whatever the order of summation.
"""

from __future__ import annotations

import copy
import io
import itertools
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fusions import capturing, qkv_a
from fusions.ops import fused_a
from fusions.qkv_a import KEYS, MISMATCH, PRESETS, FusedQkvA, Path, split_mla

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
NAMES = ("q_a", "kv_a", "wk", "weights_proj")
ROWS = dict(zip(NAMES, (24, 20, 8, 4), strict=True))
K = 16
MODES = ("nvfp4_all", "wk_only", "unfused")
FUSED = {"nvfp4_all": NAMES, "wk_only": NAMES[:3], "unfused": NAMES[:2], "indexer_pair": NAMES[:2]}


def integers(*shape, seed=0, dtype=BF16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def linear(rows, k=K, *, dtype=BF16, seed=0, **options):
    made = torch.nn.Linear(k, 1, bias=False, device="meta")
    weight = integers(rows, k, seed=seed, dtype=dtype).to(**options)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return made


class Quantized(torch.nn.Module):
    """FP8 codes with one scale: what an FP8 checkpoint's Linear is to a caller."""

    has_any_quant = True

    def __init__(self, rows, k=K, seed=0):
        super().__init__()
        self.weight = torch.nn.Parameter(integers(rows, k, seed=seed).to(FP8), requires_grad=False)
        self.bias, self.scale = None, 2.0

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


class Adapted(torch.nn.Linear):
    """LoRA as TensorRT-LLM has it: inside the Linear."""

    def __init__(self, rows, k=K, seed=0):
        super().__init__(k, rows, bias=False, dtype=BF16)
        self.requires_grad_(False).weight.copy_(integers(rows, k, seed=seed))
        self.lora = 1.0

    def forward(self, x):
        return super().forward(x) + self.lora


class Attention(torch.nn.Module):
    """Has the parts under their names in a checkpoint, and the fused projection beside them."""

    def __init__(self, preset="nvfp4_all", *, seed=0, rows=ROWS, **replaced):
        super().__init__()
        parts = {name: linear(rows[name], seed=seed + at) for at, name in enumerate(rows)} | replaced
        self.self_attn = torch.nn.Module()
        self.self_attn.indexer = torch.nn.Module()
        for name in parts:
            owner, leaf = self.at(name)
            setattr(owner, leaf, parts[name])
        self.fused = FusedQkvA([(name, parts[name], None) for name in parts], preset=preset)

    def at(self, name):
        *path, leaf, _ = KEYS[name].split(".")
        return self.get_submodule(".".join(path)), leaf

    def part(self, name):
        owner, leaf = self.at(name)
        return getattr(owner, leaf)

    def expected(self, hidden, names=None):
        return {name: plain(self.part(name), hidden) for name in names or self.fused._linears}


def plain(part, hidden):
    return part(hidden.float() if part.weight.dtype is FP32 else hidden)


def ready(preset="nvfp4_all", **options):
    attention = Attention(preset, **options)
    assert attention.fused.post_load_weights() is True
    return attention


def assert_same(results, expected):
    assert list(results) == list(expected)
    for name, want in expected.items():
        assert results[name].dtype == want.dtype, name
        assert torch.equal(results[name], want), name


def assert_right(attention, tokens=3):
    hidden = integers(tokens, K, seed=99)
    assert_same(attention.fused.project(hidden), attention.expected(hidden))


def storages(results):
    """The names whose results share a tensor, as groups."""
    by_storage = {}
    for name, tensor in results.items():
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return list(by_storage.values())


@pytest.fixture
def indexer_module(monkeypatch):
    """Stands for fusions.indexer: two FP32 GEMMs, and a record of its calls."""
    calls = []

    class IndexerProjection(torch.nn.Module):
        def __init__(self, wk, weights_proj):
            super().__init__()
            self.parts = (wk, weights_proj)

        def post_load_weights(self):
            calls.append("post_load_weights")
            return True

        def cache_derived_state(self):
            calls.append("cache_derived_state")
            return False

        def project(self, hidden):
            calls.append("project")
            wk, weights_proj = self.parts
            return plain(wk, hidden).to(hidden.dtype), plain(weights_proj, hidden).float()

        def release(self):
            calls.append("release")

    module = types.ModuleType("fusions.indexer")
    module.IndexerProjection = IndexerProjection
    monkeypatch.setitem(sys.modules, "fusions.indexer", module)
    return calls


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "width", "fused"),
    [
        (("nvfp4_all", "8771"), 2304, NAMES),
        (("wk_only", "9243"), 2240, NAMES[:3]),
        (("unfused", "11989"), 2112, NAMES[:2]),
        (("indexer_pair", "12055"), 2112, NAMES[:2]),
    ],
)
def test_the_presets_have_upstreams_widths_under_both_names(names, width, fused, indexer_module):
    rows = {"q_a": 1536, "kv_a": 576, "wk": 128, "weights_proj": 64}
    for name in names:
        attention = Attention(name, rows=rows)
        plan = attention.fused.plan()
        assert (plan.fused, plan.width) == (list(fused), width)
        assert plan.separate == [part for part in NAMES if part not in fused]
        assert set(plan.reasons) == set(plan.separate)
        assert all(names[0] in why for why in plan.reasons.values())
        assert attention.fused.post_load_weights()
        assert attention.fused._views.weight.shape == (width, K)


def hooked():
    made = linear(8)
    made.register_forward_hook(lambda *_: None)
    return made


def removed():
    made = linear(8)
    made._weights_removed = True
    return made


def sharded():
    made = linear(8)
    made.tp_size, made.tp_mode = 2, "column"
    return made


UNFIT = {
    "FP8": (lambda: Quantized(8), "quantized"),
    "bare FP8": (lambda: linear(8, dtype=FP8), "float8"),
    "FP32": (lambda: linear(8, dtype=FP32), "dtype torch.float32, q_a has torch.bfloat16"),
    "LoRA": (lambda: Adapted(8), "LoRA"),
    "bias": (lambda: torch.nn.Linear(K, 8, dtype=BF16).requires_grad_(False), "bias"),
    "K": (lambda: linear(8, 2 * K), f"K {2 * K}, q_a has {K}"),
    "meta": (lambda: linear(8, device="meta"), "meta"),
    "trained": (lambda: linear(8).requires_grad_(True), "trained"),
    "tensor parallel": (sharded, "tensor-parallel"),
    "hooks": (hooked, "hooks"),
    "empty": (lambda: linear(0), "empty"),
    "removed": (removed, "removed"),
    "no Linear": (torch.nn.Identity, "Identity"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_part_that_does_not_fit_stays_apart_and_says_why(what):
    make, reason = UNFIT[what]
    attention = Attention(wk=make())
    before = {name: attention.part(name).weight.data_ptr() for name in NAMES[:2]}
    plan = attention.fused.plan()
    assert plan.fused == ["q_a", "kv_a", "weights_proj"]
    assert plan.separate == ["wk"]
    assert reason in plan.reasons["wk"]
    assert plan.reasons["wk"].startswith("wk ")
    assert plan.width == 24 + 20 + 4
    assert before == {name: attention.part(name).weight.data_ptr() for name in NAMES[:2]}, "a plan changes nothing"
    assert attention.fused.post_load_weights()
    if what in ("FP8", "FP32", "LoRA", "trained"):
        assert_right(attention)


@pytest.mark.parametrize("what", ["FP8", "bare FP8", "FP32", "LoRA", "bias", "K"])
def test_strict_raises_instead(what):
    parts = [(name, linear(rows), rows) for name, rows in ROWS.items() if name != "wk"]
    fused = FusedQkvA([*parts, ("wk", UNFIT[what][0](), 8)], strict=True)
    for call in (fused.plan, fused.post_load_weights, fused.transform_weights):
        with pytest.raises(AssertionError, match=f"^{MISMATCH}.*: wk "):
            call()
    assert not fused.is_fused
    assert MISMATCH == "all weights in kv_a_proj_with_mqa module must have matching dtype"


def test_strict_names_the_cause_and_not_that_q_a_is_left_alone():
    fused = FusedQkvA([("q_a", linear(24), None), ("kv_a", linear(20, dtype=FP32), None)], strict=True)
    with pytest.raises(AssertionError, match=r"kv_a has dtype torch\.float32, q_a has torch\.bfloat16"):
        fused.plan()


def test_strict_has_nothing_against_what_the_preset_leaves_apart_or_what_is_not_there_yet():
    parts = [("q_a", linear(24), 24), ("kv_a", linear(20), 20), ("weights_proj", linear(4, dtype=FP32), 4)]
    assert FusedQkvA(parts, strict=True, preset="wk_only").plan().fused == ["q_a", "kv_a"]
    assert FusedQkvA(parts[:1], strict=True).post_load_weights() is False
    unloaded = [(name, linear(rows, device="meta"), rows) for name, rows in ROWS.items()]
    assert FusedQkvA(unloaded, strict=True).post_load_weights() is False


def test_whichever_of_q_a_and_kv_a_fits_decides_for_the_others():
    plan = Attention(q_a=Quantized(24)).fused.plan()
    assert plan.fused == ["kv_a", "wk", "weights_proj"]
    plan = Attention(q_a=linear(24, dtype=FP32), weights_proj=linear(4, dtype=FP32)).fused.plan()
    assert plan.fused == ["q_a", "weights_proj"]
    plan = Attention(q_a=Quantized(24), kv_a=Quantized(20)).fused.plan()
    assert (plan.fused, plan.width) == ([], 0)
    assert "neither q_a nor kv_a" in plan.reasons["wk"]


def test_alone_a_part_is_not_fused():
    attention = Attention("unfused", kv_a=Adapted(20))
    plan = attention.fused.plan()
    assert plan.fused == []
    assert plan.reasons["q_a"] == "no other part can be fused with q_a"
    assert attention.fused.post_load_weights() is False
    path, why = attention.fused.explain(integers(1, K))
    assert path is Path.SEPARATE
    assert "LoRA" in why
    assert_right(attention)


@pytest.mark.parametrize("mark", ["absent", "none"])
def test_models_without_a_latent_query(mark):
    parts = [(name, linear(ROWS[name], seed=9), None) for name in NAMES[1:]]
    fused = FusedQkvA([("q_a", None, None), *parts] if mark == "none" else parts)
    assert fused.plan().fused == list(NAMES[1:])
    assert fused.post_load_weights()
    hidden = integers(2, K)
    results = fused.project(hidden)
    assert_same(results, {name: part(hidden) for name, part, _ in parts})
    split = split_mla(results, kv_lora_rank=16, rope_head_dim=4)
    assert split.q is None
    assert split.indexer_k.shape == (2, 8)


def test_the_order_of_the_parts_is_the_callers():
    order = ("weights_proj", "kv_a", "q_a")
    fused = FusedQkvA([(name, linear(ROWS[name]), ROWS[name]) for name in order])
    assert fused.plan().fused == list(order)
    fused.post_load_weights()
    assert [out.storage_offset() for out in fused.project(integers(1, K)).values()] == [0, 4, 24]


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ([("q_a", linear(24), 23)], {}, "q_a has 24 rows, expected 23"),
        ([("q_a", linear(24, device="meta"), 23)], {}, "q_a has 24 rows, expected 23"),
        ([("q_a", linear(24), None), ("q_a", linear(24), None)], {}, "once"),
        ([("q_b", linear(24), None)], {}, "q_b"),
        ([], {}, "no Linear"),
        ([("q_a", None, None)], {}, "no Linear"),
        ([("q_a", linear(24), None)], {"preset": "8772"}, "expected one of nvfp4_all, 8771, wk_only"),
    ],
)
def test_a_callers_mistakes(parts, options, message):
    with pytest.raises(ValueError, match=message):
        FusedQkvA(parts, **options)


def test_rows_are_looked_at_again_once_the_weight_is_there():
    late = torch.nn.Linear(K, 24, bias=False, dtype=BF16)
    late.weight = None
    fused = FusedQkvA([("q_a", late, 24), ("kv_a", linear(20), 20)])
    assert fused.post_load_weights() is False
    assert "without a weight" in fused.plan().reasons["q_a"]
    late.weight = torch.nn.Parameter(integers(25, K), requires_grad=False)
    with pytest.raises(ValueError, match="q_a has 25 rows, expected 24"):
        fused.post_load_weights()
    late.weight = torch.nn.Parameter(integers(24, K), requires_grad=False)
    assert fused.post_load_weights() is True


def test_ties_and_memory_of_others_are_left_as_they_are():
    shared = linear(24)
    attention = Attention(q_a=shared, kv_a=shared)
    assert attention.fused.plan().reasons == {"kv_a": "kv_a and q_a share memory"}
    assert attention.fused.post_load_weights()
    assert attention.part("kv_a").weight is attention.part("q_a").weight
    assert_right(attention)

    shared = linear(8)
    attention = Attention(wk=shared, weights_proj=shared)
    assert attention.fused.plan().reasons == {"weights_proj": "weights_proj and wk share memory"}
    assert attention.fused.post_load_weights()
    assert_right(attention)

    mine = torch.nn.Parameter(integers(100, K)[:8], requires_grad=False)
    attention = Attention()
    attention.part("wk").weight = mine
    address = mine.data_ptr()
    assert "larger storage" in attention.fused.plan().reasons["wk"]
    assert attention.fused.post_load_weights()
    assert attention.part("wk").weight.data_ptr() == address
    assert_right(attention)


# -- layout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 5])
def test_results_are_columns_of_one_tensor(tokens):
    rows = {"q_a": 1536, "kv_a": 576, "wk": 128, "weights_proj": 64}
    attention = ready(rows=rows)
    hidden = integers(tokens, K)
    results = attention.fused.project(hidden)
    assert [out.storage_offset() for out in results.values()] == [0, 1536, 2112, 2240]
    assert all(out.stride() == (2304, 1) for out in results.values())
    assert len(storages(results)) == 1
    assert results["q_a"].untyped_storage().nbytes() == tokens * 2304 * 2
    split = split_mla(results)
    assert [part.storage_offset() for part in split] == [0, 1536, 2048, 2112, 2240]
    assert [part.shape[1] for part in split] == [1536, 512, 64, 128, 64]
    assert all(part.is_contiguous() == (tokens == 1) for part in split)
    assert torch.equal(torch.cat(split, dim=1), torch.cat(list(attention.expected(hidden).values()), dim=1))


def test_results_may_be_changed_in_place():
    attention = ready()
    for name in NAMES:
        attention.part(name).weight.copy_(integers(ROWS[name], K, seed=7))
    hidden = integers(2, K).requires_grad_(True)
    results = attention.fused.project(hidden)
    want = attention.expected(hidden)
    results["kv_a"].mul_(2)
    assert torch.equal(results["kv_a"], 2 * want["kv_a"])
    assert all(torch.equal(results[name], want[name]) for name in ("q_a", "wk", "weights_proj"))


@pytest.mark.parametrize("preset", MODES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_dense_results_are_row_behind_row(preset, tokens):
    attention = ready(preset)
    hidden = integers(tokens, K)
    results = attention.fused.project(hidden, dense=True)
    assert_same(results, attention.expected(hidden))
    assert all(results[name].stride() == (ROWS[name], 1) for name in NAMES)
    assert len(storages(results)) == len(NAMES) or tokens == 0


@pytest.mark.parametrize("preset", MODES)
def test_no_tokens_give_empty_results(preset):
    attention = ready(preset)
    results = attention.fused.project(integers(0, K))
    assert {name: (tuple(out.shape), out.dtype) for name, out in results.items()} == {
        name: ((0, rows), BF16) for name, rows in ROWS.items()
    }


@pytest.mark.parametrize("dense", [False, True])
def test_hidden_of_other_shapes_and_strides(dense):
    attention = ready("wk_only")
    for hidden in (
        integers(2, 3, K),
        integers(K),
        integers(4, 2 * K)[:, ::2],
        integers(4, 2 * K)[:, :K],
        integers(K, 5).t(),
        integers(1, K).expand(3, K),
    ):
        assert_same(attention.fused.project(hidden, dense=dense), attention.expected(hidden))


def test_split_mla_wants_sizes_that_add_up():
    out = {"kv_a": integers(2, 20)}
    split = split_mla(out, kv_lora_rank=16, rope_head_dim=4)
    assert (split.q, split.indexer_k, split.indexer_weights) == (None, None, None)
    assert torch.equal(split.compressed_kv, out["kv_a"][:, :16])
    assert torch.equal(split.k_pe, out["kv_a"][:, 16:])
    for sizes in ({}, {"kv_lora_rank": 16, "rope_head_dim": 3}, {"kv_lora_rank": 24, "rope_head_dim": -4}):
        with pytest.raises(ValueError, match="kv_a has 20 columns"):
            split_mla(out, **sizes)
    with pytest.raises(ValueError, match="expected kv_a"):
        split_mla({"q_a": integers(2, 20)})


# -- life of the weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [*MODES, "indexer_pair"])
def test_the_owner_keeps_its_modules_parameters_and_state_dict(preset, indexer_module):
    attention = Attention(preset)
    before = {key: value.clone() for key, value in attention.state_dict().items()}
    parameters = dict(attention.named_parameters())
    modules = [name for name, _ in attention.named_modules()]
    assert attention.fused.post_load_weights()
    after = attention.state_dict()
    assert list(after) == list(before)
    assert set(after) == set(KEYS.values())
    assert all(torch.equal(after[key], before[key]) and after[key].is_contiguous() for key in before)
    assert dict(attention.named_parameters()).keys() == parameters.keys()
    assert all(value is parameters[key] for key, value in attention.named_parameters())
    assert [name for name, _ in attention.named_modules()] == modules
    assert not list(attention.fused.children())
    assert not attention.fused.state_dict()


def test_the_hook_is_idempotent_and_moves_nothing_twice():
    attention = ready()
    fused = attention.fused._views.weight
    addresses = [attention.part(name).weight.data_ptr() for name in NAMES]
    assert addresses == [fused[attention.fused._views.rows(name)].data_ptr() for name in NAMES]
    for hook in (attention.fused.post_load_weights, attention.fused.transform_weights):
        assert hook() is True
        assert attention.fused._views.weight is fused
        assert [attention.part(name).weight.data_ptr() for name in NAMES] == addresses


@pytest.mark.parametrize(("first", "second"), [*itertools.product(MODES, repeat=2)])
def test_switching_presets_and_state_dict_round_trips_are_exact(first, second):
    attention = ready(first)
    before = {key: value.clone() for key, value in attention.state_dict().items()}
    attention.fused.release()
    assert not attention.fused.is_fused
    weights = [attention.part(name).weight for name in NAMES]
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)
    assert attention.fused.explain(integers(1, K))[0] is Path.SEPARATE
    assert_right(attention)
    again = FusedQkvA([(name, attention.part(name), None) for name in NAMES], preset=second)
    assert again.post_load_weights()
    hidden = integers(2, K)
    assert_same(again.project(hidden), attention.expected(hidden))
    assert all(torch.equal(value, before[key]) for key, value in attention.state_dict().items())

    for target in (Attention(second, seed=50), ready(second, seed=50)):
        target.load_state_dict(attention.state_dict())
        assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())
        assert target.fused.post_load_weights()
        assert_right(target)


def test_two_objects_over_one_set_of_parts_stay_right():
    first = ready("nvfp4_all")
    second = FusedQkvA([(name, first.part(name), None) for name in NAMES], preset="unfused")
    assert second.post_load_weights(), "the rows lie in order already: nothing is moved"
    assert first.fused.is_fused
    hidden = integers(2, K)
    first.fused.release()
    for name in NAMES:
        first.part(name).weight.copy_(integers(ROWS[name], K, seed=70))
    assert_same(second.project(hidden), first.expected(hidden))
    assert_right(first)
    assert second.post_load_weights()
    assert_same(second.project(hidden), first.expected(hidden))


def test_a_reload_in_place_needs_no_hook():
    attention = ready()
    fused = attention.fused._views.weight
    for seed in (10, 20):
        attention.load_state_dict(Attention(seed=seed).state_dict())
        assert_right(attention)
        assert attention.fused.is_fused
    attention.part("wk").weight.data.copy_(integers(8, K, seed=30))
    assert_right(attention)
    assert attention.fused._views.weight is fused


def replace_parameter(attention, name):
    attention.part(name).weight = torch.nn.Parameter(integers(ROWS[name], K, seed=41), requires_grad=False)


def replace_data(attention, name):
    attention.part(name).weight.data = integers(ROWS[name], K, seed=42)


def assign(attention, name):
    new = {KEYS[name]: integers(ROWS[name], K, seed=43)}
    attention.load_state_dict(new, assign=True, strict=False)


def other_rows(attention, name):
    attention.part(name).weight = torch.nn.Parameter(integers(ROWS[name] + 3, K, seed=44), requires_grad=False)


def other_dtype(attention, name):
    attention.part(name).weight.data = integers(ROWS[name], K, seed=45, dtype=FP32)


def permuted(attention, name):
    attention.part(name).weight.data = integers(K, ROWS[name], seed=46).t()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [replace_parameter, replace_data, assign, other_rows, other_dtype, permuted])
def test_a_replaced_weight_is_used_at_once_and_the_others_stay_together(change, name):
    attention = ready()
    old = attention.fused._views.weight
    change(attention, name)
    assert not attention.fused.is_fused
    others = [other for other in NAMES if other != name]
    hidden = integers(3, K)
    results = attention.fused.project(hidden)
    assert_same(results, attention.expected(hidden))
    assert others in storages(results)
    assert attention.fused.explain(hidden)[0] is Path.LINEAR
    assert f"no longer in the fused weight: {name};" in attention.fused.explain(hidden)[1]
    together = list(NAMES) if change is not other_dtype else others if name != "q_a" else []  # q_a decides
    assert attention.fused.plan().fused == together
    assert attention.fused.post_load_weights() is bool(together)
    assert attention.fused.is_fused is bool(together)
    assert attention.fused.plan().fused == together
    if together:
        assert attention.fused._views.weight.data_ptr() != old.data_ptr()
    assert_right(attention)


def test_old_rows_are_never_read_for_a_part_that_left():
    attention = ready()
    attention.part("kv_a").weight = torch.nn.Parameter(integers(20, K, seed=61), requires_grad=False)
    rows = attention.fused._views.rows("kv_a")
    attention.fused._views.weight[rows] = float("nan")
    assert_right(attention)


def test_with_fewer_than_two_parts_in_place_there_is_no_shared_gemm(monkeypatch):
    attention = ready()
    for name in NAMES[1:]:
        replace_parameter(attention, name)
    monkeypatch.setattr(FusedQkvA, "_together", None)
    assert attention.fused.explain(integers(1, K))[0] is Path.SEPARATE
    assert_right(attention)


def test_rows_that_come_back_are_used_again():
    attention = ready()
    view = attention.part("wk").weight.data
    replace_data(attention, "wk")
    assert not attention.fused.is_fused
    attention.part("wk").weight.data = view
    assert attention.fused.is_fused
    assert_right(attention)


def test_a_weight_of_another_dtype_leaves_the_group_and_comes_back():
    attention = ready()
    attention.part("weights_proj").weight = torch.nn.Parameter(integers(4, K, dtype=FP32), requires_grad=False)
    assert attention.fused.post_load_weights()
    assert attention.fused._views.names == NAMES[:3]
    assert_right(attention)
    assert attention.fused.project(integers(1, K))["weights_proj"].dtype is FP32
    replace_parameter(attention, "weights_proj")
    assert attention.fused.post_load_weights()
    assert attention.fused._views.names == NAMES
    assert_right(attention)


def test_a_part_that_was_moved_within_the_fused_weight_is_not_taken_for_its_own_rows():
    attention = ready()
    attention.part("wk").weight.data = attention.fused._views.weight[46:54]  # two rows on
    assert_right(attention)
    attention.part("weights_proj").weight = torch.nn.Parameter(integers(4, K, dtype=FP32), requires_grad=False)
    assert attention.fused.post_load_weights()
    assert attention.fused._views.names == NAMES[:3]
    assert_right(attention)


def test_moving_the_model_leaves_the_layout_until_the_next_hook():
    attention = ready()
    attention.to(BF16)
    assert attention.fused.is_fused, "nothing to do, nothing done"
    attention.float()
    hidden = integers(2, K)
    assert not attention.fused.is_fused
    assert_same(attention.fused.project(hidden), attention.expected(hidden))
    assert attention.fused.project(hidden)["q_a"].dtype is FP32
    attention.bfloat16()
    assert_right(attention)
    assert attention.fused.post_load_weights()
    assert_right(attention)
    attention.to("meta")
    assert not attention.fused.is_fused
    assert attention.fused.project(hidden.to("meta"))["wk"].shape == (2, 8)
    assert attention.fused.post_load_weights() is False


def deep(attention):
    return copy.deepcopy(attention)


def pickled(attention):
    buffer = io.BytesIO()
    torch.save(attention, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", [deep, pickled])
@pytest.mark.parametrize("preset", MODES)
def test_copies_are_independent_and_right(how, preset):
    attention = ready(preset)
    other = how(attention)
    for name in NAMES:
        other.part(name).weight.copy_(integers(ROWS[name], K, seed=80))
    assert_right(other)
    assert_right(attention)
    assert other.fused.post_load_weights()
    assert other.fused.is_fused
    assert_right(other)
    assert_right(attention)
    fused, copied = (module.fused._views.weight for module in (attention, other))
    assert fused.untyped_storage().data_ptr() != copied.untyped_storage().data_ptr()


def test_a_reader_of_weights_that_lie_in_place_takes_note_and_writes_nothing():
    attention = Attention()
    assert attention.fused.cache_derived_state() is False
    assert not attention.fused.is_fused
    buffer = torch.cat([attention.part(name).weight for name in NAMES])
    for name, rows in zip(NAMES, buffer.split(list(ROWS.values())), strict=True):
        attention.part(name).weight.data = rows
    version = buffer._version
    assert attention.fused.cache_derived_state() is True
    assert attention.fused._views.weight.data_ptr() == buffer.data_ptr()
    assert buffer._version == version
    assert_right(attention)
    assert Attention(kv_a=Quantized(20), q_a=Quantized(24)).fused.cache_derived_state() is False


def test_nothing_is_moved_while_a_graph_is_captured(monkeypatch):
    attention, fused, unfit = Attention(), ready(), Attention(q_a=Quantized(24), kv_a=Quantized(20))
    weights = [attention.part(name).weight.data_ptr() for name in NAMES]
    state = {key: value.clone() for key, value in fused.state_dict().items()}
    monkeypatch.setattr(capturing, "is_capturing", lambda: True)
    for call in (
        attention.fused.post_load_weights,
        unfit.fused.post_load_weights,
        attention.fused.cache_derived_state,
        attention.fused.release,
        fused.fused.post_load_weights,
        fused.fused.release,
        lambda: attention.fused.load_weights(state),
    ):
        with pytest.raises(RuntimeError, match="being captured"):
            call()
    assert weights == [attention.part(name).weight.data_ptr() for name in NAMES]
    assert_right(fused)


# -- loading -----------------------------------------------------------------------------------------------------------


def checkpoint(prefix="", seed=200, dtype=BF16):
    return {prefix + KEYS[name]: integers(ROWS[name], K, seed=seed + at, dtype=dtype) for at, name in enumerate(NAMES)}


@pytest.mark.parametrize("prefix", ["", "model.layers.3."])
@pytest.mark.parametrize("make", [Attention, ready])
def test_the_checkpoints_names_are_loaded(prefix, make):
    attention = make()
    parameters = [attention.part(name).weight for name in NAMES]
    for seed, dtype in ((200, BF16), (300, FP32), (400, FP16)):
        weights = checkpoint(prefix, seed, dtype)
        attention.fused.load_weights({"other": torch.zeros(1), **weights}, prefix)
        for name in NAMES:
            assert torch.equal(attention.part(name).weight, weights[prefix + KEYS[name]].to(BF16))
        assert_right(attention)
    assert all(attention.part(name).weight is weight for name, weight in zip(NAMES, parameters, strict=True))


def test_a_weight_made_in_inference_mode_is_loaded():
    with torch.inference_mode():
        attention = Attention()
    attention.fused.load_weights(checkpoint())
    assert_right(attention)


def spoil(weights, how):
    key = KEYS["weights_proj"]
    if how == "missing":
        del weights[key]
    elif how == "FP8":
        weights[key] = weights[key].to(FP8)
    elif how == "packed":
        weights[key] = torch.zeros(4, K // 2, dtype=torch.uint8)
    elif how == "shape":
        weights[key] = weights[key].t()
    elif how == "rows":
        weights[key] = weights[key][:1]  # which would be broadcast
    elif how == "meta":
        weights[key] = weights[key].to("meta")
    return weights


@pytest.mark.parametrize("how", ["missing", "FP8", "packed", "shape", "rows", "meta"])
@pytest.mark.parametrize("make", [Attention, ready])
def test_all_are_loaded_or_none(how, make):
    attention = make()
    before = {key: value.clone() for key, value in attention.state_dict().items()}
    with pytest.raises(ValueError, match=r"self_attn\.indexer\.weights_proj\.weight"):
        attention.fused.load_weights(spoil(checkpoint(), how))
    assert all(torch.equal(value, before[key]) for key, value in attention.state_dict().items())


@pytest.mark.parametrize("wk", [Quantized(8), linear(8, device="meta"), torch.nn.Identity()])
def test_weights_that_cannot_take_it_are_loaded_by_their_own_modules(wk):
    attention = Attention(wk=wk)
    before = attention.part("q_a").weight.clone()
    with pytest.raises(ValueError, match="the weight of wk"):
        attention.fused.load_weights(checkpoint())
    assert torch.equal(attention.part("q_a").weight, before)


# -- the indexer's parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "computed"),
    [("nvfp4_all", NAMES), ("wk_only", NAMES[:3]), ("unfused", NAMES[:2]), ("indexer_pair", NAMES[:2])],
)
def test_without_the_indexer_only_what_the_gemm_has_is_computed(preset, computed, indexer_module):
    attention = ready(preset)
    hidden = integers(3, K)
    assert_same(attention.fused.project(hidden, indexer=False), attention.expected(hidden, computed))
    assert "project" not in indexer_module
    assert list(attention.fused.project(hidden)) == list(NAMES)


def test_the_pair_goes_to_the_indexers_own_projection(indexer_module):
    attention = Attention("12055", wk=linear(8, dtype=FP32), weights_proj=linear(4, dtype=FP32))
    hidden = integers(3, K)
    assert_right(attention)
    assert indexer_module == [], "before the hook there is none"
    assert attention.fused.post_load_weights()
    assert attention.fused.post_load_weights()
    results = attention.fused.project(hidden)
    assert indexer_module == ["post_load_weights", "post_load_weights", "project"]
    assert (results["wk"].dtype, results["weights_proj"].dtype) == (BF16, FP32)
    assert torch.equal(results["wk"], plain(attention.part("wk"), hidden).to(BF16))
    attention.fused.release()
    assert indexer_module[-1] == "release"
    assert_right(attention)
    assert indexer_module[-1] == "release"


def test_a_reader_has_the_indexers_own_projection_take_note_too(indexer_module):
    attention = Attention("indexer_pair")
    assert attention.fused.cache_derived_state() is False
    assert_right_pair(attention, indexer_module, ["cache_derived_state", "project"])


def assert_right_pair(attention, calls, wanted):
    hidden = integers(2, K)
    results = attention.fused.project(hidden)
    assert calls == wanted
    assert torch.equal(results["wk"].float(), attention.part("wk")(hidden).float())


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_indexers_own_projection_takes_the_pair_and_gives_it_back(dtype):
    attention = ready("12055", wk=linear(8, dtype=dtype), weights_proj=linear(4, dtype=dtype))
    hidden = integers(3, K)
    want = {name: plain(attention.part(name), hidden) for name in NAMES}
    for compare in (attention.fused.project, torch.compile(attention.fused.project, backend="eager", fullgraph=True)):
        results = compare(hidden)
        assert list(results) == list(NAMES)
        assert (results["wk"].dtype, results["weights_proj"].dtype) == (BF16, FP32)
        assert all(torch.equal(results[name].float(), want[name].float()) for name in NAMES)
    torch._dynamo.reset()
    attention.fused.release()
    switched = FusedQkvA([(name, attention.part(name), None) for name in NAMES], preset="8771")
    assert switched.post_load_weights()
    assert switched.plan().fused == list(NAMES if dtype is BF16 else NAMES[:2])
    assert_same(switched.project(hidden), want)


def test_half_a_pair_is_a_plain_part(indexer_module):
    fused = FusedQkvA([(name, linear(ROWS[name]), None) for name in NAMES[:3]], preset="indexer_pair")
    assert fused.post_load_weights()
    assert list(fused.project(integers(1, K))) == list(NAMES[:3])
    assert indexer_module == []


# -- dispatch ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deepseek():
    """q_a and kv_a of the one shape that the min-latency op takes."""
    q_a, kv_a = linear(1536, 7168, seed=1), linear(576, 7168, seed=2)
    fused = FusedQkvA([("q_a", q_a, 1536), ("kv_a", kv_a, 576)], preset="unfused")
    assert fused.post_load_weights()
    return fused


@pytest.fixture
def calls(monkeypatch):
    """An op that, like the real one, takes x as dense; on what it is told is a GPU."""
    made = []

    def op(x, weight, bias, out_dtype):
        assert (bias, out_dtype) == (None, None)
        assert (weight.shape, weight.stride()) == ((7168, 2112), (1, 7168))
        made.append(tuple(x.shape))
        dense = x.as_strided(x.shape, (x.shape[1], 1))
        return (dense.float() @ weight.float()).to(BF16)

    monkeypatch.setattr(torch.ops.trtllm, fused_a.OP, op, raising=False)
    monkeypatch.setattr(fused_a, "_capability", lambda device: 90)
    return made


def check_path(fused, hidden, calls, taken):
    calls.clear()
    results = fused.project(hidden)
    assert len(calls) == taken
    assert fused.explain(hidden)[0] is (Path.MIN_LATENCY if taken else Path.LINEAR)
    assert (fused.explain(hidden)[1] == "") is bool(taken)
    assert_same(results, {name: part(hidden) for name, part in fused._linears.items()})
    return results


@pytest.mark.parametrize(("tokens", "taken"), [(0, 0), (1, 1), (2, 1), (15, 1), (16, 1), (17, 0), (40, 0)])
def test_one_to_sixteen_tokens_go_to_the_op(tokens, taken, deepseek, calls):
    results = check_path(deepseek, integers(tokens, 7168), calls, taken)
    assert results["kv_a"].stride() == (2112, 1)


def test_only_dense_hidden_goes_to_the_op(deepseek, calls):
    wide = integers(4, 7168 + 8)
    check_path(deepseek, wide[:, :7168], calls, 0)
    check_path(deepseek, integers(4, 2, 7168)[:, 1], calls, 0)
    check_path(deepseek, wide.view(-1)[1 : 1 + 2 * 7168].view(2, 7168), calls, 0)
    check_path(deepseek, integers(2, 2, 7168), calls, 0)
    check_path(deepseek, integers(7168), calls, 0)
    # One row has no stride that could be ignored.
    check_path(deepseek, wide[:1, :7168], calls, 1)


def test_only_an_aligned_dense_weight_of_the_same_device_goes_to_the_op(deepseek, calls):
    assert deepseek.explain(torch.empty(1, 7168, dtype=BF16, device="meta"))[0] is Path.LINEAR
    x, weight = integers(1, 7168), deepseek._views.weight
    assert fused_a.refusal(x, weight) == ""
    assert "dense" in fused_a.refusal(x, weight.t().contiguous().t())
    parts = [("q_a", linear(1536, 7168), None), ("kv_a", linear(576, 7168), None)]
    odd = torch.empty(2112 * 7168 + 1, dtype=BF16)[1:].view(2112, 7168)
    for (_, part, _), into in zip(parts, (odd[:1536], odd[1536:]), strict=True):
        part.weight.data = into.copy_(part.weight)
    fused = FusedQkvA(parts)
    assert fused.cache_derived_state()
    check_path(fused, x, calls, 0)


@pytest.mark.parametrize(("capability", "taken"), [(89, 0), (90, 1), (100, 1), (103, 1), (120, 0), (121, 0), (None, 0)])
def test_on_gpus_that_have_it(capability, taken, deepseek, calls, monkeypatch):
    monkeypatch.setattr(fused_a, "_capability", lambda device: capability)
    check_path(deepseek, integers(1, 7168), calls, taken)


def test_a_gpu_is_asked_for_its_capability(monkeypatch):
    monkeypatch.setattr(fused_a.choice, "capability", lambda device: 100)
    assert fused_a._capability(torch.device("cuda", 0)) == 100
    assert fused_a._capability(torch.device("cpu")) is None


def test_not_without_the_op(deepseek, monkeypatch):
    monkeypatch.setattr(fused_a, "_capability", lambda device: 90)
    assert "not registered" in deepseek.explain(integers(1, 7168))[1]
    check_path(deepseek, integers(1, 7168), [], 0)


def test_the_op_is_looked_up_at_every_call(deepseek, calls, monkeypatch):
    monkeypatch.setattr(torch.ops.trtllm, fused_a.OP, lambda *_: "none")
    with pytest.raises(TypeError, match="returned str"):
        deepseek.project(integers(1, 7168))


def test_not_where_a_gradient_autocast_or_a_subclass_is_in_the_way(deepseek, calls):
    hidden = integers(1, 7168).requires_grad_(True)
    assert deepseek.explain(hidden) == (Path.SEPARATE, "a gradient is needed")
    results = deepseek(hidden)
    assert not calls
    results["q_a"].sum().backward()
    assert torch.equal(hidden.grad, deepseek._linears["q_a"].weight.float().sum(0, keepdim=True).to(BF16))
    with torch.no_grad():
        check_path(deepseek, hidden, calls, 1)
    check_path(deepseek, torch.nn.Parameter(integers(1, 7168), requires_grad=False), calls, 0)
    with torch.autocast("cpu", torch.float16):
        assert deepseek.project(integers(1, 7168))["q_a"].dtype is FP16


def test_other_shapes_and_dtypes_never_meet_the_op(calls):
    for options in ({"rows": {"q_a": 1536, "kv_a": 592}, "k": 7168}, {"rows": {"q_a": 1536, "kv_a": 576}, "k": 1024}):
        parts = [(name, linear(rows, options["k"]), rows) for name, rows in options["rows"].items()]
        fused = FusedQkvA(parts)
        assert fused.post_load_weights()
        check_path(fused, integers(1, options["k"]), calls, 0)
    parts = [(name, linear(rows, 7168, dtype=FP16), rows) for name, rows in (("q_a", 1536), ("kv_a", 576))]
    fused = FusedQkvA(parts)
    fused.post_load_weights()
    check_path(fused, integers(1, 7168, dtype=FP16), calls, 0)
    assert "torch.bfloat16" in fused.explain(integers(1, 7168))[1]


@pytest.mark.parametrize("fuse", [False, True])
def test_dtypes_are_as_a_linear_wants_them(fuse):
    attention = Attention()
    if fuse:
        attention.fused.post_load_weights()
    for dtype in (FP16, FP32):
        with pytest.raises(RuntimeError) as plainly:
            attention.part("q_a")(integers(2, K, dtype=dtype))
        with pytest.raises(RuntimeError, match="dtype") as ours:
            attention.fused.project(integers(2, K, dtype=dtype))
        assert str(ours.value) == str(plainly.value)
    attention.float()
    attention.fused.post_load_weights()
    assert_right(attention)
    hidden = integers(2, K, dtype=FP32)
    assert_same(attention.fused.project(hidden), attention.expected(hidden))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_an_fp32_part_takes_16_bits_exactly(dtype):
    others = {name: linear(ROWS[name], dtype=dtype) for name in NAMES[:3]}
    attention = ready("wk_only", **others, weights_proj=linear(4, dtype=FP32))
    hidden = (torch.rand(3, K) * 8).to(dtype)
    out = attention.fused.project(hidden)["weights_proj"]
    assert out.dtype is FP32
    assert torch.equal(out, attention.part("weights_proj")(hidden.float()))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("shape", [(2, K + 1), (2, 3, 2 * K), (K - 1,), (0, K + 1), ()])
def test_another_k_is_the_callers_mistake(fuse, shape):
    attention = Attention()
    if fuse:
        attention.fused.post_load_weights()
    with pytest.raises(ValueError, match=rf"K = {shape[-1] if shape else 0}, .* K = {K}; pass hidden"):
        attention.fused.project(integers(*shape))


def test_gradients_flow_as_through_the_linears():
    attention = ready()
    grads = []
    for project in (attention.fused.project, attention.expected):
        hidden = integers(3, K).requires_grad_(True)
        sum(out.float().sum() * (at + 1) for at, out in enumerate(project(hidden).values())).backward()
        grads.append(hidden.grad)
    assert torch.equal(*grads)


def test_a_part_that_is_trained_gets_its_gradient():
    attention = ready()
    weight = attention.part("kv_a").weight.requires_grad_(True)
    hidden = integers(3, K)
    results = attention.fused.project(hidden)
    assert "being trained: kv_a" in attention.fused.explain(hidden)[1]
    assert ["q_a", "wk", "weights_proj"] in storages(results)
    results["kv_a"].sum().backward()
    assert torch.equal(weight.grad, hidden.float().sum(0).expand(20, K).to(BF16))
    with torch.no_grad():
        assert len(storages(attention.fused.project(hidden))) == 1


def test_before_the_hook_each_part_is_its_own_linear():
    attention = Attention()
    assert_right(attention)
    path, why = attention.fused.explain(integers(1, K))
    assert path is Path.SEPARATE
    assert why == "post_load_weights() has not fused q_a, kv_a, wk, weights_proj"


def test_what_is_no_tensor_goes_to_the_linears():
    class Packed:
        def __init__(self, tensor):
            self.tensor = tensor

    class Unpacking(torch.nn.Linear):
        def __call__(self, x):
            return super().__call__(x.tensor if isinstance(x, Packed) else x)

    parts = []
    for name, rows in ROWS.items():
        made = Unpacking(K, rows, bias=False, dtype=BF16).requires_grad_(False)
        made.weight.copy_(integers(rows, K, seed=rows))
        parts.append((name, made, rows))
    fused = FusedQkvA(parts)
    assert fused.post_load_weights()
    hidden = integers(2, K)
    assert fused.explain(Packed(hidden)) == (Path.SEPARATE, "hidden is a Packed")
    assert_same(fused.project(Packed(hidden)), fused.project(hidden))


@pytest.mark.parametrize("preset", MODES)
def test_fake_and_meta_tensors_give_shapes(preset):
    attention = Attention(preset).to("meta")
    assert attention.fused.post_load_weights() is False
    results = attention.fused.project(torch.empty(5, K, dtype=BF16, device="meta"))
    assert {name: tuple(out.shape) for name, out in results.items()} == {n: (5, r) for n, r in ROWS.items()}
    with FakeTensorMode():
        fake = Attention(preset)
        assert fake.fused.post_load_weights() is False
        results = fake.fused.project(torch.empty(5, K, dtype=BF16))
    assert {name: tuple(out.shape) for name, out in results.items()} == {n: (5, r) for n, r in ROWS.items()}
    real = ready(preset)
    with FakeTensorMode(allow_non_fake_inputs=True):
        results = real.fused.project(torch.empty(5, K, dtype=BF16))
    assert {name: tuple(out.shape) for name, out in results.items()} == {n: (5, r) for n, r in ROWS.items()}


@pytest.mark.parametrize("preset", MODES)
def test_it_is_traced_whole_and_follows_the_weights(preset):
    attention = ready(preset, weights_proj=linear(4, dtype=FP32))
    compiled = torch.compile(
        lambda hidden: attention.fused.project(hidden, dense=True), backend="eager", fullgraph=True
    )
    for tokens in (1, 3):
        hidden = integers(tokens, K)
        assert_same(compiled(hidden), attention.expected(hidden))
    attention.load_state_dict(Attention(seed=10).state_dict())
    assert_same(compiled(hidden), attention.expected(hidden))
    replace_parameter(attention, "kv_a")
    assert_same(compiled(hidden), attention.expected(hidden))
    torch._dynamo.reset()


# -- numbers -----------------------------------------------------------------------------------------------------------


def assert_close(out, hidden, weight):
    """One BF16 rounding, and FP32 accumulation over K = 7168 in proportion to the products' magnitudes."""
    exact = hidden.double() @ weight.double().t()
    magnitude = hidden.double().abs() @ weight.double().abs().t()
    assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8 + magnitude * 2.0**-17).all()


def test_results_at_full_size_are_within_the_bound_fused_or_not():
    generator = torch.Generator().manual_seed(0)
    parts = []
    for name, rows in {"q_a": 192, "kv_a": 72, "wk": 128, "weights_proj": 64}.items():
        made = torch.nn.Linear(7168, rows, bias=False, dtype=BF16).requires_grad_(False)
        made.weight.copy_(torch.randn(rows, 7168, generator=generator))
        parts.append((name, made, rows))
    fused = FusedQkvA(parts)
    hidden = torch.randn(5, 7168, generator=generator).to(BF16)
    for path in (Path.SEPARATE, Path.LINEAR):
        assert fused.explain(hidden)[0] is path
        for name, out in fused.project(hidden).items():
            assert_close(out, hidden, fused._linears[name].weight)
        fused.post_load_weights()


KINDS = {
    "bf16": lambda rows, seed: linear(rows, seed=seed),
    "fp32": lambda rows, seed: linear(rows, seed=seed, dtype=FP32),
    "fp16": lambda rows, seed: linear(rows, seed=seed, dtype=FP16),
    "fp8": lambda rows, seed: Quantized(rows, seed=seed),
    "lora": lambda rows, seed: Adapted(rows, seed=seed),
}
EVENTS = ("hook", "replace", "copy", "widen", "narrow", "release", "clone", "train")


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    st.lists(st.sampled_from(sorted(KINDS)), min_size=4, max_size=4),
    st.sampled_from(MODES),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(NAMES)), max_size=6),
    st.integers(0, 4),
    st.booleans(),
)
def test_law_whatever_happened_every_result_is_its_linears(names, kinds, preset, events, tokens, dense):
    linears = {name: KINDS[kind](ROWS[name], seed) for seed, (name, kind) in enumerate(zip(names, kinds, strict=False))}
    fused = FusedQkvA([(name, made, ROWS[name]) for name, made in linears.items()], preset=preset)
    hidden = integers(tokens, K, seed=5)
    for step, (event, name) in enumerate([("hook", names[0]), *events]):
        happen(fused, event, linears.get(name), step)
        plan = fused.plan()
        assert sorted(plan.fused + plan.separate) == sorted(names)
        assert set(plan.reasons) == set(plan.separate)
        assert len(plan.fused) != 1
        assert plan.width == sum(ROWS[name] for name in plan.fused)
        try:
            expected = {name: plain(made, hidden) for name, made in linears.items()}
        except RuntimeError:  # FP16 weights do not take BF16
            with pytest.raises(RuntimeError):
                fused.project(hidden)
        else:
            assert_same(fused.project(hidden, dense=dense), expected)


def happen(fused, event, made, step):
    if event == "hook":
        before = fused.plan()
        assert fused.post_load_weights() is bool(before.fused)
        assert fused.is_fused is bool(before.fused)
        assert not before.fused or list(fused._views.names) == before.fused
    elif event == "release":
        fused.release()
    elif made is None or isinstance(made, Quantized):
        return
    elif event == "replace":
        new = integers(*made.weight.shape, seed=100 + step, dtype=made.weight.dtype)
        made.weight = torch.nn.Parameter(new, requires_grad=False)
    elif event == "copy":
        with torch.no_grad():
            made.weight.copy_(integers(*made.weight.shape, seed=100 + step))
    elif event == "clone":
        made.weight.data = made.weight.data.clone()
    elif event == "train":
        made.weight.requires_grad_(not made.weight.requires_grad)
    else:
        made.weight.data = made.weight.data.to(FP32 if event == "widen" else BF16)


def test_the_module_says_what_it_exports():
    assert set(qkv_a.__all__) <= set(vars(qkv_a))
    assert set(PRESETS) == {"nvfp4_all", "8771", "wk_only", "9243", "unfused", "11989", "indexer_pair", "12055"}
