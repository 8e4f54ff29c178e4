"""Small stand-ins for TensorRT-LLM's modules: names, signatures, orders of calls and hooks as they are described, in
our own words. None of it is TensorRT-LLM's code, and what they compute beyond the projections is made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BF16, FP32 = torch.bfloat16, torch.float32


class PlainMethod:
    """What a Linear of upstream delegates to, unquantized."""

    def create_weights(self, linear: Linear) -> None:
        empty = torch.empty(linear.out_features, linear.in_features, dtype=linear.dtype, device=linear.device)
        linear.weight = nn.Parameter(empty, requires_grad=False)
        linear.register_parameter("bias", None)

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, linear.weight)

    def load_weights(self, linear: Linear, weights: list[dict[str, torch.Tensor]], partial: bool) -> None:
        for tensors in weights:
            if "weight" in tensors or not partial:
                linear.weight.data.copy_(tensors["weight"].to(linear.weight.dtype))

    def post_load_weights(self, linear: Linear) -> None:
        pass


class Linear(nn.Module):
    """``quant``: a name other than empty makes ``has_any_quant`` true; the weight is BF16 all the same."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype = BF16,
        quant: str = "",
        skip_create_weights_in_init: bool = False,
        use_custom_cublas_mm: bool = False,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.dtype, self.quant, self.device = dtype, quant, device
        self.use_custom_cublas_mm, self.lora, self.tp_mode, self.tp_size = use_custom_cublas_mm, None, None, 1
        self.quant_method = PlainMethod()
        if not skip_create_weights_in_init:
            self.create_weights()

    def create_weights(self) -> None:
        self.quant_method.create_weights(self)

    @property
    def has_any_quant(self) -> bool:
        return bool(self.quant)

    def forward(self, x: Any) -> torch.Tensor:
        return self.quant_method.apply(self, x)

    def load_weights(self, weights: list[dict[str, torch.Tensor]], allow_partial_loading: bool = False) -> None:
        self.quant_method.load_weights(self, weights, allow_partial_loading)

    def post_load_weights(self) -> None:
        self.quant_method.post_load_weights(self)

    def pre_reload_weights(self) -> None:
        """Makes anew what a quantization replaced: here nothing."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, device: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=BF16, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


class Fp4QuantizedTensor:
    """A quantized hidden state. ``unquantized_hidden_states``: what it was made from, if that was kept."""

    def __init__(self, unquantized: torch.Tensor | None) -> None:
        self.unquantized_hidden_states = unquantized


# -- CSA2 --------------------------------------------------------------------------------------------------------------


class DeepseekV41Attention(nn.Module):
    """No ``post_load_weights``. The results of one call: ``(q, kv)``."""

    def __init__(
        self,
        hidden_size: int = 128,
        q_lora_rank: int = 128,
        head_dim: int = 512,
        projection_quantization: str = "bf16",
        device: str = "cpu",
        **linear: Any,
    ) -> None:
        super().__init__()
        self.projection_quantization = projection_quantization
        self.wq_a = Linear(hidden_size, q_lora_rank, device=device, **linear)
        self.q_norm = RMSNorm(q_lora_rank, device)
        self.wq_b = Linear(q_lora_rank, 64, device=device)
        self.wkv = Linear(hidden_size, head_dim, device=device, **linear)
        self.kv_norm = RMSNorm(head_dim, device)

    @torch.inference_mode()
    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Not a word of this counts."""
        qr = self.q_norm(self.wq_a(hidden_states))
        q = self.wq_b(qr) * scale
        kv = self.wkv(hidden_states)
        return q, self.kv_norm(kv)


class RenamedAttention(DeepseekV41Attention):
    """The same, written another way, with a hook of its own."""

    hooks = 0

    def post_load_weights(self) -> str:
        self.hooks += 1
        return "own"

    @torch.inference_mode()
    def forward(self, h: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.kv_norm(self.wkv(h))
        latent = self.wq_a(h)
        return self.wq_b(self.q_norm(latent)) * scale, kv


class UpdatingAttention(DeepseekV41Attention):
    """Between the two calls the hidden states are changed in place: the calls cannot be put together."""

    @torch.inference_mode()
    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = self.wq_b(self.q_norm(self.wq_a(h)))
        h.mul_(2.0)
        return q, self.wkv(h)


# -- the indexer -------------------------------------------------------------------------------------------------------


@contextmanager
def tf32_scope() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Indexer(nn.Module):
    """The form since #12055: a joined copy of both weights, made by hooks."""

    def __init__(
        self,
        hidden_size: int = 128,
        q_lora_rank: int = 32,
        head_dim: int = 16,
        n_heads: int = 8,
        dtype: torch.dtype = FP32,
        device: str = "cpu",
        **linear: Any,
    ) -> None:
        super().__init__()
        self.head_dim, self.n_heads = head_dim, n_heads
        self.wq_b = Linear(q_lora_rank, n_heads * head_dim, device=device)
        self.wk = Linear(hidden_size, head_dim, dtype, device=device, use_custom_cublas_mm=True, **linear)
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6, dtype=BF16, device=device)
        self.weights_proj = Linear(hidden_size, n_heads, dtype, device=device, use_custom_cublas_mm=True, **linear)
        self.weight_scale_factor = head_dim**-0.5 * n_heads**-0.5
        self._fused_wk_wp_weight: torch.Tensor | None = None
        self.copies = 0

    def cache_derived_state(self) -> None:
        self._fused_wk_wp_weight = torch.cat([self.wk.weight.data, self.weights_proj.weight.data], dim=0)
        self.copies += 1

    def post_load_weights(self) -> None:
        self.cache_derived_state()

    def pre_indexer_proj(
        self, qr: torch.Tensor, hidden_states: Any, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self._fused_wk_wp_weight is not None, "post_load_weights() has to run first"
        if isinstance(hidden_states, Fp4QuantizedTensor):
            assert hidden_states.unquantized_hidden_states is not None
            hidden_states = hidden_states.unquantized_hidden_states
        wide = hidden_states.to(self._fused_wk_wp_weight.dtype)
        with tf32_scope():
            product = F.linear(wide, self._fused_wk_wp_weight)
        indexer_k, weights = product.split([self.head_dim, self.n_heads], dim=-1)
        indexer_k = indexer_k.to(hidden_states.dtype)
        q = self.wq_b(qr).view(-1, self.n_heads, self.head_dim)
        q_scale = q.float().abs().amax(-1, keepdim=True).clamp_min(1e-4)
        k = self.k_norm(indexer_k)
        weights = weights.float() * q_scale.squeeze(-1) * self.weight_scale_factor
        return (q / q_scale).to(BF16), k, weights

    @torch.inference_mode()
    def forward(self, qr: torch.Tensor, hidden_states: Any, position_ids: torch.Tensor) -> torch.Tensor:
        q, k, weights = self.pre_indexer_proj(qr, hidden_states, position_ids)
        logits = (F.relu(torch.einsum("thd,kd->thk", q.float(), k.float())) * weights.unsqueeze(-1)).sum(1)
        return logits.topk(min(4, logits.shape[-1])).indices


class RewordedIndexer(Indexer):
    """The same, written another way."""

    def pre_indexer_proj(
        self, qr: torch.Tensor, hidden_states: Any, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        fused = self._fused_wk_wp_weight
        assert fused is not None
        before = torch.backends.cuda.matmul.allow_tf32
        try:
            torch.backends.cuda.matmul.allow_tf32 = True
            product = F.linear(hidden_states.float(), fused)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        indexer_k, weights = torch.split(product, [self.head_dim, self.n_heads], dim=-1)
        indexer_k = indexer_k.to(hidden_states.dtype).contiguous()
        return self.wq_b(qr), self.k_norm(indexer_k), weights * self.weight_scale_factor


class OddIndexer(Indexer):
    """Its key is not the first part of the product alone."""

    def pre_indexer_proj(
        self, qr: torch.Tensor, hidden_states: Any, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self._fused_wk_wp_weight is not None
        product = F.linear(hidden_states.float(), self._fused_wk_wp_weight.roll(1, 0))
        indexer_k, weights = product.split([self.head_dim, self.n_heads], dim=-1)
        return self.wq_b(qr), self.k_norm(indexer_k.to(BF16)), weights


class OptionalIndexer(nn.Module):
    """The form of #8771: both results can be given to ``forward``."""

    def __init__(self, hidden_size: int = 128, head_dim: int = 16, n_heads: int = 8, **linear: Any) -> None:
        super().__init__()
        self.head_dim, self.n_heads = head_dim, n_heads
        self.wk = Linear(hidden_size, head_dim, **linear)
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6, dtype=BF16)
        self.weights_proj = Linear(hidden_size, n_heads, **linear)
        self.weight_scale_factor = head_dim**-0.5 * n_heads**-0.5

    def forward(
        self,
        qr: torch.Tensor,
        hidden_states: torch.Tensor,
        metadata: Any,
        position_ids: torch.Tensor,
        indexer_k: torch.Tensor | None = None,
        indexer_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.k_norm(self.wk(hidden_states) if indexer_k is None else indexer_k)
        weights = self.weights_proj(hidden_states) if indexer_weights is None else indexer_weights
        return k, weights.float() * self.weight_scale_factor


# -- the A-projection --------------------------------------------------------------------------------------------------


class DeepseekV32Attention(nn.Module):
    """The form of #8771: for NVFP4 checkpoints the Parameter has rows for the indexer's weights, and a hook fills them.

    The results of one call: ``(q, compressed_kv, k_pe, k, weights)``.
    """

    def __init__(self, nvfp4: bool = True, hidden_size: int = 128, quant: str = "", **linear: Any) -> None:
        super().__init__()
        self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim = 48, 32, 16
        indexer = OptionalIndexer(hidden_size, **linear)
        self.mqa = SimpleNamespace(indexer=indexer)
        self.indexer = indexer
        self.fuse_a_indexer_k_weight = nvfp4
        rows = self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim
        rows += (indexer.head_dim + indexer.n_heads) if nvfp4 else 0
        self.kv_a_proj_with_mqa = Linear(hidden_size, rows, quant=quant, **linear)

    def post_load_weights(self) -> None:
        if self.fuse_a_indexer_k_weight:
            parts = [self.indexer.wk.weight, self.indexer.weights_proj.weight]
            own = self.kv_a_proj_with_mqa.weight
            assert all(part.dtype == own.dtype for part in parts), "matching dtype"
            offset = self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim
            own.data[offset:].copy_(torch.cat([part.data for part in parts]))

    def forward(
        self, position_ids: torch.Tensor | None, hidden_states: Any, attn_metadata: Any
    ) -> tuple[torch.Tensor, ...]:
        ranks = [self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim]
        if self.fuse_a_indexer_k_weight:
            q, compressed_kv, k_pe, indexer_k, indexer_weights = self.kv_a_proj_with_mqa(hidden_states).split(
                [*ranks, self.indexer.head_dim, self.indexer.n_heads], -1
            )
        else:
            q, compressed_kv, k_pe = self.kv_a_proj_with_mqa(hidden_states).split(ranks, -1)
            indexer_k = indexer_weights = None
        k, weights = self.indexer(q, hidden_states, attn_metadata, position_ids, indexer_k, indexer_weights)
        return q, compressed_kv, k_pe, k, weights


class RewordedV32Attention(DeepseekV32Attention):
    """The same, written another way."""

    def forward(
        self, position_ids: torch.Tensor | None, hidden_states: Any, attn_metadata: Any
    ) -> tuple[torch.Tensor, ...]:
        sizes = [self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim]
        if self.fuse_a_indexer_k_weight:
            sizes += [self.indexer.head_dim, self.indexer.n_heads]
        found = self.kv_a_proj_with_mqa(hidden_states).split(sizes, -1)
        return *found[:3], *self.indexer(found[0], hidden_states, attn_metadata, position_ids, *found[3:])


class SwappedV32Attention(DeepseekV32Attention):
    """Takes the indexer's parts in another order than they have."""

    def forward(
        self, position_ids: torch.Tensor | None, hidden_states: Any, attn_metadata: Any
    ) -> tuple[torch.Tensor, ...]:
        sizes = [self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim]
        if not self.fuse_a_indexer_k_weight:
            found = self.kv_a_proj_with_mqa(hidden_states).split(sizes, -1)
            return *found, *self.indexer(found[0], hidden_states, attn_metadata, position_ids)
        n, d = self.indexer.n_heads, self.indexer.head_dim
        q, kv, pe, weights, k = self.kv_a_proj_with_mqa(hidden_states).split([*sizes, n, d], -1)
        return q, kv, pe, *self.indexer(q, hidden_states, attn_metadata, position_ids, k, weights)


# -- loading -----------------------------------------------------------------------------------------------------------


def walk(model: nn.Module, hook: str = "post_load_weights") -> None:
    """Parents before children; modules without weights any more are left out."""
    for module in model.modules():
        if hasattr(module, hook) and not getattr(module, "_weights_removed", False):
            getattr(module, hook)()


def staged(model: nn.Module) -> None:
    for hook in ("setup_aliases", "transform_weights", "cache_derived_state"):
        walk(model, hook)


def load(model: nn.Module, seed: int = 0, by: str = "post_load_weights") -> None:
    """Fills every Linear through its own loader, in place, and walks. Whole numbers: sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Linear) and getattr(module, "weight", None) is not None:
            shape = module.weight.shape
            module.pre_reload_weights()
            module.load_weights([{"weight": torch.randint(-1, 2, shape, generator=generator).float()}])
    staged(model) if by == "staged" else walk(model, by)
