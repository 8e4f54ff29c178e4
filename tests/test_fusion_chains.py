"""The chains of the fused projections: what runs, as which class would run it, and what of it is under test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pdl_stress import Outcome, UsageError, catalog
from pdl_stress.catalog import deepseek_v32, ops, projections
from pdl_stress.contract import Wait
from pdl_stress.faults import expectations, plan_controls
from pdl_stress.model import DOCUMENTED, find_races

BF16 = torch.bfloat16
V32 = ("indexer-tf32", "qkv-a-m1", "qkv-a-m8")


# --- csa2: as HiddenStateProjections launches it ---------------------------------------------------------------------


class Launched:
    """An op that notes what it was launched with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def op(self) -> Any:
        return replace(ops.tinygemm2, run=lambda **operands: self.calls.append(operands))


def weights(rows: int = 48, k: int = 64) -> torch.Tensor:
    return torch.randn(rows, k).to(BF16)


@pytest.mark.parametrize(
    ("launch", "tokens", "fuse_one_token", "rows"),
    [
        ("wq_a and wkv", 1, True, (0, 48)),
        ("wq_a", 1, False, (0, 32)),
        ("wkv", 1, False, (32, 48)),
        ("wq_a", 8, True, (0, 32)),
        ("wkv", 8, True, (32, 48)),
    ],
)
def test_a_step_launches_what_the_projections_would(
    launch: str, tokens: int, fuse_one_token: bool, rows: tuple[int, int]
) -> None:
    whole, launched = weights(), Launched()
    op = projections.projected(launched.op(), launch, 32, fuse_one_token)
    operand = whole[rows[0] : rows[1]]
    op.run(input=torch.randn(tokens, 64).to(BF16), weight=operand, out="out", pdl=True)
    (call,) = launched.calls
    assert (call["weight"].data_ptr(), call["weight"].shape) == (operand.data_ptr(), operand.shape)
    assert (call["out"], call["pdl"]) == ("out", True)


@pytest.mark.parametrize(("launch", "tokens"), [("wq_a and wkv", 2), ("wkv", 1), ("wq_a", 9)])
def test_a_step_that_the_projections_would_not_launch_is_refused(launch: str, tokens: int) -> None:
    launched = Launched()
    op = projections.projected(launched.op(), launch, 32)
    with pytest.raises(UsageError, match=f"has no launch '{launch}'"):
        op.run(input=torch.randn(tokens, 64).to(BF16), weight=weights(), out="out", pdl=True)
    assert launched.calls == []


def test_projections_are_made_once_for_a_weight_and_go_with_it() -> None:
    made: list[int] = []
    of = projections.made_once(lambda weight: made.append(1) or object())
    first, second = weights(), weights()
    assert of(first) is of(first)
    assert of(first) is not of(second)
    assert len(made) == 2
    known = of.__closure__
    assert known is not None
    del first, second
    (table,) = next(cell.cell_contents for cell in known if isinstance(cell.cell_contents, list))
    assert len(table) == 0


@pytest.mark.parametrize("name", catalog.CSA2)
def test_every_projection_of_csa2_is_one_of_the_projections_launches(name: str) -> None:
    chain = catalog.load(name)
    found = [step.operands["weight"] for step in chain.steps if "projection" in step.name]
    assert {view.buffer.name for view in found} == {"wqkv"}, "one weight"
    assert [view.box[0] for view in found] == ([(0, 1792)] if "fused" in name else [(0, 1280), (1280, 1792)])


# --- DeepSeek-V3.2 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", V32)
def test_the_gemm_is_plain_and_what_follows_it_is_under_test(name: str) -> None:
    chain = catalog.load(name)
    assert [step.name for step in chain.steps if not step.pdl] == ["projection"]
    assert ("input_norm", "projection") not in chain.edges
    assert len(chain.edges) == len(chain.steps) - 2
    norms = ["k_norm"] if name == "indexer-tf32" else ["q_norm", "kv_norm", "k_norm"]
    assert [(edge.writer, edge.reader) for edge in chain.data_edges] == [
        ("producer", "input_norm"),
        *(("projection", norm) for norm in norms),
    ]
    assert find_races(chain, DOCUMENTED, 2) == []


@pytest.mark.parametrize("name", V32)
def test_every_data_edge_has_a_control_that_must_be_caught(name: str) -> None:
    chain = catalog.load(name)
    found = expectations(chain, plan_controls(chain, None, (10.0,)))
    caught = {(c.edge.writer, c.edge.reader) for c, expectation in found if expectation.expected == "caught"}
    assert caught == {(edge.writer, edge.reader) for edge in chain.data_edges}
    assert not any(c.edge.reader == "k_norm" and c.variant == "one warp waits" for c, _ in found), "it has one warp"
    assert deepseek_v32.K_NORM.waits == ops.layernorm.waits - {Wait.ONE_WARP}


def test_the_indexers_step_is_its_projection() -> None:
    weight = torch.randn(192, 256)
    hidden = torch.randn(3, 256).to(BF16)
    k, head_weights = torch.empty(3, 128, dtype=BF16), torch.empty(3, 64)
    deepseek_v32.INDEXER_PROJECTION.run(input=hidden, weight=weight, k=k, weights=head_weights, pdl=False)
    exact = hidden.double() @ weight.double().t()
    torch.testing.assert_close(k.double(), exact[:, :128], rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(head_weights.double(), exact[:, 128:], rtol=1e-4, atol=1e-3)


def test_the_down_projections_step_is_one_gemm_over_the_weight_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(2304, 128).to(BF16)
    hidden, out = torch.randn(2, 128).to(BF16), torch.empty(2, 2304, dtype=BF16)
    real, calls = torch.nn.functional.linear, []

    def linear(x: Any, w: Any, *rest: Any) -> Any:
        calls.append((w.data_ptr(), tuple(w.shape)))
        return real(x, w, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    deepseek_v32.QKV_A_PROJECTION.run(input=hidden, weight=weight, out=out, pdl=False)
    assert calls == [(weight.data_ptr(), (2304, 128))]
    torch.testing.assert_close(out.double(), hidden.double() @ weight.double().t(), rtol=2**-7, atol=2**-4)


def test_the_model_finds_them_ordered() -> None:
    from pdl_stress.campaign import run_on_model
    from pdl_stress.plan import Plan

    cases = run_on_model([catalog.load(name) for name in V32], Plan())
    assert [(case.verdict, case.reasons) for case in cases] == [(Outcome.ORDERED, [])] * 3
