"""What one instruction computes, as expressions and origins of pointers. Whatever it does not know becomes a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdl_stress.audit.conditions import Conditions
from pdl_stress.audit.expressions import DEPTH, NOWHERE, UNKNOWN, Expression, Expressions, Origin, Scope, Value, joined
from pdl_stress.audit.image import Image
from pdl_stress.audit.listing import Instruction
from pdl_stress.audit.opcodes import access, is_load_of_state, written
from pdl_stress.audit.operands import Operand, address, is_zero, parse

_THREAD = {"SR_TID.X", "SR_TID.Y", "SR_TID.Z", "SR_LANEID", "SR_TID"}
_CTA = {"SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z", "SR_CgaCtaId", "SR_NTID", "SR_GRIDID", "SR_SWINHI", "SR_SWINLO"}
# The cell of constant bank 0 that holds the address of the parameters, by the bank's parameter base: measured.
_SPACE_CELLS = {0x210: 0x198, 0x380: 0x348}
_MOVES = {"MOV", "UMOV", "R2UR", "MOV32I", "UR2UR", "IMAD.MOV", "IMAD.MOV.U32"}
_ADDS = {"IADD3", "UIADD3", "IADD", "UIADD", "VIADD", "IADD32I", "UVIADD"}
Read = Callable[[str], Value]


@dataclass
class Evaluator:
    """image: of the kernel. once: whether the block is run at most once by a thread; node: names its place."""

    image: Image
    made: Expressions
    conditions: Conditions

    def results(self, instruction: Instruction, node: tuple[int, int], once: bool, read: Read) -> dict[str, Value]:
        """The registers and predicates that the instruction writes, guard aside. node: the place, to name unknowns."""
        names = written(instruction)
        if not names:
            return {}
        self._at, self._once, self._read = node, once, read
        operands = [parse(text) for text in instruction.operands]
        sources = self._sources(operands)
        found: dict[str, Value] = {}
        base = instruction.base
        if base in ("ISETP", "UISETP"):
            found[names[0]] = self._compare(instruction, operands)
        elif base in ("PLOP3", "UPLOP3"):
            found[names[0]] = self._predicate_logic(operands)
        elif base in ("LOP3", "ULOP3"):
            self._logic(names, operands, found)
        elif base == "ELECT":
            one = self.made.make("name", "elected", scope=Scope.THREAD, stable=True)
            if not instruction.guard:
                found[names[0]] = Value(one)
        elif base in ("VOTE", "VOTEU") and names[0].lstrip("U").startswith("P"):
            found[names[0]] = self._vote(instruction, operands)
        elif base in ("LDC", "ULDC", "LDCU"):
            self._constants(names, operands[1], found)
        elif not is_load_of_state(instruction) or base in ("S2R", "S2UR", "SHFL", "CS2R"):
            value = self._arithmetic(instruction, operands)
            if value is not None:
                at = 1 if base == "SHFL" and operands[0].kind == "predicate" and len(names) > 1 else 0
                found[names[min(at, len(names) - 1)]] = value
        for name in names:
            if name not in found or found[name].expression.depth > DEPTH:
                origins = found[name].origins if name in found else self._loaded(instruction)
                found[name] = Value(self._unknown(instruction, name, sources), origins)
        return found

    def operand(self, operand: Operand, read: Read) -> Value:
        """The value of a source operand."""
        self._read = read
        return self._value(operand)

    # --- operands -----------------------------------------------------------------------------------------------------

    def _sources(self, operands: list[Operand]) -> list[Expression]:
        found = []
        for operand in operands[1:]:
            if operand.kind in ("register", "predicate", "cell"):
                found.append(self._value(operand).expression)
            elif operand.kind == "memory":
                found += [self._read(name).expression for name in address(operand.text).registers]
            elif operand.kind in ("bank", "other") and not operand.text.startswith(("0.", "-0.", "+")):
                found.append(self.made.make("name", "unread", scope=Scope.UNKNOWN, stable=False))
        return found

    def _value(self, operand: Operand) -> Value:
        if operand.kind == "number":
            return Value(self.made.number(operand.value))
        if operand.kind == "predicate":
            if operand.name in ("PT", "UPT"):
                return Value(self.conditions.literal(not operand.negative))
            value = self._read(operand.name)
            return Value(self.conditions.negated(value.expression)) if operand.negative else value
        if operand.kind == "register":
            value = Value(self.made.number(0)) if operand.name in ("RZ", "URZ") else self._read(operand.name)
        elif operand.kind == "cell":
            value = self._cell(operand.bank, operand.value)
        else:
            return Value(
                self.made.make("unread", operand.text, scope=Scope.UNKNOWN, stable=False), frozenset({UNKNOWN})
            )
        if operand.changed:
            return Value(self.made.make("part", operand.text[:1], value.expression), value.origins)
        return Value(self.made.negated(value.expression)) if operand.negative else value

    def _cell(self, bank: int, offset: int) -> Value:
        cell = self.made.make("cell", bank, offset, scope=Scope.CTA, stable=True)
        if bank == 0:
            base = self.image.base
            if base is not None and offset == _SPACE_CELLS.get(base):
                return Value(cell, frozenset({Origin("space")}))
            parameter = self.image.parameter_at(offset)
            if parameter is not None:
                inside = offset - parameter.offset
                points = parameter.may_point and inside % 8 == 0
                return Value(cell, frozenset({Origin("parameter", parameter.ordinal, inside)}) if points else NOWHERE)
            return Value(cell, NOWHERE)
        return Value(cell, frozenset({Origin("symbol" if bank == 4 else "constant")}))

    def _constants(self, names: list[str], operand: Operand, found: dict[str, Value]) -> None:
        if operand.kind == "bank":  # an entry of a table: as good as its index
            indices = [self._read(name).expression for name in address(operand.text).registers]
            if indices and operand.text.startswith("c["):
                found[names[0]] = Value(self.made.make("table", operand.text, *indices), frozenset({UNKNOWN}))
        if operand.kind != "cell":
            return
        for index, name in enumerate(names):
            found[name] = self._cell(operand.bank, operand.value + 4 * index)
        if names == ["R1"]:  # the stack pointer, by convention
            found["R1"] = Value(found["R1"].expression, frozenset({Origin("stack")}))

    def _loaded(self, instruction: Instruction) -> frozenset[Origin]:
        """Where a value that was read from memory may point to."""
        base = instruction.base
        touched = access(instruction)
        if touched is not None and touched[2]:
            found = set()
            for name in address(touched[2]).registers:
                for origin in self._read(name).origins:
                    through = origin.kind in ("parameter", "loaded")
                    found.add(Origin("loaded", origin.ordinal, origin.offset) if through else UNKNOWN)
            return frozenset(found or {UNKNOWN})
        if base in ("LDS", "LDL", "LDC", "ULDC", "LDCU"):
            return frozenset({UNKNOWN})
        return NOWHERE

    def _unknown(self, instruction: Instruction, name: str, sources: list[Expression]) -> Expression:
        """A name for what was computed here: one value for a thread that comes here once, or from stable parts."""
        opaque = is_load_of_state(instruction)
        stable = self._once or (not opaque and all(source.stable for source in sources))
        scope = joined([source.scope for source in sources]) if sources else Scope.CONSTANT
        if opaque:  # what one thread read from memory another may read otherwise, at another time
            scope = Scope.UNKNOWN
        if scope is Scope.CONSTANT:
            scope = Scope.CTA
        return self.made.make("name", f"{name}@{self._at[0]}.{self._at[1]:#x}", scope=scope, stable=stable)

    # --- arithmetic ---------------------------------------------------------------------------------------------------

    def _arithmetic(self, instruction: Instruction, operands: list[Operand]) -> Value | None:
        """The main result; None where it is not known."""
        base, opcode, made = instruction.base, instruction.opcode, self.made
        start = 2 if operands[0].kind == "predicate" else 1  # a predicate result stands before the register
        inputs = [operand for operand in operands[start:] if operand.kind != "predicate"]
        values = [self._value(operand) for operand in inputs]
        parts = set(instruction.modifiers)
        if opcode in _MOVES or (base in ("MOV", "R2UR") and inputs):
            return values[-1] if opcode.startswith("IMAD") else values[0]
        if base in ("S2R", "S2UR", "CS2R"):
            return self._special(operands[1].text or instruction.operands[1])
        if base in _ADDS and "X" not in parts:
            return Value(made.add(*(v.expression for v in values)), _union(values))
        if base in ("IMAD", "UIMAD") and not parts & {"HI", "X"} and len(values) == 3:
            a, b, c = values
            product = Value(made.product(a.expression, b.expression), NOWHERE)
            if b.expression.number == 1 or a.expression.number == 1:
                product = Value(product.expression, a.origins | b.origins)
            return Value(made.add(product.expression, c.expression), product.origins | c.origins)
        if base in ("LEA", "ULEA") and not parts & {"X"} and len(values) >= 3:
            return self._lea(values, high="HI" in parts)
        if base in ("SHF", "USHF") and len(values) == 3:
            return self._shift(instruction, inputs, values)
        if base in ("SEL", "USEL", "FSEL") and len(values) == 2:
            test = self._value(operands[-1]).expression
            both = made.make("choice", test, values[0].expression, values[1].expression)
            return Value(both, _union(values), (test, values[0], values[1]))
        if base == "SHFL" and values and "IDX" in parts and _same_in_warp(values[0].expression):
            return values[0]
        if base in ("HFMA2", "IMAD") and len(inputs) == 4 and all(is_zero(o) for o in inputs[2:]):
            return Value(made.number(0))  # how compilers write a zero
        if base in ("PRMT", "UPRMT", "VIMNMX", "UVIMNMX", "IMNMX"):
            return Value(made.make(opcode, *(v.expression for v in values)), _union(values))
        return None

    def _special(self, name: str) -> Value | None:
        if name == "SRZ":
            return Value(self.made.number(0))
        if name in _THREAD:
            return Value(self.made.make("thread", name.removeprefix("SR_"), scope=Scope.THREAD, stable=True))
        if name in _CTA or "CTAID" in name.upper():
            shared = frozenset({Origin("shared")}) if "SWIN" in name or name == "SR_CgaCtaId" else NOWHERE
            return Value(self.made.make("name", name, scope=Scope.CTA, stable=True), shared)
        return None

    def _lea(self, values: list[Value], high: bool) -> Value | None:
        by = values[-1].expression.number
        if by is None:
            return None
        a, b = values[0], values[1]
        if not high:
            return Value(self.made.add(self.made.shifted("shl", a.expression, by), b.expression), b.origins)
        if len(values) == 4 and values[2].expression.number == 0 and 0 < by < 32:
            return Value(self.made.add(self.made.shifted("shr", a.expression, 32 - by), b.expression), b.origins)
        return None

    def _shift(self, instruction: Instruction, inputs: list[Operand], values: list[Value]) -> Value | None:
        """SHF shifts a pair (low, by, high); one half is mostly zero."""
        low, by, high = (value.expression for value in values)
        parts = instruction.modifiers
        if by.number is None or by.number > 31:
            return None
        if "L" in parts and high.number == 0 and "HI" not in parts:
            return Value(self.made.shifted("shl", low, by.number))
        if "R" in parts and ("HI" in parts) and low.number == 0:
            signed = any(part.startswith("S") for part in parts)
            if by.number == 31 and _positive(high):  # the sign, as a division by a power of two asks for it
                return Value(self.made.number(0))
            return None if signed and not _positive(high) else Value(self.made.shifted("shr", high, by.number))
        if "R" in parts and "HI" not in parts and high.number == 0 and "U32" in parts:
            return Value(self.made.shifted("shr", low, by.number))
        return None

    def _logic(self, names: list[str], operands: list[Operand], found: dict[str, Value]) -> None:
        """LOP3: a bitwise function of three words; as a predicate, whether the result is not zero."""
        start = 1 + (operands[0].kind == "predicate")
        inputs = [self._value(operand) for operand in operands[start : start + 3]]
        table = operands[start + 3] if len(operands) > start + 3 else None
        if len(inputs) != 3 or table is None or table.kind != "number":
            return
        a, b, c = (value.expression for value in inputs)
        if table.value == 0xC0:
            word = self.made.masked(a, b)
        else:
            word = self.made.make(f"lop3.{table.value:#x}", a, b, c)
        for name in names:
            if not name.lstrip("U").startswith("P"):
                found[name] = Value(word, _union(inputs))
            elif operands[-1].kind == "predicate" and operands[-1].name in ("PT", "UPT") and operands[-1].negative:
                zero = self.conditions.equal(word, self.made.number(0))
                found[name] = Value(self.conditions.negated(zero))

    # --- predicates ---------------------------------------------------------------------------------------------------

    def _compare(self, instruction: Instruction, operands: list[Operand]) -> Value:
        parts = instruction.modifiers
        inputs = operands[2:]
        a, b, *rest = (self._value(operand).expression for operand in inputs)
        chained = rest[0] if rest else self.conditions.literal(True)
        if "EX" in parts:  # the high half of a comparison of 64 bits: the low half is the last operand
            test = self.made.make(instruction.opcode, a, b, *rest)
        else:
            test = self.conditions.compared(parts[0], a, b, signed="U32" not in parts)
        if "OR" in parts and "EX" not in parts:
            return Value(self.conditions.either(test, chained))
        if "AND" in parts and "EX" not in parts:
            return Value(self.conditions.both(test, chained))
        return Value(self.made.make(instruction.opcode, a, b, *rest))

    def _predicate_logic(self, operands: list[Operand]) -> Value:
        inputs = [self._value(operand).expression for operand in operands[2:5]]
        table = operands[5].value if len(operands) > 5 and operands[5].kind == "number" else None
        if len(inputs) != 3 or table is None:
            return Value(self.made.make("name", "unread predicate", scope=Scope.UNKNOWN, stable=False))
        return Value(self.conditions.of_table(table, inputs))

    def _vote(self, instruction: Instruction, operands: list[Operand]) -> Value:
        """Whether all, or any, lanes of the warp have the predicate."""
        own = self._value(operands[-1]).expression
        kind = "any" if "ANY" in instruction.modifiers else "all"
        if own.number is not None or own.op in ("true", "false"):
            return Value(own)
        return Value(self.made.make(f"vote.{kind}", own, stable=own.stable and self._once))


def _union(values: list[Value]) -> frozenset[Origin]:
    return frozenset().union(*(value.origins for value in values))


def _positive(expression: Expression) -> bool:
    """Whether it is surely not negative as a signed number."""
    if expression.op == "thread" or (expression.number is not None and expression.number < 1 << 31):
        return True
    return expression.op in ("shr", "and") and any(_positive(part) for part in expression.parts())


def _same_in_warp(expression: Expression) -> bool:
    """Whether all lanes of a warp hold the same; a warp holds 32 consecutive thread indices."""
    if expression.scope in (Scope.CONSTANT, Scope.CTA):
        return True
    if expression.op == "shr" and expression.args[1:] and isinstance(by := expression.args[1], int) and by >= 5:
        return expression.parts()[0].op == "thread"
    return expression.op in ("shr", "shl", "add", "mul", "and", "neg") and all(
        _same_in_warp(part) for part in expression.parts()
    )
