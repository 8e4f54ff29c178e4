"""Who is ordered behind whom at a barrier. Claims are made only where they follow; else the answer is *unknown*.

A thread that passes a barrier together with one that has waited is ordered behind that wait (R6). It takes a thread
that is *sure* to have waited: one whose role (a test of thread indices) is held by no state that has not waited, under
conditions that the whole CTA shares. Assumed: a role that the code tells apart is held by some thread of every CTA, and
threads that meet at one barrier instruction meet there the same number of times.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from pdl_stress.audit.conditions import Facts, Literal
from pdl_stress.audit.expressions import Expression, Scope
from pdl_stress.audit.states import State, Status

WARP = 32


def behind_barrier(state: State, arriving: Iterable[State], elsewhere: Iterable[State]) -> Status:
    """The status of a thread that passes a barrier of its CTA.

    arriving: the states of the threads at this barrier instruction; elsewhere: at others of the same barrier.
    """
    if state.status.ordered:
        return state.status
    here = [other for other in arriving if not _other_cta(state, other)]
    waiters = [other for other in here if other.status.ordered]
    if any(_sure(waiter, state, here) for waiter in waiters):
        return Status.BEHIND
    if waiters or any(other.status is Status.UNKNOWN for other in here):
        return Status.UNKNOWN
    if any(other.status is not Status.NOT and not _other_cta(state, other) for other in elsewhere):
        return Status.UNKNOWN
    return state.status


class Phase(Enum):
    """Which phase of an mbarrier a thread waits for when it first waits on it."""

    FIRST = "first"
    BEFORE = "before"
    """The one before the first: on a fresh mbarrier such a wait returns at once (PTX ISA, `mbarrier.test_wait`)."""
    UNKNOWN = "unknown"


def behind_mbarrier(state: State, arriving: Iterable[State], phase: Phase) -> Status:
    """The status of a thread behind a wait on an mbarrier, the first time that it waits there.

    arriving: the states of the threads at every place that may arrive on it.
    """
    if state.status.ordered or phase is Phase.BEFORE:
        return state.status
    here = [other for other in arriving if not _other_cta(state, other)]
    if here and phase is Phase.FIRST and all(other.status.ordered for other in here):
        return Status.BEHIND
    return Status.UNKNOWN if any(other.status is not Status.NOT for other in here) else state.status


def behind_warp(state: State, arriving: Iterable[State]) -> list[State]:
    """The states of a thread that is held until the rest of its warp has come: some warps may hold a waiter."""
    if state.status.ordered:
        return [state]
    here = [other for other in arriving if not _other_cta(state, other)]
    rest, ordered = [state], []
    for waiter in (other for other in here if other.status.ordered):
        whole = _whole_warps(waiter.facts)
        if whole is None or not _excluded(waiter, here):
            if _uncertain(waiter.facts):
                rest = [part.but(Status.UNKNOWN) for part in rest]
            continue
        inside, outside = whole
        for part in rest:
            facts = part.facts.plus(inside)
            if facts is not None:
                ordered.append(State(facts, Status.BEHIND, part.cause, part.triggered))
        rest = [
            State(facts, part.status, part.cause, part.triggered)
            for part in rest
            for case in outside
            if (facts := part.facts.plus(case)) is not None
        ]
    return list(dict.fromkeys(ordered + rest))


def _other_cta(a: State, b: State) -> bool:
    """Whether the two cannot be threads of one CTA: they saw a shared condition differently."""
    return a.facts.only(Scope.CTA).contradicts(b.facts.only(Scope.CTA))


def _sure(waiter: State, state: State, here: list[State]) -> bool:
    """Whether a thread like `waiter` is sure to be there, and to have waited, whenever one like `state` is."""
    shared = waiter.facts.only(Scope.CTA)
    if waiter.facts.only(Scope.UNKNOWN).known or not state.facts.implies(shared):
        return False
    return _excluded(waiter, here)


def _excluded(waiter: State, here: list[State]) -> bool:
    """Whether no thread with the facts of `waiter` can be one that has not waited."""
    return all(other.status.ordered or other.facts.contradicts(waiter.facts) for other in here)


def _uncertain(facts: Facts) -> bool:
    return bool(facts.only(Scope.UNKNOWN).known)


def _whole_warps(facts: Facts) -> tuple[tuple[Literal, ...], list[tuple[Literal, ...]]] | None:
    """The warps that hold a thread with these facts: as a case, and the cases of all others. None: not known."""
    lanes, index = False, None
    for literal in facts.known:
        if literal.subject.scope is Scope.UNKNOWN:
            return None
        if literal.subject.scope is not Scope.THREAD:
            continue
        if literal.subject.op == "thread" and literal.subject.args[0] == "TID.X":
            index = literal
        elif _of_lane(literal.subject):
            lanes = True
        else:
            return None
    if index is None:
        return ((), []) if lanes else None
    low, high = index.low // WARP * WARP, index.high // WARP * WARP + WARP - 1
    if lanes and (low != index.low or high != index.high):
        return None
    inside = (Literal(index.subject, low, high),)
    return inside, [(Literal(index.subject, 0, low - 1),), (Literal(index.subject, high + 1, 1 << 30),)]


def _of_lane(subject: Expression) -> bool:
    """Whether it tells the lanes of a warp apart, alike in every warp."""
    if subject.op == "name":
        return subject.args[0] == "elected"
    if subject.op == "thread":
        return subject.args[0] == "LANEID"
    parts = subject.parts()
    return subject.op == "and" and parts[0].op == "thread" and parts[1].number is not None and parts[1].number < WARP
