"""The A-projection of DeepSeek-V3.2's attention, with the indexer's in it, through :class:`fusions.qkv_a.FusedQkvA`.

Upstream's own form has one Parameter of 2304 rows, into which a hook copies ``wk`` and ``weights_proj``; a flag tells
that hook and the forward whether to. Here the Parameter has the attention's own 2112 rows, and all three are views of
one fused weight; the flag follows from whether that is in place.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusions.integrations import equality, forms, installing, methods, rewrite
from fusions.linear import refusal
from fusions.qkv_a import FusedQkvA
from fusions.qkv_plan import INDEXER, KV_A, PRESETS, WEIGHTS_PROJ, WK

LINEAR, FLAG = "kv_a_proj_with_mqa", "fuse_a_indexer_k_weight"

_RANKS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")

PATCH = forms.Patch(
    f"calls self.{LINEAR} and asks for self.{FLAG}",
    f"where the attention is made, behind {LINEAR} (2112 rows, not more) and the indexer:\n"
    f"    self.fused_qkv_a = FusedQkvA(\n"
    f'        [("kv_a", self.{LINEAR}, None), ("wk", self.indexer.wk, None),\n'
    '         ("weights_proj", self.indexer.weights_proj, None)]\n'
    "    )\n"
    "for the hook that copies the indexer's weights, once the weights are loaded:\n"
    "    self.fused_qkv_a.post_load_weights()",
    "    out = self.fused_qkv_a.project(hidden_states)\n"
    '    q, compressed_kv, k_pe = out["kv_a"].split([q_lora_rank, kv_lora_rank, qk_rope_head_dim], dim=-1)\n'
    '    indexer_k, indexer_weights = out["wk"], out["weights_proj"]\n'
    f"for the split of self.{LINEAR}(hidden_states)",
)


class QkvA(installing.Patched):
    """On an attention: :meth:`project` for ``kv_a_proj_with_mqa``, in the width that the flag promises."""

    kind = "qkv_a"
    child = "fusions_qkv_a"

    def __init__(self, module: Any, options: Mapping[str, Any]) -> None:
        super().__init__(module, options)
        self._wide = bool(getattr(module, FLAG, False))
        self._out_features: int | None = None

    def prepare(self) -> None:
        """Takes the indexer's rows out of the attention's Parameter, and the flag down."""
        linear, rows = getattr(self.module, LINEAR, None), self._own_rows()
        self.put(FLAG, False)
        if not self._wide or rows is None or linear is None:
            return
        self._out_features = vars(linear).get("out_features")
        if self._out_features is not None:
            linear.out_features = rows  # a weight that is yet to be made has these
        weight = getattr(linear, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.shape[0] > rows:
            with torch.inference_mode(False), torch.no_grad():
                weight.data = weight.data[:rows].clone()

    def parts(self) -> tuple[Any, ...]:
        indexer = _indexer(self.module)
        wanted = [getattr(indexer, name, None) for name in INDEXER] if self._wants_indexer() else [None, None]
        return getattr(self.module, LINEAR, None), *wanted

    def make(self, *parts: Any) -> FusedQkvA:
        named = zip((KV_A, WK, WEIGHTS_PROJ), parts, strict=True)
        return FusedQkvA([(name, linear, None) for name, linear in named], preset=self.options["preset"])

    def refresh(self) -> None:
        if any(part is not None for part in self.parts()):
            super().refresh()

    def patch(self, name: str, function: Any) -> None:
        super().patch(name, function)
        self.put_hook("cache_derived_state")  # readers of shared weights call no other, and the flag has to follow

    def run_hook(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.put(FLAG, False)  # upstream's hook copies if it is set, into rows that are not there
        return super().run_hook(name, *args, **kwargs)

    def loaded(self, hook: str) -> bool:
        self.refresh()
        if self.projections is None:
            return False
        done = super().loaded(hook) and len(self.projections.plan().fused) == len(self.parts())
        self.put(FLAG, done)
        return done

    def project(self, hidden: Any) -> torch.Tensor:
        """What ``kv_a_proj_with_mqa(hidden)`` gives, with the indexer's columns behind it if the flag is set."""
        parts = self.parts()
        if not getattr(self.module, FLAG):
            own: torch.Tensor = parts[0](hidden)
            return own
        found = list(self.projections.project(hidden).values()) if self.holds(*parts) else [p(hidden) for p in parts]
        return _joined(found)

    def release(self) -> None:
        super().release()
        linear, rows = getattr(self.module, LINEAR, None), self._own_rows()
        if not self._wide or rows is None or linear is None:
            return
        if self._out_features is not None:
            linear.out_features = self._out_features
        weight = getattr(linear, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.shape[0] != rows:
            return
        more = [getattr(getattr(_indexer(self.module), name, None), "weight", None) for name in INDEXER]
        below = [part.data for part in more if isinstance(part, torch.Tensor) and part.dtype is weight.dtype]
        with torch.inference_mode(False), torch.no_grad():
            wide = torch.cat([weight.data, *below]) if len(below) == len(more) else weight.data
            missing = (self._out_features or wide.shape[0]) - wide.shape[0]
            weight.data = torch.cat([wide, wide.new_zeros(max(missing, 0), wide.shape[1])])

    def inputs(self) -> Sequence[torch.Tensor]:
        """Writes random weights first: none are loaded."""
        parts = self.parts()
        if any(refusal(part) or part.weight.is_meta or not part.weight.numel() for part in parts):
            return []
        k, first = parts[0].weight.shape[1], parts[0].weight
        with torch.no_grad():
            for part in parts:
                weight = part.weight
                weight.data.copy_(equality.random_hidden(weight.shape[0], k, weight, weight.dtype) * k**-0.5)
        return [equality.random_hidden(tokens, k, first, first.dtype) for tokens in equality.TOKENS]

    def beyond(self, hidden: torch.Tensor) -> str:
        weight = torch.cat([part.weight for part in self.parts()]) if getattr(self.module, FLAG) else None
        if weight is None:
            return ""
        with torch.no_grad():
            return equality.beyond(self.project(hidden), hidden, weight, 2.0**-8, 2.0**-17)

    def _own_rows(self) -> int | None:
        ranks = [getattr(self.module, name, None) for name in _RANKS]
        return sum(rank for rank in ranks if rank) if all(isinstance(rank, int) for rank in ranks[1:]) else None

    def _wants_indexer(self) -> bool:
        return not PRESETS[self.options["preset"]].apart


def install_qkv_a(
    attn: Any, preset: str = "8771", *, force: bool = False, example: installing.Example | None = None
) -> FusedQkvA | None:
    """Has an attention compute its A-projection as a preset says. **Before its weights are loaded.**

    ``8771``: with ``wk`` and ``weights_proj`` in it, if all three weights are plain and of one type; else without.
    ``11989`` and ``12055``: without; for the latter, :func:`install_indexer` on the indexer as well. ``9243`` is not
    possible with a forward that takes both of the indexer's parts or none.

    Upstream's ``post_load_weights`` runs first, with its flag down, so that it copies nothing.

    Args:
        attn: an instance with ``kv_a_proj_with_mqa``, ``fuse_a_indexer_k_weight`` and ``indexer`` (or ``mqa.indexer``).
        preset: a key of :data:`fusions.qkv_plan.PRESETS`.
        force: install on an unknown form. Writes random weights (none are loaded yet), and runs the module with random
            hidden states (1, 2 and 8 tokens), apart and fused: results must be within 2^-6 (RMS), the projections
            within the bounds of one rounding.
        example: how to run the module then, if not as ``attn(hidden)``; see :data:`installing.Example`.

    Returns:
        The projection, for its ``plan`` and ``explain``; ``None`` for a module without any part of it. Again, with the
        same preset: the same, and nothing is done.

    Raises:
        forms.UnknownForm, equality.Different, RuntimeError: as :func:`install_csa2`.
        ValueError: the weights seem to be loaded; or an unknown or impossible preset, or as there.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r}: expected one of {', '.join(PRESETS)}")
    if set(PRESETS[preset].apart) not in (set(), set(INDEXER)):
        raise ValueError(f"preset={preset!r}: this attention takes wk and weights_proj from one GEMM, or neither")
    record, new = installing.begin(QkvA, attn, {"preset": PRESETS[preset].name})
    if new:
        written = _written(attn)
        if written:
            raise ValueError(
                f"install_qkv_a: {written}, so the weights are loaded already, and the Parameter's size would change "
                "under whoever has seen it; make the model anew, install, and then load its weights (if it is new, its "
                f"memory was an older model's: call {LINEAR}.weight.data.zero_())"
            )
        found = methods.find(type(attn), [LINEAR], [FLAG])
        callees = f"{installing.ATTRIBUTE}.project", None
        method, function = forms.recognise("qkv_a", attn, found, _change, callees, PATCH, force)
        installing.finish(record, method.name, function, force, example)
    return record.projections  # type: ignore[no-any-return]


def _change(method: methods.Method, callee: str) -> ast.FunctionDef:
    return rewrite.redirect(method, LINEAR, callee)


def _indexer(attn: Any) -> Any:
    found = getattr(attn, "indexer", None)
    return found if found is not None else getattr(getattr(attn, "mqa", None), "indexer", None)


def _written(attn: Any) -> str:
    """What tells that weights were loaded, or empty. A write through ``weight.data`` alone leaves no trace."""
    indexer = _indexer(attn)
    parts = {LINEAR: getattr(attn, LINEAR, None)} | {f"indexer.{n}": getattr(indexer, n, None) for n in INDEXER}
    for name, part in parts.items():
        weight = getattr(part, "weight", None)
        if getattr(part, "_weights_transformed", False) or getattr(part, "_weights_removed", False):
            return f"the loader is done with {name}"
        if isinstance(weight, torch.Tensor) and not weight.is_inference() and weight._version:
            return f"{name} was written"
    own, wk = (getattr(parts[name], "weight", None) for name in (LINEAR, f"indexer.{WK}"))
    ranks = [getattr(attn, name, None) or 0 for name in _RANKS]
    if isinstance(own, torch.Tensor) and isinstance(wk, torch.Tensor) and not own.is_meta and not wk.is_meta:
        rows = own[sum(ranks) :][: wk.shape[0]]
        if rows.shape == wk.shape and rows.dtype is wk.dtype and bool(rows.any()) and torch.equal(rows, wk):
            return f"{LINEAR} has the indexer's rows in it"
    return ""


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Columns of one product, side by side as they are; else a copy."""
    if torch.compiler.is_compiling():  # addresses are unknown then
        return torch.cat(parts, -1)
    first, offset, width = parts[0], parts[0].storage_offset(), sum(part.shape[-1] for part in parts)
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.storage_offset() != offset
            or part.stride() != first.stride()
            or part.dtype is not first.dtype
        ):
            return torch.cat(parts, -1)
        offset += part.shape[-1]
    return first.as_strided((*first.shape[:-1], width), first.stride())
