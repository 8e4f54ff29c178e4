"""The committed evidence is what the documentation says of it: whole, clean, caught, and written by the product."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdl_stress import Outcome, catalog
from pdl_stress.faults import FAULTS
from pdl_stress.jobs import ArmJob, ControlJob
from pdl_stress.plan import Plan, clean_jobs, control_jobs
from pdl_stress.report import load_json
from pdl_stress.results import RunResult
from pdl_stress.statistics import MIN_KILLS

FOLDER = Path(__file__).parent.parent / "evidence" / "h200"
PLANTS = sorted((FOLDER / "plants").glob("*.json"))


def check_origin(run: RunResult) -> None:
    environment = run.environment
    assert environment["machine"] == "cuda"
    assert "H200" in environment["gpu"]
    assert len(environment["commit"]) == 40, "a clean commit"
    assert len(environment["source_sha256"]) == 64
    assert run.command.startswith("pdl-stress run ")


LIBRARIES = {
    "csa2-flashinfer-reference": "flashinfer-reference",
    "csa2-flashinfer": "flashinfer",
    "mixed-native-norm": "rmsnorm=native,tinygemm2=flashinfer",
    "mixed-native-gemm": "rmsnorm=flashinfer,tinygemm2=native",
}
"""Files of runs with library kernels, and their ops."""


@pytest.mark.parametrize("name", ["shipped", "f00", *LIBRARIES])
def test_clean_runs(name: str) -> None:
    run = load_json(FOLDER / f"{name}.json")
    check_origin(run)
    assert run.verdict is Outcome.PASS
    chains = {"shipped": tuple(catalog.SHIPPED), "csa2": catalog.CSA2}.get(name.partition("-")[0])
    if chains is not None:
        assert tuple(case.chain for case in run.cases) == chains
    for case in run.cases:
        assert case.mismatches == 0
        assert all(arm.replays >= 20_000 and arm.counters_agree for arm in case.arms)
        assert {edge.kind for edge in case.edges} == {"programmatic"}
        assert all(edge.exposed_by for edge in case.data_edges)
        for control in case.controls:
            if control.expected == "caught":
                assert control.kills >= MIN_KILLS
                assert control.cause_checked
            elif control.expected == "clean":
                assert control.kills == 0


def test_the_evidence_is_of_todays_plan() -> None:
    """Arms, controls and expectations are those that a default run would have now; else it must be made again."""
    plan = Plan()
    for case in load_json(FOLDER / "shipped.json").cases:
        chain = catalog.load(case.chain)
        arms = [(job.name, job.step, job.delay_us) for job in clean_jobs(chain, plan) if isinstance(job, ArmJob)]
        assert [(arm.name, arm.step, arm.delay_us) for arm in case.arms] == arms
        wanted = [job for job in control_jobs(chain, plan) if isinstance(job, ControlJob)]
        assert [(c.fault, c.variant, c.writer, c.reader, c.delay_us, c.expected, c.reason) for c in case.controls] == [
            (c.fault, c.variant, c.edge.writer, c.edge.reader, c.delay_us, job.expected, job.reason)
            for job in wanted
            for c in [job.control]
        ]


@pytest.mark.parametrize(("name", "ops"), LIBRARIES.items())
def test_library_kernels_ran_and_were_controlled_by_their_own_machine_code(name: str, ops: str) -> None:
    run = load_json(FOLDER / f"{name}.json")
    assert f"--ops {ops}" in run.command
    plan = Plan(delays_us=(10.0,)) if "--delays 10" in run.command else Plan()
    for case in run.cases:
        chain = catalog.load(case.chain, ops)
        arms = [(job.name, job.step, job.delay_us) for job in clean_jobs(chain, plan) if isinstance(job, ArmJob)]
        assert [(arm.name, arm.step, arm.delay_us) for arm in case.arms] == arms
        wanted = [job for job in control_jobs(chain, plan, case.nodes) if isinstance(job, ControlJob)]
        assert [(c.fault, c.variant, c.writer, c.reader, c.delay_us, c.expected, c.reason) for c in case.controls] == [
            (c.fault, c.variant, c.edge.writer, c.edge.reader, c.delay_us, job.expected, job.reason)
            for job in wanted
            for c in [job.control]
        ]
        assert case.uncontrolled == {}
        libraries = {step.name for step in chain.steps if not step.op.rebuildable}
        found = {node.step: (node.waits, node.code.endswith(".so")) for node in case.nodes if node.step in libraries}
        assert found == dict.fromkeys(libraries, (1, True)), "each kernel's wait, in the library's own code"
        assert case.exposure.startswith("profiler")


def test_which_of_flashinfers_kernels_ran() -> None:
    """The library picks a wgmma program for wide projections; the reference never is one."""
    for name, picks in (("csa2-flashinfer", True), ("csa2-flashinfer-reference", False)):
        for case in load_json(FOLDER / f"{name}.json").cases:
            for node in case.nodes:
                if "projection" in node.step:
                    narrow = node.step == "kv_projection"
                    assert ("wgmma" in node.name) is (picks and not narrow), (name, node.step, node.name)


def test_the_founding_control_is_the_one_of_the_docs() -> None:
    (case,) = load_json(FOLDER / "f00.json").cases
    cells = {(c.variant, c.delay_us): c for c in case.controls if c.fault == "F00" and c.reader == "q_norm"}
    assert len(cells) == 5 * 2 * 5
    for (variant, delay), control in cells.items():
        assert control.replays == 20_000
        if "consumer waits" in variant:
            assert control.kills == 0, "an early trigger alone is no bug"
        elif "after_stores" in variant or "none" in variant:
            assert control.kills == 0, "the blind spot of plain stress"
        else:
            seen = delay > 0 or "before_stores" not in variant  # a whole matrix product is a window too
            assert control.kills == (20_000 if seen else 0)


def test_the_projections_are_as_exact_as_their_contracts_say() -> None:
    found = json.loads((FOLDER / "accuracy.json").read_text())
    assert found["command"] == "python -m benchmarks.accuracy"
    assert len(found["environment"]["commit"]) == 40
    rows = found["accuracy"]
    assert {row["section"] for row in rows} == {"A", "B", "C"}
    assert {row["path"] for row in rows if row["section"] == "A"} >= {"native", "flashinfer"}
    assert all(0 < row["share"] <= 1 for row in rows)
    for row in rows:
        if row["path"].startswith("TF32, full mantissa") and row["output"] == "weights" and row["tokens"] > 1:
            assert 5e-5 <= row["rms"] <= 2e-3, "TF32 ran"
        elif row["path"].startswith("FP32") and row["output"] == "weights":
            assert row["rms"] <= 5e-6, "TF32 did not run"
    assert all(one["overlap"] >= 0.999 for one in found["selection"])


def test_the_benchmark_has_every_section_and_says_how_it_was_made() -> None:
    found = json.loads((FOLDER / "fusions.json").read_text())
    assert found["command"].startswith("python -m benchmarks.fusions")
    assert len(found["environment"]["commit"]) == 40
    sizes = {(row["section"], row["tokens"]) for row in found["rows"]}
    assert sizes >= {("A", m) for m in (1, 2, 4, 8)} | {("B", 256), ("C", 256), ("step", 1), ("step", 4)}


def test_one_planted_run_for_each_shipped_fault() -> None:
    assert {path.name.split("-")[0] for path in PLANTS} == set(FAULTS)


@pytest.mark.parametrize("path", PLANTS, ids=lambda path: path.stem)
def test_planted_runs_fail_and_name_the_edge(path: Path) -> None:
    run = load_json(path)
    check_origin(run)
    assert run.verdict is Outcome.FAIL
    (case,) = run.cases
    planted, serialized = case.arms
    assert planted.mismatch is not None
    assert planted.mismatch.reader == path.stem.partition("-")[2]
    assert planted.mismatch.writer
    assert planted.mismatch.held == "poison"
    assert planted.mismatches == planted.replays >= 20_000
    assert serialized.mismatches == 0
