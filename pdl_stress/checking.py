"""A verdict on kernels that somebody else wrote: one call, no reference, no contract, no control to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .api import Verdict, choose_machine
from .isolation import run_isolated
from .judging import run_check
from .results import CaseResult
from .subjects import CONTROL_REPLAYS, DELAYS_US, REPLAYS, TIME_LIMIT_S, CheckPlan, as_subject


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
    isolate: bool = False,
    keep: Callable[[CaseResult], None] = lambda case: None,
) -> Verdict:
    """Checks the kernels that a callable launches: do they honour PDL, and would the check have noticed if not?

    Args:
        fn: a callable, a :class:`~pdl_stress.Subject`, or an :class:`~pdl_stress.Op`.
        make_inputs, independent, code: see :class:`~pdl_stress.Subject`.
        replays, control_replays, delays_us, seed, time_limit: see :class:`~pdl_stress.subjects.CheckPlan`.
        isolate: run it in a child process, which a crash or a hang of a kernel cannot outlive. The callables must then
            be defined at the top of a module.
        keep: takes what was found so far, after each stage.

    Returns:
        PASS, FAIL, ERROR or INCONCLUSIVE, with the measured contract of each kernel that is launched to overlap.

    Raises:
        UsageError: a request that cannot be carried out. DeviceError: no usable GPU.
    """
    subject = as_subject(fn, make_inputs, name=name, independent=independent, code=code)
    plan = CheckPlan(replays, control_replays, tuple(delays_us), seed, time_limit)
    choose_machine("cuda")
    return Verdict((run_isolated if isolate else run_check)(subject, plan, keep))
