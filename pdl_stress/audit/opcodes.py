"""What SASS opcodes do, as far as the audit needs it: which registers they write, which memory they touch, what waits.

Read from what NVRTC and nvcc 12.8 to 13.5 make for sm_90 to sm_121 and from the opcode tables in the CUDA Binary
Utilities manual. What is not known here is taken to write more registers, never fewer.
"""

from __future__ import annotations

import re
from enum import StrEnum

from pdl_stress.audit.listing import Instruction
from pdl_stress.audit.operands import following, parse

WAIT, TRIGGER = "ACQBULK", "PREEXIT"

CLUSTER_ARRIVE, CLUSTER_WAIT = "UCGABAR_ARV", "UCGABAR_WAIT"
WARP_JOINS = {"BSYNC", "WARPSYNC"}
"""They hold the threads of a warp until all that take part have arrived."""
FENCES = {"MEMBAR"}


class Access(StrEnum):
    READ = "read"
    WRITE = "write"
    UPDATE = "update"
    """Read and written in one: atomics and reductions."""


class Proxy(StrEnum):
    """How an access reaches global memory."""

    GLOBAL = "global"
    GENERIC = "generic"
    """The address may as well be one of shared or local memory."""
    ASYNC = "async"
    """A bulk or tensor copy (TMA), made by a unit of its own."""


_ACCESSES: dict[str, tuple[Access, Proxy, int]] = {
    # opcode: what it does, how, and which of its memory operands is the global one
    "LDG": (Access.READ, Proxy.GLOBAL, 0),
    "STG": (Access.WRITE, Proxy.GLOBAL, 0),
    "LD": (Access.READ, Proxy.GENERIC, 0),
    "ST": (Access.WRITE, Proxy.GENERIC, 0),
    "ATOM": (Access.UPDATE, Proxy.GENERIC, 0),
    "ATOMG": (Access.UPDATE, Proxy.GLOBAL, 0),
    "RED": (Access.UPDATE, Proxy.GENERIC, 0),
    "REDG": (Access.UPDATE, Proxy.GLOBAL, 0),
    "LDGSTS": (Access.READ, Proxy.GLOBAL, 1),
    "LDGMC": (Access.READ, Proxy.GLOBAL, 0),
    "UTMALDG": (Access.READ, Proxy.ASYNC, 1),
    "UTMASTG": (Access.WRITE, Proxy.ASYNC, 1),
    "UTMAREDG": (Access.UPDATE, Proxy.ASYNC, 1),
    "UBLKRED": (Access.UPDATE, Proxy.ASYNC, 0),
    "SULD": (Access.READ, Proxy.GLOBAL, -1),
    "SUST": (Access.WRITE, Proxy.GLOBAL, -1),
    "SUATOM": (Access.UPDATE, Proxy.GLOBAL, -1),
    "SURED": (Access.UPDATE, Proxy.GLOBAL, -1),
    "TEX": (Access.READ, Proxy.GLOBAL, -1),
    "TLD": (Access.READ, Proxy.GLOBAL, -1),
    "TLD4": (Access.READ, Proxy.GLOBAL, -1),
}

_NO_DATA = {"CCTL", "CCTLL", "CCTLT", "UTMACCTL", "UTMAPF", "UBLKPF", "CCTLP", "PREFETCH"}
_PURE_SHARED = {"LDS", "LDSM", "STS", "STSM", "STAS", "ATOMS", "LDL", "STL"}
_NO_RESULT = {
    *(
        "ST",
        "STG",
        "STS",
        "STL",
        "STSM",
        "STAS",
        "RED",
        "REDG",
        "LDGSTS",
        "BAR",
        "BRA",
        "EXIT",
        "BSSY",
        "BSYNC",
        "WARPSYNC",
    ),
    *("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED", "UBLKPF", "UTMACCTL", "UTMAPF", "CCTL", "MEMBAR"),
    *("BRX", "BRXU", "JMP", "JMX", "JMXU", "BREAK", "SETMAXREG", "USETMAXREG", "UTCBAR", "ARRIVES", "PMTRIG", "BPT"),
    *("NOP", "RET", "CALL", "DEPBAR", "ERRBAR", "FENCE", "NANOSLEEP", WAIT, TRIGGER),
}
_MATRIX = {"HMMA", "IMMA", "BMMA", "QMMA", "OMMA", "DMMA"}
_WARPGROUP = {"HGMMA", "IGMMA", "QGMMA", "BGMMA"}
_COMPARES = {"ISETP", "UISETP", "FSETP", "DSETP", "HSETP2", "PLOP3", "UPLOP3", "PSETP", "BMSK"}
_PREDICATES = tuple(f"{kind}{index}" for kind in ("P", "UP") for index in range(7))


def access(instruction: Instruction) -> tuple[Access, Proxy, str] | None:
    """What a global access does, how, and its address operand (empty where it has none); None for anything else.

    Prefetches hand no data to the thread and are none.
    """
    if never(instruction):
        return None
    base = instruction.base
    memory = [text for text in instruction.operands if parse(text).kind == "memory"]
    if base == "UBLKCP":  # .S.G: to shared from global memory; .G.S: the other way; the first operand is written
        forms = [part for part in instruction.modifiers if part in ("S", "G")]
        if "G" not in forms or len(memory) < 2:
            return None
        return (Access.WRITE, Proxy.ASYNC, memory[0]) if forms[0] == "G" else (Access.READ, Proxy.ASYNC, memory[1])
    found = _ACCESSES.get(base)
    if found is None and base not in _NO_DATA and any(text.startswith("desc[") for text in memory):
        found = (Access.UPDATE, Proxy.GLOBAL, len(memory) - 1)  # not known, but it has a global address
    if found is None:
        return None
    kind, proxy, index = found
    operand = memory[index] if 0 <= index < len(memory) else (memory[-1] if memory and index >= 0 else "")
    return kind, proxy, operand


def never(instruction: Instruction) -> bool:
    """Whether its guard is false always: compilers pad with `@!PT`."""
    return instruction.guard in ("!PT", "!UPT")


def written(instruction: Instruction) -> list[str]:
    """The registers and predicates that it may write, the main result first."""
    base = instruction.base
    if base in _NO_RESULT or not instruction.operands or never(instruction):
        return []
    if base in ("R2P", "UR2P"):
        return list(_PREDICATES)
    first = parse(instruction.operands[0])
    if first.kind not in ("register", "predicate"):
        return []
    names = _registers(instruction, first.name)
    rest = [parse(text) for text in instruction.operands[1:4]]
    if first.kind == "predicate":  # P0, then one more predicate or register
        if rest and rest[0].kind in ("predicate", "register") and base not in ("FCHK", "VOTE", "VOTEU"):
            names += _registers(instruction, rest[0].name)
        elif rest and rest[0].kind == "predicate" and len(instruction.operands) > 2:
            names += [rest[0].name]
    else:
        if "ENL2" in instruction.modifiers and rest and rest[0].kind == "register":
            names += _registers(instruction, rest[0].name)
            rest = rest[1:]
        for operand in rest[: 1 if base in ("VOTE", "VOTEU", "SEL", "USEL") else 2]:
            if operand.kind != "predicate" or operand.negative or base in ("SEL", "USEL", "FSEL"):
                break
            names.append(operand.name)
    return [name for name in dict.fromkeys(names) if name not in ("RZ", "URZ", "PT", "UPT")]


def _registers(instruction: Instruction, name: str) -> list[str]:
    if name[-1] == "T" or name.lstrip("U").startswith("P"):
        return [name]
    return following(name, _width(instruction))


def _width(instruction: Instruction) -> int:
    """How many registers the result takes, at most."""
    base, parts = instruction.base, instruction.modifiers
    if base in _WARPGROUP:
        match = re.search(r"x(\d+)x", instruction.opcode)
        return max(4, int(match[1]) // 2) if match else 128
    if base in ("LDTM", "UTCLD"):
        match = re.search(r"x(\d+)$", instruction.opcode)
        return int(match[1]) * 4 if match and int(match[1]) <= 32 else 128
    if base in _MATRIX:
        return 8 if base == "DMMA" else 4
    if "256" in parts:
        return 4 if "ENL2" in parts else 8
    if "128" in parts or (base in ("LDSM", "TEX", "TLD", "TLD4", "SULD") and not {"1", "2"} & set(parts)):
        return 4
    if base == "CS2R":
        return 1 if "32" in parts else 2
    if base in ("SHF", "USHF"):  # its type is that of the pair that it shifts
        return 1
    wide = base[0] == "D" or base in ("FADD2", "FMUL2", "FFMA2")
    return 2 if wide or any("64" in part or part == "WIDE" for part in parts) or "2" in parts else 1


def is_load_of_state(instruction: Instruction) -> bool:
    """Whether its result is more than a function of its operands: memory, clocks, other lanes."""
    base = instruction.base
    if base in _PURE_SHARED or access(instruction) is not None:
        return True
    return base in (
        *(
            "SHFL",
            "VOTE",
            "VOTEU",
            "MATCH",
            "REDUX",
            "CREDUX",
            "SYNCS",
            "USYNCS",
            "S2R",
            "S2UR",
            "CS2R",
            "CS2UR",
            "ELECT",
        ),
        *("LDTM", "NANOTRAP", "QSPC", "LEPC", "BMOV", "B2R", "GETLMEMBASE", "UTCATOMSWS", "R2P"),
    )
