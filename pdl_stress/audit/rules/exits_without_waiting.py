"""A CTA may exit before any thread of it has waited."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, about_kernel
from pdl_stress.audit.states import Cause, Status

ID = "exits-without-waiting"


def check(case: Case) -> Iterator[Finding]:
    if not case.kernel.waits:
        return
    marks = [
        mark
        for mark in case.kernel.exits
        if any(state.status is Status.NOT and state.cause is not Cause.WARPS for state in mark.states)
    ]
    if marks:
        yield about_kernel(
            case,
            ID,
            "threads may exit without having waited; if a whole grid does, a later kernel's wait need not cover the "
            "kernels before this one",
            Severity.NOTE,
            marks,
        )


RULE = Rule(
    ID,
    "exits without waiting",
    "Whether a wait covers the prerequisites of a prerequisite that did not wait is not promised (R8). It matters only "
    "if every CTA may take that way.",
    "F06",
    "if (i >= n) return; griddepcontrol.wait;",
    Severity.NOTE,
    check,
)
