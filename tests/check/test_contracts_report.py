"""Measured contracts as people read them: tables, the row per kernel, declarations to start from."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from pdl_stress import Op, Outcome
from pdl_stress.report import load_json, render, write_json
from pdl_stress.report.contracts import agreement, contracts_table, declarations
from pdl_stress.results import ArmResult, CaseResult, ContractResult, ControlResult, Mismatch, OperandResult, RunResult

BEFORE, AFTER = "before the wait", "after the wait"


def case() -> CaseResult:
    contract = ContractResult(
        "gemm",
        [
            OperandResult("x", "read", AFTER, "norm", declared="dependent"),
            OperandResult("weight", "read", BEFORE, declared="independent"),
            OperandResult("out[0]", "written", AFTER, lag_us=5.4),
        ],
        "ordered",
        "all 3 accesses after the wait",
        waits=1,
        triggers=2,
    )
    control = ControlResult("F02", "all waits removed", "gemm", "norm", "gemm", "x", 10.0, "caught", "", 256, 256, True)
    control.verdict = "caught"
    arm = ArmResult("x late before gemm", 2000, 0, 1.5e-3, 10.0, "norm")
    arms = [arm, ArmResult("x", 1, 1, None)]
    return CaseResult("mine", "as captured", ["gemm"], "cuda", contracts=[contract], controls=[control], arms=arms)


def text_of(found: CaseResult) -> str:
    out = io.StringIO()
    Console(file=out, width=140, no_color=True).print(contracts_table(found))
    return out.getvalue()


def test_the_table_says_when_each_buffer_is_touched() -> None:
    text = text_of(case())
    assert all(word in text for word in ("x of norm", "weight", "before the wait", "5.4 us", "independent"))
    assert "dependent: no" not in text


def test_a_declared_contract_that_does_not_hold_is_marked() -> None:
    found = case()
    found.contracts[0].operands[0].measured = BEFORE
    assert "dependent: no" in text_of(found)
    assert agreement(found, found.contracts[0])[1] == "broken: x"


def test_one_row_per_kernel() -> None:
    found = case()
    assert agreement(found, found.contracts[0]) == (
        "gemm", "holds", "ordered", "all 3 accesses after the wait", "early: weight", "1 of 1 caught", "1 arms clean",
    )  # fmt: skip
    found.arms[0].mismatches = 3
    found.controls[0].verdict = "missed"
    for operand in found.contracts[0].operands:
        operand.declared, operand.measured = "", AFTER
    found.contracts[0].audited, found.contracts[0].modelled = "", ""
    assert agreement(found, found.contracts[0]) == (
        "gemm", "no contract", "-", "-", "all after the wait", "0 of 1 caught", "1 of 1 arms differ",
    )  # fmt: skip
    assert agreement(CaseResult("a", "", [], "cuda"), ContractResult("k"))[5:] == ("none", "not under test")


def test_a_declaration_is_python_that_declares_what_was_measured() -> None:
    found = case()
    operands = [OperandResult("2x", "read", AFTER), OperandResult("()", "written", AFTER)]
    found.contracts.append(ContractResult("class", operands))
    scope: dict[str, object] = {}
    exec(declarations(found), scope)
    gemm, other = scope["gemm"], scope["class_"]
    assert isinstance(gemm, Op)
    assert isinstance(other, Op)
    assert (gemm.contract.reads, gemm.contract.writes) == (("x", "weight"), ("out_0",))
    assert gemm.contract.independent == ("weight",)
    assert (other.contract.reads, other.contract.writes) == (("_2x",), ("buffer",))


def test_contracts_are_kept_in_the_file_and_shown_with_all_details(tmp_path: Path) -> None:
    run = RunResult(Outcome.INCONCLUSIVE, "pdl-stress check x.py", "", 1.0, {}, [case()])
    write_json(run, tmp_path / "results.json")
    again = load_json(tmp_path / "results.json").cases[0]
    assert again.contracts == case().contracts
    assert "measured contracts" in render(again)
    assert "do the checks agree?" in render(again)


def test_what_a_mismatch_says_names_the_order_that_was_broken() -> None:
    found = Mismatch("w", "r", "buf", "out", [3], "1", "2", "what was there before", 0, ["w->r"], False)
    assert str(found).startswith("r read buf before w had written it")
    found.order = "overwritten"
    assert str(found).startswith("w wrote buf before its wait, while r could still read it; out[3] is 1, expected 2")
    found.order = "written twice"
    assert str(found).startswith("r wrote buf before its wait, while w, which comes first, could still write it")
    found.also_serialized = True
    assert "not a PDL ordering fault" in str(found)
