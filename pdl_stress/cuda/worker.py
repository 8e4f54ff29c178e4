"""The process that holds the GPU. A crash, a sticky CUDA error or a hang costs this process, not the campaign.

The parent never touches the driver. A job that does not answer in time ends its worker (a hung kernel cannot be
stopped in any other way); the next job gets a fresh one. Workers are spawned, never forked: a forked CUDA context is
broken.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ..chain import Chain
from ..errors import DeviceError, PdlStressError, UsageError
from ..jobs import ArmJob, CensusJob, ControlJob, ExposureJob, Job

START_SECONDS = 180.0
"""For importing torch, making a context and compiling on top of a job's own limit."""

CENSUS_SECONDS = 150.0
"""For ops that compile their kernels at the first launch, and for taking machine code out of large libraries."""

KILL_SECONDS = 10.0
"""For a worker to end once told to; then it is killed."""


class WorkerFailed(DeviceError):
    """A job ended its worker: a hang (time limit), a crash, or a CUDA error. The text says which."""


class Worker:
    """Runs jobs in a child process, one at a time.

    Args:
        load: gives the chain of a name; a module-level function, since it is sent to the child.
        seed: of inputs and weights.
        time_limit: seconds a run of one captured graph may take.
    """

    def __init__(self, load: Callable[[str], Chain], *, seed: int = 0, time_limit: float = 60.0) -> None:
        self._load, self._seed, self._time_limit = load, seed, time_limit
        self._process: Any = None
        self._pipe: Connection | None = None
        self._fresh = True
        self._profiled = False

    def execute(self, job: Job) -> Any:
        """Carries out one job in the child.

        Raises:
            WorkerFailed: no answer in time, the child died, or a CUDA error; the child is gone.
            PdlStressError: the job was refused; the child lives on.
        """
        profiles = isinstance(job, ExposureJob) and job.profiled
        if self._profiled and not profiles:  # nothing is graded in a process that has profiled
            self.stop()
        self._profiled = profiles
        if self._process is None:
            self._start()
        assert self._pipe is not None
        # The child limits what it enqueues itself; this is for what hangs elsewhere, as in the eager reference. A run
        # that makes progress may be long: twice its replays (a control has a twin), at several times a replay's cost.
        limit = 3 * self._time_limit + 2 * _seconds(job) + (START_SECONDS if self._fresh else 0.0)
        try:
            self._pipe.send(job)
            if not self._pipe.poll(limit):
                self.stop(kill=True)
                raise WorkerFailed(f"no answer within {limit:g} s; the worker was ended.")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            code = self._end()
            hint = ""
            if self._fresh:
                hint = (
                    " It had not answered yet: a script that calls stress() must do so under "
                    '`if __name__ == "__main__":`, since the child imports it again.'
                )
            raise WorkerFailed(f"the worker died (exit code {code}).{hint}") from error
        self._fresh = False
        if kind == "refused":
            raise PdlStressError(value)
        if kind == "failed":
            self.stop(kill=True)
            raise WorkerFailed(value)
        return value

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self._load, self._seed, self._time_limit)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        try:
            process.start()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            ours.close()
            text = f"{self._load!r} cannot be sent to a child process; give a module-level function ({error})."
            raise UsageError(text) from error
        finally:
            theirs.close()
        self._process, self._pipe, self._fresh = process, ours, True

    def stop(self, *, kill: bool = False) -> None:
        """Ends the child; with ``kill`` at once."""
        if self._process is None:
            return
        if not kill and self._pipe is not None:
            try:
                self._pipe.send(None)
            except OSError:
                kill = True
        if kill:
            self._process.kill()
        self._end()

    def _end(self) -> int | None:
        self._process.join(KILL_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(KILL_SECONDS)
        code: int | None = self._process.exitcode
        if self._pipe is not None:
            self._pipe.close()
        self._process, self._pipe = None, None
        return code

    def __enter__(self) -> Worker:
        """Starts the child at once: it imports and makes its context while the parent plans."""
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _seconds(job: Job) -> float:
    """A generous estimate of a job's replays: 100 us each, and its delay."""
    if isinstance(job, CensusJob):
        return CENSUS_SECONDS
    if isinstance(job, ArmJob):
        return job.replays * (100 + 3 * (job.delay_us or 0.0)) * 1e-6
    if isinstance(job, ControlJob):
        return job.replays * (100 + 3 * job.control.delay_us) * 1e-6
    return 0.0


def _serve(pipe: Connection, load: Callable[[str], Chain], seed: int, time_limit: float) -> None:
    """The child's loop: jobs in, answers out, until ``None`` or the end of the pipe."""
    from .executor import Executor

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its children itself
    executor = Executor(load, seed=seed, time_limit=time_limit)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if job is None:
            return
        answer: tuple[str, object]
        try:
            answer = ("answer", executor.execute(job))
        except DeviceError as error:
            answer = ("failed", str(error))
        except PdlStressError as error:
            answer = ("refused", str(error))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            answer = ("failed", f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})")
        pipe.send(answer)
        if answer[0] == "failed":
            os._exit(1)  # the context may be unusable, and its destructors may hang
