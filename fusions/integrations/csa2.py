"""``wq_a`` and ``wkv`` of an attention of DeepSeek-V4.1 through :class:`fusions.csa2.HiddenStateProjections`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch

from fusions.csa2 import MODES, HiddenStateProjections
from fusions.integrations import equality, forms, installing, methods, rewrite
from fusions.linear import refusal

_RESULTS = {"wq_a": "q_latent", "wkv": "kv_latent"}

PATCH = forms.Patch(
    "calls self.wq_a and self.wkv",
    "where the attention is made, behind wq_a and wkv:\n"
    "    self.hidden_state_projections = HiddenStateProjections(\n"
    "        self.wq_a, self.wkv, projection_mode=self.projection_quantization\n"
    "    )\n"
    "once the weights are loaded, unless the loader walks over modules() (then it finds it):\n"
    "    attn.hidden_state_projections.post_load_weights()",
    "    q_latent, kv_latent = self.hidden_state_projections.project(hidden_states)\n"
    "in front of the first use of either, and q_latent for self.wq_a(hidden_states), kv_latent for "
    "self.wkv(hidden_states)",
)


class Csa2(installing.Patched):
    """On an attention: one :meth:`project` for both calls."""

    kind = "csa2"
    child = "fusions_csa2"
    exact = True

    def parts(self) -> tuple[Any, ...]:
        attn = self.module
        # A mode that is missing or unknown is treated as one that is never fused.
        mode = getattr(attn, "projection_quantization", None)
        return getattr(attn, "wq_a", None), getattr(attn, "wkv", None), mode if mode in MODES else MODES[-1]

    def make(self, *parts: Any) -> HiddenStateProjections:
        wq_a, wkv, mode = parts
        return HiddenStateProjections(wq_a, wkv, projection_mode=mode, **self.options)

    def project(self, hidden: Any) -> tuple[Any, Any]:
        """What ``wq_a(hidden)`` and ``wkv(hidden)`` give. A child that was replaced since is called as it is."""
        wq_a, wkv = self.module.wq_a, self.module.wkv
        if wq_a is self._made_from[0] and wkv is self._made_from[1]:
            return self.projections.project(hidden)  # type: ignore[no-any-return]
        return wq_a(hidden), wkv(hidden)

    def inputs(self) -> Sequence[torch.Tensor]:
        wq_a, wkv, _ = self.parts()
        if refusal(wq_a) or refusal(wkv) or not wq_a.weight.numel() or wq_a.weight.is_meta:
            return []
        weight = wq_a.weight
        return [equality.random_hidden(tokens, weight.shape[1], weight) for tokens in equality.TOKENS]

    def beyond(self, hidden: torch.Tensor) -> str:
        wq_a, wkv, _ = self.parts()
        with torch.no_grad():
            both = zip(self.project(hidden), (wq_a, wkv), strict=True)
            found = [equality.beyond(out, hidden, part.weight, 2.0**-8, 2.0**-18) for out, part in both]
        return next(filter(None, found), "")


def install_csa2(
    attn: Any, *, force: bool = False, example: installing.Example | None = None, **options: Any
) -> HiddenStateProjections:
    """Has an attention compute ``wq_a`` and ``wkv`` together, and fuses their weights if they are loaded.

    Args:
        attn: an instance with ``wq_a``, ``wkv`` and ``projection_quantization``. Its ``post_load_weights`` is called
            first where it has one.
        force: install on an unknown form. Needs the weights, and runs the module with random hidden states (1, 2 and 8
            tokens): without a fused weight results must be equal bit by bit, and the fused projections must be within
            the bounds of one BF16 rounding and an FP32 accumulation.
        example: how to run the module then, if not as ``attn(hidden)``; see :data:`installing.Example`.
        options: of :class:`HiddenStateProjections`: ``max_tokens``, ``op``, ``policy``, ``allow_foreign_views``.

    Returns:
        The projections, for their ``explain``. Again, with the same options: the same, and nothing is done.

    Raises:
        forms.UnknownForm: with the patch to apply by hand.
        equality.Different: forced, and results differ; all was undone.
        ValueError: something else is installed, bad options, or nothing to compare.
        RuntimeError: a CUDA graph is being captured.
    """
    record, new = installing.begin(Csa2, attn, options)
    if new:
        found = methods.find(type(attn), _RESULTS)
        callees = f"{installing.ATTRIBUTE}.project", "self.hidden_state_projections.project"
        method, function = forms.recognise("csa2", attn, found, _change, callees, PATCH, force)
        installing.finish(record, method.name, function, force, example)
    return record.projections  # type: ignore[no-any-return]


def _change(method: methods.Method, callee: str) -> ast.FunctionDef:
    return rewrite.hoist(method, _RESULTS, callee)
