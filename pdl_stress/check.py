"""A verdict on kernels that somebody else wrote: one call, no reference, no contract, no control to write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from .api import Verdict, choose_machine
from .errors import DeviceError, PdlStressError, UsageError
from .results import CaseResult
from .subject import CONTROL_REPLAYS, DELAYS_US, REPLAYS, TIME_LIMIT_S, CheckPlan, Subject, as_subject
from .verdict import judge_hardware


def check(
    fn: Any,
    make_inputs: Callable[[], Any] | None = None,
    *,
    name: str | None = None,
    independent: Iterable[str] = (),
    code: Callable[[], Iterable[Any]] | None = None,
    replays: int = REPLAYS,
    control_replays: int = CONTROL_REPLAYS,
    delays_us: tuple[float, ...] = DELAYS_US,
    seed: int = 0,
    time_limit: float = TIME_LIMIT_S,
) -> Verdict:
    """Checks the kernels that a callable launches: do they honour PDL, and would the check have noticed if not?

    Args:
        fn: a callable, a :class:`~pdl_stress.Subject`, or an :class:`~pdl_stress.Op`.
        make_inputs, independent, code: see :class:`~pdl_stress.Subject`.
        replays, control_replays, delays_us, seed, time_limit: see :class:`~pdl_stress.subject.CheckPlan`.

    Returns:
        PASS, FAIL, ERROR or INCONCLUSIVE, with the measured contract of each kernel that is launched to overlap.

    Raises:
        UsageError: a request that cannot be carried out. DeviceError: no usable GPU.
    """
    subject = as_subject(fn, make_inputs, name=name, independent=independent, code=code)
    plan = CheckPlan(replays, control_replays, tuple(delays_us), seed, time_limit)
    choose_machine("cuda")
    return Verdict(run_check(subject, plan))


def run_check(subject: Subject, plan: CheckPlan, keep: Callable[[CaseResult], None] = lambda case: None) -> CaseResult:
    """Checks in this process, and judges. ``keep`` takes what there is so far, again and again.

    Raises:
        UsageError: as :func:`check`.
    """
    from .cuda.device import verdict_blockers
    from .cuda.subject.checker import Checker

    started = time.monotonic()
    checker = Checker(subject, plan, keep)
    case = checker.case
    case.blockers = [f"{finding.name}: {finding.value}. {finding.advice}" for finding in verdict_blockers()]
    try:
        if not case.blockers:
            checker.check()
    except UsageError:
        raise
    except DeviceError as error:
        case.errors.append(str(error))
    except PdlStressError as error:
        case.errors.append(str(error))
    except Exception as error:
        case.errors.append(f"{type(error).__name__}: {error}")
    finish(case, time.monotonic() - started)
    return case


def finish(case: CaseResult, seconds: float) -> None:
    """Judges what there is."""
    case.seconds = seconds
    case.planned = (len(case.arms), len(case.controls))
    case.verdict, case.reasons = judge_hardware(case)
