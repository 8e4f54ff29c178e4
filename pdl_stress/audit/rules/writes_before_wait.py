"""A write before the wait."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, by_operand, synchronous
from pdl_stress.audit.opcodes import Access
from pdl_stress.audit.states import Cause

ID = "writes-before-wait"


def check(case: Case) -> Iterator[Finding]:
    touches = synchronous(case.early(Cause.EARLY, Access.WRITE))
    yield from by_operand(case, ID, touches, "{operand} may be written before the wait")


RULE = Rule(
    ID,
    "an operand is written before the wait",
    "The kernel before may still read that memory, or write it later (R1). Move the store behind the wait.",
    "F08, F09",
    "*done = 0; griddepcontrol.wait;",
    Severity.ERROR,
    check,
)
