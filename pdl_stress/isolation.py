"""A check in a child process: a crash, a hang or a sticky CUDA error of a kernel costs the child, never the caller.

The child sends what it has after each stage, so nothing finished is lost. It is spawned, never forked: a forked CUDA
context is broken. What it checks it loads by file and name (:mod:`pdl_stress.locating`).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from .errors import UsageError
from .judging import finish
from .locating import Location, locate
from .results import CaseResult
from .subjects import CheckPlan, Subject

SILENCE_SECONDS = 240.0
"""Longest time without news from the child, beside its own time limits: it imports torch, and may compile kernels."""

END_SECONDS = 10.0


@dataclass(frozen=True)
class Distant:
    """A subject by the places of its callables."""

    subject: Subject
    fn: Location
    make_inputs: Location
    code: Location | None
    path: tuple[str, ...]

    @classmethod
    def of(cls, subject: Subject) -> Distant:
        """Raises UsageError for callables that a child cannot load."""
        code = subject.code
        places = locate(subject.fn), locate(subject.make_inputs), None if code is None else locate(code)
        bare = replace(subject, fn=_absent, make_inputs=_absent, code=None)
        return cls(bare, *places, tuple(sys.path))

    def load(self) -> Subject:
        sys.path[:] = list(dict.fromkeys((*self.path, *sys.path)))
        fn = self.fn.load()
        if isinstance(fn, Subject):  # the name of a decorated function is the subject's
            fn = fn.fn
        code = None if self.code is None else self.code.load()
        return replace(self.subject, fn=fn, make_inputs=self.make_inputs.load(), code=code)


def checked_case(value: Any) -> CaseResult:
    """Raises TypeError for what is no case: a child must not be able to make a verdict out of anything else."""
    if not isinstance(value, CaseResult):
        raise TypeError(f"a child sent {value!r}, expected a case")
    return value


def _absent(*_: Any, **__: Any) -> Any:
    raise NotImplementedError


def run_isolated(
    subject: Subject, plan: CheckPlan, keep: Callable[[CaseResult], None], *, serve: Any = None
) -> CaseResult:
    """Checks ``subject`` in a child process.

    Raises:
        UsageError: the request cannot be carried out, or the child cannot load it.
    """
    distant = Distant.of(subject)
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve or _serve, args=(theirs, distant, plan), daemon=True)
    process.start()
    theirs.close()
    case, trouble = CaseResult(subject.name, "as captured", [], "cuda", requested_replays=plan.replays), ""
    limit = SILENCE_SECONDS + 3 * plan.time_limit
    try:
        while True:
            if not ours.poll(limit):
                trouble = f"no news for {limit:g} s; the process was ended"
                break
            kind, value = ours.recv()
            if kind == "usage":
                raise UsageError(value)
            case = checked_case(value)
            keep(case)
            if kind == "done":
                return case
    except (EOFError, OSError):
        process.join(END_SECONDS)
        trouble = f"the process that ran the kernels died (exit code {process.exitcode})"
    finally:
        process.kill() if process.is_alive() and trouble else process.join(END_SECONDS)
        if process.is_alive():
            process.kill()
        ours.close()
    case.errors.append(f"{trouble}; what it had found until then is kept")
    finish(case, time.monotonic() - started)
    return case


def _serve(pipe: Connection, distant: Distant, plan: CheckPlan) -> None:
    from .judging import run_check

    try:
        case = run_check(distant.load(), plan, lambda case: pipe.send(("partial", case)))
    except UsageError as error:
        pipe.send(("usage", str(error)))
        return
    pipe.send(("done", case))
    if case.errors:
        os._exit(0)  # the context may be unusable, and its destructors may hang
