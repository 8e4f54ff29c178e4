"""Outcomes, how they combine (the worst wins) and their exit codes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Outcome(Enum):
    """What a run says. Ordered from worst to best."""

    FAIL = "FAIL"
    """A forbidden outcome was seen on hardware, or proved from the contracts."""
    ERROR = "ERROR"
    """A crash, a hang, a harness fault or an unusable device."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """Nothing wrong was seen, but the run could not have seen it: a control was missed, an edge never exposed, too few
    replays, counts that do not add up, a debugger or profiler attached."""
    ORDERED = "ORDERED"
    """Ordered by the contracts, says the model. No kernel ran."""
    PASS = "PASS"
    """Hardware only: clean in every arm, and every control that must be caught was caught."""

    @property
    def exit_code(self) -> int:
        return {"FAIL": 1, "ERROR": 3, "INCONCLUSIVE": 4, "ORDERED": 0, "PASS": 0}[self.value]

    def __str__(self) -> str:
        return self.value


USAGE_EXIT_CODE = 2

_WORST_FIRST = list(Outcome)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The worst of ``outcomes``; INCONCLUSIVE if there are none, since nothing was shown."""
    found = list(outcomes)
    return min(found, key=_WORST_FIRST.index) if found else Outcome.INCONCLUSIVE
