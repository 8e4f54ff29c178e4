"""``pdl-stress check`` as a user types it: bad requests, results that are kept, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdl_stress import Outcome, UsageError, cli
from pdl_stress.results import CaseResult, ContractResult, OperandResult

FILE = str(Path(__file__).parent / "subject_file.py")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "choose_machine", lambda wanted: wanted)


def finds(outcome: Outcome, name: str = "") -> Any:
    def run(subject: Any, plan: Any, keep: Any) -> CaseResult:
        if subject.name == name:
            raise UsageError("its inputs are none")
        contract = ContractResult("k", [OperandResult("x", "read", "after the wait")])
        case = CaseResult(subject.name, "as captured", [], "cuda", outcome, contracts=[contract])
        keep(case)
        return case

    return run


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["check", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return -1, str(result.exception)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none.py"], "is no file"),
        ([f"{FILE}::third"], "has no subject 'third'"),
        ([FILE, "--replays", "0"], "replays is 0"),
        ([FILE, "--delays", "10,1"], "ascending"),
        ([FILE, "--delays", "soon"], "expected microseconds"),
        (["word"], "neither FILE.py"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(arguments: list[str], text: str, tmp_path: Path) -> None:
    code, output = call(*arguments, "--out", str(tmp_path / "out"))
    assert code == -1
    assert text in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.usefixtures("gpu")
def test_the_exit_code_is_the_worst_verdicts(outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "run_isolated", finds(outcome))
    code, output = call(FILE, "--out", str(tmp_path), "--contracts")
    assert code == outcome.exit_code
    assert "@op(reads=" in output
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [case["chain"] for case in kept["cases"]] == ["first", "the second"]


@pytest.mark.usefixtures("gpu")
def test_one_subject_that_is_wrong_costs_neither_the_others_nor_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "run_isolated", finds(Outcome.PASS, "first"))
    code, _ = call(FILE, "--out", str(tmp_path))
    kept = json.loads((tmp_path / "results.json").read_text())
    assert code == Outcome.ERROR.exit_code
    assert [case["chain"] for case in kept["cases"]] == ["the second"]
    assert kept["errors"] == ["first: its inputs are none"]


@pytest.mark.usefixtures("gpu")
def test_in_this_process_if_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "run_check", finds(Outcome.PASS))
    assert call(f"{FILE}::first", "--no-isolate", "--out", str(tmp_path))[0] == 0
