"""What is known of a thread at a place: whether it has waited, whether it has triggered, and which thread it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

from pdl_stress.audit.conditions import Facts

NOTHING_KNOWN = Facts()


class Status(IntEnum):
    """What a thread may rely on."""

    NOT = 0
    """It has not waited, and nothing orders it behind a thread that has."""
    UNKNOWN = 1
    """Not known: behind an mbarrier, a call that was not followed, or a condition that is not understood."""
    WAITED = 2
    BEHIND = 3
    """It passed a barrier behind a thread that has waited."""

    @property
    def ordered(self) -> bool:
        return self >= Status.WAITED


class Cause(StrEnum):
    """Why a thread has not waited."""

    EARLY = "early"
    """It has not come to the wait yet."""
    PATH = "path"
    """It took a way around the wait that a whole CTA may take."""
    WARPS = "warps"
    """It took the way of threads that do not wait, while others of its CTA do."""


@dataclass(frozen=True, slots=True)
class State:
    facts: Facts = NOTHING_KNOWN
    status: Status = Status.NOT
    cause: Cause = Cause.EARLY
    triggered: bool = False

    def but(self, status: Status) -> State:
        return self if status is self.status else replace(self, status=status)

    def __str__(self) -> str:
        return f"{self.status.name.lower()}{' triggered' if self.triggered else ''} [{self.facts}]"
