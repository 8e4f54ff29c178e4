"""What the tests of installed projections share: stand-ins in pairs, ways to call them, and looks at what was left."""

from __future__ import annotations

from typing import Any

import stand_ins as upstream
import torch
from recording import whole
from torch import nn

K = 128
QR, POSITIONS = whole(8, 32, seed=5), torch.arange(8)


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def pre(indexer: nn.Module, hidden: Any) -> tuple[torch.Tensor, ...]:
    tokens = getattr(hidden, "unquantized_hidden_states", hidden).shape[0]
    return indexer.pre_indexer_proj(QR[:tokens], hidden, POSITIONS[:tokens])


def optional(indexer: nn.Module, hidden: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
    return indexer(QR[: hidden.shape[0]], hidden, None, POSITIONS[: hidden.shape[0]], **given)


def attend(attn: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return attn(None, hidden, None)


def pair(cls: type = upstream.DeepseekV41Attention, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Two of a kind with the same weights."""
    one, two = cls(**options), cls(**options)
    upstream.load(one)
    upstream.load(two)
    return one, two


def fresh(cls: type = upstream.DeepseekV32Attention, *args: Any, **options: Any) -> nn.Module:
    """An attention that shows no weights of an older one whose memory it may have been given."""
    attn = cls(*args, **options)
    for linear in (attn.kv_a_proj_with_mqa, attn.indexer.wk, attn.indexer.weights_proj):
        if hasattr(linear, "weight"):
            linear.weight.data.zero_()
    return attn


def traces(module: nn.Module) -> list[str]:
    """What an installation would have left on a module."""
    found = [name for name in vars(module) if name.startswith("_fusions") or callable(vars(module)[name])]
    return found + [name for name in module._modules if name.startswith("fusions")]


def on_own_storage(*linears: nn.Module) -> bool:
    return all(linear.weight.untyped_storage().nbytes() == linear.weight.nbytes for linear in linears)
