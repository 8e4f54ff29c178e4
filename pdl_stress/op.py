"""An operation of a chain: a callable that launches kernels, together with its contract.

A third party writes::

    @op(reads=("input", "weight"), writes=("out",), independent=("weight",))
    def my_norm(input, weight, out, *, pdl):
        my_library.norm(input, weight, out, enable_pdl=pdl)

and may use ``my_norm`` in a chain. An op that can also be *rebuilt* with another PDL behaviour (our native kernels,
compiled at run time) says which waits it supports; from those the controls are made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .contract import KernelContract, Trigger, Wait
from .errors import UnsupportedVariant, UsageError

Shapes = Mapping[str, tuple[int, ...]]


Run = Callable[..., object]
"""Launches the kernels of an op on torch's current stream.

``operands`` are torch tensors under the names of the contract. ``pdl`` sets the PDL attribute. Ops that can be
rebuilt also receive ``contract`` (the behaviour to launch), ``delay_ns`` (nanoseconds that the storing threads pass
between trigger and stores; ``None`` for a kernel without the delay point) and ``stamps`` (a CUDA int64 tensor of
four time stamps, see :data:`STAMP_FIELDS`, or ``None``).
"""


STAMP_FIELDS = ("first_start", "first_read", "last_store", "last_end")
"""What a stamped kernel leaves behind, in nanoseconds of ``%globaltimer``: two minima and two maxima over its CTAs."""


@dataclass(frozen=True)
class Op:
    """An operation with its contract. Make one with :func:`op`.

    Args:
        name: what reports call it.
        contract: the contract of the behaviour that this object launches.
        run: see :data:`Run`.
        deployed: the contract of the op as it is shipped; differs from ``contract`` in a rebuilt op.
        waits: the waits the op can be rebuilt with. Empty: it is what it is.
        ctas: number of CTAs for given operand shapes; the model only asks whether it is one or several.
        kernels: names of the kernels that a launch runs, for reports.
        verify: ``verify(contract, arch, delayed)`` checks that the machine code of this behaviour, with or without the
            delay point, holds what the contract says; returns one line of evidence, raises if it does not.
        returns: written operands that ``run`` returns as new tensors (one, or a tuple in this order) instead of taking
            them. In a captured graph the kernel's pointer to such a tensor is replaced by one to the chain's buffer.
        code: gives objects that hold the machine code of its kernels, where no library that the process has loaded
            does: bytes of a cubin, a path, a ``cuda.core`` ObjectCode, a compiled Triton kernel. Called once, after the
            op has run.
    """

    name: str
    contract: KernelContract
    run: Run
    deployed: KernelContract
    waits: frozenset[Wait] = frozenset()
    ctas: Callable[[Shapes], int] = field(default=lambda shapes: 2)
    kernels: tuple[str, ...] = ()
    verify: Callable[[KernelContract, str, bool], str] | None = None
    returns: tuple[str, ...] = ()
    code: Callable[[], Iterable[Any]] | None = None

    @property
    def rebuildable(self) -> bool:
        """True if arms and controls can move its trigger, delay it and change who waits."""
        return bool(self.waits)

    def rebuilt(self, **changes: Any) -> Op:
        """The same op with another PDL behaviour.

        Raises:
            UnsupportedVariant: the op cannot be rebuilt, or not that way.
        """
        contract = self.contract.but(**changes)
        if contract.wait is Wait.NEVER and contract.trigger is Trigger.AFTER_WAIT:
            contract = contract.but(trigger=Trigger.ENTRY)  # without the wait, nothing is before the trigger
        if contract == self.contract:
            return self
        if not self.rebuildable:
            raise UnsupportedVariant(
                f"{self.name} cannot be rebuilt (wanted: {contract}). "
                "Only ops that are compiled at run time take another PDL behaviour."
            )
        if contract.wait not in self.waits:
            raise UnsupportedVariant(
                f"{self.name} cannot wait as {contract.wait!r}; it supports {sorted(map(str, self.waits))}."
            )
        return replace(self, contract=contract)


def op(
    *,
    reads: Iterable[str] = (),
    writes: Iterable[str] = (),
    independent: Iterable[str] = (),
    wait: Wait = Wait.ALL,
    trigger: Trigger = Trigger.AFTER_STORES,
    fence: bool = False,
    name: str | None = None,
    kernels: Iterable[str] = (),
    returns: Iterable[str] = (),
    code: Callable[[], Iterable[Any]] | None = None,
) -> Callable[[Run], Op]:
    """Declares the contract of a callable that launches kernels; see the module's example.

    Args as in :class:`~pdl_stress.contract.KernelContract` and :class:`Op`. The callable is called with its operands by
    name (but those it ``returns``) and ``pdl`` (bool).
    """
    contract = KernelContract(_listed(reads), _listed(writes), _listed(independent), wait, trigger, fence)
    returned = _listed(returns)
    if unknown := [operand for operand in returned if operand not in contract.writes or operand in contract.reads]:
        raise UsageError(f"op: it returns {unknown}; expected operands that it writes and does not read.")

    def declare(run: Run) -> Op:
        label = name or str(getattr(run, "__name__", "op"))
        _check_signature(label, run, tuple(o for o in contract.operands if o not in returned))
        return Op(label, contract, run, contract, kernels=tuple(kernels) or (label,), returns=returned, code=code)

    return declare


def _check_signature(label: str, run: Run, operands: tuple[str, ...]) -> None:
    """A callable that does not take the operands by name could never be launched: say so here, not on a GPU."""
    if not callable(run):
        raise UsageError(f"op {label!r}: {run!r} cannot be called.")
    try:
        signature = inspect.signature(run)
    except (TypeError, ValueError):  # some built-in callables have none
        return
    refused = []
    for operand in (*operands, "pdl"):
        try:
            signature.bind_partial(**{operand: None})
        except TypeError:
            refused.append(operand)
    if refused:
        raise UsageError(
            f"op {label!r}: the callable takes no argument {', '.join(map(repr, refused))}; "
            "it is called with the operands of its contract by name, and `pdl`."
        )


def _listed(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):  # tuple("out") would be three operands
        raise UsageError(f"contract: operands {names!r}; expected a tuple of names, for example ({names!r},).")
    return tuple(names)
