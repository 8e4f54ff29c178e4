"""Takes a kernel's cubin out of a library, an executable, an object file or a fat binary, with cuobjdump.

Facts about cuobjdump 13.5 that this relies on: `-arch` limits `-symbols` and `-xelf` to one architecture's number
(sm_90 and sm_90a alike), and only those cubins are decompressed, at some 500 MB/s; the files of `-xelf` are numbered
in the order of `-symbols`, as `<name of the input>.<number>.<architecture>.cubin`, and a part of that name chooses one;
`-fun` limits neither. So one pass lists which cubins hold the kernel, and a second one writes only these.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from pdl_stress.errors import PdlStressError
from pdl_stress.sass import cubin as reader
from pdl_stress.sass.tools import WHEELS, find_tool

TIME_LIMIT = 120.0  # seconds for one run of cuobjdump

_INPUT = "code"  # the name under which cuobjdump sees the file: it names its output by it


class CodeNotFound(PdlStressError):
    """No machine code of the kernel was found; the text says where it was looked for and why that gave nothing."""


@dataclass
class _Entry:
    """A cubin as cuobjdump lists it: its number, its architecture by the fat binary's header, the kernels in it."""

    number: int
    arch: str
    kernels: set[str] = field(default_factory=set)


def extract(path: str | Path, kernel: str, archs: tuple[str, ...], *, time_limit: float = TIME_LIMIT) -> bytes:
    """The cubin in `path` that holds `kernel` (a mangled name), for the first of `archs` that has it.

    archs: names as tools write them, such as `sm_90a`; a cubin for `sm_100f` goes by `sm_100`. time_limit: seconds for
    each run of cuobjdump. Where several cubins of one architecture hold the kernel with the same code, gives the first.

    Raises CodeNotFound: no cuobjdump; no such file; no device code in it; only PTX for these architectures; the kernel
    in no cubin; in several that differ; in one that was not linked; or cuobjdump failed or took too long.
    """
    path = Path(path)
    program = find_tool("cuobjdump")
    if program is None:
        raise CodeNotFound(
            f"cuobjdump, which takes cubins out of {path.name}, is not found: pip install {WHEELS['cuobjdump']}"
        )
    if not path.is_file():
        raise CodeNotFound(f"{path.name} is no file")
    with tempfile.TemporaryDirectory() as folder:
        # A plain name without an extension: a comma in the real one would split the list that -xelf takes.
        (Path(folder) / _INPUT).symlink_to(path.resolve())
        tool = _Cuobjdump(program, Path(folder), path.name, time_limit)
        listed: list[_Entry] = []
        holding: dict[str, list[bytes]] = {}
        for arch in archs:
            number = arch.rstrip("af")
            if number not in holding:
                entries = tool.entries(number)
                listed += entries
                holding[number] = tool.cubins(number, [entry.number for entry in entries if kernel in entry.kernels])
            try:
                cubins = [code for code in holding[number] if reader.architecture(code) == arch]
                if cubins:
                    return _one(cubins, kernel, arch, path.name)
            except reader.BadCubin as error:
                raise CodeNotFound(f"the cubin in {path.name} that holds {kernel} is not understood: {error}") from None
        raise CodeNotFound(_why_not(tool, kernel, archs, listed))


def _one(cubins: list[bytes], kernel: str, arch: str, name: str) -> bytes:
    """The cubin to take of those that hold the kernel for one architecture."""
    linked = [code for code in cubins if not reader.is_relocatable(code)]
    if not linked:
        raise CodeNotFound(
            f"{name} holds {kernel} for {arch} only to be linked (-rdc=true): take it from the linked file"
        )
    if len({executed_code(code, kernel) for code in linked}) > 1:
        raise CodeNotFound(
            f"{name} holds {kernel} in {len(linked)} cubins for {arch} that differ, and which of them runs is not "
            "known: give the cubin itself"
        )
    return linked[0]


def executed_code(code: bytes, kernel: str) -> tuple[tuple[str, bytes], ...]:
    """The code that the kernel can execute: its own, and that of device functions. May raise BadCubin."""
    texts = reader.text_sections(code)
    return tuple((f.name, texts[f.name]) for f in reader.functions(code) if f.name == kernel or not f.kernel)


def _why_not(tool: _Cuobjdump, kernel: str, archs: tuple[str, ...], listed: list[_Entry]) -> str:
    """The reason for having found nothing."""
    wanted = " or ".join(archs)
    if tool.unknown >= {arch.rstrip("af") for arch in archs}:
        return f"this cuobjdump does not know {wanted}: pip install --upgrade {WHEELS['cuobjdump']}"
    usable = [entry for entry in listed if entry.arch in archs]
    newest = max(_number(arch) for arch in archs)
    ptx = [n for n in tool.names("-lptx") if n in archs or (not n.endswith("a") and _number(n) <= newest)]
    if usable:
        also = "; another part of the file is PTX, which the driver compiles" if ptx else ""
        return f"{tool.name}: {kernel} is in none of its {len(usable)} cubins for {wanted}{also}"
    if ptx:
        return (
            f"{tool.name} has only PTX ({', '.join(dict.fromkeys(ptx))}) for {wanted}: the driver compiles it, and "
            f"there is no cubin to change; build it for {archs[0]}"
        )
    others = ", ".join(dict.fromkeys(tool.names("-lelf"))) or "none"
    return f"{tool.name} has no cubin for {wanted}; it has cubins for: {others}"


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))


@dataclass
class _Cuobjdump:
    """Runs cuobjdump on one file. name: how messages call the file. unknown: architectures that the tool refused."""

    program: str
    folder: Path
    name: str
    time_limit: float
    unknown: set[str] = field(default_factory=set)

    def entries(self, number: str) -> list[_Entry]:
        """The cubins for an architecture's number (`sm_90`: sm_90 and sm_90a), with their kernels."""
        found: list[_Entry] = []
        is_cubin = False
        for line in self._run("-arch", number, "-symbols").splitlines():
            words = line.split()
            if line.startswith("Fatbin "):
                is_cubin = line.startswith("Fatbin elf")
            elif is_cubin and words[:2] == ["arch", "="]:
                found.append(_Entry(len(found) + 1, words[2]))
            elif is_cubin and found and len(words) > 3 and words[0].endswith("FUNC") and words[-2].endswith("ENTRY"):
                found[-1].kernels.add(words[-1])
        return found

    def cubins(self, number: str, entries: list[int]) -> list[bytes]:
        """The bytes of the cubins with these numbers in `entries`."""
        if not entries:
            return []
        self._run("-arch", number, "-xelf", ",".join(f"{_INPUT}.{entry}." for entry in entries))
        written = {int(path.name.split(".")[1]): path for path in self.folder.glob(f"{_INPUT}.*.cubin")}
        if not written.keys() >= set(entries):
            raise CodeNotFound(f"cuobjdump wrote other cubins of {self.name} than it had listed")
        codes = [written[entry].read_bytes() for entry in entries]
        for path in written.values():  # they are numbered anew for another architecture
            path.unlink()
        return codes

    def names(self, option: str) -> list[str]:
        """The architectures of the entries that `-lelf` or `-lptx` lists."""
        return re.findall(r"\.(sm_\w+)\.(?:cubin|ptx)$", self._run(option), re.MULTILINE)

    def _run(self, *options: str) -> str:
        command = [self.program, *options, _INPUT]
        try:
            done = subprocess.run(
                command, cwd=self.folder, capture_output=True, text=True, errors="replace", timeout=self.time_limit,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CodeNotFound(f"cuobjdump gave no answer on {self.name} within {self.time_limit:g} s") from None
        except OSError as error:
            raise CodeNotFound(f"cuobjdump does not run: {error.strerror}") from None
        if done.returncode == 0:
            return done.stdout
        if "is not defined for option" in done.stderr:  # an architecture that is older or newer than the tool
            self.unknown.add(options[1])
            return ""
        if "does not contain device code" in done.stderr or "Invalid fatbin header" in done.stderr:
            raise CodeNotFound(f"{self.name} holds no fat binary: it never had one, or it was stripped of it")
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CodeNotFound(f"cuobjdump failed on {self.name}: {lines[0].replace(str(self.folder) + '/', '')}")
