"""Ops that run a kernel as a fused projection of :mod:`fusions` would: from its weights, on the path that it chooses.

A chain's step is one kernel, and a projection may launch several. So a step asks the projection what it would launch,
runs its own launch of these, and fails where the projection would take another path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from ..errors import UsageError
from ..op import Op


class _Any:
    """Stands for whatever op the chain runs; the projection never calls it."""

    name = "the chain's"
    known_bad: str | None = None

    def supports(self, device: Any) -> bool:
        return True

    def refusal(self, device: Any, k: int) -> str:
        return ""

    def prepare(self, device: Any, columns: Iterable[int]) -> None:
        pass

    def __call__(self, x: Any, weight: Any, bias: Any = None, /) -> Any:
        raise NotImplementedError("the chain launches it itself")


@cache
def projected(op: Op, launch: str, split: int, fuse_one_token: bool = True) -> Op:
    """``op`` as one launch of :class:`fusions.csa2.HiddenStateProjections`.

    Args:
        launch: which of its launches.
        split: rows of the first weight. The operand ``weight`` is a view of both, one behind the other.
        fuse_one_token: as there.
    """

    def make(weight: Any) -> Any:
        from fusions.csa2 import HiddenStateProjections

        whole = weight if weight._base is None else weight._base
        parts = linears(whole, (split, whole.shape[0] - split))
        made = HiddenStateProjections(*parts, op=_Any(), policy="*", fuse_one_token=fuse_one_token)
        return in_place(made, whole[:1])

    projections_of = made_once(make)

    def run(*, input: Any, weight: Any, **others: Any) -> object:
        projections = projections_of(weight)
        launches = {one.name: one for one in projections.launches(input)}
        if launch not in launches:
            path, why = projections.explain(input)
            raise UsageError(
                f"{op.name}: the projections take the path {path} ({why}), which has no launch {launch!r}."
            )
        return op.run(input=input, weight=launches[launch].weight, **others)

    return replace(op, run=run)


def made_once(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``make(weight)`` once for each weight operand; what was made goes with its weight."""
    known: list[Any] = []

    def get(weight: Any) -> Any:
        if not known:
            from torch.utils.weak import WeakTensorKeyDictionary

            known.append(WeakTensorKeyDictionary())
        if weight not in known[0]:
            known[0][weight] = make(weight)
        return known[0][weight]

    return get


def linears(weight: Any, counts: tuple[int, ...]) -> list[Any]:
    """Linears whose weights are rows of one tensor, one behind the other, so that a projection finds them in place."""
    import torch

    made = []
    for rows in weight.split(counts):
        linear = torch.nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta", dtype=rows.dtype)
        linear.weight = torch.nn.Parameter(rows, requires_grad=False)
        made.append(linear)
    return made


def in_place(front: Any, hidden: Any) -> Any:
    """A projection that has taken note of its rows as they lie, and moved nothing. Raises UsageError if it cannot."""
    if not front.cache_derived_state():
        raise UsageError(f"the weights of the projection are not rows of one tensor: {front.explain(hidden)[1]}")
    return front
