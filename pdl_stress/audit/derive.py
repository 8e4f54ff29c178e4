"""The contract of the machine code: what a kernel touches early, who waits, where it triggers."""

from __future__ import annotations

from pdl_stress.audit.declared import Declared
from pdl_stress.audit.kernel import Kernel, Touch, When
from pdl_stress.audit.opcodes import Access
from pdl_stress.audit.states import Cause, Status
from pdl_stress.contract import KernelContract, Trigger, Wait


def derive(kernel: Kernel) -> Declared | None:
    """The contract of a kernel, its operands by number (`p0`); None where it touches no parameter's memory.

    What it touches before the wait becomes independent, whatever was meant: read it before you keep it.
    """
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    early: dict[str, None] = {}
    for touch in kernel.touches:
        for name in _operands(touch):
            if touch.access is not Access.WRITE:
                reads[name] = None
            if touch.access is not Access.READ:
                writes[name] = None
            if touch.when is not When.AFTER:
                early[name] = None
    if not reads and not writes:
        return None
    found = trigger_of(kernel)
    contract = KernelContract(
        tuple(reads),
        tuple(writes),
        tuple(early) if kernel.waits else (),
        wait_of(kernel),
        found or Trigger.NONE,
        bool(kernel.triggers) and all(mark.fenced for mark in kernel.triggers),
    )
    used = {origin.ordinal for touch in kernel.touches for origin in touch.origins if origin.ordinal >= 0}
    return Declared(contract, {ordinal: f"p{ordinal}" for ordinal in sorted(used)})


def _operands(touch: Touch) -> list[str]:
    return [f"p{origin.ordinal}" for origin in touch.origins if origin.kind in ("parameter", "loaded")]


def wait_of(kernel: Kernel) -> Wait:
    """Who waits, as far as it can be told: LOADERS also where some touch operands before any wait."""
    if not kernel.waits:
        return Wait.NEVER
    at_exit = {state.status for mark in kernel.exits for state in mark.states}
    causes = {state.cause for mark in kernel.exits for state in mark.states if not state.status.ordered}
    if Cause.PATH in causes and any(Cause.PATH in touch.causes for touch in kernel.touches):
        return Wait.BRANCH
    if at_exit <= {Status.WAITED}:
        return Wait.ALL
    if all(touch.when is When.AFTER for touch in kernel.touches):
        return Wait.BARRIER
    return Wait.LOADERS


def trigger_of(kernel: Kernel) -> Trigger | None:
    """Where the trigger sits; None where it cannot be told."""
    if not kernel.triggers:
        return Trigger.NONE
    stores = [touch for touch in kernel.touches if touch.access is not Access.READ]
    if stores and not any(touch.after_trigger for touch in stores):
        return Trigger.AFTER_STORES
    states = [state for mark in kernel.triggers for state in mark.states]
    if not stores or not states:
        return None
    if any(state.status is Status.NOT for state in states):
        return Trigger.ENTRY if kernel.waits else None
    return Trigger.AFTER_WAIT if _directly_behind_wait(kernel) else Trigger.BEFORE_STORES


def _directly_behind_wait(kernel: Kernel) -> bool:
    """Whether nothing but the wait's own block lies between the wait and the trigger."""
    waits = {mark.block for mark in kernel.waits}
    return all(mark.block in waits for mark in kernel.triggers)
