"""The parts of the A-projection, and which of them go into one GEMM: what a preset wants, what the weights allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusions.rows import Limits, RowViews

Q_A, KV_A, WK, WEIGHTS_PROJ = "q_a", "kv_a", "wk", "weights_proj"

PARTS = (Q_A, KV_A, WK, WEIGHTS_PROJ)
"""The names that parts can have, in upstream's order of rows: 1536, 512 + 64, 128 and 64 in DeepSeek-V3.2."""

BASE = (Q_A, KV_A)
"""The attention's own parts. The first of them that can be fused decides dtype, device and K of the fused weight."""

INDEXER = (WK, WEIGHTS_PROJ)
"""The indexer's parts, which a short-MHA call does not need."""

MISMATCH = "all weights in kv_a_proj_with_mqa module must have matching dtype"
"""What a strict plan raises, as upstream words it."""

KEYS = {
    Q_A: "self_attn.q_a_proj.weight",
    KV_A: "self_attn.kv_a_proj_with_mqa.weight",
    WK: "self_attn.indexer.wk.weight",
    WEIGHTS_PROJ: "self_attn.indexer.weights_proj.weight",
}
"""The parts' names in a checkpoint, behind a layer's prefix such as ``model.layers.3.``."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Preset:
    """What upstream fused at one time.

    Args:
        name: ours.
        upstream: number of the pull request.
        apart: why a part stays out of the GEMM, by the part's name.
        pair: ``wk`` and ``weights_proj`` share a GEMM of their own.
    """

    name: str
    upstream: str
    apart: Mapping[str, str] = field(default_factory=dict)
    pair: bool = False


_ALL = (
    Preset("nvfp4_all", "8771"),
    Preset("wk_only", "9243", {WEIGHTS_PROJ: "preset wk_only leaves it apart, for FP32"}),
    Preset("unfused", "11989", dict.fromkeys(INDEXER, "preset unfused leaves it apart")),
    Preset("indexer_pair", "12055", dict.fromkeys(INDEXER, "preset indexer_pair has it in the indexer's GEMM"), True),
)

PRESETS: Mapping[str, Preset] = {key: preset for preset in _ALL for key in (preset.name, preset.upstream)}
"""Under both names. Rows for DeepSeek-V3.2: 2304, 2240, 2112, 2112."""


@dataclass(frozen=True)
class Part:
    """One Linear of the A-projection. ``rows``: how many its weight has, if the caller said so."""

    name: str
    linear: Any
    rows: int | None = None


@dataclass(frozen=True)
class FusionPlan:
    """What can share a GEMM now.

    Args:
        fused: names, in order of their rows; none, or two at least.
        separate: the names of all other parts.
        reasons: why, for each separate part.
        width: rows of the fused weight.
    """

    fused: list[str]
    separate: list[str]
    reasons: dict[str, str]
    width: int


def plain_weight(linear: Any) -> torch.Tensor | None:
    """The weight ``[N, K]`` if it is one of 16 or 32 bits, with memory or without; ``None`` for codes, packed weights,
    and modules whose weight is not there."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.dtype not in FLOATS or not weight.numel():
        return None
    return weight


def check_rows(parts: Sequence[Part]) -> None:
    """Raises ValueError for a weight that has other rows than the caller said. Weights that are not there pass."""
    for part in parts:
        weight = plain_weight(part.linear)
        if weight is not None and part.rows is not None and weight.shape[0] != part.rows:
            raise ValueError(
                f"{part.name} has {weight.shape[0]} rows, expected {part.rows}; pass the rows that its weight has, or "
                "None to take them from it"
            )


def checkpoint_moves(
    parts: Sequence[Part], weights: Mapping[str, torch.Tensor], prefix: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each part's weight and the checkpoint's tensor for it. Raises ValueError if one cannot be copied to the other."""
    moves = []
    for part in parts:
        weight, key = plain_weight(part.linear), prefix + KEYS[part.name]
        if weight is None or weight.is_meta:
            raise ValueError(
                f"the weight of {part.name} is not there, or no [rows, K] of BF16, FP16 or FP32; nothing was loaded: "
                "load each part through its own Linear"
            )
        if key not in weights:
            raise ValueError(f"no {key}, which {part.name} needs; nothing was loaded: pass it, or the layer's prefix")
        source = weights[key]
        if source.dtype not in FLOATS or source.is_meta:
            raise ValueError(
                f"{key} is {source.dtype} on {source.device}, expected BF16, FP16 or FP32 with data; nothing was "
                "loaded: dequantize it first, codes alone are not the weight"
            )
        if source.shape != weight.shape:
            raise ValueError(
                f"{key} has shape {tuple(source.shape)}, expected {tuple(weight.shape)}; nothing was loaded: pass the "
                "checkpoint of this model"
            )
        moves.append((weight, source))
    return moves


def make_plan(parts: Sequence[Part], preset: Preset, ours: torch.Tensor | None) -> FusionPlan:
    """Decides from the weights as they are now; changes nothing.

    Args:
        ours: the fused weight that the parts may be views of already.
    """
    reasons = {part.name: preset.apart[part.name] for part in parts if part.name in preset.apart}
    candidates = [part for part in parts if part.name not in reasons]
    group, refused = _select(candidates)
    # Memory that has the whole group row behind row can be used as it is, whoever laid it out.
    if group and not _views(group).detect():
        foreign = {part.name: why for part in candidates if (why := _foreign(part, ours))}
        if foreign:
            group, refused = _select([part for part in candidates if part.name not in foreign])
            refused |= foreign
    reasons |= refused
    fused = [part.name for part in group]
    separate = [part.name for part in parts if part.name not in fused]
    width = sum(part.linear.weight.shape[0] for part in group)
    return FusionPlan(fused, separate, {name: reasons[name] for name in separate}, width)


def check_strict(parts: Sequence[Part], preset: Preset, plan: FusionPlan) -> None:
    """Raises AssertionError if a part that the preset fuses cannot be. Not while a weight is not there: then nothing
    is known yet."""
    wanted = [part for part in parts if part.name not in preset.apart]
    if len(wanted) < 2 or not all(_is_there(part.linear) for part in wanted):
        return
    refused = [plan.reasons[part.name] for part in wanted if part.name in plan.separate]
    refused.sort(key=lambda why: why.startswith(_ALONE))  # a part left alone is the consequence
    if refused:
        raise AssertionError(f"{MISMATCH}, and be plain rows that can be put together: {refused[0]}")


_ALONE = "no other part can be fused with "


def _select(candidates: Sequence[Part]) -> tuple[list[Part], dict[str, str]]:
    """The parts that fit the anchor, in order, and why the others do not."""
    refused: dict[str, str] = {}
    anchor = next((part for part in candidates if part.name in BASE and not _views([part]).refusal()), None)
    if anchor is None:
        for part in candidates:
            refused[part.name] = _views([part]).refusal() or "neither q_a nor kv_a can be fused"
        return [], refused
    chosen = [anchor]
    for part in candidates:
        if part is not anchor:
            why = _views([*chosen, part]).refusal()
            if why:
                refused[part.name] = why
            else:
                chosen.append(part)
    if len(chosen) == 1:
        return [], refused | {anchor.name: f"{_ALONE}{anchor.name}"}
    return [part for part in candidates if part in chosen], refused


def _views(parts: Sequence[Part]) -> RowViews:
    return RowViews([(part.name, part.linear) for part in parts], Limits(allow_foreign_views=True))


def _foreign(part: Part, ours: torch.Tensor | None) -> str:
    """Whether a weight lies in memory that others may use, so that moving it out would undo what they did."""
    if _views([part]).refusal():
        return ""  # it has its reason already
    weight: torch.Tensor = part.linear.weight
    storage = weight.untyped_storage()
    if storage.nbytes() == weight.numel() * weight.itemsize:
        return ""
    if ours is not None and storage.data_ptr() == ours.untyped_storage().data_ptr():
        return ""
    return f"{part.name} is a view of a larger storage that somebody else may hold; clone its .data to free it"


def _is_there(linear: Any) -> bool:
    weight = getattr(linear, "weight", None)
    if getattr(linear, "_weights_removed", False) or not isinstance(weight, torch.Tensor):
        return False
    return weight.numel() > 0 and not weight.is_meta
