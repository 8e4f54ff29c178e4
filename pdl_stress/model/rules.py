"""Rule sets: what PDL promises, and what one architecture was seen to do beyond that.

A rule set answers three questions that the documentation leaves open or denies. All other rules (R1, R2, R4, R6, R7,
R9) are the same in every set and live in :mod:`pdl_stress.model.events`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RuleSet:
    """Answers to the open questions of PDL.

    Args:
        transitive: R8. May a kernel rely on its wait (or full edge) covering the prerequisites *of its prerequisites*,
            even if a kernel between them never waited?
        trigger_orders: R3. Is what a CTA did before a trigger *without a release fence* visible to the dependent grid
            from its start?
        exit_orders: R5. Is what a CTA did before it exited visible to a dependent grid that was released by the exit
            and does not wait?
    """

    name: str
    transitive: bool
    trigger_orders: bool
    exit_orders: bool


DOCUMENTED = RuleSet("documented", transitive=False, trigger_orders=False, exit_orders=False)
"""What the PTX ISA, the CUDA Programming Guide and the runtime headers promise, and no more."""

OBSERVED_SM90 = RuleSet("observed:sm_90", transitive=True, trigger_orders=True, exit_orders=True)
"""What H200s were seen to do in every trial so far. Useful for predicting what a run can show; no promise."""

RULE_SETS = {rules.name: rules for rules in (DOCUMENTED, OBSERVED_SM90)}

OPEN_QUESTIONS = {
    "transitive": "R8: that a wait also covers the prerequisites of a prerequisite that did not wait is not promised",
    "trigger_orders": "R3: a trigger without a release fence promises no visibility of earlier work",
    "exit_orders": "R5: release at exit promises no visibility to a kernel that does not wait",
}
"""Why an outcome that only a permissive rule set forbids is *unpromised*."""
