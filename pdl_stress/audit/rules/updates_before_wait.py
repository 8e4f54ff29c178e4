"""An atomic or a reduction before the wait."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, by_operand, synchronous
from pdl_stress.audit.opcodes import Access
from pdl_stress.audit.states import Cause

ID = "updates-before-wait"


def check(case: Case) -> Iterator[Finding]:
    touches = synchronous(case.early(Cause.EARLY, Access.UPDATE))
    yield from by_operand(case, ID, touches, "{operand} may be updated atomically before the wait")


RULE = Rule(
    ID,
    "an atomic update before the wait",
    "A counter or semaphore that the kernel before still uses is counted twice, or reset too early.",
    "F10",
    "atomicExch(counter, 0); griddepcontrol.wait;",
    Severity.ERROR,
    check,
)
