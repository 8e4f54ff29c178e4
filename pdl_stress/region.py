"""Sets of bytes of device memory, as aligned 16-byte words with a mask each: what a kernel wrote, exactly.

The harness's kernels move memory in words; the mask says which bytes of a word belong to the set (bit ``b``: byte
``b``). All operations are on the host, on numpy arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np

WORD = 16
"""Bytes of a word."""

FULL = 0xFFFF
"""Mask of a whole word."""


@dataclass(frozen=True, eq=False)
class Region:
    """A set of bytes.

    Args:
        addresses: uint64 ``[n]``, ascending, multiples of 16.
        masks: uint16 ``[n]``, none of them 0.
    """

    addresses: np.ndarray[Any, np.dtype[np.uint64]]
    masks: np.ndarray[Any, np.dtype[np.uint16]]

    @classmethod
    def empty(cls) -> Region:
        return cls(np.zeros(0, np.uint64), np.zeros(0, np.uint16))

    @classmethod
    def span(cls, address: int, size: int) -> Region:
        """The bytes ``[address, address + size)``."""
        if size <= 0:
            return cls.empty()
        first, last = address // WORD, (address + size - 1) // WORD
        masks = np.full(last - first + 1, FULL, np.uint16)
        masks[0] &= (FULL << (address - first * WORD)) & FULL
        masks[-1] &= FULL >> (WORD * (last + 1) - address - size)
        return cls((np.arange(first, last + 1, dtype=np.uint64)) * np.uint64(WORD), masks)

    @classmethod
    def of(cls, words: Any, masks: Any) -> Region:
        """From words in any order, each at most once; those without a byte are left out."""
        addresses, masks = np.asarray(words, np.uint64), np.asarray(masks, np.uint16)
        keep = masks != 0
        addresses, masks = addresses[keep], masks[keep]
        if len(addresses) > 1 and not (addresses[1:] > addresses[:-1]).all():
            order = np.argsort(addresses, kind="stable")
            addresses, masks = addresses[order], masks[order]
        return cls(addresses, masks)

    @classmethod
    def union(cls, regions: Iterable[Region]) -> Region:
        return reduce(lambda a, b: a | b, regions, cls.empty())

    def __len__(self) -> int:
        """Words."""
        return len(self.addresses)

    def __bool__(self) -> bool:
        return len(self.addresses) > 0

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Region)
            and np.array_equal(self.addresses, other.addresses)
            and np.array_equal(self.masks, other.masks)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def bytes(self) -> int:
        return int(self.bits.sum())

    @cached_property
    def bits(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool ``[n, 16]``: which bytes of each word."""
        return np.asarray((self.masks[:, None] >> np.arange(WORD, dtype=np.uint16)) & 1, np.bool_)

    def __or__(self, other: Region) -> Region:
        addresses = np.union1d(self.addresses, other.addresses)
        masks = np.zeros(len(addresses), np.uint16)
        for one in (self, other):
            masks[np.searchsorted(addresses, one.addresses)] |= one.masks
        return Region(addresses, masks)

    def __and__(self, other: Region) -> Region:
        small, large = (self, other) if len(self) <= len(other) else (other, self)
        places, found = small._in(large)
        return Region.of(small.addresses[found], small.masks[found] & large.masks[places[found]])

    def __sub__(self, other: Region) -> Region:
        masks = self.masks.copy()
        if len(other) <= len(self):
            places, found = other._in(self)
            masks[places[found]] &= ~other.masks[found]
        else:
            places, found = self._in(other)
            masks[found] &= ~other.masks[places[found]]
        return Region.of(self.addresses, masks)

    def _in(self, large: Region) -> tuple[Any, Any]:
        """For each word its place in ``large``, and whether it is there."""
        places = np.searchsorted(large.addresses, self.addresses)
        found = places < len(large)
        found[found] = large.addresses[places[found]] == self.addresses[found]
        return places, found

    def places_in(self, whole: Region) -> np.ndarray[Any, np.dtype[np.int64]]:
        """For each word its index in ``whole``, of which this must be a part (else ValueError)."""
        places, found = self._in(whole)
        if not found.all():
            raise ValueError("the region has words that the other has not")
        return np.asarray(places, np.int64)

    def filled(self, gap: int, foreign: Region) -> Region:
        """With gaps of at most ``gap`` bytes between two of its bytes filled, but for bytes of ``foreign``.

        What differs between two runs misses bytes that happened to be equal, such as a float's exponent.
        """
        if not self:
            return self
        positions = (self.addresses[:, None] + np.arange(WORD, dtype=np.uint64))[self.bits]
        steps = np.diff(positions)
        at = np.flatnonzero((steps > 1) & (steps <= gap + 1))
        holes = [np.arange(positions[i] + np.uint64(1), positions[i + 1], dtype=np.uint64) for i in at]
        if not holes:
            return self
        added = np.concatenate(holes)
        words, inverse = np.unique(added // np.uint64(WORD) * np.uint64(WORD), return_inverse=True)
        masks = np.zeros(len(words), np.uint16)
        np.bitwise_or.at(masks, inverse, (np.uint16(1) << (added % np.uint64(WORD)).astype(np.uint16)))
        return self | (Region.of(words, masks) - foreign)

    def spans(self) -> list[tuple[int, int]]:
        """``(address, size)`` of its runs of bytes, ascending."""
        if not self:
            return []
        positions = (self.addresses[:, None] + np.arange(WORD, dtype=np.uint64))[self.bits]
        ends = np.flatnonzero(np.diff(positions) > 1)
        starts = np.concatenate(([0], ends + 1))
        stops = np.concatenate((ends, [len(positions) - 1]))
        return [(int(positions[a]), int(positions[b] - positions[a]) + 1) for a, b in zip(starts, stops, strict=True)]
