"""Exact order: which conflicting accesses can happen the wrong way round.

The event structure is monotone (nothing disables an event). So for an access *a*, everything that can happen *without*
a is a least fixed point; a later conflicting access *b* in it can overtake a, and any other is ordered behind it on
every schedule. Two accesses conflict if they touch a common cell and at least one writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..chain import Chain
from .events import Event, Kind, Structure, build
from .rules import RuleSet


@dataclass(frozen=True)
class Race:
    """Two conflicting accesses with no order: sequentially ``first`` comes before ``second``."""

    first: Event
    second: Event

    @property
    def kind(self) -> str:
        if self.second.kind is Kind.READ:
            return "stale read"
        return "read after overwrite" if self.first.kind is Kind.READ else "lost write"

    @property
    def steps(self) -> tuple[str, str]:
        return self.first.step, self.second.step

    @property
    def buffer(self) -> str:
        assert self.first.view is not None
        return self.first.view.buffer.name

    def __str__(self) -> str:
        second, first = self.second, self.first
        return f"{self.kind}: {second.step} {second.kind} {second.view} before {first.step} {first.kind} it"


def _blocked(events: Sequence[Event], excluded: int, stop: int) -> set[int]:
    """Indices below ``stop`` of the events that cannot happen if ``excluded`` never does; that one is among them.

    A structure lists what an event needs before the event itself, so one pass finds the fixed point.
    """
    blocked = {excluded}
    for event in events[excluded + 1 : stop]:
        if any(blocked.issuperset(group) for group in event.needs):
            blocked.add(event.index)
    return blocked


def without(structure: Structure, excluded: int) -> set[int]:
    """Indices of all events that can happen if the event ``excluded`` never does."""
    count = len(structure.events)
    return set(range(count)) - _blocked(structure.events, excluded, count)


def races_of(structure: Structure) -> list[Race]:
    """All races between different steps, one per (steps, buffer, kind), in sequential order."""
    accesses = structure.accesses
    by_buffer: dict[str, list[Event]] = {}
    for access in accesses:
        by_buffer.setdefault(next(iter(access.cells))[0], []).append(access)
    found: dict[tuple[object, ...], Race] = {}
    for first in accesses:
        # All CTAs of a grid run the same program: what can overtake one of them can overtake any.
        if first.cta:
            continue
        rivals = [
            second
            for second in by_buffer[next(iter(first.cells))[0]]
            if second.position > first.position
            and Kind.WRITE in (first.kind, second.kind)
            and not first.cells.isdisjoint(second.cells)
        ]
        if not rivals:
            continue
        blocked = _blocked(structure.events, first.index, max(second.index for second in rivals) + 1)
        for second in rivals:
            if second.index not in blocked:
                race = Race(first, second)
                found.setdefault((first.position, second.position, race.buffer, race.kind), race)
    return list(found.values())


def find_races(chain: Chain, rules: RuleSet, replays: int = 1) -> list[Race]:
    """All races of a chain under a rule set; empty: every schedule that the rules allow equals the sequential run."""
    return races_of(build(chain, rules, replays))
