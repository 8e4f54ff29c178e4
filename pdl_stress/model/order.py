"""Exact order: which conflicting accesses can happen the wrong way round.

The event structure is monotone (nothing disables an event). So for an access *a*, everything that can happen *without*
a is a least fixed point; a later conflicting access *b* in it can overtake a, and any other is ordered behind it on
every schedule. Two accesses conflict if they touch a common cell and at least one writes.
"""

from __future__ import annotations

from collections import deque
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


def without(structure: Structure, excluded: int) -> set[int]:
    """Indices of all events that can happen if the event ``excluded`` never does."""
    events = structure.events
    waiting: dict[int, list[int]] = {}
    missing: list[int] = []
    for event in events:
        missing.append(len(event.needs))
        for group_event in {member for group in event.needs for member in group}:
            waiting.setdefault(group_event, []).append(event.index)
    done: set[int] = set()
    met: dict[int, set[int]] = {}
    ready = deque(event.index for event in events if not event.needs and event.index != excluded)
    while ready:
        index = ready.popleft()
        if index in done:
            continue
        done.add(index)
        for dependent in waiting.get(index, ()):
            if dependent == excluded or dependent in done:
                continue
            groups = met.setdefault(dependent, set())
            groups.update(g for g, group in enumerate(events[dependent].needs) if index in group)
            if len(groups) == missing[dependent]:
                ready.append(dependent)
    return done


def races_of(structure: Structure) -> list[Race]:
    """All races between different steps, one per (steps, buffer, kind), in sequential order."""
    accesses = structure.accesses
    found: dict[tuple[object, ...], Race] = {}
    for first in accesses:
        rivals = [
            second
            for second in accesses
            if second.position > first.position
            and Kind.WRITE in (first.kind, second.kind)
            and not first.cells.isdisjoint(second.cells)
        ]
        if not rivals:
            continue
        possible = without(structure, first.index)
        for second in rivals:
            if second.index in possible:
                race = Race(first, second)
                found.setdefault((first.position, second.position, race.buffer, race.kind), race)
    return list(found.values())


def find_races(chain: Chain, rules: RuleSet, replays: int = 1) -> list[Race]:
    """All races of a chain under a rule set; empty: every schedule that the rules allow equals the sequential run."""
    return races_of(build(chain, rules, replays))
