"""The A-projection of DeepSeek-V3.2's attention with the indexer's projections in it: one GEMM, its parts row views.

``q_a`` (1536 rows), ``kv_a`` (512 + 64), ``wk`` (128) and ``weights_proj`` (64), each of K = 7168, one below the other.
Which of them share the GEMM is a preset's wish, and the weights' say: see :mod:`fusions.qkv_plan`. More rows are no
gain in every case: TensorRT-LLM's min-latency kernel is for 2112 rows only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from fusions.capturing import refuse_capture
from fusions.ops import fused_a
from fusions.qkv_plan import (
    INDEXER,
    KEYS,
    KV_A,
    MISMATCH,
    PARTS,
    PRESETS,
    Q_A,
    WEIGHTS_PROJ,
    WK,
    FusionPlan,
    Part,
    check_rows,
    check_strict,
    checkpoint_moves,
    make_plan,
    plain_weight,
)
from fusions.rows import RowViews

__all__ = ["KEYS", "MISMATCH", "PARTS", "PRESETS", "FusedQkvA", "FusionPlan", "MlaParts", "Path", "split_mla"]


class Path(StrEnum):
    """How the parts of the fused weight are computed: by TensorRT-LLM's min-latency op, by one ``F.linear`` over it, or
    each by its own Linear."""

    MIN_LATENCY = "min_latency"
    LINEAR = "linear"
    SEPARATE = "separate"


class FusedQkvA(torch.nn.Module):
    """``hidden W^T`` for each part, several parts in one GEMM.

    The parts' modules stay where they are: they are not registered here, and ``state_dict`` does not change. Their
    owner loads the weights, then calls :meth:`post_load_weights` (a walk over ``modules()`` finds it); until then, and
    for what cannot be fused, each part is its own Linear. What a module is (bias, quantization, LoRA, hooks) is looked
    at by that hook; where its weight is, at every call. An owner that puts another module in a part's place makes a new
    ``FusedQkvA``.

    Args:
        parts: (name, :class:`fusions.linear.LinearLike`, rows), in order of the fused rows; names of
            :data:`fusions.qkv_plan.PARTS`. ``rows=None`` takes them from the weight. A part whose Linear is ``None``
            is left out, such as ``q_a`` of a model without a latent query.
        strict: a part that the preset fuses and that does not fit is an AssertionError of :meth:`plan` and
            :meth:`post_load_weights`; otherwise it is computed apart.
        preset: a key of :data:`fusions.qkv_plan.PRESETS`.

    Graphs captured before the weights moved into another buffer read the old one.

    Raises:
        ValueError: no part, a name that is unknown or given twice, rows that the weight does not have, no such preset.
    """

    def __init__(
        self, parts: Sequence[tuple[str, Any, int | None]], *, strict: bool = False, preset: str = "nvfp4_all"
    ) -> None:
        super().__init__()
        if preset not in PRESETS:
            raise ValueError(f"preset={preset!r}: expected one of {', '.join(PRESETS)}")
        given = [name for name, _, _ in parts]
        if len(set(given)) != len(given) or not set(given) <= set(PARTS):
            raise ValueError(f"parts {given}: expected each of {', '.join(PARTS)} once at most")
        self.preset, self.strict = PRESETS[preset], strict
        # In plain objects, so that they are not registered as children.
        self._parts = tuple(Part(*part) for part in parts if part[1] is not None)
        if not self._parts:
            raise ValueError(f"parts {given}: no Linear among them; pass one at least")
        check_rows(self._parts)
        self._linears = {part.name: part.linear for part in self._parts}
        self._views: RowViews | None = None
        self._columns: dict[str, slice] = {}  # of each part's results in the shared GEMM's
        self._pair: list[Any] = []  # the indexer's own projection, once there is one; in a list for the same reason

    # -- weights -------------------------------------------------------------------------------------------------------

    def plan(self) -> FusionPlan:
        """What :meth:`post_load_weights` would do with the weights as they are now. Changes nothing.

        Raises:
            AssertionError: ``strict``, and a part does not fit.
            ValueError: a weight has other rows than the constructor was told.
        """
        plan = self._planned()
        if self.strict:
            check_strict(self._parts, self.preset, plan)
        return plan

    def post_load_weights(self) -> bool:
        """Puts the weights that :meth:`plan` names into one tensor ``[rows, K]``, each Parameter a view of its rows; a
        layout that is in place stays, pointers too. Waits for the stream if it copies.

        With preset ``indexer_pair``, ``wk`` and ``weights_proj`` go to :class:`fusions.indexer.IndexerProjection`.

        Returns:
            Whether the fused layout is in place. If not, :meth:`explain` says why, and each part is its own Linear.

        Raises:
            RuntimeError: a CUDA graph is being captured.
            AssertionError, ValueError: as :meth:`plan`.
        """
        refuse_capture("post_load_weights()")
        plan = self.plan()
        if self._views is not None and list(self._views.names) != plan.fused:
            self._views.release()
            self._views = None
        for pair in self._indexer_pair():
            pair.post_load_weights()
        if not plan.fused:
            return False
        if self._views is None:
            self._views = RowViews([(name, self._linears[name]) for name in plan.fused])
        if self._views.fuse():
            self._views = None
            return False
        self._columns = {name: self._views.rows(name) for name in plan.fused}
        return True

    def transform_weights(self) -> bool:
        """The staged loading protocol's name for :meth:`post_load_weights`: it may move weights."""
        return self.post_load_weights()

    def cache_derived_state(self) -> bool:
        """The staged protocol's step for readers of weights that somebody else laid out: takes note of a fused layout
        that is there already, and writes nothing.

        Returns:
            Whether there is one of all parts that :meth:`plan` names.

        Raises:
            RuntimeError: a CUDA graph is being captured.
            ValueError: as :meth:`plan`.
        """
        refuse_capture("cache_derived_state()")
        for pair in self._indexer_pair():
            pair.cache_derived_state()
        fused = self._planned().fused
        if not fused:
            return False
        views = RowViews([(name, self._linears[name]) for name in fused])
        if not views.detect():
            return False
        self._views, self._columns = views, {name: views.rows(name) for name in fused}
        return True

    @property
    def is_fused(self) -> bool:
        """Whether every part of the fused weight is a view of it now. On the host alone, a few microseconds."""
        return self._views is not None and not self._views.broken()

    def release(self) -> None:
        """Gives every Parameter storage of its own again; :meth:`project` then runs each Linear.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        refuse_capture("release()")
        if self._views is not None:
            self._views.release()
            self._views = None
        for pair in self._pair:
            pair.release()
        self._pair.clear()

    def load_weights(self, weights: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Copies :data:`KEYS` of a checkpoint into the parts' weights, fused or not: all of them, or none on an error.

        Args:
            weights: ``[rows, K]`` of BF16, FP16 or FP32 for every part, rounded to the part's dtype; other keys are
                not looked at.
            prefix: what stands before the keys, such as ``model.layers.3.``.

        Waits for the stream of each weight's device. One part alone is loaded through its own Linear.

        Raises:
            ValueError: a key is missing, or a tensor is not what its part can take.
            RuntimeError: a CUDA graph is being captured.
        """
        refuse_capture("load_weights()")
        moves = checkpoint_moves(self._parts, weights, prefix)
        with torch.inference_mode():  # may write weights made under it, and all others
            for target, source in moves:
                target.copy_(source)
        for device in {target.device for target, _ in moves if target.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # kernels may read weights before their wait

    # -- use -----------------------------------------------------------------------------------------------------------

    def project(self, hidden: torch.Tensor, *, indexer: bool = True, dense: bool = False) -> dict[str, torch.Tensor]:
        """Every part's ``hidden W^T`` by its name: ``[..., K]`` gives ``[..., rows]``.

        Results of the shared GEMM are views of one tensor ``[..., width]``: their rows are ``width`` elements apart,
        so that no view is dense for two rows or more; and for one row it has that stride too, though torch calls it
        contiguous. Consumers must go by strides. They do not overlap. Other results are tensors of their own.

        A part of the fused weight whose Parameter is no longer a view of it, or needs a gradient, is computed by its
        own Linear. The shared GEMM still runs over all rows (its columns for such a part are dropped) while two parts
        or more are in place. While torch.compile traces, every part is its own Linear: that stays right whatever
        becomes of the Parameters.

        A part with an FP32 weight takes ``hidden`` widened to FP32, which is exact, and gives FP32: so ``weights_proj``
        of ``wk_only``. In a BF16 GEMM it is rounded to BF16. ``indexer_pair`` gives ``wk`` in the dtype of ``hidden``
        and ``weights_proj`` in FP32. Otherwise dtypes are as ``F.linear`` wants them.

        In BF16, fused or not, an element r is off by ``2^-8 |r| + 2^-17 sum |x_k w_k|`` at most for K = 7168 and random
        data, if cuBLAS must not round partial sums (``allow_bf16_reduced_precision_reduction = False``; torch's default
        lets it). Fused and separate results are not the same bits.

        Args:
            indexer: whether ``wk`` and ``weights_proj`` are needed. If not, they are skipped, and missing in the
                result, except where the shared GEMM has them anyway.
            dense: copies, where a result is not dense; rows then follow each other in every result.

        Never waits. Differentiable.

        Raises:
            ValueError: ``hidden`` has another K than a part's weight.
        """
        path, _, joined = self._route(hidden)
        results: dict[str, torch.Tensor] = {}
        if path is not Path.SEPARATE:
            results |= self._together(hidden, path, joined)
        left = [name for name in self._linears if name not in results and (indexer or name not in INDEXER)]
        if self._pair and all(name in left for name in INDEXER):
            results[WK], results[WEIGHTS_PROJ] = self._pair[0].project(hidden)
            left = [name for name in left if name not in INDEXER]
        for name in left:
            results[name] = self._apart(name, hidden)
        return {name: _dense(results[name]) if dense else results[name] for name in self._linears if name in results}

    def forward(self, hidden: torch.Tensor, *, indexer: bool = True, dense: bool = False) -> dict[str, torch.Tensor]:
        """:meth:`project`."""
        return self.project(hidden, indexer=indexer, dense=dense)

    def explain(self, hidden: torch.Tensor) -> tuple[Path, str]:
        """The path that :meth:`project` takes for ``hidden``, and why not a faster one; for a fused path also which
        parts it leaves out."""
        path, why, _ = self._route(hidden)
        return path, why

    def _route(self, hidden: Any) -> tuple[Path, str, tuple[str, ...]]:
        """The path, why, and the parts that the shared GEMM gives."""
        if torch.compiler.is_compiling():  # addresses are unknown then
            return Path.SEPARATE, "torch.compile is tracing", ()
        views = self._views
        if views is None or views.weight is None:
            return Path.SEPARATE, self._why_not_fused(), ()
        if not isinstance(hidden, torch.Tensor):
            return Path.SEPARATE, f"hidden is a {type(hidden).__name__}", ()
        if torch.is_grad_enabled() and hidden.requires_grad:
            # torch must see a Parameter that is written between forward and backward.
            return Path.SEPARATE, "a gradient is needed", ()
        joined, lost = views.names, ""
        if views.broken():
            joined = tuple(name for name in views.names if views.intact(name))
            lost = ", ".join(name for name in views.names if name not in joined)
            lost = f"no longer in the fused weight: {lost}; post_load_weights() fuses again"
        if torch.is_grad_enabled():
            trained = [name for name in joined if self._linears[name].weight.requires_grad]
            if trained:
                joined = tuple(name for name in joined if name not in trained)
                lost = "; ".join(filter(None, (lost, f"being trained: {', '.join(trained)}")))
        if len(joined) < 2:
            return Path.SEPARATE, lost, ()
        why = fused_a.refusal(hidden, views.weight)
        path = Path.LINEAR if why else Path.MIN_LATENCY
        return path, "; ".join(filter(None, (why, lost))), joined

    def _together(self, hidden: torch.Tensor, path: Path, joined: tuple[str, ...]) -> dict[str, torch.Tensor]:
        weight = None if self._views is None else self._views.weight
        assert weight is not None
        _check_k("the fused weight", hidden, weight)
        if path is Path.MIN_LATENCY:
            out = fused_a.fused_a(hidden, weight)
        else:
            out = torch.nn.functional.linear(_widened(hidden, weight), weight)
        # One slice each: the outputs of one split must not be changed in place under autograd.
        return {name: out[..., self._columns[name]] for name in joined}

    def _apart(self, name: str, hidden: Any) -> torch.Tensor:
        linear = self._linears[name]
        weight = plain_weight(linear)
        if weight is not None and isinstance(hidden, torch.Tensor):
            _check_k(name, hidden, weight)
            hidden = _widened(hidden, weight)
        out: torch.Tensor = linear(hidden)
        return out

    def _why_not_fused(self) -> str:
        plan = self._planned()
        if plan.fused:
            return f"post_load_weights() has not fused {', '.join(plan.fused)}"
        return "; ".join(plan.reasons.values())

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _planned(self) -> FusionPlan:
        check_rows(self._parts)
        return make_plan(self._parts, self.preset, None if self._views is None else self._views.weight)

    def _indexer_pair(self) -> list[Any]:
        """The indexer's own projection, if the preset and the parts make one; made at the first hook."""
        if not self._pair and self.preset.pair and all(name in self._linears for name in INDEXER):
            from fusions.indexer import IndexerProjection  # one preset's need

            self._pair.append(IndexerProjection(self._linears[WK], self._linears[WEIGHTS_PROJ]))
        return self._pair


class MlaParts(NamedTuple):
    """What MLA and the indexer take on. ``None`` for what the model has not, or was not computed.

    Shapes ``[..., n]``: q 1536, compressed_kv 512, k_pe 64, indexer_k 128, indexer_weights 64 in DeepSeek-V3.2.
    """

    q: torch.Tensor | None
    compressed_kv: torch.Tensor
    k_pe: torch.Tensor
    indexer_k: torch.Tensor | None
    indexer_weights: torch.Tensor | None


def split_mla(out: Mapping[str, torch.Tensor], *, kv_lora_rank: int = 512, rope_head_dim: int = 64) -> MlaParts:
    """Splits ``kv_a`` of :meth:`FusedQkvA.project` into the latent and its RoPE part, as views; the rest as it is.

    ``indexer_weights`` are not scaled; in BF16 they must be made FP32 before a scaling that does not promote them.

    Raises:
        ValueError: no ``kv_a``, or it has not ``kv_lora_rank + rope_head_dim`` columns.
    """
    if KV_A not in out:
        raise ValueError(f"out has {', '.join(out) or 'nothing'}, expected {KV_A} among them")
    kv_a = out[KV_A]
    if min(kv_lora_rank, rope_head_dim) < 0 or kv_a.shape[-1] != kv_lora_rank + rope_head_dim:
        raise ValueError(
            f"kv_a has {kv_a.shape[-1]} columns, expected {kv_lora_rank} + {rope_head_dim}; pass the model's "
            "kv_lora_rank and rope_head_dim"
        )
    latent, k_pe = kv_a[..., :kv_lora_rank], kv_a[..., kv_lora_rank:]
    return MlaParts(out.get(Q_A), latent, k_pe, out.get(WK), out.get(WEIGHTS_PROJ))


def _check_k(what: str, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    k = hidden.shape[-1] if hidden.dim() else 0
    if k != weight.shape[1]:
        raise ValueError(
            f"hidden has K = {k}, {what} has K = {weight.shape[1]}; pass hidden[..., {weight.shape[1]}], before any "
            "slicing or quantization"
        )


def _widened(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """FP32 for an FP32 weight; exact."""
    narrow = weight.dtype is torch.float32 and hidden.dtype in (torch.bfloat16, torch.float16)
    return hidden.float() if narrow else hidden


def _dense(out: torch.Tensor) -> torch.Tensor:
    """Row behind row. ``contiguous()`` would leave one row with the stride that it has in its buffer."""
    rows, stride = [], 1
    for size in reversed(out.shape):
        rows.append(stride)
        stride *= size
    if out.stride() == tuple(reversed(rows)):
        return out
    return out.clone(memory_format=torch.contiguous_format)
