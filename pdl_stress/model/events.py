"""From a chain to an event structure: which events can happen, and what each one needs first.

An event needs several groups of earlier events, of each group at least one (the *or* is R4: a CTA releases its
dependents by a trigger or by its exit, whichever comes first). Nothing ever disables an event, so the structure is
monotone: what can happen without a given event is a least fixed point, which makes the order question decidable
exactly (:mod:`pdl_stress.model.order`).

The program of a CTA follows from its contract:

=============  =====================================================================================================
event          needs
=============  =====================================================================================================
start          full edge: the prerequisite grids complete. Programmatic edge: every CTA of the prerequisite *released*
independent    start
wait           start, and the prerequisite grids complete (R1; with R8 also *their* prerequisites)
read           the wait if the contract orders dependents behind it, else only start
write          all reads of the CTA; the wait likewise
trigger        the place that the contract names
release        the trigger or the exit. Under rules where an unfenced trigger (or the exit) carries no visibility,
               nothing: what the dependent reads without a wait may be as old as anything before
exit           everything the CTA does
complete       the exit of every CTA
=============  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise, product

from ..buffers import Role, View, box_within
from ..chain import Chain, Step
from ..contract import Trigger, Wait
from .rules import RuleSet

MAX_CTAS = 2
"""CTAs modelled per grid. All CTAs of a grid run the same program, so two (*this one* and *another one*) show every
interleaving that a pair of conflicting accesses can have."""


class Kind(StrEnum):
    START = "starts"
    TRIGGER = "triggers"
    WAIT = "leaves its wait"
    READ = "reads"
    WRITE = "writes"
    EXIT = "exits"
    COMPLETE = "is complete"


Cell = tuple[str, int, int, int]
"""(buffer, generation of a ring buffer else 0, atom, tile): the unit of memory of the model."""


@dataclass(frozen=True)
class Event:
    """One event. ``needs``: groups of event indices; of each group one must have happened."""

    index: int
    position: int
    """Place of its step in the sequential execution, counted over all replays."""
    step: str
    replay: int
    cta: int
    kind: Kind
    needs: tuple[tuple[int, ...], ...]
    operand: str = ""
    view: View | None = None
    cells: frozenset[Cell] = frozenset()


@dataclass(frozen=True)
class Structure:
    """All events of ``replays`` runs of a chain, in an order in which the sequential execution could perform them."""

    events: tuple[Event, ...]
    poisoned: frozenset[Cell]
    """Cells that hold poison before the first replay: everything that a step writes."""
    rules: RuleSet

    @property
    def accesses(self) -> list[Event]:
        return [event for event in self.events if event.cells]


def build(chain: Chain, rules: RuleSet, replays: int = 1) -> Structure:
    """The event structure of ``replays`` back-to-back replays of ``chain``.

    With several replays the boundary between them is a programmatic edge and outputs go to a ring (one generation
    each), as in the stress's back-to-back arm.
    """
    return _Builder(chain, rules, replays).structure()


class _Builder:
    def __init__(self, chain: Chain, rules: RuleSet, replays: int) -> None:
        self.chain, self.rules, self.replays = chain, rules, replays
        self.steps = chain.steps
        self.events: list[Event] = []
        self.atoms = _atoms(self.steps)
        self.tiles = max(min(step.ctas, MAX_CTAS) for step in self.steps)
        self.read_somewhere = {view.buffer.name for step in self.steps for _, view in step.reads()}
        self.poisoned: set[Cell] = set()

    def structure(self) -> Structure:
        released: list[tuple[int, ...]] = []  # per CTA of the predecessor: events of which one releases it
        completions: list[int] = []
        position = 0
        for replay in range(self.replays):
            for step in self.steps:
                released = self._grid(step, replay, position, released, completions)
                position += 1
        return Structure(tuple(self.events), frozenset(self.poisoned), self.rules)

    def _grid(
        self, step: Step, replay: int, position: int, released: list[tuple[int, ...]], completions: list[int]
    ) -> list[tuple[int, ...]]:
        """Adds the events of one grid; returns what releases its successor and appends its completion."""
        contract = step.contract
        prerequisites = completions if self.rules.transitive else completions[-1:]
        complete = [(done,) for done in prerequisites]
        ctas = min(step.ctas, MAX_CTAS)
        releases: list[tuple[int, ...]] = []
        exits: list[int] = []

        for cta in range(ctas):

            def add(
                kind: Kind,
                needs: Iterable[tuple[int, ...]],
                operand: str = "",
                view: View | None = None,
                cta: int = cta,
            ) -> int:
                cells = self._cells(view, replay, kind, cta, ctas) if view else frozenset()
                if kind is Kind.WRITE:
                    self.poisoned |= cells
                event = Event(
                    len(self.events), position, step.name, replay, cta, kind, tuple(needs), operand, view, cells
                )
                self.events.append(event)
                return event.index

            start = add(Kind.START, [group for group in released if group] if step.pdl else complete)
            done = [start]
            has_wait = contract.wait not in (Wait.BRANCH, Wait.NEVER)

            def access(kind: Kind, names: Iterable[str], independent: bool, needs: list[int], add=add) -> list[int]:  # type: ignore[no-untyped-def]
                return [
                    add(kind, [(n,) for n in needs], name, step.operands[name])
                    for name in names
                    if contract.is_independent(name) is independent
                ]

            triggers: dict[Trigger, int] = {}
            if contract.trigger is Trigger.ENTRY:
                triggers[Trigger.ENTRY] = add(Kind.TRIGGER, [(start,)])
            early = access(Kind.READ, contract.reads, True, [start])
            done += early
            early_writes = access(Kind.WRITE, contract.writes, True, [start, *early])
            done += early_writes
            wait = add(Kind.WAIT, [(start,), *complete]) if has_wait else start
            done.append(wait)
            ordered = [wait] if contract.wait.orders_dependents else [start]
            if contract.trigger is Trigger.AFTER_WAIT:
                triggers[Trigger.AFTER_WAIT] = add(Kind.TRIGGER, [(wait,)])
            reads = access(Kind.READ, contract.reads, False, ordered)
            done += reads
            # A kernel that reads too early but does wait (F01) stores behind its wait.
            before_stores = [*ordered, *early, *reads, *([wait] if contract.wait is Wait.LATE else [])]
            if contract.trigger is Trigger.BEFORE_STORES:
                triggers[Trigger.BEFORE_STORES] = add(Kind.TRIGGER, [(n,) for n in before_stores])
            writes = access(Kind.WRITE, contract.writes, False, before_stores)
            done += writes
            if contract.trigger is Trigger.AFTER_STORES:
                triggers[Trigger.AFTER_STORES] = add(
                    Kind.TRIGGER, [(n,) for n in (*before_stores, *early_writes, *writes)]
                )
            exit_ = add(Kind.EXIT, [(n,) for n in (*done, *triggers.values())])
            exits.append(exit_)
            releases.append(self._release(triggers, exit_, contract.fence))

        completions.append(len(self.events))
        self.events.append(
            Event(len(self.events), position, step.name, replay, -1, Kind.COMPLETE, tuple((e,) for e in exits))
        )
        return releases

    def _release(self, triggers: dict[Trigger, int], exit_: int, fence: bool) -> tuple[int, ...]:
        """Events of which one must have happened before the dependent's accesses can take effect; empty: none need."""
        if triggers:
            return (*triggers.values(), exit_) if fence or self.rules.trigger_orders else ()
        return (exit_,) if self.rules.exit_orders else ()

    def _cells(self, view: View, replay: int, kind: Kind, cta: int, ctas: int) -> frozenset[Cell]:
        """Reads touch every tile of the view; of the writes each CTA does its share."""
        name = view.buffer.name
        ring = view.buffer.role is Role.INTERMEDIATE and name not in self.read_somewhere
        tiles = range(self.tiles) if kind is Kind.READ else range(cta, self.tiles, ctas)
        atoms = [index for index, atom in enumerate(self.atoms[name]) if box_within(atom, view.box)]
        return frozenset((name, replay if ring else 0, atom, tile) for atom in atoms for tile in tiles)


def _atoms(steps: list[Step]) -> dict[str, list[tuple[tuple[int, int], ...]]]:
    """Cuts each buffer along the borders of all views of it, so that a view is a union of atoms."""
    views: dict[str, list[View]] = {}
    for step in steps:
        for view in step.operands.values():
            views.setdefault(view.buffer.name, []).append(view)
    cut: dict[str, list[tuple[tuple[int, int], ...]]] = {}
    for name, parts in views.items():
        borders = [
            sorted({edge for part in parts for edge in part.box[dim]} | {0, size})
            for dim, size in enumerate(parts[0].buffer.shape)
        ]
        cut[name] = [tuple(box) for box in product(*(list(pairwise(b)) for b in borders))]
    return cut
