"""Random kernels of waits, barriers, conditions, loops and stores, and an interpreter that says what is early in them.

Conditions tell warps or whole CTAs apart, never the lanes of a warp: what holds the rest of a warp is the machine's
doing, and not to be seen in a source.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

STORES = 6
WARPS = range(32)  # the most that a CTA has: a role that the code tells apart is taken to be held by some thread
OF_WARPS = {
    "tid < 32": lambda warp: warp == 0,
    "tid / 32 == 2": lambda warp: warp == 2,
    "tid >= 64": lambda warp: warp >= 2,
    "warp >= 4": lambda warp: warp >= 4,
    "tid / 128 == 1": lambda warp: warp // 4 == 1,
    "warp == 7": lambda warp: warp == 7,
    "(tid & 0xe0) == 96": lambda warp: warp % 8 == 3,
    "(tid & 0x3e0) == 160": lambda warp: warp == 5,
}
OF_CTAS = {
    "flag": lambda cta: cta.flag,
    "n > 3": lambda cta: cta.n > 3,
    "blockIdx.x == 0": lambda cta: cta.block == 0,
}


@dataclass(frozen=True)
class Cta:
    """The values that a whole CTA shares. turns: of every loop."""

    flag: int
    n: int
    block: int
    turns: int


CTAS = [Cta(*values) for values in itertools.product((0, 1), (0, 9), (0, 1), (0, 1, 3))]


@dataclass
class Program:
    """source: the kernel's body. early: the stores that some thread makes before any wait; made: those made at all."""

    source: str
    early: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)


def program(seed: int) -> Program:
    chance = random.Random(seed)
    stores = iter(range(STORES))
    tree = _block(chance, stores, depth=0, together=True)
    test = chance.choice([""] * 6 + [*OF_WARPS, *OF_CTAS])
    tree.insert(chance.randint(0, len(tree) // 2), ("if", test, [("wait",)], []))
    if chance.random() < 0.5:
        tree.insert(chance.randint(1, len(tree)), ("sync",))
    found = Program("\n".join(_lines(tree)))
    for cta in CTAS:
        ordered = dict.fromkeys(WARPS, False)
        _run(tree, cta, set(WARPS), ordered, found)
    return found


def _block(chance, stores, depth, together):
    """together: whether every thread of the CTA is here, so that a barrier may stand here."""
    tree = []
    for _ in range(chance.randint(1, 4 if depth == 0 else 2)):
        kind = chance.choice(["store", "store", "wait", "sync", "if", "if", "loop"])
        if kind == "store":
            number = next(stores, None)
            if number is not None:
                tree.append(("store", number))
        elif kind == "wait" and chance.random() < 0.5:
            tree.append(("wait",))
        elif kind == "sync" and together:
            tree.append(("sync",))
        elif kind == "if" and depth < 2:
            test = chance.choice([*OF_WARPS, *OF_CTAS])
            inside = together and test in OF_CTAS
            other = _block(chance, stores, depth + 1, inside) if chance.random() < 0.4 else []
            tree.append(("if", test, _block(chance, stores, depth + 1, inside), other))
        elif kind == "loop" and depth < 1:
            tree.append(("loop", _block(chance, stores, depth + 1, together)))
    return tree


def _lines(tree, depth=1):
    space = "    " * depth
    for node in tree:
        if node[0] == "store":
            yield f"{space}st(p{node[1]} + i, 1.0f);"
        elif node[0] == "wait":
            yield f"{space}WAIT;"
        elif node[0] == "sync":
            yield f"{space}__syncthreads();"
        elif node[0] == "if":
            yield f"{space}if ({node[1] or 'true'}) {{"
            yield from _lines(node[2], depth + 1)
            yield f"{space}}} else {{"
            yield from _lines(node[3], depth + 1)
            yield f"{space}}}"
        else:
            yield f"{space}#pragma unroll 1"
            yield f"{space}for (int j = 0; j < m; ++j) {{"
            yield from _lines(node[1], depth + 1)
            yield f"{space}}}"


def _run(tree, cta, here, ordered, found):
    """Runs a block for the warps that are here, one statement after the other; between barriers warps are independent,
    so it is no matter in which order they come."""
    for node in tree:
        if not here:
            return
        if node[0] == "store":
            found.made.add(node[1])
            if not all(ordered[warp] for warp in here):
                found.early.add(node[1])
        elif node[0] == "wait":
            ordered.update(dict.fromkeys(here, True))
        elif node[0] == "sync":
            if any(ordered.values()):
                ordered.update(dict.fromkeys(WARPS, True))
        elif node[0] == "if":
            test = node[1]
            inside = {w for w in here if not test or (OF_WARPS[test](w) if test in OF_WARPS else OF_CTAS[test](cta))}
            _run(node[2], cta, inside, ordered, found)
            _run(node[3], cta, here - inside, ordered, found)
        else:
            for _ in range(cta.turns):
                _run(node[1], cta, here, ordered, found)


def kernel(name: str, made: Program) -> str:
    pointers = ", ".join(f"float* p{number}" for number in range(STORES))
    return (
        f'extern "C" __global__ void {name}({pointers}, int n, int flag, int m) {{\n'
        f"    const int tid = threadIdx.x, warp = tid / 32, i = blockIdx.x * blockDim.x + tid;\n{made.source}\n}}\n"
    )
