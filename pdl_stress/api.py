"""The Python face: one call, one verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .campaign import run_on_gpu, run_on_model
from .chain import Chain
from .errors import DeviceError, UsageError
from .faults import DELAYS_US, check_controls
from .outcome import Outcome
from .plan import REPLAYS, TIME_LIMIT_S, Plan
from .report import render
from .results import CaseResult


@dataclass(frozen=True)
class Verdict:
    """What :func:`stress` found. ``print(verdict)`` shows tables."""

    case: CaseResult

    @property
    def outcome(self) -> Outcome:
        return self.case.verdict

    def __str__(self) -> str:
        return render(self.case)


MACHINES = ("auto", "cuda", "model")


def check_machine(wanted: str) -> None:
    """Raises UsageError for a word that is no machine; looks at no device."""
    if wanted not in MACHINES:
        raise UsageError(f"unknown machine {wanted!r}; expected {', '.join(MACHINES[:-1])} or {MACHINES[-1]}.")


def choose_machine(wanted: str) -> str:
    """``auto``, ``cuda`` or ``model`` to ``cuda`` or ``model``.

    ``auto`` takes the model only if no NVIDIA device is present.

    Raises:
        UsageError: another word.
        DeviceError: ``cuda`` without a device, or a device that cannot be used.
    """
    check_machine(wanted)
    if wanted == "model":
        return "model"
    from .cuda.device import Presence, presence

    sighting = presence()
    if sighting.presence is Presence.USABLE:
        return "cuda"
    if sighting.presence is Presence.NONE and wanted == "auto":
        return "model"
    raise DeviceError(f"the GPU cannot be used: {sighting.reason}. `pdl-stress doctor` shows details.")


def stress(
    chain: Chain | Callable[[], Chain],
    *,
    machine: str = "auto",
    replays: int = REPLAYS,
    seed: int = 0,
    rules: str = "documented",
    controls: tuple[str, ...] | None = None,
    delays_us: tuple[float, ...] = DELAYS_US,
    time_limit: float = TIME_LIMIT_S,
) -> Verdict:
    """Stresses one chain, in this process if it is a :class:`Chain`.

    Give a module-level function that builds the chain, and all of it runs in a child process that a crash or a hang of
    a kernel cannot outlive.

    Args:
        machine: ``auto``, ``cuda`` or ``model``, as :func:`choose_machine`.
        replays: graded replays of each clean arm.
        rules: rule set of the model.
        controls: ids of faults; ``None``: all. Without controls no PASS is possible.
        delays_us: windows between trigger and stores, microseconds.
        time_limit: seconds without progress after which a run of one captured graph counts as hung.

    Raises:
        UsageError, DeviceError: before anything ran. Failures of a job are part of the verdict (ERROR).
    """
    # Types are checked here too: what a user passes has no type checker before it.
    plan = Plan(
        replays=replays,
        seed=seed,
        rules=rules,  # type: ignore[arg-type]  # a name becomes its rule set
        faults=controls,
        delays_us=delays_us,
        time_limit=time_limit,
    )
    if isinstance(chain, type) or not (isinstance(chain, Chain) or callable(chain)):
        raise UsageError(f"{chain!r} is no Chain; give one, or a function that builds one.")
    built = chain if isinstance(chain, Chain) else chain()
    if not isinstance(built, Chain):
        raise UsageError(f"{chain!r} gave {built!r}, which is no Chain.")
    built.check()
    check_controls([built], plan.faults)
    if choose_machine(machine) == "model":
        return Verdict(run_on_model([built], plan)[0])
    if isinstance(chain, Chain):
        from .cuda.executor import Executor

        executor = Executor(lambda name: built, seed=plan.seed, time_limit=plan.time_limit)
        return Verdict(run_on_gpu([built], plan, executor)[0])
    from .cuda.worker import Worker

    with Worker(_Loader(chain), seed=plan.seed, time_limit=plan.time_limit) as worker:
        return Verdict(run_on_gpu([built], plan, worker)[0])


@dataclass(frozen=True)
class _Loader:
    """Gives a child process its chain, whatever name it asks for."""

    build: Callable[[], Chain]

    def __call__(self, name: str) -> Chain:
        return self.build()
