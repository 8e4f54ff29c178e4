"""What a native kernel's machine code holds of PDL, and whether that is what its behaviour says. No GPU.

Compilers undo and add things; a control whose fault was compiled away proves nothing. `verify` compares the machine
code of a variant with what its behaviour says.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusions.ops.native import Behaviour
from fusions.ops.native import code as native
from pdl_stress.sass.cubin import OPCODES, Instruction, instructions, text_sections

_MANY = 1 << 30


class SassMismatch(AssertionError):
    """The compiler undid or added something: the machine code of a variant is not what its behaviour says.

    Do not use the variant; compile with another NVRTC, or mend the source's marked points.
    """


@dataclass(frozen=True)
class PdlCensus:
    """How often the instructions that matter to PDL stand in a kernel's code (not: how often they run).

    Loads and stores are the global ones, TMA apart. *Before* and *after* speak of offsets relative to the first wait or
    trigger; where there is none, everything counts as before. Offset order is path order only in straight code.
    """

    waits: int
    predicated_waits: int
    triggers: int
    triggers_before_wait: int
    fences: int
    fences_before_trigger: int
    loads_before_wait: int
    loads_after_wait: int
    stores_before_trigger: int
    stores_after_trigger: int
    tma_loads: int


def pdl_census(cubin: bytes) -> PdlCensus:
    """The census of a cubin that holds one kernel. Raises ValueError for none or several."""
    if len(text_sections(cubin)) != 1:
        raise ValueError(f"expected a cubin with one kernel, found {sorted(text_sections(cubin))}")
    at: dict[str, list[Instruction]] = {name: [] for name in OPCODES.values()}
    for instruction in instructions(cubin):
        at.setdefault(instruction.opcode, []).append(instruction)

    def before(name: str, first: str) -> int:
        limit = at[first][0].offset if at[first] else float("inf")
        return sum(instruction.offset < limit for instruction in at[name])

    return PdlCensus(
        waits=len(at["ACQBULK"]),
        predicated_waits=sum(instruction.predicated for instruction in at["ACQBULK"]),
        triggers=len(at["PREEXIT"]),
        triggers_before_wait=before("PREEXIT", "ACQBULK"),
        fences=len(at["MEMBAR"]),
        fences_before_trigger=before("MEMBAR", "PREEXIT"),
        loads_before_wait=before("LDG", "ACQBULK"),
        loads_after_wait=len(at["LDG"]) - before("LDG", "ACQBULK"),
        stores_before_trigger=before("STG", "PREEXIT"),
        stores_after_trigger=len(at["STG"]) - before("STG", "PREEXIT"),
        tma_loads=len(at["UTMALDG"]),
    )


def expected_census(kernel: str, behaviour: Behaviour) -> dict[str, range]:
    """What the census of a variant may be, by field: those fields whose value follows from the behaviour.

    Not covered, because offset order says nothing there: whether tinygemm2's TMA loads of x come after the wait, and
    that the barrier of `barrier` stands behind the wait.
    """
    native.validate(kernel, behaviour)
    none, some, many = range(1), range(1, _MANY), range(_MANY)
    expected = {"waits": _exactly(_wait_sites(kernel, behaviour)), "tma_loads": some if kernel == "tinygemm2" else none}
    if behaviour.wait in ("all", "loaders", "late"):
        expected["predicated_waits"] = none

    expected["triggers"] = none if behaviour.trigger == "none" else _exactly(1)
    if behaviour.wait != "never":
        expected["triggers_before_wait"] = _exactly(1) if behaviour.trigger == "entry" else none
    if behaviour.trigger != "none":
        late = behaviour.trigger == "after_stores"
        expected["stores_before_trigger"] = some if late else none
        expected["stores_after_trigger"] = none if late else some
    expected["fences"] = some if behaviour.fence else none
    expected["fences_before_trigger"] = some if behaviour.fence else many

    if kernel != "tinygemm2" and behaviour.wait != "never":
        expected["loads_before_wait"] = some if behaviour.wait == "late" else none
        expected["loads_after_wait"] = some
    if kernel == "tinygemm2" and not behaviour.early_weights:
        expected["loads_before_wait"] = none
    return expected


def _wait_sites(kernel: str, behaviour: Behaviour) -> int:
    """How many waits the source holds: one for x; two more where other warps wait for the weights and the bias."""
    if behaviour.wait == "never":
        return 0
    if kernel != "tinygemm2" or behaviour.wait in ("barrier", "one_warp"):
        return 1
    early_all = behaviour.wait == "all" and behaviour.early_weights
    late_weights = behaviour.wait in ("loaders", "branch", "late") and not behaviour.early_weights
    return 3 if early_all or late_weights else 1


def verify(kernel: str, behaviour: Behaviour, arch: str = "sm_90a") -> PdlCensus:
    """The census of a variant's machine code. Raises SassMismatch where it is not what the behaviour says."""
    census = pdl_census(native.cubin(kernel, behaviour, arch))
    check(census, expected_census(kernel, behaviour), f"{kernel} {behaviour} for {arch}")
    return census


def check(census: PdlCensus, expected: dict[str, range], what: str) -> None:
    """Raises SassMismatch, which lists every field of `census` that is not as expected."""
    wrong = [
        f"{field} is {getattr(census, field)}, expected {allowed.start}{'' if len(allowed) == 1 else ' or more'}"
        for field, allowed in expected.items()
        if getattr(census, field) not in allowed
    ]
    if wrong:
        raise SassMismatch(f"{what}: the machine code is not what the behaviour says: {'; '.join(wrong)}")


def _exactly(count: int) -> range:
    return range(count, count + 1)
