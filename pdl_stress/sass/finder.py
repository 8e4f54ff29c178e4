"""Finds the machine code of a kernel that is known by name: in what it was given, then in what the process has loaded.

A kernel of a library that nvcc built has its mangled name in the host's read-only data, where it is registered from,
also if the fat binary is compressed and the file stripped. So a mapped file is worth asking cuobjdump about if, and
only if, it has a fat binary and the name stands outside of it.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pdl_stress.sass.cubin import BadCubin, architecture, functions
from pdl_stress.sass.fatbin import CodeNotFound, executed_code, extract

__all__ = ["CodeFinder", "CodeNotFound", "Found", "architectures"]

_MAPS = Path("/proc/self/maps")
_FAT_BINARY = b"\x50\xed\x55\xba"
_FAT_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_Given = tuple[tuple[bytes | Path, ...], str]  # the codes of one added object, and how a report calls it


@dataclass(frozen=True)
class Found:
    """A cubin that holds the kernel. origin: where it is from, for a report: `tinygemm2.so`, `given cubin`."""

    code: bytes
    origin: str


def architectures(arch: str) -> tuple[str, ...]:
    """The architectures whose cubins a device runs, most specific first. arch: of the device, `sm_103` for 10.3.

    CUDA's rules: `sm_103a` runs on 10.3 alone; `f` (from 10.0 on) and plain ones on the same major number and an equal
    or greater minor one. Raises ValueError for what is no architecture.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
    if match is None:
        raise ValueError(f"arch={arch!r}: expected 'sm_90' for compute capability 9.0, 'sm_103' for 10.3")
    major, minor = int(match[1]), int(match[2])
    suffixes = ("f", "") if major >= 10 else ("",)
    return (f"sm_{major}{minor}a", *(f"sm_{major}{m}{s}" for m in range(minor, -1, -1) for s in suffixes))


class CodeFinder:
    """Finds kernels' cubins. Keeps what it found, and what it did not until something was added or loaded since."""

    def __init__(self) -> None:
        self._added: list[Any] = []
        self._found: dict[tuple[str, str], Found] = {}
        self._missed: dict[tuple[str, str], tuple[object, str]] = {}

    def add(self, obj: Any) -> None:
        """Look into `obj` first, and before all that was added earlier.

        obj: a cubin or fat binary as bytes; the path of a cubin, a fat binary or a library; an object whose `code` is
        one of these (cuda.core's ObjectCode); or a compiled Triton kernel or a Triton JITFunction, whose caches are
        read at each `find`. Raises CodeNotFound for a path that is no file, BadCubin for bytes that are neither kind,
        TypeError for anything else.
        """
        if isinstance(code := getattr(obj, "code", None), bytes | str | Path):
            obj = code
        if isinstance(obj, bytes | bytearray | memoryview):
            obj = bytes(obj)
            if not obj.startswith(_FAT_BINARY):
                architecture(obj)
        elif isinstance(obj, str | Path):
            obj = Path(obj)
            if not os.path.isfile(obj):  # unlike Path's, it takes any text, PTX for one
                raise CodeNotFound(f"{obj.name} is no file")
        elif not _is_triton(obj):
            raise TypeError(
                f"a {type(obj).__name__} holds no machine code; add bytes, a path, an object with .code, or a "
                "Triton kernel"
            )
        self._added.insert(0, obj)
        self._found.clear()

    def find(self, kernel: str, arch: str) -> Found:
        """The cubin that holds `kernel` (a mangled name) and runs on `arch` (a device's: `sm_90`, `sm_103`).

        Of the added objects the first that has it. Of the mapped files all are asked, and must agree.
        Raises CodeNotFound, which says where it looked and what it met there; ValueError for what is no architecture.
        """
        key = (kernel, arch)
        if key in self._found:
            return self._found[key]
        given, mapped = list(self._given()), _mapped_files()
        state = (sum(len(sources) for sources, _ in given), mapped)
        if key in self._missed and self._missed[key][0] == state:
            raise CodeNotFound(self._missed[key][1])
        try:
            found = self._search(kernel, arch, given, mapped)
        except CodeNotFound as error:
            self._missed[key] = (state, str(error))
            raise
        self._found[key] = found
        return found

    def _search(self, kernel: str, arch: str, given: list[_Given], mapped: tuple[Path, ...]) -> Found:
        archs, reasons = architectures(arch), []
        for sources, origin in given:
            variants: dict[Any, bytes] = {}
            for source in sources:
                try:
                    code = _from_given(source, origin, kernel, archs)
                    variants[executed_code(code, kernel)] = code
                except CodeNotFound as error:
                    reasons.append(str(error))
            if len(variants) == 1:
                return Found(variants.popitem()[1], origin)
            if variants:
                reasons.append(f"{origin} holds it in {len(variants)} variants: add the compiled kernel that runs")
        found: list[Found] = []
        for path in mapped:
            state = _state(path)
            if _names_kernel(path, kernel.encode(), state):
                try:
                    found.append(Found(_extracted(path, kernel, archs, state), path.name))
                except CodeNotFound as error:
                    reasons.append(str(error))
        if len({executed_code(one.code, kernel) for one in found}) > 1:
            names = ", ".join(one.origin for one in found)
            raise CodeNotFound(f"{kernel} is in several loaded files, and differs: {names}; add the one that runs")
        if found:
            return found[0]
        where = f"what was added ({len(given)}) and the loaded files ({len(mapped)})"
        why = "; ".join(dict.fromkeys(reasons)) or "none of them names it"
        raise CodeNotFound(f"no machine code of {kernel} for {arch}; looked into {where}: {why}")

    def _given(self) -> Iterator[_Given]:
        """What was added, Triton kernels as the cubins that they have by now."""
        for obj in self._added:
            if isinstance(obj, bytes):
                yield (obj,), "given fat binary" if obj.startswith(_FAT_BINARY) else "given cubin"
            elif isinstance(obj, Path):
                yield (obj,), obj.name
            else:
                yield tuple(_triton_cubins(obj)), "given Triton kernel"


def _from_given(source: bytes | Path, origin: str, kernel: str, archs: tuple[str, ...]) -> bytes:
    """The cubin in an added object. Raises CodeNotFound."""
    if isinstance(source, Path):
        try:
            with source.open("rb") as file:
                head = file.read(0x14)
        except OSError as error:
            raise CodeNotFound(f"{origin} cannot be read: {error.strerror}") from None
        if head[:4] != b"\x7fELF" or int.from_bytes(head[0x12:0x14], "little") != 190:
            return extract(source, kernel, archs)
        source = source.read_bytes()
    elif source.startswith(_FAT_BINARY):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / origin
            path.write_bytes(source)
            return extract(path, kernel, archs)
    try:
        made_for, kernels = architecture(source), {function.name for function in functions(source) if function.kernel}
    except BadCubin as error:
        raise CodeNotFound(f"{origin}: {error}") from None
    if kernel not in kernels:
        raise CodeNotFound(f"{origin} does not hold it")
    if made_for not in archs:
        raise CodeNotFound(f"{origin} holds it for {made_for}")
    return source


# --- loaded files -----------------------------------------------------------------------------------------------------


def _mapped_files() -> tuple[Path, ...]:
    """The files that this process has mapped to execute; none where the system does not tell."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ()
    fields = (line.split(maxsplit=5) for line in lines)
    names = dict.fromkeys(f[5] for f in fields if len(f) == 6 and "x" in f[1] and f[5].startswith("/"))
    return tuple(Path(name) for name in names if not name.endswith(" (deleted)"))


def _state(path: Path) -> tuple[int, ...]:
    """Tells a file from one that took its place; empty where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


# Once for a process and not for each finder: reading gigabytes of libraries is most of what a search costs.


@lru_cache(maxsize=64)
def _extracted(path: Path, kernel: str, archs: tuple[str, ...], state: tuple[int, ...]) -> bytes:
    return extract(path, kernel, archs)


@lru_cache(maxsize=4096)
def _names_kernel(path: Path, name: bytes, state: tuple[int, ...]) -> bool:
    """Whether a library or executable has a fat binary, and `name` outside of it.

    As the end of a string: linkers store "one" as the end of "none". Asking cuobjdump once in vain does no harm.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _outside_fat_binary(data, name + b"\0")
    except (OSError, ValueError):  # not readable, not a plain file, or empty
        return False


def _outside_fat_binary(data: mmap.mmap, name: bytes) -> bool:
    if data[:6] != b"\x7fELF\x02\x01":
        return False

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    table, entry, count, names_index = number(0x28, 8), number(0x3A, 2), number(0x3C, 2), number(0x3E, 2)
    if count == 0 or table + entry * count > len(data):
        return data.find(_FAT_BINARY) >= 0 and data.find(name) >= 0  # no section table: read it all
    headers = [table + entry * index for index in range(count)]
    names = number(headers[min(names_index, count - 1)] + 0x18, 8)
    fat = []
    for header in headers:
        at = names + number(header, 4)
        if data[at : at + 16].split(b"\0")[0] in _FAT_SECTIONS:
            fat.append((number(header + 0x18, 8), number(header + 0x20, 8)))
    if not fat:
        return False
    start = 0
    for offset, size in sorted(fat):  # compressed code is most of a library: leave it out
        if data.find(name, start, offset) >= 0:
            return True
        start = offset + size
    return data.find(name, start) >= 0


# --- Triton, by its shape: it need not be installed -------------------------------------------------------------------


def _is_triton(obj: Any) -> bool:
    return any(hasattr(obj, name) for name in ("asm", "device_caches", "cache", "fn"))


def _triton_cubins(obj: Any, depth: int = 6) -> Iterator[bytes]:
    """The cubins of a compiled kernel (`asm["cubin"]`), or of all that a JITFunction has compiled so far.

    A JITFunction keeps compiled kernels in `device_caches` (3.2 and newer) or `cache`, by device and signature, in
    dicts and tuples. Wrappers such as an Autotuner hold it as `fn`.
    """
    if isinstance(obj, dict):
        children = list(obj.values())
    elif isinstance(obj, tuple | list):
        children = list(obj)
    else:
        asm: Any = getattr(obj, "asm", None)
        code = asm.get("cubin") if hasattr(asm, "get") else None
        if isinstance(code, bytes):
            yield code
            return
        children = [getattr(obj, name, None) for name in ("device_caches", "cache", "fn")]
    if depth:
        for child in children:
            if child is not None and not isinstance(child, str | bytes | int):
                yield from _triton_cubins(child, depth - 1)
