"""A wait in a kernel that never triggers."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, about_kernel

ID = "wait-without-trigger"


def check(case: Case) -> Iterator[Finding]:
    if case.kernel.waits and not case.kernel.triggers:
        yield about_kernel(case, ID, "it waits and never triggers: the next kernel starts when it exits", Severity.NOTE)


RULE = Rule(
    ID,
    "a wait and no trigger",
    "Correct, and less overlap than there could be: dependents are released when the CTAs exit (R5).",
    "F16",
    "griddepcontrol.wait; y[i] = x[i];",
    Severity.NOTE,
    check,
)
