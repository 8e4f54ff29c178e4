"""PDL on a CPU: from contracts to an order, or to a counterexample. No kernel runs and no driver is needed.

``rules`` names the rule sets, ``events`` turns a chain into an event structure, ``order`` decides exactly which
conflicting accesses are unordered, ``schedule`` plays random schedules over the same structure and watches what each
tile holds, ``judge`` combines them.

What it cannot see: anything the contracts do not say. Arithmetic, timing, residency (every grid is assumed to fit, so
overlap is always possible: R10) and races inside one kernel are outside the model.
"""

from .judge import Counterexample, Expectation, Judgement, expect, explain, judge
from .order import Race, find_races
from .rules import DOCUMENTED, OBSERVED_SM90, RULE_SETS, RuleSet

__all__ = [
    "DOCUMENTED",
    "OBSERVED_SM90",
    "RULE_SETS",
    "Counterexample",
    "Expectation",
    "Judgement",
    "Race",
    "RuleSet",
    "expect",
    "explain",
    "find_races",
    "judge",
]
