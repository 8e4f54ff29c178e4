"""A check in a child process: what it had found is kept, however the child ends."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest

from pdl_stress import Outcome, UsageError, isolation
from pdl_stress.isolation import run_isolated
from pdl_stress.results import CaseResult, ContractResult
from pdl_stress.subjects import CheckPlan, Subject


def make() -> int:
    return 1


def fn(x: Any) -> Any:
    return x


SUBJECT = Subject("mine", fn, make)


def case(*, done: bool = False) -> CaseResult:
    found = CaseResult("mine", "as captured", [], "cuda", contracts=[ContractResult("k")])
    if done:
        found.verdict = Outcome.PASS
    return found


def finishes(pipe: Connection, distant: Any, plan: Any) -> None:
    assert distant.load().fn.__name__ == "fn"
    pipe.send(("partial", case()))
    pipe.send(("done", case(done=True)))


def refuses(pipe: Connection, distant: Any, plan: Any) -> None:
    pipe.send(("usage", "no such input"))


def dies(pipe: Connection, distant: Any, plan: Any) -> None:
    pipe.send(("partial", case(done=True)))
    time.sleep(0.2)
    os._exit(9)


def dies_at_once(pipe: Connection, distant: Any, plan: Any) -> None:
    os._exit(7)


def hangs(pipe: Connection, distant: Any, plan: Any) -> None:
    pipe.send(("partial", case()))
    time.sleep(600)


def lies(pipe: Connection, distant: Any, plan: Any) -> None:
    pipe.send(("done", "PASS"))


def run(serve: Any, kept: list[CaseResult] | None = None) -> CaseResult:
    kept = [] if kept is None else kept
    return run_isolated(SUBJECT, CheckPlan(time_limit=1), kept.append, serve=serve)


def test_what_the_child_found_is_the_result() -> None:
    kept: list[CaseResult] = []
    assert run(finishes, kept).verdict is Outcome.PASS
    assert len(kept) == 2


def test_a_request_that_the_child_refuses() -> None:
    with pytest.raises(UsageError, match="no such input"):
        run(refuses)


@pytest.mark.parametrize(("serve", "code", "contracts"), [(dies, 9, 1), (dies_at_once, 7, 0)])
def test_a_child_that_dies_is_an_error_and_what_it_had_found_is_kept(serve: Any, code: int, contracts: int) -> None:
    found = run(serve)
    assert found.verdict is Outcome.ERROR
    assert f"exit code {code}" in " ".join(found.errors)
    assert len(found.contracts) == contracts


def test_a_child_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "SILENCE_SECONDS", 2.0)
    started = time.monotonic()
    found = run(hangs)
    assert found.verdict is Outcome.ERROR
    assert "no news" in found.errors[0]
    assert len(found.contracts) == 1
    assert time.monotonic() - started < 60


def test_a_child_cannot_make_a_verdict_of_anything_else() -> None:
    with pytest.raises(TypeError, match="expected a case"):
        run(lies)


def test_without_a_gpu_a_check_is_refused_and_never_a_pass() -> None:
    """In the child itself, where nothing has looked for a device before."""
    from pdl_stress.cuda.device import Presence, presence

    if presence().presence is not Presence.NONE:
        pytest.skip("there is a GPU")
    found = run_isolated(SUBJECT, CheckPlan(), lambda _: None)
    assert found.verdict is Outcome.ERROR
    assert found.errors
