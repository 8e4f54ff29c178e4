"""The first wrong element of a bad replay: in which buffer, where, what it was and what it should have been."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...region import WORD, Region
from .capturing import Shot
from .observe import Observed
from .probe import Counts


@dataclass(frozen=True)
class Wrong:
    """``owner``: index of the last node that writes the element. ``element``: its index in the tensor; bytes from the
    buffer's first one where it is no tensor that is known."""

    owner: int
    buffer: str
    element: list[int]
    got: str
    expected: str


def first_wrong(shot: Shot, seen: Observed, over: Region, counts: Counts, last: int | None = None) -> Wrong:
    """From what the grade kernel kept of the first bad replay.

    Args:
        over: the region whose packed words ``counts`` speaks of.
        last: the last node that ran, if not all did.
    """
    places = counts.marks[: len(over)].nonzero().flatten().numpy()
    if not len(places):
        return Wrong(0, "", [], "", "nothing was kept of it")
    got, expected = (rows.numpy().reshape(-1, WORD) for rows in (counts.seen, counts.want))
    first: tuple[int, int, int] | None = None
    for place in places:  # in the order in which the nodes write
        wrong = np.flatnonzero(over.bits[place] & (got[place] != expected[place]))
        if not len(wrong):
            wrong = np.flatnonzero(over.bits[place])
        owner = _owner(seen, int(over.addresses[place]), int(wrong[0]), last)
        if first is None or owner < first[0]:
            first = (owner, int(place), int(wrong[0]))
    assert first is not None
    owner, place, byte = first
    address = int(over.addresses[place]) + byte
    group = seen.names.split(owner, Region.span(address, 1))[0]
    tensor = {**shot.inputs, **shot.outputs}.get(group.buffer)
    if tensor is None:
        start = int(seen.writes[owner].addresses[0]) if seen.writes[owner] else address
        return Wrong(
            owner, group.buffer, [address - start], f"0x{got[place][byte]:02x}", f"0x{expected[place][byte]:02x}"
        )
    size = tensor.element_size()
    number = (address - tensor.data_ptr()) // size
    begin = (tensor.data_ptr() + number * size) - int(over.addresses[place])
    values = [_value(row[place][begin : begin + size], tensor.dtype) for row in (got, expected)]
    return Wrong(owner, group.buffer, _index(number, tensor), *values)


def _owner(seen: Observed, address: int, byte: int, last: int | None) -> int:
    """The last node that writes the byte."""
    for index in range(len(seen.writes) - 1 if last is None else last, 0, -1):
        region = seen.writes[index]
        at = int(np.searchsorted(region.addresses, np.uint64(address)))
        if at < len(region) and int(region.addresses[at]) == address and region.masks[at] >> byte & 1:
            return index
    return 0


def _value(data: Any, dtype: Any) -> str:
    import torch

    if len(data) != torch.empty(0, dtype=dtype).element_size():
        return "0x" + bytes(data[::-1]).hex()
    return str(torch.from_numpy(np.ascontiguousarray(data)).view(dtype)[0].item())


def _index(number: int, tensor: Any) -> list[int]:
    """The index of the element that lies ``number`` elements behind the tensor's first."""
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    index = [0] * tensor.dim()
    for axis in order:
        stride = max(1, tensor.stride(axis))
        index[axis] = min(number // stride, tensor.shape[axis] - 1)
        number -= index[axis] * stride
    return index
