"""Runs a check in this process, and judges what it found."""

from __future__ import annotations

import time
from collections.abc import Callable

from .collect import power_window
from .errors import PdlStressError, UsageError
from .results import CaseResult
from .subjects import CheckPlan, Subject
from .verdict import judge_hardware


def run_check(subject: Subject, plan: CheckPlan, keep: Callable[[CaseResult], None] = lambda case: None) -> CaseResult:
    """Checks in this process, and judges. ``keep`` takes what there is so far, again and again.

    Raises:
        UsageError: the request cannot be carried out.
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
    except PdlStressError as error:
        case.errors.append(str(error))
    except Exception as error:
        case.errors.append(f"{type(error).__name__}: {error}")
    finish(case, time.monotonic() - started)
    return case


def finish(case: CaseResult, seconds: float) -> None:
    """Judges what there is."""
    case.seconds, case.window_us = seconds, power_window(case.controls)
    case.planned = (len(case.arms), len(case.controls))
    case.verdict, case.reasons = judge_hardware(case)
