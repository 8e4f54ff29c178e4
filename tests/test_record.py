"""The file of a run: from the first second on it says what is known, and never what an older run found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pdl_stress import UsageError
from pdl_stress import record as module
from pdl_stress.outcome import Outcome
from pdl_stress.record import FILE, UNFINISHED, Record, result_folder
from pdl_stress.report import load_json
from pdl_stress.results import CaseResult

ROOT = Path(__file__).resolve().parent.parent


def case(outcome: Outcome, chain: str = "chain") -> CaseResult:
    return CaseResult(chain, "native", [], "cuda", outcome)


def stored(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / FILE).read_text())
    return found


# --- the record ----------------------------------------------------------------------------------------------------


def test_from_its_first_moment_a_run_is_an_error(tmp_path: Path) -> None:
    Record(tmp_path, "pdl-stress run")
    found = stored(tmp_path)
    assert (found["verdict"], found["errors"], found["cases"]) == ("ERROR", ["the run has not finished"], [])
    assert UNFINISHED == "the run has not finished"
    assert load_json(tmp_path / FILE).verdict is Outcome.ERROR


def test_an_older_result_is_gone_at_once(tmp_path: Path) -> None:
    old = Record(tmp_path, "old")
    old.keep([case(Outcome.PASS)])
    old.finish()
    assert stored(tmp_path)["verdict"] == "PASS"
    Record(tmp_path, "new")
    assert (stored(tmp_path)["verdict"], stored(tmp_path)["command"]) == ("ERROR", "new")


@pytest.mark.parametrize("outcome", Outcome)
def test_what_has_finished_is_kept_and_counts_as_unfinished(tmp_path: Path, outcome: Outcome) -> None:
    record = Record(tmp_path, "pdl-stress run")
    record.keep([case(Outcome.PASS, "a"), case(outcome, "b")])
    found = stored(tmp_path)
    assert [c["chain"] for c in found["cases"]] == ["a", "b"]
    assert found["verdict"] == ("FAIL" if outcome is Outcome.FAIL else "ERROR"), "a mismatch stands whatever follows"
    assert load_json(tmp_path / FILE).errors == [UNFINISHED]
    record.finish()
    assert load_json(tmp_path / FILE).verdict is record.result.verdict is outcome
    assert load_json(tmp_path / FILE).cases == record.result.cases
    assert record.result.errors == []


def test_what_kept_the_run_from_going_on_is_in_the_file(tmp_path: Path) -> None:
    record = Record(tmp_path, "pdl-stress run")
    record.keep([case(Outcome.PASS)])
    record.fail("interrupted")
    record.finish()
    assert (stored(tmp_path)["verdict"], stored(tmp_path)["errors"]) == ("ERROR", ["interrupted"])


def test_a_run_without_a_case_shows_nothing(tmp_path: Path) -> None:
    record = Record(tmp_path, "pdl-stress run")
    record.finish()
    assert record.result.verdict is Outcome.INCONCLUSIVE


def test_a_file_that_cannot_be_written_at_the_start_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(UsageError, match=rf"'{tmp_path}/{FILE}' cannot be written: Is a directory"):
        Record(tmp_path, "pdl-stress run")
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        Record(tmp_path / "nowhere", "pdl-stress run")
    assert [path.name for path in tmp_path.iterdir()] == [FILE], "no temporary file stays"


def test_a_file_that_cannot_be_written_at_the_end_is_an_error_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(tmp_path, "pdl-stress run")
    record.keep([case(Outcome.PASS)])

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_json", full)
    record.finish()
    assert record.result.verdict is Outcome.ERROR
    (text,) = record.result.errors
    assert text.endswith("cannot be written: No space left on device")
    assert stored(tmp_path)["verdict"] == "ERROR", "what is on the disk says that the run has not finished"


# --- the folder ----------------------------------------------------------------------------------------------------


def test_two_default_folders_of_one_second_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Still(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "datetime", Still)
    folders = [result_folder(None, False) for _ in range(3)]
    assert [str(folder) for folder in folders] == [
        f"pdl-stress-results/20260102-030405{end}" for end in ("", "-1", "-2")
    ]
    assert all(folder.is_dir() for folder in folders)


def test_a_default_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pdl-stress-results").write_text("a file")
    with pytest.raises(UsageError, match=r"'pdl-stress-results/.*' cannot be made: Not a directory\. Use --out"):
        result_folder(None, False)


def test_a_folder_is_made_and_an_empty_one_taken(tmp_path: Path) -> None:
    assert result_folder(tmp_path / "a/b", False).is_dir()
    assert result_folder(tmp_path / "a/b", False) == tmp_path / "a/b"


# --- a run that is killed ------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pdl_stress import cli

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

cli.run_on_model = killed
sys.argv = ["pdl-stress", "run", "csa2-fused-m1", "--machine", "model", "--out", "here", "--force"]
cli.main()
"""


def test_a_forced_run_that_is_killed_at_once_leaves_no_older_pass(tmp_path: Path) -> None:
    record = Record(result_folder(tmp_path / "here", False), "pdl-stress run")
    record.keep([case(Outcome.PASS)])
    record.finish()
    assert stored(tmp_path / "here")["verdict"] == "PASS"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    found = stored(tmp_path / "here")
    assert (found["verdict"], found["errors"], found["cases"]) == ("ERROR", [UNFINISHED], [])
