"""The front of DeepSeek-V3.2's attention: from hidden states to what sparse MLA takes, caches written on the way.

Down-projections, norms, the query's up-projection, RoPE, the indexer's scores and its top-k; no attention itself, no
quantization. It is there to see the A-projection of :mod:`fusions.qkv_a` and the indexer's of :mod:`fusions.indexer` at
work: with a preset of theirs, or plain Linears throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch

from fusions.models.layers import BF16, FP32, RMSNorm, Rope, linear, rotate, run_hooks
from fusions.models.sparse_indexer import SparseIndexer
from fusions.qkv_a import PRESETS, FusedQkvA, MlaParts, Path, split_mla
from fusions.qkv_plan import INDEXER, KV_A, Q_A, WEIGHTS_PROJ, WK


@dataclass(frozen=True)
class MlaConfig:
    """Sizes, in elements; DeepSeek-V3.2's are the default. ``dtype``: of the model. The indexer's two projections of
    the hidden states may be FP32: see :meth:`suiting`."""

    hidden_size: int = 7168
    num_heads: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    eps: float = 1e-6
    rope_theta: float = 10000.0
    dtype: torch.dtype = BF16
    wk_dtype: torch.dtype = BF16
    weights_proj_dtype: torch.dtype = BF16

    @staticmethod
    def small() -> MlaConfig:
        """Sizes for tests on a CPU: the same structure, 64 of each indexer head turned by RoPE, 48 keys selected."""
        return MlaConfig(
            hidden_size=256, num_heads=4, q_lora_rank=96, kv_lora_rank=72, qk_nope_head_dim=48, qk_rope_head_dim=64,
            index_n_heads=16, index_head_dim=128, index_topk=48,
        )  # fmt: skip

    def suiting(self, fusion: str | None) -> MlaConfig:
        """This model with the indexer's projections in the types that upstream had with a preset: ``weights_proj`` in
        FP32 where it is out of the A-projection, ``wk`` too where the two have a GEMM of their own; else BF16. To
        compare fusion on and off, give both fronts one configuration."""
        preset = None if fusion is None else PRESETS[fusion]
        apart = () if preset is None else preset.apart
        pair = preset is not None and preset.pair
        return replace(
            self,
            wk_dtype=FP32 if pair else self.dtype,
            weights_proj_dtype=FP32 if WEIGHTS_PROJ in apart else self.dtype,
        )


class IndexerUse(StrEnum):
    """How much of the indexer a call runs."""

    SELECT = "keys, scores and top-k"
    KEYS = "keys only"
    NONE = "nothing"


class MlaCaches(NamedTuple):
    """What tokens leave behind for later ones, each at its position: ``[B, S, n]`` of the model's type.

    ``latent``: the normed compressed KV, n = kv_lora_rank. ``k_pe``: the shared key's RoPE part, turned. ``index_k``:
    the indexer's keys.
    """

    latent: torch.Tensor
    k_pe: torch.Tensor
    index_k: torch.Tensor


class MlaInputs(NamedTuple):
    """What sparse MLA takes on, for ``M = B * T`` tokens.

    ``q``: ``[M, heads, nope + rope]``, the RoPE part turned. ``compressed_kv``: ``[M, kv_lora_rank]``, normed.
    ``k_pe``: ``[M, rope]``, turned. ``topk``: int32 ``[M, k]``, positions of the selected keys in no order, filled up
    with -1; ``None``: every key at or before the token is selected.
    """

    q: torch.Tensor
    compressed_kv: torch.Tensor
    k_pe: torch.Tensor
    topk: torch.Tensor | None


class MlaFront(torch.nn.Module):
    """See :class:`MlaInputs` for what it makes of the hidden states.

    Its ``state_dict`` has the keys of a checkpoint's ``self_attn``, the same with fusion on and off. Load the weights,
    then call :meth:`post_load_weights`. Move it with ``.to(device)``, which undoes the fusion until the next hook; a
    cast to another type would spoil what has to be FP32.

    Args:
        config: sizes and types.
        fusion: a preset of :class:`fusions.qkv_a.FusedQkvA`, or ``None``: each projection is its own Linear.
        short_path: leave out what of the indexer is not needed where every key is selected.

    Raises:
        ValueError: an unknown preset.
    """

    def __init__(
        self,
        config: MlaConfig | None = None,
        fusion: str | None = None,
        *,
        short_path: bool = True,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config or MlaConfig()
        self.fusion, self.short_path = fusion, short_path
        head = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = linear(c.hidden_size, c.q_lora_rank, c.dtype, device)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.eps, dtype=c.dtype, device=device)
        self.q_b_proj = linear(c.q_lora_rank, c.num_heads * head, c.dtype, device)
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, c.dtype, device)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.eps, dtype=c.dtype, device=device)
        self.indexer = SparseIndexer(
            c.hidden_size, c.q_lora_rank, c.index_n_heads, c.index_head_dim, c.qk_rope_head_dim, c.index_topk,
            dtype=c.dtype, wk_dtype=c.wk_dtype, weights_proj_dtype=c.weights_proj_dtype, device=device,
        )  # fmt: skip
        self.rope = Rope(c.qk_rope_head_dim, c.rope_theta, device=device)
        self.fused: FusedQkvA | None = None
        if fusion is not None:
            self.fused = FusedQkvA([(name, part, None) for name, part in self.parts.items()], preset=fusion)

    @property
    def parts(self) -> dict[str, torch.nn.Linear]:
        """The four projections of the hidden states, by the names that :mod:`fusions.qkv_a` has for them."""
        return {
            Q_A: self.q_a_proj,
            KV_A: self.kv_a_proj_with_mqa,
            WK: self.indexer.wk,
            WEIGHTS_PROJ: self.indexer.weights_proj,
        }

    def post_load_weights(self) -> bool:
        """Runs the hooks of the modules below, once the weights are loaded; again and again does no harm.

        Returns:
            Whether weights are fused now; never with ``fusion=None``.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        return run_hooks(self)

    def caches(self, batch: int, capacity: int) -> MlaCaches:
        """Empty caches on the device of the weights, for ``batch`` sequences of up to ``capacity`` tokens."""
        c, weight = self.config, self.q_a_proj.weight
        widths = (c.kv_lora_rank, c.qk_rope_head_dim, c.index_head_dim)
        return MlaCaches(*(weight.new_zeros((batch, capacity, width)) for width in widths))

    def indexer_use(self, context: int, capacity: int) -> IndexerUse:
        """What of the indexer runs for a context of up to ``context`` tokens in caches of ``capacity``.

        With no more tokens than the indexer selects, all are selected and nobody needs scores. The tokens' keys are
        still needed if the sequence may grow past that number in its caches: a later query scores them.
        """
        if not self.short_path or context > self.config.index_topk:
            return IndexerUse.SELECT
        return IndexerUse.KEYS if capacity > self.config.index_topk else IndexerUse.NONE

    def project(self, hidden: torch.Tensor, *, indexer: bool = True) -> MlaParts:
        """The projections of ``hidden[M, K]``, split; the indexer's may be missing with ``indexer=False``.

        Views, possibly: go by strides. ``indexer_k`` has the type of ``hidden`` in any case.
        """
        if self.fused is not None:
            out = self.fused.project(hidden, indexer=indexer)
        else:
            wanted = {name: part for name, part in self.parts.items() if indexer or name not in INDEXER}
            out = {name: part(hidden.to(part.weight.dtype)) for name, part in wanted.items()}
        c = self.config
        found = split_mla(out, kv_lora_rank=c.kv_lora_rank, rope_head_dim=c.qk_rope_head_dim)
        return found if found.indexer_k is None else found._replace(indexer_k=found.indexer_k.to(hidden.dtype))

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, caches: MlaCaches, *, context: int | None = None
    ) -> MlaInputs:
        """``B`` sequences, ``T`` tokens of each: ``T = 1`` is a decode step, more are a prefill. Never waits for the
        GPU; all shapes follow from those of the arguments, so that a step can be captured and replayed.

        Args:
            hidden: ``[B * T, K]``, the tokens of a sequence one behind the other.
            positions: int64 ``[B, T]`` on the device. A token's cache rows are written there, and it sees keys at or
                before it. For a decode step: the length of the context so far.
            caches: written in place. Rows up to a token's position hold the tokens before it.
            context: a bound that the caller knows for every position + 1, at most and by default the caches' size S;
                keys from there on are not looked at. The host decides by it whether the indexer is needed.

        Raises:
            ValueError: shapes that do not belong together, or a ``context`` that the caches cannot have.
        """
        batch, tokens = positions.shape
        capacity = caches.latent.shape[1]
        context = capacity if context is None else context
        self._check(hidden, positions, caches, context)
        use = self.indexer_use(context, capacity)
        parts = self.project(hidden, indexer=use is not IndexerUse.NONE)
        assert parts.q is not None
        turn = self.rope(positions.reshape(-1))

        latent_q = self.q_a_layernorm(parts.q)
        q = self.q_b_proj(latent_q).view(batch * tokens, self.config.num_heads, -1)
        q_nope, q_pe = q.split((self.config.qk_nope_head_dim, self.config.qk_rope_head_dim), -1)
        q = torch.cat((q_nope, rotate(q_pe, turn, interleaved=True)), -1)
        compressed_kv = self.kv_a_layernorm(parts.compressed_kv)
        k_pe = rotate(parts.k_pe, turn, interleaved=True)
        _write(caches.latent, positions, compressed_kv)
        _write(caches.k_pe, positions, k_pe)

        topk = None
        if use is not IndexerUse.NONE:
            assert parts.indexer_k is not None
            _write(caches.index_k, positions, self.indexer.keys(parts.indexer_k, turn))
        if use is IndexerUse.SELECT:
            assert parts.indexer_weights is not None
            queries = self.indexer.queries(latent_q, turn).unflatten(0, (batch, tokens))
            weights = parts.indexer_weights.unflatten(0, (batch, tokens))
            topk = self.indexer.select(queries, caches.index_k[:, :context], weights, positions).flatten(0, 1)
        return MlaInputs(q, compressed_kv, k_pe, topk)

    def explain(self, hidden: torch.Tensor) -> str:
        """The path of the projections for ``hidden[M, K]``, and why not a faster one."""
        if self.fused is None:
            return "plain Linears"
        path, why = self.fused.explain(hidden)
        plan = self.fused.plan()
        joined = f"one GEMM for {', '.join(plan.fused)}, {path}" if path is not Path.SEPARATE else str(path)
        return f"{joined}: {why}" if why else joined

    def _check(self, hidden: torch.Tensor, positions: torch.Tensor, caches: MlaCaches, context: int) -> None:
        batch, tokens = positions.shape
        if hidden.shape != (batch * tokens, self.config.hidden_size):
            raise ValueError(
                f"hidden is {tuple(hidden.shape)}; expected {(batch * tokens, self.config.hidden_size)}: a row for "
                f"each of the positions {(batch, tokens)}"
            )
        sizes = {cache.shape[:2] for cache in caches}
        if len(sizes) != 1 or caches.latent.shape[0] != batch:
            raise ValueError(
                f"caches of {[tuple(size) for size in sorted(sizes)]} sequences and tokens; expected one size, of "
                f"{batch} sequences as in positions"
            )
        if not 1 <= context <= caches.latent.shape[1]:
            raise ValueError(f"context={context}; expected 1 to {caches.latent.shape[1]}, the size of the caches")


def _write(cache: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
    """``rows[B * T, n]`` into ``cache[B, S, n]`` at ``positions[B, T]``."""
    batch, tokens = positions.shape
    sequences = torch.arange(batch, device=cache.device).unsqueeze(1).expand(batch, tokens)
    cache.index_put_((sequences, positions), rows.unflatten(0, (batch, tokens)))


@dataclass(frozen=True)
class MlaDecodeStep:
    """One decode step whose inputs stay where they are: call it to run it, write into ``hidden`` or ``positions`` for
    another one. Can be captured, after one call outside of a capture."""

    front: MlaFront
    hidden: torch.Tensor
    positions: torch.Tensor
    caches: MlaCaches

    def __call__(self) -> MlaInputs:
        with torch.no_grad():
            found: MlaInputs = self.front(self.hidden, self.positions, self.caches)
        return found


def decode_step_mla(front: MlaFront, batch: int, context: int, seed: int = 0) -> MlaDecodeStep:
    """A decode step of ``batch`` sequences, one token each, that makes their contexts ``context`` tokens long; random
    hidden states, and caches of just that size with random contents. On the device of the weights."""
    weight = front.q_a_proj.weight
    generator = torch.Generator(weight.device).manual_seed(seed)

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.randn(tensor.shape, generator=generator, device=weight.device))

    caches = MlaCaches(*(fill(cache) for cache in front.caches(batch, context)))
    hidden = fill(weight.new_empty((batch, front.config.hidden_size)))
    positions = torch.full((batch, 1), context - 1, dtype=torch.int64, device=weight.device)
    return MlaDecodeStep(front, hidden, positions, caches)
