"""A trigger by a thread that has not waited."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, about_kernel
from pdl_stress.audit.states import Status

ID = "trigger-before-own-wait"


def check(case: Case) -> Iterator[Finding]:
    marks = [m for m in case.kernel.triggers if any(state.status is Status.NOT for state in m.states)]
    if case.kernel.waits and marks:
        yield about_kernel(
            case,
            ID,
            "it may trigger before it has waited: a successor that skips its own wait runs beside this kernel's "
            "predecessors",
            Severity.NOTE,
            marks,
        )


RULE = Rule(
    ID,
    "a trigger before the own wait",
    "Legal and common. A successor that reads data of two kernels ago and leaves its wait out, because that data is "
    "old, is then not ordered behind the kernel that wrote it.",
    "F07",
    "griddepcontrol.launch_dependents; griddepcontrol.wait;",
    Severity.NOTE,
    check,
)
