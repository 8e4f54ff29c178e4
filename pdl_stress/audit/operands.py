"""Operands of SASS instructions, as nvdisasm writes them: registers, constants, constant-bank cells, addresses."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

_REGISTER = re.compile(r"(U?R)(\d+|Z)")
_PREDICATE = re.compile(r"(U?P)(\d+|T)")
_CELL = re.compile(r"c\[(0x[0-9a-f]+)\]\[(0x[0-9a-f]+)\]")
_NUMBER = re.compile(r"-?0x[0-9a-f]+|-?\d+")


@dataclass(frozen=True, slots=True)
class Operand:
    """kind: register, predicate, number, cell (of a constant bank), bank (one with an unknown offset), memory, other.

    name: the register or predicate; `RZ`, `URZ`, `PT` and `UPT` are names like the others. negative: `-R2` or `!P0`.
    """

    kind: str
    name: str = ""
    negative: bool = False
    value: int = 0
    bank: int = 0
    changed: bool = False
    """Only a part or a function of the value is used: `|R2|`, `~R2`, `R2.H1`."""
    text: str = ""


@functools.lru_cache(maxsize=65536)
def parse(text: str) -> Operand:
    """One operand."""
    bare, negative = text, False
    if bare[:1] in "-!":
        bare, negative = bare[1:], True
    changed = bare[:1] in "|~"
    bare = bare.strip("|~")
    stem, _, suffix = bare.partition(".")
    if _PREDICATE.fullmatch(stem):
        return Operand("predicate", stem, negative, text=text)
    if _REGISTER.fullmatch(stem):
        parts = set(suffix.split(".")) - {"reuse", "64", "U32", "S32", ""}
        return Operand("register", stem, negative, changed=changed or bool(parts), text=text)
    if _NUMBER.fullmatch(text):
        return Operand("number", value=_integer(text), text=text)
    if match := _CELL.match(bare):
        return Operand("cell", negative=negative, bank=int(match[1], 16), value=int(match[2], 16), changed=changed)
    if match := re.match(r"c\[(0x[0-9a-f]+)\]\[U?RZ\]", bare):
        return Operand("cell", negative=negative, bank=int(match[1], 16), value=0, changed=changed)
    if bare.startswith(("c[", "cx[")):
        return Operand("bank", text=text)
    if "[" in bare:
        return Operand("memory", text=text)
    return Operand("other", text=text)


@dataclass(frozen=True, slots=True)
class Address:
    """`desc[UR4][R2.64+UR6+0x10]`: the registers that are added, the constant, and whether it has a descriptor."""

    registers: tuple[str, ...]
    constant: int = 0
    described: bool = False


@functools.lru_cache(maxsize=65536)
def address(text: str) -> Address:
    """The address that a memory operand names: what stands in its last bracket."""
    start = text.rfind("[")
    registers, constant = [], 0
    for part in text[start + 1 :].rstrip("]").split("+"):
        stem = part.split(".")[0]
        if _REGISTER.fullmatch(stem):
            if stem not in ("RZ", "URZ"):
                registers.append(stem)
        elif _NUMBER.fullmatch(part):
            constant += _integer(part)
    return Address(tuple(registers), constant, text.startswith("desc["))


def _integer(text: str) -> int:
    return int(text, 16 if "x" in text else 10)


def is_zero(operand: Operand) -> bool:
    """A literal zero: `RZ`, `URZ`, `0x0`."""
    return operand.name in ("RZ", "URZ") or (operand.kind == "number" and operand.value == 0)


def following(name: str, count: int) -> list[str]:
    """`count` registers from this one on: R2, R3, ...; none for RZ."""
    match = _REGISTER.fullmatch(name)
    if match is None or match[2] == "Z":
        return []
    return [f"{match[1]}{int(match[2]) + index}" for index in range(count)]
