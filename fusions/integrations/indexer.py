"""``wk`` and ``weights_proj`` of a sparse-attention indexer through :class:`fusions.indexer.IndexerProjection`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch

from fusions.indexer import IndexerProjection
from fusions.integrations import equality, forms, installing, methods, rewrite
from fusions.integrations.instance import installed
from fusions.linear import refusal

FUSED = "_fused_wk_wp_weight"
"""The attribute in which upstream keeps its joined copy."""

_HIDDEN = "hidden_states"
_OPTIONAL = ("indexer_k", "indexer_weights")
_BY_HAND = "self.indexer_projection.project"
_SETUP = (
    "where the indexer is made, behind wk and weights_proj:\n"
    "    self.indexer_projection = IndexerProjection(self.wk, self.weights_proj)  # compute='bf16' for BF16 weights\n"
    "once the weights are loaded, unless the loader walks over modules() (then it finds it):\n"
    "    indexer.indexer_projection.post_load_weights()"
)

PATCH = forms.Patch(
    f"multiplies by self.{FUSED}, nor a forward with the arguments {' and '.join(_OPTIONAL)}",
    _SETUP,
    f"    indexer_k, weights = {_BY_HAND}({_HIDDEN})\n"
    f"for everything from the check of self.{FUSED} to the cast of indexer_k to the type of {_HIDDEN}, but for what "
    f"unwraps {_HIDDEN}",
)

# (rounding, accumulation) for each compute: what a result may be away from the exact one.
_BOUNDS = {
    "fp32": (0.0, 2.0**-18),
    "tf32": (0.0, 2.0**-10 + 2.0**-18),
    "bf16": (2.0**-8, 2.0**-17),
    "bf16_fp32out": (0.0, 2.0**-17),
}


class Indexer(installing.Patched):
    """On an indexer: one :meth:`project`, and upstream's attribute shows the fused weight."""

    kind = "indexer"
    child = "fusions_indexer"

    def __init__(self, module: Any, options: Mapping[str, Any]) -> None:
        super().__init__(module, options)
        self.patched: Callable[..., Any] | None = None
        self._was_fused = False
        self._had_copy = getattr(module, FUSED, None) is not None

    @property
    def ready(self) -> bool:
        """Whether :meth:`project` stands for upstream's own path. Not before the weights are loaded, nor for modules
        that cannot be fused; but for weights that were replaced since, which upstream's copy does not follow."""
        parts = getattr(self.module, "wk", None), getattr(self.module, "weights_proj", None)
        if self.projections is None or not self.holds(*parts, self._made_from[-1]):
            return False
        return self._was_fused or self.projections.is_fused

    def project(self, hidden: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``(indexer_k, weights)``."""
        found: tuple[torch.Tensor, torch.Tensor] = self.projections.project(hidden)
        if not torch.compiler.is_compiling():  # addresses are unknown then
            self._show()
        return found

    def patch(self, name: str, function: Callable[..., Any]) -> None:
        super().patch(name, function)
        if name != "forward":  # the whole method is upstream's while nothing is fused
            self.patched = MethodType(function, self.module)
            self.put(name, partial(_dispatch, self.module, name))
            if hasattr(type(self.module), "cache_derived_state"):
                self.put_hook("cache_derived_state")

    def parts(self) -> tuple[Any, ...]:
        wk, weights_proj = getattr(self.module, "wk", None), getattr(self.module, "weights_proj", None)
        narrow = getattr(getattr(wk, "weight", None), "dtype", None) in (torch.bfloat16, torch.float16)
        return wk, weights_proj, self.options.get("compute") or ("bf16" if narrow else "tf32")

    def make(self, *parts: Any) -> IndexerProjection:
        wk, weights_proj, compute = parts
        return IndexerProjection(wk, weights_proj, **(self.options | {"compute": compute}))

    def run_hook(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._had_copy = True
        return super().run_hook(name, *args, **kwargs)

    def loaded(self, hook: str) -> bool:
        self._was_fused = super().loaded(hook)
        self._show()
        return self._was_fused

    def undo(self) -> None:
        super().undo()
        own, hook = vars(self.module), getattr(self.module, "post_load_weights", None)
        if own.get(FUSED) is not None:
            own[FUSED] = None  # the fused weight, or a copy as old as the installation
        if self._had_copy and callable(hook):
            hook()

    def _show(self) -> None:
        """Points upstream's attribute at the fused weight. Its own copy is let go."""
        fused, own = self.projections.fused_weight, vars(self.module)
        if fused is not None and own.get(FUSED) is not fused and hasattr(self.module, FUSED):
            own[FUSED] = fused

    def inputs(self) -> Sequence[torch.Tensor]:
        wk, weights_proj, _ = self.parts()
        if refusal(wk) or refusal(weights_proj) or not wk.weight.numel() or wk.weight.is_meta:
            return []
        return [equality.random_hidden(tokens, wk.weight.shape[1], wk.weight) for tokens in equality.TOKENS]

    def beyond(self, hidden: torch.Tensor) -> str:
        wk, weights_proj, _ = self.parts()
        if not self.ready:
            return ""
        rounding, accumulation = _BOUNDS[self.projections.compute]
        with torch.no_grad():
            key, weights = self.projections.project(hidden)
        # The key is rounded to the type of hidden, from FP32 or once more.
        return equality.beyond(key, hidden, wk.weight, rounding + 2.0**-8, accumulation) or equality.beyond(
            weights, hidden, weights_proj.weight, rounding, accumulation
        )


def install_indexer(
    indexer: Any, *, force: bool = False, example: installing.Example | None = None, **options: Any
) -> IndexerProjection:
    """Has an indexer compute ``wk`` and ``weights_proj`` in one GEMM, and fuses their weights if they are loaded.

    Two forms: with ``pre_indexer_proj``, whose fused product is replaced, and whose joined copy of the weights becomes
    the fused weight itself (same attribute, never stale); and with a ``forward`` that takes both results as optional
    arguments, which are provided where none was given. Upstream's hooks run first, and then ours.

    Args:
        indexer: an instance with ``wk`` and ``weights_proj``.
        force: install on an unknown form. Needs the weights, and runs the module with random hidden states (1, 2 and 8
            tokens): the projections must be within the bounds of their arithmetic, and results within 2^-6 (RMS) or,
            for indices, to 99 %.
        example: how to run the method then, if not as ``indexer(hidden)``; see :data:`installing.Example`.
        options: of :class:`IndexerProjection`: ``compute`` (default: ``tf32`` for FP32 weights, ``bf16`` for BF16) and
            ``storage``.

    Returns:
        The projection, for its ``explain``. Again, with the same options: the same, and nothing is done.

    Raises:
        forms.UnknownForm, equality.Different, ValueError, RuntimeError: as :func:`install_csa2`.
    """
    record, new = installing.begin(Indexer, indexer, options)
    if new:
        found, change = _form(type(indexer))
        callees = f"{installing.ATTRIBUTE}.project", _BY_HAND
        method, function = forms.recognise("indexer", indexer, found, change, callees, PATCH, force)
        installing.finish(record, method.name, function, force, example)
    return record.projections  # type: ignore[no-any-return]


def _form(owner: type) -> tuple[methods.Method | None, forms.Change]:
    found = methods.named(owner, "pre_indexer_proj")
    if found is not None:
        return found, _supersede
    forward = methods.named(owner, "forward")
    takes = {argument.arg for argument in forward.tree.args.args} if forward is not None else set()
    return (forward if takes.issuperset(_OPTIONAL) else None), _provide


def _supersede(method: methods.Method, callee: str) -> ast.FunctionDef:
    return rewrite.supersede(method, FUSED, _HIDDEN, callee)


def _provide(method: methods.Method, callee: str) -> ast.FunctionDef:
    ready = f" and {installing.ATTRIBUTE}.ready" if callee != _BY_HAND else ""
    return rewrite.provide(method, _OPTIONAL, _HIDDEN, ready, callee)


def _dispatch(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    record = installed(module)
    assert isinstance(record, Indexer)
    call = record.patched if record.ready else record.original(name)
    assert call is not None
    return call(*args, **kwargs)
