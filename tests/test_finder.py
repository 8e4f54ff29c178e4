"""Kernels' code is found by name: in what was added, then in what the process has mapped. No GPU."""

from __future__ import annotations

import ctypes
import functools
import mmap
import shutil
import struct
import subprocess
from types import SimpleNamespace

import pytest

from fusions.ops.native import code as native
from pdl_stress.sass import finder as module
from pdl_stress.sass.cubin import BadCubin, architecture
from pdl_stress.sass.finder import CodeFinder, CodeNotFound, architectures
from pdl_stress.sass.tools import find_tool


@functools.cache
def cubin(name="one", arch="sm_90a", value=1):
    return native.compiled(f'extern "C" __global__ void {name}(int* p) {{ *p = {value}; }}', name, arch)


def fat(*codes):
    """An uncompressed fat binary of cubins."""
    body = b""
    for code in codes:
        number, data = int(architecture(code).strip("sm_af")), code + bytes(-len(code) % 8)
        body += struct.pack("<HHIQIIHHIIIQQQ", 2, 0x101, 64, len(data), 0, 0, 8, 1, number, 0, 0, 0x11, 0, 0) + data
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(strings, *codes, section=b".nv_fatbin"):
    """A shared object as far as the finder and cuobjdump look at it: read-only strings, and a fat binary's section."""
    names = b"\0.shstrtab\0.rodata\0" + section + b"\0"
    parts = [(0, 0, b""), (1, 3, names), (11, 1, strings), (19, 1, fat(*codes))]
    data, headers = bytearray(64), b""
    for name, kind, content in parts:
        data += bytes(-len(data) % 16)
        headers += struct.pack("<IIQQQQIIQQ", name, kind, 2, 0, len(data), len(content), 0, 0, 1, 0)
        data += content
    start = b"\x7fELF\x02\x01\x01" + bytes(9)
    data[:64] = start + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, len(data), 0, 64, 0, 0, 64, len(parts), 1)
    return bytes(data) + headers


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    """Writes libraries and pretends that these alone are mapped."""
    if find_tool("cuobjdump") is None:
        pytest.skip("cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)")
    maps = tmp_path / "maps"
    maps.write_text("")
    monkeypatch.setattr(module, "_MAPS", maps)

    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content)
        with maps.open("a") as file:
            file.write(f"7f00-7f10 r--p 00000000 08:01 77   {path}\n7f10-7f20 r-xp 00001000 08:01 77   {path}\n")
        return path

    return write


@pytest.fixture
def asked(monkeypatch):
    """The files that cuobjdump was asked about."""
    names, real = [], module.extract

    def extract(path, kernel, archs):
        names.append(path.name)
        return real(path, kernel, archs)

    monkeypatch.setattr(module, "extract", extract)
    return names


# --- architectures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("sm_90", ("sm_90a", "sm_90")),
        ("sm_100", ("sm_100a", "sm_100f", "sm_100")),
        ("sm_103", ("sm_103a", "sm_103f", "sm_103", "sm_102f", "sm_102", "sm_101f", "sm_101", "sm_100f", "sm_100")),
        ("sm_120", ("sm_120a", "sm_120f", "sm_120")),
        ("sm_121", ("sm_121a", "sm_121f", "sm_121", "sm_120f", "sm_120")),
        ("sm_89", ("sm_89a", *(f"sm_8{minor}" for minor in range(9, -1, -1)))),
        ("sm_90a", ("sm_90a", "sm_90")),
    ],
)
def test_the_architectures_that_a_device_runs(device, expected):
    assert architectures(device) == expected


@pytest.mark.parametrize("text", ["90", "sm_", "sm_9", "sm_90x", "compute_90"])
def test_what_is_no_architecture_is_refused(text):
    with pytest.raises(ValueError, match="expected 'sm_90'"):
        CodeFinder().find("one", text)


# --- what was added ---------------------------------------------------------------------------------------------------


def test_a_cubin_as_bytes_path_or_object_code(tmp_path):
    (tmp_path / "kernel.cubin").write_bytes(cubin())
    for obj, origin in [
        (cubin(), "given cubin"),
        (bytearray(cubin()), "given cubin"),
        (tmp_path / "kernel.cubin", "kernel.cubin"),
        (str(tmp_path / "kernel.cubin"), "kernel.cubin"),
        (SimpleNamespace(code=cubin()), "given cubin"),
        (SimpleNamespace(code=str(tmp_path / "kernel.cubin")), "kernel.cubin"),
    ]:
        finder = CodeFinder()
        finder.add(obj)
        found = finder.find("one", "sm_90")
        assert (found.code, found.origin) == (cubin(), origin)


def test_an_object_code_of_cuda_core():
    from cuda.core import ObjectCode

    finder = CodeFinder()
    finder.add(ObjectCode.from_cubin(cubin()))
    assert finder.find("one", "sm_90").code == cubin()


def test_a_fat_binary_and_a_library(mapped, tmp_path):
    path = tmp_path / "added.so"
    path.write_bytes(library(b"nothing\0", cubin(arch="sm_100a"), cubin()))
    for obj, origin in [(fat(cubin("two"), cubin()), "given fat binary"), (path, "added.so")]:
        finder = CodeFinder()
        finder.add(obj)
        found = finder.find("one", "sm_90")
        assert (found.code, found.origin) == (cubin(), origin)


def test_the_last_added_comes_first_and_added_before_mapped(mapped):
    mapped("lib.so", library(b"one\0", cubin(value=3)))
    finder = CodeFinder()
    assert finder.find("one", "sm_90").origin == "lib.so"
    finder.add(cubin(value=1))
    assert finder.find("one", "sm_90").code == cubin(value=1)
    finder.add(cubin(value=2))
    assert finder.find("one", "sm_90").code == cubin(value=2)


def test_only_what_runs_on_the_device_is_found():
    finder = CodeFinder()
    finder.add(cubin(arch="sm_90a"))
    finder.add(cubin(arch="sm_100"))
    finder.add(cubin("two"))
    assert finder.find("one", "sm_90").code == cubin(arch="sm_90a")
    assert finder.find("one", "sm_103").code == cubin(arch="sm_100")
    with pytest.raises(CodeNotFound, match=r"two.*given cubin holds it for sm_90a"):
        finder.find("two", "sm_100")


def test_a_device_function_is_no_kernel():
    from cuda.core import Program, ProgramOptions

    text = '__device__ __noinline__ void help(int* p) { *p = 1; } extern "C" __global__ void one(int* p) { help(p); }'
    code = Program(text, "c++", ProgramOptions(arch="sm_90a", relocatable_device_code=True)).compile("cubin").code
    finder = CodeFinder()
    finder.add(code)
    with pytest.raises(CodeNotFound, match="given cubin does not hold it"):
        finder.find("_Z4helpPi", "sm_90")


@pytest.mark.parametrize(
    ("obj", "error", "reason"),
    [
        (b".version 8.0\n.target sm_90", BadCubin, "not a cubin"),
        (b"", BadCubin, "not a cubin"),
        ("/nowhere/lib.so", CodeNotFound, "lib.so is no file"),
        (SimpleNamespace(code=".version 8.0\n" * 1000), CodeNotFound, "is no file"),
        (7, TypeError, "a int holds no machine code"),
        (lambda: None, TypeError, "a function holds no machine code"),
    ],
)
def test_what_cannot_be_added_is_refused(obj, error, reason):
    with pytest.raises(error, match=reason):
        CodeFinder().add(obj)


def test_a_file_that_is_gone_since_is_told(tmp_path):
    (tmp_path / "kernel.cubin").write_bytes(cubin())
    finder = CodeFinder()
    finder.add(tmp_path / "kernel.cubin")
    (tmp_path / "kernel.cubin").unlink()
    with pytest.raises(CodeNotFound, match=r"kernel\.cubin cannot be read"):
        finder.find("one", "sm_90")


# --- Triton, by its shape ---------------------------------------------------------------------------------------------


def compiled_kernel(code):
    return SimpleNamespace(asm={"ttir": "text", "cubin": code}, metadata=SimpleNamespace(name="one"))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda kernels: kernels["a"],
        lambda kernels: SimpleNamespace(device_caches={0: (kernels, {}, "target", None, 5)}, fn=print),
        lambda kernels: SimpleNamespace(cache={0: kernels}, fn=print),
        lambda kernels: SimpleNamespace(fn=SimpleNamespace(fn=SimpleNamespace(device_caches={0: (kernels,)}))),
    ],
    ids=["compiled", "device_caches", "cache", "autotuned"],
)
def test_triton_kernels(wrap):
    finder = CodeFinder()
    finder.add(wrap({"a": compiled_kernel(cubin())}))
    found = finder.find("one", "sm_90")
    assert (found.code, found.origin) == (cubin(), "given Triton kernel")


def test_a_jit_function_is_read_when_asked_and_its_variants_are_not_guessed_among():
    kernels, finder = {}, CodeFinder()
    finder.add(SimpleNamespace(device_caches={0: (kernels,)}))
    with pytest.raises(CodeNotFound, match="none of them names it"):
        finder.find("one", "sm_90")
    kernels["a"] = compiled_kernel(cubin())
    assert finder.find("one", "sm_90").code == cubin()

    kernels["b"] = compiled_kernel(cubin(value=2))
    finder.add(cubin("other"))
    with pytest.raises(CodeNotFound, match="2 variants: add the compiled kernel that runs"):
        finder.find("one", "sm_90")
    finder.add(kernels["b"])
    assert finder.find("one", "sm_90").code == cubin(value=2)


def test_a_cache_that_holds_itself_ends():
    kernels = {}
    kernels["a"] = kernels
    finder = CodeFinder()
    finder.add(SimpleNamespace(cache=kernels))
    with pytest.raises(CodeNotFound):
        finder.find("one", "sm_90")


# --- what is mapped ---------------------------------------------------------------------------------------------------


def test_only_mapped_libraries_that_name_the_kernel_outside_their_fat_binary_are_asked(mapped, asked):
    mapped("unnamed.so", library(b"two\0", cubin()))
    mapped("host.so", library(b"one\0", cubin(), section=b".data.rel.ro"))
    mapped("text", b"one\0")
    mapped("empty", b"")
    mapped("with space.so", library(b"zero\0one\0", cubin()))
    found = CodeFinder().find("one", "sm_90")
    assert (found.code, found.origin) == (cubin(), "with space.so")
    assert asked == ["with space.so"]


def test_a_name_that_the_linker_stored_as_the_end_of_another_is_seen(mapped):
    mapped("lib.so", library(b"none\0", cubin("none"), cubin("one")))
    assert CodeFinder().find("one", "sm_90").code == cubin("one")


def test_deleted_and_vanished_files_are_passed_over(mapped, tmp_path, asked):
    mapped("gone.so", library(b"one\0", cubin())).unlink()
    with (tmp_path / "maps").open("a") as file:
        file.write(
            "7f00-7f10 r-xp 00000000 08:01 77   /lib/one.so (deleted)\n7f00-7f10 rw-p 00000000 00:00 0\n[vdso]\n"
        )
    with pytest.raises(
        CodeNotFound, match=r"looked into what was added \(0\) and the loaded files \(1\): none of them names it"
    ):
        CodeFinder().find("one", "sm_90")
    assert asked == []


def test_reasons_are_told(mapped):
    mapped("other.so", library(b"one\0", cubin(arch="sm_100a")))
    finder = CodeFinder()
    finder.add(cubin("two"))
    with pytest.raises(CodeNotFound) as caught:
        finder.find("one", "sm_90")
    assert str(caught.value) == (
        "no machine code of one for sm_90; looked into what was added (1) and the loaded files (1): "
        "given cubin does not hold it; other.so has no cubin for sm_90a or sm_90; it has cubins for: sm_100a"
    )


def test_libraries_that_agree_are_no_conflict_and_others_are(mapped):
    mapped("a.so", library(b"one\0", cubin()))
    mapped("b.so", library(b"one\0", cubin("two"), cubin()))
    assert CodeFinder().find("one", "sm_90").origin == "a.so"
    mapped("c.so", library(b"one\0", cubin(value=2)))
    with pytest.raises(CodeNotFound, match=r"several loaded files, and differs: a\.so, b\.so, c\.so; add the one that"):
        CodeFinder().find("one", "sm_90")


def test_results_and_failures_are_kept_until_something_is_added_or_loaded(mapped, asked):
    mapped("a.so", library(b"one\0two\0", cubin("two")))
    finder = CodeFinder()
    for _ in range(2):
        finder.find("two", "sm_90")
        with pytest.raises(CodeNotFound, match=r"a\.so: one is in none"):
            finder.find("one", "sm_90")
    assert asked == ["a.so", "a.so"], "each name once"
    mapped("b.so", library(b"one\0", cubin()))
    assert finder.find("one", "sm_90").origin == "b.so"
    with pytest.raises(CodeNotFound):
        finder.find("three", "sm_90")
    finder.add(cubin("three"))
    assert finder.find("three", "sm_90").origin == "given cubin"


def test_what_a_file_holds_is_known_to_later_finders_until_the_file_changes(mapped, asked):
    path = mapped("a.so", library(b"one\0", cubin(value=1)))
    assert CodeFinder().find("one", "sm_90").code == CodeFinder().find("one", "sm_90").code == cubin(value=1)
    assert asked == ["a.so"]
    path.unlink()
    mapped("a.so", library(b"one\0", cubin(value=2)))
    assert CodeFinder().find("one", "sm_90").code == cubin(value=2)
    path.unlink()
    mapped("a.so", library(b"", cubin(value=2)))
    with pytest.raises(CodeNotFound, match="none of them names it"):
        CodeFinder().find("one", "sm_90")


def test_a_library_without_a_section_table_is_read_whole(mapped):
    content = bytearray(library(b"one\0", cubin()))
    content[0x28:0x30] = bytes(8)
    content[0x3C:0x40] = bytes(4)
    path = mapped("lib.so", bytes(content))
    assert module._names_kernel(path, b"one", module._state(path))
    assert not module._names_kernel(path, b"three", module._state(path))


def test_files_that_this_process_has_mapped_are_seen(tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(library(b"unheard_of\0", cubin("unheard_of")))
    if not module._MAPS.exists():
        pytest.skip("this system does not tell what a process has mapped (/proc/self/maps)")
    with path.open("rb") as file:
        try:
            view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE)
        except OSError as error:
            pytest.skip(f"this system maps no file of the temporary folder to execute: {error}")
        with view:
            assert path in module._mapped_files()
            if find_tool("cuobjdump") is not None:
                assert CodeFinder().find("unheard_of", "sm_90").origin == "lib.so"
    assert path not in module._mapped_files()


def test_where_nothing_is_told_of_mapped_files_there_are_none(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_MAPS", tmp_path / "missing")
    with pytest.raises(
        CodeNotFound, match=r"looked into what was added \(0\) and the loaded files \(0\): none of them names it"
    ):
        CodeFinder().find("one", "sm_90")


def test_a_loaded_library_of_nvcc_compressed_and_stripped(tmp_path):
    for name in ("nvcc", "strip"):
        if shutil.which(name) is None:
            pytest.skip(f"needs {name}")
    if find_tool("cuobjdump") is None:
        pytest.skip("cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)")
    source, built = tmp_path / "lib.cu", tmp_path / "built_by_nvcc.so"
    source.write_text(
        "template <int N> __global__ void loaded(int* p) { *p = N; }\n"
        "void launch(int* p) { loaded<31><<<1, 1>>>(p); }\n"
    )
    command = [
        *("nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-Xfatbin=-compress-all", "--compress-mode=size"),
        *("-shared", "-Xcompiler", "-fPIC", "-o", built, source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this nvcc does not build the library: {done.stderr.strip()[:200]}")
    subprocess.run(["strip", "-s", built], check=True)
    finder = CodeFinder()
    with pytest.raises(CodeNotFound):
        finder.find("_Z6loadedILi31EEvPi", "sm_90")
    ctypes.CDLL(str(built))
    assert finder.find("_Z6loadedILi31EEvPi", "sm_90").origin == "built_by_nvcc.so"
