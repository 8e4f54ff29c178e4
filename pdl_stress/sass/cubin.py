"""Reads cubins: their functions, their instructions, the architecture they are for. No disassembler, no GPU.

Facts behind the reader, compared with nvdisasm and cuobjdump on cubins of CUDA 12.4, 12.8, 13.0 and 13.5:

- A cubin is a little-endian ELF64 file for machine 190. A function's code is the section `.text.<function>`; it is a
  kernel where a function symbol of that section has the bit 0x10 in `st_other`, else a device function that was not
  inlined. Device functions that only one kernel calls usually stand inside that kernel's section.
- An instruction is an aligned slot of 16 bytes whose low 12 bits name it (sm_90 to sm_121 alike); bits 12 to 15 are
  its guard predicate (7: always, 15: never).
- Two layouts of `e_flags`: ABI 7 (CUDA 12, up to sm_90) has the architecture's number in bits 0 to 7 and the suffix `a`
  in bit 11; ABI 8 has the number in bits 8 to 15, and the suffix in bit 3 (CUDA 12) or in record 9 of `.nv.compat`
  (CUDA 13). The suffix `f` is recorded in neither: tools call such cubins by the plain name, and so does this reader.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdl_stress.errors import PdlStressError

OPCODES = {0x82E: "ACQBULK", 0x82D: "PREEXIT", 0x981: "LDG", 0x986: "STG", 0x5B4: "UTMALDG", 0x992: "MEMBAR"}
SLOT = 16  # bytes an instruction

_ALWAYS = 7
_MACHINE_CUDA = 190
_RELOCATABLE = 1
_SYMTAB, _NOBITS = 2, 8
_FUNCTION, _ENTRY = 2, 0x10
_OLD_ABI, _NEW_ABI = (51, 7), (65, 8)  # EI_OSABI, EI_ABIVERSION
_ACCELERATED = 9


class BadCubin(PdlStressError, ValueError):
    """The bytes are not a whole cubin. Take the code before any compression or fat binary."""


class Instruction(NamedTuple):
    """opcode: its name where `OPCODES` knows it, else its 12 bits in hexadecimal. offset: bytes from the start."""

    opcode: str
    predicated: bool
    offset: int


class Section(NamedTuple):
    """A section's name, and where its bytes stand in the file. size is 0 where it has none there."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class Function:
    """A function of a cubin: the name (mangled), and where its code stands in the file, in bytes.

    kernel: it can be launched. symbol: its index in the symbol table, None where no symbol names it.
    """

    name: str
    kernel: bool
    offset: int
    size: int
    symbol: int | None


def text_sections(cubin: bytes) -> dict[str, bytes]:
    """The machine code of each function, kernel or device function, by the function's name. May raise BadCubin."""
    return {function.name: cubin[function.offset : function.offset + function.size] for function in functions(cubin)}


def functions(cubin: bytes) -> tuple[Function, ...]:
    """The functions with a code section of their own, in the order of the sections. May raise BadCubin."""
    found = sections(cubin)
    names: dict[int, dict[str, int]] = {}
    kernels = set()
    for symbol, (label, home, is_kernel) in enumerate(_function_symbols(cubin, found)):
        if label is not None:
            names.setdefault(home, {})[label] = symbol
        if is_kernel:
            kernels.add(home)
    result = []
    for index, section in enumerate(found):
        if section.name.startswith(".text."):
            name = section.name.removeprefix(".text.")
            result.append(
                Function(name, index in kernels, section.offset, section.size, names.get(index, {}).get(name))
            )
    if len({function.name for function in result}) != len(result):
        raise BadCubin("not a cubin: two code sections have the same name")
    return tuple(result)


def instructions(cubin: bytes) -> list[Instruction]:
    """The instructions of the cubin's functions, function after function. May raise BadCubin."""
    return [instruction for code in text_sections(cubin).values() for instruction in decode(code)]


def decode(code: bytes) -> Iterator[Instruction]:
    """The instructions of one function's code."""
    for offset in range(0, len(code) - SLOT + 1, SLOT):
        word = code[offset] | code[offset + 1] << 8
        opcode = word & 0xFFF
        yield Instruction(OPCODES.get(opcode, f"{opcode:#05x}"), word >> 12 != _ALWAYS, offset)


def architecture(cubin: bytes) -> str:
    """The architecture it was compiled for: `sm_90a`, `sm_100` (which may stand for `sm_100f`). May raise BadCubin."""
    found = sections(cubin)
    flags = _u32(cubin, 0x30)
    abi = (cubin[7], cubin[8])
    if abi == _OLD_ABI:
        number, accelerated = flags & 0xFF, bool(flags & 0x800)
    elif abi == _NEW_ABI:
        number, accelerated = flags >> 8 & 0xFF, bool(flags & 0x8) or _compat(cubin, found).get(_ACCELERATED) == 1
    else:
        raise BadCubin(f"the cubin has OS/ABI {abi[0]}, version {abi[1]}; known are {_OLD_ABI} and {_NEW_ABI}")
    return f"sm_{number}{'a' if accelerated else ''}"


def is_relocatable(cubin: bytes) -> bool:
    """Whether it was compiled to be linked (`-rdc=true`) and has not been: no driver loads it. May raise BadCubin."""
    sections(cubin)
    return _u16(cubin, 0x10) == _RELOCATABLE


def has_capsule(cubin: bytes, function: str) -> bool:
    """Whether the cubin holds the function a second time, for a driver to finalize (`.nv.capmerc`).

    Compilers write it for sm_100 and newer (CUDA 12.8 and 13.5 do, 13.0 does not). When a driver uses it in place of
    the machine code is not documented. May raise BadCubin.
    """
    return any(section.name == f".nv.capmerc.text.{function}" for section in sections(cubin))


def sections(cubin: bytes) -> list[Section]:
    """Every section, by index. Raises BadCubin where the file is no cubin, damaged, or cut off anywhere."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise BadCubin(
            "not a cubin: expected a little-endian ELF64 file; take the code before any compression or fat binary"
        )
    _within(cubin, 0, 0x40, "the header")
    machine = _u16(cubin, 0x12)
    if machine != _MACHINE_CUDA:
        raise BadCubin(f"not a cubin: an ELF file for machine {machine}, expected {_MACHINE_CUDA} (CUDA)")
    programs, table = struct.unpack_from("<QQ", cubin, 0x20)
    program_size, program_count, entry_size, count, names_index = struct.unpack_from("<HHHHH", cubin, 0x36)
    _within(cubin, programs, program_size * program_count, "the program headers")
    if entry_size < 0x40 or names_index >= count:
        raise BadCubin("not a cubin: its header names no section table (or one of more than 65,279 sections)")
    _within(cubin, table, entry_size * count, "the section table")
    raw = [struct.unpack_from("<IIQQQQI", cubin, table + i * entry_size) for i in range(count)]
    names_at, names_size = raw[names_index][4:6]
    _within(cubin, names_at, names_size, "the section names")
    names = cubin[names_at : names_at + names_size]
    result = []
    for name_at, kind, _, _, offset, size, link in raw:
        name = _string(names, name_at)
        if kind == _NOBITS:
            size = 0
        _within(cubin, offset if size else 0, size, f"section {name!r}")
        result.append(Section(name, kind, offset, size, link))
    return result


def _function_symbols(cubin: bytes, found: list[Section]) -> Iterator[tuple[str | None, int, bool]]:
    """(name, section index, is a kernel) of each symbol of the one symbol table; the name is None for other symbols."""
    tables = [section for section in found if section.kind == _SYMTAB]
    if len(tables) != 1:
        raise BadCubin(f"not a whole cubin: it has {len(tables)} symbol tables, expected one")
    table = tables[0]
    if table.link >= len(found):
        raise BadCubin("damaged cubin: the symbol table names no string table")
    strings = found[table.link]
    names = cubin[strings.offset : strings.offset + strings.size]
    for offset in range(table.offset, table.offset + table.size - 23, 24):
        name_at, info, other, section = struct.unpack_from("<IBBH", cubin, offset)
        if info & 0xF == _FUNCTION:
            yield _string(names, name_at), section, bool(other & _ENTRY)
        else:
            yield None, section, False


def _compat(cubin: bytes, found: list[Section]) -> dict[int, int]:
    """The records of `.nv.compat` that hold a small number, by their kind."""
    records = {}
    for section in found:
        if section.name == ".nv.compat":
            at, end = section.offset, section.offset + section.size
            while at + 4 <= end:
                form, kind, value = cubin[at], cubin[at + 1], _u16(cubin, at + 2)
                at += 4
                if form == 4:  # value is the length of what follows
                    at += value
                else:
                    records[kind] = value
    return records


def _string(names: bytes, at: int) -> str:
    end = names.find(b"\0", at)
    if at >= len(names) or end < 0:
        raise BadCubin("damaged cubin: a name lies outside its string table")
    try:
        return names[at:end].decode()
    except UnicodeDecodeError:
        raise BadCubin("damaged cubin: a name is not text") from None


def _within(cubin: bytes, offset: int, size: int, what: str) -> None:
    if offset + size > len(cubin):
        raise BadCubin(f"the cubin is cut off or damaged at {what}: up to byte {offset + size} of {len(cubin)}")


def _u16(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "little")


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
