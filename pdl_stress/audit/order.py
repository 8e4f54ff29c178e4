"""Whether threads have waited, at every place of a kernel: forward data flow over states, to a fixed point.

A place is reached by a set of states. Branches that decide about waiting split a state, and what the branch tells of
the thread is kept, so that a later branch on the same thing is followed the right way only. What barriers do depends on
all states that arrive there: it is computed from the round before, beginning with barriers that order nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pdl_stress.audit.barriers import Phase, behind_barrier, behind_mbarrier, behind_warp
from pdl_stress.audit.conditions import Case
from pdl_stress.audit.expressions import Expression, Scope
from pdl_stress.audit.graph import Block, Graph
from pdl_stress.audit.listing import Instruction
from pdl_stress.audit.opcodes import CLUSTER_ARRIVE, CLUSTER_WAIT, TRIGGER, WAIT, WARP_JOINS, access, never
from pdl_stress.audit.operands import address, parse
from pdl_stress.audit.skips import Ways
from pdl_stress.audit.states import Cause, State, Status
from pdl_stress.audit.values import Registers, Values

MAX_STATES = 48  # at one block; beyond, facts are dropped and what has not waited becomes unknown
MAX_ROUNDS = 10

Site = tuple[int, int]
"""A block and the offset of an instruction in it."""


@dataclass(frozen=True, slots=True)
class _Point:
    """An instruction that matters. test: its guard's condition, None where it has none. key: which barrier."""

    instruction: Instruction
    kind: str
    test: Expression | None = None
    key: object = None
    phase: Phase = Phase.UNKNOWN


@dataclass
class Order:
    """at: the states in which each access, wait, trigger and exit is run. before: where each state came from."""

    graph: Graph
    values: Values
    at: dict[Site, set[State]] = field(default_factory=dict)
    exits: dict[int, set[State]] = field(default_factory=dict)
    before: dict[tuple[int, State], tuple[int, State] | None] = field(default_factory=dict)
    overflowed: bool = False
    blind: set[int] = field(default_factory=set)
    """Blocks that end in what is not followed, come to by a thread that has not waited."""

    def __post_init__(self) -> None:
        self.ways = Ways(self.graph, self.values)
        self._points = {block.index: tuple(self._interesting(block)) for block in self.graph.blocks}
        self._arrivals: dict[Site, set[State]] = {}
        for _ in range(MAX_ROUNDS):
            arrived = self._round()
            if arrived == self._arrivals:
                break
            self._arrivals = arrived
        else:
            self.overflowed = True  # what was claimed holds, what was not may be unknown

    def way_to(self, block: int, state: State) -> list[tuple[int, State]]:
        """A way from the entry to a block on which a thread comes to be in this state."""
        found = [(block, state)]
        step = self.before.get((block, state))
        while step is not None and len(found) < 10_000:
            found.append(step)
            step = self.before.get(step)
        return found[::-1]

    # --- one round ----------------------------------------------------------------------------------------------------

    def _round(self) -> dict[Site, set[State]]:
        self.at, self.exits, self.before, self.blind = defaultdict(set), defaultdict(set), {}, set()
        reached: dict[int, set[State]] = {0: {State()}}
        self.before[0, State()] = None
        todo = [(0, State())]
        while todo:
            index, state = todo.pop()
            block = self.graph.blocks[index]
            for after in self._through(block, state):
                if block.exits is not None:
                    self.exits[index].add(after)
                for target, arrived in self._leave(block, after):
                    known = reached.setdefault(target, set())
                    if len(known) >= MAX_STATES and arrived not in known:
                        self.overflowed = True
                        status = Status.UNKNOWN if arrived.status is Status.NOT else arrived.status
                        arrived = State(status=status, cause=arrived.cause, triggered=arrived.triggered)
                    if arrived not in known:
                        known.add(arrived)
                        self.before[target, arrived] = (index, state)
                        todo.append((target, arrived))
        return dict(self.at)

    def _leave(self, block: Block, state: State) -> Iterator[tuple[int, State]]:
        for way in self.ways.out_of(block):
            lost = block.opaque or way.edge.opaque or (way.skips and way.doubtful)
            for case in way.cases:
                facts = state.facts.plus(case)
                if facts is None:
                    continue
                changed = replace(state, facts=facts)
                if state.status is Status.NOT:
                    if way.edge.opaque:
                        self.blind.add(block.index)
                    if way.skips:
                        changed = replace(changed, cause=_cause(case))
                    if lost:
                        changed = changed.but(Status.UNKNOWN)
                yield way.edge.target, changed

    def _through(self, block: Block, state: State) -> list[State]:
        states = [state]
        for point in self._points[block.index]:
            site = (block.index, point.instruction.offset)
            after: list[State] = []
            for one in states:
                runs, passes = self._split(one, point)
                self.at[site].update(runs)
                for running in runs:
                    after += self._effect(point, site, running)
                after += passes
            states = list(dict.fromkeys(after))
        return states

    def _split(self, state: State, point: _Point) -> tuple[list[State], list[State]]:
        """The states in which the instruction is run, and those in which its guard keeps it from running."""
        if point.test is None:
            return [state], []
        yes, no, doubtful = self.ways.guard(point.test)
        sides = []
        for cases, holds in ((yes, True), (no, False)):
            side = []
            for case in cases:
                facts = state.facts.plus(case)
                if facts is not None:
                    side.append(self._split_state(replace(state, facts=facts), point, case, holds, doubtful))
            sides.append(list(dict.fromkeys(side)))
        return sides[0], sides[1]

    def _split_state(self, state: State, point: _Point, case: Case, holds: bool, doubtful: bool) -> State:
        if point.kind != "wait" or holds or state.status is not Status.NOT:
            return state
        return state.but(Status.UNKNOWN) if doubtful else replace(state, cause=_cause(case))

    def _effect(self, point: _Point, site: Site, state: State) -> list[State]:
        if point.kind == "wait":
            return [replace(state, status=Status.WAITED, cause=Cause.EARLY)]
        if point.kind == "trigger":
            return [replace(state, triggered=True)]
        if point.kind == "join":
            return behind_warp(state, self._arrivals.get(site, ()))
        if point.kind in ("barrier", "cluster"):
            here, elsewhere = self._meeting(point, site)
            status = behind_barrier(state, here, elsewhere)
            if status is Status.BEHIND and point.kind == "barrier" and point.key is None and not state.status.ordered:
                status = Status.UNKNOWN  # threads that meet here may be at barriers of different numbers
            return [state.but(status)]
        if point.kind == "mbarrier":
            arriving = [other for place in self._arriving_on(point.key) for other in self._arrivals.get(place, ())]
            return [state.but(behind_mbarrier(state, arriving, point.phase))]
        if point.kind == "unknown barrier" and state.status is Status.NOT:
            return [state.but(Status.UNKNOWN)]
        return [state]

    def _meeting(self, point: _Point, site: Site) -> tuple[set[State], list[State]]:
        """The states at this barrier instruction, and those at others at which threads may meet these.

        At an instruction that all threads pass before or after this one, they meet at another time.
        """
        if point.kind == "cluster":
            places = self._places("cluster arrive")
            return set().union(*(self._arrivals.get(place, set()) for place in places)), []
        others: list[State] = []
        for place, other in self._sites("barrier", "barrier arrive"):
            same = point.key is None or other.key is None or point.key == other.key
            if place != site and same and not self._in_turn(place, other, site, point):
                others += self._arrivals.get(place, ())
        return self._arrivals.get(site, set()), others

    def _in_turn(self, a: Site, at_a: _Point, b: Site, at_b: _Point) -> bool:
        """Whether every thread at one of the two barriers has passed the other before."""
        if a[0] == b[0]:
            return (at_a if a[1] < b[1] else at_b).test is None
        first_a = at_a.test is None and self.graph.dominates(a[0], b[0])
        return first_a or (at_b.test is None and self.graph.dominates(b[0], a[0]))

    # --- points -------------------------------------------------------------------------------------------------------

    def _interesting(self, block: Block) -> Iterator[_Point]:
        if block.index not in self.values.entry:
            return
        for instruction, registers in self.values.walk(block):
            kind = _kind(instruction)
            if kind is None or never(instruction):
                continue
            test = self.values.test((instruction.guard,), registers) if instruction.guard else None
            if test is not None and test.op == "true":
                test = None
            key, phase = self._barrier(kind, instruction, registers)
            yield _Point(instruction, kind, test, key, phase)

    def _barrier(self, kind: str, instruction: Instruction, registers: Registers) -> tuple[object, Phase]:
        """Which barrier it is, None where not known; and which phase a first wait on it is for."""
        operands = instruction.operands
        if kind in ("barrier", "barrier arrive"):
            number = self.values.value(operands[0], registers).expression.number if operands else None
            return number, Phase.UNKNOWN
        if kind in ("mbarrier", "mbarrier arrive"):
            at = next((text for text in operands if parse(text).kind == "memory"), "")
            parity = self.values.first(self.values.value(operands[-1], registers).expression)
            phases = {frozenset({0}): Phase.FIRST, frozenset({1 << 31}): Phase.BEFORE}
            return self._address(at, registers), phases.get(frozenset(parity or ()), Phase.UNKNOWN)
        return None, Phase.UNKNOWN

    def _address(self, operand: str, registers: Registers) -> Expression | None:
        """The address of an mbarrier, None where it is not one fixed place in shared memory."""
        named = address(operand)
        if not operand or not named.registers:
            return None
        made = self.values.made
        terms = [self.values.value(name, registers).expression for name in named.registers]
        total = made.add(*terms, made.number(named.constant))
        return total if total.stable and total.scope in (Scope.CTA, Scope.CONSTANT) else None

    def _sites(self, *kinds: str) -> Iterator[tuple[Site, _Point]]:
        for index, points in self._points.items():
            for point in points:
                if point.kind in kinds:
                    yield (index, point.instruction.offset), point

    def _places(self, *kinds: str) -> list[Site]:
        return [site for site, _ in self._sites(*kinds)]

    def _arriving_on(self, key: object) -> list[Site]:
        """The places that may arrive on an mbarrier."""
        return [
            site
            for site, point in self._sites("mbarrier arrive")
            if not isinstance(key, Expression) or not isinstance(point.key, Expression) or not _apart(key, point.key)
        ]


def _kind(instruction: Instruction) -> str | None:
    base, parts = instruction.base, instruction.modifiers
    if base == WAIT:
        return "wait"
    if base == TRIGGER:
        return "trigger"
    if base == "BAR":
        return "barrier arrive" if "ARV" in parts else "barrier"
    if base in WARP_JOINS:
        return "join"
    if base == CLUSTER_ARRIVE:
        return "cluster arrive"
    if base == CLUSTER_WAIT:
        return "cluster"
    if base in ("SYNCS", "USYNCS"):
        return "mbarrier" if "PHASECHK" in parts else "mbarrier arrive" if "EXCH" not in parts else None
    if base in ("ARRIVES", "UTCBAR"):
        return "mbarrier arrive"
    if base == "MEMBAR":
        return "fence"
    if access(instruction) is not None:
        return "access"
    return "unknown barrier" if instruction.meets else None


def _apart(a: Expression, b: Expression) -> bool:
    """Whether two fixed addresses surely differ: the same sum with another number."""
    return a is not b and _stem(a) == _stem(b)


def _stem(expression: Expression) -> tuple[int, ...]:
    return tuple(id(part) for part in (expression.parts() or [expression]) if part.number is None)


def _cause(case: Case) -> Cause:
    """Why a thread that took this way around a wait did so."""
    scopes = {literal.subject.scope for literal in case}
    return Cause.WARPS if scopes == {Scope.THREAD} else Cause.PATH
