"""The projection installed on stand-ins for TensorRT-LLM's indexers of two times.

Weights and hidden states are whole numbers, whose sums are exact.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import stand_ins as upstream
from installed import (
    POSITIONS,
    QR,
    K,
    on_own_storage,
    optional,
    pair,
    pre,
    same,
    traces,
)
from recording import BF16, whole

from fusions.integrations.tensorrt_llm import (
    Different,
    UnknownForm,
    install_indexer,
    uninstall,
)


@pytest.mark.parametrize("by", ["post_load_weights", "staged"])
@pytest.mark.parametrize("first", ["install", "load"])
def test_the_indexers_copy_becomes_the_fused_weight(first: str, by: str) -> None:
    _, twin = pair(upstream.Indexer)
    indexer = upstream.Indexer()
    for step in sorted(["install", "load"], key=lambda step: step != first):
        if step == "load":
            upstream.load(indexer, by=by)
        else:
            projection = install_indexer(indexer)
    assert projection.is_fused
    assert projection.compute == "tf32"
    fused = indexer._fused_wk_wp_weight
    assert fused.data_ptr() == indexer.wk.weight.data_ptr()
    assert torch.equal(fused, torch.cat([indexer.wk.weight, indexer.weights_proj.weight]))
    assert list(indexer.state_dict()) == list(twin.state_dict())
    for tokens in (1, 3):
        assert same(pre(indexer, whole(tokens, K)), pre(twin, whole(tokens, K)))
    assert torch.equal(indexer(QR, whole(8, K), POSITIONS), twin(QR, whole(8, K), POSITIONS))


def test_the_projection_runs_inside_of_the_indexers_method(monkeypatch: pytest.MonkeyPatch) -> None:
    indexer, _ = pair(upstream.Indexer)
    projection = install_indexer(indexer)
    monkeypatch.setattr(projection, "project", lambda hidden: (whole(2, 16), torch.zeros(2, 8)))
    assert not pre(indexer, whole(2, K))[2].any()


def test_the_indexers_weights_are_never_stale() -> None:
    indexer, twin = pair(upstream.Indexer)
    install_indexer(indexer)
    for module in (indexer, twin):
        module.wk.load_weights([{"weight": whole(16, K, seed=7).float()}])  # in place, and no hook
    twin.post_load_weights()
    assert same(pre(indexer, whole(3, K)), pre(twin, whole(3, K)))
    for module in (indexer, twin):
        module.weights_proj.weight = nn.Parameter(whole(8, K, seed=8).float(), requires_grad=False)
    twin.post_load_weights()
    assert same(pre(indexer, whole(3, K)), pre(twin, whole(3, K)))
    indexer.post_load_weights()
    assert indexer._fused_wk_wp_weight.data_ptr() == indexer.wk.weight.data_ptr()
    assert same(pre(indexer, whole(3, K)), pre(twin, whole(3, K)))


def test_an_indexers_replaced_child_takes_upstreams_path_until_the_next_hook() -> None:
    indexer, twin = pair(upstream.Indexer)
    install_indexer(indexer)
    for module in (indexer, twin):
        module.wk = upstream.Linear(K, 16, torch.float32)
        module.wk.load_weights([{"weight": whole(16, K, seed=9).float()}])
        module.post_load_weights()
    assert indexer._fused_wk_wp_weight.data_ptr() == indexer.wk.weight.data_ptr()
    assert same(pre(indexer, whole(3, K)), pre(twin, whole(3, K)))


def test_before_the_hook_the_indexer_asserts_what_it_asserted() -> None:
    indexer = upstream.Indexer(skip_create_weights_in_init=True)
    install_indexer(indexer)
    with pytest.raises(AssertionError, match=r"post_load_weights\(\) has to run first"):
        pre(indexer, whole(2, K))
    indexer.wk.create_weights()
    indexer.weights_proj.create_weights()
    upstream.load(indexer)
    pre(indexer, whole(2, K))


def test_an_indexer_unwraps_quantized_hidden_states() -> None:
    indexer, twin = pair(upstream.Indexer)
    install_indexer(indexer)
    hidden = whole(2, K)
    assert same(pre(indexer, upstream.Fp4QuantizedTensor(hidden)), pre(twin, hidden))
    with pytest.raises(AssertionError):
        indexer.pre_indexer_proj(QR[:2], upstream.Fp4QuantizedTensor(None), POSITIONS[:2])


@pytest.mark.parametrize("what", ["quant", "lora"])
def test_an_indexer_that_cannot_be_fused_has_upstreams_copy_and_path(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexer, twin = pair(upstream.Indexer)
    setattr(indexer.wk, what, "NVFP4")
    projection = install_indexer(indexer)
    monkeypatch.setattr(projection, "project", None)
    for _ in range(2):
        upstream.walk(indexer)
        upstream.staged(indexer)
    assert indexer._fused_wk_wp_weight.data_ptr() != indexer.wk.weight.data_ptr()
    assert same(pre(indexer, whole(2, K)), pre(twin, whole(2, K)))
    assert on_own_storage(indexer.wk, indexer.weights_proj)


def test_an_indexers_weights_in_bf16_are_multiplied_in_bf16() -> None:
    indexer, twin = pair(upstream.Indexer, dtype=BF16)
    assert install_indexer(indexer).compute == "bf16"
    assert same(pre(indexer, whole(3, K)), pre(twin, whole(3, K)))
    other = upstream.Indexer(dtype=BF16, skip_create_weights_in_init=True)
    install_indexer(other)
    other.wk.create_weights()
    other.weights_proj.create_weights()
    upstream.load(other)
    assert other._modules["fusions_indexer"].compute == "bf16"
    assert same(pre(other, whole(3, K)), pre(twin, whole(3, K)))


def test_a_reader_of_weights_that_others_laid_out_moves_nothing() -> None:
    indexer = upstream.Indexer()
    install_indexer(indexer)
    uninstall(indexer)
    fused = whole(24, K).float()
    with torch.no_grad():
        indexer.wk.weight.data, indexer.weights_proj.weight.data = fused[:16], fused[16:]
    install_indexer(indexer)
    address = indexer.wk.weight.data_ptr()
    indexer.cache_derived_state()
    assert indexer.wk.weight.data_ptr() == address == fused.data_ptr() == indexer._fused_wk_wp_weight.data_ptr()
    reader = upstream.Indexer()
    install_indexer(reader)
    uninstall(reader)
    assert reader._fused_wk_wp_weight is None


def test_uninstalling_an_indexer_brings_back_upstreams_copy_as_of_now() -> None:
    indexer, twin = pair(upstream.Indexer)
    own = dict(vars(indexer))
    install_indexer(indexer)
    for module in (indexer, twin):
        upstream.load(module, 3)
    uninstall(indexer)
    assert vars(indexer).keys() == own.keys()
    assert not traces(indexer)
    assert on_own_storage(indexer.wk, indexer.weights_proj)
    assert torch.equal(indexer._fused_wk_wp_weight, torch.cat([indexer.wk.weight, indexer.weights_proj.weight]))
    assert indexer._fused_wk_wp_weight.data_ptr() != indexer.wk.weight.data_ptr()
    assert same(pre(indexer, whole(2, K)), pre(twin, whole(2, K)))


def test_an_indexer_that_was_loaded_while_installed_has_a_copy_afterwards() -> None:
    indexer, (_, twin) = upstream.Indexer(), pair(upstream.Indexer)
    install_indexer(indexer)
    upstream.load(indexer)
    uninstall(indexer)
    assert same(pre(indexer, whole(2, K)), pre(twin, whole(2, K)))


def test_an_installed_indexer_keeps_no_copy_of_upstreams_alive() -> None:
    indexer, _ = pair(upstream.Indexer)
    copies = indexer.copies
    install_indexer(indexer)
    upstream.walk(indexer)
    assert indexer.copies > copies  # its hook ran
    record = vars(indexer)["_fusions"]
    held = [value for value in (*record._saved.values(), *vars(indexer).values()) if isinstance(value, torch.Tensor)]
    assert [tensor.data_ptr() for tensor in held] == [indexer.wk.weight.data_ptr()]


def test_optional_arguments_are_provided_where_none_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    indexer, twin = pair(upstream.OptionalIndexer)
    projection = install_indexer(indexer)
    hidden = whole(3, K)
    assert same(optional(indexer, hidden), optional(twin, hidden))
    monkeypatch.setattr(projection, "project", None)
    given = {"indexer_k": whole(3, 16, seed=4), "indexer_weights": whole(3, 8, seed=4)}
    assert same(optional(indexer, hidden, **given), optional(twin, hidden, **given))
    for name in given:
        assert same(optional(indexer, hidden, **{name: given[name]}), optional(twin, hidden, **{name: given[name]}))
    with pytest.raises(TypeError):  # it is what runs
        optional(indexer, hidden)
    uninstall(indexer)
    assert same(optional(indexer, hidden), optional(twin, hidden))
    assert not traces(indexer)


def test_force_on_indexers() -> None:
    def example(module: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return pre(module, hidden)

    indexer, twin = pair(upstream.RewordedIndexer)
    install_indexer(indexer, force=True, example=example)
    assert same(pre(indexer, whole(3, K)), pre(twin, whole(3, K)))
    odd, twin = pair(upstream.OddIndexer)
    with pytest.raises(Different, match="result 1 differs"):
        install_indexer(odd, force=True, example=example)
    assert not traces(odd)
    assert same(pre(odd, whole(3, K)), pre(twin, whole(3, K)))


class LeakyIndexer(upstream.Indexer):
    def pre_indexer_proj(self, qr, hidden_states, position_ids):
        torch.backends.cuda.matmul.allow_tf32 = True
        product = nn.functional.linear(hidden_states.float(), self._fused_wk_wp_weight)
        k, w = product.split([16, 8], -1)
        return k, w


class RawIndexer(upstream.Indexer):
    def pre_indexer_proj(self, qr, hidden_states, position_ids):
        product = nn.functional.linear(hidden_states.float(), self._fused_wk_wp_weight)
        k, w = product.split([16, 8], -1)
        return k, w, product


class NoSplitIndexer(upstream.Indexer):
    def pre_indexer_proj(self, qr, hidden_states, position_ids):
        return nn.functional.linear(hidden_states.float(), self._fused_wk_wp_weight)


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (LeakyIndexer, "changes how FP32 matmuls compute"),
        (RawIndexer, "product of the fused product is used later on"),
        (NoSplitIndexer, "splits a product into two variables"),
    ],
)
def test_an_indexer_of_another_shape_cannot_be_changed(cls: type, why: str) -> None:
    indexer, _ = pair(cls)
    with pytest.raises(UnknownForm, match=why):
        install_indexer(indexer, force=True)
    assert not traces(indexer)
