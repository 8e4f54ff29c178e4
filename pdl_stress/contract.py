"""The PDL contract of one kernel: what it may touch before its wait, who waits, where its trigger sits.

The words are those of the PTX ISA (``griddepcontrol``): the *wait* is ``griddepcontrol.wait``, the *trigger* is
``griddepcontrol.launch_dependents``. Rule numbers (R1 to R10) are explained in ``docs/rules.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from .errors import UsageError


class Wait(StrEnum):
    """Which threads of the kernel execute the wait, and how its dependent accesses are ordered behind it (R1, R6)."""

    ALL = "all"
    """Every thread waits before its first dependent access."""
    LOADERS = "loaders"
    """Every thread that issues a dependent load waits; the others are ordered behind them by a barrier or mbarrier."""
    BARRIER = "barrier"
    """One warp waits; the others pass a barrier behind it before they touch dependent operands."""
    ONE_WARP = "one_warp"
    """One warp waits; others touch dependent operands without waiting and with no barrier between (fault F04)."""
    BRANCH = "branch"
    """The wait is under a condition, and the kernel runs on the path that skips it (fault F05)."""
    LATE = "late"
    """The kernel waits, but only after it has read its dependent operands (fault F01)."""
    NEVER = "never"
    """No thread waits (fault F02)."""

    @property
    def orders_dependents(self) -> bool:
        """True if every dependent access happens after the wait has returned."""
        return self in (Wait.ALL, Wait.LOADERS, Wait.BARRIER)

    @property
    def holds_completion(self) -> bool:
        """True if no CTA can exit before some thread of it has waited.

        Then the grid completes after its prerequisites, and whoever waits for it has waited for them too (R8 is not
        needed).
        """
        return self not in (Wait.BRANCH, Wait.NEVER)


class Trigger(StrEnum):
    """Where the kernel lets its dependents be scheduled (R3, R4). One thread's trigger counts for its CTA."""

    NONE = "none"
    """No trigger: dependents are released when the CTAs exit (R5)."""
    ENTRY = "entry"
    AFTER_WAIT = "after_wait"
    BEFORE_STORES = "before_stores"
    AFTER_STORES = "after_stores"


@dataclass(frozen=True)
class KernelContract:
    """What one kernel promises about its memory and its place in a PDL chain.

    Args:
        reads: names of the operands it reads from global memory.
        writes: names of the operands it writes. An operand in both is updated in place.
        independent: those of them that may be touched *before* the wait, because no kernel that can still be in flight
            writes (or, for a written operand, reads) them. Everything else is dependent.
        wait: which threads wait.
        trigger: where the trigger sits.
        fence: whether a release fence stands directly before the trigger, so that earlier stores are visible to the
            dependent grid from its start (R3).

    Raises:
        UsageError: an independent operand that is neither read nor written, a kernel that touches nothing, or a word
            that is no wait or trigger.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    independent: tuple[str, ...] = ()
    wait: Wait = Wait.ALL
    trigger: Trigger = Trigger.AFTER_STORES
    fence: bool = False

    def __post_init__(self) -> None:
        for field in ("reads", "writes", "independent"):
            value = getattr(self, field)
            if not isinstance(value, (tuple, list)) or not all(isinstance(name, str) for name in value):
                raise UsageError(
                    f"contract: `{field}` is {value!r}; expected a tuple of operand names, for example ('input',)."
                )
            object.__setattr__(self, field, tuple(value))
        for field, words in (("wait", Wait), ("trigger", Trigger)):
            value = getattr(self, field)
            if value not in list(words):
                raise UsageError(f"contract: `{field}` is {value!r}; expected one of {', '.join(words)}.")
            object.__setattr__(self, field, words(value))
        if not self.operands:
            raise UsageError("contract: it names no operand; list what the kernel reads and writes.")
        unknown = [name for name in self.independent if name not in self.operands]
        if unknown:
            raise UsageError(
                f"contract: independent operands {unknown} are neither read nor written; "
                f"the operands are {list(self.operands)}."
            )

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of all operands, reads first, each once."""
        return tuple(dict.fromkeys((*self.reads, *self.writes)))

    def is_independent(self, operand: str) -> bool:
        """True if the contract lets the kernel touch ``operand`` before its wait."""
        return operand in self.independent

    def but(self, **changes: Any) -> KernelContract:
        """This contract with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        independent = f", independent: {', '.join(self.independent)}" if self.independent else ""
        fence = " behind a fence" if self.fence else ""
        return f"waits: {self.wait}, triggers: {self.trigger}{fence}{independent}"
