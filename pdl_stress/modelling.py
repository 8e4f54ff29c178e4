"""What the rules of PDL say of measured contracts: is every order that kernels must keep promised?

Probes show what one kernel does behind a late predecessor. The model asks the rest: behind several kernels, of which
some may never wait, does a wait still cover the one that matters (R8)? Triggers are not measured, so each counts as
early as it can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .buffers import Buffer
from .chain import Chain
from .contract import KernelContract, Trigger, Wait
from .model import DOCUMENTED, find_races
from .op import Op

INPUTS = "inputs"
"""Name of the step that stands for the late inputs."""

READ, OVERWRITTEN, WRITTEN_TWICE = "read", "overwritten", "written twice"
"""What an order is about; the words of :attr:`pdl_stress.results.Mismatch.order`."""


@dataclass(frozen=True)
class Order:
    """``later`` must touch ``buffer`` after ``earlier`` has: indices of nodes, 0 for the inputs.

    Args:
        what: ``read``: later reads what earlier writes. ``overwritten``: later writes what earlier reads. ``written
            twice``: both write it.
        early: the later one touches it before its wait, as measured.
    """

    what: str
    earlier: int
    later: int
    buffer: str
    early: bool


@dataclass(frozen=True)
class Node:
    """A captured node. ``overlaps``: it has a programmatic edge to it. ``waits``: whether it holds a wait."""

    label: str
    overlaps: bool
    waits: bool


def unpromised(nodes: list[Node], orders: list[Order]) -> list[Order]:
    """The orders that the documented rules do not promise, so that some schedule breaks them.

    Args:
        nodes: in stream order, without the inputs.
        orders: between nodes with only programmatic edges between them.
    """
    chain = Chain("measured")
    names = [INPUTS, *(f"node{number}" for number in range(1, len(nodes) + 1))]
    operands: list[dict[str, str]] = [{} for _ in names]  # per node: operand -> access
    early: list[set[str]] = [set() for _ in names]
    for number, order in enumerate(orders):
        name = f"order{number}"
        operands[order.earlier][name] = "reads" if order.what == OVERWRITTEN else "writes"
        operands[order.later][name] = "reads" if order.what == READ else "writes"
        if order.early:
            early[order.later].add(name)
    buffers = {f"order{number}": chain.buffer(f"order{number}", (4,), "float32") for number in range(len(orders))}
    read_first = [f"order{number}" for number, order in enumerate(orders) if order.what == OVERWRITTEN]
    _add(chain, "before", dict.fromkeys(read_first, "writes"), set(), buffers, Node("", overlaps=False, waits=False))
    for index, name in enumerate(names):
        node = nodes[index - 1] if index else Node(INPUTS, overlaps=False, waits=True)
        _add(chain, name, operands[index], early[index], buffers, node)
    broken = {(race.buffer, *race.steps) for race in find_races(chain, DOCUMENTED)}
    return [
        order for number, order in enumerate(orders)
        if (f"order{number}", names[order.earlier], names[order.later]) in broken
    ]  # fmt: skip


def _add(
    chain: Chain, name: str, operands: dict[str, str], early: set[str], buffers: dict[str, Buffer], node: Node
) -> None:
    """A step of its own. Each order has its own buffer, so that a race is that order's and no other's."""
    own = chain.buffer(f"{name}_own", (4,), "float32")  # a step must touch something
    contract = KernelContract(
        tuple(operand for operand, access in operands.items() if access == "reads"),
        (*(operand for operand, access in operands.items() if access == "writes"), "own"),
        tuple(early),
        Wait.ALL if node.waits else Wait.NEVER,
        Trigger.ENTRY,
    )
    views: dict[str, Any] = {operand: buffers[operand] for operand in operands}
    chain.step(name, Op(name, contract, _not_launched, contract), pdl=node.overlaps, own=own, **views)


def _not_launched(**_: object) -> None:
    raise NotImplementedError("a measured contract is judged, not launched")
