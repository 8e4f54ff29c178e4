"""What the audit could not decide: said, never passed over."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, about_kernel
from pdl_stress.audit.kernel import When

ID = "undecided"


def check(case: Case) -> Iterator[Finding]:
    if not case.kernel.waits:
        return
    touches = [t for t in case.kernel.touches if t.when is When.UNKNOWN and not case.allowed(t)]
    why = f" ({'; '.join(case.kernel.notes[:3])})" if case.kernel.notes else ""
    if case.kernel.blind:
        yield about_kernel(case, ID, f"there may be accesses that were not seen{why}", Severity.UNKNOWN, (), "not seen")
    if touches:
        operands = ", ".join(sorted({case.subject(touch) for touch in touches}))
        yield about_kernel(
            case, ID, f"not decided whether {operands} may be touched before the wait{why}", Severity.UNKNOWN, touches
        )


RULE = Rule(
    ID,
    "not decided",
    "The order hangs on something that the audit does not follow: an mbarrier of a ring, a call, a condition that "
    "changes in a loop. docs/audit.md lists what it cannot see; the GPU checks can.",
    "-",
    "while (!try_wait(full[stage])); y[i] = ...;",
    Severity.UNKNOWN,
    check,
)
