"""Buffers of a chain and rectangular views of them: plain descriptions, no memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise, product
from typing import Any

from .errors import UsageError

Box = tuple[tuple[int, int], ...]
"""Half-open index ranges, one per dimension."""

DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
)
"""Names of torch dtypes that a buffer may have. Graded ones need a poison: see ``cuda/memory.py``."""


class Role(StrEnum):
    """Who gives a buffer its content."""

    INPUT = "input"
    """New in every replay, written by the chain's producer."""
    CONSTANT = "constant"
    """Weights and the like: written before the chain runs."""
    INTERMEDIATE = "intermediate"
    """Written by a step. Never read by a later one: an output. Either way it is graded."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """One allocation of a chain.

    Args:
        name, shape, dtype: dtype is the torch name, such as ``"bfloat16"``.
        make: constants only: ``make(generator, device) -> Tensor`` of this shape and dtype, called once per weight set;
            or a tensor to use as it is (then there is one set only).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    make: Any = None

    def __getitem__(self, index: slice | int | tuple[slice | int, ...]) -> View:
        """A part of the buffer: unit-step slices, such as ``qkv[:, :1280]``."""
        items = index if isinstance(index, tuple) else (index,)
        if len(items) > len(self.shape):
            raise UsageError(f"buffer {self.name!r}: {len(items)} indices for {len(self.shape)} dimensions.")
        box: list[tuple[int, int]] = []
        for item, size in zip((*items, *[slice(None)] * (len(self.shape) - len(items))), self.shape, strict=True):
            if not isinstance(item, slice) or item.step not in (None, 1):
                raise UsageError(f"buffer {self.name!r}: index {item!r}; expected slices with step 1.")
            start, stop, _ = item.indices(size)
            if start >= stop:
                raise UsageError(f"buffer {self.name!r}: the slice {item!r} of a dimension of {size} is empty.")
            box.append((start, stop))
        return View(self, tuple(box))

    @property
    def whole(self) -> View:
        return View(self, tuple((0, size) for size in self.shape))


@dataclass(frozen=True, eq=False)
class View:
    """A rectangular part of a buffer."""

    buffer: Buffer
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.box)

    def overlaps(self, other: View) -> bool:
        """True if both views share memory."""
        return self.buffer is other.buffer and boxes_overlap(self.box, other.box)

    def __str__(self) -> str:
        if self.shape == self.buffer.shape:
            return self.buffer.name
        parts = (
            ":" if (start, stop) == (0, size) else f"{start}:{stop}"
            for (start, stop), size in zip(self.box, self.buffer.shape, strict=True)
        )
        return f"{self.buffer.name}[{', '.join(parts)}]"


def boxes_overlap(a: Box, b: Box) -> bool:
    """True if the boxes share an element."""
    return all(s1 < e2 and s2 < e1 for (s1, e1), (s2, e2) in zip(a, b, strict=True))


def covered(box: Box, by: list[Box]) -> bool:
    """True if every element of ``box`` lies in one of the boxes ``by``."""
    borders = [
        sorted({s, e} | {edge for other in by for edge in other[dim] if s < edge < e}) for dim, (s, e) in enumerate(box)
    ]
    return all(
        any(box_within(piece, other) for other in by) for piece in product(*(list(pairwise(b)) for b in borders))
    )


def box_within(inner: Box, outer: Box) -> bool:
    """True if every element of ``inner`` lies in ``outer``."""
    return all(s2 <= s1 and e1 <= e2 for (s1, e1), (s2, e2) in zip(inner, outer, strict=True))
