"""Cubins from what a user names: cubins, libraries with fat binaries, PTX, folders, installed packages.

Facts about cuobjdump 13.5: `-lelf` lists a file's cubins, one a line, with the architecture before `.cubin`; with
`-arch sm_90 -xelf all` it writes those for sm_90 and sm_90a into the current folder. So a library is taken apart one
architecture at a time, into a temporary folder, and one cubin at a time is held in memory.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdl_stress.errors import PdlStressError, UsageError
from pdl_stress.sass.tools import WHEELS, find_tool

TIME_LIMIT = 600.0  # seconds for one run of a tool; a library of 360 MB takes some 10
_ELF, _FAT, _ARCHIVE = b"\x7fELF", b"\x50\xed\x55\xba", b"!<arch>"
_CUDA = 190
_SUFFIXES = {".cubin", ".fatbin", ".so", ".a", ".o", ".ptx", ".exe", ""}
_HEAD = 20


class Unreadable(PdlStressError):
    """A file from which no machine code can be taken; the text says why."""


@dataclass(frozen=True)
class Source:
    """A cubin: how messages call it, and where its bytes are until the next one is asked for."""

    name: str
    path: Path

    def read(self) -> bytes:
        return self.path.read_bytes()


def files(paths: list[Path], packages: list[str]) -> list[Path]:
    """The files to look into: those named, and in folders those whose kind and content promise device code.

    Raises UsageError for a path that does not exist and a package that is not installed.
    """
    found: dict[Path, None] = {}
    for path in [*paths, *(_package(name) for name in packages)]:
        if path.is_dir():
            for inner in sorted(path.rglob("*")):
                shared = inner.suffix in _SUFFIXES or ".so." in inner.name
                if shared and inner.is_file() and _promises_code(inner):
                    found[inner] = None
        elif path.is_file():
            found[path] = None
        else:
            raise UsageError(f"{str(path)!r}: no such file or folder")
    return list(found)


def _package(name: str) -> Path:
    """The folder of an installed package, or its file; it is not imported."""
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise UsageError(f"--package {name}: no installed package of that import name; give a path instead")
    places = list(spec.submodule_search_locations or [])
    return Path(places[0] if places else str(spec.origin))


def _promises_code(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return True  # it is reported when it is read
    return head.startswith((_FAT, _ARCHIVE, _ELF)) or path.suffix in (".ptx", ".cubin", ".fatbin")


def cubins(path: Path, arch: str | None) -> Iterator[Source]:
    """The cubins of a file, one at a time; arch: only those for this architecture's number. Raises Unreadable."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from None
    if not head:
        raise Unreadable("it is empty")
    if path.suffix == ".ptx" or head.lstrip().startswith((b".version", b"//")):
        yield from _from_ptx(path, arch)
    elif head.startswith(_ELF) and int.from_bytes(head[18:20], "little") == _CUDA:
        yield Source(path.name, path)
    elif head.startswith((_ELF, _FAT, _ARCHIVE)):
        yield from _from_library(path, arch)
    else:
        raise Unreadable("it is neither a cubin, a fat binary, a library, an archive nor PTX")


def _from_library(path: Path, arch: str | None) -> Iterator[Source]:
    program = find_tool("cuobjdump")
    if program is None:
        raise Unreadable(f"cuobjdump, which takes libraries apart, is not found: pip install {WHEELS['cuobjdump']}")
    with tempfile.TemporaryDirectory() as folder:
        # A plain name: cuobjdump names its output by it, and a comma would split its list of files.
        link = Path(folder) / "code"
        link.symlink_to(path.resolve())
        listed = _run([program, "-lelf", "code"], folder, path.name)
        found = {match[1]: match[2] for match in re.finditer(r"(\S+\.(sm_\d+)[af]?\.cubin)\s*$", listed, re.MULTILINE)}
        numbers = list(dict.fromkeys(number for number in found.values() if arch in (None, number)))
        for number in numbers:
            _run([program, "-arch", number, "-xelf", "all", "code"], folder, path.name)
            for written in sorted(Path(folder).glob("*.cubin"), key=_by_number):
                yield Source(f"{path.name}:{written.name.removeprefix('code.')}", written)
                written.unlink(missing_ok=True)


def _by_number(path: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", path.name)
    return (int(digits[0]) if digits else 0, path.name)


def _from_ptx(path: Path, arch: str | None) -> Iterator[Source]:
    program = find_tool("ptxas")
    if program is None:
        raise Unreadable("it is PTX, and ptxas, which compiles it, is not found: pip install nvidia-cuda-nvcc")
    text = path.read_text(encoding="utf-8", errors="replace")
    target = re.search(r"^\s*\.target\s+(sm_\w+)", text, re.MULTILINE)
    chosen = arch or (target[1] if target else "")
    if not chosen:
        raise Unreadable("it is PTX without a .target: give --arch")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "code.cubin"
        _run([program, "-arch", chosen, "-o", str(out), str(path.resolve())], folder, path.name)
        yield Source(path.name, out)


def _run(command: list[str], folder: str, name: str) -> str:
    tool = Path(command[0]).name
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=TIME_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unreadable(f"{tool} gave no answer on {name} within {TIME_LIMIT:.0f} s") from None
    except OSError as error:
        raise Unreadable(f"{tool} does not run: {error.strerror}") from None
    if done.returncode:
        if "does not contain device code" in done.stderr or "Invalid fatbin header" in done.stderr:
            raise Unreadable("it holds no device code")
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Unreadable(f"{tool} failed: {lines[0].replace(folder + '/', '')}")
    return done.stdout
