"""Which branches decide about waiting: their conditions are followed, others are not, so that states stay few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdl_stress.audit.conditions import Case, Literal, cases
from pdl_stress.audit.expressions import Expression
from pdl_stress.audit.graph import EXIT, Block, Edge, Graph
from pdl_stress.audit.listing import Instruction
from pdl_stress.audit.opcodes import CLUSTER_WAIT, WAIT, never
from pdl_stress.audit.values import Registers, Values


@dataclass(frozen=True, slots=True)
class Way:
    """An edge with what it tells. cases: conjunctions of facts, one of which holds; skips: it goes around a wait.

    doubtful: whether it is taken is decided by something that may change from one turn of a loop to the next.
    """

    edge: Edge
    cases: tuple[Case, ...]
    skips: bool
    doubtful: bool


class Ways:
    """The ways out of every block, with the facts that matter to waiting."""

    def __init__(self, graph: Graph, values: Values) -> None:
        self.graph, self.values = graph, values
        self.waiting = frozenset(
            block.index for block, ins in graph.instructions() if ins.base == WAIT and not never(ins)
        )
        self._subjects: set[Expression] = set()
        self._leaves: set[Expression] = set()
        self._tests: dict[tuple[int, int], Expression] = {}
        skipping = self._skipping(self.waiting)
        self._of: dict[int, tuple[Way, ...]] = {}
        if self.waiting:  # what decides about a barrier decides about who is ordered behind a wait
            meeting = frozenset(block.index for block, ins in graph.instructions() if _orders(ins))
            self._learn(skipping | self._skipping(meeting), self.waiting | meeting)
        for block in graph.blocks:
            self._of[block.index] = tuple(
                self._way(block, index, edge, (block.index, index) in skipping)
                for index, edge in enumerate(block.edges)
            )

    def out_of(self, block: Block) -> tuple[Way, ...]:
        return self._of[block.index]

    def guard(self, test: Expression) -> tuple[tuple[Case, ...], tuple[Case, ...], bool]:
        """What holds where a guard holds, what where it does not, and whether that is doubtful."""
        yes, no = self._kept(test, True), self._kept(test, False)
        return yes, no, not test.stable

    def is_relevant(self, test: Expression) -> bool:
        return any(self._follows(literal.subject) for case in cases(test, True) or () for literal in case)

    def _test(self, block: Block, index: int) -> Expression:
        key = (block.index, index)
        if key not in self._tests:
            registers = self.values.at_end(block) if block.edges[index].tests else {}
            self._tests[key] = self.values.test(block.edges[index].tests, registers)
        return self._tests[key]

    def _skipping(self, wanted: frozenset[int]) -> set[tuple[int, int]]:
        """The edges, by block and number, that go around a wanted block to which another edge of the block leads."""
        found: set[tuple[int, int]] = set()
        if not wanted:
            return found
        reversed_graph = self.graph.digraph.reverse(copy=False)
        before: set[int] = set(wanted)
        todo = list(wanted)
        while todo:
            for block in reversed_graph.successors(todo.pop()):
                if block not in before:
                    before.add(block)
                    todo.append(block)
        for block in self.graph.blocks:
            if len({edge.target for edge in block.edges}) + (block.exits is not None) < 2 or block.index not in before:
                continue
            join = self.graph.to_end.get(block.index, EXIT)
            leads = [bool(self.graph.reaches({edge.target}, join) & wanted) for edge in block.edges]
            if any(leads):
                found |= {(block.index, index) for index, does in enumerate(leads) if not does}
        return found

    def _learn(self, skipping: set[tuple[int, int]], ordering: frozenset[int]) -> None:
        """The subjects of conditions that decide about waiting, and about barriers."""
        tests = []
        for index in {block for block, _ in skipping}:
            block = self.graph.blocks[index]
            for edge in block.edges:
                if (subject := self._selector(block, edge)) is not None:
                    self._subjects.add(subject)
            tests += [self._test(block, number) for number in range(len(block.edges))]
        for index in ordering:
            for instruction, registers in self.values.walk(self.graph.blocks[index]):
                if _orders(instruction) and instruction.guard:
                    tests.append(self.values.test((instruction.guard,), registers))
        for test in tests:
            for holds in (True, False):
                for case in cases(test, holds) or ():
                    for literal in case:
                        self._subjects.add(literal.subject)
                        self._leaves |= _thread_leaves(literal.subject)

    def _selector(self, block: Block, edge: Edge) -> Expression | None:
        """What an indirect branch goes by: an expression that has another number on each of its edges."""
        if edge.select is None:
            return None
        return self.values.made.make("target", self.values.value(edge.select[0], self.values.at_end(block)).expression)

    def _follows(self, subject: Expression) -> bool:
        return subject.stable and (subject in self._subjects or bool(_thread_leaves(subject) & self._leaves))

    def _kept(self, test: Expression, holds: bool) -> tuple[Case, ...]:
        found = cases(test, holds)
        if found is None:
            return ((),)
        return tuple(dict.fromkeys(tuple(one for one in case if self._follows(one.subject)) for case in found))

    def _way(self, block: Block, index: int, edge: Edge, skips: bool) -> Way:
        """The edge, with what a flag that was set on the way to a join is known to be."""
        way = self._bare_way(block, index, edge, skips)
        flags = tuple(self._flags(block, edge.target))
        return replace(way, cases=tuple((*case, *flags) for case in way.cases)) if flags else way

    def _flags(self, block: Block, target: int) -> Iterator[Literal]:
        registers: Registers | None = None
        for subject in self._subjects:
            place = self.values.joins.get(subject)
            if place is not None and place[0] == target and subject.stable:
                registers = self.values.at_end(block) if registers is None else registers
                value = registers.get(place[1])
                if value is not None and value.expression.op in ("true", "false"):
                    holds = int(value.expression.op == "true")
                    yield Literal(subject, holds, holds, ranged=False)

    def _bare_way(self, block: Block, index: int, edge: Edge, skips: bool) -> Way:
        if (subject := self._selector(block, edge)) is not None and edge.select is not None:
            case = (Literal(subject, edge.select[1], edge.select[1]),) if self._follows(subject) else ()
            return Way(edge, (case,), skips, not subject.stable)
        if not edge.tests:
            return Way(edge, ((),), skips, skips)
        test = self._test(block, index)
        return Way(edge, self._kept(test, edge.taken), skips, not test.stable)


def _orders(instruction: Instruction) -> bool:
    """Whether it is a wait or a barrier of the CTA."""
    return instruction.base in (WAIT, "BAR", CLUSTER_WAIT) and not never(instruction)


def _thread_leaves(expression: Expression) -> set[Expression]:
    """The thread indices that an expression is computed from, where it is from nothing else."""
    if expression.op == "thread" or (expression.op == "name" and expression.args[0] == "elected"):
        return {expression}
    if expression.number is not None:
        return set()
    found: set[Expression] = set()
    for part in expression.parts():
        inner = _thread_leaves(part)
        if not inner and part.number is None:
            return set()
        found |= inner
    return found
