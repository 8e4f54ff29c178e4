"""Schedules: the event structure played out, with memory that remembers who wrote each cell.

What is tracked is *which version* each cell holds (poison, initial, or the writing step and replay), not its value:
exact, and fast enough for thousands of schedules. A random schedule is evidence that a race can be seen, never a
probability: hardware does not draw its schedules from here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .events import Cell, Event, Kind, Structure
from .order import Race, without

POISON, INITIAL = -2, -1


@dataclass(frozen=True)
class Anomaly:
    """A cell that did not hold what the sequential execution would have put there."""

    step: str
    kind: Kind
    buffer: str
    held: str
    """``poison``, ``an earlier generation``, ``a later generation`` or ``mixed``."""
    at: int
    """Place in the schedule."""


@dataclass(frozen=True)
class Play:
    """One schedule: the order in which the events happened, and what went wrong."""

    order: tuple[int, ...]
    anomalies: tuple[Anomaly, ...]


Picker = Callable[[list[int]], int]


def random_picker(structure: Structure, seed: int) -> Picker:
    """Prefers some steps over others, differently in each schedule, with a little noise.

    Uniform choice would keep all steps at the same pace and rarely starve one; races need a starved writer.
    """
    rng = random.Random(seed)
    positions = sorted({event.position for event in structure.events})
    rank = {position: rng.random() for position in positions}
    events = structure.events

    def pick(ready: list[int]) -> int:
        if rng.random() < 0.1:
            return rng.choice(ready)
        return max(ready, key=lambda index: rank[events[index].position])

    return pick


def starving_picker(structure: Structure, race: Race) -> Picker:
    """Holds ``race.first`` back for as long as it can, and reaches ``race.second`` without detours."""
    needed = _slice(structure, race)
    events = structure.events
    rank = {kind: place for place, kind in enumerate(Kind)}

    def pick(ready: list[int]) -> int:
        # Grid by grid and kind by kind, so that the CTAs of a grid share a line of the timeline.
        wanted = [index for index in ready if index in needed]
        if wanted:
            return min(wanted, key=lambda i: (events[i].position, rank[events[i].kind], i))
        return min(ready, key=lambda index: (index == race.first.index, index))

    return pick


def _slice(structure: Structure, race: Race) -> set[int]:
    """Events that suffice for ``race.second`` to happen while ``race.first`` has not."""
    possible = without(structure, race.first.index)
    needed: set[int] = set()
    pending = [race.second.index]
    while pending:
        index = pending.pop()
        if index not in needed:
            needed.add(index)
            pending += [next(m for m in group if m in possible) for group in structure.events[index].needs]
    return needed


def play(structure: Structure, pick: Picker) -> Play:
    """Plays one schedule to its end.

    Raises:
        RuntimeError: some events can never happen (a defect of the structure).
    """
    events = structure.events
    expected = sequential_versions(structure)
    memory: dict[Cell, int] = dict.fromkeys(structure.poisoned, POISON)
    waiting: dict[int, list[int]] = {}
    for event in events:
        for member in {m for group in event.needs for m in group}:
            waiting.setdefault(member, []).append(event.index)
    done = [False] * len(events)
    ready = [event.index for event in events if not event.needs]
    queued = set(ready)
    order: list[int] = []
    anomalies: list[Anomaly] = []
    while ready:
        index = pick(ready)
        ready.remove(index)
        done[index] = True
        event = events[index]
        if event.kind is Kind.READ:
            _check_read(event, memory, expected[index], len(order), anomalies)
        elif event.kind is Kind.WRITE:
            for cell in event.cells:
                memory[cell] = event.position
        order.append(index)
        for dependent in waiting.get(index, ()):
            if dependent not in queued and all(any(done[m] for m in g) for g in events[dependent].needs):
                queued.add(dependent)
                ready.append(dependent)
    if len(order) != len(events):
        raise RuntimeError(f"{len(events) - len(order)} events of the model can never happen")
    _check_final(structure, memory, len(order), anomalies)
    return Play(tuple(order), tuple(anomalies))


def sequential_versions(structure: Structure) -> dict[int, dict[Cell, int]]:
    """Per read event: the version that each of its cells holds in the sequential execution."""
    versions: dict[Cell, int] = dict.fromkeys(structure.poisoned, POISON)
    expected: dict[int, dict[Cell, int]] = {}
    by_position: dict[int, list[Event]] = {}
    for event in structure.accesses:
        by_position.setdefault(event.position, []).append(event)
    for position in sorted(by_position):
        for event in by_position[position]:
            if event.kind is Kind.READ:
                expected[event.index] = {cell: versions.get(cell, INITIAL) for cell in event.cells}
        for event in by_position[position]:
            if event.kind is Kind.WRITE:
                versions.update(dict.fromkeys(event.cells, position))
    return expected


def _check_read(
    event: Event, memory: dict[Cell, int], expected: dict[Cell, int], at: int, anomalies: list[Anomaly]
) -> None:
    # What another CTA of the same grid has written already (an operand updated in place) is outside the model.
    fine = {cell: (version, event.position) for cell, version in expected.items()}
    wrong = {cell: memory.get(cell, INITIAL) for cell in expected if memory.get(cell, INITIAL) not in fine[cell]}
    if wrong:
        cell, version = next(iter(sorted(wrong.items())))
        held = "mixed" if len(wrong) < len(expected) or len(set(wrong.values())) > 1 else _held(version, expected[cell])
        anomalies.append(Anomaly(event.step, event.kind, cell[0], held, at))


def _check_final(structure: Structure, memory: dict[Cell, int], at: int, anomalies: list[Anomaly]) -> None:
    final: dict[Cell, Event] = {}
    for event in structure.accesses:
        if event.kind is Kind.WRITE:
            for cell in event.cells:
                if cell not in final or event.position > final[cell].position:
                    final[cell] = event
    for cell, event in final.items():
        if memory[cell] != event.position:
            held = _held(memory[cell], event.position)
            anomalies.append(Anomaly(event.step, Kind.WRITE, cell[0], held, at))


def _held(version: int, expected: int) -> str:
    if version == POISON:
        return "poison"
    return "an earlier generation" if version < expected else "a later generation"
