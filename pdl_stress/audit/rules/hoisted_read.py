"""A read through the non-coherent cache before the wait: mostly one that the compiler moved there."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, by_operand, synchronous
from pdl_stress.audit.opcodes import Access
from pdl_stress.audit.states import Cause

ID = "hoisted-read"


def check(case: Case) -> Iterator[Finding]:
    touches = [t for t in synchronous(case.early(Cause.EARLY, Access.READ)) if t.non_coherent]
    yield from by_operand(
        case, ID, touches, "{operand} may be read before the wait, by a load that the compiler is free to move"
    )


RULE = Rule(
    ID,
    "a load that the compiler may move stands before the wait",
    "A load of memory that is promised constant (`const __restrict__`, `__ldg`, ld.global.nc) is not held by a wait, a "
    'barrier or a "memory" clobber. Take `__restrict__` or `const` away from operands that an earlier kernel writes.',
    "F14",
    "k(const float* __restrict__ x) { for (...) { griddepcontrol.wait; s += x[i]; } }",
    Severity.ERROR,
    check,
)
