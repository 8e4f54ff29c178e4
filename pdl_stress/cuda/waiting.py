"""Waiting for a stream with a time limit: a wait inside the driver lasts as long as a hung kernel does."""

from __future__ import annotations

import time
from typing import Any

from ..errors import DeviceError

SPIN_SECONDS = 0.0005
"""Polling without a pause: an eager step takes microseconds, and a reference is a thousand of them."""


class TimeLimit(DeviceError):
    """The GPU did not finish in the time allowed."""


def finish(stream: Any, time_limit: float) -> None:
    """Waits for what was enqueued on a torch stream.

    Args:
        time_limit: seconds, for what was enqueued since the last call.

    Raises:
        TimeLimit: it is not done by then.
    """
    import torch

    started = time.perf_counter()
    event = torch.cuda.Event()
    event.record(stream)
    while not event.query():
        waited = time.perf_counter() - started
        if waited > time_limit:
            raise TimeLimit(f"the GPU did not finish within {time_limit:g} s: a hang, or too long a delay.")
        if waited > SPIN_SECONDS:
            time.sleep(0.0002)
