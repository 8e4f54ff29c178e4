"""Stores behind a trigger."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, by_operand
from pdl_stress.audit.opcodes import Access

ID = "stores-after-trigger"


def check(case: Case) -> Iterator[Finding]:
    touches = [touch for touch in case.kernel.touches if touch.after_trigger and touch.access is not Access.READ]
    yield from by_operand(
        case, ID, touches, "{operand} may be written after a trigger: only a consumer that waits may read it",
        Severity.NOTE,
    )  # fmt: skip


RULE = Rule(
    ID,
    "stores after the trigger",
    "Safe if every reader waits, or is ordered behind one that has (R2). The trigger says nothing about them (R3, R4).",
    "F11, F12",
    "griddepcontrol.launch_dependents; y[i] = x[i];",
    Severity.NOTE,
    check,
)
