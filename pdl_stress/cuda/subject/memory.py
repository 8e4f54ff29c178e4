"""The memory that captured kernels may touch: the allocator's blocks, what changed in them, packed copies of words.

Blocks are those of torch's caching allocator. What a kernel keeps in memory of its own (``cudaMalloc``, another
framework) is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import UsageError
from ...region import WORD, Region

DEVICE = "cuda"
"""Where tables and packed rows lie. Tests put them, and the memory under observation, on the CPU."""

CHUNK = 1 << 26
"""Bytes compared at a time."""

ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")


class OwnMemory:
    """Where the harness allocates, apart from everything that it watches."""

    def __init__(self) -> None:
        import torch

        self._pool = torch.cuda.MemPool()

    @contextmanager
    def use(self) -> Iterator[None]:
        import torch

        with torch.cuda.use_mem_pool(self._pool):
            yield

    @property
    def id(self) -> tuple[int, ...]:
        return tuple(self._pool.id)


@dataclass(frozen=True)
class Block:
    """A range of device memory. ``private``: of the captured graph's own pool, where what it computes lies."""

    address: int
    size: int
    private: bool

    def view(self) -> Any:
        return view_of(self.address, self.size)


class _Raw:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def view_of(address: int, size: int) -> Any:
    """A uint8 tensor over device memory that somebody else owns."""
    import torch

    return torch.as_tensor(_Raw(address, size), device=DEVICE)


def blocks(device: int, graph_pool: Any, own: tuple[int, ...]) -> list[Block]:
    """What kernels of a captured graph can reach: blocks in use, and the whole of the graph's private pool."""
    import torch

    found = []
    for segment in torch.cuda.memory_snapshot():
        pool = tuple(segment.get("segment_pool_id", (0, 0)))
        if segment["device"] != device or pool == own:
            continue
        if pool == tuple(graph_pool):
            found.append(Block(segment["address"], segment["total_size"], True))
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] in ACTIVE:
                found.append(Block(block.get("address", address), block["size"], False))
            address += block["size"]
    return found


class Snapshot:
    """A copy of blocks, to see what changes in them, or to put it back.

    Raises:
        UsageError: there is no room for a copy.
    """

    def __init__(self, chosen: list[Block]) -> None:
        import torch

        need = sum(block.size for block in chosen)
        free, _ = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if need > free + cached:
            raise UsageError(
                f"the captured kernels can reach {need / 2**30:.1f} GiB of memory, of which a copy is needed to see "
                f"what they write; {free / 2**30:.1f} GiB are free. Check a smaller part, or free what it does not use."
            )
        self.blocks = chosen
        self._copies = [torch.empty(block.size, dtype=torch.uint8, device=DEVICE) for block in chosen]

    def take(self) -> None:
        for block, copy in zip(self.blocks, self._copies, strict=True):
            copy.copy_(block.view())

    def restore(self) -> None:
        for block, copy in zip(self.blocks, self._copies, strict=True):
            block.view().copy_(copy)

    def changes(self) -> Region:
        """The bytes that differ now from what was taken."""
        import torch

        found = []
        weights = 2 ** torch.arange(WORD, device=DEVICE, dtype=torch.int32)
        for block, copy in zip(self.blocks, self._copies, strict=True):
            live = block.view()
            for start in range(0, block.size, CHUNK):
                differs = (live[start : start + CHUNK] != copy[start : start + CHUNK]).view(-1, WORD)
                rows = differs.any(1).nonzero().flatten()
                if not len(rows):
                    continue
                masks = (differs[rows].int() * weights).sum(1)
                addresses = block.address + start + rows.cpu().numpy().astype(np.int64) * WORD
                found.append(Region.of(addresses.astype(np.uint64), masks.cpu().numpy().astype(np.uint16)))
        if not found:
            return Region.empty()
        return Region.of(np.concatenate([r.addresses for r in found]), np.concatenate([r.masks for r in found]))


def extent(tensor: Any) -> Region:
    """The bytes from a tensor's first to its last element."""
    if not tensor.numel():
        return Region.empty()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Region.span(tensor.data_ptr(), (last + 1) * tensor.element_size())


def table(region: Region, whole: Region | None = None) -> Any:
    """The device table of a region's words: int64 ``[n, 2]``. ``whole``: the region whose packed rows they are of."""
    import torch

    places = np.arange(len(region)) if whole is None else region.places_in(whole)
    entries = np.zeros((len(region), 2), np.uint64)
    entries[:, 0] = region.addresses
    entries[:, 1] = places.astype(np.uint64) | (region.masks.astype(np.uint64) << np.uint64(32))
    return torch.from_numpy(entries.view(np.int64)).to(DEVICE)


def selection(region: Region, whole: Region) -> Any:
    """bool ``[bytes of a packed row of whole]`` on the device: which of them are the region's."""
    import torch

    chosen = np.zeros((len(whole), WORD), np.bool_)
    chosen[region.places_in(whole)] = region.bits
    return torch.from_numpy(chosen.reshape(-1)).to(DEVICE)


def rows(pool: int, region: Region) -> Any:
    """Packed rows, one for each generation: uint8 ``[pool, bytes]``, zeros."""
    import torch

    return torch.zeros((pool, max(1, len(region)) * WORD), dtype=torch.uint8, device=DEVICE)
