"""Launched with the attribute, and no wait in its machine code: needs to be told how it is launched."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, about_kernel

ID = "attribute-without-wait"


def check(case: Case) -> Iterator[Finding]:
    if case.attribute and not case.kernel.waits:
        yield about_kernel(
            case, ID, "it is launched with the PDL attribute, and its machine code holds no wait", Severity.ERROR
        )


RULE = Rule(
    ID,
    "launched with the attribute, never waits",
    "The launch lets the kernel start while earlier ones run, and nothing in it waits for them. Take the attribute "
    "away, or add the wait.",
    "F02, F03",
    "programmaticStreamSerializationAllowed = 1, kernel without griddepcontrol.wait",
    Severity.ERROR,
    check,
)
