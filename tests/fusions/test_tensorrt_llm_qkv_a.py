"""The A-projection installed on a stand-in for TensorRT-LLM's attention.

Weights and hidden states are whole numbers, whose sums are exact.
"""

from __future__ import annotations

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
    attend,
    fresh,
    on_own_storage,
    optional,
    pair,
    pre,
    same,
    traces,
)
from recording import Recording, whole

from fusions.integrations import qkv_a
from fusions.integrations.tensorrt_llm import (
    Different,
    install_csa2,
    install_indexer,
    install_qkv_a,
    uninstall,
)


@pytest.mark.parametrize("nvfp4", [True, False])
def test_the_a_projection_has_the_indexers_rows_as_views(nvfp4: bool) -> None:
    attn, twin = fresh(upstream.DeepseekV32Attention, nvfp4), fresh(nvfp4=False)
    parameters = {name: id(found) for name, found in attn.named_parameters()}
    projection = install_qkv_a(attn)
    assert attn.kv_a_proj_with_mqa.weight.shape == (96, K)
    upstream.load(attn)
    upstream.load(twin)
    assert projection.plan().fused == ["kv_a", "wk", "weights_proj"]
    assert attn.fuse_a_indexer_k_weight is True
    assert {name: id(found) for name, found in attn.named_parameters()} == parameters
    assert {name: t.shape for name, t in attn.state_dict().items()} == {
        n: t.shape for n, t in twin.state_dict().items()
    }
    for tokens in (0, 1, 3):
        assert same(attend(attn, whole(tokens, K)), attend(twin, whole(tokens, K)))
    for module in (attn, twin):
        upstream.load(module, seed=2)
    assert same(attend(attn, whole(3, K)), attend(twin, whole(3, K)))


def test_one_gemm_gives_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = fresh()
    install_qkv_a(attn)
    upstream.load(attn)
    shapes: list[torch.Size] = []
    real = nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, *a: (shapes.append(w.shape), real(x, w, *a))[1])
    monkeypatch.setattr(torch, "cat", None)  # the columns are side by side already
    q, compressed_kv, *_ = attend(attn, whole(3, K))
    assert shapes == [(120, K)]
    assert q.untyped_storage().data_ptr() == compressed_kv.untyped_storage().data_ptr()
    assert q.stride(0) == 120


def test_columns_in_another_order_are_copied_into_theirs() -> None:
    product = whole(3, 12)
    a, b = product[:, :4], product[:, 4:]
    assert qkv_a._joined([a, b]).data_ptr() == product.data_ptr()
    for parts in ([b, a], [a, b[:, 1:]], [a[:1], b[1:2]], [a, b.clone()], [a, b.float()]):
        assert torch.equal(qkv_a._joined(parts), torch.cat(parts, -1))


def test_a_part_that_left_the_fused_weight_is_computed_apart() -> None:
    attn, twin = fresh(), fresh(nvfp4=False)
    install_qkv_a(attn)
    for module in (attn, twin):
        upstream.load(module)
        module.indexer.wk.weight = nn.Parameter(whole(16, K, seed=6), requires_grad=False)
    assert same(attend(attn, whole(3, K)), attend(twin, whole(3, K)))
    for module in (attn, twin):
        module.indexer.weights_proj = upstream.Linear(K, 8)
        module.indexer.weights_proj.load_weights([{"weight": whole(8, K, seed=7)}])
    assert same(attend(attn, whole(3, K)), attend(twin, whole(3, K)))
    upstream.walk(attn)
    assert attn._modules["fusions_qkv_a"].is_fused
    assert same(attend(attn, whole(3, K)), attend(twin, whole(3, K)))


def fp32_weights(attn: nn.Module) -> None:
    attn.indexer.weights_proj = upstream.Linear(K, 8, torch.float32)
    attn.indexer.weights_proj.quant_method.apply = lambda linear, x: x.float() @ linear.weight.t()


APART = {
    "FP32 weights_proj": fp32_weights,
    "quantized wk": lambda attn: setattr(attn.indexer.wk, "quant", "NVFP4"),
    "quantized attention": lambda attn: setattr(attn.kv_a_proj_with_mqa, "quant", "FP8"),
    "LoRA": lambda attn: setattr(attn.kv_a_proj_with_mqa, "lora", object()),
}


@pytest.mark.parametrize("what", APART)
def test_what_does_not_fit_leaves_the_attention_on_its_narrow_path(what: str) -> None:
    attn, twin = fresh(), fresh(nvfp4=False)
    for module in (attn, twin):
        APART[what](module)
    install_qkv_a(attn)
    for module in (attn, twin):
        upstream.load(module)
        upstream.staged(module)
    assert attn.fuse_a_indexer_k_weight is False
    assert same(attend(attn, whole(3, K)), attend(twin, whole(3, K)))
    wrapper = upstream.Fp4QuantizedTensor(None)
    attn.kv_a_proj_with_mqa.quant_method.apply = lambda linear, x: whole(3, 96) if x is wrapper else None
    attn.indexer.forward = lambda q, hidden, *others: (hidden, None)
    assert attend(attn, wrapper)[3] is wrapper


@pytest.mark.parametrize("preset", ["11989", "unfused", "12055"])
def test_narrow_presets_take_the_indexers_rows_out(preset: str) -> None:
    attn, twin = fresh(), fresh(nvfp4=False)
    install_qkv_a(attn, preset)
    if preset == "12055":
        install_indexer(attn.indexer)
    for module in (attn, twin):
        upstream.load(module)
    assert attn.fuse_a_indexer_k_weight is False
    assert same(attend(attn, whole(3, K)), attend(twin, whole(3, K)))


@pytest.mark.parametrize("preset", ["9243", "wk_only", "1"])
def test_presets_that_the_forward_cannot_serve_are_refused(preset: str) -> None:
    with pytest.raises(ValueError, match="preset="):
        install_qkv_a(fresh(), preset)


def hooked(attn: nn.Module) -> None:
    upstream.load(attn)


def written(attn: nn.Module) -> None:
    with torch.no_grad():
        attn.indexer.wk.weight.zero_()


def transformed(attn: nn.Module) -> None:
    attn.kv_a_proj_with_mqa._weights_transformed = True


@pytest.mark.parametrize("load", [hooked, written, transformed])
def test_loaded_weights_are_too_late(load: Callable[[nn.Module], None]) -> None:
    attn = fresh()
    load(attn)
    for force in (False, True):
        with pytest.raises(ValueError, match=r"loaded already.*make the model anew, install, and then load"):
            install_qkv_a(attn, force=force)
    assert not traces(attn)
    assert attn.kv_a_proj_with_mqa.weight.shape == (120, K)


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("nvfp4", [True, False])
def test_uninstalling_gives_the_parameter_its_rows_again(nvfp4: bool, loaded: bool) -> None:
    attn, twin = fresh(upstream.DeepseekV32Attention, nvfp4), fresh(upstream.DeepseekV32Attention, nvfp4)
    own, parameters = dict(vars(attn)), dict(attn.named_parameters())
    shapes = {name: found.shape for name, found in parameters.items()}
    install_qkv_a(attn)
    if loaded:
        upstream.load(attn)
    uninstall(attn)
    assert vars(attn).keys() == own.keys()
    assert not traces(attn)
    assert attn.fuse_a_indexer_k_weight is nvfp4
    assert {name: found.shape for name, found in attn.named_parameters()} == shapes
    assert all(parameters[name] is found for name, found in attn.named_parameters())
    assert attn.kv_a_proj_with_mqa.out_features == shapes["kv_a_proj_with_mqa.weight"][0]
    assert on_own_storage(attn.kv_a_proj_with_mqa, attn.indexer.wk, attn.indexer.weights_proj)
    if loaded:
        for name, tensor in attn.state_dict().items():
            twin.state_dict()[name].copy_(tensor)
        attn.post_load_weights()
        assert same(attend(attn, whole(3, K)), attend(twin, whole(3, K)))


def test_the_a_projection_of_weights_made_later_or_of_modules_without_init() -> None:
    attn = fresh(upstream.DeepseekV32Attention, skip_create_weights_in_init=True)
    install_qkv_a(attn)
    upstream.walk(attn)
    assert attn.fuse_a_indexer_k_weight is False
    for linear in (attn.kv_a_proj_with_mqa, attn.indexer.wk, attn.indexer.weights_proj):
        linear.create_weights()
    upstream.load(attn)
    assert attn.fuse_a_indexer_k_weight is True
    attend(attn, whole(2, K))
    bare = upstream.DeepseekV32Attention.__new__(upstream.DeepseekV32Attention)
    nn.Module.__init__(bare)
    assert install_qkv_a(bare) is None
    assert bare.cache_derived_state() is False
    bare.kv_a_proj_with_mqa = nn.Identity()
    upstream.walk(bare)
    assert uninstall(bare)


def test_a_reader_of_shared_weights_takes_the_wide_path_only_where_they_are_laid_out() -> None:
    attn = fresh()
    install_qkv_a(attn)
    upstream.load(attn)
    attn.cache_derived_state()
    assert attn.fuse_a_indexer_k_weight is True
    attn.indexer.wk.weight.data = attn.indexer.wk.weight.data.clone()
    attn.cache_derived_state()
    assert attn.fuse_a_indexer_k_weight is False


def test_force_on_a_projections() -> None:
    attn, twin = fresh(upstream.RewordedV32Attention), fresh(upstream.RewordedV32Attention, nvfp4=False)
    install_qkv_a(attn, force=True, example=attend)
    for module in (attn, twin):
        upstream.load(module)
    assert attn.fuse_a_indexer_k_weight is True
    assert same(attend(attn, whole(3, K)), attend(twin, whole(3, K)))
    swapped = fresh(upstream.SwappedV32Attention)
    with pytest.raises(Different, match="result 3 differs"):
        install_qkv_a(swapped, force=True, example=attend)
    assert not traces(swapped)
    assert swapped.kv_a_proj_with_mqa.weight.shape == (120, K)
    assert swapped.fuse_a_indexer_k_weight is True


def test_an_indexer_can_be_installed_on_inside_of_an_a_projection() -> None:
    attn, twin = fresh(), fresh(nvfp4=False)
    install_qkv_a(attn)
    upstream.load(attn)
    upstream.load(twin)
    address = attn.indexer.wk.weight.data_ptr()
    projection = install_indexer(attn.indexer)
    assert projection.is_fused  # its rows lie one behind the other
    assert attn.indexer.wk.weight.data_ptr() == address
    hidden = whole(3, K)
    assert same(attend(attn, hidden), attend(twin, hidden))
    assert same(optional(attn.indexer, hidden), optional(twin.indexer, hidden))
    for module in (attn.indexer, attn):
        uninstall(module)
        if module is not attn:
            assert same(attend(attn, hidden), attend(twin, hidden))
            upstream.walk(attn)
            assert same(attend(attn, hidden), attend(twin, hidden))
    assert same(optional(attn.indexer, hidden), optional(twin.indexer, hidden))


def test_installed_modules_can_be_traced_without_a_break() -> None:
    def traced(call: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(call, backend="eager", fullgraph=True)

    attn, twin = pair()
    install_csa2(attn, op=Recording(), policy="*")
    indexer, other = pair(upstream.Indexer)
    install_indexer(indexer)
    wide, narrow = fresh(), fresh(nvfp4=False)
    install_qkv_a(wide)
    upstream.load(wide)
    upstream.load(narrow)
    hidden = whole(2, K)
    assert same(traced(attn)(hidden), twin(hidden))
    assert same(traced(lambda x: pre(indexer, x))(hidden), pre(other, hidden))
    assert same(traced(lambda x: attend(wide, x))(hidden), attend(narrow, hidden))
