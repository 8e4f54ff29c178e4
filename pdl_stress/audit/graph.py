"""The control-flow graph of one kernel: basic blocks, with its device functions copied in at every call.

Branch targets are offsets in the listing. WARPSYNC.COLLECTIVE names where its threads go on after what stands between
it and ENDCOLLECTIVE, which is where the code goes on anyway. A call is followed into the function that stands in the
same section or has a listing of its own; each call site has its own copy, so that what one caller did is not mixed with
another. A call or branch whose target is not known makes the block *opaque*: what follows is judged unknown, never
right or wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import networkx as nx

from pdl_stress.audit.image import Image
from pdl_stress.audit.listing import BadListing, Function, Instruction
from pdl_stress.audit.operands import parse
from pdl_stress.sass.cubin import SLOT

MAX_BLOCKS = 40_000
MAX_DEPTH = 8  # calls within calls

_JUMPS = {"BRA", "JMP", "BRX", "BRXU", "JMX", "JMXU"}
_INDIRECT = {"BRX", "BRXU", "JMX", "JMXU"}
_ENDS = {"EXIT", "KILL", "RTT"}
_SERVICES = {"vprintf", "__assertfail", "malloc", "free"}
_VARYING = ("DIV", "CONV", "ANY")  # forms of a branch that look at other threads
EXIT = -1
"""The block behind every exit, of the graph that `Graph.to_end` is computed on."""

Place = tuple[tuple[int, ...], str]
"""A copy of a function: the offsets of the calls that led to it, and its name."""


@dataclass(frozen=True, slots=True)
class Edge:
    """target: a block. tests: predicates (`P0`, `!UP0`) that all hold where `taken`, else that do not all hold.

    No tests: always. select: of an indirect branch, the register that it goes by, and which of its targets this is.
    opaque: nothing is known about when it is taken, or what happens on the way.
    """

    target: int
    tests: tuple[str, ...] = ()
    taken: bool = True
    select: tuple[str, int] | None = None
    opaque: bool = False


@dataclass
class Block:
    """Instructions that run one after the other. function: whose offsets they are. exits: the guard of an exit at its
    end (`""`: always), None where there is none."""

    index: int
    function: str
    calls: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    edges: list[Edge] = field(default_factory=list)
    exits: str | None = None
    opaque: bool = False
    clobbers: bool = False
    """It ends in a call that is not followed, which may change the registers that callers save."""

    def place(self, instruction: Instruction) -> str:
        return f"{self.function}+{instruction.offset:#x}"


@dataclass
class Graph:
    """The blocks of a kernel; it starts at block 0. notes: what was not understood. lost: code may be missing."""

    kernel: str
    blocks: list[Block]
    notes: tuple[str, ...]
    lost: bool = False

    @cached_property
    def digraph(self) -> nx.DiGraph[int]:
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(len(self.blocks)))
        graph.add_edges_from((block.index, edge.target) for block in self.blocks for edge in block.edges)
        return graph

    @cached_property
    def component(self) -> dict[int, int]:
        """The number of the loop nest that each block belongs to; a block in no loop has a number of its own."""
        components = nx.strongly_connected_components(self.digraph)
        return {block: number for number, members in enumerate(components) for block in members}

    @cached_property
    def cyclic(self) -> frozenset[int]:
        """The blocks that a thread may run more than once."""
        sizes = Counter(self.component.values())
        looping = {block for block, number in self.component.items() if sizes[number] > 1}
        return frozenset(looping | {a for a, b in self.digraph.edges if a == b})

    @cached_property
    def to_end(self) -> dict[int, int]:
        """The immediate post-dominator of each block from which an end is reached; EXIT stands for the end."""
        backward = nx.DiGraph((b, a) for a, b in self.digraph.edges)
        ends = [block.index for block in self.blocks if block.exits is not None or not block.edges]
        backward.add_edges_from((EXIT, end) for end in ends)
        if EXIT not in backward:
            return {}
        return {block: at for block, at in nx.immediate_dominators(backward, EXIT).items() if at is not None}

    @cached_property
    def _from_entry(self) -> dict[int, int]:
        """The immediate dominator of each block that can be reached."""
        found = nx.immediate_dominators(self.digraph, 0)
        return {block: at for block, at in found.items() if at is not None and at != block}

    def dominates(self, first: int, second: int) -> bool:
        """Whether every way from the entry to the second block passes the first."""
        while second != first and second in self._from_entry:
            second = self._from_entry[second]
        return second == first

    def instructions(self) -> Iterator[tuple[Block, Instruction]]:
        for block in self.blocks:
            for instruction in block.instructions:
                yield block, instruction

    def reaches(self, starts: set[int], stop: int | None = None) -> set[int]:
        """The blocks that can run from these on, these among them, without passing `stop`."""
        seen, todo = set(), [start for start in starts if start != stop]
        while todo:
            block = todo.pop()
            if block not in seen:
                seen.add(block)
                todo += [edge.target for edge in self.blocks[block].edges if edge.target != stop]
        return seen


def build(kernel: str, functions: dict[str, Function], image: Image) -> Graph:
    """The graph of a kernel. functions: the listings of its section and of those it may call. Raises BadListing."""
    if kernel not in functions:
        raise BadListing(f"nvdisasm does not list {kernel}")
    return _Builder(functions, image).graph(kernel)


class _Builder:
    def __init__(self, functions: dict[str, Function], image: Image) -> None:
        self.functions, self.image = functions, image
        self.blocks: list[Block] = []
        self.notes: list[str] = []
        self.started: dict[tuple[Place, int], int] = {}
        self.todo: list[tuple[Place, int, tuple[Any, ...]]] = []
        self.leaders = {name: self._leaders(function) for name, function in functions.items()}

    def graph(self, kernel: str) -> Graph:
        self._block(((), kernel), 0, ())
        while self.todo:
            self._fill(*self.todo.pop())
        lost = any(block.opaque for block in self.blocks)
        return Graph(kernel, self.blocks, tuple(dict.fromkeys(self.notes)), lost)

    def _leaders(self, function: Function) -> set[int]:
        """Offsets at which a block starts."""
        found = {0} | {at for (home, _), at in self.image.locals.items() if home == function.name}
        found |= {target for targets in self.image.indirect.values() for target in targets}
        for instruction in function.instructions:
            if _ends_block(instruction):
                found.add(instruction.offset + SLOT)
            if instruction.base in _JUMPS or instruction.base == "CALL":
                found |= set(_targets(instruction))
        return found

    def _block(self, place: Place, offset: int, returns: tuple[Any, ...]) -> int:
        """The block that starts at an offset of a copy. returns: where its calls return to, outermost first."""
        key = (place, offset)
        if key not in self.started:
            if len(self.blocks) >= MAX_BLOCKS:
                raise BadListing(f"{place[1]} has more than {MAX_BLOCKS} blocks with its calls: too large to follow")
            self.started[key] = len(self.blocks)
            self.blocks.append(Block(len(self.blocks), place[1], place[0], ()))
            self.todo.append((place, offset, returns))
        return self.started[key]

    def _fill(self, place: Place, offset: int, returns: tuple[Any, ...]) -> None:
        block = self.blocks[self.started[place, offset]]
        function = self.functions[place[1]]
        listed: list[Instruction] = []
        at = offset
        while (instruction := function.at(at)) is not None:
            listed.append(instruction)
            at += SLOT
            if _ends_block(instruction) or at in self.leaders[function.name]:
                break
        block.instructions = tuple(listed)
        if not listed:
            self._lose(block, f"the code of {function.name} is left at {offset:#x}, where it has no instruction")
            return
        self._edges(block, listed[-1], at, place, returns)

    def _edges(self, block: Block, last: Instruction, after: int, place: Place, returns: tuple[Any, ...]) -> None:
        tests, opaque = _tests(last)

        def go(offset: int, **how: Any) -> None:
            block.edges.append(Edge(self._block(place, offset, returns), **how))

        def otherwise() -> None:
            if tests or opaque:
                go(after, tests=tests, taken=False, opaque=False)

        if last.base in _ENDS:
            block.exits = last.guard
            otherwise()
        elif last.base in _JUMPS:
            targets = self.image.indirect.get(last.offset, ()) if last.base in _INDIRECT else _targets(last)
            for number, target in enumerate(targets):
                if last.base in _INDIRECT:
                    go(target, select=(last.operands[0], number))
                else:
                    go(target, tests=() if opaque else tests)
            if not targets:
                self._lose(block, f"{block.place(last)}: the targets of {last} are not known")
            otherwise()
        elif last.base == "CALL":
            self._call(block, last, after, place, returns)
            otherwise()
        elif last.base == "RET":
            if returns:
                outer, back, rest = returns[-1]
                block.edges.append(Edge(self._block(outer, back, rest), tests=tests))
            else:
                self._lose(block, f"{block.place(last)}: a return from what was not called")
            otherwise()
        else:
            go(after)

    def _call(self, block: Block, call: Instruction, after: int, place: Place, returns: tuple[Any, ...]) -> None:
        tests, _ = _tests(call)
        target = self._callee(block, call, place)
        if isinstance(target, str):  # a service of the driver: it knows nothing of PDL, and returns
            block.clobbers = True
            block.edges.append(Edge(self._block(place, after, returns), tests=tests))
            return
        if target is None or len(place[0]) >= MAX_DEPTH or call.offset in place[0]:
            why = "its target is not known" if target is None else "calls are nested too deep, or recursive"
            self.notes.append(f"{block.place(call)}: {call} is not followed, {why}")
            block.clobbers = True
            block.edges.append(Edge(self._block(place, after, returns), tests=tests, opaque=True))
            return
        name, offset = target
        inner: Place = ((*place[0], call.offset), name)
        entered = self._block(inner, offset, (*returns, (place, after, returns)))
        block.edges.append(Edge(entered, tests=tests))

    def _callee(self, block: Block, call: Instruction, place: Place) -> tuple[str, int] | str | None:
        """The function and offset that a call goes to, or the name of a service of the driver."""
        linked = self._linked(block, call)
        if linked in self.functions:
            return linked, 0
        if linked.startswith("__cuda_syscall") or linked in _SERVICES:
            return linked
        for operand in reversed(call.operands):
            name = operand.strip("`()")
            for home, offset in ((place[1], self.image.locals.get((place[1], name))), (name, 0)):
                if offset is not None and home in self.functions:
                    return home, offset
        targets = _targets(call)
        return (place[1], targets[0]) if targets else None

    def _linked(self, block: Block, call: Instruction) -> str:
        """The symbol that a call through a register goes to, as the code before it loads its address; or ""."""
        wanted = next((text.split(".")[0] for text in call.operands if text.startswith(("R", "UR"))), "")
        numbers: dict[str, int] = {}
        found = ""
        for instruction in block.instructions[:-1]:
            operands = instruction.operands
            if len(operands) != 2 or instruction.guard:
                continue
            source = parse(operands[1])
            if instruction.base in ("MOV", "UMOV") and source.kind == "number":
                numbers[operands[0]] = source.value
            elif instruction.base in ("LDC", "ULDC", "LDCU") and operands[0] == wanted:
                index = operands[1].removeprefix("c[0x4][").rstrip("]")
                offset = source.value if source.kind == "cell" and source.bank == 4 else numbers.get(index, -1)
                found = self.image.links.get(offset, "")
        return found

    def _lose(self, block: Block, note: str) -> None:
        self.notes.append(note)
        block.opaque = True


def _ends_block(instruction: Instruction) -> bool:
    base = instruction.base
    return base in _JUMPS or base in _ENDS or base in ("CALL", "RET")


def _tests(instruction: Instruction) -> tuple[tuple[str, ...], bool]:
    """The predicates that must hold for it, and whether other things that are not known decide too."""
    operands = [parse(text) for text in instruction.operands]
    own = [f"{'!' if o.negative else ''}{o.name}" for o in operands if o.kind == "predicate"]
    tests = tuple(test for test in (instruction.guard, *own) if test and test not in ("PT", "UPT"))
    opaque = instruction.base in _JUMPS and any(part in _VARYING for part in instruction.modifiers)
    return tests, opaque


def _targets(instruction: Instruction) -> tuple[int, ...]:
    """The offset that an operand names; none for a register or a symbol."""
    if instruction.base in _INDIRECT:
        return ()
    operands = [parse(text) for text in instruction.operands]
    numbers = [operand.value for operand in operands if operand.kind == "number"]
    return (numbers[-1],) if numbers and numbers[-1] >= 0 and numbers[-1] % SLOT == 0 else ()
