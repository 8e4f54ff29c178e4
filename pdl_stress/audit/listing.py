"""A cubin's functions as nvdisasm lists them: instructions with guard, operands, offset and source line. No GPU.

Facts about nvdisasm 13.5 `-json` that this relies on: the answer is a list of a head, the functions, and, with `-g`
and line information in the cubin, the source files; every slot of 16 bytes is one entry, so an instruction's offset is
its index times 16; `operands` is absent where there are none, and `source-line` where it has not changed since the
instruction before; a device function that stands inside a kernel's section is part of that kernel's list.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdl_stress.errors import PdlStressError
from pdl_stress.sass.cubin import SLOT
from pdl_stress.sass.cubin import Function as Place
from pdl_stress.sass.tools import WHEELS, find_tool

TIME_LIMIT = 300.0  # seconds for one disassembly: half a second to start, then some 2 for each MB of code


class BadListing(PdlStressError):
    """No listing of the machine code: nvdisasm is missing, failed, or gave what is not understood."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One slot. guard: `""` (always), `P0`, `!P0`, `UP0`. operands: as nvdisasm writes them. line: file and number.

    meets: nvdisasm calls it an inter-warp barrier.
    """

    offset: int
    opcode: str
    guard: str = ""
    operands: tuple[str, ...] = ()
    line: tuple[str, int] | None = None
    meets: bool = False

    @property
    def base(self) -> str:
        """The opcode without its modifiers: `LDG` of `LDG.E.128.CONSTANT`."""
        return self.opcode.split(".", 1)[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".rstrip()


@dataclass(frozen=True)
class Function:
    """A function's code section, one instruction for each slot."""

    name: str
    instructions: tuple[Instruction, ...]

    def at(self, offset: int) -> Instruction | None:
        """The instruction at an offset, None where there is none."""
        index, rest = divmod(offset, SLOT)
        return self.instructions[index] if rest == 0 and 0 <= index < len(self.instructions) else None


def disassemble(cubin: bytes, chosen: Iterable[Place] | None = None) -> dict[str, Function]:
    """The functions of a cubin, or those `chosen` of `sass.cubin.functions`, by name. Raises BadListing."""
    program = find_tool("nvdisasm")
    if program is None:
        raise BadListing(f"nvdisasm, which reads machine code, is not found: pip install {WHEELS['nvdisasm']}")
    symbols = None if chosen is None else [place.symbol for place in chosen]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.cubin"
        path.write_bytes(cubin)
        # -ndf: no data flow of its own, which this does not need and which can fail.
        command = [program, "-json", "-g", "-ndf"]
        if symbols and None not in symbols:  # without an index for each, everything is listed: slow, but whole
            command += ["-fun", ",".join(map(str, symbols))]
        try:
            done = subprocess.run(
                [*command, str(path)], capture_output=True, text=True, errors="replace", timeout=TIME_LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            raise BadListing(f"nvdisasm gave no answer within {TIME_LIMIT:.0f} s") from None
        except OSError as error:
            raise BadListing(f"nvdisasm does not run: {error.strerror}") from None
    if done.returncode or not done.stdout.strip():
        lines = [line for line in done.stderr.splitlines() if "warning" not in line]
        reason = lines[0].replace(str(path), "the cubin") if lines else f"exit code {done.returncode}"
        raise BadListing(f"nvdisasm cannot read the cubin: {reason}")
    return read_listing(done.stdout)


def read_listing(text: str) -> dict[str, Function]:
    """nvdisasm's JSON as functions by name. Raises BadListing where it is anything else."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise BadListing("nvdisasm's answer is not JSON") from None
    if not isinstance(answer, list) or len(answer) < 2 or not isinstance(answer[1], list):
        raise BadListing("nvdisasm's answer is not the listing that was expected: a head, then a list of functions")
    files = _files(answer[2] if len(answer) > 2 else None)
    found = {}
    for listed in answer[1]:
        function = _function(listed, files)
        if function.name in found:
            raise BadListing(f"nvdisasm lists the function {function.name} twice")
        found[function.name] = function
    return found


def _function(listed: Any, files: tuple[str, ...]) -> Function:
    if not isinstance(listed, dict):
        raise BadListing(f"nvdisasm lists a {type(listed).__name__} where a function was expected")
    name, slots, start = (listed.get(key) for key in ("function-name", "sass-instructions", "start"))
    if not isinstance(name, str) or not isinstance(slots, list):
        raise BadListing("nvdisasm lists a function without a name or without instructions")
    if start not in (0, None):
        raise BadListing(f"nvdisasm lists {name} from offset {start!r}; expected its section from the start")
    line: tuple[str, int] | None = None
    instructions = []
    for index, slot in enumerate(slots):
        line = _line(slot, files, line)
        instructions.append(_instruction(slot, index * SLOT, name, line))
    return Function(name, tuple(instructions))


def _instruction(slot: Any, offset: int, name: str, line: tuple[str, int] | None) -> Instruction:
    place = f"{name}+{offset:#x}"
    if not isinstance(slot, dict):
        raise BadListing(f"nvdisasm lists a {type(slot).__name__} at {place}, expected an instruction")
    opcode, guard, operands = slot.get("opcode"), slot.get("predicate", ""), slot.get("operands", "")
    if not isinstance(opcode, str) or not opcode or not opcode[0].isalpha():
        raise BadListing(f"nvdisasm lists no opcode at {place}")
    if not isinstance(guard, str) or not isinstance(operands, str):
        raise BadListing(f"nvdisasm lists a guard or operands that are no text at {place}")
    attributes = slot.get("other-attributes")
    meets = isinstance(attributes, dict) and "inter-warp-barrier" in attributes
    return Instruction(offset, opcode, guard.removeprefix("@"), split_operands(operands), line, meets)


def split_operands(text: str) -> tuple[str, ...]:
    """The operands, split at the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        elif char == "," and depth <= 0:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    return tuple(part for part in parts if part)


def _files(listed: Any) -> tuple[str, ...]:
    """The source files by their id; what is malformed there costs the names only."""
    if not isinstance(listed, dict):
        return ()
    folders, files = listed.get("directories"), listed.get("files")
    names = []
    for entry in files if isinstance(files, list) else []:
        index = entry.get("dir-idx") if isinstance(entry, dict) else None
        name = entry.get("file") if isinstance(entry, dict) else None
        folder = folders[index] if isinstance(folders, list) and isinstance(index, int) and index < len(folders) else ""
        names.append(f"{folder}/{name}" if folder and not str(name).startswith("/") else str(name))
    return tuple(names)


def _line(slot: Any, files: tuple[str, ...], before: tuple[str, int] | None) -> tuple[str, int] | None:
    number = slot.get("source-line") if isinstance(slot, dict) else None
    if not isinstance(number, int):
        return before
    index = slot.get("source-file-id")
    known = isinstance(index, int) and 0 <= index < len(files)
    return (files[index] if known else "", number)
