"""The Python face: one call, one verdict; bad arguments are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

import pdl_stress
from pdl_stress import Chain, DeviceError, Outcome, UsageError, Verdict, Wait, catalog, op, stress
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
        ({"replays": 0}, "replays is 0; expected at least 1"),
        ({"replays": -5}, "replays is -5"),
        ({"rules": "observed"}, "unknown rule set 'observed'; expected one of documented, observed:sm_90"),
        ({"machine": "gpu"}, "unknown machine 'gpu'"),
        ({"controls": ("F99",)}, "unknown fault 'F99'"),
        ({"controls": ("F02@nowhere",)}, "no chain of this run has a step 'nowhere'"),
        ({"delays_us": ()}, r"delays_us is \(\)"),
        ({"delays_us": (-1.0,)}, r"delays_us is \(-1\.0,\); expected microseconds from 0 to 1000"),
        ({"delays_us": (1e9,)}, "expected microseconds from 0 to 1000"),
        ({"delays_us": (float("nan"),)}, "expected microseconds from 0 to 1000"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        stress(small, **{"machine": "model", **arguments})


@pytest.mark.parametrize("thing", [None, 5, "csa2-fused-m1", lambda: None])
def test_what_is_no_chain_is_refused(thing: Any) -> None:
    with pytest.raises(UsageError, match="is no Chain; give one, or a function that builds one"):
        stress(thing, machine="model")


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


def test_everything_that_is_exported_exists() -> None:
    assert sorted(pdl_stress.__all__) == list(pdl_stress.__all__)
    for name in pdl_stress.__all__:
        assert getattr(pdl_stress, name) is not None
