"""Ops from the schema of a torch operator: what it reads, mutates and returns is declared there already."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .contract import Trigger, Wait
from .errors import UsageError
from .op import Op, op


def op_from_schema(
    operator: Any,
    *,
    independent: Iterable[str] = (),
    updated: Iterable[str] = (),
    pdl_argument: str | None = None,
    wait: Wait = Wait.ALL,
    trigger: Trigger = Trigger.AFTER_STORES,
    code: Callable[[], Iterable[Any]] | None = None,
) -> Op:
    """The op of a torch operator: ``torch.ops.mine.norm``, one of its overloads, or a ``torch.library.custom_op``.

    Reads are its tensor arguments; writes are those that the schema marks as mutated (``Tensor(a!)``), and its returned
    tensors, as ``out`` (or ``out0``, ``out1``, ...).

    Args:
        independent: operands that it may touch before its wait.
        updated: mutated arguments that it also reads.
        pdl_argument: the ``bool`` argument that switches the PDL attribute on, if there is one.
        wait, trigger, code: as in :func:`pdl_stress.op`.

    Raises:
        UsageError: no torch operator, several overloads, or names that it has not.
    """
    overload = _overload(operator)
    schema = overload._schema
    tensors = [a for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
    mutated = [a.name for a in tensors if a.alias_info is not None and a.alias_info.is_write]
    names = [a.name for a in schema.arguments]
    updated = tuple(updated)
    if unknown := [name for name in updated if name not in mutated]:
        raise UsageError(f"{schema.name}: {unknown} are not mutated; the schema mutates {mutated or 'nothing'}.")
    if pdl_argument is not None and pdl_argument not in names:
        raise UsageError(f"{schema.name} has no argument {pdl_argument!r}; it has {', '.join(names)}.")
    fresh = [r for r in schema.returns if str(r.type) == "Tensor" and r.alias_info is None]
    returned = [f"out{number}" if len(fresh) > 1 else "out" for number in range(len(fresh))]
    if taken := set(returned) & set(names):
        raise UsageError(f"{schema.name}: {', '.join(sorted(taken))} is an argument and the name of a result.")

    def run(*, pdl: bool, **operands: Any) -> Any:
        if pdl_argument is not None:
            operands[pdl_argument] = pdl
        return overload(**operands)

    return op(
        reads=tuple(a.name for a in tensors if a.name not in mutated or a.name in updated),
        writes=(*mutated, *returned),
        independent=independent, wait=wait, trigger=trigger, name=schema.name, returns=returned, code=code,
    )(run)  # fmt: skip


def _overload(operator: Any) -> Any:
    """The one overload of an operator. Raises UsageError."""
    operator = getattr(operator, "_opoverload", operator)  # of torch.library.custom_op
    if not hasattr(operator, "_schema") and callable(getattr(operator, "overloads", None)):
        overloads = operator.overloads()
        if len(overloads) != 1:
            raise UsageError(
                f"{operator} has the overloads {', '.join(overloads)}; give one of them, as .{overloads[0]}."
            )
        operator = getattr(operator, overloads[0])
    if not hasattr(operator, "_schema"):
        raise UsageError(f"{operator!r} is no torch operator; expected torch.ops.<library>.<name>.")
    return operator
