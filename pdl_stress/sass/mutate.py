"""Takes waits out of a kernel's machine code, and shows that nothing else changed.

A mutant is a control: the very kernel under test, without one of its waits. So what it lost must be exact. A wait
(`ACQBULK`) becomes a `NOP` by its opcode alone, the low 12 bits of its 16-byte slot; guard predicate (bits 12 to 15)
and control word (bits 105 to 127: stall, yield, barriers) stay. Facts behind that, read in what NVRTC 13.5 makes for
sm_90 to sm_121: the operand bits 16 to 104 are zero in every `ACQBULK` and in every `NOP`, the two use the same control
words, neither sets a scoreboard, and nvdisasm reads `@P0 NOP` as it reads `@P0 ACQBULK`. nvcc 13.0's `ACQBULK` is the
same in all libraries that were tried. A wait that is encoded otherwise is refused, not guessed at.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdl_stress.errors import PdlStressError
from pdl_stress.sass.cubin import SLOT, Function, functions, has_capsule
from pdl_stress.sass.tools import find_tool

TIME_LIMIT = 120.0  # seconds for one disassembly; half a second to start, then some 2 for each MB of code

_WAIT, _TRIGGER, _NOP = 0x82E, 0x82D, 0x918
_OPCODE = 0xFFF
_OPERANDS = (1 << 105) - (1 << 16)
_SCOREBOARDS = 0b111_111 << 110  # the barrier that the instruction sets when it wrote, and when it read: 7 is none


class MutationError(PdlStressError):
    """The mutant cannot be made, or is not what it should be. Nothing may be run in its place."""


@dataclass(frozen=True)
class Site:
    """An instruction: its function's name, bytes from that function's start, and its guard (`""` always, `"@!P0"`)."""

    function: str
    offset: int
    predicate: str


@dataclass(frozen=True)
class Mutant:
    """A changed cubin. removed: the waits it lost. left: how many it still has. checked: by what, for a report."""

    code: bytes
    removed: tuple[Site, ...]
    left: int
    checked: str


def wait_sites(cubin: bytes, kernel: str) -> tuple[Site, ...]:
    """The waits that `kernel` (a mangled name) can execute: those in its own code, then those in device functions.

    Calls are not followed: the waits of a device function are counted for each kernel of the cubin. Another kernel's
    waits are not. Raises MutationError where the cubin does not hold the kernel, BadCubin where it is none.
    """
    return tuple(site for site, _ in _sites(cubin, kernel, _WAIT))


def triggers(cubin: bytes, kernel: str) -> tuple[Site, ...]:
    """The triggers (`PREEXIT`) that `kernel` can execute, counted and ordered as `wait_sites` does."""
    return tuple(site for site, _ in _sites(cubin, kernel, _TRIGGER))


def remove_waits(cubin: bytes, kernel: str, sites: tuple[int, ...] | None = None) -> Mutant:
    """The cubin without the waits numbered `sites` in `wait_sites(cubin, kernel)`; None: without any; (): unchanged.

    A device function is changed for every kernel of the cubin that calls it. The result is read again: only the chosen
    slots may differ, only the chosen waits may be gone; where nvdisasm is found, it must see the same.
    Raises MutationError for a kernel that the cubin does not hold, for one without a wait, for a number that is no
    site, and where a check fails; BadCubin for what is no cubin.
    """
    found = _sites(cubin, kernel, _WAIT)
    if sites == ():
        return Mutant(cubin, (), len(found), "unchanged")
    if not found:
        raise MutationError(
            f"{kernel} has no wait (ACQBULK) to remove: neither its code nor a device function holds one"
        )
    chosen = sorted(set(range(len(found)) if sites is None else sites))
    if chosen[0] < 0 or chosen[-1] >= len(found):
        raise MutationError(f"{kernel} has the wait sites 0 to {len(found) - 1}; {sites} names another")
    removed = tuple(found[index][0] for index in chosen)
    code = bytearray(cubin)
    for index in chosen:
        site, at = found[index]
        slot = int.from_bytes(cubin[at : at + SLOT], "little")
        if slot & _OPERANDS or slot & _SCOREBOARDS != _SCOREBOARDS:
            raise MutationError(
                f"the wait at {site.function}+{site.offset:#x} is encoded {slot:#034x}: operands or a scoreboard are "
                "set, which no known compiler does; what a NOP would do with them is not known"
            )
        code[at : at + SLOT] = (slot & ~_OPCODE | _NOP).to_bytes(SLOT, "little")
    made = bytes(code)
    check_slots(cubin, made, kernel, removed)
    checked = _disassembler_agrees(cubin, made, kernel, removed)
    if any(has_capsule(cubin, function.name) for function in _reach(cubin, kernel)):
        checked += "; a second form of the kernel in the cubin (.nv.capmerc) is unchanged"
    return Mutant(made, removed, len(found) - len(removed), checked)


def check_slots(before: bytes, after: bytes, kernel: str, removed: tuple[Site, ...]) -> None:
    """Raises MutationError unless `after` is `before` with exactly the waits `removed` made NOPs."""
    waits = _sites(before, kernel, _WAIT)
    restored = bytearray(after)
    for site, at in waits:
        if site in removed:
            old, new = (int.from_bytes(code[at : at + SLOT], "little") for code in (before, after))
            if new & _OPCODE != _NOP or new & ~_OPCODE != old & ~_OPCODE:
                raise MutationError(f"{site.function}+{site.offset:#x} was to become a NOP and is {new:#034x}")
            restored[at : at + SLOT] = before[at : at + SLOT]
    if restored != before:
        raise MutationError(f"the mutant of {kernel} differs from the original outside the waits that were removed")
    if wait_sites(after, kernel) != tuple(site for site, _ in waits if site not in removed):
        raise MutationError(f"the mutant of {kernel} does not have the waits that it should still have")


def check_listings(before: dict[str, Any], after: dict[str, Any], removed: tuple[Site, ...]) -> None:
    """Raises MutationError unless two listings by nvdisasm differ in `removed` alone: there ACQBULK became NOP.

    A listing: the instructions of each function by the function's name, each a dict with `opcode`, and with
    `predicate`, `operands` and `other-attributes` where it has them.
    """
    if before.keys() != after.keys() or any(len(before[name]) != len(after[name]) for name in before):
        raise MutationError("nvdisasm sees other functions, or longer or shorter ones, in the mutant")
    changes = {
        (name, index * SLOT): (old, new)
        for name in before
        for index, (old, new) in enumerate(zip(before[name], after[name], strict=True))
        if old != new
    }
    wanted = {(site.function, site.offset): site for site in removed}
    for function, offset in sorted(changes.keys() | wanted.keys()):
        old, new = changes.get((function, offset), ({}, {}))
        is_removal = (old.get("opcode"), new.get("opcode")) == ("ACQBULK", "NOP") and not new.get("operands")
        same_guard = old.get("predicate", "") == new.get("predicate", "")
        if (function, offset) not in wanted or not is_removal or not same_guard:
            raise MutationError(
                f"nvdisasm disagrees at {function}+{offset:#x}: {_text(old)} became {_text(new)}, "
                f"expected {'ACQBULK to become NOP' if (function, offset) in wanted else 'no change'}"
            )


def _text(instruction: dict[str, Any]) -> str:
    return " ".join(
        filter(None, (str(instruction.get("predicate", "")), str(instruction.get("opcode", "nothing new"))))
    )


def _reach(cubin: bytes, kernel: str) -> list[Function]:
    """The kernel, then every device function."""
    every = functions(cubin)
    own = [function for function in every if function.kernel and function.name == kernel]
    if not own:
        kernels = sorted(function.name for function in every if function.kernel)
        some = ", ".join(kernels[:5]) + (f" and {len(kernels) - 5} more" if len(kernels) > 5 else "")
        raise MutationError(f"the kernel {kernel} is not in the cubin, which holds {some or 'none'}")
    return own + [function for function in every if not function.kernel]


def _sites(cubin: bytes, kernel: str, opcode: int) -> list[tuple[Site, int]]:
    """The sites of an opcode, each with the place of its slot in the file."""
    found = []
    for function in _reach(cubin, kernel):
        for offset in range(0, function.size - SLOT + 1, SLOT):
            at = function.offset + offset
            word = cubin[at] | cubin[at + 1] << 8
            if word & _OPCODE == opcode:
                found.append((Site(function.name, offset, _predicate(word >> 12)), at))
    return found


def _predicate(bits: int) -> str:
    if bits == 7:
        return ""
    return f"@{'!' if bits & 8 else ''}P{'T' if bits & 7 == 7 else bits & 7}"


# --- the second opinion -----------------------------------------------------------------------------------------------


def _disassembler_agrees(before: bytes, after: bytes, kernel: str, removed: tuple[Site, ...]) -> str:
    """By what the mutant was checked. Raises MutationError where nvdisasm reads it otherwise."""
    program = find_tool("nvdisasm")
    if program is None:
        return "nvdisasm not found: checked by the slot reader only"
    reach = _reach(before, kernel)
    symbols = tuple(function.symbol for function in reach if function.symbol is not None)
    # Without an index for each function, everything is listed: slow for a large cubin, but whole.
    chosen = symbols if len(symbols) == len(reach) else ()
    try:
        version, old = _listing(program, before, chosen)
    except _Failed as error:
        return f"nvdisasm cannot read the unchanged cubin ({error}): checked by the slot reader only"
    try:
        _, new = _listing(program, after, chosen)
    except _Failed as error:
        raise MutationError(f"nvdisasm reads {kernel}, but not the mutant: {error}") from None
    for site in removed:
        if site.function not in old:
            raise MutationError(f"nvdisasm does not list {site.function}, which holds a wait")
    check_listings(old, new, removed)
    return f"checked by nvdisasm {version}"


class _Failed(Exception):
    """nvdisasm gave no listing; the text says why."""


@functools.lru_cache(maxsize=2)  # one cubin is mutated once for each of its sites: list the original once
def _listing(program: str, cubin: bytes, symbols: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """nvdisasm's version and its listing of the functions with these symbols (none: of all)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.cubin"
        path.write_bytes(cubin)
        # -ndf: no analysis of branch targets, which the comparison does not need and which can fail.
        command = [program, "-json", "-ndf", *(["-fun", ",".join(map(str, symbols))] if symbols else []), str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
        except subprocess.TimeoutExpired:
            raise _Failed(f"no answer within {TIME_LIMIT:.0f} s") from None
        except OSError as error:
            raise _Failed(f"it does not run: {error.strerror}") from None
    errors = [line for line in done.stderr.splitlines() if "warning" not in line]
    if done.returncode or errors:
        raise _Failed(errors[0].replace(str(path), "the cubin") if errors else f"exit code {done.returncode}")
    try:
        head, listed = json.loads(done.stdout)
        names = {function["function-name"]: function["sass-instructions"] for function in listed}
        version = re.search(r"V(\d+\.\d+)", head["Producer"])
    except (ValueError, KeyError, TypeError):
        raise _Failed("its answer is not the listing that was expected") from None
    return version[1] if version else "of unknown version", names
