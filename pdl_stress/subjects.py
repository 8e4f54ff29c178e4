"""A callable to be checked, with how its inputs are made: all that a verdict needs, and no contract.

::

    from pdl_stress import subject

    def make_inputs():
        return torch.randn(8, 4096, device="cuda"), torch.empty(8, 4096, device="cuda")

    @subject(make_inputs)
    def my_kernel(x, out):
        my_library.launch(x, out, enable_pdl=True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .errors import UsageError
from .op import Op

REPLAYS = 2000
"""Graded replays of each arm of a check."""

CONTROL_REPLAYS = 256

DELAYS_US = (10.0, 100.0, 1000.0)
"""Windows that are tried in turn, until a control is caught: a kernel may be busy with other things before it reads."""

TIME_LIMIT_S = 30.0


@dataclass(frozen=True)
class Subject:
    """Something that launches kernels on torch's current stream. Make one with :func:`subject`.

    Args:
        fn: the callable. It is captured once, so it must not synchronize; other streams must be joined.
        make_inputs: gives its arguments: a tensor, a tuple, or a dict by name. It is called several times, with torch's
            generators seeded; tensors must have the same layout each time, and other values.
        independent: inputs that may be read before the wait, because no kernel that can be in flight writes them.
        code: gives objects that hold its kernels' machine code, where no loaded library does; see
            :class:`pdl_stress.Op`.
    """

    name: str
    fn: Callable[..., Any]
    make_inputs: Callable[[], Any]
    independent: tuple[str, ...] = ()
    code: Callable[[], Iterable[Any]] | None = None
    known: frozenset[str] = frozenset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def declared(self, buffer: str) -> str:
        """What is declared of a buffer: ``independent``, ``dependent``, or nothing."""
        if any(buffer == name or buffer.startswith((f"{name}.", f"{name}[")) for name in self.independent):
            return "independent"
        return "dependent" if buffer in self.known else ""


@dataclass(frozen=True)
class CheckPlan:
    """How a check is run. Raises UsageError for numbers that make no sense.

    Args:
        replays: graded replays of each arm; below 1000 no PASS is possible.
        control_replays: replays of each control.
        delays_us: windows, ascending, microseconds.
        time_limit: seconds without progress after which the GPU counts as hung.
    """

    replays: int = REPLAYS
    control_replays: int = CONTROL_REPLAYS
    delays_us: tuple[float, ...] = DELAYS_US
    seed: int = 0
    time_limit: float = TIME_LIMIT_S

    def __post_init__(self) -> None:
        for name in ("replays", "control_replays"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is {value!r}; expected a whole number of at least 1.")
        delays = self.delays_us
        if not delays or any(not 0 < d <= 100_000 for d in delays) or list(delays) != sorted(delays):
            raise UsageError(f"delays_us is {delays!r}; expected microseconds above 0, ascending.")
        if not self.time_limit > 0:
            raise UsageError(f"time_limit is {self.time_limit!r}; expected seconds above 0.")


def subject(
    make_inputs: Callable[[], Any],
    *,
    name: str | None = None,
    independent: Iterable[str] = (),
    code: Callable[[], Iterable[Any]] | None = None,
) -> Callable[[Callable[..., Any]], Subject]:
    """Declares a callable to be checked; see the module's example, and :class:`Subject` for the arguments."""

    def declare(fn: Callable[..., Any]) -> Subject:
        return as_subject(fn, make_inputs, name=name, independent=independent, code=code)

    return declare


def as_subject(
    fn: Any,
    make_inputs: Callable[[], Any] | None = None,
    *,
    name: str | None = None,
    independent: Iterable[str] = (),
    code: Callable[[], Iterable[Any]] | None = None,
) -> Subject:
    """A subject of a callable, of an :class:`~pdl_stress.Op` (whose contract is then the declared one), or itself.

    Raises:
        UsageError: nothing that can be called, or no way to make its inputs.
    """
    if isinstance(fn, Subject):
        return fn
    if isinstance(independent, str):
        raise UsageError(f"independent is {independent!r}; expected a tuple of names, for example ({independent!r},).")
    if make_inputs is None or not callable(make_inputs):
        raise UsageError(f"make_inputs is {make_inputs!r}; expected a function that gives the callable's arguments.")
    known: frozenset[str] = frozenset()
    if isinstance(fn, Op):
        op, known = fn, frozenset(fn.contract.operands)
        name, code = name or op.name, code or op.code
        independent = tuple(independent) or op.contract.independent

        def call(**operands: Any) -> Any:
            return op.run(**operands, pdl=True)

        fn = call
    if not callable(fn):
        raise UsageError(f"{fn!r} cannot be called; give a function that launches kernels.")
    label = name or str(getattr(fn, "__name__", type(fn).__name__))
    return Subject(label, fn, make_inputs, tuple(independent), code, known)
