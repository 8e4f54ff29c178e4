"""The sparse-attention indexer's projections in DeepSeek-V3.2: ``wk`` and ``weights_proj`` as one GEMM on TF32 cores.

Both read the same hidden states (K = 7168) and have few columns (128 and 64). They rank tokens, and near-ties decide
which ones attention sees; so the weights are FP32, and TF32 is as far down as it goes unless the caller says otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch

from fusions import checkpoint, indexer_gemm, linear
from fusions.capturing import is_capturing, refuse_capture
from fusions.row_copy import RowCopy
from fusions.rows import Limits, RowViews

COMPUTES = indexer_gemm.COMPUTES
STORAGES = ("alias", "copy")
BF16_SWITCH = "TRTLLM_DSA_INDEXER_BF16"
"""Environment: ``1`` makes ``compute="bf16"`` of the default, read when an :class:`IndexerProjection` is made."""

WRAPPED = "unquantized_hidden_states"
"""The attribute of a quantized wrapper (TensorRT-LLM's ``Fp4QuantizedTensor``) that has the tensor it was made from."""

_DTYPES = {"tf32": (torch.float32,), "fp32": (torch.float32,), "bf16": (torch.bfloat16, torch.float16)}
_LIMITS = {compute: Limits(_DTYPES.get(compute, (torch.bfloat16,))) for compute in COMPUTES}


class Path(StrEnum):
    """How a call was, or would be, carried out: one GEMM, one for each weight, or the two modules' own forwards."""

    FUSED = "fused"
    SEPARATE = "separate"
    LINEAR = "linear"


class IndexerProjection(torch.nn.Module):
    """``(hidden Wk^T, hidden Ww^T)``: for each token the indexer's key ``[T, Dk]`` and its heads' weights ``[T, Nh]``.

    The two modules stay where they are: they are not registered here, and ``state_dict`` does not change. Their owner
    loads the weights, here or there, then calls :meth:`post_load_weights` (a walk over ``modules()`` finds it).
    What cannot be fused is computed apart, with the same arithmetic; a module that is more than ``x W^T`` (bias, LoRA,
    quantization, hooks) is called as it is. What a module is, is looked at by the hook and wherever nothing is fused;
    where its weight is, at every call.

    Args:
        wk, weights_proj: :class:`fusions.linear.LinearLike`, weights ``[Dk, H]`` and ``[Nh, H]``.
        compute: ``tf32``: FP32 weights, TF32 tensor cores on CUDA from compute capability 8.0, else FP32. ``fp32``:
            never TF32. ``bf16``: weights in the model's type, a plain GEMM of that type; here fusing saves a GEMM and
            costs a copy. ``bf16_fp32out``: BF16 weights, a BF16 GEMM whose results are not rounded; wants a checkpoint
            that BF16 holds exactly. Default: ``tf32``, or ``bf16`` if ``TRTLLM_DSA_INDEXER_BF16=1`` now.
        storage: ``alias``: both Parameters become row views of one tensor (:class:`fusions.rows.RowViews`). ``copy``:
            they stay as they are beside a joined copy (:class:`fusions.row_copy.RowCopy`, with what it cannot see); not
            used under torch.compile, where they are two GEMMs.

    Graphs captured before the weights moved into another buffer read the old one. Threads: see :mod:`fusions.tf32`; no
    hook, reload or :meth:`release` while another thread projects, and with ``copy`` one thread projects at a time.

    Raises:
        ValueError: an unknown ``compute`` or ``storage``.
    """

    def __init__(self, wk: Any, weights_proj: Any, *, compute: str | None = None, storage: str = "alias") -> None:
        super().__init__()
        if compute is None:
            compute = "bf16" if os.environ.get(BF16_SWITCH) == "1" else "tf32"
        if compute not in COMPUTES:
            raise ValueError(f"compute={compute!r}: expected one of {', '.join(COMPUTES)}")
        if storage not in STORAGES:
            raise ValueError(f"storage={storage!r}: expected one of {', '.join(STORAGES)}")
        self.compute, self.storage = compute, storage
        parts = (("wk", wk), ("weights_proj", weights_proj))
        # A plain object, so that the two modules are not registered as children.
        self._rows: RowViews | RowCopy = (RowViews if storage == "alias" else RowCopy)(parts, _LIMITS[compute])
        self._loaded = checkpoint.Buckets(self._rows.names)
        self._hook_ran = False

    # -- weights -------------------------------------------------------------------------------------------------------

    def post_load_weights(self) -> bool:
        """Puts both weights into one tensor ``[Dk + Nh, H]``, as ``storage`` says. An intact alias stays as it is,
        pointers too; a copy is made anew, in the same memory if it fits.

        Returns:
            Whether that is in place. If not, :meth:`explain` says why, and no Parameter was touched.

        Raises:
            RuntimeError: a CUDA graph is being captured.
            ValueError: :meth:`load_weights` has got one half of a weight only.
        """
        refuse_capture("post_load_weights()")
        self.finish_loading()
        self._hook_ran = True
        return not self._rows.fuse()

    def transform_weights(self) -> bool:
        """The staged loading protocol's name for :meth:`post_load_weights`: it may move weights."""
        return self.post_load_weights()

    def cache_derived_state(self) -> bool:
        """The staged protocol's step for readers of weights that somebody else laid out. Writes no Parameter: with
        ``alias`` it takes note of a fused layout that is there already, with ``copy`` it copies.

        Returns and raises what :meth:`post_load_weights` does.
        """
        refuse_capture("cache_derived_state()")
        self.finish_loading()
        self._hook_ran = True
        return not self._rows.refusal() and self._rows.detect()

    def load_weights(
        self, weights: Mapping[str, torch.Tensor], *, prefix: str = "indexer.", allow_partial_loading: bool = False
    ) -> frozenset[str]:
        """Writes a checkpoint's tensors into the two Parameters, in place; all of them, or after an error none.

        Per weight (``wk``, ``weights_proj``): ``<prefix>wk.weight`` in BF16, FP16 or FP32; or in FP8 E4M3 with
        ``<prefix>wk.weight_scale_inv`` (blocks of 128 x 128) or ``<prefix>wk.weight_scale`` (rows), which is then
        multiplied out in FP32. Other modules' tensors, such as ``k_norm``, are left alone.

        Args:
            allow_partial_loading: the tensors may come in several calls, in any order. FP8 codes wait for their scale;
                :meth:`finish_loading`, which the hook calls, is the check that nothing waits any more. Without it all
                must be there, and what waits from earlier calls is dropped.

        Returns:
            The names that were taken.

        Raises:
            ValueError: a tensor is missing, is of the wrong shape or type (packed FP4 among them), or does not fit its
                scale; or a Parameter cannot take a plain weight or, but for ``compute="bf16"``, not its exact values.
            RuntimeError: a CUDA graph is being captured.
        """
        refuse_capture("load_weights()")
        names, linears = self._rows.names, self._rows.linears
        before = self._loaded if allow_partial_loading else checkpoint.Buckets(names)
        loaded, taken = before.add(weights, prefix)
        ready = {}
        for name, module in zip(names, linears, strict=True):
            stored = loaded.stored[name]
            if not allow_partial_loading and stored.missing():
                raise ValueError(
                    f"{prefix}{name}.{stored.missing()} is missing; pass it in the same call, or in any later one with "
                    "allow_partial_loading=True; or pass prefix=, if the checkpoint's names begin otherwise"
                )
            if stored.tensors:
                target = _target(name, module)
                stored.check(f"{prefix}{name}", target.shape)
                if not stored.missing():
                    ready[name] = target, self._decoded(f"{prefix}{name}", stored, target)
        waiting = loaded.without(list(ready))
        with torch.inference_mode():  # may write weights made under it, and all others
            for target, value in ready.values():
                target.copy_(value)
        self._loaded = waiting
        return taken

    def finish_loading(self) -> None:
        """Raises ValueError if :meth:`load_weights` has got one half of a weight only, and names the other. A weight of
        which nothing came is as it was: with partial loading it need not come, so look at what was taken."""
        missing = self._loaded.unfinished()
        if missing:
            raise ValueError(
                f"loading ended without {' and '.join(missing)}; the Parameters are as they were: pass what is missing "
                "to load_weights(..., allow_partial_loading=True), or all in one call"
            )

    def release(self) -> None:
        """Gives both Parameters storage of their own again, or lets the copy go.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        self._rows.release()

    @property
    def is_fused(self) -> bool:
        """Whether the fused weight is in place, and holds what the Parameters hold. On the host alone."""
        return not self._rows.broken()

    @property
    def fused_weight(self) -> torch.Tensor | None:
        """``[Dk + Nh, H]``, while :attr:`is_fused`."""
        return self._rows.weight if self.is_fused else None

    def _decoded(self, name: str, stored: checkpoint.StoredWeight, target: torch.Tensor) -> torch.Tensor:
        value = stored.decode(target.device)
        if self.compute != "bf16" and not checkpoint.is_exact(value, target.dtype):
            raise ValueError(
                f"{name}: {target.dtype} cannot hold the checkpoint's values exactly; make the Linear FP32 with "
                "compute='tf32', or accept the rounding with compute='bf16'"
            )
        return value

    # -- use -----------------------------------------------------------------------------------------------------------

    def project(self, hidden: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Both projections of ``hidden[..., H]``: ``(indexer_k[..., Dk], weights[..., Nh])``.

        ``indexer_k`` is dense, in the type of ``hidden``; ``weights`` is FP32, its last stride is 1. They share no
        memory. Never waits, can be captured; gradients flow where one is needed.

        Args:
            hidden: BF16, FP16 or FP32; or a quantized wrapper that has such a tensor as :data:`WRAPPED`.

        Raises:
            RuntimeError: :meth:`post_load_weights` has not run; or a graph is being captured and the copy is old.
            ValueError: ``hidden`` is none of these, or has another K or device than the weights.
        """
        hidden = _unwrapped(hidden)
        if not self._hook_ran:
            raise RuntimeError(
                "project() before post_load_weights(): call post_load_weights() once the weights are loaded (or "
                "cache_derived_state(), where they are laid out already)"
            )
        if torch.compiler.is_compiling():
            return self._traced(hidden)
        self._check(hidden)
        wk, weights_proj = self._rows.linears
        if hidden.is_meta:
            shapes = [(*hidden.shape[:-1], _columns(part)) for part in (wk, weights_proj)]
            return hidden.new_empty(shapes[0]), hidden.new_empty(shapes[1], dtype=torch.float32)
        self._renew_copy()
        path, _ = self._route(hidden)
        rows = hidden.reshape(-1, hidden.shape[-1])
        if path is Path.FUSED:
            (out,) = indexer_gemm.products(rows, self._weights(path), self.compute)
            return _split(out, wk.weight.shape[0], hidden)
        if path is Path.SEPARATE:
            key, weights = indexer_gemm.products(rows, self._weights(path), self.compute)
        else:
            key, weights = indexer_gemm.own_forwards(rows, (wk, weights_proj), self.compute)
        return _shaped(key.to(hidden.dtype), hidden), _shaped(weights.float(), hidden)

    def forward(self, hidden: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`project`."""
        return self.project(hidden)

    def scale_weights(self, weights: torch.Tensor, q_scale: torch.Tensor | None = None) -> torch.Tensor:
        """The heads' weights ``[..., Nh]`` times :attr:`factor`, as dense FP32 ``[..., Nh]``.

        Args:
            q_scale: ``[..., Nh, 1]``, scales of FP8 queries, multiplied in first. ``None``: the logits' kernel applies
                them itself, as the FP4 one does.

        Raises:
            ValueError: ``q_scale`` is not ``[..., Nh, 1]``.
        """
        scaled = weights.float()
        if q_scale is not None:
            if q_scale.shape != (*weights.shape, 1):
                raise ValueError(f"q_scale has shape {tuple(q_scale.shape)}; expected {(*weights.shape, 1)}")
            scaled = scaled * q_scale.squeeze(-1).float()
        return (scaled * self.factor).contiguous()

    @property
    def factor(self) -> float:
        """``Dk ** -0.5 * Nh ** -0.5``: 0.01105 for 128 and 64."""
        key, heads = (_columns(part) for part in self._rows.linears)
        return float(key**-0.5 * heads**-0.5)

    def explain(self, hidden: Any) -> tuple[Path, str]:
        """The path that :meth:`project` takes for ``hidden``, and why; on the fused one, what it is computed with."""
        hidden = _unwrapped(hidden)
        self._check(hidden)
        if hidden.is_meta:
            return Path.SEPARATE, "hidden is a meta tensor: shapes only"
        path, why = self._route(hidden)
        if path is Path.LINEAR:
            return path, why
        how, but = indexer_gemm.arithmetic(hidden, self._weights(path), self.compute)
        return path, "; ".join(filter(None, (why, f"computed with {how}", but)))

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _route(self, hidden: torch.Tensor) -> tuple[Path, str]:
        broken = self._rows.broken()
        if not broken:
            trained = any(part.weight.requires_grad for part in self._rows.linears)
            if torch.is_grad_enabled() and (hidden.requires_grad or trained):
                # torch must see a Parameter that is written between forward and backward.
                return Path.SEPARATE, "a gradient is needed"
            return Path.FUSED, ""
        own = self._own_forward()
        if own:
            return Path.LINEAR, own
        why = self._rows.refusal()
        if self._has_old_copy() and not why:
            return Path.FUSED, f"{broken}: copied anew first"
        return Path.SEPARATE, f"{broken}: {why or 'post_load_weights() puts them together'}"

    def _own_forward(self) -> str:
        """Why the modules have to be called as they are; empty if a GEMM with their weight is the same."""
        for name, part in zip(self._rows.names, self._rows.linears, strict=True):
            why = linear.refusal(part) or ("" if indexer_gemm.is_plain(part.weight) else "has no plain weight [N, K]")
            if why:
                return f"{name} {why}"
        return ""

    def _weights(self, path: Path) -> tuple[torch.Tensor, ...]:
        fused = self._rows.weight
        if path is Path.FUSED and fused is not None:
            return (fused,)
        return tuple(part.weight for part in self._rows.linears)

    def _check(self, hidden: torch.Tensor) -> None:
        if hidden.dtype not in indexer_gemm.FLOATS or not hidden.dim():
            expected = ", ".join(map(str, indexer_gemm.FLOATS))
            raise ValueError(f"hidden is {hidden.dtype} {tuple(hidden.shape)}; expected [..., H] of {expected}")
        for name, part in zip(self._rows.names, self._rows.linears, strict=True):
            weight = getattr(part, "weight", None)
            if not indexer_gemm.is_plain(weight):
                continue
            if hidden.shape[-1] != weight.shape[1]:
                raise ValueError(
                    f"hidden has K = {hidden.shape[-1]}, {name} has K = {weight.shape[1]}; pass hidden[..., K]"
                )
            if hidden.device != weight.device and not hidden.is_meta:
                raise ValueError(
                    f"hidden is on {hidden.device}, {name} is on {weight.device}; bring them to one device, then call "
                    "post_load_weights()"
                )

    def _has_old_copy(self) -> bool:
        return self.storage == "copy" and self._rows.weight is not None and bool(self._rows.broken())

    def _renew_copy(self) -> None:
        """An old copy is made anew, or dropped if the weights can no longer share one."""
        if not self._has_old_copy():
            return
        if is_capturing():
            raise RuntimeError(
                f"{self._rows.broken()}, and a CUDA graph is being captured, which would keep the old one; call "
                "post_load_weights() before the capture"
            )
        self._rows.fuse()

    def _traced(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """While torch traces: addresses are unknown, so a custom op decides when it runs. It has no gradient; where one
        is needed the compiler gets plain FP32 products, which it knows."""
        self._check(hidden)
        wk, weights_proj = self._rows.linears
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self._own_forward():
            key, weights = indexer_gemm.own_forwards(rows, (wk, weights_proj), None)
            return _shaped(key.to(hidden.dtype), hidden), _shaped(weights.float(), hidden)
        operands = (rows, wk.weight, weights_proj.weight)
        if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
            key, weights = indexer_gemm.traced_products(rows, operands[1:], self.compute)
            return _shaped(key.to(hidden.dtype), hidden), _shaped(weights.float(), hidden)
        out = torch.ops.fusions.indexer_projection(*operands, self.compute)
        return _split(out, wk.weight.shape[0], hidden)


def _split(out: torch.Tensor, columns: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``out[T, Dk + Nh]`` as the two results. The key is always copied: the rest of ``out`` is the other result."""
    key = out[:, :columns].to(hidden.dtype, copy=True, memory_format=torch.contiguous_format)
    return _shaped(key, hidden), _shaped(out[:, columns:].float(), hidden)


def _shaped(rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """``rows[T, N]`` with the leading dimensions of ``hidden``, as a view."""
    return rows if hidden.dim() == 2 else rows.view(*hidden.shape[:-1], rows.shape[1])


def _columns(part: Any) -> int:
    weight = getattr(part, "weight", None)
    return int(weight.shape[0] if indexer_gemm.is_plain(weight) else part.out_features)


def _unwrapped(hidden: Any) -> torch.Tensor:
    found = hidden if isinstance(hidden, torch.Tensor) else getattr(hidden, WRAPPED, None)
    if not isinstance(found, torch.Tensor):
        raise ValueError(
            f"hidden is a {type(hidden).__name__} without a tensor as its {WRAPPED}; pass a tensor, or have whoever "
            "quantizes keep the unquantized one there"
        )
    return found


def _target(name: str, module: Any) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if indexer_gemm.is_plain(weight) and not weight.is_meta:
        return weight
    what = f"{weight.dtype} {tuple(weight.shape)} on {weight.device}" if isinstance(weight, torch.Tensor) else "missing"
    raise ValueError(
        f"{name}'s weight is {what}; expected a Parameter [N, H] of 16 or 32 bits with memory: give the Linear one "
        "before loading, or load it by its own method"
    )
