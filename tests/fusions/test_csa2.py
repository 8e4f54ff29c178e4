"""CSA2's hidden-state projections on the CPU, with an op that records its calls: dispatch, life of the weights,
numbers, tracing."""

from __future__ import annotations

import copy
import io
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear as F_linear

sys.path.insert(0, str(Path(__file__).parent))

from recording import BF16, Recording, assert_close, linear, normal, same_bits, whole

from fusions import csa2
from fusions.csa2 import HiddenStateProjections
from fusions.csa2 import Path as Route
from fusions.ops import choice

NQ, NKV, K = 48, 32, 64
TOKENS = (0, 1, 2, 7, 8, 9, 32)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(choice.CHOICE, raising=False)
    monkeypatch.delenv(choice.POLICY, raising=False)
    torch.compiler.reset()
    with torch.no_grad():
        yield


class Attention(nn.Module):
    """The owner of the two Linears and of their projections."""

    def __init__(self, nq: int = NQ, nkv: int = NKV, k: int = K, op: Any = None, seed: int = 0, **settings: Any):
        super().__init__()
        self.wq_a, self.wkv = linear(whole(nq, k, seed=seed)), linear(whole(nkv, k, seed=seed + 1))
        settings = {"policy": "*", "op": Recording() if op is None else op, **settings}
        self.projections = HiddenStateProjections(self.wq_a, self.wkv, **settings)

    @property
    def op(self) -> Recording:
        op = self.projections.op
        assert isinstance(op, Recording)
        return op

    def plain(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F_linear(hidden, self.wq_a.weight), F_linear(hidden, self.wkv.weight)


def fused(**settings: Any) -> Attention:
    attention = Attention(**settings)
    assert attention.projections.post_load_weights()
    return attention


def check(attention: Attention, path: Route | None = None, tokens: tuple[int, ...] = TOKENS) -> None:
    """Values, layout and calls for each number of tokens; ``path``: the one for all, else by their number."""
    for count in tokens:
        hidden = whole(count, K, seed=count)
        want_path = path or (Route.FUSED if count == 1 else Route.SEPARATE if 2 <= count <= 8 else Route.LINEAR)
        found, reason = attention.projections.explain(hidden)
        assert (found, reason != "") == (want_path, True), (count, reason)
        launches = attention.projections.launches(hidden)
        attention.op.taken()
        results = attention.projections.project(hidden)
        calls = attention.op.taken()
        assert len(calls) == {Route.FUSED: 1, Route.SEPARATE: 2, Route.LINEAR: 0}[want_path]
        assert [(call.weight, call.columns) for call in calls] == [
            (launch.weight.data_ptr(), launch.weight.shape[0]) for launch in launches
        ]
        for result, want in zip(results, attention.plain(hidden), strict=True):
            assert same_bits(result, want)
            assert result.stride() == (want.shape[1], 1)
            assert result.dtype is BF16


# -- which path --------------------------------------------------------------------------------------------------------


def test_one_token_is_one_call_two_to_eight_are_two_and_the_rest_none() -> None:
    attention = fused()
    check(attention)
    hidden = whole(1, K)
    attention.projections.project(hidden)
    (call,) = attention.op.taken()
    assert (call.rows, call.columns, call.weight, call.bias) == (1, NQ + NKV, attention.wq_a.weight.data_ptr(), False)
    attention.projections(whole(8, K))
    assert [call.columns for call in attention.op.taken()] == [NQ, NKV]
    assert attention.projections.explain(hidden) == (Route.FUSED, "recording tinygemm2")
    assert [each.name for each in attention.projections.launches(hidden)] == ["wq_a and wkv"]
    assert [each.name for each in attention.projections.launches(whole(2, K))] == ["wq_a", "wkv"]


def test_the_most_tokens_and_one_tokens_fusion_are_settings() -> None:
    attention = fused(max_tokens=2, fuse_one_token=False)
    paths = [attention.projections.explain(whole(count, K))[0] for count in (0, 1, 2, 3)]
    assert paths == [Route.LINEAR, Route.SEPARATE, Route.SEPARATE, Route.LINEAR]
    assert attention.projections.explain(whole(3, K))[1] == "3 tokens, not 1 to 2"
    assert fused(max_tokens=1).projections.explain(whole(2, K))[0] is Route.LINEAR


def test_one_tokens_results_are_dense_disjoint_parts_of_one_allocation() -> None:
    q, kv = fused().projections.project(whole(1, K))
    assert (q.shape, q.stride(), q.storage_offset()) == ((1, NQ), (NQ, 1), 0)
    assert (kv.shape, kv.stride(), kv.storage_offset()) == ((1, NKV), (NKV, 1), NQ)
    assert q.untyped_storage().data_ptr() == kv.untyped_storage().data_ptr()
    kept = kv.clone()
    q.fill_(7)
    assert torch.equal(kv, kept)


def test_results_share_no_memory_with_hidden_or_the_weights() -> None:
    attention = fused()
    for count in (1, 2, 9):
        hidden = whole(count, K)
        for result in attention.projections.project(hidden):
            storage = result.untyped_storage().data_ptr()
            assert storage not in (
                hidden.untyped_storage().data_ptr(),
                attention.wq_a.weight.untyped_storage().data_ptr(),
            )


@pytest.mark.parametrize("stride", [K, K + 1, 3, 1000])
def test_one_dense_row_is_dense_whatever_its_row_stride_says(stride: int) -> None:
    attention = fused()
    hidden = whole(1, 2 * K).as_strided((1, K), (stride, 1))
    assert attention.projections.explain(hidden)[0] is Route.FUSED
    assert same_bits(attention.projections.project(hidden)[0], F_linear(hidden, attention.wq_a.weight))


def offset(count: int) -> torch.Tensor:
    return whole(count * K + 1)[1:].view(count, K)


HIDDEN: dict[str, tuple[Callable[[int], torch.Tensor], str]] = {
    "a 2-byte offset": (offset, "hidden is not dense, or not 16-byte aligned"),
    "rows apart": (lambda count: whole(count + 1, 2 * K)[: count + 1, :K], "hidden is not dense"),
    "transposed": (lambda count: whole(K, count + 1).t(), "hidden is not dense"),
    "three dimensions": (lambda count: whole(2, count, K), "hidden is torch.bfloat16 (2, "),
    "one dimension": (lambda count: whole(K), "hidden is torch.bfloat16 (64,)"),
    "a subclass": (lambda count: whole(count, K).as_subclass(Tagged), "hidden is a Tagged"),
    "a parameter": (lambda count: nn.Parameter(whole(count, K), requires_grad=False), "hidden is a Parameter"),
}


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("make", "words"), HIDDEN.values(), ids=HIDDEN.keys())
def test_a_hidden_that_the_op_cannot_take_goes_to_the_linears(
    make: Callable[[int], torch.Tensor], words: str, count: int
) -> None:
    attention = fused()
    hidden = make(count)
    path, reason = attention.projections.explain(hidden)
    assert path is Route.LINEAR
    assert reason.startswith(words)
    assert attention.projections.launches(hidden) == ()
    for result, want in zip(attention.projections.project(hidden), attention.plain(hidden), strict=True):
        assert type(result) is type(want)
        assert torch.equal(result, want)
    assert attention.op.calls == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_another_dtype_is_the_linears_to_take_or_refuse(dtype: torch.dtype) -> None:
    attention = fused()
    hidden = whole(2, K).to(dtype)
    assert attention.projections.explain(hidden)[0] is Route.LINEAR
    with pytest.raises(RuntimeError, match="dtype"):
        attention.projections.project(hidden)
    attention.to(dtype)
    assert attention.projections.project(hidden)[0].dtype is dtype


def test_meta_and_fake_tensors_give_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    attention = Attention().to("meta")
    assert not attention.projections.post_load_weights()
    assert "meta device" in attention.projections.explain(whole(1, K))[1]
    hidden = whole(1, K).to("meta")
    assert attention.projections.explain(hidden)[1] == "hidden is a meta tensor"
    assert [each.shape for each in attention.projections.project(hidden)] == [(1, NQ), (1, NKV)]
    attention = fused()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for count in (1, 3):
            results = attention.projections.project(mode.from_tensor(whole(count, K)))
            assert [each.shape for each in results] == [(count, NQ), (count, NKV)]
    assert attention.op.calls == []


def test_vmap_goes_to_the_linears() -> None:
    attention = fused()
    hidden = whole(3, 2, K)
    results = torch.vmap(attention.projections.project)(hidden)
    assert all(map(same_bits, results, attention.plain(hidden)))


def test_gradients_flow_where_they_are_needed_and_only_there() -> None:
    attention = fused()
    hidden = whole(1, K).requires_grad_(True)
    check(attention)
    with torch.enable_grad():
        check(attention)
        assert attention.projections.explain(hidden) == (Route.LINEAR, "a gradient is needed")
        sum(each.sum() for each in attention.projections.project(hidden)).backward()
        want = attention.wq_a.weight.sum(0) + attention.wkv.weight.sum(0)
        assert torch.equal(hidden.grad[0], want)  # type: ignore[index]
        attention.wkv.weight.requires_grad_(True)
        assert attention.projections.explain(whole(1, K))[1] == "a gradient is needed"
        attention.projections.project(whole(1, K))[1].sum().backward()
        assert attention.wkv.weight.grad is not None
    assert attention.projections.is_fused
    assert attention.projections.explain(hidden)[0] is Route.FUSED


OFF: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"projection_mode": "mxfp8"}, "projection mode mxfp8"),
    "policy off": ({"policy": ""}, "policy: cpu is no GPU"),
    "policy of others": ({"policy": "90,107"}, "policy: cpu is no GPU"),
    "the default policy": ({"policy": None}, "policy: cpu is no GPU"),
    "op refuses": ({"op": Recording(why="does not like it")}, "recording does not like it"),
    "K % 8": ({"k": 60}, "wq_a has K = 60, no multiple of 8"),
    "Nq % 16": ({"nq": 40}, "wq_a has 40 rows, no multiple of 16"),
    "Nkv % 16": ({"nkv": 8}, "wkv has 8 rows, no multiple of 16"),
}


@pytest.mark.parametrize(("settings", "words"), OFF.values(), ids=OFF.keys())
def test_what_cannot_profit_is_not_touched_and_goes_to_the_linears(settings: dict[str, Any], words: str) -> None:
    attention = Attention(**settings)
    weights = (attention.wq_a.weight, attention.wkv.weight)
    before = [(each.data_ptr(), each._version) for each in weights]
    assert not attention.projections.post_load_weights()
    assert not attention.projections.cache_derived_state()
    assert not attention.projections.is_fused
    assert [(each.data_ptr(), each._version) for each in weights] == before
    for count in (0, 1, 3, 9):
        hidden = whole(count, attention.wq_a.weight.shape[1])
        path, reason = attention.projections.explain(hidden)
        assert path is Route.LINEAR
        assert words in reason
        assert all(map(same_bits, attention.projections.project(hidden), attention.plain(hidden)))
    assert attention.op.calls == attention.op.prepared == []


def test_without_any_op_the_linears_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "OPS", {"recording": Recording()})
    attention = Attention()
    attention.projections.op = None
    assert attention.projections.post_load_weights()
    for value, path in (("auto", Route.FUSED), ("off", Route.LINEAR), ("recording", Route.FUSED)):
        monkeypatch.setenv(choice.CHOICE, value)
        assert attention.projections.explain(whole(1, K))[0] is path
        assert all(map(same_bits, attention.projections.project(whole(1, K)), attention.plain(whole(1, K))))
    monkeypatch.setenv(choice.CHOICE, "off")
    assert attention.projections.explain(whole(1, K))[1] == "FUSIONS_TINYGEMM=off"
    assert not attention.projections.post_load_weights()
    monkeypatch.setenv(choice.CHOICE, "recording")
    assert attention.projections.post_load_weights()


def test_the_policys_variable_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.POLICY, "*")
    attention = fused(policy=None)
    check(attention)
    monkeypatch.setenv(choice.POLICY, "90")
    check(attention, Route.LINEAR)
    monkeypatch.setenv(choice.POLICY, "ninety")
    with pytest.raises(ValueError, match="expected capabilities"):
        attention.projections.project(whole(1, K))


def test_wrong_settings_are_errors() -> None:
    for settings, words in (
        ({"projection_mode": "fp8"}, "expected one of bf16, mxfp8"),
        ({"max_tokens": 0}, "expected 1 or more"),
        ({"policy": "hopper"}, "expected capabilities"),
    ):
        with pytest.raises(ValueError, match=words):
            Attention(**settings)  # type: ignore[arg-type]


def test_a_wrong_k_is_an_error_on_every_path() -> None:
    attention = fused()
    for count in (1, 2, 9):
        with pytest.raises(ValueError, match="hidden has K = 72, the weights have K = 64"):
            attention.projections.project(whole(count, 72))
    attention.projections.release()
    with pytest.raises(RuntimeError):
        attention.projections.project(whole(2, 72))
    assert attention.op.calls == []


class Packed:
    """A quantized Linear: two values in a byte."""

    bias = None
    has_any_quant = True

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(16, K // 2, dtype=torch.uint8), requires_grad=False)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_full((*hidden.shape[:-1], 16), 3)


@pytest.mark.parametrize(
    ("other", "words"),
    [(Packed(), "wkv is quantized"), (nn.Identity(), "wkv is a Identity without"), (None, "wkv is missing")],
    ids=["packed", "identity", "missing"],
)
def test_children_that_are_no_plain_linears_are_called_as_they_are(other: Any, words: str) -> None:
    """On either side, with whatever shape their weight has."""
    for swap in (False, True):
        pair = (other, linear(whole(16, K))) if swap else (linear(whole(16, K)), other)
        projections = HiddenStateProjections(*pair, op=Recording(), policy="*")
        assert not projections.post_load_weights()
        hidden = whole(2, K)
        assert words.replace("wkv", "wq_a" if swap else "wkv") in projections.explain(hidden)[1]
        if other is not None:
            result = projections.project(hidden)[0 if swap else 1]
            assert torch.equal(result, other(hidden))


def test_upstreams_small_model_fits() -> None:
    """K = 128, Nq = 128, Nkv = 512."""
    attention = fused(nq=128, nkv=512, k=128)
    hidden = whole(1, 128)
    assert all(map(same_bits, attention.projections.project(hidden), attention.plain(hidden)))
    assert [call.columns for call in attention.op.taken()] == [640]


# -- the life of the weights -------------------------------------------------------------------------------------------


def pointers(attention: Attention) -> tuple[int, int]:
    return attention.wq_a.weight.data_ptr(), attention.wkv.weight.data_ptr()


def state_of(attention: Attention) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in attention.state_dict().items()}


STATE = {"wq_a.weight": (NQ, K), "wkv.weight": (NKV, K)}


def test_the_hook_makes_both_weights_rows_of_one_and_registers_nothing() -> None:
    attention = Attention()
    parameters = list(attention.parameters())
    values = [each.clone() for each in parameters]
    assert not attention.projections.is_fused
    assert attention.projections.post_load_weights()
    q, kv = pointers(attention)
    assert kv == q + NQ * K * 2
    assert attention.wq_a.weight.untyped_storage().nbytes() == (NQ + NKV) * K * 2
    assert all(a is b for a, b in zip(attention.parameters(), parameters, strict=True))
    assert len(parameters) == 2
    assert all(map(same_bits, attention.parameters(), values))
    assert list(attention.projections.buffers()) == list(attention.projections.parameters()) == []
    assert state_of(attention) == STATE
    assert attention.op.prepared == [("cpu", (NQ + NKV, NQ, NKV))]


def test_a_second_hook_moves_nothing() -> None:
    attention = fused()
    before, weight = pointers(attention), attention.projections._parts.weight
    for hook in (
        attention.projections.post_load_weights,
        attention.projections.transform_weights,
        attention.projections.cache_derived_state,
    ):
        assert hook()
        assert pointers(attention) == before
        assert attention.projections._parts.weight is weight
        assert attention.op.prepared[-1] == ("cpu", (NQ + NKV, NQ, NKV))


def test_the_hook_and_the_release_refuse_to_run_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (Attention, fused, lambda: Attention(policy="")):
        attention = make()
        monkeypatch.setattr("fusions.capturing.is_capturing", lambda: True)
        before = pointers(attention)
        for change in (
            attention.projections.post_load_weights,
            attention.projections.transform_weights,
            attention.projections.release,
        ):
            with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
                change()
        assert pointers(attention) == before
        attention.projections.project(whole(1, K))
        monkeypatch.undo()


def test_cache_derived_state_only_looks() -> None:
    attention = Attention()
    before = pointers(attention)
    assert not attention.projections.cache_derived_state()
    assert pointers(attention) == before
    storage = torch.cat([attention.wq_a.weight, attention.wkv.weight])
    attention.wq_a.weight.data, attention.wkv.weight.data = storage[:NQ], storage[NQ:]
    versions = attention.wq_a.weight._version
    assert attention.projections.cache_derived_state()
    assert pointers(attention)[0] == storage.data_ptr()
    assert attention.wq_a.weight._version == versions
    assert attention.op.prepared == [("cpu", (NQ + NKV, NQ, NKV))]
    check(attention)


def reload_whole(attention: Attention) -> None:
    attention.load_state_dict(Attention(seed=50).state_dict())


def reload_q(attention: Attention) -> None:
    attention.wq_a.weight.copy_(whole(NQ, K, seed=51))


def reload_kv(attention: Attention) -> None:
    attention.wkv.weight.data.copy_(whole(NKV, K, seed=52))


def reload_rows(attention: Attention) -> None:
    attention.wkv.weight[3:5] = 1


def to_the_same(attention: Attention) -> None:
    attention.to("cpu").to(BF16).bfloat16()


@pytest.mark.parametrize("change", [reload_whole, reload_q, reload_kv, reload_rows, to_the_same])
def test_a_change_in_place_stays_fused_and_is_seen(change: Callable[[Attention], Any]) -> None:
    attention = fused()
    before = pointers(attention)
    change(attention)
    assert pointers(attention) == before
    assert attention.projections.is_fused
    check(attention)


def assign(attention: Attention) -> None:
    attention.load_state_dict(Attention(seed=60).state_dict(), assign=True)


def replace_q(attention: Attention) -> None:
    attention.wq_a.weight = nn.Parameter(whole(NQ, K, seed=61), requires_grad=False)


def replace_kv(attention: Attention) -> None:
    attention.wkv.weight = nn.Parameter(whole(NKV, K, seed=62), requires_grad=False)


def data_of_q(attention: Attention) -> None:
    attention.wq_a.weight.data = whole(NQ, K, seed=63)


def data_of_kv(attention: Attention) -> None:
    attention.wkv.weight.data = whole(NKV, K, seed=64)


def round_trip(attention: Attention) -> None:
    attention.half().bfloat16()


def narrower(attention: Attention) -> None:
    attention.wkv.weight.data = whole(16, K, seed=65)


@pytest.mark.parametrize("change", [assign, replace_q, replace_kv, data_of_q, data_of_kv, round_trip, narrower])
def test_a_replaced_weight_falls_back_with_the_new_values_and_is_fused_anew(change: Callable[[Attention], Any]) -> None:
    attention = fused()
    before = attention.projections._parts.weight
    change(attention)
    assert not attention.projections.is_fused
    check(attention, Route.LINEAR)
    assert (
        "is no longer a view of the fused weight; post_load_weights() fuses again"
        in (attention.projections.explain(whole(1, K))[1])
    )
    assert not attention.projections.cache_derived_state()
    assert attention.projections.post_load_weights()
    assert attention.projections._parts.weight is not before
    check(attention)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_of_another_dtype_never_meet_the_stale_fused_weight(dtype: torch.dtype) -> None:
    attention = fused()
    attention.to(dtype)
    hidden = whole(1, K).to(dtype)
    assert all(map(torch.equal, attention.projections.project(hidden), attention.plain(hidden)))
    assert attention.projections.explain(hidden)[0] is Route.LINEAR
    assert not attention.projections.post_load_weights()
    assert attention.projections._parts.weight is None
    attention.to(BF16)
    assert attention.projections.post_load_weights()
    check(attention)


def test_a_tie_of_the_two_is_not_undone() -> None:
    attention = Attention(nq=32, nkv=32)
    attention.wkv.weight = attention.wq_a.weight
    before = pointers(attention)
    assert not attention.projections.post_load_weights()
    assert pointers(attention) == before
    assert "share memory" in attention.projections.explain(whole(1, K))[1]
    check(attention, Route.LINEAR)
    attention = fused(nq=32, nkv=32)
    attention.wkv.weight = attention.wq_a.weight
    check(attention, Route.LINEAR)
    assert not attention.projections.post_load_weights()
    check(attention, Route.LINEAR)
    assert attention.wkv.weight is attention.wq_a.weight


def test_a_module_outside_that_is_tied_to_one_sees_the_view_and_its_reloads() -> None:
    attention, outside = Attention(), linear(whole(NQ, K))
    outside.weight = attention.wq_a.weight
    assert attention.projections.post_load_weights()
    assert outside.weight is attention.wq_a.weight
    outside.weight.copy_(whole(NQ, K, seed=9))
    assert torch.equal(attention.wq_a.weight, whole(NQ, K, seed=9))
    check(attention)


def test_a_foreign_view_is_fused_only_where_that_is_allowed() -> None:
    for allowed in (False, True):
        attention = Attention(allow_foreign_views=allowed)
        storage = whole(2 * NQ, K, seed=3)
        attention.wq_a.weight.data = storage[:NQ]
        assert attention.projections.post_load_weights() is allowed
        check(attention, None if allowed else Route.LINEAR)
        if allowed:
            attention.wq_a.weight.zero_()
            assert torch.equal(storage, whole(2 * NQ, K, seed=3))


def test_training_keeps_weights_apart_and_freezing_brings_them_back() -> None:
    attention = fused()
    before = pointers(attention)
    attention.wq_a.weight.requires_grad_(True)
    check(attention)  # no gradient is recorded here
    assert not attention.projections.post_load_weights()
    check(attention, Route.LINEAR)
    attention.wq_a.weight.requires_grad_(False)
    assert attention.projections.post_load_weights()
    assert pointers(attention) == before
    check(attention)


def test_release_gives_both_their_own_storage() -> None:
    attention = fused()
    parameters = list(attention.parameters())
    values = [each.clone() for each in parameters]
    attention.projections.release()
    assert [each.untyped_storage().nbytes() for each in attention.parameters()] == [NQ * K * 2, NKV * K * 2]
    assert all(a is b for a, b in zip(attention.parameters(), parameters, strict=True))
    assert all(map(same_bits, attention.parameters(), values))
    assert "post_load_weights() has not run since" in attention.projections.explain(whole(1, K))[1]
    check(attention, Route.LINEAR)
    assert attention.projections.post_load_weights()
    check(attention)


def test_a_deep_copy_is_independent_and_never_uses_the_originals_weight() -> None:
    attention = fused()
    twin = copy.deepcopy(attention)
    assert twin.projections._parts.linears == (twin.wq_a, twin.wkv)
    twin.wkv.weight.zero_()
    check(attention)
    check(twin, None if twin.projections.is_fused else Route.LINEAR)
    assert twin.projections.post_load_weights()
    check(twin)
    assert not {*pointers(twin)} & {*pointers(attention)}
    attention.projections.release()
    check(twin)


def saved(thing: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


def test_a_pickled_module_comes_back_fused_over_its_own_weight() -> None:
    attention = fused()
    loaded = saved(attention, weights_only=False)
    assert loaded.projections.is_fused
    assert loaded.projections._parts.linears == (loaded.wq_a, loaded.wkv)
    loaded.wkv.weight.zero_()
    check(loaded)
    check(attention)


def test_pickled_linears_alone_are_detected_as_laid_out() -> None:
    attention = fused()
    loaded = saved(nn.ModuleDict({"q": attention.wq_a, "kv": attention.wkv}), weights_only=False)
    projections = HiddenStateProjections(loaded["q"], loaded["kv"], op=Recording(), policy="*")
    assert projections.cache_derived_state()
    assert projections.is_fused


@pytest.mark.parametrize("assign_", [False, True])
def test_a_state_dict_goes_into_unfused_and_fused_modules_alike(assign_: bool) -> None:
    attention = fused(seed=30)
    state = saved(attention.state_dict(), weights_only=True)
    assert {key: tuple(value.shape) for key, value in state.items()} == STATE
    assert all(value.is_contiguous() for value in state.values())
    for make in (Attention, fused):
        other = make(seed=70)
        other.load_state_dict(state, assign=assign_)
        assert all(map(same_bits, other.parameters(), attention.parameters()))
        assert other.projections.post_load_weights()
        check(other)


def test_safetensors_take_the_views_as_separate_tensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    attention = fused(seed=30)
    safetensors.save_model(attention, str(tmp_path / "model"))
    safetensors.save_file(attention.state_dict(), str(tmp_path / "state"))
    for name in ("model", "state"):
        other = fused(seed=70)
        other.load_state_dict(safetensors.load_file(str(tmp_path / name)))
        assert all(map(same_bits, other.parameters(), attention.parameters()))
        check(other)


def test_two_owners_of_the_same_linears_share_one_layout() -> None:
    attention = fused()
    before = pointers(attention)
    second = HiddenStateProjections(attention.wq_a, attention.wkv, op=Recording(), policy="*")
    assert second.post_load_weights()
    assert pointers(attention) == before
    second.release()
    assert not attention.projections.is_fused
    check(attention, Route.LINEAR)


def test_a_hook_of_a_child_that_runs_after_ours_is_noticed() -> None:
    """Walks over modules() reach parents before their children."""
    attention = fused()
    attention.wkv.weight = nn.Parameter(attention.wkv.weight.clone(), requires_grad=False)
    check(attention, Route.LINEAR)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_size() -> Attention:
    attention = Attention(nq=16, nkv=16, k=5120)
    attention.wq_a.weight.data, attention.wkv.weight.data = normal(1280, 5120, seed=1), normal(512, 5120, seed=2)
    assert attention.projections.post_load_weights()
    return attention


@pytest.mark.parametrize("count", [1, 2, 8])
def test_results_are_one_rounding_away_from_exact(full_size: Attention, count: int) -> None:
    hidden = normal(count, 5120, seed=count)
    results = full_size.projections.project(hidden)
    weights = (full_size.wq_a.weight, full_size.wkv.weight)
    for result, weight in zip(results, weights, strict=True):
        assert_close(result, hidden, weight)
        scale = 5120**-0.5
        want = F_linear(hidden.float(), weight.float() * scale)
        torch.testing.assert_close(result.float() * scale, want, rtol=1e-2, atol=1e-2)


def test_zeros_give_positive_zeros_and_a_bad_row_stays_alone(full_size: Attention) -> None:
    for count in (1, 8):
        for result in full_size.projections.project(torch.zeros(count, 5120, dtype=BF16)):
            assert (result.view(torch.int16) == 0).all()
    hidden = normal(8, 5120)
    clean = full_size.projections.project(hidden)
    for bad, value in itertools.product((0, 7), (float("nan"), float("inf"))):
        spoilt = hidden.clone()
        spoilt[bad, 17] = value
        for result, want in zip(full_size.projections.project(spoilt), clean, strict=True):
            others = [row for row in range(8) if row != bad]
            assert same_bits(result[others], want[others])
            assert not result[bad].isfinite().any()


# -- the acceptance test of the change this restates -------------------------------------------------------------------


def test_acceptance() -> None:
    attention = Attention(nq=16, nkv=16, k=128)
    attention.wq_a.weight.data = normal(128, 128, seed=1, scale=128**-0.5)
    attention.wkv.weight.data = normal(512, 128, seed=2, scale=128**-0.5)
    projections = attention.projections
    assert projections.post_load_weights()
    fused_weight = projections._parts.weight
    assert fused_weight is not None
    assert attention.wq_a.weight.data_ptr() == fused_weight.data_ptr()
    assert attention.wkv.weight.data_ptr() == fused_weight[128:].data_ptr()

    def run(count: int, calls: int) -> None:
        attention.op.taken()
        hidden = normal(count, 128, seed=count)
        results = projections.project(hidden)
        assert len(attention.op.taken()) == calls
        for result, weight in zip(results, (attention.wq_a.weight, attention.wkv.weight), strict=True):
            assert (result.shape, result.stride()) == ((count, weight.shape[0]), (weight.shape[0], 1))
            torch.testing.assert_close(result.float(), F_linear(hidden.float(), weight.float()), rtol=1e-2, atol=1e-2)

    for count, calls in ((1, 1), (2, 2), (8, 2), (9, 0), (32, 0)):
        run(count, calls)
    attention.wq_a.weight.copy_(normal(128, 128, seed=3, scale=128**-0.5))
    attention.wkv.weight.copy_(normal(512, 128, seed=4, scale=128**-0.5))
    run(1, 1)
    attention.wkv.weight = nn.Parameter(normal(512, 128, seed=5, scale=128**-0.5), requires_grad=False)
    run(1, 0)
    run(2, 0)


# -- tracing -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """The op that the choice makes: a traced call cannot be given one."""
    op = Recording()
    monkeypatch.setattr(choice, "OPS", {"recording": op})
    return op


def chosen_attention(**settings: Any) -> Attention:
    attention = Attention(**settings)
    attention.projections.op = None
    assert attention.projections.post_load_weights()
    return attention


def compiled(attention: Attention) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    made: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = torch.compile(
        attention.projections.project, fullgraph=True, backend="aot_eager"
    )
    return made


def test_a_compiled_projection_has_the_same_results_layout_and_calls(chosen: Recording) -> None:
    attention = chosen_attention()
    run = compiled(attention)
    for count, calls in ((1, [NQ + NKV]), (2, [NQ, NKV]), (8, [NQ, NKV]), (9, []), (0, [])):
        hidden = whole(count, K)
        results = run(hidden)
        assert [call.columns for call in chosen.taken()] == calls
        for result, want in zip(results, attention.plain(hidden), strict=True):
            assert same_bits(result, want)
            assert result.stride() == want.stride()


def test_a_compiled_projection_sees_reloads_replacements_and_releases(chosen: Recording) -> None:
    attention = chosen_attention()
    run = compiled(attention)

    def compare(calls: int | None = None) -> None:
        for count in (1, 2):
            assert all(map(same_bits, run(whole(count, K)), attention.plain(whole(count, K))))
        taken = len(chosen.taken())
        assert calls is None or taken == calls

    compare(3)
    reload_whole(attention)
    compare(3)
    data_of_kv(attention)
    compare()
    replace_q(attention)
    compare()
    attention.wkv.weight = nn.Parameter(whole(24, K, seed=4), requires_grad=False)  # no multiple of 16
    compare()
    replace_kv(attention)
    attention.projections.post_load_weights()
    compare(3)
    attention.projections.release()
    compare(0)


def test_a_compiled_projection_takes_strange_operands_as_a_linear_does(chosen: Recording) -> None:
    attention = chosen_attention()
    run = compiled(attention)
    for hidden in (offset(1), offset(3), whole(3, 2 * K)[:, :K], whole(1, K + 1)[:, :K]):
        assert all(map(same_bits, run(hidden), attention.plain(hidden)))
    with torch.enable_grad():
        hidden = whole(1, K).requires_grad_(True)
        sum(each.sum() for each in run(hidden)).backward()
        assert hidden.grad is not None


def test_a_compiled_projection_without_an_op_is_the_linears(chosen: Recording) -> None:
    attention = chosen_attention()
    chosen.why = "is gone"
    for count in (1, 2):
        assert all(map(same_bits, compiled(attention)(whole(count, K)), attention.plain(whole(count, K))))
    assert chosen.calls == []


def test_one_with_an_op_of_its_own_is_traced_as_the_linears() -> None:
    attention = fused()
    assert all(map(same_bits, compiled(attention)(whole(1, K)), attention.plain(whole(1, K))))
    assert attention.op.calls == []


@pytest.mark.parametrize("op", [Recording(), Recording(why="not here")], ids=["op", "fallback"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_custom_ops_are_well_formed(op: Recording, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "OPS", {"recording": op})
    storage, hidden = whole(NQ + NKV, K), whole(count, K, seed=2)
    torch.library.opcheck(torch.ops.fusions.projection.default, (hidden, storage[:NQ]))
    if count == 1:
        for kv in (storage[NQ:], whole(NKV, K)):
            torch.library.opcheck(torch.ops.fusions.row_projection.default, (hidden, storage[:NQ], kv))


def test_a_row_projection_over_weights_that_only_seem_to_follow_each_other(chosen: Recording) -> None:
    """The second starts where the first ends, and its rows lie otherwise."""
    storage, hidden = whole(4 * NQ, K), whole(1, K, seed=2)
    q = storage[:NQ]
    for kv in (storage[NQ:].as_strided((NKV, K), (2 * K, 1)), storage[NQ : NQ + K].t(), storage[NQ : NQ + 24]):
        got = torch.ops.fusions.row_projection(hidden, q, kv)
        assert same_bits(got, torch.cat([F_linear(hidden, q), F_linear(hidden, kv)], 1)[0])
    assert chosen.calls == []
    torch.ops.fusions.row_projection(hidden, q, storage[NQ : NQ + NKV])
    assert [call.columns for call in chosen.calls] == [NQ + NKV]


def test_the_custom_ops_take_what_a_linear_takes(chosen: Recording) -> None:
    for hidden, weight in (
        (whole(2, K), whole(24, K)),
        (whole(2, K).float(), whole(32, K).float()),
        (offset(2), whole(32, K)),
        (whole(2, K), whole(32, 2 * K)[:, :K]),
    ):
        assert torch.equal(csa2._projection(hidden, weight), F_linear(hidden, weight))
    assert chosen.calls == []
