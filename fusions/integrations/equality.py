"""Whether something installed by force still gives what was given before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Different(RuntimeError):
    """A change that was to be installed by force does not give the same results. It was undone."""


TOKENS = (1, 2, 8)
"""Numbers of tokens that are tried: all sizes that a fused path tells apart."""

_SHARED = 0.99
_ROUGH = 2.0**-6  # RMS: an FP8 code that falls on the other side moves by 2^-4, and few do


def random_hidden(tokens: int, k: int, like: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal, and the same at every call."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, k, generator=generator).to(device=like.device, dtype=dtype)


def results(call: Callable[[torch.Tensor], Any], inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """All tensors of what ``call`` returns for a copy of each input, kept from later writes."""
    with torch.no_grad():
        return [[tensor.clone() for tensor in _tensors(call(x.clone()))] for x in inputs]


def difference(before: list[list[torch.Tensor]], after: list[list[torch.Tensor]], exact: bool) -> str:
    """Where two lists of results differ; empty if they do not. NaN equals NaN.

    Args:
        exact: bit by bit; otherwise within 2^-6 of the root mean square of each tensor, and 99 % of the integers of
            each row, in any order: they are chosen tokens, and near-ties may fall on either side.
    """
    for x, (old, new) in enumerate(zip(before, after, strict=True)):
        if len(old) != len(new) or not old:
            return f"input {x} gives {len(new)} tensors, not {len(old)}"
        for place, (a, b) in enumerate(zip(old, new, strict=True)):
            if a.shape != b.shape or (exact and a.dtype != b.dtype):
                return f"result {place} is {b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}"
            want, got = a.double(), b.double()
            if torch.equal(want.nan_to_num(7.0), got.nan_to_num(7.0)):
                continue
            if not exact and not (a.is_floating_point() or a.is_complex()):
                shared = _shared(a, b)
                if shared < _SHARED:
                    return f"result {place} shares {shared:.1%} of its integers"
                continue
            error = float((got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp_min(1e-30))
            if exact or not error <= _ROUGH:
                return f"result {place} differs by {error:.2g} (RMS, relative)"
    return ""


def beyond(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rounding: float, accumulation: float) -> str:
    """Whether an element of ``out`` is further from ``x weight^T`` than the numerical contract allows: ``rounding`` of
    the exact result, and ``accumulation`` of the sum of the products' magnitudes. Empty if none is."""
    exact = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    bound = exact.abs() * rounding + magnitude * accumulation + 2.0**-133
    error = (out.double() - exact).abs()
    if bool((error <= bound).all()):
        return ""
    return f"an element is {float((error / bound).max()):.3g} times as far from the exact result as is allowed"


def _shared(before: torch.Tensor, after: torch.Tensor) -> float:
    columns = before.shape[-1] if before.dim() else 1
    rows = zip(before.reshape(-1, columns), after.reshape(-1, columns), strict=True)
    found = [torch.isin(old, new).double().mean() for old, new in rows]
    return float(torch.stack(found).mean())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []
