"""``check`` on real kernels: each fault is found and named, each repaired twin passes, and nothing else is blamed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # child processes import the kernels by name too
import checked_kernels as subjects
import pytest
import torch

from pdl_stress import Outcome, Subject, check
from pdl_stress.results import CaseResult

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

BEFORE, AFTER = "before the wait", "after the wait"


def measured(case: CaseResult, step: str) -> dict[tuple[str, str], str]:
    (contract,) = [c for c in case.contracts if c.step == step]
    return {(o.buffer, o.access): o.measured for o in contract.operands}


def blamed(case: CaseResult) -> set[tuple[str, str, str, str]]:
    return {
        (a.mismatch.order, a.mismatch.writer, a.mismatch.reader, a.mismatch.buffer) for a in case.arms if a.mismatch
    }


@pytest.mark.parametrize("name", ["good", "barrier", "late_store", "late_load", "store"])
def test_a_kernel_that_waits_passes_and_its_broken_twin_is_caught(name: str) -> None:
    verdict = check(subjects.single(name))
    case = verdict.case
    assert verdict.outcome is Outcome.PASS, str(verdict)
    assert set(measured(case, name).values()) == {AFTER}
    caught = {(c.fault, c.buffer) for c in case.controls if c.expected == "caught" and c.verdict == "caught"}
    assert ("F02", "x") in caught
    assert any(fault == "F09" for fault, _ in caught)
    assert {arm.name for arm in case.arms} >= {"as deployed", "serialized", "early release"}
    assert all(arm.replays >= 2000 and not arm.mismatches for arm in case.arms)


@pytest.mark.parametrize("name", ["never", "early_read", "branch", "one_warp"])
def test_a_kernel_that_reads_before_its_wait_fails(name: str) -> None:
    verdict = check(subjects.single(name))
    assert verdict.outcome is Outcome.FAIL, str(verdict)
    assert measured(verdict.case, name)["x", "read"] == BEFORE
    assert ("read", "producer", name, "x") in blamed(verdict.case)


@pytest.mark.parametrize(
    ("one", "wanted"),
    [
        (subjects.pair("late_store", "never"), ("read", "late_store", "never", "mid")),
        (subjects.pair("late_store", "early_read"), ("read", "late_store", "early_read", "mid")),
        (subjects.pair("late_load", "early_store", "x"), ("overwritten", "early_store", "late_load", "x")),
        (subjects.pair("late_store", "early_store", "mid"), ("written twice", "late_store", "early_store", "mid")),
    ],
    ids=lambda value: value.name if isinstance(value, Subject) else "",
)
def test_what_two_kernels_do_to_each_other_is_named(one: Subject, wanted: tuple[str, str, str, str]) -> None:
    verdict = check(one)
    assert verdict.outcome is Outcome.FAIL, str(verdict)
    assert wanted in blamed(verdict.case)
    assert all(not a.mismatch.also_serialized for a in verdict.case.arms if a.mismatch)


@pytest.mark.parametrize(
    "one",
    [
        subjects.pair("late_store", "good"),
        subjects.pair("late_load", "store", "x"),
        subjects.pair("late_store", "store", "mid"),
    ],
    ids=lambda one: one.name,
)
def test_repaired_pairs_pass(one: Subject) -> None:
    verdict = check(one)
    assert verdict.outcome is Outcome.PASS, str(verdict)


def test_the_time_between_trigger_and_store_is_seen() -> None:
    (contract,) = check(subjects.single("late_store"), replays=1000).case.contracts
    (written,) = [o for o in contract.operands if o.access == "written"]
    assert written.lag_us is not None
    assert written.lag_us >= 4


def test_memory_that_the_allocator_hands_out_again() -> None:
    def fn(x: Any) -> Any:
        y = torch.empty_like(x)
        subjects.run("good", x, y)
        z = torch.empty_like(x)
        subjects.run("good", y, z)
        del y
        last = torch.empty_like(x)
        subjects.run("good", z, last)
        return last

    verdict = check(fn, lambda: torch.randn(subjects.N, device="cuda"), name="three")
    assert verdict.outcome is Outcome.PASS, str(verdict)
    assert len(verdict.case.nodes) == 3


def test_state_between_calls_is_put_back_and_changes_no_verdict() -> None:
    count = torch.zeros(subjects.N, device="cuda")
    verdict = check(lambda x, out: subjects.run("bumps", x, out, count), subjects.two, name="bumps")
    assert verdict.outcome is Outcome.PASS, str(verdict)
    assert any("written" in o.access for c in verdict.case.contracts for o in c.operands)


def test_an_independent_input_may_be_read_early_and_an_undeclared_one_may_not() -> None:
    one = Subject("never", lambda x, out: subjects.run("never", x, out), subjects.two, independent=("x", "out"))
    with pytest.raises(Exception, match="every input is independent"):
        check(one)

    def both(x: Any, w: Any, out: Any) -> None:
        subjects.run("good", x, out)
        subjects.run("early_read", w, x)

    def inputs() -> dict[str, Any]:
        return {**subjects.two(), "w": torch.randn(subjects.N, device="cuda")}

    assert check(both, inputs, independent=("w",)).outcome is Outcome.PASS
    assert check(both, inputs).outcome is Outcome.FAIL


def inconclusive(fn: Any, text: str, make: Any = subjects.two) -> None:
    verdict = check(fn, make)
    assert verdict.outcome is Outcome.INCONCLUSIVE, str(verdict)
    assert any(text in reason for reason in verdict.case.reasons), verdict.case.reasons
    assert torch.zeros(1 << 20, device="cuda").sum().item() == 0, "torch goes on as before"


def test_what_cannot_be_checked_says_why() -> None:
    def synchronizes(x: Any, out: Any) -> None:
        subjects.run("good", x, out)
        torch.cuda.synchronize()

    def several(x: Any, out: Any) -> None:
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            y = x * 2
        subjects.run("good", x, out)
        here.wait_stream(side)
        out.add_(y)

    def wrong(x: Any, out: Any) -> None:
        raise ValueError("boo")

    def atomics(x: Any, out: Any) -> None:
        y = x.repeat(4096)
        subjects.run("good", x, out)
        out.index_add_(0, torch.zeros(y.numel(), dtype=torch.long, device="cuda"), y)

    inconclusive(lambda x, out: None, "captures nothing")
    inconclusive(synchronizes, "cannot be captured")
    inconclusive(several, "several streams")
    inconclusive(wrong, "raises when it runs: ValueError: boo")
    inconclusive(lambda x, out: subjects.run("good", x, out, pdl=False), "no kernel is launched with the PDL attribute")
    inconclusive(lambda x, out: torch.relu(x * out), "no kernel is launched with the PDL attribute")
    inconclusive(atomics, "is not deterministic")
    assert check(subjects.good).outcome is Outcome.PASS, "after all that"


def test_a_hang_and_a_crash_cost_the_child_process_alone() -> None:
    for one, text in ((subjects.hangs, "did not finish"), (subjects.faults, "")):
        verdict = check(one, isolate=True, time_limit=4)
        assert verdict.outcome is Outcome.ERROR
        assert text in " ".join(verdict.case.errors)
    assert check(subjects.good, isolate=True).outcome is Outcome.PASS
    assert torch.zeros(4, device="cuda").sum().item() == 0


def test_the_command(tmp_path: Path) -> None:
    import subprocess
    import sys

    from pdl_stress.report import load_json

    file = Path(subjects.__file__)
    done = subprocess.run(
        [sys.executable, "-m", "pdl_stress", "check", f"{file}::good", "--out", str(tmp_path), "--contracts"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert '@op(reads=("x",), writes=("out",))' in done.stdout
    run = load_json(tmp_path / "results.json")
    assert run.verdict is Outcome.PASS
    assert [case.chain for case in run.cases] == ["good"]


def test_library_kernels_and_a_whole_chain() -> None:
    from fusions.ops import native

    def bf16(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda").bfloat16()

    gemm = check(
        lambda x, weight, bias, out: native.tinygemm2(x, weight, bias, out=out),
        lambda: {"x": bf16(1, 512), "weight": bf16(256, 512), "bias": bf16(256), "out": bf16(1, 256)},
        independent=("weight", "bias"), name="tinygemm2",
    )  # fmt: skip
    assert gemm.outcome is Outcome.PASS, str(gemm)
    assert measured(gemm.case, "tinygemm2") == {
        ("x", "read"): AFTER, ("weight", "read"): BEFORE, ("bias", "read"): BEFORE, ("out", "written"): AFTER,
    }  # fmt: skip
    norm = check(
        lambda x, weight, out: native.rmsnorm(x, weight, out=out),
        lambda: {"x": bf16(1, 512), "weight": bf16(512), "out": bf16(1, 512)}, name="rmsnorm",
    )  # fmt: skip
    assert norm.outcome is Outcome.PASS, str(norm)
    assert set(measured(norm.case, "rmsnorm").values()) == {AFTER}


# -- Triton ------------------------------------------------------------------------------------------------------------


def triton_kernels() -> Any:
    pytest.importorskip("triton")
    import triton_kernels as found

    return found


def rows(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda")


def test_triton_kernels_that_wait_pass() -> None:
    k = triton_kernels()
    cases: list[tuple[str, Any, Any]] = [
        ("waits", lambda x, out: k.launch(k.waits, 4, x, out, 512, BLOCK=128), lambda: (rows(512), rows(512))),
        (
            "softmax",
            lambda x, out: k.launch(k.softmax, 8, x, out, 300, BLOCK=512),
            lambda: (rows(8, 300), rows(8, 300)),
        ),
        (
            "matmul",
            lambda a, b, out: k.launch(k.matmul, 4, a, b, out, 256, 512, BM=16, BN=64, BK=64),
            lambda: (rows(16, 512).bfloat16(), rows(512, 256).bfloat16(), rows(16, 256).bfloat16()),
        ),
        (
            "gather",
            lambda x, index, out: k.launch(k.gather, 4, x, index, out, 512, BLOCK=128),
            lambda: (rows(512), torch.randint(0, 512, (512,), device="cuda"), rows(512)),
        ),
    ]
    for name, fn, make in cases:
        verdict = check(fn, make, name=name)
        assert verdict.outcome is Outcome.PASS, str(verdict)
        assert set(measured(verdict.case, name).values()) == {AFTER}, name


def test_a_triton_kernel_that_prefetches_its_weight_and_one_that_never_waits() -> None:
    k = triton_kernels()

    def norm(x: Any, weight: Any, out: Any) -> None:
        k.launch(k.row_norm, 8, x, weight, out, 300, BLOCK=512)

    def make() -> Any:
        return rows(8, 300), rows(300), rows(8, 300)

    good = check(norm, make, independent=("weight",), name="row_norm")
    assert good.outcome is Outcome.PASS, str(good)
    assert measured(good.case, "row_norm") == {
        ("x", "read"): AFTER,
        ("weight", "read"): BEFORE,
        ("out", "written"): AFTER,
    }
    assert check(norm, make).outcome is Outcome.FAIL
    bad = check(
        lambda x, out: k.launch(k.never, 4, x, out, 512, BLOCK=128), lambda: (rows(512), rows(512)), name="never"
    )
    assert bad.outcome is Outcome.FAIL
    assert ("read", "producer", "never", "x") in blamed(bad.case)
