"""A read before the wait."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, by_operand, synchronous
from pdl_stress.audit.opcodes import Access
from pdl_stress.audit.states import Cause

ID = "reads-before-wait"


def check(case: Case) -> Iterator[Finding]:
    touches = [t for t in synchronous(case.early(Cause.EARLY, Access.READ)) if not t.non_coherent]
    yield from by_operand(case, ID, touches, "{operand} may be read before the wait")


RULE = Rule(
    ID,
    "a dependent operand is read before the wait",
    "Until its wait returns, a kernel may see old memory in whatever an earlier kernel writes (R1). Move the read "
    "behind griddepcontrol.wait, or declare the operand independent if no kernel in flight can write it.",
    "F01",
    "int n = *count; griddepcontrol.wait;",
    Severity.ERROR,
    check,
)
