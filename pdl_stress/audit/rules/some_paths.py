"""A way around the wait that a whole CTA may take."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, by_operand
from pdl_stress.audit.states import Cause

ID = "waits-on-some-paths"


def check(case: Case) -> Iterator[Finding]:
    yield from by_operand(
        case, ID, case.early(Cause.PATH), "{operand} may be touched on a path that goes around the wait"
    )


RULE = Rule(
    ID,
    "the wait stands on some paths only",
    "A condition decides whether the kernel waits, and it touches operands where it did not. Wait on every path.",
    "F05",
    "if (flag) griddepcontrol.wait; y[i] = x[i];",
    Severity.ERROR,
    check,
)
