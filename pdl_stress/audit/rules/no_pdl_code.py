"""Neither wait nor trigger: listed, so that a kernel whose wait was compiled out does not go unseen."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, about_kernel

ID = "no-pdl-code"


def check(case: Case) -> Iterator[Finding]:
    kernel = case.kernel
    if not kernel.waits and not kernel.triggers and not case.strict and case.attribute is None and not case.declared:
        yield about_kernel(case, ID, "it neither waits nor triggers", Severity.NOTE)


RULE = Rule(
    ID,
    "no PDL code",
    "Right if the kernel is never launched with the PDL attribute. With --launches the audit knows how it is.",
    "F03",
    "y[i] = x[i];",
    Severity.NOTE,
    check,
)
