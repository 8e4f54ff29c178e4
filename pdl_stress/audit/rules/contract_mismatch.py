"""The machine code against the declared contract."""

from __future__ import annotations

from collections.abc import Iterator

from pdl_stress.audit.derive import trigger_of
from pdl_stress.audit.findings import Case, Finding, Rule, Severity, about_kernel
from pdl_stress.audit.opcodes import Access
from pdl_stress.contract import Trigger, Wait

ID = "contract-mismatch"


def check(case: Case) -> Iterator[Finding]:
    if case.declared is None:
        return
    contract, kernel = case.declared.contract, case.kernel
    if contract.wait is Wait.NEVER and kernel.waits:
        yield about_kernel(case, ID, "it waits, and its contract says never", Severity.ERROR, kernel.waits, "wait")
    found = trigger_of(kernel)
    if found not in (None, contract.trigger) and {found, contract.trigger} != {Trigger.ENTRY, Trigger.BEFORE_STORES}:
        yield about_kernel(
            case, ID, f"it triggers {found}, and its contract says {contract.trigger}", Severity.ERROR, kernel.triggers,
            "trigger",
        )  # fmt: skip
    if contract.fence and not all(mark.fenced for mark in kernel.triggers):
        yield about_kernel(
            case, ID, "its contract says that a fence stands before the trigger, and none does", Severity.ERROR,
            kernel.triggers, "fence",
        )  # fmt: skip
    for touch in kernel.touches:
        operands = [case.declared.operand(o.ordinal) for o in touch.origins if o.kind in ("parameter", "loaded")]
        known = {*contract.reads} if touch.access is Access.READ else {*contract.writes}
        if operands and not set(operands) & (known | case.declared.ignored):
            yield about_kernel(
                case, ID, f"it {touch.access}s {operands[0]}, which its contract does not say", Severity.ERROR, [touch],
                f"{touch.access} {operands[0]}",
            )  # fmt: skip


RULE = Rule(
    ID,
    "the machine code is not what the contract says",
    "Another trigger, a missing fence, a wait where none was declared, or an operand that is not in the contract: what "
    "the model proved from the contract does not hold for this code.",
    "F03, F28",
    "contract: reads x; code: reads x and scale",
    Severity.ERROR,
    check,
)
