"""What a cubin says about its kernels beside their code: parameters, local functions, targets of indirect branches.

Facts, compared with `cuobjdump -elf` on cubins of CUDA 12.8, 13.0 and 13.5: `.nv.info.<kernel>` is a row of records
(form, attribute, and a value of two bytes, which for form 4 is the length of what follows). Attribute 0x17 is a
parameter (index u32, ordinal u16, offset u16, flags u32 with the size from bit 18 on); 0x0a says where in constant bank
0 the parameters begin (symbol u32, offset u16, size u16); 0x34 lists indirect branches (offset, 0, count, targets).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdl_stress.sass.cubin import BadCubin, Section, sections

_PARAMETER, _PARAMETER_BANK, _INDIRECT = 0x17, 0x0A, 0x34
_SYMTAB, _FUNCTION = 2, 2
_POINTER = 8


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: its place among the parameters, where it stands in constant bank 0, its size in bytes."""

    ordinal: int
    offset: int
    size: int

    @property
    def may_point(self) -> bool:
        """Whether it is large enough to be, or to hold, a pointer."""
        return self.size >= _POINTER


@dataclass(frozen=True)
class Image:
    """One kernel's facts. base: where its parameters begin in constant bank 0, None where the cubin does not say.

    locals: offsets of the device functions that stand inside a section, by (section's function, symbol).
    indirect: targets of indirect branches by the offset of the branch. links: the symbols whose addresses stand in
    constant bank 4, by their place there.
    """

    parameters: tuple[Parameter, ...] = ()
    base: int | None = None
    locals: dict[tuple[str, str], int] = field(default_factory=dict)
    indirect: dict[int, tuple[int, ...]] = field(default_factory=dict)
    links: dict[int, str] = field(default_factory=dict)

    def parameter_at(self, offset: int) -> Parameter | None:
        """The parameter that covers a byte of constant bank 0."""
        for parameter in self.parameters:
            if parameter.offset <= offset < parameter.offset + parameter.size:
                return parameter
        return None


def images(cubin: bytes, kernels: tuple[str, ...]) -> dict[str, Image]:
    """The facts of the kernels named, by name. Raises BadCubin where the records are damaged."""
    found = sections(cubin)
    by_name = {section.name: section for section in found}
    local_functions, links = _locals(cubin, found), _links(cubin, found)
    result = {}
    for kernel in kernels:
        section = by_name.get(f".nv.info.{kernel}")
        base: int | None = None
        raw: list[Parameter] = []
        indirect: dict[int, tuple[int, ...]] = {}
        for attribute, value in _records(cubin, section) if section else ():
            if attribute == _PARAMETER:
                _, ordinal, offset, flags = _unpack("<IHHI", value, kernel)
                raw.append(Parameter(ordinal, offset, flags >> 18))
            elif attribute == _PARAMETER_BANK:
                _, base, _ = _unpack("<IHH", value, kernel)
            elif attribute == _INDIRECT:
                indirect |= _targets(value)
        parameters = tuple(sorted((Parameter(p.ordinal, p.offset + (base or 0), p.size) for p in raw), key=_ordinal))
        result[kernel] = Image(parameters if base is not None else (), base, local_functions, indirect, links)
    return result


def _ordinal(parameter: Parameter) -> int:
    return parameter.ordinal


def _records(cubin: bytes, section: Section) -> Iterator[tuple[int, bytes]]:
    at, end = section.offset, section.offset + section.size
    while at + 4 <= end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form != 4:
            continue
        if at + size > end:
            raise BadCubin(f"damaged cubin: a record of {section.name} reaches behind its end")
        yield attribute, cubin[at : at + size]
        at += size


def _unpack(form: str, value: bytes, kernel: str) -> tuple[int, ...]:
    if len(value) < struct.calcsize(form):
        raise BadCubin(f"damaged cubin: a record of .nv.info.{kernel} is too short")
    return struct.unpack_from(form, value)


def _targets(value: bytes) -> dict[int, tuple[int, ...]]:
    words = struct.unpack(f"<{len(value) // 4}I", value[: len(value) // 4 * 4])
    found, at = {}, 0
    while at + 3 <= len(words):
        count = words[at + 2]
        found[words[at]] = words[at + 3 : at + 3 + count]
        at += 3 + count
    return found


def _symbols(cubin: bytes, found: list[Section]) -> Iterator[tuple[str, int, int, int]]:
    """(name, kind, section, value) of every symbol."""
    for table in found:
        if table.kind != _SYMTAB or table.link >= len(found):
            continue
        strings = found[table.link]
        names = cubin[strings.offset : strings.offset + strings.size]
        for at in range(table.offset, table.offset + table.size - 23, 24):
            name_at, info, _, home, value, _ = struct.unpack_from("<IBBHQQ", cubin, at)
            yield names[name_at : names.find(b"\0", name_at)].decode(errors="replace"), info & 0xF, home, value


def _locals(cubin: bytes, found: list[Section]) -> dict[tuple[str, str], int]:
    """Where each function symbol stands in its section, by (the section's function, the symbol)."""
    return {
        (found[home].name.removeprefix(".text."), name): value
        for name, kind, home, value in _symbols(cubin, found)
        if kind == _FUNCTION and home < len(found) and found[home].name.startswith(".text.")
    }


def _links(cubin: bytes, found: list[Section]) -> dict[int, str]:
    """The symbols whose addresses the loader writes into constant bank 4."""
    names = [name for name, *_ in _symbols(cubin, found)]
    links = {}
    for section in found:
        if section.name in (".rela.nv.constant4", ".rel.nv.constant4"):
            size = 24 if section.name.startswith(".rela") else 16
            for at in range(section.offset, section.offset + section.size - size + 1, size):
                offset, info = struct.unpack_from("<QQ", cubin, at)
                if info >> 32 < len(names):
                    links[offset] = names[info >> 32]
    return links
