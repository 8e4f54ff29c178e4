"""What a Linear may be for a GEMM over rows of a shared weight to stand for calling it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fusions.linear import LinearLike, refusal


def plain() -> nn.Linear:
    return nn.Linear(16, 8, bias=False)


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Bare:
    """No module at all."""

    def __init__(self, weight: Any = None) -> None:
        self.weight = nn.Parameter(torch.zeros(8, 16)) if weight is None else weight
        self.bias = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class Wrapped(torch.Tensor):
    """A weight that is no plain tensor, as a quantized one."""


def with_(linear: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(linear, name, value)
    return linear


def hooked(register: str) -> nn.Linear:
    linear = plain()
    getattr(linear, register)(lambda *_: None)
    return linear


def normed() -> nn.Linear:
    return nn.utils.parametrizations.weight_norm(plain())


def spectral() -> nn.Linear:
    return nn.utils.spectral_norm(plain())


@pytest.mark.parametrize(
    "linear",
    [
        plain(),
        Bare(),
        with_(plain(), has_any_quant=False, lora=None, tp_size=8, tp_mode=None),
        with_(plain(), has_any_quant=lambda: False, tp_size=1, tp_mode="column", _weights_removed=False),
        nn.Linear(16, 8, bias=False, dtype=torch.float16, device="meta"),
    ],
    ids=["nn.Linear", "no module", "plain attributes", "methods", "another dtype"],
)
def test_a_plain_linear_is_taken(linear: Any) -> None:
    assert refusal(linear) == ""
    assert isinstance(linear, LinearLike)


REFUSED: dict[str, tuple[Any, str]] = {
    "none": (None, "is missing"),
    "removed": (with_(plain(), _weights_removed=True), "had its weight removed"),
    "identity": (nn.Identity(), "is a Identity without a weight Parameter"),
    "tensor": (Bare(torch.zeros(8, 16)), "is a Bare without a weight Parameter"),
    "not callable": (type("Data", (), {"weight": nn.Parameter(torch.zeros(8, 16))})(), "is a Data without"),
    "subclass": (
        Bare(nn.Parameter(torch.zeros(8, 16).as_subclass(Wrapped), requires_grad=False)),
        "has a Wrapped as its weight",
    ),
    "bias": (nn.Linear(16, 8), "has a bias"),
    "quantized property": (with_(plain(), has_any_quant=True), "is quantized"),
    "quantized method": (with_(plain(), has_any_quant=lambda: True), "is quantized"),
    "lora": (with_(plain(), lora=object()), "has LoRA"),
    "lora_A": (with_(plain(), lora_A=nn.ModuleDict()), "has LoRA"),
    "base_layer": (with_(plain(), base_layer=plain()), "has LoRA"),
    "split": (with_(plain(), tp_mode="column", tp_size=2), "is split over tensor-parallel ranks"),
    "forward hook": (hooked("register_forward_hook"), "has hooks"),
    "pre-hook": (hooked("register_forward_pre_hook"), "has hooks"),
    "backward hook": (hooked("register_full_backward_hook"), "has hooks"),
    "backward pre-hook": (hooked("register_full_backward_pre_hook"), "has hooks"),
    "weight norm": (normed(), "is a ParametrizedLinear|has a parametrized weight|without a weight Parameter"),
    "spectral norm": (spectral(), "without a weight Parameter"),
    "forward of its own": (Own(16, 8, bias=False), "is a Own with a forward of its own"),
    "patched forward": (with_(plain(), forward=lambda x: x), "has a patched forward"),
    "lazy": (nn.LazyLinear(8, bias=False), "has hooks"),
}


@pytest.mark.parametrize(("linear", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_anything_more_or_less_is_refused_with_what_it_is(linear: Any, words: str) -> None:
    found = refusal(linear)
    assert any(found.startswith(each) for each in words.split("|")) or any(each in found for each in words.split("|"))


def test_a_hook_that_was_removed_again_counts_no_more() -> None:
    linear = plain()
    handle = linear.register_forward_hook(lambda *_: None)
    assert refusal(linear)
    handle.remove()
    assert refusal(linear) == ""
