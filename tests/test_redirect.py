"""Pointers in the parameters of a kernel: which are replaced, and what is refused. No driver."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdl_stress import PdlStressError
from pdl_stress.cuda import redirect as module
from pdl_stress.cuda.redirect import _moved, redirect

ADDRESSES = st.sampled_from([0, 1, 0x7F00_0000_0000, 0x7F00_0000_0010, 0x7F00_0000_0100, 2**64 - 1])
WORDS = st.lists(ADDRESSES | st.integers(0, 2**64 - 1), max_size=6)
MOVES = st.dictionaries(ADDRESSES, ADDRESSES, max_size=3)


def packed(words: list[int]) -> bytes:
    return struct.pack(f"<{len(words)}Q", *words)


@given(words=WORDS, tail=st.binary(max_size=7), moves=MOVES, before=st.sets(ADDRESSES, max_size=2))
def test_exactly_the_aligned_words_that_are_an_old_address_are_replaced(
    words: list[int], tail: bytes, moves: dict[int, int], before: set[int]
) -> None:
    """At once, not one after the other: a new address may be another's old one."""
    found = set(before)
    assert _moved(packed(words) + tail, moves, found) == packed([moves.get(word, word) for word in words]) + tail
    assert found == before | (set(words) & set(moves))


@given(value=st.binary(max_size=40), moves=st.dictionaries(st.integers(0, 2**64 - 1), ADDRESSES, max_size=3))
def test_bytes_that_hold_no_old_address_stay(value: bytes, moves: dict[int, int]) -> None:
    words = {int.from_bytes(value[i : i + 8], "little") for i in range(0, len(value) - 7, 8)}
    found: set[int] = set()
    after = _moved(value, moves, found)
    assert len(after) == len(value)
    if not words & set(moves):
        assert (after, found) == (value, set())


def test_an_address_that_is_not_aligned_is_none() -> None:
    old = 0x7F12_3456_7890
    found: set[int] = set()
    value = b"\0" * 4 + packed([old]) + b"\0" * 4
    assert _moved(value, {old: 1}, found) == value
    assert found == set()


def test_an_address_inside_of_a_tensor_is_another_one() -> None:
    old = 0x7F12_3456_7890
    assert _moved(packed([old + 2]), {old: 1}, set()) == packed([old + 2])


# --- a step's kernels ----------------------------------------------------------------------------------------------


class Kernels:
    """Kernel nodes by number, with the bytes of their parameters; other nodes are not in it."""

    def __init__(self, **parameters: list[bytes]) -> None:
        self.parameters = parameters

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "kernel_of", lambda node: node if node in self.parameters else None)
        monkeypatch.setattr(module, "_parameters", lambda kernel: self.parameters[kernel])
        monkeypatch.setattr(module, "_set", self._set)

    def _set(self, kernel: Any, address: int) -> None:
        import ctypes

        old = self.parameters[kernel]
        pointers = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
        values = [ctypes.string_at(pointers[number] or 0, len(value)) for number, value in enumerate(old)]
        self.parameters[kernel] = values


def test_the_kernel_of_a_step_is_led_to_the_chains_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(
        kernel=[packed([5, 10, 20, 0]), b"\1\2\3\4", packed([10])],  # a struct, such as a tensor with its sizes
    )
    kernels.install(monkeypatch)
    redirect(["kernel"], {10: 1000, 20: 2000})
    assert kernels.parameters == {"kernel": [packed([5, 1000, 2000, 0]), b"\1\2\3\4", packed([1000])]}


@pytest.mark.parametrize("nodes", [[], ["kernel", "memset"], ["memset", "kernel"], ["kernel", "second"]])
def test_a_step_of_more_than_one_node_is_refused(nodes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A memset of the old place would clear nothing, and scratch memory may have had the result's old address."""
    kernels = Kernels(kernel=[packed([10])], second=[packed([10])])
    kernels.install(monkeypatch)
    with pytest.raises(PdlStressError, match=rf"^an op that returns its result launches {len(nodes)} nodes; only one"):
        redirect(nodes, {10: 1000})
    assert kernels.parameters == {"kernel": [packed([10])], "second": [packed([10])]}, "and nothing is changed"


@pytest.mark.parametrize(("nodes", "missing"), [(["kernel"], 1), (["memset"], 2)])
def test_a_result_that_stands_in_no_parameter_is_refused(
    nodes: list[str], missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a TMA descriptor would hold it; the buffer would stay poison."""
    kernels = Kernels(kernel=[packed([10])])
    kernels.install(monkeypatch)
    with pytest.raises(PdlStressError, match=rf"^{missing} returned tensor\(s\) stand in no parameter"):
        redirect(nodes, {10: 1000, 20: 2000})
