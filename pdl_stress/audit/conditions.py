"""Predicates as logic over comparisons, and what is known of a thread once it has taken a branch.

A *literal* is a comparison or a named predicate that holds or does not. `Facts` are literals that hold together:
ranges of expressions, values that they do not have, and truths. Only stable expressions make facts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from pdl_stress.audit.expressions import Expression, Expressions, Scope

MAX_CASES = 8  # conjunctions that one condition may be split into; beyond, nothing is concluded from it
_THREADS = 1023


@dataclass
class Conditions:
    """Builds conditions; equal ones are the same expression."""

    made: Expressions

    def literal(self, value: bool) -> Expression:
        return self.made.make("true" if value else "false", scope=Scope.CONSTANT, stable=True)

    def negated(self, test: Expression) -> Expression:
        if test.op in ("true", "false"):
            return self.literal(test.op == "false")
        return test.parts()[0] if test.op == "not" else self.made.make("not", test)

    def both(self, a: Expression, b: Expression) -> Expression:
        for one, other in ((a, b), (b, a)):
            if one.op == "true":
                return other
            if one.op == "false":
                return one
        return a if a is b else self.made.make("both", a, b)

    def either(self, a: Expression, b: Expression) -> Expression:
        return self.negated(self.both(self.negated(a), self.negated(b)))

    def equal(self, a: Expression, b: Expression) -> Expression:
        if a.number is not None:
            a, b = b, a
        if a.number is not None and b.number is not None:
            return self.literal(a.number == b.number)
        return self.made.make("equal", a, b)

    def less(self, a: Expression, b: Expression, signed: bool) -> Expression:
        if a.number is not None and b.number is not None:
            return self.literal(_signed(a.number) < _signed(b.number) if signed else a.number < b.number)
        if a.number is not None and a.number != (0x7FFFFFFF if signed else 0xFFFFFFFF):
            # One form for one thing: 3 < x is what x < 4 is not.
            return self.negated(self.less(b, self.made.number(a.number + 1), signed))
        if not signed and b.number == 1:
            return self.equal(a, self.made.number(0))
        return self.made.make("less" if signed else "below", a, b)

    def compared(self, how: str, a: Expression, b: Expression, signed: bool) -> Expression:
        """how: LT, LE, GT, GE, EQ or NE."""
        if how in ("EQ", "NE"):
            test = self.equal(a, b)
            return test if how == "EQ" else self.negated(test)
        if how in ("GT", "LE"):
            a, b = b, a
        test = self.less(a, b, signed)
        if how not in ("LT", "LE", "GT", "GE"):
            return self.made.make(f"compare.{how}", a, b)
        return self.negated(test) if how in ("LE", "GE") else test

    def of_table(self, table: int, inputs: list[Expression]) -> Expression:
        """A function of three predicates: bit 4a + 2b + c of the table is its value."""
        total = self.literal(False)
        for row in range(8):
            if table >> row & 1:
                term = self.literal(True)
                for place, test in zip((4, 2, 1), inputs, strict=True):
                    term = self.both(term, test if row & place else self.negated(test))
                total = self.either(total, term)
        simple = [test for test in dict.fromkeys(inputs) if test.op not in ("true", "false")]
        return self._simplified(total, simple)

    def _simplified(self, test: Expression, inputs: list[Expression]) -> Expression:
        """The same function written shorter where it depends on one input alone."""
        if len(inputs) == 1:
            if_false, if_true = (_evaluate(test, {inputs[0]: value}) for value in (False, True))
            if if_false == if_true:
                return self.literal(if_true)
            return inputs[0] if if_true else self.negated(inputs[0])
        return test


def _evaluate(test: Expression, values: dict[Expression, bool]) -> bool:
    if test in values:
        return values[test]
    if test.op == "not":
        return not _evaluate(test.parts()[0], values)
    if test.op == "both":
        return all(_evaluate(part, values) for part in test.parts())
    return test.op == "true"


@dataclass(frozen=True, slots=True)
class Literal:
    """subject: an expression with a range (`low` to `high`), or a predicate that is `low`."""

    subject: Expression
    low: int
    high: int
    ranged: bool = True


Case = tuple[Literal, ...]


def cases(test: Expression, holds: bool) -> list[Case] | None:
    """Conjunctions of literals, one of which holds exactly if the test does (or does not); None: too many to say."""
    found: list[Case] | None
    if test.op == "not":
        return cases(test.parts()[0], not holds)
    if test.op in ("true", "false"):
        return [()] if (test.op == "true") == holds else []
    if test.op == "both":
        a, b = test.parts()
        if holds:
            first, second = cases(a, True), cases(b, True)
            if first is None or second is None:
                return None
            found = [x + y for x in first for y in second]
        else:  # disjoint: not a; a and not b
            not_a, is_a, not_b = cases(a, False), cases(a, True), cases(b, False)
            if not_a is None or is_a is None or not_b is None:
                return None
            found = not_a + [x + y for x in is_a for y in not_b]
        return found if len(found) <= MAX_CASES else None
    return _comparison(test, holds)


def _comparison(test: Expression, holds: bool) -> list[Case]:
    parts = test.parts()
    if test.op in ("equal", "less", "below") and len(parts) == 2:
        a, b = parts
        ranges = _ranges(test.op, a, b, holds)
        if ranges is not None:
            subject, spans = ranges
            return [(Literal(*_preimage(subject, low, high)),) for low, high in spans]
    return [(Literal(test, int(holds), int(holds), ranged=False),)]


def _ranges(op: str, a: Expression, b: Expression, holds: bool) -> tuple[Expression, list[tuple[int, int]]] | None:
    """The expression that is compared with a number, and its ranges; None where the order is not one of naturals."""
    subject, number, swapped = (a, b.number, False) if b.number is not None else (b, a.number, True)
    if number is None or not bounded(subject):
        return None
    low, high = span(subject)
    if op == "less":
        number = _signed(number)
    if op == "equal":
        inside = [(number, number)]
    elif swapped:
        inside = [(number + 1, high)]
    else:
        inside = [(low, number - 1)]
    if op == "below" and low < 0:  # a negative number is a large one without sign
        inside = [(low, -1), (number + 1, high)] if swapped else [(0, number - 1)]
    spans = inside if holds else _outside(inside, low, high)
    return subject, [(max(low, x), min(high, y)) for x, y in spans if max(low, x) <= min(high, y)]


def _outside(spans: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """What lies between `low` and `high` and in none of the spans, which are in order."""
    found = []
    for start, end in spans:
        found.append((low, start - 1))
        low = end + 1
    return [*found, (low, high)]


def bounded(expression: Expression) -> bool:
    """Whether it is a small natural number, so that signed and unsigned order agree and nothing overflows."""
    return span(expression)[1] < 1 << 30 and span(expression)[0] >= -(1 << 30)


def span(expression: Expression) -> tuple[int, int]:
    """The least and the greatest value that it may have; wide where not known."""
    unknown = (-(1 << 33), 1 << 33)
    if (number := expression.number) is not None:
        return (_signed(number), _signed(number))
    parts = expression.parts()
    if expression.op == "thread":
        return (0, 31) if expression.args[0] == "LANEID" else (0, _THREADS)
    by = expression.args[1] if len(expression.args) > 1 and isinstance(expression.args[1], int) else None
    if expression.op in ("shr", "shl") and by is not None:
        low, high = span(parts[0])
        if low < 0 or high >= 1 << 31:
            return unknown
        return (low >> by, high >> by) if expression.op == "shr" else (low << by, high << by)
    if expression.op == "and" and (mask := parts[1].number) is not None:
        low, high = span(parts[0])
        if mask < 1 << 31:
            return (0, min(mask, high) if low >= 0 else mask)
        return (0, high) if low >= 0 else unknown
    if expression.op == "add":
        ends = [span(part) for part in parts]
        return (sum(low for low, _ in ends), sum(high for _, high in ends))
    return unknown


def _preimage(subject: Expression, low: int, high: int) -> tuple[Expression, int, int]:
    """The same range as one of what the subject is computed from, as far as its order is kept."""
    parts = subject.parts()
    if subject.op == "shr" and isinstance(by := subject.args[1], int):
        return _preimage(parts[0], low << by, (high << by) + (1 << by) - 1)
    if subject.op == "shl" and isinstance(by := subject.args[1], int):
        return _preimage(parts[0], -(-low >> by), high >> by)
    if subject.op == "add" and len(parts) == 2 and (number := parts[1].number) is not None:
        return _preimage(parts[0], low - _signed(number), high - _signed(number))
    if subject.op == "and" and (mask := parts[1].number) is not None:
        # A mask that clears low bits alone, of those that the number may have, rounds down.
        unit, most = mask & -mask, (1 << max(span(parts[0])[1], 0).bit_length()) - 1
        if span(parts[0])[0] >= 0 and unit and mask & most == most & ~(unit - 1):
            return _preimage(parts[0], -(-low // unit) * unit, high // unit * unit + unit - 1)
    return subject, low, high


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


@dataclass(frozen=True, slots=True)
class Facts:
    """Literals that hold together, one for each subject."""

    known: frozenset[Literal] = frozenset()

    def of(self, subject: Expression) -> Literal | None:
        return next((literal for literal in self.known if literal.subject is subject), None)

    def plus(self, case: Case) -> Facts | None:
        """These and those of a case; None where they contradict each other."""
        known = {literal.subject: literal for literal in self.known}
        for literal in case:
            low, high = literal.low, literal.high
            before = known.get(literal.subject)
            if before is not None:
                low, high = max(low, before.low), min(high, before.high)
            if literal.ranged:
                start, end = _within(literal.subject, known)
                low, high = max(low, start), min(high, end)
            if low > high:
                return None
            known[literal.subject] = Literal(literal.subject, low, high, literal.ranged)
        for literal in known.values():  # what was known of a part may exclude what is known of the whole
            if literal.ranged:
                start, end = _within(literal.subject, known)
                if literal.low > end or literal.high < start:
                    return None
        return Facts(frozenset(known.values()))

    def only(self, *scopes: Scope) -> Facts:
        return Facts(frozenset(literal for literal in self.known if literal.subject.scope in scopes))

    def contradicts(self, other: Facts) -> bool:
        return self.plus(tuple(other.known)) is None

    def implies(self, other: Facts) -> bool:
        for literal in other.known:
            mine = self.of(literal.subject)
            if mine is None or mine.low < literal.low or mine.high > literal.high:
                return False
        return True

    def __str__(self) -> str:
        return " and ".join(sorted(map(_words, self.known))) or "always"


def _words(literal: Literal) -> str:
    if not literal.ranged:
        return f"{'' if literal.low else 'not '}{literal.subject}"
    if literal.low == literal.high:
        return f"{literal.subject} == {literal.low}"
    return f"{literal.low} <= {literal.subject} <= {literal.high}"


@functools.lru_cache(maxsize=4096)
def _masked(low: int, high: int, mask: int) -> tuple[int, int]:
    """The least and the greatest of what a mask makes of the numbers of a range."""
    if high - low > _THREADS:
        return 0, high
    values = [number & mask for number in range(low, high + 1)]
    return (min(values), max(values)) if values else (0, high)


def _within(subject: Expression, known: dict[Expression, Literal]) -> tuple[int, int]:
    """The range of an expression by what is known of the expressions that it is computed from."""
    mine = known.get(subject)
    low, high = span(subject)
    parts = subject.parts()
    if subject.op in ("shr", "add", "and") and parts:
        inner = [_within(part, known) for part in parts]
        if subject.op == "shr" and isinstance(by := subject.args[1], int) and inner[0][0] >= 0:
            low, high = max(low, inner[0][0] >> by), min(high, inner[0][1] >> by)
        elif subject.op == "add":
            low, high = max(low, sum(a for a, _ in inner)), min(high, sum(b for _, b in inner))
        elif (mask := parts[-1].number) is not None and inner[0][0] >= 0:
            least, most = _masked(*inner[0], mask)
            low, high = max(low, least), min(high, most)
    if mine is not None and mine.ranged:
        low, high = max(low, mine.low), min(high, mine.high)
    return low, high
