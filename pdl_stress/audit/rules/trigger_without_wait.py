"""A trigger in a kernel that never waits."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, about_kernel

ID = "trigger-without-wait"


def check(case: Case) -> Iterator[Finding]:
    unsaid = not case.strict and case.attribute is None and case.declared is None
    if case.kernel.triggers and not case.kernel.waits and unsaid:
        yield about_kernel(
            case,
            ID,
            "it triggers and never waits: right only if it is never launched with the PDL attribute",
            Severity.REVIEW,
            case.kernel.triggers,
        )


RULE = Rule(
    ID,
    "a trigger and no wait",
    "A kernel that only triggers is fine as the first of a chain. Launched with the attribute it is ordered behind "
    "nothing.",
    "F02, F17",
    "y[i] = x[i]; griddepcontrol.launch_dependents;",
    Severity.REVIEW,
    check,
)
