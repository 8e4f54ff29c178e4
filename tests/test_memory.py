"""Where a stand-in writes, and what a launch gives back. Laws on CPU tensors: nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdl_stress import Chain, DeviceError, KernelContract, Op, Step, UsageError, Wait
from pdl_stress.buffers import View
from pdl_stress.cuda.memory import WORD, Memory, launch

UNROLL = 2
INTEGERS = {2: torch.int16, 4: torch.int32}


def memory_of(chain: Chain) -> Memory:
    return Memory(chain, SimpleNamespace(device=torch.device("cpu")), 0, pool=UNROLL, unroll=UNROLL)


def library(reads: tuple[str, ...], writes: tuple[str, ...]) -> Op:
    contract = KernelContract(reads, writes)
    return Op("library", contract, lambda **_: None, contract)


def bytes_in(memory: Memory, view: View) -> set[int]:
    """Numbers of the arena's bytes that a view covers, by way of torch's own indexing."""
    memory.arena.zero_()
    tensor = memory.tensor(view.buffer.name)
    tensor.view(INTEGERS[tensor.element_size()])[view.slices] = -1
    found = set((memory.arena == 255).nonzero().reshape(-1).tolist())
    memory.arena.zero_()
    return found


def masks(table: torch.Tensor) -> list[tuple[int, int, int]]:
    """``(address, word, mask)`` of each entry, as ``csrc/harness.cu`` reads them."""
    return [(address, entry & 0xFFFFFFFF, entry >> 32) for address, entry in table.tolist()]


def written(memory: Memory, table: torch.Tensor, truth: torch.Tensor) -> dict[tuple[str, int], int]:
    """What the source kernel writes: byte by ``("arena", number)`` or ``("ring", number)``."""
    stores = {"arena": memory.arena, "ring": memory.ring}
    found: dict[tuple[str, int], int] = {}
    for address, word, mask in masks(table):
        (where,) = [
            (name, address - store.data_ptr())
            for name, store in stores.items()
            if store.data_ptr() <= address < store.data_ptr() + store.numel()
        ]
        for byte in range(WORD):
            if mask >> byte & 1:
                place = (where[0], where[1] + byte)
                assert place not in found, "each byte once"
                found[place] = int(truth[word * WORD + byte])
    return found


# --- views ---------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[slice, ...]:
    spans = [draw(st.tuples(st.integers(0, size - 1), st.integers(1, size))) for size in shape]
    return tuple(
        slice(start, max(start + 1, min(start + length, size)))
        for (start, length), size in zip(spans, shape, strict=True)
    )


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """One library step with one to three outputs, each a part of a buffer of its own; a later step may read some."""
    chain = Chain("c")
    hidden = chain.input("h", draw(SHAPES), draw(st.sampled_from(["bfloat16", "float32"])))
    count = draw(st.integers(1, 3))
    views, read = {}, []
    for number in range(count):
        dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
        buffer = chain.buffer(f"b{number}", draw(SHAPES), dtype)
        views[f"o{number}"] = buffer[draw(parts(buffer.shape))]
        if draw(st.booleans()):
            read.append(f"o{number}")
    chain.step("s", library(("a",), tuple(views)), a=hidden, **views)
    if read:
        out = chain.buffer("out", (3,), "float32")
        chain.step("t", library(tuple(read), ("o",)), **{name: views[name] for name in read}, o=out)
    return chain


LAW = settings(max_examples=150, deadline=None)


@LAW
@given(chain=chains())
def test_the_masks_of_a_scatter_table_cover_exactly_the_bytes_of_the_outputs_each_once(chain: Chain) -> None:
    memory = memory_of(chain)
    table = memory.scatter_table(chain["s"])
    assert table.dtype == torch.int64
    assert table.shape[1] == 2
    entries = masks(table)
    words = [word for _, word, _ in entries]
    assert len(set(words)) == len(words), "one thread a word"
    assert all(0 < mask <= 0xFFFF for _, _, mask in entries)
    assert all(address == memory.arena.data_ptr() + word * WORD for address, word, _ in entries)
    covered = [word * WORD + byte for _, word, mask in entries for byte in range(WORD) if mask >> byte & 1]
    expected = set().union(*(bytes_in(memory, view) for _, view in chain["s"].writes()))
    assert set(covered) == expected
    assert len(covered) == len(expected)


@LAW
@given(chain=chains())
def test_the_bytes_of_a_view_are_those_that_torch_would_write(chain: Chain) -> None:
    memory = memory_of(chain)
    for _, view in chain["s"].writes():
        found = memory._bytes_of(view).tolist()
        assert len(set(found)) == len(found)
        assert set(found) == bytes_in(memory, view)


@LAW
@given(chain=chains(), slot=st.none() | st.integers(0, UNROLL - 1), seed=st.integers(0, 99))
def test_a_stand_in_leaves_the_truth_where_its_readers_look_and_touches_nothing_else(
    chain: Chain, slot: int | None, seed: int
) -> None:
    """The source kernel, byte by byte: its outputs must be those that the step's own tensors would show."""
    memory, step = memory_of(chain), chain["s"]
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(1, 255, (memory.words * WORD,), dtype=torch.uint8, generator=generator)
    stored = written(memory, memory.scatter_table(step, slot), truth)
    for (name, place), value in stored.items():
        store = memory.arena if name == "arena" else memory.ring.view(-1)
        store[place] = value
    operands, size = memory.operands(step, 0, slot), 0
    for name, view in step.writes():
        want = memory.tensor(view.buffer.name, truth)[view.slices]
        got = operands[name]
        integer = INTEGERS[got.element_size()]
        assert torch.equal(got.contiguous().view(integer), want.contiguous().view(integer))
        size += want.numel() * want.element_size()
    touched = int((memory.arena != 0).sum()) + int((memory.ring != 0).sum())
    assert touched == len(stored) == size


# --- cases worth their names ---------------------------------------------------------------------------------------


def sliced(*outputs: tuple[int, int], rows: int = 8, columns: int = 1792) -> Chain:
    """A step that writes column slices of one buffer, which a later step reads whole."""
    chain = Chain("c")
    hidden, qkv = chain.input("h", (rows, 64), "bfloat16"), chain.buffer("qkv", (rows, columns), "bfloat16")
    views = {f"o{number}": qkv[:, start:stop] for number, (start, stop) in enumerate(outputs)}
    chain.step("s", library(("a",), tuple(views)), a=hidden, **views)
    out = chain.buffer("out", (rows, 4), "bfloat16")
    chain.step("t", library(tuple(views), ("o",)), **views, o=out)
    return chain


def test_a_slice_of_columns_of_eight_rows_is_eight_runs_of_whole_words() -> None:
    chain = sliced((1280, 1792))
    memory = memory_of(chain)
    start = memory.layout["qkv"][0]
    entries = masks(memory.scatter_table(chain["s"]))
    assert len(entries) == 8 * 512 * 2 // WORD
    assert {mask for _, _, mask in entries} == {0xFFFF}
    assert [word for _, word, _ in entries] == [
        (start + row * 1792 * 2 + 1280 * 2) // WORD + word for row in range(8) for word in range(64)
    ]


def test_a_slice_that_is_not_aligned_has_masks_at_its_borders() -> None:
    """Three bfloat16 columns from the seventh on: bytes 14 to 19 of each row of 32 bytes."""
    chain = sliced((7, 10), rows=2, columns=16)
    memory = memory_of(chain)
    first = memory.layout["qkv"][0] // WORD
    entries = [(word - first, mask) for _, word, mask in masks(memory.scatter_table(chain["s"]))]
    assert entries == [(0, 0b11 << 14), (1, 0b1111), (2, 0b11 << 14), (3, 0b1111)]


def test_two_outputs_that_share_a_word_are_one_entry() -> None:
    """Two threads that write one word one after the other would lose half of it."""
    chain = sliced((0, 3), (3, 8), rows=1, columns=8)
    memory = memory_of(chain)
    ((_, _, mask),) = masks(memory.scatter_table(chain["s"]))
    assert mask == 0xFFFF
    chain = sliced((0, 3), (5, 8), rows=1, columns=8)
    ((_, _, mask),) = masks(memory_of(chain).scatter_table(chain["s"]))
    assert mask == 0b1111_1100_0011_1111


def test_outputs_that_overlap_are_written_once() -> None:
    chain = sliced((0, 4), (2, 8), (0, 4), rows=1, columns=8)
    memory = memory_of(chain)
    assert [mask for _, _, mask in masks(memory.scatter_table(chain["s"]))] == [0xFFFF]


def test_in_a_ring_only_outputs_move_to_the_slot() -> None:
    """What a later step reads is shared by all replays; what nothing reads has a place for each."""
    chain = Chain("c")
    hidden = chain.input("h", (16,), "float32")
    x, y = chain.buffer("x", (16,), "float32"), chain.buffer("y", (16,), "float32")
    chain.step("s", library(("a",), ("o", "p")), a=hidden, o=x, p=y[4:8])
    chain.step("t", library(("a",), ("o",)), a=x, o=chain.buffer("z", (16,), "float32"))
    memory = memory_of(chain)
    (start, _), (begin, _) = memory.layout["x"], memory.layout["y"]
    for slot in range(UNROLL):
        entries = masks(memory.scatter_table(chain["s"], slot))
        assert [(address, word) for address, word, _ in entries] == [
            *((memory.arena.data_ptr() + start + 16 * n, start // WORD + n) for n in range(4)),
            (
                memory.ring[slot].data_ptr() + begin + 16 - memory.output_start * WORD,
                begin // WORD + 1,
            ),
        ]
    assert [address for address, _, _ in masks(memory.scatter_table(chain["s"]))] == [
        *(memory.arena.data_ptr() + start + 16 * n for n in range(4)),
        memory.arena.data_ptr() + begin + 16,
    ]


def test_tables_are_made_once_for_each_step_and_slot() -> None:
    chain = sliced((0, 8))
    memory = memory_of(chain)
    tables = [memory.scatter_table(chain[step], slot) for step in ("s", "t") for slot in (None, 0, 1)]
    again = [memory.scatter_table(chain[step], slot) for step in ("s", "t") for slot in (None, 0, 1)]
    assert all(a is b for a, b in zip(tables, again, strict=True)), "a graph holds their addresses"
    assert len({table.data_ptr() for table in tables}) == 6


def test_a_stand_in_writes_where_its_step_does() -> None:
    """The table is made for the stand-in, whose operands are the outputs alone."""
    chain = sliced((7, 10), (12, 16), rows=2, columns=16)
    memory = memory_of(chain)
    stand_in = chain.varied({"s": {"trigger": "entry", "delay_us": 1.0}})["s"]
    assert stand_in.source
    assert torch.equal(memory_of(chain).scatter_table(stand_in)[:, 1], memory.scatter_table(chain["s"])[:, 1])


# --- launching -----------------------------------------------------------------------------------------------------


def step_of(op: Op, **fields: Any) -> tuple[Step, dict[str, torch.Tensor]]:
    chain = Chain("c")
    buffers = {
        "a": chain.input("a", (2, 4), "float32"),
        **{name: chain.buffer(name, (2, 4), "float32") for name in op.contract.writes},
    }
    step = replace(chain.step("s", op, **buffers), **fields)
    return step, {name: torch.zeros(2, 4) for name in op.contract.operands}


def returning(run: Callable[..., Any], *returns: str, writes: tuple[str, ...] = ("o",)) -> Op:
    return replace(library(("a",), writes), run=run, returns=returns)


def test_what_an_op_returns_is_given_back_under_its_operands_name() -> None:
    calls: list[dict[str, Any]] = []

    def run(**given: Any) -> Any:
        calls.append(given)
        return torch.full((2, 4), 1.0), torch.full((2, 4), 2.0)

    step, operands = step_of(returning(run, "p", "o", writes=("o", "p", "q")), params={"eps": 1.0})
    found = launch(step, operands, pdl=True)
    assert {name: float(tensor[0, 0]) for name, tensor in found.items()} == {"p": 1.0, "o": 2.0}
    assert set(calls[0]) == {"a", "q", "pdl", "eps"}, "it is not given what it returns"
    assert calls[0]["pdl"] is True


def test_an_op_that_returns_one_tensor_need_not_wrap_it() -> None:
    step, operands = step_of(returning(lambda **_: torch.ones(2, 4), "o"))
    assert list(launch(step, operands, pdl=False)) == ["o"]


def test_what_an_op_returns_although_it_takes_its_output_is_ignored() -> None:
    step, operands = step_of(returning(lambda **_: torch.ones(9)))
    assert launch(step, operands, pdl=True) == {}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "returned 'o' as .*NoneType"),
        (torch.ones(2, 5), "returned 'o' as "),
        (torch.ones(2, 4, dtype=torch.float16), "returned 'o' as .*float16"),
        (torch.ones(4, 2).T, "returned 'o' as .*strides"),
        ((torch.ones(2, 4), torch.ones(2, 4)), r"returned 2 values, not \('o',\)"),
        ((), r"returned 0 values, not \('o',\)"),
    ],
    ids=["nothing", "shape", "dtype", "strides", "too many", "none"],
)
def test_a_result_that_the_chains_buffer_cannot_take_is_refused(result: Any, words: str) -> None:
    """The kernel would write the same numbers to other places."""
    step, operands = step_of(returning(lambda **_: result, "o"))
    with pytest.raises(UsageError, match=f"step 's': library {words}"):
        launch(step, operands, pdl=True)


@pytest.mark.parametrize(
    "part",
    [
        torch.ones(3, 4)[:2],
        torch.ones(3, 4)[1:],
        torch.ones(4, 2, 4)[2],
        torch.ones(9)[1:].view(2, 4),
        torch.ones(12)[:8].view(2, 4),
    ],
    ids=["first rows", "last rows", "one of several", "behind an element", "before some"],
)
def test_a_result_that_is_part_of_another_tensor_is_refused(part: torch.Tensor) -> None:
    """Its kernel writes the whole of it: led to the chain's buffer, it would write behind it."""
    step, operands = step_of(returning(lambda **_: part, "o"))
    assert part.shape == (2, 4)
    assert part.is_contiguous()
    with pytest.raises(UsageError, match=r"returned 'o' as .*; and it must be a tensor of its own, no part of another"):
        launch(step, operands, pdl=True)


def test_a_result_that_is_all_of_another_tensor_is_taken() -> None:
    for result in (torch.ones(8).view(2, 4), torch.ones(2, 1, 4)[:, 0], torch.ones(2, 4)[:]):
        step, operands = step_of(returning(lambda result=result, **_: result, "o"))
        assert launch(step, operands, pdl=True)["o"] is result


def test_strides_of_dimensions_of_one_row_do_not_matter() -> None:
    op = returning(lambda **_: torch.ones(4, 1).T, "o")
    step, operands = step_of(op)
    operands["o"] = torch.zeros(1, 4)
    assert torch.ones(4, 1).T.stride() != operands["o"].stride()
    assert list(launch(step, operands, pdl=True)) == ["o"]


@pytest.mark.parametrize("how", [{"delay_us": 1.0}, {"delay_us": 0.0}, {"stamps": torch.zeros(4)}])
def test_a_kernel_that_cannot_be_rebuilt_is_never_asked_to_delay_or_to_stamp(how: dict[str, Any]) -> None:
    """It would run as deployed, and an arm would be called delayed that is not."""
    step, operands = step_of(returning(lambda **_: pytest.fail("it ran")), delay_us=how.get("delay_us"))
    with pytest.raises(DeviceError, match="library has no delay point and no time stamps"):
        launch(step, operands, pdl=True, stamps=how.get("stamps"))


def test_a_kernel_that_can_be_rebuilt_is_told_how() -> None:
    calls: list[dict[str, Any]] = []
    op = replace(library(("a",), ("o",)), run=lambda **given: calls.append(given), waits=frozenset(Wait))
    step, operands = step_of(op, delay_us=1.5)
    assert launch(step, operands, pdl=False, stamps="stamps") == {}
    (given,) = calls
    assert (given["pdl"], given["delay_ns"], given["stamps"], given["contract"]) == (
        False,
        1500,
        "stamps",
        op.contract,
    )


def test_every_graded_buffer_has_words_of_its_own() -> None:
    chain = sliced((7, 10), rows=3, columns=13)
    memory = memory_of(chain)
    spans = sorted(memory.layout.values())
    assert all(start % WORD == 0 for start, _ in spans)
    assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))
    for buffer in chain.graded:
        assert memory.layout[buffer.name][1] == prod(buffer.shape) * 2


def test_a_constant_is_one_tensor_for_every_slot_of_the_ring_and_an_output_is_not() -> None:
    """An op may keep what it made for a weight; it must find it again inside a capture."""
    chain = Chain("chain")
    weight, out = chain.constant("w", (2, 8), "bfloat16"), chain.buffer("o", (2, 8), "bfloat16")
    chain.step("s", library(("a", "w"), ("o",)), a=chain.input("h", (2, 8), "bfloat16"), w=weight, o=out)
    memory, step = memory_of(chain), chain["s"]
    once, slots = memory.operands(step), [memory.operands(step, 0, slot) for slot in range(UNROLL)]
    assert all(operands["w"] is once["w"] for operands in slots)
    assert len({operands["o"].data_ptr() for operands in (once, *slots)}) == 1 + UNROLL
