"""The rules. Each module has one: its id, what it says, the fault that it finds, an example, and its check."""

from __future__ import annotations

from pdl_stress.audit.findings import Case, Finding, Rule
from pdl_stress.audit.rules import (
    async_before_wait,
    attribute_without_wait,
    contract_mismatch,
    exits_without_waiting,
    hoisted_read,
    never_waits,
    no_pdl_code,
    non_coherent_after_wait,
    reads_before_wait,
    some_paths,
    some_warps,
    stores_after_trigger,
    trigger_before_wait,
    trigger_late,
    trigger_without_wait,
    undecided,
    updates_before_wait,
    wait_without_trigger,
    writes_before_wait,
)

_MODULES = (
    reads_before_wait,
    hoisted_read,
    writes_before_wait,
    updates_before_wait,
    async_before_wait,
    some_paths,
    some_warps,
    never_waits,
    attribute_without_wait,
    contract_mismatch,
    trigger_without_wait,
    undecided,
    exits_without_waiting,
    wait_without_trigger,
    trigger_before_wait,
    stores_after_trigger,
    trigger_late,
    non_coherent_after_wait,
    no_pdl_code,
)

RULES: dict[str, Rule] = {module.RULE.id: module.RULE for module in _MODULES}


def findings(case: Case) -> list[Finding]:
    """What the rules find in a kernel, worst first; one finding for each rule and subject."""
    found = {f.fingerprint: f for rule in RULES.values() for f in rule.check(case)}
    return sorted(found.values(), key=lambda finding: finding.severity)
