"""Results on their way out and back: files round-trip, damage is refused, tables show what matters and nothing else."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from pdl_stress import UsageError
from pdl_stress.outcome import Outcome, worst
from pdl_stress.report import founding_table, load_json, print_cases, render, to_json, write_json
from pdl_stress.report.table import controls_summary, summary
from pdl_stress.results import (
    SCHEMA,
    ArmResult,
    CaseResult,
    ControlResult,
    DataEdgeResult,
    EdgeResult,
    Mismatch,
    NodeResult,
    RunResult,
)

MARKUP = "[red]x[/] [/] [bold"


def gpu_case() -> CaseResult:
    """As a run on a GPU leaves it; the numbers are made up."""
    case = CaseResult("csa2-fused-m1", "native", ["rmsnorm", "tinygemm2"], "cuda", Outcome.PASS)
    case.arms = [
        ArmResult("as deployed", 20_000, 0, 1.4978e-4, seconds=0.27),
        ArmResult("delayed", 20_000, 0, 1.4978e-4, 10.0, "projection", 0.9),
    ]
    case.replays_per_second, case.pool, case.requested_replays = 74_074.0, 256, 20_000
    case.edges = [EdgeResult("projection", "q_norm", "programmatic", 0.97, ["as deployed"])]
    case.data_edges = [DataEdgeResult("projection", "q_norm", "qkv", ["delayed (projection, 10 us)"])]
    case.controls = [control(0.0, 0, "unpromised", "not seen"), control(10.0, 256, "caught", "caught")]
    case.controls.append(control(10.0, 0, "clean", "clean", variant="twin"))
    case.model, case.sass, case.seconds = "ordered under «documented»", {"rmsnorm": "no ACQBULK"}, 12.5
    case.window_us = 2.0
    case.nodes = [
        NodeResult(
            "kernel", "gemm<128>", "_Z4gemmILi128EEvPv", "projection", [112, 1, 1], [384, 1, 1], 98304,
            ["cluster 2x1x1"], ["programmatic"], 3, 1, "libgemm.so",
        ),
        NodeResult("memset", step="q_norm", incoming=["full"]),
    ]  # fmt: skip
    case.uncontrolled = {"kv_norm": "no machine code of norm: stripped"}
    case.exposure = "profiler, 128 replays, resolution 32 ns"
    return case


def control(delay: float, kills: int, expected: str, verdict: str, variant: str = "never waits") -> ControlResult:
    return ControlResult(
        "F02", variant, "q_norm", "projection", "q_norm", "qkv", delay, expected, "the rules", 256, kills,
        True if kills else None, verdict,
    )  # fmt: skip


def model_case() -> CaseResult:
    case = CaseResult("csa2-fused-m1", "native", ["rmsnorm"], "model", Outcome.FAIL)
    case.reasons = ["the contracts allow a bad schedule; see the timeline"]
    case.timeline = ["  1  projection CTA 0  starts, triggers", "  2  q_norm CTA 0  reads qkv   <-- before projection"]
    case.controls = [control(10.0, 0, "caught", "refuted"), control(10.0, 0, "unpromised", "allowed", "late")]
    for one in case.controls:
        one.replays = 0
    case.planted = "F02 never waits @ projection->q_norm, 10 us"
    case.model = "q_norm may read qkv before projection writes it"
    return case


def run_of(*cases: CaseResult, errors: tuple[str, ...] = ()) -> RunResult:
    verdict = worst([Outcome.ERROR] * bool(errors) + [case.verdict for case in cases])
    started = "2026-01-01T00:00:00+00:00"
    return RunResult(verdict, "pdl-stress run", started, 13.0, {"machine": "cuda", "gpu": None}, [*cases], [*errors])


def show(*cases: CaseResult, everything: bool = False, width: int = 200) -> str:
    text = io.StringIO()
    print_cases(cases, Console(file=text, width=width, no_color=True, highlight=False), everything=everything)
    return text.getvalue()


# --- the file ------------------------------------------------------------------------------------------------------


def test_the_file_has_the_published_fields_in_order() -> None:
    data = to_json(run_of(gpu_case()))
    assert list(data)[:5] == ["schema", "verdict", "command", "started", "seconds"]
    assert data["schema"] == SCHEMA == 1
    (case,) = data["cases"]
    assert list(case)[:8] == [
        "chain", "ops", "kernels", "verdict", "reasons", "arms", "replays", "mismatches"
    ]  # fmt: skip
    assert (case["replays"], case["mismatches"], case["replays_per_second"], case["pool"]) == (40_000, 0, 74_074, 256)
    assert case["arms"][1] == {
        "name": "delayed", "replays": 20_000, "mismatches": 0, "upper_bound_95": 1.4978e-4, "delay_us": 10.0,
        "step": "projection", "seconds": 0.9, "counters_agree": True, "mismatch": None, "note": "",
    }  # fmt: skip
    assert case["edges"] == [
        {
            "from": "projection",
            "to": "q_norm",
            "kind": "programmatic",
            "overlap": 0.97,
            "overlapped_in": ["as deployed"],
        }
    ]
    assert case["nodes"] == [
        {
            "kind": "kernel", "name": "gemm<128>", "symbol": "_Z4gemmILi128EEvPv", "step": "projection",
            "grid": [112, 1, 1], "block": [384, 1, 1], "shared_bytes": 98304, "attributes": ["cluster 2x1x1"],
            "incoming": ["programmatic"], "waits": 3, "triggers": 1, "code": "libgemm.so",
        },
        {
            "kind": "memset", "name": "", "symbol": "", "step": "q_norm", "grid": [], "block": [], "shared_bytes": 0,
            "attributes": [], "incoming": ["full"], "waits": None, "triggers": None, "code": "",
        },
    ]  # fmt: skip
    assert case["uncontrolled"] == {"kv_norm": "no machine code of norm: stripped"}
    assert case["exposure"] == "profiler, 128 replays, resolution 32 ns"
    assert case["controls"][1]["kills"] == 256
    assert case["controls"][1]["cause_checked"] is True


def test_the_model_has_no_counts_in_the_file() -> None:
    (case,) = to_json(run_of(model_case()))["cases"]
    assert all("kills" not in one and "replays" not in one for one in case["controls"])
    assert case["replays_per_second"] is None


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")
    write_json(run_of(gpu_case()), path)
    assert [found.name for found in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text().endswith("}\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    broken = run_of(gpu_case())
    broken.environment["clock"] = object()
    with pytest.raises(TypeError):
        write_json(broken, path)
    assert json.loads(path.read_text())["verdict"] == "PASS", "what cannot be written leaves the old file"
    assert [found.name for found in tmp_path.iterdir()] == ["results.json"]


def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(run_of(gpu_case()), path)
    assert {found.name: found.read_text() for found in tmp_path.iterdir()} == {"results.json": "old"}


# --- there and back ------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=12)
COUNT = st.integers(0, 10**12)
NUMBER = st.floats(0, 1e9).map(lambda x: round(x, 3))
MISMATCHES = st.builds(
    Mismatch, TEXT, TEXT, TEXT, TEXT, st.lists(COUNT, max_size=3), TEXT, TEXT, TEXT, COUNT,
    st.lists(TEXT, max_size=2), st.booleans(),
)  # fmt: skip
ARMS = st.builds(
    ArmResult, TEXT, COUNT, COUNT, st.none() | st.floats(0, 1), st.none() | NUMBER, st.none() | TEXT, NUMBER,
    st.booleans(), st.none() | MISMATCHES, TEXT,
)  # fmt: skip
CONTROLS = st.builds(
    ControlResult, *[TEXT] * 6, NUMBER, TEXT, TEXT, COUNT, COUNT, st.none() | st.booleans(), TEXT, TEXT, TEXT
)  # fmt: skip
TEXTS = st.lists(TEXT, max_size=3)
COUNTS = st.lists(COUNT, max_size=3)
NODES = st.builds(
    NodeResult, TEXT, TEXT, TEXT, TEXT, COUNTS, COUNTS, COUNT, TEXTS, TEXTS, st.none() | COUNT, st.none() | COUNT, TEXT
)  # fmt: skip
CASES = st.builds(
    CaseResult, TEXT, TEXT, TEXTS, st.just("cuda"), st.sampled_from(Outcome),
    reasons=TEXTS, arms=st.lists(ARMS, max_size=2), replays_per_second=st.none() | COUNT, pool=st.none() | COUNT,
    edges=st.lists(st.builds(EdgeResult, TEXT, TEXT, TEXT, st.none() | NUMBER, TEXTS), max_size=2),
    data_edges=st.lists(st.builds(DataEdgeResult, TEXT, TEXT, TEXT, TEXTS), max_size=2),
    controls=st.lists(CONTROLS, max_size=2), model=TEXT, timeline=TEXTS, errors=TEXTS, blockers=TEXTS, planted=TEXT,
    requested_replays=COUNT, sass=st.dictionaries(TEXT, TEXT, max_size=2), seconds=NUMBER,
    window_us=st.none() | NUMBER, rules=TEXT, faults=st.none() | TEXTS, reuses=TEXTS, planned=st.tuples(COUNT, COUNT),
    nodes=st.lists(NODES, max_size=2), uncontrolled=st.dictionaries(TEXT, TEXT, max_size=2), exposure=TEXT,
    untested=TEXTS,
)  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> RunResult:
    errors, cases = draw(TEXTS), draw(st.lists(CASES, max_size=2))
    verdict = worst([Outcome.ERROR] * bool(errors) + [case.verdict for case in cases])
    environment = draw(st.dictionaries(TEXT, st.none() | TEXT | COUNT, max_size=3))
    return RunResult(verdict, draw(TEXT), draw(TEXT), draw(NUMBER), environment, cases, errors)


FILES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FILES
@given(run=runs())
def test_what_is_written_is_read_back(tmp_path: Path, run: RunResult) -> None:
    path = tmp_path / "results.json"
    write_json(run, path)
    assert load_json(path) == run


def test_results_of_both_machines_come_back(tmp_path: Path) -> None:
    run = run_of(gpu_case(), model_case(), errors=("the worker died",))
    write_json(run, tmp_path / "r.json")
    assert load_json(tmp_path / "r.json") == run


# --- damage --------------------------------------------------------------------------------------------------------


def read(tmp_path: Path, text: str) -> RunResult:
    path = tmp_path / "damaged.json"
    path.write_text(text, encoding="utf-8")
    return load_json(path)


TEXT_OF_A_PASS = json.dumps(to_json(run_of(gpu_case())))


@FILES
@given(length=st.integers(0, len(TEXT_OF_A_PASS) - 1))
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(UsageError, match="is no result of pdl-stress run"):
        read(tmp_path, TEXT_OF_A_PASS[:length])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.sampled_from(["PASS", "FAIL", "cuda"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    here: list[tuple[Any, ...]] = [path]
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        here += places(value, (*path, key))
    return here


PLACES = [place for place in places(json.loads(TEXT_OF_A_PASS)) if place]


@settings(FILES, max_examples=400)
@given(place=st.sampled_from(PLACES), value=JSON, remove=st.booleans())
def test_a_changed_file_is_refused_or_shown_and_never_turns_into_a_pass(
    tmp_path: Path, place: tuple[Any, ...], value: Any, remove: bool
) -> None:
    """Starts from a FAIL: whatever one change makes of the file, no reader may see a PASS."""
    failing = gpu_case()
    failing.verdict = Outcome.FAIL
    data = json.loads(json.dumps(to_json(run_of(failing))))
    holder = data
    for key in place[:-1]:
        holder = holder[key]
    if remove:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    try:
        found = read(tmp_path, json.dumps(data))
    except UsageError:
        return
    assert found.verdict is not Outcome.PASS
    text = show(*found.cases, everything=True)
    assert text
    json.dumps(to_json(found))


@settings(FILES, max_examples=200)
@given(at=st.integers(0, len(TEXT_OF_A_PASS) - 1), junk=st.binary(min_size=1, max_size=3))
def test_bytes_written_over_a_file_never_end_in_a_traceback(tmp_path: Path, at: int, junk: bytes) -> None:
    raw = bytearray(TEXT_OF_A_PASS.encode())
    raw[at : at + len(junk)] = junk
    path = tmp_path / "damaged.json"
    path.write_bytes(bytes(raw))
    try:
        found = load_json(path)
    except UsageError:
        return
    show(*found.cases, everything=True)


def test_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no result"):
        read(tmp_path, "[" * 100_000)
    with pytest.raises(UsageError, match="is no result"):
        read(tmp_path, '{"schema":' * 100_000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(schema=2), "has schema 2; this version reads schema 1"),
        (lambda data: data.pop("schema"), "has schema None"),
        (lambda data: data.update(cases=[]), "its verdict is PASS, but INCONCLUSIVE follows from its cases"),
        (lambda data: data["cases"][0].update(verdict="FAIL"), "its verdict is PASS, but FAIL follows"),
        (lambda data: data["errors"].append("a hang"), "its verdict is PASS, but ERROR follows"),
        (lambda data: data["cases"][0].update(verdict="GREAT"), r"run.cases\[0\].verdict is 'GREAT', expected Outcome"),
        (lambda data: data["cases"][0].pop("arms"), r"run.cases\[0\] has no 'arms'"),
        (lambda data: data["cases"][0].pop("controls"), r"run.cases\[0\] has no 'controls'"),
        (lambda data: data["cases"][0].pop("timeline"), r"run.cases\[0\] has no 'timeline'"),
        (lambda data: data["cases"][0]["edges"][0].pop("from"), r"edges\[0\] has no 'from'"),
        (lambda data: data["cases"][0]["arms"][0].update(replays="many"), "replays is 'many', expected int"),
        (lambda data: data["cases"][0]["arms"][0].update(mismatches=False), "mismatches is 'False', expected int"),
        (lambda data: data["cases"][0].update(arms={}), "arms is '{}', expected list"),
        (lambda data: data.update(seconds="long"), "run.seconds is 'long', expected float"),
        (lambda data: data["cases"][0].update(planned=[1]), r"planned is '\[1\]', expected tuple"),
        (lambda data: data["cases"][0].update(planned=[1, 2, 3]), r"planned is '\[1, 2, 3\]', expected tuple"),
        (lambda data: data["cases"][0].update(planned=["1", 2]), "planned is '1', expected int"),
        (lambda data: data["cases"][0].update(planned={}), "planned is '{}', expected tuple"),
        (lambda data: data["cases"][0].update(faults="F02"), "faults is 'F02', expected"),
        (lambda data: data["cases"][0]["nodes"][1].pop("kind"), r"cases\[0\].nodes\[1\] has no 'kind'"),
        (lambda data: data["cases"][0]["nodes"][0].update(waits="3"), r"nodes\[0\].waits is '3', expected int"),
        (lambda data: data["cases"][0]["nodes"][0].update(grid=[1.5]), r"grid\[0\] is '1.5', expected int"),
        (lambda data: data["cases"][0].update(nodes={}), "nodes is '{}', expected list"),
        (lambda data: data["cases"][0].update(uncontrolled=["q_norm"]), "uncontrolled is .*, expected dict"),
        (lambda data: data["cases"][0].update(uncontrolled={"q_norm": 1}), "uncontrolled.q_norm is '1', expected str"),
        (lambda data: data["cases"][0].update(exposure=None), "exposure is 'None', expected str"),
    ],
)
def test_the_refusal_says_what_is_wrong(tmp_path: Path, change: Any, words: str) -> None:
    data = json.loads(TEXT_OF_A_PASS)
    change(data)
    with pytest.raises(UsageError, match=words):
        read(tmp_path, json.dumps(data))


def test_unknown_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    data = json.loads(TEXT_OF_A_PASS)
    data["later"] = data["cases"][0]["later"] = 1
    assert read(tmp_path, json.dumps(data)) == run_of(gpu_case())


def test_results_of_a_version_without_a_census_are_still_read(tmp_path: Path) -> None:
    """What is absent was not found, and no verdict rests on it."""
    data = json.loads(TEXT_OF_A_PASS)
    for key in ("nodes", "uncontrolled", "exposure"):
        del data["cases"][0][key]
    (case,) = read(tmp_path, json.dumps(data)).cases
    assert (case.nodes, case.uncontrolled, case.exposure) == ([], {}, "")


# --- tables --------------------------------------------------------------------------------------------------------


def cells(text: str, start: str) -> list[str]:
    """The cells of the one row whose first cell is ``start``."""
    rows = [[cell.strip() for cell in line.strip(" │┃").split("│")] for line in text.splitlines() if "│" in line]
    (found,) = (row for row in rows if row[0] == start)
    return found


def test_the_summary_of_a_gpu_run() -> None:
    text = show(gpu_case())
    assert cells(text, "csa2-fused-m1") == [
        "csa2-fused-m1", "PASS", "2", "40,000", "0", "74,074", "2 us", "1", "1/1", "1/1"
    ]  # fmt: skip
    assert cells(text, "F02") == ["F02", "1/1", "1/1", "1", "0/1", "1/1"]
    assert "seen at 0 us" in text
    assert "seen at 10 us" in text
    assert "ops: native" not in text, "a case that passes needs no closer look"


def test_the_summary_of_a_model_run_has_no_numbers_of_hardware() -> None:
    text = show(model_case())
    assert cells(text, "csa2-fused-m1") == ["csa2-fused-m1", "FAIL", "0", "1/1", "-"]
    for word in ("replays", "mismatches", "window", "seen at", "upper bound"):
        assert word not in text
    assert cells(text, "F02") == ["F02", "1/1", "-", "1 allowed"]


def test_a_failed_case_is_explained() -> None:
    text = show(model_case())
    assert "csa2-fused-m1 FAIL   ops: native" in text
    assert "  planted: F02 never waits @ projection->q_norm, 10 us" in text
    assert "  model: q_norm may read qkv before projection writes it" in text
    assert "  - the contracts allow a bad schedule; see the timeline" in text
    assert "    " + model_case().timeline[1] in text


def test_a_run_with_only_some_controls_says_so_even_if_all_is_well() -> None:
    case = gpu_case()
    assert "only some controls" not in show(case)
    case.faults = ["F00@q_norm", "F02"]
    assert "csa2-fused-m1: only some controls ran (F00@q_norm, F02)" in show(case)
    case.faults = []
    assert "csa2-fused-m1: only some controls ran (none)" in show(case)
    case.planted = "F02 never waits @ projection->q_norm, 10 us"
    assert "only some controls" not in show(case), "a planted chain runs none in any case"


def test_rules_that_nobody_promises_are_told_even_if_all_is_well() -> None:
    case = gpu_case()
    assert case.model not in show(case)
    case.rules, case.model = "observed:sm_90", "ordered under «observed:sm_90»; NOT ordered by the documented rules"
    assert f"csa2-fused-m1: {case.model}" in show(case)


def test_a_timeline_is_whole_on_a_narrow_terminal() -> None:
    """What went wrong stands at the end of a line."""
    case = model_case()
    case.timeline = ["  1  " + "long " * 40 + "<-- too late", "  2  short"]
    lines = show(case, width=60).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("      1  long"))
    shown = " ".join(lines[first:-1]).split()
    assert shown == case.timeline[0].split()
    assert lines[-1].rstrip() == "      2  short"


def test_many_reasons_are_cut_and_counted() -> None:
    case = model_case()
    case.reasons = [f"reason {n}" for n in range(20)]
    text = show(case)
    assert "reason 7" in text
    assert "reason 8" not in text
    assert "  - and 12 more, in results.json" in text


def test_details_of_a_gpu_run() -> None:
    text = show(gpu_case(), everything=True)
    assert cells(text, "as deployed") == ["as deployed", "", "", "20,000", "0", "0.00015", "13.5"]
    assert cells(text, "delayed") == ["delayed", "projection", "10", "20,000", "0", "0.00015", "45.0"]
    assert cells(text, "projection") == [
        "projection", "gemm<128>", "112", "384", "3", "1", "programmatic", "libgemm.so"
    ]  # fmt: skip
    assert cells(text, "q_norm") == ["q_norm", "memset", "", "", "", "", "full"]
    assert "by profiler, 128 replays, resolution 32 ns" in text
    rows = [line for line in text.splitlines() if "projection -> q_norm" in line]
    assert any("graph, programmatic" in row and "97%" in row and "as deployed" in row for row in rows)
    assert any("data, qkv" in row and "delayed (projection, 10 us)" in row for row in rows)
    (row,) = (row for row in rows if "never waits" in row)
    assert "must catch" in row
    assert "0/256" in row
    assert "256/256" in row
    assert "must be clean" in next(row for row in rows if "twin" in row)


def test_what_the_machine_code_could_not_tell_is_not_shown_as_none() -> None:
    case = gpu_case()
    case.nodes = [NodeResult("kernel", "norm", step="q_norm", grid=[2, 3, 1], block=[32, 2, 2], code="no code")]
    text = show(case, everything=True)
    assert cells(text, "q_norm") == ["q_norm", "norm", "6", "128", "?", "?", "", "no code"]


def test_a_case_without_a_census_has_no_table_of_its_graph() -> None:
    case = gpu_case()
    assert "graph as deployed" in show(case, everything=True)
    case.nodes, case.exposure = [], ""
    text = show(case, everything=True)
    assert "graph as deployed" not in text
    assert "by profiler" not in text


@pytest.mark.parametrize(
    ("expected", "verdict", "kills", "shown"),
    [
        ("caught", "missed", 17, "17/256 missed"),
        ("clean", "dirty", 1, "1/256 dirty"),
        ("caught", "caught", 256, "256/256 "),
    ],
)
def test_controls_that_went_wrong_say_so_in_their_cell(expected: str, verdict: str, kills: int, shown: str) -> None:
    case = gpu_case()
    case.controls = [control(10.0, kills, expected, verdict)]
    assert shown in show(case, everything=True)


def test_a_control_that_did_not_finish_is_shown_once() -> None:
    case = gpu_case()
    case.controls = [control(10.0, 0, "caught", "error")]
    case.controls[0].replays = 0
    text = show(case, everything=True)
    assert " error " in text
    assert "error error" not in text
    assert cells(show(case), "F02")[1] == "0/1"


def test_an_arm_that_graded_nothing_divides_by_nothing() -> None:
    case = gpu_case()
    case.arms.append(ArmResult("back to back", 0, 0, None))
    assert cells(show(case, everything=True), "back to back") == ["back to back", "", "", "0", "0", "-", "-"]


def test_a_case_renders_as_plain_text() -> None:
    text = render(gpu_case())
    assert "\x1b" not in text
    assert "csa2-fused-m1: clean arms" in text
    assert "csa2-fused-m1: controls" in text


def founding() -> CaseResult:
    case = gpu_case()
    case.controls = []
    for place in ("entry", "none"):
        for consumer in ("waits", "does not wait"):
            for delay in (0.0, 10.0):
                kills = 20_000 if (place, consumer, delay) == ("entry", "does not wait", 10.0) else 0
                one = control(delay, kills, "caught", "caught", f"trigger {place}, consumer {consumer}")
                one.fault, one.replays = "F00", 20_000
                case.controls.append(one)
    return case


def test_the_founding_control_as_a_table() -> None:
    table = founding_table(founding(), "projection", "q_norm")
    assert table is not None
    text = io.StringIO()
    Console(file=text, width=120).print(table)
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in text.getvalue().splitlines() if "│" in line
    ]
    assert rows == [
        ["entry", "waits", "0", "0"],
        ["none", "waits", "0", "0"],
        ["entry", "does not wait", "0", "20,000"],
        ["none", "does not wait", "0", "0"],
    ]
    assert "kills of 20,000 replays" in " ".join(text.getvalue().split())
    assert founding_table(founding(), "projection", "kv_norm") is None
    assert founding_table(gpu_case(), "projection", "q_norm") is None


# --- names that look like markup -----------------------------------------------------------------------------------


def marked() -> CaseResult:
    case = CaseResult(MARKUP, MARKUP, [MARKUP], "cuda", Outcome.FAIL, [MARKUP])
    case.arms = [ArmResult(MARKUP, 10, 1, None, 1.0, MARKUP)]
    case.edges = [EdgeResult(MARKUP, MARKUP, MARKUP, 0.5, [MARKUP])]
    case.data_edges = [DataEdgeResult(MARKUP, MARKUP, MARKUP, [MARKUP])]
    case.controls = [ControlResult(MARKUP, MARKUP, MARKUP, MARKUP, MARKUP, MARKUP, 1.0, MARKUP, MARKUP, verdict=MARKUP)]
    case.model = case.planted = MARKUP
    case.timeline = [MARKUP]
    case.nodes = [NodeResult("kernel", MARKUP, MARKUP, MARKUP, incoming=[MARKUP], waits=1, triggers=1, code=MARKUP)]
    case.exposure = MARKUP
    return case


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    text = show(marked(), everything=True, width=400)
    expected = {
        "chain, in two lines and four titles": 6, "ops": 1, "planted, model, reason, timeline": 4, "fault, twice": 2,
        "arm and its step": 2, "graph edge": 4, "data edge": 4, "control: variant, edge, expected, verdict": 5,
        "node: step, name, edges, code": 4, "exposure": 1,
    }  # fmt: skip
    assert text.count(MARKUP) == sum(expected.values())


@FILES
@given(case=CASES)
def test_no_text_breaks_a_table(case: CaseResult) -> None:
    show(case, everything=True)
    summary([case])
    controls_summary(case.controls)
    render(case)


@FILES
@given(text=st.text(alphabet="[]/\\abred =#@\n", max_size=20))
def test_no_markup_breaks_a_table(text: str) -> None:
    case = marked()
    for holder in (case, case.arms[0], case.edges[0], case.data_edges[0], case.controls[0], case.nodes[0]):
        for name, value in vars(holder).items():
            if value == MARKUP:
                setattr(holder, name, text)
            elif value == [MARKUP]:
                setattr(holder, name, [text])
    show(case, everything=True)
    one = case.controls[0]
    one.fault = "F00"
    founding_table(case, text, text)
