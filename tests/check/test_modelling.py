"""What the rules say of measured contracts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdl_stress.modelling import OVERWRITTEN, READ, WRITTEN_TWICE, Node, Order, unpromised

KINDS = (READ, OVERWRITTEN, WRITTEN_TWICE)


def kernel(*, overlaps: bool = True, waits: bool = True) -> Node:
    return Node("k", overlaps, waits)


@pytest.mark.parametrize("what", KINDS)
def test_a_neighbour_that_waits_keeps_every_order_and_one_that_is_early_keeps_none(what: str) -> None:
    nodes = [kernel(), kernel()]
    late, early = (Order(what, 1, 2, "x", before) for before in (False, True))
    assert unpromised(nodes, [late]) == []
    assert unpromised(nodes, [early]) == [early]
    assert unpromised(nodes, [late, early]) == [early], "one order says nothing of another"


@pytest.mark.parametrize("what", KINDS)
def test_behind_a_kernel_that_never_waits_a_wait_covers_only_that_one(what: str) -> None:
    """R8: direct prerequisites only."""
    nodes = [kernel(), kernel(waits=False), kernel()]
    skips, next_to_it = Order(what, 1, 3, "x", False), Order(what, 2, 3, "y", False)
    assert unpromised(nodes, [skips, next_to_it]) == [skips]
    assert unpromised([kernel(), kernel(), kernel()], [skips, next_to_it]) == []


def test_the_inputs_are_a_node_like_the_others() -> None:
    order = Order(READ, 0, 2, "x", False)
    assert unpromised([kernel(), kernel()], [order]) == []
    assert unpromised([kernel(waits=False), kernel()], [order]) == [order]


@given(
    st.lists(st.booleans(), min_size=2, max_size=6),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=5),
)
def test_an_order_is_promised_if_and_only_if_the_wait_covers_it(
    waits: list[bool], wanted: list[tuple[str, int, int, bool]]
) -> None:
    """In a chain of programmatic edges: the later one touches it behind its wait, and so does everyone between."""
    nodes = [kernel(waits=one) for one in waits]
    inside = [(what, a, b, early) for what, a, b, early in wanted if a < b <= len(nodes)]
    orders = [Order(what, a, b, "x", early) for what, a, b, early in inside]
    promised = [
        not order.early and waits[order.later - 1] and all(waits[k - 1] for k in range(order.earlier + 1, order.later))
        for order in orders
    ]
    assert unpromised(nodes, orders) == [order for order, good in zip(orders, promised, strict=True) if not good]
