"""The Python face: one call, one verdict; bad arguments are refused before anything runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import pdl_stress
from pdl_stress import Chain, DeviceError, Outcome, Trigger, UsageError, Verdict, Wait, catalog, op, stress
from pdl_stress.api import choose_machine
from pdl_stress.cuda.device import Presence, Sighting


def small() -> Chain:
    return catalog.load("csa2-fused-m1")


def seen(monkeypatch: pytest.MonkeyPatch, presence: Presence, reason: str = "the driver is too old") -> None:
    monkeypatch.setattr("pdl_stress.cuda.device.presence", lambda: Sighting(presence, reason))


# --- the machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "presence", "chosen"),
    [
        ("model", Presence.NONE, "model"),
        ("model", Presence.UNUSABLE, "model"),
        ("model", Presence.USABLE, "model"),
        ("auto", Presence.NONE, "model"),
        ("auto", Presence.USABLE, "cuda"),
        ("auto", Presence.UNUSABLE, None),
        ("cuda", Presence.NONE, None),
        ("cuda", Presence.UNUSABLE, None),
        ("cuda", Presence.USABLE, "cuda"),
    ],
)
def test_the_model_stands_in_only_where_there_is_no_device(
    monkeypatch: pytest.MonkeyPatch, wanted: str, presence: Presence, chosen: str | None
) -> None:
    seen(monkeypatch, presence)
    if chosen:
        assert choose_machine(wanted) == chosen
    else:
        with pytest.raises(DeviceError, match="the GPU cannot be used: the driver is too old"):
            choose_machine(wanted)


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown machine 'gpu'; expected auto, cuda or model"):
        choose_machine("gpu")


# --- stress --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [small, small()], ids=["a function", "a chain"])
def test_a_chain_or_a_function_that_builds_one(build: Any) -> None:
    verdict = stress(build, machine="model", controls=("F02", "F04", "F07"))
    assert isinstance(verdict, Verdict)
    assert verdict.outcome is Outcome.ORDERED
    text = str(verdict)
    assert "csa2-fused-m1" in text
    assert "ORDERED" in text
    assert "\x1b" not in text, "plain text, for a log"


def test_a_third_party_chain_in_a_dozen_lines() -> None:
    @op(reads=("input", "weight"), writes=("out",), independent=("weight",), wait=Wait.NEVER)
    def my_norm(*, input: Any, weight: Any, out: Any, pdl: bool) -> None:
        raise AssertionError("no kernel runs on the model")

    chain = Chain("norm")
    hidden = chain.input("hidden", (1, 5120), "bfloat16")
    gain = chain.constant("gain", (5120,), "bfloat16")
    x = chain.buffer("x", (1, 5120), "bfloat16")
    chain.step("norm", my_norm, input=hidden, weight=gain, out=x)

    verdict = stress(chain, machine="model")
    assert verdict.outcome is Outcome.FAIL
    assert "stale read: norm may overtake producer on hidden" in verdict.case.model
    assert "reads hidden, which holds poison" in str(verdict)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replays": 0}, "replays is 0; expected 1 to "),
        ({"replays": -5}, "replays is -5"),
        ({"replays": 2.5}, r"replays is 2\.5; expected a whole number"),
        ({"replays": "2000"}, "replays is '2000'; expected a whole number"),
        ({"replays": None}, "replays is None; expected a whole number"),
        ({"seed": -1}, "seed is -1; expected 0 to "),
        ({"seed": "x"}, "seed is 'x'; expected a whole number"),
        ({"rules": None}, "rules is None; expected one of documented, observed:sm_90"),
        ({"rules": "observed"}, "unknown rule set 'observed'; expected one of documented, observed:sm_90"),
        ({"machine": "gpu"}, "unknown machine 'gpu'"),
        ({"controls": ("F99",)}, "unknown fault 'F99'"),
        ({"controls": ("F02@nowhere",)}, "no chain of this run has a step 'nowhere'"),
        ({"controls": "F02"}, r"faults is 'F02'; expected names such as \('F00@q_norm', 'F02'\), or None"),
        ({"delays_us": ()}, "delays_us is empty; expected at least one window"),
        ({"delays_us": 5.0}, r"delays_us is 5\.0; expected a tuple"),
        ({"delays_us": (-1.0,)}, r"delays_us: -1\.0; expected a number from 0 to 1000"),
        ({"delays_us": (1e9,)}, "expected a number from 0 to 1000"),
        ({"delays_us": (float("nan"),)}, "delays_us: nan; expected a number from 0 to 1000"),
        ({"time_limit": 0}, "time_limit: 0; expected a number from"),
        ({"time_limit": float("inf")}, "time_limit: inf; expected a number from"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        stress(small, **{"machine": "model", **arguments})


@pytest.mark.parametrize("thing", [None, 5, "csa2-fused-m1", Chain, Verdict])
def test_what_is_no_chain_is_refused(thing: Any) -> None:
    with pytest.raises(UsageError, match="is no Chain; give one, or a function that builds one"):
        stress(thing, machine="model")


@pytest.mark.parametrize("gives", [None, "csa2-fused-m1", Chain, small])
def test_a_function_that_builds_no_chain_is_refused(gives: Any) -> None:
    with pytest.raises(UsageError, match=r"<lambda> at .* gave .*, which is no Chain\."):
        stress(lambda: gives, machine="model")


def test_bad_requests_are_refused_before_a_device_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdl_stress.cuda.device.presence", lambda: pytest.fail("a device was looked for"))
    with pytest.raises(UsageError, match="is no Chain"):
        stress(Chain)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a whole number"):
        stress(small, replays="many")  # type: ignore[arg-type]


def test_an_unfinished_chain_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one input and one step"):
        stress(Chain("empty"), machine="model")


def test_without_a_device_cuda_is_an_error_and_never_a_model_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, Presence.NONE, "no NVIDIA device")
    with pytest.raises(DeviceError, match="no NVIDIA device"):
        stress(small, machine="cuda")


def test_without_controls_nothing_is_shown() -> None:
    verdict = stress(small, machine="model", controls=())
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "no control was refuted on producer->input_norm through hidden" in verdict.case.reasons


def test_rules_reach_the_model() -> None:
    documented = stress(small, machine="model", controls=("F05",))
    observed = stress(small, machine="model", controls=("F05",), rules="observed:sm_90")
    assert "«documented»" in documented.case.model
    assert "«observed:sm_90»" in observed.case.model


def test_a_function_is_run_in_a_child_and_a_chain_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    class Fake:
        def __init__(self, kind: str, load: Any) -> None:
            self.kind, self.load = kind, load

        def __enter__(self) -> Fake:
            return self

        def __exit__(self, *_: object) -> None:
            used.append("closed")

        def execute(self, job: Any) -> Any:
            used.append(self.kind)
            assert self.load(job.chain).name == "csa2-fused-m1"
            raise DeviceError("no GPU in this test")

    seen(monkeypatch, Presence.USABLE)
    monkeypatch.setattr("pdl_stress.cuda.device.verdict_blockers", list)
    monkeypatch.setattr("pdl_stress.cuda.worker.Worker", lambda load, **_: Fake("child", load))
    monkeypatch.setattr("pdl_stress.cuda.executor.Executor", lambda load, **_: Fake("here", load))
    assert stress(small, controls=()).outcome is Outcome.ERROR
    assert set(used) == {"child", "closed"}
    assert used[-1] == "closed"
    used.clear()
    assert stress(small(), controls=()).outcome is Outcome.ERROR
    assert set(used) == {"here"}


ELSEWHERE = """
import multiprocessing
from pdl_stress import Chain, Trigger, Wait, op

def build():
    child = multiprocessing.parent_process() is not None

    @op(reads=("input",), writes=("out",), wait=Wait.ALL, trigger=Trigger.NONE if child else Trigger.ENTRY)
    def my_op(*, input, out, pdl):
        raise AssertionError("no kernel runs in this test")

    chain = Chain("elsewhere")
    hidden, x = chain.input("hidden", (1, 8), "bfloat16"), chain.buffer("x", (1, 8), "bfloat16")
    chain.step("only", my_op, input=hidden, out=x)
    return chain
"""


def test_a_child_that_builds_another_chain_than_was_judged_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real child process: it refuses before it touches a GPU."""
    (tmp_path / "builds_another.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(str(tmp_path))
    build = importlib.import_module("builds_another").build
    seen(monkeypatch, Presence.USABLE)
    monkeypatch.setattr("pdl_stress.cuda.device.verdict_blockers", list)
    verdict = stress(build)
    assert verdict.outcome is Outcome.ERROR
    assert verdict.case.reasons[0].startswith("census of the graph: the chain 'elsewhere' that was built")
    assert "is not the one that was judged" in verdict.case.reasons[0]
    assert verdict.case.replays == 0
    del sys.modules["builds_another"]


def test_everything_that_is_exported_exists() -> None:
    assert sorted(pdl_stress.__all__) == list(pdl_stress.__all__)
    for name in pdl_stress.__all__:
        assert getattr(pdl_stress, name) is not None


def test_the_race_that_hardware_can_show_is_the_one_that_is_shown() -> None:
    """norm -> gemm -> add, gemm triggers at entry, add forgets its wait: gemm -> add is real under every rule set."""

    def kernel(**contract: Any) -> Any:
        return op(**contract)(lambda a=None, b=None, o=None, *, pdl: None)

    chain = Chain("residual")
    x = chain.input("x", (1, 64), "bfloat16")
    n, g, out = (chain.buffer(name, (1, 64), "bfloat16") for name in ("n", "g", "out"))
    chain.step("norm", kernel(reads=("a",), writes=("o",)), a=x, o=n)
    chain.step("gemm", kernel(reads=("a",), writes=("o",), trigger=Trigger.ENTRY), a=n, o=g)
    chain.step("add", kernel(reads=("a", "b"), writes=("o",), wait=Wait.NEVER), a=g, b=x, o=out)
    case = stress(chain, machine="model").case
    assert case.verdict is Outcome.FAIL
    assert case.model.startswith("stale read: add may overtake gemm on g")
    assert "; also: producer -> add on x" in case.model
    assert case.timeline[-1].endswith("<-- too late")
    assert case.controls == [], "its twins would only show its own fault"


def test_a_callable_that_could_never_be_launched_is_no_op() -> None:
    def norm(x: Any, weight: Any, output: Any) -> None: ...

    with pytest.raises(UsageError, match="takes no argument 'out', 'pdl'"):
        op(reads=("x", "weight"), writes=("out",))(norm)
