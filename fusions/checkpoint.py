"""Weights of Linears as checkpoints hold them, put together from buckets in any order, as plain FP32.

A checkpoint has a weight as it is (BF16, FP16, FP32), or as FP8 codes (E4M3) with scales: ``weight_scale_inv``, one for
each block of 128 x 128, or ``weight_scale``, one for each row. Codes without their scale are numbers of the wrong size:
they are kept back until it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

BLOCK = 128
"""Rows, and columns, that share one ``weight_scale_inv``. Blocks at the edges may be smaller."""

PLAIN = (torch.bfloat16, torch.float16, torch.float32)
CODES = torch.float8_e4m3fn
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)

_IGNORED = ("input_scale",)  # of activations, which are not quantized here
_PACKED = (torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.uint8))


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP32 ``[N, K]`` from E4M3 ``codes[N, K]`` and ``scales[ceil(N / 128), ceil(K / 128)]``, one product each.

    Raises:
        ValueError: ``codes`` or ``scales`` of another type or shape.
    """
    _check_codes(codes)
    blocks = tuple(-(-size // BLOCK) for size in codes.shape)
    _check_scales("weight_scale_inv", scales, (blocks,), f"one for each block of {BLOCK} x {BLOCK}")
    rows, columns = codes.shape
    each = scales.to(codes.device).float()
    each = each.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float() * each


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP32 ``[N, K]`` from E4M3 ``codes[N, K]`` and ``scales[N]`` or ``[N, 1]``, one product each.

    Raises:
        ValueError: ``codes`` or ``scales`` of another type or shape.
    """
    _check_codes(codes)
    rows = codes.shape[0]
    _check_scales("weight_scale", scales, ((rows,), (rows, 1)), "one for each row")
    return codes.float() * scales.to(codes.device).float().view(rows, 1)


@dataclass(frozen=True)
class StoredWeight:
    """What has come of one Linear's weight. Checked as a whole by :meth:`check`.

    Args:
        weight: ``[N, K]``, plain or E4M3.
        weight_scale_inv: ``[ceil(N / 128), ceil(K / 128)]``.
        weight_scale: ``[N]`` or ``[N, 1]``.
    """

    weight: torch.Tensor | None = None
    weight_scale_inv: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By field name, those that are there."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def missing(self) -> str:
        """What is still to come before it can be decoded; empty if nothing is."""
        if self.weight is None:
            return "weight"
        if self.weight.dtype == CODES and self.weight_scale_inv is None and self.weight_scale is None:
            return "weight_scale_inv or weight_scale"
        return ""

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises ValueError for anything that is there and cannot belong to a weight of this shape."""
        rows, k = shape
        if self.weight is not None:
            if self.weight.dtype in _PACKED:
                raise ValueError(
                    f"{name}.weight is {self.weight.dtype} {tuple(self.weight.shape)}, packed FP4: too coarse for an "
                    f"indexer's weight; use a checkpoint that has it in BF16 or FP8, [{rows}, {k}]"
                )
            if self.weight.dtype not in (*PLAIN, CODES):
                expected = ", ".join(str(dtype) for dtype in (*PLAIN, CODES))
                raise ValueError(f"{name}.weight is {self.weight.dtype}; expected one of {expected}")
            if self.weight.shape != (rows, k):
                raise ValueError(f"{name}.weight has shape {tuple(self.weight.shape)}; the Linear has [{rows}, {k}]")
        if self.weight_scale_inv is not None and self.weight_scale is not None:
            raise ValueError(
                f"{name} has weight_scale_inv and weight_scale; a weight has one of them, so pass that one"
            )
        if self.weight is not None and self.weight.dtype != CODES and len(self.tensors) > 1:
            raise ValueError(
                f"{name} has a scale, and its weight is {self.weight.dtype}, not {CODES}; pass the codes that belong "
                "to the scale, or leave the scale out"
            )
        if self.weight_scale_inv is not None:
            blocks = (-(-rows // BLOCK), -(-k // BLOCK))
            _check_scales(f"{name}.weight_scale_inv", self.weight_scale_inv, (blocks,), f"for [{rows}, {k}]")
        if self.weight_scale is not None:
            _check_scales(f"{name}.weight_scale", self.weight_scale, ((rows,), (rows, 1)), f"for [{rows}, {k}]")

    def decode(self, device: torch.device) -> torch.Tensor:
        """The weight as FP32 ``[N, K]``; nothing may be missing."""
        if self.weight is None or self.missing():
            raise ValueError(f"{self.missing()} is missing")
        weight = self.weight.detach().to(device)
        if self.weight_scale_inv is not None:
            return dequantize_blocks(weight, self.weight_scale_inv)
        if self.weight_scale is not None:
            return dequantize_rows(weight, self.weight_scale)
        return weight.float()


class Buckets:
    """What has come so far of several Linears' weights, by Linear. Immutable: :meth:`add` and :meth:`without` give new
    ones, so that a refused bucket leaves no trace."""

    def __init__(self, names: Sequence[str], stored: Mapping[str, StoredWeight] | None = None) -> None:
        self.stored = {name: (stored or {}).get(name, StoredWeight()) for name in names}

    def add(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> tuple[Buckets, frozenset[str]]:
        """With the tensors that are named ``<prefix><Linear>.<field>``; a newer one replaces an older one.

        Returns:
            The new state, and the names that were taken. Names of other modules are left alone.

        Raises:
            ValueError: something of one of the Linears that no field is for.
        """
        stored, taken = dict(self.stored), set()
        known = [field.name for field in fields(StoredWeight)]
        for key, tensor in tensors.items():
            name, _, field = key.removeprefix(prefix).partition(".") if key.startswith(prefix) else ("", "", "")
            if name not in stored:
                continue
            if field not in (*known, *_IGNORED):
                raise ValueError(f"{key}: a Linear without a bias was expected to have {', '.join(known)} only")
            taken.add(key)
            if field in known:
                stored[name] = replace(stored[name], **{field: tensor})
        return Buckets(tuple(stored), stored), frozenset(taken)

    def without(self, done: Sequence[str]) -> Buckets:
        """Only what is still waited for, in copies: a loader may use a bucket's memory again."""
        kept = {
            name: StoredWeight(**{field: tensor.detach().clone() for field, tensor in weight.tensors.items()})
            for name, weight in self.stored.items()
            if name not in done
        }
        return Buckets(tuple(self.stored), kept)

    def unfinished(self) -> list[str]:
        """``<Linear>.<field>`` for each Linear of which something has come and something has not."""
        return [
            f"{name}.{weight.missing()}" for name, weight in self.stored.items() if weight.tensors and weight.missing()
        ]


def is_exact(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether an FP32 weight is the same in ``dtype``; NaN counts as the same."""
    return dtype == torch.float32 or bool(((weight.to(dtype).float() == weight) | weight.isnan()).all())


def _check_codes(codes: torch.Tensor) -> None:
    if codes.dtype != CODES or codes.dim() != 2:
        raise ValueError(f"codes are {codes.dtype} {tuple(codes.shape)}; expected {CODES} [N, K]")


def _check_scales(name: str, scales: torch.Tensor, shapes: Sequence[tuple[int, ...]], what: str) -> None:
    if scales.dtype not in SCALES:
        raise ValueError(f"{name} is {scales.dtype}; expected one of {', '.join(map(str, SCALES))}")
    if tuple(scales.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} has shape {tuple(scales.shape)}; expected {expected}, {what}")
