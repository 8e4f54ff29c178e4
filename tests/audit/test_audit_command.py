"""`pdl-stress audit`: formats, exit codes, baselines, contracts, explanations. No GPU."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pdl_stress.audit import RULES, command
from pdl_stress.audit.command import Options
from pdl_stress.audit.inputs import files
from pdl_stress.cli import app
from pdl_stress.errors import UsageError
from tests.audit import corpus

SOURCE = (
    corpus.HEAD
    + """
extern "C" __global__ void good(const float* x, float* y) { WAIT; st(y + threadIdx.x, ld(x + threadIdx.x)); TRIGGER; }
extern "C" __global__ void early(const float* x, float* y) { float a = ld(x); WAIT; st(y + threadIdx.x, a); TRIGGER; }
extern "C" __global__ void plain(float* y) { st(y, 1.0f); }
"""
)
GOOD = {"parameters": {"0": "x", "1": "y"}, "reads": ["x"], "writes": ["y"]}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("audit") / "kernels.cubin"
    file.write_bytes(corpus.compiled(SOURCE, lineinfo=True))
    return file


@pytest.fixture
def run(path):
    def invoke(*arguments, files=None):
        given = [str(path)] if files is None else [str(file) for file in files]
        return CliRunner().invoke(app, ["audit", *given, *map(str, arguments)])

    return invoke


def contracts(tmp_path, **kernels):
    file = tmp_path / "contracts.json"
    file.write_text(json.dumps({"kernels": kernels}))
    return file


def test_the_table_names_the_kernel_the_operand_and_the_place(run):
    result = run()
    assert result.exit_code == 0, "for review is no error"
    text = " ".join(result.output.replace("│", " ").split())
    assert "reads-before-wait" in text
    assert "parameter 0 may be" in text
    assert "LDG" in text
    assert "2 kernels audited in 1 cubins, 1 without a finding, 0 not decided, 1 without PDL code" in text
    assert text.endswith("ORDERED")
    assert "trigger-late" not in text
    assert "trigger-late" in run("--notes").output


def test_the_strict_rule_makes_errors_of_them(run):
    result = run("--strict", "--format", "json")
    assert result.exit_code == 1
    content = json.loads(result.output)
    assert content["outcome"] == "FAIL"
    errors = {(k["name"], f["rule"]) for k in content["kernels"] for f in k["findings"] if f["severity"] == "error"}
    assert errors == {("early", "reads-before-wait"), ("plain", "never-waits")}


def test_json_has_everything(run):
    content = json.loads(run("--format", "json").output)
    early = next(kernel for kernel in content["kernels"] if kernel["name"] == "early")
    assert (early["waits"], early["triggers"]) == (1, 1)
    assert early["accesses"] == {"after_wait": 1, "may_be_before": 1, "unknown": 0}
    assert content["without_pdl_code"] == {"kernels.cubin": 1}
    finding = next(f for f in early["findings"] if f["rule"] == "reads-before-wait")
    assert finding["fault"] == "F01"
    assert finding["sites"][0]["place"].startswith("early+0x")
    assert finding["sites"][0]["line"][1] > 1


def test_sarif_is_what_the_standard_asks_for(run):
    content = json.loads(run("--format", "sarif").output)
    assert content["version"] == "2.1.0"
    (found,) = content["runs"]
    assert [rule["id"] for rule in found["tool"]["driver"]["rules"]] == list(RULES)
    assert found["invocations"][0]["executionSuccessful"] is True
    result = next(result for result in found["results"] if result["ruleId"] == "reads-before-wait")
    assert result["level"] == "warning"
    assert found["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "reads-before-wait"
    assert len(result["partialFingerprints"]["pdlStressAudit/v1"]) == 32
    location = result["locations"][0]["physicalLocation"]
    assert location["region"]["startLine"] > 1
    assert location["artifactLocation"]["uri"].endswith(".cu") or location["artifactLocation"]["uri"]


def test_without_lines_a_finding_is_located_in_the_binary(tmp_path, run):
    file = tmp_path / "bare.cubin"
    file.write_bytes(corpus.compiled(SOURCE))
    content = json.loads(run("--format", "sarif", files=[file]).output)
    result = next(r for r in content["runs"][0]["results"] if r["ruleId"] == "reads-before-wait")
    assert result["locations"][0]["physicalLocation"] == {"artifactLocation": {"uri": "bare.cubin"}}


def test_a_baseline_takes_away_what_was_accepted_and_nothing_else(run, tmp_path):
    accepted = tmp_path / "accepted.json"
    assert run("--strict", "--format", "json", "--out", accepted).exit_code == 1
    result = run("--strict", "--baseline", accepted)
    assert result.exit_code == 0
    assert "accepted by the baseline" in " ".join(result.output.split())
    content = json.loads(accepted.read_text())
    for kernel in content["kernels"]:
        kernel["findings"] = [f for f in kernel["findings"] if f["rule"] != "never-waits"]
    accepted.write_text(json.dumps(content))
    again = run("--strict", "--baseline", accepted, "--format", "json")
    assert again.exit_code == 1
    errors = [f["rule"] for k in json.loads(again.output)["kernels"] for f in k["findings"] if f["severity"] == "error"]
    assert errors == ["never-waits"]


def test_a_derived_contract_is_one_to_start_from(run, tmp_path):
    derived = tmp_path / "derived.json"
    assert run("--derive", "--out", derived).exit_code == 0
    content = json.loads(derived.read_text())
    assert content["kernels"]["early"] == {
        "parameters": {"0": "p0", "1": "p1"},
        "reads": ["p0"],
        "writes": ["p1"],
        "independent": ["p0"],
        "wait": "all",
        "trigger": "after_stores",
        "fence": False,
    }
    assert content["kernels"]["good"]["independent"] == []
    assert run("--contracts", derived).exit_code == 0, "the machine code honours the contract that was read from it"


def test_a_contract_that_the_code_breaks_is_an_error(run, tmp_path):
    assert run("--contracts", contracts(tmp_path, good=GOOD)).exit_code == 0
    result = run("--contracts", contracts(tmp_path, early=GOOD), "--format", "json")
    assert result.exit_code == 1
    assert run("--contracts", contracts(tmp_path, early={**GOOD, "independent": ["x"]})).exit_code == 0
    assert run("--contracts", contracts(tmp_path, plain={"writes": ["p0"]})).exit_code == 1, "it never waits"


def test_launch_information_finds_kernels_without_pdl_code(run, tmp_path):
    launches = tmp_path / "launches.json"
    launches.write_text(json.dumps({"plain": True, "good": True}))
    result = run("--launches", launches, "--format", "json")
    assert result.exit_code == 1
    rules = {f["rule"] for k in json.loads(result.output)["kernels"] for f in k["findings"] if f["severity"] == "error"}
    assert rules == {"attribute-without-wait"}
    launches.write_text(json.dumps({"plain": False}))
    assert run("--launches", launches).exit_code == 0


def test_an_explanation_marks_the_access_and_the_wait_on_the_way(run):
    text = run("--explain", "early").output
    assert "parameter 0 at c[0x0][0x210], 8 bytes" in text
    marked = [line for line in text.splitlines() if ">>>" in line]
    assert len(marked) == 1
    assert "LDG" in marked[0]
    assert "read of parameter 0, not ordered behind a wait" in marked[0]
    waits = [line for line in text.splitlines() if "<- wait" in line]
    assert len(waits) == 1
    assert text.index(marked[0]) < text.index(waits[0])
    assert "nothing to explain" in run("--explain", "good").output


def test_nothing_with_pdl_code_is_no_pass(tmp_path, run):
    file = tmp_path / "plain.cubin"
    file.write_bytes(corpus.compiled('extern "C" __global__ void k(float* y) { *y = 1; }'))
    assert run(files=[file]).exit_code == 4


def test_an_undecided_kernel_is_no_pass(tmp_path, run):
    text = 'extern "C" __global__ void k(float* x, int n) { for (int i = 0; i < n; ++i) if (ld(x + i) > 0) WAIT; }'
    file = tmp_path / "undecided.cubin"
    file.write_bytes(corpus.compiled(corpus.HEAD + text))
    result = run(files=[file])
    assert result.exit_code == 4
    assert "undecided" in result.output


def test_a_file_that_cannot_be_read_is_an_error_and_the_rest_is_audited(tmp_path, run, path):
    bad = tmp_path / "bad.cubin"
    bad.write_bytes(path.read_bytes()[:300])
    result = run(files=[bad, path])
    assert result.exit_code == 3
    text = " ".join(result.output.split())
    assert "not read: bad.cubin" in text
    assert "2 kernels audited" in text


def test_folders_and_packages_are_looked_through(tmp_path, path, monkeypatch):
    package = tmp_path / "somepackage"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    (package / "deep" / "k.cubin").write_bytes(path.read_bytes())
    (package / "readme.txt").write_text("text")
    assert files([package], []) == [package / "deep" / "k.cubin"]
    monkeypatch.syspath_prepend(tmp_path)
    assert files([], ["somepackage"]) == [package / "deep" / "k.cubin"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "nothing to audit"),
        ({"paths": ["missing.cubin"]}, "no such file"),
        ({"packages": ["no_such_package"]}, "no installed package"),
        ({"packages": ["../up"]}, "no installed package"),
        ({"paths": ["."], "format": "xml"}, "expected one of table, json, sarif"),
        ({"paths": ["."], "jobs": 0}, "expected 1 or more"),
        ({"paths": ["."], "arch": "hopper"}, "such as sm_90a"),
        ({"paths": ["."], "contracts": "missing.json"}, "cannot be read"),
        ({"paths": ["."], "launches": "missing.json"}, "cannot be read"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(arguments, reason, tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    given = {"paths": [], **arguments}
    given["paths"] = [Path(one) for one in given["paths"]]
    for name in ("contracts", "launches"):
        if name in given:
            given[name] = Path(given[name])
    with pytest.raises(UsageError, match=reason):
        command.run(Options(**given), None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no json", "it is not JSON"),
        ("[]", "expected"),
        ('{"kernels": {"k": 1}}', "k: expected an object"),
        ('{"kernels": {"k": {"read": ["x"]}}}', "unknown read"),
        ('{"kernels": {"k": {}}}', "names no operand"),
        ('{"kernels": {"k": {"reads": ["x"], "wait": "maybe"}}}', "expected one of all"),
        ('{"kernels": {"k": {"reads": ["x"], "fence": 1}}}', "`fence` is 1"),
        ('{"kernels": {"k": {"reads": ["x"], "parameters": {"a": "x"}}}}', "`parameters`"),
        ('{"kernels": {"k": {"reads": ["x"], "independent": ["y"]}}}', "neither read nor written"),
        ('{"kernels": {"k": {"reads": ["x"], "ignored": "x"}}}', "`ignored`"),
    ],
)
def test_a_contract_file_that_is_wrong_is_a_usage_error(content, reason, tmp_path, path):
    file = tmp_path / "contracts.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=reason):
        command.run(Options([path], contracts=file), None)


@pytest.mark.parametrize("content", ["{}", "text", '{"kernels": [{}]}'])
def test_a_baseline_that_is_none_is_a_usage_error(content, tmp_path, path):
    file = tmp_path / "baseline.json"
    file.write_text(content)
    with pytest.raises(UsageError, match="--baseline"):
        command.run(Options([path], baseline=file), None)


def test_the_native_kernels_are_clean(run):
    result = run("--native", "--arch", "sm_90a", files=[])
    assert result.exit_code == 0
    assert "3 kernels audited in 3 cubins, 3 without a finding" in " ".join(result.output.split())
