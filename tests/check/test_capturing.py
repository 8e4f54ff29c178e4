"""What can be said of inputs, names and wrong elements without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pdl_stress import UsageError
from pdl_stress.cuda.subject import capturing, memory
from pdl_stress.cuda.subject.describe import first_wrong
from pdl_stress.cuda.subject.observe import Names, check_size
from pdl_stress.cuda.subject.probe import Counts
from pdl_stress.region import WORD, Region


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("rmsnorm", "rmsnorm"),
        ("void lib::(anonymous namespace)::rmsnorm_kernel<8, float>", "rmsnorm_kernel"),
        ("at::native::elementwise_kernel<4, at::native::f<int>::g, std::array<char*, 2ul> >", "elementwise_kernel"),
        ("nvjet_sm90_tst_128x8_64x12_4x1_v_bz_splitK_TNT", "nvjet_sm90_tst_128x8_64x12_4x1_v_bz_splitK_TNT"),
        ("kernel(int, float*)", "kernel"),
        ("<>", "<>"),
    ],
)  # fmt: skip
def test_short_names(name: str, short: str) -> None:
    assert capturing.short_name(name) == short


def test_tensors_are_found_with_their_paths() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = dict(capturing._tensors("x", {"k": [a, (b, 3)], "v": c, "n": None}))
    assert {name: len(t) for name, t in found.items()} == {"x.k[0]": 1, "x.k[1][0]": 2, "x.v": 3}


def test_arguments_have_the_names_of_the_parameters() -> None:
    assert capturing._names(lambda x, w, *rest, flag: None, 3) == ["x", "w", "arg2"]
    assert capturing._names(print, 1) == ["arg0"]


@pytest.mark.parametrize(
    ("made", "text"), [(torch.zeros(2), "x is on cpu"), ((), "gave no tensor"), ({"a": 1}, "no tensor")]
)
def test_inputs_must_be_tensors_on_the_gpu(made: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        capturing.prepare(lambda: made, lambda x: None, 0)


def test_inputs_are_drawn_under_the_seed() -> None:
    drawn = []
    for seed in (1, 2, 1):
        with pytest.raises(UsageError, match="on cpu"):
            capturing.prepare(lambda: drawn.append(torch.rand(1).item()) or torch.zeros(1), lambda x: None, seed)
    assert drawn[0] == drawn[2] != drawn[1]


def test_independent_inputs_by_name() -> None:
    tensors = dict.fromkeys(("x", "w.a", "w[0]", "wide"))
    assert capturing._independent(["w"], tensors) == {"w.a", "w[0]"}
    with pytest.raises(UsageError, match=r"no input is called 'out'; the inputs are x, w\.a"):
        capturing._independent(["out"], tensors)


def test_inputs_that_never_change_show_nothing() -> None:
    with pytest.raises(UsageError, match="same values each time"):
        capturing._refuse_equal(torch.zeros(4, 8))
    capturing._refuse_equal(torch.eye(4))


def test_the_extent_of_a_tensor_goes_from_its_first_to_its_last_element() -> None:
    base = torch.zeros(10, 8)
    assert memory.extent(base).bytes == 320
    part = base[2:4, 1:3]
    assert memory.extent(part) == Region.span(base.data_ptr() + 4 * (2 * 8 + 1), 4 * (8 + 2))
    assert not memory.extent(base[:0])


def test_blocks_are_those_in_use_and_the_graphs_own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(pool: tuple[int, int], *blocks: tuple[int, str], device: int = 0, address: int = 512) -> dict[str, Any]:
        found = [{"size": size, "state": state} for size, state in blocks]
        total = sum(size for size, _ in blocks)
        return {"device": device, "address": address, "total_size": total, "segment_pool_id": pool, "blocks": found}

    segments = [
        segment((0, 0), (512, "active_allocated"), (1024, "inactive"), (2048, "active_awaiting_free")),
        segment((0, 7), (512, "inactive"), (512, "active_allocated"), address=8192),
        segment((3, 0), (512, "active_allocated"), address=16384),
        segment((0, 0), (512, "active_allocated"), device=1),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert memory.blocks(0, (0, 7), (3, 0)) == [
        memory.Block(512, 512, False), memory.Block(2048, 2048, False), memory.Block(8192, 1024, True),
    ]  # fmt: skip


def test_memory_that_no_table_could_hold_is_refused() -> None:
    check_size(Region.span(0, 64))
    monstrous: Any = type("Huge", (), {"__len__": lambda self: 2**31, "bytes": 2**36})()
    with pytest.raises(UsageError, match=r"64\.0 GiB"):
        check_size(monstrous)


# -- the first wrong element -------------------------------------------------------------------------------------------


def shot_of(**tensors: torch.Tensor) -> Any:
    return SimpleNamespace(inputs=tensors, outputs={}, labels=["producer", "first", "second"])


def bad(whole: Region, addresses: dict[int, tuple[int, int]]) -> Counts:
    """What the grade kernel keeps when these bytes are (got, wanted)."""
    seen, want = (np.zeros((len(whole), WORD), np.uint8) for _ in range(2))
    marks = np.zeros(len(whole), np.uint8)
    for address, (got, wanted) in addresses.items():
        place = int(np.searchsorted(whole.addresses, np.uint64(address // WORD * WORD)))
        seen[place, address % WORD], want[place, address % WORD], marks[place] = got, wanted, 1
    counts = Counts(1, 1, True, 0.0)
    counts.seen, counts.want, counts.marks = (torch.from_numpy(a.reshape(-1)) for a in (seen, want, marks))
    return counts


def test_the_first_wrong_element_is_the_earliest_nodes() -> None:
    x, y = torch.zeros(2, 8), torch.zeros(16, dtype=torch.int32)
    regions = [Region.empty(), memory.extent(x), memory.extent(y)]
    whole = regions[1] | regions[2]
    shot = shot_of(x=x, y=y)
    seen: Any = SimpleNamespace(writes=regions, names=Names(shot))
    at_y, at_x = y.data_ptr() + 4 * 3, x.data_ptr() + 4 * 9 + 3
    counts = bad(whole, {at_y: (5, 7), at_x: (0x40, 0x3F)})
    wrong = first_wrong(shot, seen, whole, counts)
    assert (wrong.owner, wrong.buffer, wrong.element) == (1, "x", [1, 1])
    assert (float(wrong.got), float(wrong.expected)) == (2.0, 0.5)
    wrong = first_wrong(shot, seen, whole, bad(whole, {at_y: (5, 7)}))
    assert (wrong.owner, wrong.buffer, wrong.element, wrong.got, wrong.expected) == (2, "y", [3], "5", "7")
    assert first_wrong(shot, seen, whole, bad(whole, {})).buffer == ""


def test_scratch_memory_is_named_by_its_writer_and_counted_in_bytes() -> None:
    x = torch.zeros(64)
    region = memory.extent(x)
    shot = shot_of()
    seen: Any = SimpleNamespace(writes=[Region.empty(), region], names=Names(shot))
    wrong = first_wrong(shot, seen, region, bad(region, {x.data_ptr() + 40: (1, 2)}))
    assert (wrong.buffer, wrong.element, wrong.got, wrong.expected) == ("scratch of first", [40], "0x01", "0x02")


def test_a_region_is_split_by_the_tensors_that_lie_in_it() -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    shot = shot_of(x=x)
    shot.outputs = {"out": y}
    groups = Names(shot).split(2, memory.extent(x) | memory.extent(y))
    assert {(g.owner, g.buffer): g.region.bytes for g in groups} == {(2, "x"): 32, (2, "out"): 32}
    assert [g.buffer for g in Names(shot).split(0, Region.span(1 << 40, 4))] == ["scratch of memory"]
