"""A read through the non-coherent cache behind the wait."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, by_operand
from pdl_stress.audit.kernel import When

ID = "non-coherent-after-wait"


def check(case: Case) -> Iterator[Finding]:
    if not case.kernel.waits:
        return
    touches = [t for t in case.kernel.touches if t.non_coherent and t.when is When.AFTER and not case.allowed(t)]
    yield from by_operand(
        case, ID, touches, "{operand} is read behind the wait by a load that the compiler is free to move before it",
        Severity.NOTE,
    )  # fmt: skip


RULE = Rule(
    ID,
    "a movable load behind the wait",
    "This build has it behind the wait; another compiler, or another loop, may not. Take `__restrict__` or `const` "
    "away from operands that an earlier kernel writes.",
    "F14",
    "k(const float* __restrict__ x) { griddepcontrol.wait; y[i] = x[i]; }",
    Severity.NOTE,
    check,
)
