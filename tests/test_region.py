"""Sets of bytes as masked words: every operation against plain Python sets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdl_stress.region import FULL, WORD, Region

SIZE = 120
sets = st.sets(st.integers(0, SIZE - 1))


def of(numbers: set[int]) -> Region:
    return Region.union(Region.span(number, 1) for number in sorted(numbers))


def numbers_of(region: Region) -> set[int]:
    return {start + i for start, size in region.spans() for i in range(size)}


@given(sets)
def test_a_region_holds_the_bytes_that_it_was_made_of(some: set[int]) -> None:
    region = of(some)
    assert numbers_of(region) == some
    assert region.bytes == len(some)
    assert bool(region) is bool(some)
    assert list(region.addresses) == sorted({number // WORD * WORD for number in some})
    assert all(mask for mask in region.masks)


@given(sets, sets)
def test_union_intersection_difference(one: set[int], two: set[int]) -> None:
    a, b = of(one), of(two)
    assert numbers_of(a | b) == one | two
    assert numbers_of(a & b) == one & two
    assert numbers_of(a - b) == one - two
    assert (a == b) is (one == two)


@given(st.integers(0, SIZE), st.integers(0, 60))
def test_a_span(start: int, size: int) -> None:
    assert Region.span(start, size).spans() == ([(start, size)] if size else [])


@given(sets, st.integers(1, 20), sets)
def test_small_gaps_are_filled_but_for_what_is_foreign(some: set[int], gap: int, foreign: set[int]) -> None:
    wanted = set(some)
    ordered = sorted(some)
    for before, after in pairwise(ordered):
        if after - before - 1 <= gap:
            wanted |= set(range(before + 1, after)) - foreign
    assert numbers_of(of(some).filled(gap, of(foreign))) == wanted


@given(sets, sets)
def test_places(some: set[int], more: set[int]) -> None:
    part, whole = of(some), of(some | more)
    places = part.places_in(whole)
    assert np.array_equal(whole.addresses[places], part.addresses)


def test_a_region_that_is_no_part_has_no_places() -> None:
    with pytest.raises(ValueError, match="words that the other has not"):
        Region.span(0, 40).places_in(Region.span(0, 16))
    with pytest.raises(ValueError, match="words"):
        Region.span(64, 4).places_in(Region.span(0, 16))


def test_words_in_any_order_and_empty_ones() -> None:
    region = Region.of([48, 0, 16], [1, FULL, 0])
    assert list(region.addresses) == [0, 48]
    assert list(region.masks) == [FULL, 1]
    assert region.bits[1].tolist() == [True] + [False] * 15


def test_high_addresses_keep_all_their_bits() -> None:
    address = 0x7F12_3456_789A
    assert Region.span(address, 3).spans() == [(address, 3)]
