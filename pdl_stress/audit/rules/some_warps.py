"""Threads that neither wait nor are ordered behind one that does."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, by_operand
from pdl_stress.audit.states import Cause

ID = "waits-in-some-warps"


def check(case: Case) -> Iterator[Finding]:
    yield from by_operand(
        case,
        ID,
        case.early(Cause.WARPS),
        "{operand} may be touched by threads that do not wait, with no barrier behind those that do",
    )


RULE = Rule(
    ID,
    "some warps wait, others touch operands without an order",
    "The wait holds the thread that executes it and no other (R6). Let every thread that touches dependent operands "
    "wait, or put a barrier between the wait and the others' accesses.",
    "F04",
    "if (warp == 0) griddepcontrol.wait; y[i] = x[i];",
    Severity.ERROR,
    check,
)
