"""No wait in a kernel that promises one, or that is launched with the attribute."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.findings import Case, Finding, Rule, Severity, about_kernel
from pdl_stress.contract import Wait

ID = "never-waits"


def check(case: Case) -> Iterator[Finding]:
    kernel = case.kernel
    if kernel.waits or case.attribute or not kernel.touches or all(map(case.allowed, kernel.touches)):
        return
    promised = case.declared is not None and case.declared.contract.wait is not Wait.NEVER
    if not promised and not case.strict:
        return
    said = "its contract says that it waits" if promised else "it touches global memory"
    yield about_kernel(case, ID, f"the machine code holds no wait, and {said}", Severity.ERROR, kernel.touches)


RULE = Rule(
    ID,
    "the kernel never waits",
    "Launched with the PDL attribute, such a kernel is ordered behind nothing. Often the wait was compiled out: an "
    "architecture guard, or a macro that was not defined.",
    "F02, F03",
    "#if __CUDA_ARCH__ >= 1000\n griddepcontrol.wait;\n#endif",
    Severity.ERROR,
    check,
)
