"""The fault catalogue: named ways to break the order of a chain, and the controls made from them.

A *control* is the chain under test with one fault planted on one data edge, together with the perturbation that could
show it: the writer triggers at entry, *delays*, then writes. What a control must show is not written here: the model
decides it from the rules (:func:`pdl_stress.model.expect`), before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import model
from .buffers import Role
from .chain import LATE_WEIGHT, Chain, DataEdge, Patch, source_step
from .contract import Trigger, Wait
from .errors import UnsupportedVariant, UsageError

DELAYS_US = (0.0, 2.0, 10.0)
"""Windows between trigger and stores of a default run, in microseconds. 0 shows the blind spot of plain stress."""

ALL_DELAYS_US = (0.0, 1.0, 2.0, 10.0, 100.0)
"""The windows of the published tables."""

MUST_CATCH_US = 10.0
"""From this window on a control that every rule set lets go wrong *must* be caught.

A launch from a programmatic edge takes about a microsecond; ten leave room for it on any clock. Narrower windows are
counted for the power curve, but promise nothing."""

LATE_ROWS = 16

RELOADED = "loaded again, waits kept (twin)"
"""Variant of the control that takes a kernel's own machine code out of its library, loads it again and puts it into
the graph unchanged: must be clean, or the code with its waits removed proves nothing (a second module has fresh
globals)."""


@dataclass(frozen=True)
class Control:
    """A chain with a fault planted on ``edge``. Plain data: it travels to the process that runs it.

    Args:
        changes: per step, what is changed (see :meth:`Chain.varied`).
        late_rows: F28 only: a source step before the reader writes this many leading rows of the edge's buffer.
    """

    fault: str
    variant: str
    edge: DataEdge
    delay_us: float
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    late_rows: int = 0

    @property
    def name(self) -> str:
        return f"{self.fault} {self.variant} @ {self.edge.writer}->{self.edge.reader}, {self.delay_us:g} us"

    def patch(self, chain: Chain) -> Patch | None:
        """What is done to the reader's machine code on ``chain`` (unchanged), if anything.

        Raises:
            UnsupportedVariant: as :meth:`apply`.
        """
        return self.apply(chain)[self.edge.reader].patch

    def apply(self, chain: Chain) -> Chain:
        """The chain with the fault in it.

        Raises:
            UnsupportedVariant: an op of the chain cannot be rebuilt that way.
        """
        if not self.late_rows:
            return chain.varied(self.changes)
        operand = chain[self.edge.reader].operands[self.edge.operand]
        first = operand.box[0][0]
        rows = operand.buffer[first : first + self.late_rows]
        late = source_step(LATE_WEIGHT, {"rows": rows}).varied(
            {**self.changes.get(LATE_WEIGHT, {}), "delay_us": self.delay_us}
        )
        changes = {name: fields for name, fields in self.changes.items() if name != LATE_WEIGHT}
        return chain.varied(changes, insert=(self.edge.reader, late))

    def expectation(self, chain: Chain) -> model.Expectation:
        """What the control must show on ``chain`` (unchanged), from the rules; see :data:`MUST_CATCH_US`."""
        return self._in_its_window(self._by_the_rules(chain))

    def _by_the_rules(self, chain: Chain) -> model.Expectation:
        patch = self.patch(chain)
        if patch is not None and patch.remove:  # the model knows contracts, not single waits
            return model.Expectation(
                "unpromised", "one wait of several was removed; the others may still order the read"
            )
        return model.expect(self.apply(chain), self.edge)

    def _in_its_window(self, expectation: model.Expectation) -> model.Expectation:
        if expectation.expected == "caught" and self.delay_us < MUST_CATCH_US:
            reason = f"a window of {self.delay_us:g} us is below {MUST_CATCH_US:g} us: counted for the power curve"
            return model.Expectation("unpromised", reason)
        return expectation


Plan = Callable[[Chain, DataEdge, float], Iterator[Control]]


@dataclass(frozen=True)
class Fault:
    """One entry of the catalogue. ``plan`` yields its controls for a data edge and a delay, or none."""

    id: str
    title: str
    plan: Plan
    late_weights: bool = False
    """True if it attacks constant operands rather than data edges."""


def perturbation(edge: DataEdge, delay_us: float, *, between: bool = True) -> dict[str, dict[str, Any]]:
    """The writer triggers at entry, delays, then writes; steps between it and the reader trigger at entry too."""
    changes: dict[str, dict[str, Any]] = {edge.writer: {"trigger": Trigger.ENTRY, "delay_us": delay_us}}
    if between:
        changes.update({name: {"trigger": Trigger.ENTRY} for name in edge.between})
    return changes


def _waits(wait: Wait, variant: str, *, between: bool = True) -> Plan:
    def plan(chain: Chain, edge: DataEdge, delay_us: float) -> Iterator[Control]:
        fault = variant.split(":")[0]
        changes = perturbation(edge, delay_us, between=between)
        changes[edge.reader] = {**changes.get(edge.reader, {}), "wait": wait}
        yield Control(fault, variant.split(":")[1], edge, delay_us, changes)

    return plan


def _founding(chain: Chain, edge: DataEdge, delay_us: float) -> Iterator[Control]:
    """F00: the writer triggers in each of five places; the reader waits, or does not."""
    for trigger in Trigger:
        for waits in (True, False):
            changes = perturbation(edge, delay_us)
            changes[edge.writer]["trigger"] = trigger
            if not waits:
                changes[edge.reader] = {"wait": Wait.NEVER}
            variant = f"trigger {trigger}, consumer {'waits' if waits else 'does not wait'}"
            yield Control("F00", variant, edge, delay_us, changes)


def reloaded(control: Control) -> Control:
    """The twin of a control that patches its reader: see :data:`RELOADED`."""
    edge = control.edge
    changes = {**perturbation(edge, control.delay_us), edge.reader: {"patch": Patch(())}}
    return Control(control.fault, RELOADED, edge, control.delay_us, changes)


def one_wait_removed(edge: DataEdge, delay_us: float, site: int) -> Control:
    """F02 at one of several wait sites of a kernel that cannot be rebuilt. How many there are is known from its machine
    code only, so these are planned after the census."""
    changes = perturbation(edge, delay_us)
    changes[edge.reader] = {"patch": Patch((site,))}
    return Control("F02", f"wait {site} removed", edge, delay_us, changes)


def _partial_wait(chain: Chain, edge: DataEdge, delay_us: float) -> Iterator[Control]:
    yield from _waits(Wait.ONE_WARP, "F04:one warp waits")(chain, edge, delay_us)
    yield from _waits(Wait.BARRIER, "F04:one warp waits, barrier behind it (twin)")(chain, edge, delay_us)


def _two_kernels_old(chain: Chain, edge: DataEdge, delay_us: float) -> Iterator[Control]:
    """F07: the reader skips its wait because the data is two kernels old."""
    if not edge.between:
        return
    yield from _waits(Wait.NEVER, "F07:step between triggers at entry")(chain, edge, delay_us)
    for fence in (True, False):
        changes = perturbation(edge, delay_us, between=False)
        for name in edge.between:
            changes[name] = {"trigger": Trigger.AFTER_WAIT, "fence": fence}
        changes[edge.reader] = {"wait": Wait.NEVER}
        text = "wait, fence, trigger (twin)" if fence else "wait, trigger"
        yield Control("F07", f"step between: {text}", edge, delay_us, changes)


def _late_weights(chain: Chain, edge: DataEdge, delay_us: float) -> Iterator[Control]:
    """F28: rows of an operand declared independent are written by the kernel directly before."""
    yield Control("F28", "independent operand written late", edge, delay_us, {}, LATE_ROWS)
    early = {LATE_WEIGHT: {"trigger": Trigger.AFTER_STORES, "fence": True}}
    yield Control("F28", "written, fence, trigger (twin)", edge, delay_us, early, LATE_ROWS)
    step = chain[edge.reader]
    kept = tuple(name for name in step.contract.independent if name != edge.operand)
    changes = {edge.reader: {"independent": kept}}
    yield Control("F28", "operand read after the wait (twin)", edge, delay_us, changes, LATE_ROWS)


FAULTS: dict[str, Fault] = {
    fault.id: fault
    for fault in (
        Fault("F00", "early or late trigger x the consumer waits or not", _founding),
        Fault("F01", "reads before the wait", _waits(Wait.LATE, "F01:reads, then waits")),
        Fault("F02", "has the attribute, never waits", _waits(Wait.NEVER, "F02:never waits", between=False)),
        Fault("F04", "only some warps wait, no barrier behind them", _partial_wait),
        Fault("F05", "waits on some paths only", _waits(Wait.BRANCH, "F05:wait under a condition that is false")),
        Fault("F07", "skips its wait because the data is two kernels old", _two_kernels_old),
        Fault("F28", "an operand declared independent is written by the kernel before", _late_weights, True),
    )
}
"""The faults that ship, by id (the numbers are those of ``docs/faults.md``)."""


def attacked_edges(chain: Chain, fault: Fault) -> list[DataEdge]:
    """The data edges that ``fault`` can be planted on; for F28, one per independent constant operand."""
    if not fault.late_weights:
        return chain.data_edges
    edges = []
    for step in chain.steps:
        for name in step.contract.independent:
            view, buffer = step.operands[name], step.operands[name].buffer
            if buffer.role is Role.CONSTANT and name in step.contract.reads and view.shape[0] >= LATE_ROWS:
                edges.append(DataEdge(LATE_WEIGHT, step.name, buffer.name, name))
    return edges


def plan_controls(chain: Chain, ids: tuple[str, ...] | None, delays_us: tuple[float, ...]) -> list[Control]:
    """All controls of ``chain`` for the faults ``ids`` and delays, in catalogue order.

    Of ``ids`` each is a ``FAULT``, or ``FAULT@STEP`` for the edges that STEP reads; ``None``: every fault everywhere.

    Controls that an op of the chain cannot be rebuilt for are left out.

    Raises:
        UsageError: an unknown fault.
    """
    controls = []
    for fault in select_faults(ids):
        for edge in attacked_edges(chain, fault):
            if not is_wanted(ids, fault.id, edge):
                continue
            for delay_us in delays_us:
                for control in fault.plan(chain, edge, delay_us):
                    try:
                        control.apply(chain)
                    except UnsupportedVariant:
                        continue
                    controls.append(control)
    return controls + _twins(chain, controls)


def _twins(chain: Chain, controls: list[Control]) -> list[Control]:
    """For each data edge and window where machine code is patched, a control that patches nothing."""
    found: dict[tuple[DataEdge, float], Control] = {}
    for control in controls:
        if control.patch(chain) is not None:
            try:
                twin = reloaded(control)
                twin.apply(chain)
            except UnsupportedVariant:
                continue
            found.setdefault((control.edge, control.delay_us), twin)
    return list(found.values())


def expectations(chain: Chain, controls: list[Control]) -> list[tuple[Control, model.Expectation]]:
    """Each control with its expectation. The model knows no time, so controls that differ in the window share one."""
    known: dict[tuple[str, str, DataEdge], model.Expectation] = {}
    for control in controls:
        key = (control.fault, control.variant, control.edge)
        if key not in known:
            known[key] = control._by_the_rules(chain)
    return [(c, c._in_its_window(known[c.fault, c.variant, c.edge])) for c in controls]


def select_faults(ids: tuple[str, ...] | None) -> list[Fault]:
    """The faults of these ids, each ``FAULT`` or ``FAULT@STEP``, in catalogue order. UsageError for an unknown one."""
    if ids is None:
        return list(FAULTS.values())
    wanted = [name.partition("@")[0] for name in ids]
    unknown = [name for name in wanted if name not in FAULTS]
    if unknown:
        raise UsageError(f"unknown fault {unknown[0]!r}; the catalogue has {', '.join(FAULTS)}.")
    return [fault for fault in FAULTS.values() if fault.id in wanted]


def check_controls(chains: Iterable[Chain], ids: tuple[str, ...] | None) -> None:
    """Raises UsageError for a choice of controls with an unknown fault, or with a step that none of the chains has."""
    select_faults(ids)
    steps = list(dict.fromkeys(step.name for chain in chains for step in chain.steps))
    for text in ids or ():
        _, at, step = text.partition("@")
        if at and step not in steps:
            raise UsageError(f"control {text!r}: no chain of this run has a step {step!r}; there are {steps}.")


def is_wanted(ids: tuple[str, ...] | None, fault: str, edge: DataEdge) -> bool:
    """True if the choice ``ids`` names this fault everywhere, or at the step that reads ``edge``."""
    return ids is None or fault in ids or f"{fault}@{edge.reader}" in ids


def plant(chain: Chain, text: str, delay_us: float = MUST_CATCH_US) -> Control:
    """The control that ``FAULT@STEP`` names: STEP is the reader (the step whose order is broken).

    Of the fault's controls on that step the first is taken that every rule set lets go wrong.

    Raises:
        UsageError: malformed text, unknown fault or step, or a fault that does not apply there.
    """
    fault_id, at, step_name = text.partition("@")
    if not at or not fault_id or not step_name:
        raise UsageError(f"--plant {text!r}: expected FAULT@STEP, for example F02@q_norm.")
    (fault,) = select_faults((fault_id,))
    _ = chain[step_name]
    for edge in attacked_edges(chain, fault):
        if edge.reader == step_name and (control := _first_caught(chain, fault, edge, delay_us)):
            return control
    possible = sorted({e.reader for e in attacked_edges(chain, fault) if _first_caught(chain, fault, e, delay_us)})
    raise UsageError(
        f"--plant {text!r}: {fault_id} ({fault.title}) cannot be caught at {step_name!r} of {chain.name!r}; "
        f"steps where it can: {', '.join(possible) or 'none'}."
    )


def _first_caught(chain: Chain, fault: Fault, edge: DataEdge, delay_us: float) -> Control | None:
    """The fault's first control on the edge that must be caught; ``None`` if there is none, or an op cannot take it."""
    for control in fault.plan(chain, edge, delay_us):
        try:
            if control.expectation(chain).expected == "caught":
                return control
        except UnsupportedVariant:
            continue
    return None
