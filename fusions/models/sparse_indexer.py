"""DeepSeek sparse attention's indexer: which keys each query attends to.

The score of key ``s`` for the query of token ``t`` is::

    score[t, s] = sum over heads h of  weight[t, h] * Dk^-0.5 * Nh^-0.5 * relu(query[t, h] . key[s])

with ``Dk = 128`` and ``Nh = 64`` in DeepSeek-V3.2, so that the factor is 0.01105; one key per token, shared by all
heads. ``Dk^-0.5`` is the usual scale of a dot product: it is positive, and may stand outside of the relu. ``Nh^-0.5``
keeps the sum over heads at one size. The ``topk`` keys with the largest scores are selected, among those at or before
the query's position.

Left out, because the selection is the same without: the Hadamard rotation of queries and keys, which changes no dot
product. Left out, because it is another approximation: FP8 queries and keys. Here they are of the model's type (BF16),
their dot products accumulate in FP32, and weights, sums and scores are FP32.
"""

from __future__ import annotations

import torch

from fusions.models.layers import FP32, linear, rotate
from fusions.tf32 import tf32

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the tokens' positions, as :class:`fusions.models.layers.Rope` gives them."""

NONE = -1
"""In a selection: no key, where fewer are visible than are selected."""


class SparseIndexer(torch.nn.Module):
    """The indexer's weights, under a checkpoint's names, and what is computed with them but for the two projections of
    the hidden states (``wk``, ``weights_proj``), which the attention's front may have in one GEMM with others.

    Args:
        hidden_size, q_lora_rank: columns of the hidden states and of the latent query.
        heads, head_dim: ``Nh`` and ``Dk``.
        rope_dim: how many elements at the beginning of a head are turned by RoPE.
        topk: keys to select.
        dtype: of ``wq_b``, queries and keys.
        wk_dtype, weights_proj_dtype: of the two projections.
    """

    def __init__(
        self,
        hidden_size: int,
        q_lora_rank: int,
        heads: int,
        head_dim: int,
        rope_dim: int,
        topk: int,
        *,
        dtype: torch.dtype,
        wk_dtype: torch.dtype,
        weights_proj_dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.rope_dim, self.topk, self.dtype = heads, head_dim, rope_dim, topk, dtype
        self.wq_b = linear(q_lora_rank, heads * head_dim, dtype, device)
        self.wk = linear(hidden_size, head_dim, wk_dtype, device)
        self.k_norm = torch.nn.LayerNorm(head_dim, eps=1e-6, dtype=FP32, device=device).requires_grad_(False)
        self.weights_proj = linear(hidden_size, heads, weights_proj_dtype, device)

    @property
    def factor(self) -> float:
        """``Dk^-0.5 * Nh^-0.5``."""
        return float(self.head_dim**-0.5 * self.heads**-0.5)

    def queries(self, latent: torch.Tensor, turn: Turn) -> torch.Tensor:
        """``[M, Nh, Dk]`` of the normed latent query ``[M, q_lora_rank]``."""
        queries: torch.Tensor = self.wq_b(latent)
        return self._turned(queries.view(-1, self.heads, self.head_dim), turn)

    def keys(self, projected: torch.Tensor, turn: Turn) -> torch.Tensor:
        """``[M, Dk]`` of what ``wk`` gives for the hidden states, in rows any distance apart."""
        return self._turned(self.k_norm(projected.float()).to(self.dtype), turn)

    def select(
        self, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The selected keys of each query, as their places in ``keys``: int32 ``[B, T, min(topk, S)]``, in no order;
        :data:`NONE` fills up where fewer are visible.

        Args:
            queries: ``[B, T, Nh, Dk]``.
            keys: ``[B, S, Dk]``, a key at its token's position.
            weights: ``[B, T, Nh]``, as ``weights_proj`` gives them, not scaled.
            positions: integers ``[B, T]``, of the queries' tokens.

        Never waits for the GPU. Holds ``B * T * Nh * S`` FP32 values, so long prefills come in pieces.
        """
        scores = index_scores(queries, keys, weights.float() * self.factor)
        visible = torch.arange(keys.shape[1], device=keys.device) <= positions.unsqueeze(-1)
        scores = scores.masked_fill(~visible, -torch.inf)
        best = scores.topk(min(self.topk, keys.shape[1]), sorted=False)
        return best.indices.masked_fill(best.values == -torch.inf, NONE).to(torch.int32)

    def _turned(self, heads: torch.Tensor, turn: Turn) -> torch.Tensor:
        turned = rotate(heads[..., : self.rope_dim], turn, interleaved=False)
        return torch.cat((turned, heads[..., self.rope_dim :]), -1)


def index_scores(queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum over h of weights[b, t, h] * relu(queries[b, t, h] . keys[b, s])`` in FP32, ``[B, T, S]``.

    Args:
        queries, keys: ``[B, T, Nh, Dk]`` and ``[B, S, Dk]``, of one type.
        weights: FP32 ``[B, T, Nh]``, scaled.
    """
    tokens, heads = queries.shape[1:3]
    # 16-bit operands are exact in TF32, so this is their GEMM with FP32 results.
    with tf32(queries.dtype is not FP32):
        dots = queries.flatten(1, 2).float() @ keys.float().transpose(1, 2)
    with tf32(False):
        sums: torch.Tensor = weights.unsqueeze(2) @ dots.relu_().unflatten(1, (tokens, heads))
    return sums.squeeze(2)
