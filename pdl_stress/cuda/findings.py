"""What an inspection of the machine says: one finding per fact, what it means for a run and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """What a finding means for a run on the GPU, best first."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing when numbers surprise; changes no verdict."""
    ABSENT = "absent"
    """Not there. What needs it is unavailable; the rest runs."""
    BLOCKS_VERDICT = "blocks verdict"
    """A run would go through, and its result would be INCONCLUSIVE: something changes the timing under test."""
    UNUSABLE = "unusable"
    """A run on the GPU would be an ERROR."""


@dataclass(frozen=True)
class Finding:
    """One fact about the machine.

    Args:
        name: A stable name, one per subject, as ``"compute capability"``.
        status: What it means for a run.
        value: What was found, for people. Holds no absolute path.
        advice: What to do about it; empty where there is nothing to do.
    """

    name: str
    status: Status
    value: str
    advice: str = ""
