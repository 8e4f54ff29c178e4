"""Every trigger behind the last store."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, about_kernel
from pdl_stress.audit.opcodes import Access

ID = "trigger-late"


def check(case: Case) -> Iterator[Finding]:
    stores = [touch for touch in case.kernel.touches if touch.access is not Access.READ]
    if case.kernel.triggers and case.kernel.waits and stores and not any(touch.after_trigger for touch in stores):
        yield about_kernel(
            case, ID, "it triggers after its last store: little is left to overlap with", Severity.NOTE,
            case.kernel.triggers,
        )  # fmt: skip


RULE = Rule(
    ID,
    "the trigger comes last",
    "A dependent kernel that waits does not need the stores to be done at the trigger (R1, R2): trigger earlier, and "
    "its start is hidden. A consumer that does not wait would need this order, and more (R3).",
    "F20",
    "y[i] = x[i]; griddepcontrol.launch_dependents;",
    Severity.NOTE,
    check,
)
