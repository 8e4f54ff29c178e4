"""The command line as a user meets it: exit codes, messages, files; never a traceback, never a PASS out of nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import pytest

from pdl_stress import DeviceError, UsageError, __version__, catalog, cli
from pdl_stress.cuda.device import Presence, Sighting
from pdl_stress.cuda.findings import Finding, Status
from pdl_stress.faults import FAULTS
from pdl_stress.outcome import Outcome
from pdl_stress.results import CaseResult

ROOT = Path(__file__).resolve().parent.parent
QUICK = ("--machine", "model", "--controls", "F01,F04")
"""Enough controls to cover every data edge."""


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


Cli = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Runs ``pdl-stress ARGUMENTS`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "width", 118)

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["pdl-stress", *arguments])
        handler = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main()
        finally:
            signal.signal(signal.SIGINT, handler)
        out, err = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        assert "Traceback" not in out + err
        return Ended(code, out, err)

    return call


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, Presence.NONE, "no NVIDIA device in this test")


def see(monkeypatch: pytest.MonkeyPatch, presence: Presence, reason: str = "") -> None:
    monkeypatch.setattr("pdl_stress.cuda.device.presence", lambda *_: Sighting(presence, reason))


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


# --- a run on the model --------------------------------------------------------------------------------------------


def test_a_newcomer_without_a_gpu_sees_every_chain_ordered(run: Cli, absent: None, tmp_path: Path) -> None:
    ended = run("run")
    assert ended.code == 0
    for name in catalog.SHIPPED:
        (row,) = (line for line in ended.out.splitlines() if f" {name} " in line)
        assert "ORDERED" in row
    assert "verdict: ORDERED" in ended.out
    assert "No kernel ran: the model judged the contracts." in ended.out
    assert ended.err == ""
    (folder,) = (tmp_path / "pdl-stress-results").iterdir()
    assert f"results: pdl-stress-results/{folder.name}/results.json" in ended.out
    stored = results(folder)
    assert stored["verdict"] == "ORDERED"
    assert [case["chain"] for case in stored["cases"]] == list(catalog.SHIPPED)
    for case in stored["cases"]:
        assert {(c["expected"], c["verdict"]) for c in case["controls"]} == {
            ("caught", "refuted"),
            ("clean", "ordered"),
            ("unpromised", "allowed"),
        }


def test_results_have_the_published_fields(run: Cli, tmp_path: Path) -> None:
    assert run("run", "csa2-fused-m1", *QUICK, "--out", "here", "--seed", "3").code == 0
    stored = results(tmp_path / "here")
    assert stored["schema"] == 1
    assert {"verdict", "command", "started", "seconds", "environment", "cases", "errors"} <= set(stored)
    assert stored["command"] == "pdl-stress run csa2-fused-m1 --machine model --controls F01,F04 --out here --seed 3"
    assert stored["environment"]["machine"] == "model"
    assert {
        "gpu", "capability", "driver", "cuda", "torch", "version", "source_sha256", "commit", "clocks"
    } <= set(stored["environment"])  # fmt: skip
    (case,) = stored["cases"]
    assert {
        "chain", "ops", "kernels", "verdict", "arms", "replays", "mismatches", "replays_per_second", "pool", "edges",
        "data_edges", "controls",
    } <= set(case)  # fmt: skip
    assert case["data_edges"][0] == {"writer": "producer", "reader": "input_norm", "buffer": "hidden", "exposed_by": []}
    for control in case["controls"]:
        assert {
            "fault", "step", "writer", "reader", "delay_us", "expected", "reason", "cause_checked", "verdict"
        } <= set(control)  # fmt: skip
        assert "kills" not in control, "the model counts nothing"
        assert "replays" not in control
    assert (case["arms"], case["replays_per_second"], case["pool"]) == ([], None, None)


def test_results_name_no_folder_of_this_machine(run: Cli, tmp_path: Path) -> None:
    run("run", "csa2-fused-m1", *QUICK, "--out", "here")
    text = (tmp_path / "here" / "results.json").read_text()
    assert str(ROOT) not in text
    assert str(tmp_path) not in text


def test_a_chain_named_twice_runs_once(run: Cli, tmp_path: Path) -> None:
    run("run", "csa2-fused-m1", "csa2-fused-m1", *QUICK, "--out", "here")
    assert len(results(tmp_path / "here")["cases"]) == 1


def test_without_controls_a_run_is_inconclusive(run: Cli) -> None:
    ended = run("run", "csa2-fused-m1", "--machine", "model", "--controls", "none")
    assert ended.code == 4
    assert "no control was refuted on producer->input_norm through hidden" in ended.out
    assert "verdict: INCONCLUSIVE" in ended.out


def test_details_list_every_control(run: Cli) -> None:
    ended = run("run", "csa2-fused-m1", *QUICK, "--details")
    assert "csa2-fused-m1: controls" in ended.out
    assert "one warp waits, barrier behind it (twin)" in " ".join(ended.out.split())
    assert "csa2-fused-m1: controls" not in run("run", "csa2-fused-m1", *QUICK, "--out", "short").out


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_can_be_planted_to_see_a_fail(run: Cli, fault: str) -> None:
    step = {"F07": "kv_norm", "F28": "projection"}.get(fault, "q_norm")
    ended = run("run", "csa2-fused-m1", "--machine", "model", "--plant", f"{fault}@{step}")
    writer = "late_weight" if fault == "F28" else "projection"
    assert ended.code == 1
    assert "verdict: FAIL" in ended.out
    assert f"planted: {fault} " in ended.out
    assert f"before {writer} writes it" in ended.out
    assert "what the rules allow:" in ended.out
    assert "<-- too late" in ended.out


def test_a_plant_without_a_chain_takes_those_that_have_the_step(run: Cli, tmp_path: Path) -> None:
    assert run("run", "--machine", "model", "--plant", "F01@kv_projection", "--out", "here").code == 1
    names = [case["chain"] for case in results(tmp_path / "here")["cases"]]
    assert names == [name for name in catalog.SHIPPED if "separate" in name]
    assert run("run", "--machine", "model", "--plant", "F07@q_norm", "--out", "there").code == 1
    assert [case["chain"] for case in results(tmp_path / "there")["cases"]] == names, "every chain has a q_norm"


def test_the_rule_set_is_passed_on(run: Cli) -> None:
    ended = run("run", "csa2-fused-m1", *QUICK, "--rules", "observed:sm_90")
    assert "csa2-fused-m1: ordered under «observed:sm_90»" in ended.out, "promised by nobody, so it is said"


def test_a_run_with_only_some_controls_says_so(run: Cli, tmp_path: Path) -> None:
    ended = run("run", "csa2-fused-m1", *QUICK, "--out", "some")
    assert ended.code == 0
    assert "csa2-fused-m1: only some controls ran (F01, F04)" in ended.out
    assert results(tmp_path / "some")["cases"][0]["faults"] == ["F01", "F04"]
    assert (
        "csa2-fused-m1: only some controls ran (none)"
        in run("run", "csa2-fused-m1", "--machine", "model", "--controls", "none").out
    )
    ended = run("run", "csa2-fused-m1", "--machine", "model", "--out", "all")
    assert "only some controls" not in ended.out
    assert results(tmp_path / "all")["cases"][0]["faults"] is None


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nope"], "unknown chain 'nope'; `pdl-stress list` shows csa2-fused-m1"),
        (["run", "csa2-fused"], "Did you mean 'csa2-fused-m1'?"),
        (["run", "[red]x[/]"], "unknown chain '[red]x[/]'"),
        (["run", "--machine", "gpu"], "unknown machine 'gpu'; expected auto, cuda or model"),
        (["run", "--ops", "fast"], "unknown ops 'fast'"),
        (["run", "--rules", "hoped"], "unknown rule set 'hoped'; expected one of documented, observed:sm_90"),
        (["run", "--replays", "0"], "replays is 0; expected 1 to"),
        (["run", "--replays", "-1"], "replays is -1"),
        (["run", "--replays", "many"], "Invalid value for '--replays'"),
        (["run", "--replays", "1.5"], "Invalid value for '--replays'"),
        (["run", "--control-replays", "0"], "control_replays is 0; expected 1 to"),
        (["run", "--seed", "-1"], "seed is -1; expected 0 to"),
        (["run", "--controls", "F99"], "unknown fault 'F99'; the catalogue has F00"),
        (["run", "--controls", "F02,"], "unknown fault ''"),
        (["run", "--controls", "F02@nowhere"], "control 'F02@nowhere': no chain of this run has a step 'nowhere'"),
        (["run", "--controls", "F02@"], "control 'F02@': no chain of this run has a step ''"),
        (
            ["run", "csa2-fused-m1", "--controls", "F02@q_projection"],
            "has a step 'q_projection'; there are ['producer'",
        ),
        (["run", "--controls", "[bold]"], "unknown fault '[bold]'"),
        (["run", "--delays", "soon"], "--delays 'soon': expected microseconds separated by commas"),
        (["run", "--delays", ""], "--delays ''"),
        (["run", "--delays", "-1"], "delays_us: -1.0; expected a number from 0 to 1000"),
        (["run", "--delays", "1e9"], "delays_us: 1000000000.0; expected a number from 0 to 1000"),
        (["run", "--delays", "nan"], "delays_us: nan; expected a number from 0 to 1000"),
        (["run", "--time-limit", "0"], "time_limit: 0.0; expected a number from"),
        (["run", "--time-limit", "nan"], "time_limit: nan; expected a number from"),
        (["run", "--time-limit", "inf"], "time_limit: inf; expected a number from"),
        (["run", "--plant", "F02"], "expected FAULT@STEP, for example F02@q_norm"),
        (["run", "--plant", "F99@q_norm"], "unknown fault 'F99'"),
        (["run", "--plant", "F02@nowhere"], "no step 'nowhere'; its steps are"),
        (["run", "--plant", "F02@kv_norm", "csa2-fused-m1"], "steps where it can: input_norm, projection, q_norm"),
        (["run", "--plant", "F07@q_norm", "csa2-fused-m1"], "cannot be caught at 'q_norm' of 'csa2-fused-m1'"),
        (
            ["run", "--plant", "F07@q_norm", "csa2-separate-m1", "csa2-fused-m1"],
            "cannot be caught at 'q_norm' of 'csa2-fused-m1'",
        ),
        (["run", "--plant", "F07@input_norm"], "cannot be caught at 'input_norm' of 'csa2-fused-m1'"),
        (["run", "--frobnicate"], "No such option: --frobnicate"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["show"], "Missing argument"),
        (["show", "nothing.json"], "'nothing.json' cannot be read: No such file or directory"),
        (["show", "."], "'.' cannot be read: Is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_a_usage_error_and_runs_nothing(
    run: Cli, tmp_path: Path, arguments: list[str], words: str
) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert words in " ".join(ended.err.split())
    assert ended.out == "", "messages go to stderr"
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_without_a_command_help_is_shown(run: Cli) -> None:
    ended = run()
    assert ended.code == 2
    assert "run " in ended.text
    assert "doctor " in ended.text


# --- where results go ----------------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_left_alone(run: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "[old] results"
    folder.mkdir()
    (folder / "results.json").write_text("precious")
    ended = run("run", "csa2-fused-m1", *QUICK, "--out", str(folder))
    assert ended.code == 2
    assert "[old] results' is not empty; choose another folder, or add --force" in ended.err
    assert (folder / "results.json").read_text() == "precious"
    assert run("run", "csa2-fused-m1", *QUICK, "--out", str(folder), "--force").code == 0
    assert results(folder)["verdict"] == "ORDERED"


def test_an_empty_folder_and_a_deep_one_are_fine(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert run("run", "csa2-fused-m1", *QUICK, "--out", "empty").code == 0
    assert run("run", "csa2-fused-m1", *QUICK, "--out", "a/b/c").code == 0
    assert [path.name for path in (tmp_path / "a/b/c").iterdir()] == ["results.json"], "no temporary file stays"


def test_a_file_is_no_folder(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    ended = run("run", "csa2-fused-m1", *QUICK, "--out", "file")
    assert ended.code == 2
    assert "--out 'file' is a file; expected a folder" in ended.err
    ended = run("run", "csa2-fused-m1", *QUICK, "--out", "file/below")
    assert ended.code == 2
    assert "--out 'file/below' cannot be written: Not a directory" in ended.err
    assert (tmp_path / "file").read_text() == "x"


def test_an_unwritable_folder_is_told_before_the_run(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cli, "run_on_model", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    ended = run("run", "csa2-fused-m1", *QUICK, "--out", "locked")
    assert ended.code == 2
    assert "'locked/results.json' cannot be written: Permission denied" in ended.err


def test_while_a_run_goes_on_its_file_says_that_it_has_not_finished(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def campaign(chains: Any, plan: Any, progress: Any, keep: Any) -> Any:
        seen.append(results(tmp_path / "here"))
        keep([finished("first", Outcome.ORDERED)])
        seen.append(results(tmp_path / "here"))
        return [finished("first", Outcome.ORDERED)]

    monkeypatch.setattr(cli, "run_on_model", campaign)
    assert run("run", "--machine", "model", "--out", "here").code == 0
    assert [(found["verdict"], found["errors"], len(found["cases"])) for found in seen] == [
        ("ERROR", ["the run has not finished"], 0),
        ("ERROR", ["the run has not finished"], 1),
    ]
    assert (results(tmp_path / "here")["verdict"], results(tmp_path / "here")["errors"]) == ("ORDERED", [])


# --- the device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "presence", "reason"),
    [
        ("cuda", Presence.NONE, "no NVIDIA device"),
        ("cuda", Presence.UNUSABLE, "compute capability 8.0 has no PDL"),
        ("auto", Presence.UNUSABLE, "compute capability 8.0 has no PDL"),
    ],
)
def test_a_device_that_cannot_be_used_is_an_error_and_never_a_model_run(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, presence: Presence, reason: str
) -> None:
    see(monkeypatch, presence, reason)
    monkeypatch.setattr(cli, "run_on_model", lambda *_: pytest.fail("the model must not stand in"))
    ended = run("run", "--machine", machine, "--out", "here")
    assert ended.code == 3
    assert f"the GPU cannot be used: {reason}" in ended.err
    assert "verdict: ERROR" in ended.out
    assert "No kernel ran" not in ended.out
    stored = results(tmp_path / "here")
    assert (stored["verdict"], stored["cases"]) == ("ERROR", [])
    assert reason in stored["errors"][0]


def finished(chain: str, outcome: Outcome) -> CaseResult:
    case = CaseResult(chain, "native", [], "cuda", outcome)
    case.reasons = ["as it was"]
    return case


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DeviceError("the driver went away"), "the driver went away"),
        (RuntimeError("[red] herring"), "RuntimeError: [red] herring (a defect of pdl-stress: please report it)"),
        (KeyboardInterrupt(), "interrupted; what had finished is kept"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_what_had_finished_is_kept_and_the_outcome_is_error(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    def campaign(chains: Any, plan: Any, worker: Any, progress: Any, keep: Any) -> Any:
        progress("first", 0, 2)
        keep([finished("first", Outcome.PASS)])
        raise error

    class NoWorker:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(cli, "choose_machine", lambda machine: "cuda")
    monkeypatch.setattr(cli, "run_on_gpu", campaign)
    monkeypatch.setattr("pdl_stress.cuda.worker.Worker", NoWorker)
    ended = run("run", "--machine", "cuda", "--out", "here")
    assert ended.code == 3
    assert words in ended.err
    stored = results(tmp_path / "here")
    assert stored["verdict"] == "ERROR"
    assert [(case["chain"], case["verdict"]) for case in stored["cases"]] == [("first", "PASS")]
    assert words in stored["errors"][0]


def test_ctrl_c_after_a_counted_mismatch_is_a_fail(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def campaign(chains: Any, plan: Any, progress: Any, keep: Any) -> Any:
        keep([finished("first", Outcome.FAIL)])
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the signal was lost")

    monkeypatch.setattr(cli, "run_on_model", campaign)
    ended = run("run", "--machine", "model", "--out", "here")
    assert ended.code == 1
    assert "interrupted; what had finished is kept" in ended.err
    assert "verdict: FAIL" in ended.out
    stored = results(tmp_path / "here")
    assert (stored["verdict"], stored["errors"]) == ("FAIL", ["interrupted; what had finished is kept"])
    assert run("show", "here/results.json").code == 1


def test_on_the_model_too(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(cli, "run_on_model", broken)
    ended = run("run", "--machine", "model", "--out", "here")
    assert ended.code == 3
    assert "ZeroDivisionError: division by zero" in ended.err
    assert results(tmp_path / "here")["verdict"] == "ERROR"


def test_a_defect_anywhere_else_is_a_message_as_well(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise AssertionError("[bold]cannot be[/]")

    monkeypatch.setattr(catalog, "names", broken)
    ended = run("list")
    assert ended.code == 3
    assert f"error: AssertionError: [bold]cannot be[/]. This is a defect of pdl-stress {__version__}" in ended.err


@pytest.mark.parametrize("outcome", Outcome)
def test_the_exit_code_is_that_of_the_worst_case(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    cases = [finished("good", Outcome.PASS), finished("other", outcome)]
    monkeypatch.setattr(cli, "run_on_model", lambda *_: cases)
    ended = run("run", "--machine", "model", "--out", "here")
    assert ended.code == outcome.exit_code
    assert f"verdict: {outcome}" in ended.out
    assert results(tmp_path / "here")["verdict"] == str(outcome)
    again = run("show", "here/results.json")
    assert again.code == outcome.exit_code


# --- show ----------------------------------------------------------------------------------------------------------


def body(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(("results:", "["))]


def test_show_repeats_what_run_printed(run: Cli) -> None:
    first = run("run", "csa2-fused-m1", *QUICK, "--details", "--out", "here")
    again = run("show", "here/results.json", "--details")
    assert again.code == first.code == 0
    assert body(again.out) == body(first.out)
    failed = run("run", "csa2-fused-m1", "--machine", "model", "--plant", "F02@q_norm", "--out", "bad")
    again = run("show", "bad/results.json")
    assert again.code == failed.code == 1
    assert body(again.out) == body(failed.out)


def test_show_prints_the_founding_control_as_a_table(run: Cli, tmp_path: Path) -> None:
    run("run", "csa2-fused-m1", "--machine", "model", "--controls", "F00", "--out", "here")
    ended = run("show", "here/results.json", "--f00", "--svg", "table.svg")
    assert ended.code == 0
    assert "csa2-fused-m1, projection -> q_norm" in ended.out
    rows = [line.split() for line in ended.out.splitlines() if "before_stores" in line]
    assert any("refuted" in row for row in rows)
    assert any("ordered" in row for row in rows)
    assert (tmp_path / "table.svg").read_text().startswith("<svg")


def test_show_without_a_founding_control_says_how_to_make_one(run: Cli) -> None:
    run("run", "csa2-fused-m1", *QUICK, "--out", "here")
    ended = run("show", "here/results.json", "--f00")
    assert ended.code == 2
    assert "holds no F00 control; make one with `pdl-stress run --controls F00`" in ended.err


def test_show_refuses_a_picture_that_cannot_be_written(run: Cli) -> None:
    run("run", "csa2-fused-m1", *QUICK, "--out", "here")
    ended = run("show", "here/results.json", "--svg", "nowhere/table.svg")
    assert ended.code == 2
    assert "--svg 'nowhere/table.svg' cannot be written" in ended.err


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', '{"schema": 2}', '"PASS"', "\x00"])
def test_show_refuses_what_is_no_result(run: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    ended = run("show", "bad.json")
    assert ended.code == 2
    assert "'bad.json'" in ended.err
    assert ended.out == ""


# --- list, doctor, version -----------------------------------------------------------------------------------------


def test_list_names_chains_faults_ops_and_rules(run: Cli) -> None:
    ended = run("list")
    assert ended.code == 0
    for name in (*catalog.SHIPPED, *FAULTS, "native", "documented", "observed:sm_90"):
        assert name in ended.out
    assert "producer -> input_norm" in ended.out


def test_list_shows_a_chain_that_cannot_be_loaded(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One broken package must not hide the chains of the others."""
    load = catalog.load

    def some(name: str) -> Any:
        if name == "theirs":
            raise UsageError("entry point 'their_package:chain' gave int, not a [bold]Chain[/].")
        return load(name)

    monkeypatch.setattr(catalog, "names", lambda: (*catalog.SHIPPED, "theirs"))
    monkeypatch.setattr(catalog, "load", some)
    ended = run("list")
    assert ended.code == 0
    text = " ".join(ended.out.split())
    assert "theirs" in text
    assert "cannot be loaded: entry point" in text
    assert "[bold]" in text
    for name in catalog.SHIPPED:
        assert name in ended.out


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([Status.OK, Status.NOTE, Status.ABSENT], 0),
        ([Status.OK, Status.BLOCKS_VERDICT], 4),
        ([Status.BLOCKS_VERDICT, Status.UNUSABLE, Status.OK], 3),
    ],
)
def test_doctor_ends_with_what_a_run_would(
    run: Cli, monkeypatch: pytest.MonkeyPatch, statuses: list[Status], code: int
) -> None:
    findings = [Finding(f"subject {n}", status, "[red]found[/]", "do [this]") for n, status in enumerate(statuses)]
    monkeypatch.setattr("pdl_stress.cuda.device.inspect", lambda: findings)
    ended = run("doctor")
    assert ended.code == code
    for finding in findings:
        assert finding.name in ended.out
        assert finding.status.value in ended.out
    assert "[red]found[/]" in ended.out
    assert "do [this]" in ended.out


def test_doctor_sees_launch_blocking(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    ended = run("doctor")
    assert ended.code in (3, 4), "a device that cannot be used weighs more"
    (row,) = (line for line in ended.out.splitlines() if "CUDA_LAUNCH_BLOCKING" in line and "blocks" in line)
    assert row


def test_version(run: Cli) -> None:
    ended = run("--version")
    assert (ended.code, ended.out) == (0, f"pdl-stress {__version__}\n")


# --- as a program --------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def call(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pdl_stress", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return call


def test_the_module_is_the_program(shell: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    ended = shell("run", "csa2-fused-m1", *QUICK, "--out", "here")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "verdict: ORDERED" in ended.stdout
    assert results(tmp_path / "here")["verdict"] == "ORDERED"
    assert shell("show", "here/results.json").returncode == 0
    refused = shell("run", "nope")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: unknown chain 'nope'")
    assert shell("run", "csa2-fused-m1", "--machine", "model", "--plant", "F02@q_norm").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["run", "csa2-fused-m1", *QUICK, "--details", "--out", "here"], 0),
        (["run", "--machine", "model", "--plant", "F02@q_norm", "--details", "--out", "here"], 1),
        (["list"], 0),
    ],
    ids=["run", "a run that fails", "list"],
)
def test_a_reader_that_goes_away_changes_nothing(tmp_path: Path, arguments: list[str], code: int) -> None:
    """As in ``pdl-stress run | head -1``."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, "-m", "pdl_stress", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(120) == code
    if "run" in arguments:
        stored = results(tmp_path / "here")
        assert stored["verdict"] == ("FAIL" if code else "ORDERED")
        assert stored["errors"] == []
        assert all(case["reasons"] or not code for case in stored["cases"])


def test_a_hidden_device_is_no_device(shell: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """Works with and without a GPU in the machine."""
    ended = shell("run", "--machine", "cuda", "--out", "here", CUDA_VISIBLE_DEVICES="-1")
    assert ended.returncode == 3
    assert "error: the GPU cannot be used" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert results(tmp_path / "here")["verdict"] == "ERROR"


def test_the_script_and_the_module_share_one_entry() -> None:
    import tomllib

    from pdl_stress import __main__

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert declared == {"pdl-stress": "pdl_stress.cli:main"}
    assert vars(__main__)["main"] is cli.main
    try:
        version("pdl-stress")
    except PackageNotFoundError:
        return  # a checkout that is not installed
    (script,) = (e for e in entry_points(group="console_scripts") if e.name == "pdl-stress")
    assert script.load() is cli.main
