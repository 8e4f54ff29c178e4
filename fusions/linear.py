"""What a fused projection needs of a Linear: nn.Linear, TensorRT-LLM's, or anything that looks the same."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class LinearLike(Protocol):
    """``y = x W^T``: ``weight`` is a Parameter [N, K], ``bias`` is ``None``, calling it gives the plain projection.

    Looked at where they exist: ``has_any_quant``, ``lora`` and ``tp_size`` with ``tp_mode`` (TensorRT-LLM), forward
    hooks, parametrizations and an overridden ``forward`` (torch), ``lora_A`` and ``base_layer`` (PEFT), and
    ``_weights_removed``.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def refusal(linear: Any) -> str:
    """Why a module is more, or less, than ``x W^T`` with one plain weight, so that a GEMM over rows of a shared weight
    cannot stand for calling it; empty if it is no more. A short phrase, such as ``has a bias``."""
    if linear is None:
        return "is missing"
    if getattr(linear, "_weights_removed", False):
        return "had its weight removed"
    weight = getattr(linear, "weight", None)
    if not callable(linear) or not isinstance(weight, torch.nn.Parameter):
        return f"is a {type(linear).__name__} without a weight Parameter"
    if type(weight.data) is not torch.Tensor:
        return f"has a {type(weight.data).__name__} as its weight"
    if getattr(linear, "bias", None) is not None:
        return "has a bias"
    if _truth(linear, "has_any_quant"):
        return "is quantized"
    if hasattr(linear, "lora_A") or hasattr(linear, "base_layer") or getattr(linear, "lora", None) is not None:
        return "has LoRA"
    if getattr(linear, "tp_mode", None) is not None and getattr(linear, "tp_size", 1) > 1:
        return "is split over tensor-parallel ranks"
    if any(getattr(linear, name, None) for name in _HOOKS):
        return "has hooks, which a fused call would not run"
    if getattr(linear, "parametrizations", None):
        return "has a parametrized weight"
    if isinstance(linear, torch.nn.Linear) and type(linear).forward is not torch.nn.Linear.forward:
        return f"is a {type(linear).__name__} with a forward of its own"
    if isinstance(linear, torch.nn.Module) and "forward" in vars(linear):  # patched on the instance, as by accelerate
        return "has a patched forward, which a fused call would not run"
    return ""


def _truth(obj: Any, name: str) -> bool:
    """An attribute that is a property in some versions and a method in others."""
    value = getattr(obj, name, False)
    return bool(value() if callable(value) else value)
