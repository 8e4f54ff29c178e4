"""The process that holds the GPU: what a crash, a hang, an exception and a refusal cost, and what is left behind.

A job builds a bench, which needs a GPU; but first it loads its chain. So ``load`` is where these tests misbehave. It
must be importable in the child, hence a module of its own, written to a folder that the child finds on its path.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdl_stress import DeviceError, PdlStressError, UsageError
from pdl_stress.chain import DataEdge
from pdl_stress.cuda import worker as module
from pdl_stress.cuda.worker import Worker, WorkerFailed
from pdl_stress.faults import Control
from pdl_stress.jobs import ArmJob, CensusJob, ControlJob, ExposureJob

ROOT = Path(__file__).resolve().parent.parent
EDGE = DataEdge("p", "c", "x", "a")
MODULE = "loads_that_misbehave"
SOURCE = """
import os, time
from pathlib import Path
from pdl_stress import PdlStressError, UsageError

HERE = Path(__file__).parent

def load(name):
    with open(HERE / "pids", "a") as file:
        print(os.getpid(), file=file)
    if name == "crash":
        os._exit(7)
    if name == "abort":
        os.abort()
    if name == "hang":
        time.sleep(1000)
    if name == "raise":
        raise RuntimeError("no such kernel")
    if name == "interrupt":
        raise SystemExit(5)
    raise UsageError(f"unknown chain {name!r}")
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(MODULE).load
    del sys.modules[MODULE]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {child.pid for child in multiprocessing.active_children()}
    yield
    assert {child.pid for child in multiprocessing.active_children()} <= before


def job(name: str) -> ExposureJob:
    return ExposureJob(name, "mark", "as deployed")


def pids(load: Callable[[str], Any]) -> list[int]:
    return [int(line) for line in (Path(load.__globals__["HERE"]) / "pids").read_text().split()]


def is_gone(pid: int) -> bool:
    """Ended and reaped: a zombie still has its id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_refused_job_costs_nothing(load: Callable[[str], Any]) -> None:
    with Worker(load) as worker:
        for name in ("first", "second"):
            with pytest.raises(PdlStressError, match=f"unknown chain '{name}'") as error:
                worker.execute(job(name))
            assert not isinstance(error.value, DeviceError), "the request was wrong, not the device"
    first, second = pids(load)
    assert first == second, "the same child"
    assert is_gone(first)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("crash", r"the worker died \(exit code 7\)"),
        ("abort", r"the worker died \(exit code -6\)"),
        ("interrupt", r"the worker died \(exit code 5\)"),
        ("raise", rf"^RuntimeError: no such kernel \({MODULE}\.py:\d+\)$"),
    ],
)
def test_a_failed_job_costs_its_worker_and_the_next_job_gets_a_fresh_one(
    load: Callable[[str], Any], name: str, words: str
) -> None:
    with Worker(load) as worker:
        with pytest.raises(WorkerFailed, match=words):
            worker.execute(job(name))
        (first,) = pids(load)
        assert is_gone(first)
        with pytest.raises(PdlStressError, match="unknown chain 'next'"):
            worker.execute(job("next"))
        assert pids(load)[1] != first
    assert all(is_gone(pid) for pid in pids(load))


def test_a_hang_ends_with_the_time_limit(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(load, time_limit=0.3) as worker:
        with pytest.raises(PdlStressError, match="unknown chain"):
            worker.execute(job("warm"))
        with pytest.raises(WorkerFailed, match=r"no answer within 0\.9 s; the worker was ended"):
            worker.execute(job("hang"))
        assert all(is_gone(pid) for pid in pids(load))
        with pytest.raises(PdlStressError, match="unknown chain 'next'"):
            worker.execute(job("next"))
        warm, hung, fresh = pids(load)
        assert warm == hung != fresh
    assert is_gone(fresh)


def test_a_child_that_hangs_at_its_start_ends_too(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.15)
    with Worker(load, time_limit=0.05) as worker, pytest.raises(WorkerFailed, match=r"no answer within 0\.3 s"):
        worker.execute(job("hang"))


def test_only_the_first_job_of_a_child_gets_time_to_start(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every hang would cost minutes."""
    assert module.START_SECONDS > 30
    with Worker(load, time_limit=0.3) as worker:
        with pytest.raises(PdlStressError, match="unknown chain"):
            worker.execute(job("warm"))
        with pytest.raises(WorkerFailed, match=r"no answer within 0\.9 s"):
            worker.execute(job("hang"))


@pytest.mark.parametrize(
    ("job", "seconds"),
    [
        (ExposureJob("c", "mark", "as deployed"), 0.0),
        (ArmJob("c", "mark", "as deployed", 20_000), 2.0),
        (ArmJob("c", "mark", "delayed", 1_000_000, {}, "s", 10.0), 130.0),
        (ArmJob("c", "mark", "delayed", 10**9, {}, "s", 0.0), 100_000.0),
        (ControlJob("c", "mark", Control("F02", "v", EDGE, 100.0), "caught", "", 1000), 0.4),
        (CensusJob("c", "mark"), module.CENSUS_SECONDS),
    ],
)
def test_a_job_may_take_as_long_as_its_replays_need(job: Any, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of an hour that makes progress is no hang; the child watches its progress itself."""
    waited: list[float] = []

    class Pipe:
        def send(self, job: Any) -> None: ...

        def poll(self, limit: float) -> bool:
            waited.append(limit)
            return True

        def recv(self) -> tuple[str, str]:
            return "answer", "an answer"

    worker = Worker(lambda name: None, time_limit=5.0)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(worker, "_process", object())
    monkeypatch.setattr(worker, "_pipe", Pipe())
    assert [worker.execute(job), worker.execute(job)] == ["an answer"] * 2
    assert waited == [pytest.approx(15 + 2 * seconds + module.START_SECONDS), pytest.approx(15 + 2 * seconds)]


def test_a_hang_in_a_long_job_ends_too(load: Callable[[str], Any]) -> None:
    with Worker(load, time_limit=0.1) as worker:
        with pytest.raises(PdlStressError, match="unknown chain"):
            worker.execute(job("warm"))
        with pytest.raises(WorkerFailed, match=r"no answer within 0\.5 s"):
            worker.execute(ArmJob("hang", "mark", "as deployed", 1000))


def test_a_child_killed_between_jobs_is_replaced(load: Callable[[str], Any]) -> None:
    """As the kernel's out-of-memory killer would."""
    with Worker(load) as worker:
        with pytest.raises(PdlStressError, match="unknown chain"):
            worker.execute(job("first"))
        os.kill(pids(load)[0], 9)
        with pytest.raises(WorkerFailed, match=r"the worker died \(exit code -9\)\.$"):
            worker.execute(job("second"))
        with pytest.raises(PdlStressError, match="unknown chain 'third'"):
            worker.execute(job("third"))


SCRIPT = """
from pdl_stress import UsageError
from pdl_stress.cuda.worker import Worker
from pdl_stress.jobs import ExposureJob

def load(name):
    raise UsageError("it was loaded")

GUARD
    with Worker(load) as worker:
        worker.execute(ExposureJob("chain", "mark", "as deployed"))
"""


@pytest.mark.parametrize(
    ("guard", "last"),
    [
        (
            "if True:",
            "WorkerFailed: the worker died (exit code 1). It had not answered yet: a script that calls stress()",
        ),
        ('if __name__ == "__main__":', "PdlStressError: it was loaded"),
    ],
    ids=["unguarded", "guarded"],
)
def test_a_script_without_a_guard_is_told_what_it_lacks(tmp_path: Path, guard: str, last: str) -> None:
    """The child imports the script again, and would start a child of its own."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("GUARD", guard))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert last in done.stderr.splitlines()[-1]
    assert ('`if __name__ == "__main__":`' in done.stderr.splitlines()[-1]) is (guard == "if True:")


def test_only_a_worker_that_never_answered_may_lack_the_guard(load: Callable[[str], Any]) -> None:
    with Worker(load) as worker:
        with pytest.raises(WorkerFailed, match="It had not answered yet"):
            worker.execute(job("crash"))
        with pytest.raises(PdlStressError, match="unknown chain"):
            worker.execute(job("next"))
        with pytest.raises(WorkerFailed, match=r"the worker died \(exit code 7\)\.$"):
            worker.execute(job("crash"))


def test_ctrl_c_is_for_the_parent_alone(load: Callable[[str], Any]) -> None:
    """The terminal sends it to the whole group; a child that fell over it would look like a crash."""
    with Worker(load) as worker:
        for name in ("first", "second"):
            with pytest.raises(PdlStressError, match=f"unknown chain '{name}'"):
                worker.execute(job(name))
            os.kill(pids(load)[0], signal.SIGINT)
    assert len(set(pids(load))) == 1


def profiled(name: str) -> ExposureJob:
    return ExposureJob(name, "mark", "as deployed", profiled=True)


def test_nothing_is_graded_in_a_process_that_has_profiled(load: Callable[[str], Any]) -> None:
    """A profiler changes the timing of everything after it. What came before it is no worse for it."""
    asked = [job("a"), ArmJob("b", "mark", "as deployed", 10), profiled("c"), profiled("d"), job("e"), profiled("f")]
    with Worker(load) as worker:
        for one in asked:
            with pytest.raises(PdlStressError, match=f"unknown chain '{one.chain}'") as error:
                worker.execute(one)
            assert not isinstance(error.value, DeviceError)
            assert all(is_gone(pid) for pid in pids(load)[:-1] if pid != pids(load)[-1]), "one process at a time"
    a, b, c, d, e, f = pids(load)
    assert a == b == c == d
    assert e == f
    assert a != e
    assert all(is_gone(pid) for pid in pids(load))


def test_the_process_after_one_that_has_profiled_gets_its_time_to_start(load: Callable[[str], Any]) -> None:
    """It is a new one: the time limit of a job alone would end it while it imports."""
    with Worker(load, time_limit=0.05) as worker:
        for one in (profiled("first"), job("second")):
            with pytest.raises(PdlStressError, match="unknown chain") as error:
                worker.execute(one)
            assert not isinstance(error.value, WorkerFailed)


def test_a_crash_while_profiling_costs_its_worker_alone(load: Callable[[str], Any]) -> None:
    with Worker(load) as worker:
        with pytest.raises(WorkerFailed, match=r"the worker died \(exit code 7\)"):
            worker.execute(profiled("crash"))
        with pytest.raises(PdlStressError, match="unknown chain 'next'"):
            worker.execute(profiled("next"))
        with pytest.raises(PdlStressError, match="unknown chain 'last'"):
            worker.execute(job("last"))
        assert len(set(pids(load))) == 3


def test_a_census_has_time_to_compile_and_to_take_large_libraries_apart() -> None:
    """It is the first to launch an op: FlashInfer compiles for a minute, and torch's libraries have a gigabyte."""
    assert module.CENSUS_SECONDS >= 120
    assert module._seconds(CensusJob("c", "mark")) == module.CENSUS_SECONDS
    assert module._seconds(profiled("c")) == 0.0


def test_stopping_twice_or_before_the_start_is_fine(load: Callable[[str], Any]) -> None:
    worker = Worker(load)
    worker.stop()
    with worker:
        pass
    worker.stop(kill=True)
    worker.stop()


def test_a_worker_ends_with_its_block_even_if_that_raises(load: Callable[[str], Any]) -> None:
    with pytest.raises(PdlStressError, match="unknown chain 'first'"), Worker(load) as worker:
        worker.execute(job("first"))
    assert is_gone(pids(load)[0])


def test_a_load_that_cannot_be_sent_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="module-level function"), Worker(lambda name: None):  # type: ignore[arg-type,return-value]
        raise AssertionError("no child can be started for a function that has no name")
