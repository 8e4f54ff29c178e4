"""What a register holds, as an expression over thread indices, parameters and constants; and where a pointer is from.

Expressions are made once each (`Expressions`), so two are equal if they are the same object. *Stable* ones have one
value for the whole life of a thread; only on these may a fact be carried from one branch to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

DEPTH = 10  # of an expression; a deeper one becomes a name for the place where it was computed


class Scope(StrEnum):
    """For which threads of a CTA an expression has the same value."""

    CONSTANT = "constant"
    CTA = "cta"
    """The same in every thread of the CTA: parameters, CTA index."""
    THREAD = "thread"
    """A function of the thread's index in its CTA and of constants alone: it tells warps and threads apart."""
    UNKNOWN = "unknown"
    """Anything else: a mixture, or loaded from memory."""


def joined(scopes: list[Scope]) -> Scope:
    """The scope of a function of things with these scopes."""
    kinds = set(scopes) - {Scope.CONSTANT}
    if not kinds:
        return Scope.CONSTANT
    return kinds.pop() if len(kinds) == 1 else Scope.UNKNOWN


@dataclass(frozen=True, eq=False, slots=True)
class Expression:
    """op: its kind, such as `add` or `thread`. args: expressions, numbers or names."""

    op: str
    args: tuple[object, ...]
    scope: Scope
    stable: bool
    depth: int

    @property
    def number(self) -> int | None:
        """Its value where it is a constant."""
        return self.args[0] if self.op == "number" and isinstance(self.args[0], int) else None

    def parts(self) -> list[Expression]:
        return [arg for arg in self.args if isinstance(arg, Expression)]

    def __str__(self) -> str:
        if self.op in ("number", "name", "thread"):
            return str(self.args[0])
        if self.op == "cell":
            return f"c[{self.args[0]:#x}][{self.args[1]:#x}]"
        return f"{self.op}({', '.join(map(str, self.args))})"


@dataclass
class Expressions:
    """Makes expressions, each once."""

    _made: dict[tuple[object, ...], Expression] = field(default_factory=dict)

    def make(self, op: str, *args: object, scope: Scope | None = None, stable: bool | None = None) -> Expression:
        """The expression; its scope and stability follow from its parts where they are not given."""
        key = (op, *(id(arg) if isinstance(arg, Expression) else arg for arg in args))
        found = self._made.get(key)
        if found is None:
            parts = [arg for arg in args if isinstance(arg, Expression)]
            found = self._made[key] = Expression(
                op,
                args,
                joined([part.scope for part in parts]) if scope is None else scope,
                all(part.stable for part in parts) if stable is None else stable,
                1 + max((part.depth for part in parts), default=0),
            )
        return found

    def number(self, value: int) -> Expression:
        return self.make("number", value & 0xFFFFFFFF, scope=Scope.CONSTANT, stable=True)

    def add(self, *terms: Expression) -> Expression:
        """A sum; numbers are added up, and stand last."""
        constant, rest = 0, []
        for term in terms:
            if term.number is not None:
                constant += term.number
            elif term.op == "add" and isinstance(last := term.args[-1], Expression) and last.number is not None:
                constant += last.number
                rest += term.parts()[:-1]
            elif term.op == "add":
                rest += term.parts()
            else:
                rest.append(term)
        constant &= 0xFFFFFFFF
        if not rest:
            return self.number(constant)
        if constant:
            rest.append(self.number(constant))
        return rest[0] if len(rest) == 1 else self.make("add", *rest)

    def negated(self, term: Expression) -> Expression:
        return self.number(-term.number) if term.number is not None else self.make("neg", term)

    def shifted(self, op: str, term: Expression, by: int) -> Expression:
        """op: `shl` or `shr` (unsigned)."""
        if by == 0:
            return term
        if term.number is not None:
            return self.number(term.number << by if op == "shl" else term.number >> by)
        return self.make(op, term, by)

    def product(self, a: Expression, b: Expression) -> Expression:
        if a.number is not None:
            a, b = b, a
        if b.number is None:
            return self.make("mul", a, b)
        if a.number is not None or b.number == 0:
            return self.number((a.number or 0) * b.number)
        if b.number == 1:
            return a
        power = b.number.bit_length() - 1
        return self.shifted("shl", a, power) if b.number == 1 << power else self.make("mul", a, b)

    def masked(self, a: Expression, b: Expression) -> Expression:
        """Bitwise and."""
        if a.number is not None:
            a, b = b, a
        if a.number is not None and b.number is not None:
            return self.number(a.number & b.number)
        return self.make("and", a, b)


def compute(expression: Expression, parts: list[int]) -> int | None:
    """The number that an expression is if its parts are these numbers; None where that is not known."""
    op, by = expression.op, expression.args[-1]
    found: int | None = None
    if op == "add":
        found = sum(parts)
    elif op == "neg":
        found = -parts[0]
    elif op == "mul":
        found = parts[0] * parts[1]
    elif op == "and":
        found = parts[0] & parts[1]
    elif op == "shl" and isinstance(by, int):
        found = parts[0] << by
    elif op == "shr" and isinstance(by, int):
        found = parts[0] >> by
    elif op.startswith("lop3.") and len(parts) == 3:
        table, (a, b, c) = int(op.removeprefix("lop3."), 16), parts
        rows = (
            ((a if r & 4 else ~a) & (b if r & 2 else ~b) & (c if r & 1 else ~c)) for r in range(8) if table >> r & 1
        )
        found = 0
        for row in rows:
            found |= row
    return None if found is None else found & 0xFFFFFFFF


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Where a pointer is from. kind: `parameter` (its number and the byte within it), `space` (the address of the
    parameters themselves), `loaded` (read from memory that the parameter points to), `symbol` (a device variable),
    `constant` (constant memory), `shared`, `stack`, `unknown`."""

    kind: str
    ordinal: int = -1
    offset: int = 0


UNKNOWN = Origin("unknown")
NOWHERE: frozenset[Origin] = frozenset()


@dataclass(frozen=True, slots=True)
class Value:
    """A register's content. origins: of what it may point to. choice: it was written under a guard: the guard's
    condition, the value where it holds, and the one where it does not."""

    expression: Expression
    origins: frozenset[Origin] = NOWHERE
    choice: tuple[Expression, Value, Value] | None = None
