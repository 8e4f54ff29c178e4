"""Ops from a torch operator's schema."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdl_stress import UsageError
from pdl_stress.schema import op_from_schema

LIBRARY = torch.library.Library("pdl_stress_test", "DEF")
LIBRARY.define("norm(Tensor x, Tensor? weight, float eps, bool pdl) -> Tensor")
LIBRARY.define("two(Tensor x) -> (Tensor, Tensor)")
LIBRARY.define("into(Tensor x, Tensor(a!) out, Tensor(b!) state) -> ()")
LIBRARY.define("clash(Tensor out) -> Tensor")
LIBRARY.define("over(Tensor x) -> Tensor")
LIBRARY.define("over.second(Tensor x, int n) -> Tensor")
seen: list[Any] = []


@torch.library.impl(LIBRARY, "norm", "CPU")
def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, pdl: bool) -> torch.Tensor:
    seen.append((eps, pdl))
    return x * 2


def test_tensors_are_read_and_results_are_returned() -> None:
    one = op_from_schema(torch.ops.pdl_stress_test.norm, independent=("weight",), pdl_argument="pdl")
    contract = one.contract
    assert (contract.reads, contract.writes, contract.independent) == (("x", "weight"), ("out",), ("weight",))
    assert (one.name, one.returns) == ("pdl_stress_test::norm", ("out",))
    assert torch.equal(one.run(x=torch.ones(2), weight=None, eps=0.5, pdl=True), torch.full((2,), 2.0))
    assert seen == [(0.5, True)]
    assert op_from_schema(torch.ops.pdl_stress_test.two).returns == ("out0", "out1")


def test_mutated_arguments_are_written_and_read_only_if_that_is_said() -> None:
    operator = torch.ops.pdl_stress_test.into.default
    plain, updated = op_from_schema(operator), op_from_schema(operator, updated=("state",))
    assert (plain.contract.reads, plain.contract.writes, plain.returns) == (("x",), ("out", "state"), ())
    assert updated.contract.reads == ("x", "state")


def test_a_custom_op_of_torch_library() -> None:
    @torch.library.custom_op("pdl_stress_test::scaled", mutates_args=("out",))
    def scaled(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        out.copy_(x * factor)

    one = op_from_schema(scaled)
    assert (one.contract.reads, one.contract.writes) == (("x",), ("out",))
    x, out = torch.ones(3), torch.zeros(3)
    one.run(x=x, out=out, factor=3.0, pdl=False)
    assert torch.equal(out, torch.full((3,), 3.0))


@pytest.mark.parametrize(
    ("operator", "settings", "text"),
    [
        (len, {}, "is no torch operator"),
        (torch.ops.pdl_stress_test.over, {}, "has the overloads default, second"),
        (torch.ops.pdl_stress_test.norm, {"updated": ("x",)}, "are not mutated; the schema mutates nothing"),
        (
            torch.ops.pdl_stress_test.norm,
            {"pdl_argument": "fast"},
            "no argument 'fast'; it has x, weight, eps, pdl",
        ),
        (torch.ops.pdl_stress_test.norm, {"independent": ("y",)}, "neither read nor written"),
        (torch.ops.pdl_stress_test.clash, {}, "out is an argument and the name of a result"),
    ],
)
def test_what_is_no_operator_or_has_no_such_name(operator: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        op_from_schema(operator, **settings)
