"""One kernel's machine code, audited: its accesses against its waits and triggers, and how it ends. No verdict yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import networkx as nx

from pdl_stress.audit.expressions import Expression, Origin, Value
from pdl_stress.audit.graph import Block, Graph, build
from pdl_stress.audit.image import Image, Parameter
from pdl_stress.audit.listing import Function, Instruction
from pdl_stress.audit.opcodes import FENCES, TRIGGER, WAIT, Access, Proxy, access, never
from pdl_stress.audit.operands import address
from pdl_stress.audit.order import Order
from pdl_stress.audit.states import Cause, State, Status
from pdl_stress.audit.values import Registers, Values


class When(StrEnum):
    """An access against the wait: of every thread that makes it, on every path."""

    AFTER = "after the wait"
    BEFORE = "may be before the wait"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Touch:
    """An access to global memory. origins: what its address may be from, most certain first.

    before: a state in which it is made by a thread that has not waited, with the block where; None where there is none.
    """

    place: str
    block: int
    instruction: Instruction
    access: Access
    proxy: Proxy
    origins: tuple[Origin, ...]
    when: When
    causes: frozenset[Cause]
    before: State | None
    after_trigger: bool
    wait_may_follow: bool = False
    wait_follows: bool = False
    """A wait can be reached from it; every way from it to an end passes one."""

    @property
    def non_coherent(self) -> bool:
        """Whether it may be served by a cache that is not kept coherent (`ld.global.nc`, `const __restrict__`)."""
        return "CONSTANT" in self.instruction.modifiers

    @property
    def origin(self) -> Origin:
        return self.origins[0]


@dataclass(frozen=True)
class Mark:
    """A wait, a trigger or an exit, and the states in which it is run. fenced: a fence stands directly before it."""

    place: str
    block: int
    instruction: Instruction
    states: frozenset[State]
    fenced: bool = False


@dataclass
class Kernel:
    """What the machine code of a kernel does. notes: what was not understood, in words. blind: there may be accesses
    that were not seen: in a call before the wait that is not followed, or in code that no known branch leads to."""

    name: str
    arch: str
    parameters: tuple[Parameter, ...]
    touches: tuple[Touch, ...] = ()
    waits: tuple[Mark, ...] = ()
    triggers: tuple[Mark, ...] = ()
    exits: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()
    blind: bool = False
    order: Order | None = field(default=None, repr=False)

    def describe(self, origin: Origin, names: dict[int, str] | None = None) -> str:
        """The operand in words: its name where one is known, else `parameter 2`."""
        parameter = next((p for p in self.parameters if p.ordinal == origin.ordinal), None)
        words = (names or {}).get(origin.ordinal, f"parameter {origin.ordinal}")
        if parameter is not None and parameter.size > 8 and origin.offset:
            words += f"+{origin.offset:#x}"
        if origin.kind == "loaded":
            return f"memory that {words} points to indirectly"
        if origin.kind == "parameter":
            return words
        return {"symbol": "a device variable", "constant": "a pointer in constant memory"}.get(
            origin.kind, "unknown memory"
        )


def audit_kernel(name: str, arch: str, functions: dict[str, Function], image: Image) -> Kernel:
    """Audits one kernel. functions: the listings of its section and of what it may call. Raises BadListing."""
    graph = build(name, functions, image)
    values = Values(graph, image)
    order = Order(graph, values)
    notes = list(graph.notes)
    if order.overflowed:
        notes.append("too many cases to follow all of them: what is not known to have waited counts as unknown")
    return Kernel(
        name,
        arch,
        image.parameters,
        tuple(_touches(graph, values, order, image)),
        tuple(_marks(graph, order, WAIT)),
        tuple(_marks(graph, order, TRIGGER)),
        tuple(_exits(graph, order)),
        tuple(notes),
        graph.lost or bool(order.blind),
        order=order,
    )


def _touches(graph: Graph, values: Values, order: Order, image: Image) -> Iterator[Touch]:
    triggers = _Triggers(graph)
    waits = order.ways.waiting
    leading = waits.union(*(nx.ancestors(graph.digraph, block) for block in waits))
    for block in graph.blocks:
        if block.index not in values.entry:
            continue
        for instruction, registers in values.walk(block):
            found = access(instruction)
            states = order.at.get((block.index, instruction.offset), set())
            if found is None or not states:
                continue
            kind, proxy, operand = found
            origins = _origins(operand, instruction, registers, values, image, proxy)
            if origins is None:
                continue
            late = [state for state in states if state.status is Status.NOT]
            unknown = any(state.status is Status.UNKNOWN for state in states)
            when = When.BEFORE if late else When.UNKNOWN if unknown else When.AFTER
            yield Touch(
                block.place(instruction),
                block.index,
                instruction,
                kind,
                proxy,
                origins,
                when,
                frozenset(state.cause for state in late),
                min(late, key=str) if late else None,
                triggers.before(block.index, instruction.offset),
                block.index in leading,
                _wait_follows(graph, block, instruction, waits),
            )


def _wait_follows(graph: Graph, block: Block, instruction: Instruction, waits: frozenset[int]) -> bool:
    later = (one for one in block.instructions if one.offset > instruction.offset)
    if any(one.base == WAIT and not one.guard for one in later):
        return True
    after, seen = graph.to_end.get(block.index), {block.index}
    while after is not None and after not in seen:
        if after in waits:
            return any(one.base == WAIT and not one.guard for one in graph.blocks[after].instructions)
        seen.add(after)
        after = graph.to_end.get(after)
    return False


class _Triggers:
    """Whether some thread of the CTA may have triggered when an access is made; one trigger counts for the CTA (R4)."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._at = {
            (block.index, one.offset) for block, one in graph.instructions() if one.base == TRIGGER and not never(one)
        }
        self._behind: set[int] = set()
        for index, _ in self._at:
            self._behind |= graph.reaches({edge.target for edge in graph.blocks[index].edges})

    def before(self, block: int, offset: int) -> bool:
        """A trigger leads to the access; or the access to no trigger, so that another thread may be ahead."""
        if not self._at:
            return False
        if block in self._behind or any(index == block and at < offset for index, at in self._at):
            return True
        ahead = self._graph.reaches({edge.target for edge in self._graph.blocks[block].edges})
        return not any(index in ahead or (index == block and at > offset) for index, at in self._at)


def _origins(
    operand: str, instruction: Instruction, registers: Registers, values: Values, image: Image, proxy: Proxy
) -> tuple[Origin, ...] | None:
    """What an address may be from; None where it is surely not global memory."""
    guard = values.test((instruction.guard,), registers) if instruction.guard else values.conditions.literal(True)
    found: set[Origin] = set()
    for name in address(operand).registers if operand else ():
        value = values.under(values.value(name, registers), guard)
        found |= {_in_space(origin, value, image) for origin in value.origins}
    kinds = {origin.kind for origin in found}
    if proxy is not Proxy.ASYNC and kinds and kinds <= {"space", "stack", "shared"}:
        return None
    if proxy is Proxy.GENERIC and kinds & {"space", "stack", "shared"} and "parameter" not in kinds:
        return None
    known = [origin for origin in found if origin.kind in ("parameter", "loaded", "symbol", "constant")]
    rank = {"parameter": 0, "loaded": 1, "symbol": 2, "constant": 3}
    known.sort(key=lambda origin: (rank[origin.kind], origin))
    return tuple(known) or (Origin("unknown"),)


def _in_space(origin: Origin, value: Value, image: Image) -> Origin:
    """The parameter whose own address it is, as that of a tensor map; else the origin as it is."""
    if origin.kind != "space" or image.base is None:
        return origin
    offset = _offset_in_space(value.expression)
    parameter = image.parameter_at(image.base + offset) if offset is not None else None
    if parameter is None or offset is None:
        return origin
    return Origin("parameter", parameter.ordinal, image.base + offset - parameter.offset)


def _offset_in_space(expression: Expression) -> int | None:
    if expression.op == "cell":
        return 0
    parts = expression.parts()
    if expression.op == "add" and len(parts) == 2 and parts[0].op == "cell":
        return parts[1].number
    return None


def _marks(graph: Graph, order: Order, base: str) -> Iterator[Mark]:
    for block, instruction in graph.instructions():
        if instruction.base == base and not never(instruction):
            states = frozenset(order.at.get((block.index, instruction.offset), ()))
            fenced = base == TRIGGER and _fenced(graph, block, instruction)
            yield Mark(block.place(instruction), block.index, instruction, states, fenced)


def _exits(graph: Graph, order: Order) -> Iterator[Mark]:
    for index, states in order.exits.items():
        block = graph.blocks[index]
        last = block.instructions[-1]
        yield Mark(block.place(last), index, last, frozenset(states))


def _fenced(graph: Graph, block: Block, trigger: Instruction) -> bool:
    """Whether a fence, and no store behind it, stands before the trigger on the one way that leads to it."""
    listed = [one for one in block.instructions if one.offset < trigger.offset]
    for _ in range(8):
        for instruction in reversed(listed):
            if instruction.base in FENCES:
                return True
            touched = access(instruction)
            if touched is not None and touched[0] is not Access.READ:
                return False
        before = list(graph.digraph.predecessors(block.index))
        if len(before) != 1:
            return False
        block = graph.blocks[before[0]]
        listed = list(block.instructions)
    return False
