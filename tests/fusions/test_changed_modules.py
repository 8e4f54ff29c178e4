"""What may become of a module behind a fused projection's back, for all three: never a wrong value without an error."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusions import FusedQkvA, HiddenStateProjections, IndexerProjection, split_mla
from tests.fusions.recording import Recording

BF16 = torch.bfloat16
K = 128


def linear(rows: int, dtype: torch.dtype = BF16) -> torch.nn.Linear:
    return torch.nn.Linear(K, rows, bias=False, dtype=dtype).requires_grad_(False)


class Owner(torch.nn.Module):
    """Two Linears and a projection over them."""

    def __init__(self, kind: str, storage: str = "alias") -> None:
        super().__init__()
        dtype = torch.float32 if kind == "B" else BF16
        self.first, self.second = linear(64, dtype), linear(32, dtype)
        self.projection: Any
        if kind == "A":
            self.projection = HiddenStateProjections(self.first, self.second, op=Recording(), policy="*")
        elif kind == "B":
            self.projection = IndexerProjection(self.first, self.second, storage=storage)
        else:
            self.projection = FusedQkvA([("q_a", self.first, None), ("kv_a", self.second, None)])
        assert self.projection.post_load_weights()

    def projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.projection(hidden)
        return tuple(found.values()) if isinstance(found, dict) else found

    def plain(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden.to(self.first.weight.dtype)
        return self.first(hidden), self.second(hidden)


def hidden() -> torch.Tensor:
    return torch.randint(-1, 2, (1, K)).to(BF16)


def same(owner: Owner, x: torch.Tensor) -> None:
    for got, want in zip(owner.projected(x), owner.plain(x), strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2**-6)


def a_bias(part: torch.nn.Linear) -> None:
    part.bias = torch.nn.Parameter(
        torch.full((part.out_features,), 100.0, dtype=part.weight.dtype), requires_grad=False
    )


def a_hook(part: torch.nn.Linear) -> None:
    part.register_forward_hook(lambda module, given, out: out + 100)


def a_pre_hook(part: torch.nn.Linear) -> None:
    part.register_forward_pre_hook(lambda module, given: (given[0] * 3,))


@pytest.mark.parametrize("kind", ["A", "B", "C"])
@pytest.mark.parametrize("part", ["first", "second"])
@pytest.mark.parametrize("change", [a_bias, a_hook, a_pre_hook])
def test_a_bias_or_a_hook_that_comes_later_is_seen_at_once(
    kind: str, part: str, change: Callable[[torch.nn.Linear], None]
) -> None:
    owner, x = Owner(kind), hidden()
    assert owner.projection.is_fused
    change(getattr(owner, part))
    assert not owner.projection.is_fused
    same(owner, x)


@pytest.mark.parametrize("kind", ["B", "C"])
def test_a_weight_that_is_written_before_the_backward_pass_is_an_error_as_with_plain_linears(kind: str) -> None:
    owner, x = Owner(kind), torch.randn(1, K, requires_grad=True)
    out = owner.projected(x.to(BF16))[0]
    with torch.no_grad():
        owner.first.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


def test_a_copy_that_was_loaded_is_no_copy_until_its_hook_or_use() -> None:
    """One write before the save, one after the load: torch's counts of the two are the same."""
    owner = Owner("B", "copy")
    owner.first.weight.add_(1)
    owner.projection.post_load_weights()
    file = io.BytesIO()
    torch.save(owner, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not loaded.projection.is_fused
    for _ in range(8):
        with torch.no_grad():
            loaded.first.weight.mul_(-2)
        same(loaded, hidden())


def test_a_checkpoint_is_loaded_into_weights_made_under_inference_mode() -> None:
    with torch.inference_mode():
        second = linear(32, torch.float32)
    projection = IndexerProjection(linear(64, torch.float32), second)
    ones = {"indexer.wk.weight": torch.ones(64, K), "indexer.weights_proj.weight": torch.ones(32, K)}
    projection.load_weights(ones)
    assert torch.equal(second.weight, torch.ones(32, K))


def test_every_projection_can_be_called_and_its_helper_imported() -> None:
    x = hidden()
    for kind in "ABC":
        owner = Owner(kind)
        called, projected = owner.projection(x), owner.projection.project(x)
        assert str(called) == str(projected)
    out = {"kv_a": torch.zeros(1, 576)}
    assert split_mla(out).k_pe.shape == (1, 64)
