"""CSA2's projections installed on stand-ins for TensorRT-LLM's attention: same results, nothing left behind, and force.

Weights and hidden states are whole numbers, whose sums are exact.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import stand_ins as upstream
from installed import (
    K,
    fresh,
    on_own_storage,
    pair,
    same,
    traces,
)
from recording import BF16, Recording, normal, whole

from fusions import capturing
from fusions.csa2 import Path as Csa2Path
from fusions.integrations.equality import difference
from fusions.integrations.tensorrt_llm import (
    Different,
    install_csa2,
    install_indexer,
    install_qkv_a,
    uninstall,
)

CALLS = {1: [640], 2: [128, 512], 8: [128, 512], 9: [], 32: []}


@pytest.mark.parametrize("first", ["install", "load"])
@pytest.mark.parametrize("tokens", CALLS)
def test_csa2_gives_the_same_from_the_op(tokens: int, first: str) -> None:
    _, twin = pair()
    attn, op = upstream.DeepseekV41Attention(), Recording()
    for step in sorted(["install", "load"], key=lambda step: step != first):
        if step == "load":
            upstream.load(attn)
        else:
            install_csa2(attn, op=op, policy="*")
    hidden = whole(tokens, K)
    assert same(attn(hidden), twin(hidden))
    assert [call.columns for call in op.taken()] == CALLS[tokens]
    assert same(attn(hidden, scale=2.0), twin(hidden, scale=2.0))


def test_csa2_changes_no_key_no_parameter_and_no_other_instance() -> None:
    attn, twin = pair()
    keys, parameters = list(attn.state_dict()), dict(attn.named_parameters())
    install_csa2(attn, op=Recording(), policy="*")
    assert list(attn.state_dict()) == keys
    assert all(parameters[name] is found for name, found in attn.named_parameters())
    assert len(dict(attn.named_parameters())) == len(parameters)
    assert not traces(twin)
    assert "forward" not in vars(twin)
    assert not hasattr(type(attn), "post_load_weights")
    twin.load_state_dict(attn.state_dict())


def test_csa2_without_a_fused_layout_is_what_it_was() -> None:
    attn, twin = pair()
    projections = install_csa2(attn)  # no tinygemm2 on the CPU
    assert projections.explain(whole(1, K))[0] is Csa2Path.LINEAR
    assert on_own_storage(attn.wq_a, attn.wkv)
    hidden = normal(3, K)
    assert same(attn(hidden), twin(hidden))


@pytest.mark.parametrize("by", ["post_load_weights", "staged"])
def test_a_reload_writes_through_and_moves_nothing(by: str) -> None:
    attn, op = upstream.DeepseekV41Attention(), Recording()
    projections = install_csa2(attn, op=op, policy="*")
    upstream.load(attn, by=by)
    address = attn.wq_a.weight.data_ptr()
    assert projections.is_fused
    for seed in (1, 2):
        twin = upstream.DeepseekV41Attention()
        upstream.load(twin, seed)
        upstream.load(attn, seed, by=by)
        assert attn.wq_a.weight.data_ptr() == address
        assert same(attn(whole(1, K)), twin(whole(1, K)))
        assert [call.columns for call in op.taken()] == [640]


def test_the_hook_that_was_there_is_called_first_and_its_result_returned() -> None:
    apart: list[bool] = []

    class Observed(upstream.RenamedAttention):
        def post_load_weights(self) -> str:
            apart.append(on_own_storage(self.wq_a, self.wkv))
            return super().post_load_weights()

    attn = Observed()
    upstream.load(attn)
    install_csa2(attn, force=True, op=Recording(), policy="*")
    attn.wkv.weight = nn.Parameter(attn.wkv.weight.data.clone(), requires_grad=False)
    attn.wq_a.weight = nn.Parameter(attn.wq_a.weight.data.clone(), requires_grad=False)
    assert attn.post_load_weights() == "own"
    assert apart == [True, True]
    assert attn.hooks == 2
    assert not on_own_storage(attn.wq_a)
    uninstall(attn)
    assert attn.post_load_weights() == "own"
    without, _ = pair()
    install_csa2(without, op=Recording(), policy="*")
    assert without.post_load_weights() is True


def test_a_childs_hook_that_replaces_its_weight_behind_ours_is_made_good_by_the_end_of_the_walk() -> None:
    attn, twin = pair()
    projections = install_csa2(attn, op=(op := Recording()), policy="*")

    def replace() -> None:
        attn.wkv.weight = nn.Parameter(attn.wkv.weight.data.clone(), requires_grad=False)

    attn.wkv.post_load_weights = replace
    upstream.walk(attn)
    assert projections.is_fused
    assert same(attn(whole(1, K)), twin(whole(1, K)))
    assert [call.columns for call in op.taken()] == [640]


def test_a_replaced_parameter_is_used_at_once_and_fused_by_the_next_hook() -> None:
    attn, twin = pair()
    install_csa2(attn, op=(op := Recording()), policy="*")
    for module in (attn, twin):
        module.wkv.weight = nn.Parameter(whole(512, K, seed=9), requires_grad=False)
    assert same(attn(whole(1, K)), twin(whole(1, K)))
    assert not op.taken()
    assert attn.post_load_weights() is True
    assert same(attn(whole(1, K)), twin(whole(1, K)))
    assert [call.columns for call in op.taken()] == [640]


def test_a_replaced_child_is_called_at_once_and_fused_by_the_next_hook() -> None:
    attn, twin = pair()
    install_csa2(attn, op=(op := Recording()), policy="*")
    old = attn.wq_a
    for module in (attn, twin):
        module.wq_a = upstream.Linear(K, 128)
        module.wq_a.load_weights([{"weight": whole(128, K, seed=9)}])
    assert same(attn(whole(1, K)), twin(whole(1, K)))
    assert not op.taken()
    assert attn.post_load_weights() is True
    assert same(attn(whole(1, K)), twin(whole(1, K)))
    assert [call.columns for call in op.taken()] == [640]
    assert on_own_storage(old)


def numel_0(attn: nn.Module) -> None:
    """Shards that only the Linear knows."""
    shards = attn.wkv.weight.data.clone().chunk(2)
    attn.wkv.weight = nn.Parameter(torch.empty(0, dtype=BF16), requires_grad=False)
    attn.wkv.quant_method.apply = lambda linear, x: torch.cat([x @ shard.t() for shard in shards], 1)


def removed(attn: nn.Module) -> None:
    weight = attn.wq_a.weight.data
    attn.wq_a._weights_removed = True
    del attn.wq_a.weight
    attn.wq_a.quant_method.apply = lambda linear, x: x @ weight.t()


def identities(attn: nn.Module) -> None:
    attn.wq_a = attn.wkv = nn.Identity()


def with_bias(attn: nn.Module) -> None:
    attn.wq_a.bias = nn.Parameter(torch.ones(128, dtype=BF16), requires_grad=False)
    attn.wq_a.quant_method.apply = lambda linear, x: nn.functional.linear(x, linear.weight, linear.bias)


def split_over_ranks(attn: nn.Module) -> None:
    attn.wkv.tp_mode, attn.wkv.tp_size = "column", 4


def setter(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda attn: setattr(attn, name, value)


ODD = {
    "numel 0": numel_0,
    "weights removed": removed,
    "identities": identities,
    "bias": with_bias,
    "tensor parallel": split_over_ranks,
    "quantized": lambda attn: setattr(attn.wkv, "quant", "FP8"),
    "LoRA": lambda attn: setattr(attn.wkv, "lora", object()),
    "mxfp8": setter("projection_quantization", "mxfp8"),
    "unknown mode": setter("projection_quantization", "int3"),
    "no mode": lambda attn: delattr(attn, "projection_quantization"),
}


@pytest.mark.parametrize("first", ["install", "spoil"])
@pytest.mark.parametrize("what", ODD)
def test_what_cannot_be_fused_takes_the_original_path(what: str, first: str) -> None:
    attn, twin = pair(q_lora_rank=128, head_dim=512) if what != "identities" else pair(head_dim=K)
    op = Recording()
    for step in sorted(["install", "spoil"], key=lambda step: step != first):
        if step == "spoil":
            ODD[what](attn)
        else:
            install_csa2(attn, op=op, policy="*")
    ODD[what](twin)
    for _ in range(2):
        attn.post_load_weights()
    staged_and_walked = copy.deepcopy(attn) if what == "identities" else attn
    upstream.walk(staged_and_walked)
    upstream.staged(staged_and_walked)
    for tokens in (1, 2, 9):
        assert same(attn(whole(tokens, K)), twin(whole(tokens, K)))
    assert not op.calls


def test_attention_dp_linears_are_fused_and_so_are_row_parallel_ones_of_one_rank() -> None:
    attn, _ = pair()
    attn.wq_a.tp_size = attn.wkv.tp_size = 4  # the mapping's; no mode: replicated
    assert install_csa2(attn, op=Recording(), policy="*").is_fused
    attn, _ = pair()
    attn.wq_a.tp_mode, attn.wq_a.tp_size = "row", 1
    assert install_csa2(attn, op=Recording(), policy="*").is_fused


def test_weights_that_are_made_later_and_modules_made_without_init() -> None:
    attn = upstream.DeepseekV41Attention(skip_create_weights_in_init=True)
    projections = install_csa2(attn, op=(op := Recording()), policy="*")
    upstream.walk(attn)
    assert not projections.is_fused
    attn.wq_a.create_weights()
    attn.wkv.create_weights()
    upstream.load(attn)
    assert projections.is_fused
    attn(whole(1, K))
    assert [call.columns for call in op.taken()] == [640]

    bare = upstream.DeepseekV41Attention.__new__(upstream.DeepseekV41Attention)
    install_csa2(bare)
    assert bare.post_load_weights() is False
    assert uninstall(bare)
    assert not vars(bare)
    half = upstream.DeepseekV41Attention.__new__(upstream.DeepseekV41Attention)
    nn.Module.__init__(half)
    install_csa2(half)
    upstream.walk(half)
    with pytest.raises(AttributeError, match="wq_a"):
        half(whole(1, K))


def test_quantized_wrappers_reach_the_linears_as_they_are() -> None:
    attn, _ = pair()
    install_csa2(attn, op=Recording(), policy="*")
    wrapper = upstream.Fp4QuantizedTensor(None)
    for linear in (attn.wq_a, attn.wkv):
        linear.quant_method.apply = lambda linear, x: whole(1, linear.out_features) if x is wrapper else None
    attn(wrapper)


def test_installing_again_is_nothing_and_another_way_is_refused() -> None:
    attn, _ = pair()
    op = Recording()
    projections = install_csa2(attn, op=op, policy="*")
    forward = attn.forward
    assert install_csa2(attn, op=op, policy="*") is projections
    assert attn.forward == forward
    with pytest.raises(ValueError, match=r"has csa2 installed with options.*uninstall\(module\) first"):
        install_csa2(attn, op=op, policy="*", max_tokens=4)
    with pytest.raises(ValueError, match="has csa2 installed"):
        install_indexer(attn)
    with pytest.raises(ValueError, match="max_tokens=0"):
        install_csa2(upstream.DeepseekV41Attention(), max_tokens=0)


def test_bad_options_leave_nothing_behind() -> None:
    attn, _ = pair()
    with pytest.raises(ValueError, match="expected capabilities"):
        install_csa2(attn, policy="hopper")
    assert not traces(attn)


def test_uninstalling_restores_everything() -> None:
    attn, twin = pair()
    parameters, own, children = dict(attn.named_parameters()), dict(vars(attn)), dict(attn._modules)
    install_csa2(attn, op=(op := Recording()), policy="*")
    assert not on_own_storage(attn.wq_a, attn.wkv)
    assert uninstall(attn)
    assert vars(attn).keys() == own.keys()
    assert attn._modules == children
    assert all(parameters[name] is found for name, found in attn.named_parameters())
    assert on_own_storage(attn.wq_a, attn.wkv)
    assert not hasattr(attn, "post_load_weights")
    assert same(attn(whole(1, K)), twin(whole(1, K)))
    assert not op.calls
    assert not uninstall(attn)
    assert not uninstall(twin)


def test_an_own_attribute_of_the_instance_comes_back() -> None:
    attn, _ = pair()
    ran: list[str] = []
    attn.post_load_weights = own = lambda: ran.append("own")
    install_csa2(attn, op=Recording(), policy="*")
    assert attn.post_load_weights() is None
    assert ran == ["own"]
    uninstall(attn)
    assert attn.post_load_weights is own


def test_nothing_is_installed_loaded_or_taken_back_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    attn, twin = pair()
    install_csa2(attn, op=Recording(), policy="*")
    monkeypatch.setattr(capturing, "is_capturing", lambda: True)
    for call in (lambda: install_csa2(twin), attn.post_load_weights, lambda: uninstall(attn)):
        with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
            call()
    assert same(attn(whole(1, K)), twin(whole(1, K)))


def test_no_part_of_a_hook_runs_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed, _ = pair(upstream.RenamedAttention)
    install_csa2(renamed, force=True)
    attn = fresh()
    install_qkv_a(attn)
    upstream.load(attn)
    hooks = renamed.hooks
    monkeypatch.setattr(capturing, "is_capturing", lambda: True)
    for module in (renamed, attn):
        with pytest.raises(RuntimeError, match=r"post_load_weights\(\) while a CUDA graph is being captured"):
            module.post_load_weights()
    assert renamed.hooks == hooks
    assert attn.fuse_a_indexer_k_weight is True


def test_copies_stand_on_their_own() -> None:
    attn, twin = pair()
    install_csa2(attn, op=Recording(), policy="*")
    other = copy.deepcopy(attn)
    op = other._modules["fusions_csa2"].op
    op.calls.clear()
    with torch.no_grad():
        other.wq_a.weight.zero_()
    assert same(attn(whole(1, K)), twin(whole(1, K)))
    assert not other(whole(1, K))[0].any()
    assert not op.taken()  # torch gives every Parameter of a copy its own storage
    assert other.post_load_weights() is True
    assert not other(whole(1, K))[0].any()
    assert [call.columns for call in op.taken()] == [640]
    uninstall(other)
    assert not traces(other)
    assert "_fusions" in vars(attn)

    buffer = io.BytesIO()
    torch.save(attn, buffer)
    buffer.seek(0)
    back = torch.load(buffer, weights_only=False)
    assert same(back(whole(1, K)), twin(whole(1, K)))
    assert back.post_load_weights() is True
    uninstall(back)
    assert same(back(whole(1, K)), twin(whole(1, K)))


def test_force_installs_what_gives_the_same() -> None:
    attn, twin = pair(upstream.RenamedAttention)
    install_csa2(attn, force=True, op=(op := Recording()), policy="*")
    op.calls.clear()
    for tokens, columns in CALLS.items():
        assert same(attn(whole(tokens, K)), twin(whole(tokens, K)))
        assert [call.columns for call in op.taken()] == columns


def test_force_finds_out_that_results_differ_and_undoes_everything() -> None:
    attn, twin = pair(upstream.UpdatingAttention)
    with pytest.raises(Different, match=r"result 1 differs by.*All was undone"):
        install_csa2(attn, force=True, op=Recording(), policy="*")
    assert not traces(attn)
    assert on_own_storage(attn.wq_a, attn.wkv)
    assert same(attn(whole(1, K)), twin(whole(1, K)))


class Wrong(Recording):
    """An op that loses a little in one column."""

    def __call__(self, x, weight, bias=None):
        out = super().__call__(x, weight, bias)
        out[:, 5] *= 1.02
        return out


def test_force_finds_out_that_the_op_is_outside_of_its_bounds() -> None:
    attn, _ = pair(upstream.RenamedAttention)
    with pytest.raises(Different, match="times as far from the exact result as is allowed"):
        install_csa2(attn, force=True, op=Wrong(), policy="*")
    assert not traces(attn)
    assert on_own_storage(attn.wq_a, attn.wkv)


class Needy(upstream.DeepseekV41Attention):
    """Needs more than hidden states, and counts its calls."""

    calls = 0

    def forward(self, h, metadata):
        self.calls += 1
        return self.wq_a(h), self.wkv(h) + metadata * self.calls


def test_force_needs_weights_an_example_and_calls_that_leave_no_state() -> None:
    with pytest.raises(ValueError, match="the weights are not there yet"):
        install_csa2(upstream.RenamedAttention(skip_create_weights_in_init=True), force=True)
    attn, _ = pair(Needy)
    with pytest.raises(ValueError, match=r"missing 1 required positional argument.*pass example="):
        install_csa2(attn, force=True)
    with pytest.raises(ValueError, match="two calls in a row differ"):
        install_csa2(attn, force=True, example=lambda attn, h: attn(h, 1.0))
    assert not traces(attn)
    install_csa2(attn, force=True, example=lambda attn, h: attn(h, 0.0))
    assert "forward" in vars(attn)


def test_integers_are_compared_as_sets() -> None:

    rows = torch.arange(1000).view(2, 500)
    assert not difference([[rows]], [[rows.flip(1)]], exact=False)
    assert difference([[rows]], [[rows.flip(1)]], exact=True)
    assert "shares 50.0%" in difference([[rows]], [[rows + 250]], exact=False)
