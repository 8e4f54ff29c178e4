"""Conditions, facts and barriers: the logic under the audit, without machine code."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdl_stress.audit.barriers import Phase, behind_barrier, behind_mbarrier, behind_warp
from pdl_stress.audit.conditions import Conditions, Facts, Literal, cases
from pdl_stress.audit.expressions import Expressions, Scope, compute, joined
from pdl_stress.audit.states import Cause, State, Status

MADE = Expressions()
TESTS = Conditions(MADE)
TID = MADE.make("thread", "TID.X", scope=Scope.THREAD, stable=True)
FLAG = MADE.make("cell", 0, 0x228, scope=Scope.CTA, stable=True)
LOADED = MADE.make("name", "R2@0", scope=Scope.UNKNOWN, stable=True)
ELECTED = MADE.make("name", "elected", scope=Scope.THREAD, stable=True)
IS_SET = TESTS.negated(TESTS.equal(FLAG, MADE.number(0)))


def value(expression, tid):
    """The expression as a number for one thread."""
    if expression is TID:
        return tid
    if expression.number is not None:
        return expression.number
    return compute(expression, [value(part, tid) for part in expression.parts()])


def holds(test, tid):
    parts = test.parts()
    if test.op in ("true", "false"):
        return test.op == "true"
    if test.op == "not":
        return not holds(parts[0], tid)
    if test.op == "both":
        return holds(parts[0], tid) and holds(parts[1], tid)
    a, b = (value(part, tid) for part in parts)
    if test.op == "less":
        a, b = (n - (1 << 32) if n >> 31 else n for n in (a, b))
    return a == b if test.op == "equal" else a < b


def agrees(facts, tid):
    return all(
        literal.low <= (n - (1 << 32) if (n := value(literal.subject, tid)) >> 31 else n) <= literal.high
        for literal in facts.known
    )


indices = st.sampled_from(
    [
        TID,
        MADE.shifted("shr", TID, 5),
        MADE.shifted("shr", TID, 7),
        MADE.masked(TID, MADE.number(31)),
        MADE.masked(TID, MADE.number(0x3E0)),
        MADE.masked(TID, MADE.number(~31)),
        MADE.add(TID, MADE.number(-64)),
        MADE.add(MADE.shifted("shr", TID, 5), MADE.number(-4)),
        MADE.shifted("shl", MADE.shifted("shr", TID, 5), 3),
    ]
)
comparisons = st.builds(
    lambda how, index, number, signed, swapped: TESTS.compared(
        how, *((MADE.number(number), index) if swapped else (index, MADE.number(number))), signed
    ),
    st.sampled_from(["LT", "LE", "GT", "GE", "EQ", "NE"]),
    indices,
    st.sampled_from([0, 1, 2, 4, 7, 31, 32, 63, 64, 96, 255, 1000]),
    st.booleans(),
    st.booleans(),
)
conditions = st.recursive(
    comparisons,
    lambda inner: (
        st.builds(TESTS.both, inner, inner) | st.builds(TESTS.either, inner, inner) | st.builds(TESTS.negated, inner)
    ),
    max_leaves=3,
)


@settings(max_examples=300, deadline=None)
@given(conditions, st.booleans())
def test_a_condition_is_split_into_cases_of_exactly_the_threads_that_it_holds_for(test, wanted):
    found = cases(test, wanted)
    if found is None:
        return
    facts = [Facts().plus(case) for case in found]
    for tid in (*range(130), 255, 256, 511, 992, 999, 1000, 1001, 1023):
        inside = [one for one in facts if one is not None and agrees(one, tid)]
        assert len(inside) == (holds(test, tid) == wanted), (str(test), tid)


@settings(max_examples=200, deadline=None)
@given(conditions, conditions)
def test_facts_contradict_only_what_no_thread_can_have(first, second):
    for a, b in itertools.product(cases(first, True) or (), cases(second, True) or ()):
        one = Facts().plus(a)
        if one is not None and one.plus(b) is None:
            assert not any(holds(first, tid) and agrees(one, tid) and all_hold(b, tid) for tid in range(1024))


def all_hold(case, tid):
    return agrees(Facts(frozenset(case)), tid)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 255), st.lists(st.booleans(), min_size=3, max_size=3))
def test_a_truth_table_is_read_as_the_hardware_does(table, inputs):
    literals = [TESTS.literal(one) for one in inputs]
    row = inputs[0] * 4 + inputs[1] * 2 + inputs[2]
    assert TESTS.of_table(table, literals).op == ("true" if table >> row & 1 else "false")


def test_a_table_of_one_input_is_that_input():
    true = TESTS.literal(True)
    assert TESTS.of_table(0x80, [true, true, IS_SET]) is IS_SET
    assert TESTS.of_table(0x08, [true, true, true]).op == "false"


def test_facts_of_a_shared_condition_contradict_each_other():
    yes, no = (Facts().plus(cases(IS_SET, wanted)[0]) for wanted in (True, False))
    assert yes.contradicts(no)
    assert not yes.contradicts(Facts())
    assert yes.implies(Facts())
    assert not Facts().implies(yes)


def test_a_lane_follows_from_the_thread():
    lane = MADE.masked(TID, MADE.number(31))
    first = Facts().plus((Literal(TID, 0, 0),))
    assert first.plus((Literal(lane, 1, 31),)) is None
    assert first.plus((Literal(lane, 0, 0),)) is not None


def test_scopes_join():
    assert joined([Scope.CONSTANT, Scope.CTA]) is Scope.CTA
    assert joined([Scope.THREAD, Scope.CTA]) is Scope.UNKNOWN
    assert MADE.add(TID, MADE.number(3)).scope is Scope.THREAD
    assert MADE.add(MADE.add(TID, MADE.number(3)), MADE.number(-3)) is TID


# --- barriers ---------------------------------------------------------------------------------------------------------


def state(status, *literals):
    facts = Facts().plus(tuple(literals))
    assert facts is not None
    return State(facts, status)


WARP0, OTHERS = Literal(TID, 0, 31), Literal(TID, 32, 1023)
SET, CLEAR = (cases(IS_SET, wanted)[0][0] for wanted in (True, False))


def test_a_barrier_orders_the_others_behind_a_warp_that_waited():
    waiter, other = state(Status.WAITED, WARP0), state(Status.NOT, OTHERS)
    assert behind_barrier(other, [waiter, other], []) is Status.BEHIND
    assert behind_barrier(waiter, [waiter, other], []) is Status.WAITED


def test_a_barrier_without_a_waiter_orders_nothing():
    other = state(Status.NOT, OTHERS)
    assert behind_barrier(other, [other, state(Status.NOT, WARP0)], []) is Status.NOT


def test_a_waiter_under_a_condition_of_the_cta_orders_only_where_it_holds():
    waiter = state(Status.WAITED, WARP0, SET)
    here = [waiter, state(Status.NOT, OTHERS, SET), state(Status.NOT, CLEAR)]
    assert behind_barrier(here[1], here, []) is Status.BEHIND
    assert behind_barrier(here[2], here, []) is Status.NOT, "no thread of such a CTA has waited"


def test_a_waiter_that_may_not_have_waited_is_no_waiter():
    here = [state(Status.WAITED, WARP0), state(Status.NOT, WARP0), state(Status.NOT, OTHERS)]
    assert behind_barrier(here[2], here, []) is Status.UNKNOWN


def test_a_waiter_that_need_not_exist_decides_nothing():
    some = Literal(LOADED, 1, 1, ranged=False)
    here = [state(Status.WAITED, some), state(Status.NOT, Literal(LOADED, 0, 0, ranged=False))]
    assert behind_barrier(here[1], here, []) is Status.UNKNOWN


def test_a_waiter_at_another_instruction_of_the_barrier_decides_nothing():
    other = state(Status.NOT, OTHERS)
    assert behind_barrier(other, [other], [state(Status.WAITED, WARP0)]) is Status.UNKNOWN


def test_an_mbarrier_orders_behind_arrivals_that_all_waited():
    waiter, other = state(Status.WAITED, WARP0), state(Status.NOT, OTHERS)
    assert behind_mbarrier(other, [waiter], Phase.FIRST) is Status.BEHIND
    assert behind_mbarrier(other, [waiter], Phase.UNKNOWN) is Status.UNKNOWN
    assert behind_mbarrier(other, [waiter], Phase.BEFORE) is Status.NOT, "it returns at once"
    assert behind_mbarrier(other, [waiter, other], Phase.FIRST) is Status.UNKNOWN
    assert behind_mbarrier(other, [other], Phase.FIRST) is Status.NOT
    assert behind_mbarrier(other, [], Phase.FIRST) is Status.NOT


def test_a_warp_is_held_by_its_own_waiter_only():
    here = [state(Status.WAITED, Literal(TID, 0, 0)), state(Status.NOT, Literal(TID, 1, 1023))]
    after = behind_warp(here[1], here)
    assert {(one.status, one.facts.of(TID).low, one.facts.of(TID).high) for one in after} == {
        (Status.BEHIND, 1, 31),
        (Status.NOT, 32, 1023),
    }


def test_an_elected_waiter_holds_every_warp():
    here = [
        state(Status.WAITED, Literal(ELECTED, 1, 1, ranged=False)),
        state(Status.NOT, Literal(ELECTED, 0, 0, False)),
    ]
    assert [one.status for one in behind_warp(here[1], here)] == [Status.BEHIND]


def test_a_warp_is_not_held_where_it_is_not_known_which_threads_waited():
    here = [state(Status.WAITED, SET), state(Status.NOT, CLEAR)]
    assert behind_warp(here[1], here) == [here[1]]
    some = [state(Status.WAITED, Literal(LOADED, 1, 1, False)), state(Status.NOT, Literal(LOADED, 0, 0, False))]
    assert [one.status for one in behind_warp(some[1], some)] == [Status.UNKNOWN]


@pytest.mark.parametrize("status", list(Status))
def test_a_barrier_takes_nothing_away(status):
    one = State(status=status, cause=Cause.EARLY)
    assert behind_barrier(one, [one], []) >= status
    assert behind_mbarrier(one, [one], Phase.FIRST) >= status
    assert all(after.status >= status for after in behind_warp(one, [one]))
