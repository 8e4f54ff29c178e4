"""What every register holds at every place of a kernel: expressions and origins, by forward data flow."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx as nx

from pdl_stress.audit.conditions import Conditions
from pdl_stress.audit.evaluate import Evaluator
from pdl_stress.audit.expressions import DEPTH, NOWHERE, Expression, Expressions, Scope, Value, compute
from pdl_stress.audit.graph import Block, Graph
from pdl_stress.audit.image import Image
from pdl_stress.audit.listing import BadListing, Instruction
from pdl_stress.audit.opcodes import never
from pdl_stress.audit.operands import parse

MAX_VISITS = 60  # of one block; a lattice of this height needs a handful

Registers = dict[str, Value]


@dataclass
class Values:
    """The registers at the start of each block that can be reached."""

    graph: Graph
    image: Image
    made: Expressions = field(default_factory=Expressions)
    entry: dict[int, Registers] = field(default_factory=dict)
    joins: dict[Expression, tuple[int, str]] = field(default_factory=dict)
    """Names of what was joined, with the block and the register where."""

    def __post_init__(self) -> None:
        self.conditions = Conditions(self.made)
        self._entering: dict[Expression, dict[int, Expression]] = {}
        self._evaluator = Evaluator(self.image, self.made, self.conditions)
        self._solve()

    def walk(self, block: Block) -> Iterator[tuple[Instruction, Registers]]:
        """The block's instructions, each with the registers before it. The registers are changed as it goes."""
        registers = dict(self.entry.get(block.index, {}))
        for instruction in block.instructions:
            yield instruction, registers
            self._step(block, instruction, registers)

    def at_end(self, block: Block) -> Registers:
        registers = dict(self.entry.get(block.index, {}))
        for instruction in block.instructions:
            self._step(block, instruction, registers)
        if block.clobbers:
            return {name: value for name, value in registers.items() if _kept_by_calls(name)}
        return registers

    def test(self, predicates: tuple[str, ...], registers: Registers) -> Expression:
        """The condition that all of these predicates (`P0`, `!UP1`) hold."""
        found = self.conditions.literal(True)
        for text in predicates:
            found = self.conditions.both(found, self._operand(text, registers).expression)
        return found

    def value(self, text: str, registers: Registers) -> Value:
        """The value of an operand."""
        return self._operand(text, registers)

    def under(self, value: Value, guard: Expression) -> Value:
        """The value where the guard holds: of what was written under the same guard only one side remains."""
        while value.choice is not None:
            test, then, otherwise = value.choice
            if test is guard:
                value = then
            elif self.conditions.negated(test) is guard:
                value = otherwise
            else:
                break
        return value

    def _operand(self, text: str, registers: Registers) -> Value:
        return self._evaluator.operand(parse(text), lambda name: self._read(name, registers))

    def _read(self, name: str, registers: Registers) -> Value:
        found = registers.get(name)
        if found is None:
            return Value(self.made.make("name", f"{name} unset", scope=Scope.UNKNOWN, stable=False))
        return found

    def _step(self, block: Block, instruction: Instruction, registers: Registers) -> None:
        if never(instruction):
            return
        once = block.index not in self.graph.cyclic
        node = (block.index, instruction.offset)
        if instruction.guard:
            guard = self._operand(instruction.guard, registers).expression
            results = self._evaluator.results(
                instruction, node, once, lambda name: self.under(self._read(name, registers), guard)
            )
            for name, value in results.items():
                registers[name] = self._guarded(guard, value, registers.get(name), f"{name}@{node}", once)
        else:
            registers.update(self._evaluator.results(instruction, node, once, lambda name: self._read(name, registers)))

    def _guarded(self, guard: Expression, new: Value, old: Value | None, place: str, once: bool) -> Value:
        if old is None or guard.op == "true":
            return new
        if guard.op == "false":
            return old
        both = self.made.make("choice", guard, new.expression, old.expression)
        if both.depth > DEPTH:
            both = self.made.make("name", place, scope=both.scope, stable=both.stable or once)
        return Value(both, new.origins | old.origins, (guard, _flat(new), _flat(old)))

    def _solve(self) -> None:
        order = {block: index for index, block in enumerate(_reverse_postorder(self.graph))}
        self.entry[0] = {}
        waiting, visits = [(order[0], 0)], dict.fromkeys(order, 0)
        queued = {0}
        while waiting:
            _, index = heapq.heappop(waiting)
            queued.discard(index)
            visits[index] += 1
            if visits[index] > MAX_VISITS:
                raise BadListing(f"{self.graph.kernel}: the values of its registers do not settle")
            block = self.graph.blocks[index]
            after = self.at_end(block)
            for target in {edge.target for edge in block.edges}:
                if self._join(target, index, after) and target not in queued:
                    queued.add(target)
                    heapq.heappush(waiting, (order[target], target))

    def _join(self, target: int, source: int, after: Registers) -> bool:
        """Whether what is known at the start of a block changed by a way to it."""
        before = self.entry.get(target)
        if before is None:
            self.entry[target] = dict(after)
            self._enter(target, source, after)
            return True
        changed = False
        for name in before.keys() | after.keys():
            old, new = before.get(name), after.get(name)
            if old is not None and new is not None and old.expression is new.expression and old.origins == new.origins:
                continue
            origins = (old.origins if old else NOWHERE) | (new.origins if new else NOWHERE)
            if old is not None and new is not None and old.expression is new.expression:
                merged = Value(old.expression, origins)
            else:
                stable = target not in self.graph.cyclic
                name_here = self.made.make("name", f"{name} into {target}", scope=Scope.UNKNOWN, stable=stable)
                self.joins[name_here] = (target, name)
                merged = Value(name_here, origins)
            if old is None or merged.expression is not old.expression or merged.origins != old.origins:
                before[name] = merged
                changed = True
        self._enter(target, source, after)
        return changed

    def _enter(self, target: int, source: int, after: Registers) -> None:
        """Keeps what the registers of a loop hold when it is entered."""
        if target not in self.graph.cyclic or self.graph.component[target] == self.graph.component[source]:
            return
        for name, value in after.items():
            here = self.made.make("name", f"{name} into {target}", scope=Scope.UNKNOWN, stable=False)
            self._entering.setdefault(here, {})[source] = value.expression

    def first(self, expression: Expression) -> set[int] | None:
        """The numbers that an expression may be at its first use; None where they are not known."""
        if expression.number is not None:
            return {expression.number}
        if expression.op == "name":
            entering = self._entering.get(expression)
            found: set[int] = set()
            for one in entering.values() if entering else ():
                numbers = self.first(one) if one is not expression else None
                if numbers is None:
                    return None
                found |= numbers
            return found or None
        parts = [self.first(part) for part in expression.parts()]
        if not parts or any(part is None or len(part) != 1 for part in parts):
            return None
        number = compute(expression, [next(iter(part)) for part in parts if part])
        return None if number is None else {number}


def _kept_by_calls(name: str) -> bool:
    """Whether a called function hands the register back as it was: R16 to R31 and every second eight from R40 on."""
    number = int(name[1:]) if name[0] == "R" else 0
    return 16 <= number < 32 or (number >= 40 and number // 8 % 2 == 1)


def _flat(value: Value) -> Value:
    """Choices are kept one deep: registers are written under guards over and over in unrolled code."""
    if value.choice is None:
        return value
    test, then, otherwise = value.choice
    return Value(value.expression, value.origins, (test, _plain(then), _plain(otherwise)))


def _plain(value: Value) -> Value:
    return Value(value.expression, value.origins)


def _reverse_postorder(graph: Graph) -> list[int]:
    return list(reversed(list(nx.dfs_postorder_nodes(graph.digraph, 0))))
