"""Installed projections on a GPU, with the native op: captured graphs, reloads between replays, numbers, force."""

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
from recording import Counting, assert_close, normal

from fusions.integrations.tensorrt_llm import Different, install_csa2, install_indexer, uninstall
from fusions.ops import OPS

pytestmark = pytest.mark.gpu

K = 5120


def bits(tensors: Any) -> list[torch.Tensor]:
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in tensors]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def attention(seed: int = 0, cls: type = upstream.DeepseekV41Attention) -> nn.Module:
    attn = cls(K, 1280, 512, device="cuda")
    load(attn, seed)
    return attn


def load(module: nn.Module, seed: int) -> None:
    """Full mantissas, in place; and the walk."""
    for place, linear in enumerate(child for child in module.modules() if isinstance(child, upstream.Linear)):
        weight = normal(linear.out_features, linear.in_features, seed=seed + place, device="cuda").float()
        if linear.dtype is torch.float32:
            weight += 1e-3 * weight.square()
        linear.load_weights([{"weight": weight / 64}])
    upstream.walk(module)
    torch.cuda.synchronize()


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize(("tokens", "columns"), [(1, [1792]), (2, [1280, 512]), (8, [1280, 512]), (9, [])])
def test_a_captured_csa2_attention_replays_what_eager_calls_give_also_after_a_reload(
    tokens: int, columns: list[int]
) -> None:
    attn, op = attention(), Counting(OPS["native"])
    install_csa2(attn, op=op, policy="*")
    hidden = normal(tokens, K, seed=3, device="cuda")
    attn(hidden)
    assert op.taken() == columns
    graph, out = captured(lambda: attn(hidden))
    for seed in range(3):
        hidden.copy_(normal(tokens, K, seed=10 + seed, device="cuda"))
        graph.replay()
        assert same_bits(bits(out), bits(attn(hidden)))
    load(attn, seed=100)  # through the views: the graph reads the new weights
    graph.replay()
    assert same_bits(bits(out), bits(attn(hidden)))
    other = attention(seed=100)
    install_csa2(other, op=OPS["native"], policy="*")
    assert same_bits(bits(out), bits(other(hidden)))


def test_the_projections_that_the_attention_takes_are_within_one_rounding() -> None:
    attn = attention()
    install_csa2(attn, op=OPS["native"], policy="*")
    for tokens in (1, 2, 8):
        hidden = normal(tokens, K, seed=tokens, device="cuda")
        for out, linear in zip(vars(attn)["_fusions"].project(hidden), (attn.wq_a, attn.wkv), strict=True):
            assert_close(out, hidden, linear.weight)


def test_force_on_a_gpu() -> None:
    attn = attention(cls=upstream.RenamedAttention)
    assert install_csa2(attn, force=True, op=OPS["native"], policy="*").is_fused
    updating = attention(cls=upstream.UpdatingAttention)
    with pytest.raises(Different):
        install_csa2(updating, force=True, op=OPS["native"], policy="*")
    assert "_fusions" not in vars(updating)


def test_a_captured_indexer_replays_what_eager_calls_give_and_what_upstreams_method_gave() -> None:
    indexer = upstream.Indexer(7168, 1536, 128, 64, device="cuda")
    load(indexer, 0)
    qr, positions = normal(4, 1536, seed=1, device="cuda"), torch.arange(4, device="cuda")
    hidden = normal(4, 7168, seed=2, device="cuda")
    before = [out.float() for out in indexer.pre_indexer_proj(qr, hidden, positions)]
    install_indexer(indexer)
    with torch.inference_mode():
        graph, out = captured(lambda: indexer.pre_indexer_proj(qr, hidden, positions))
        graph.replay()
        for old, new in zip(before, out, strict=True):
            assert torch.allclose(old, new.float(), rtol=2e-2, atol=2e-2 * float(old.abs().max()))
        for seed in range(3):
            hidden.copy_(normal(4, 7168, seed=20 + seed, device="cuda"))
            graph.replay()
            assert same_bits(bits(out), bits(indexer.pre_indexer_proj(qr, hidden, positions)))
        load(indexer, 200)
        graph.replay()
        assert same_bits(bits(out), bits(indexer.pre_indexer_proj(qr, hidden, positions)))
    assert not torch.backends.cuda.matmul.allow_tf32
    uninstall(indexer)
    indexer.pre_indexer_proj(qr, hidden, positions)
