"""Cubins are taken out of libraries and fat binaries: with cuobjdump, on files built here. No GPU."""

from __future__ import annotations

import functools
import shutil
import struct
import subprocess

import pytest

from fusions.ops.native import code as native
from pdl_stress.sass import fatbin
from pdl_stress.sass.cubin import architecture
from pdl_stress.sass.fatbin import CodeNotFound, extract
from pdl_stress.sass.tools import find_tool

HOPPER = ("sm_90a", "sm_90")


@functools.cache
def cubin(name="one", arch="sm_90a", value=1):
    return native.compiled(f'extern "C" __global__ void {name}(int* p) {{ *p = {value}; }}', name, arch)


def fat(*codes):
    """An uncompressed fat binary of cubins and PTX texts: 16 bytes of header, then entries with their headers."""
    body = b""
    for code in codes:
        is_cubin = code.startswith(b"\x7fELF")
        number = int((architecture(code) if is_cubin else code.decode().split(".target sm_")[1][:2]).strip("sm_af"))
        data = code + bytes(-len(code) % 8)
        flags = 0x100011 if is_cubin and architecture(code).endswith("a") else 0x11
        # PTX has the place of its options behind the header's 64 bytes: they are the empty text at 0x48.
        kind, size, options, *version = (2, 64, 0, 8, 1) if is_cubin else (1, 80, 64, 0, 9)
        body += struct.pack(
            "<HHIQIIHHIIIQQQ", kind, 0x101, size, len(data), 0, options, *version, number, 0, 0, flags, 0, 0
        )
        body += (b"" if is_cubin else struct.pack("<QQ", 0x48, 0)) + data
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@pytest.fixture
def write(tmp_path):
    if find_tool("cuobjdump") is None:
        pytest.skip("cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)")

    def write(*codes, name="lib.fatbin"):
        (tmp_path / name).write_bytes(fat(*codes))
        return tmp_path / name

    return write


def test_the_cubin_that_holds_the_kernel_is_taken(write):
    one, two = cubin("one"), cubin("two")
    path = write(cubin("zero"), one, two)
    assert extract(path, "one", HOPPER) == one
    assert extract(str(path), "two", HOPPER) == two


def test_a_name_is_not_taken_for_a_part_of_another(write):
    path = write(cubin("none"), cubin("one"), cubin("ones"))
    assert extract(path, "one", HOPPER) == cubin("one")


def test_the_first_architecture_that_has_it_is_taken(write):
    plain, specific, other = cubin(arch="sm_90"), cubin(arch="sm_90a"), cubin(arch="sm_100a")
    path = write(plain, specific, other)
    assert extract(path, "one", ("sm_90a", "sm_90")) == specific
    assert extract(path, "one", ("sm_90", "sm_90a")) == plain
    assert extract(path, "one", ("sm_100a",)) == other
    assert extract(write(plain, cubin("two"), other), "one", HOPPER) == plain, "sm_90a is there, without the kernel"


def test_an_architecture_that_cuobjdump_does_not_know_is_passed_over(write):
    code = cubin(arch="sm_100a")
    assert extract(write(code), "one", ("sm_102a", "sm_100a")) == code


def test_a_cubin_of_the_right_number_and_the_wrong_suffix_is_not_taken(write):
    """cuobjdump takes sm_90 and sm_90a for one; and it numbers the cubins of each number from 1 on."""
    path = write(cubin(arch="sm_100"), cubin(arch="sm_90"), cubin(arch="sm_120a"))
    assert extract(path, "one", ("sm_100a", "sm_90a", "sm_120a")) == cubin(arch="sm_120a")
    assert extract(path, "one", ("sm_120", "sm_90a", "sm_100")) == cubin(arch="sm_100")
    assert extract(path, "one", ("sm_120", "sm_100a", "sm_90")) == cubin(arch="sm_90")


def test_a_relative_path_will_do(write, monkeypatch, tmp_path):
    write(cubin())
    monkeypatch.chdir(tmp_path)
    assert extract("lib.fatbin", "one", HOPPER) == cubin()


@pytest.mark.parametrize("name", ["a,b.so", "with space.so", "-x", "code.1.sm_90a.cubin", "no_extension"])
def test_any_file_name_will_do(write, name):
    assert extract(write(cubin(), name=name), "one", HOPPER) == cubin()


def test_the_same_code_in_two_cubins_is_no_conflict(write):
    code = cubin()
    longer = code + bytes(8)  # another file, the same kernel
    assert extract(write(code, cubin("two"), longer), "one", HOPPER) == code


# --- what is refused --------------------------------------------------------------------------------------------------


def test_the_same_kernel_with_other_code_is_refused(write):
    with pytest.raises(CodeNotFound, match=r"lib.fatbin holds one in 2 cubins for sm_90a that differ.*give the cubin"):
        extract(write(cubin(value=1), cubin(value=2)), "one", HOPPER)


def test_other_code_for_another_architecture_is_no_conflict(write):
    assert extract(write(cubin(arch="sm_90", value=2), cubin(value=1)), "one", HOPPER) == cubin(value=1)


def test_a_kernel_in_no_cubin_is_told(write):
    with pytest.raises(CodeNotFound, match=r"^lib.fatbin: three is in none of its 2 cubins for sm_90a or sm_90$"):
        extract(write(cubin("one"), cubin("two"), cubin("three", "sm_100a")), "three", HOPPER)


PTX = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry one() { ret; }\n\0"


def test_ptx_only_is_told(write):
    with pytest.raises(CodeNotFound, match=r"only PTX \(sm_90\) for sm_90a or sm_90: the driver compiles it"):
        extract(write(PTX), "one", HOPPER)
    with pytest.raises(CodeNotFound, match=r"only PTX \(sm_90\) for sm_103a"):
        extract(write(PTX, cubin()), "one", ("sm_103a", "sm_103"))


def test_ptx_beside_cubins_is_told(write):
    with pytest.raises(CodeNotFound, match=r"two is in none of its 1 cubins .*another part of the file is PTX"):
        extract(write(PTX, cubin()), "two", HOPPER)


def test_ptx_for_newer_devices_and_cubins_for_others_are_told(write):
    newer = PTX.replace(b"sm_90", b"sm_99")
    for codes in ((cubin(arch="sm_100a"),), (cubin(arch="sm_100a"), newer)):
        with pytest.raises(CodeNotFound, match=r"no cubin for sm_90a or sm_90; it has cubins for: sm_100a$"):
            extract(write(*codes), "one", HOPPER)


def test_relocatable_code_is_refused(write):
    from cuda.core import Program, ProgramOptions

    text = 'extern "C" __global__ void one(int* p) { *p = 1; }'
    code = Program(text, "c++", ProgramOptions(arch="sm_90a", relocatable_device_code=True)).compile("cubin").code
    with pytest.raises(CodeNotFound, match="only to be linked"):
        extract(write(code), "one", HOPPER)
    assert extract(write(code, cubin(value=5)), "one", HOPPER) == cubin(value=5)


def test_a_cubin_that_the_reader_does_not_know_is_told(write, monkeypatch):
    path = write(cubin())
    monkeypatch.setattr(fatbin.reader, "_NEW_ABI", (65, 7))
    with pytest.raises(CodeNotFound, match=r"the cubin in lib\.fatbin that holds one is not understood: .*version 8"):
        extract(path, "one", HOPPER)


def test_an_unknown_architecture_is_told(write):
    with pytest.raises(CodeNotFound, match=r"does not know sm_250a or sm_250: pip install --upgrade nvidia-cuda-cuobj"):
        extract(write(cubin()), "one", ("sm_250a", "sm_250"))


@pytest.mark.parametrize("content", [b"text", b"\x7fELF" + bytes(60), b""])
def test_a_file_without_device_code_is_told(write, content):
    path = write()
    path.write_bytes(content)
    with pytest.raises(CodeNotFound, match=r"lib.fatbin"):
        extract(path, "one", HOPPER)


def test_a_program_without_device_code_is_told(write):
    with pytest.raises(CodeNotFound, match="sh holds no fat binary"):
        extract(shutil.which("sh"), "one", HOPPER)


def test_a_missing_file_is_told(write, tmp_path):
    with pytest.raises(CodeNotFound, match=r"nothing\.so is no file"):
        extract(tmp_path / "nothing.so", "one", HOPPER)


def test_a_missing_cuobjdump_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(fatbin, "find_tool", lambda name: None)
    with pytest.raises(CodeNotFound, match="pip install nvidia-cuda-cuobjdump"):
        extract(tmp_path / "lib.so", "one", HOPPER)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exec sleep 60", r"no answer on lib.fatbin within 0.3 s"),
        ("echo 'cuobjdump fatal : out of luck' >&2; exit 1", r"failed on lib.fatbin: cuobjdump fatal : out of luck"),
        ("exit 7", r"failed on lib.fatbin: exit code 7"),
        ('case "$*" in *symbols*) printf "Fatbin elf code:\\narch = sm_90a\\nFUNC GLOBAL DEFAULT ENTRY one\\n";; esac',
         "wrote other cubins of lib.fatbin than it had listed"),
    ],
)  # fmt: skip
def test_a_cuobjdump_that_fails_is_told(write, monkeypatch, tmp_path, script, reason):
    path, program = write(cubin()), tmp_path / "cuobjdump"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(fatbin, "find_tool", lambda name: str(program))
    with pytest.raises(CodeNotFound, match=reason):
        extract(path, "one", HOPPER, time_limit=0.3 if "sleep" in script else 30)


def test_a_cuobjdump_that_does_not_run_is_told(write, monkeypatch, tmp_path):
    monkeypatch.setattr(fatbin, "find_tool", lambda name: str(tmp_path))
    with pytest.raises(CodeNotFound, match="cuobjdump does not run: Permission denied"):
        extract(write(cubin()), "one", HOPPER)


def test_an_older_listing_is_read(write, monkeypatch, tmp_path):
    """CUDA 12 names the columns STT_FUNC, STB_GLOBAL, STO_ENTRY."""
    listed = "Fatbin elf code:\\narch = sm_90a\\nsymbols:\\nSTT_FUNC         STB_GLOBAL STO_ENTRY      one\\n"
    real, program = find_tool("cuobjdump"), tmp_path / "cuobjdump"
    program.write_text(f'#!/bin/sh\ncase "$*" in *symbols*) printf "{listed}";; *) exec {real} "$@";; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr(fatbin, "find_tool", lambda name: str(program))
    assert extract(write(cubin()), "one", HOPPER) == cubin()


# --- as nvcc builds them ----------------------------------------------------------------------------------------------

SOURCE = r"""
template <int N> __global__ void kernel(int* p) { p[threadIdx.x] = N; }
void launch(int* p) { kernel<1><<<1, 1>>>(p); kernel<2><<<1, 1>>>(p); }
"""
MANGLED = "_Z6kernelILi2EEvPi"


@pytest.mark.parametrize(
    "options",
    [(), ("-Xfatbin=-compress-all", "--compress-mode=size"), ("--compress-mode=none",)],
    ids=["default", "compressed", "uncompressed"],
)
@pytest.mark.parametrize("stripped", [False, True], ids=["", "stripped"])
def test_libraries_of_nvcc(options, stripped, tmp_path):
    if shutil.which("nvcc") is None or find_tool("cuobjdump") is None:
        pytest.skip("needs nvcc (CUDA toolkit) and cuobjdump (pip install nvidia-cuda-cuobjdump)")
    (tmp_path / "lib.cu").write_text(SOURCE)
    library = tmp_path / "lib.so"
    archs = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in ("90a", "100a")]
    command = ["nvcc", *archs, *options, "-shared", "-Xcompiler", "-fPIC", "-o", str(library), str(tmp_path / "lib.cu")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"this nvcc does not build the library: {built.stderr.strip()[:200]}")
    if stripped:
        if shutil.which("strip") is None:
            pytest.skip("needs strip (binutils)")
        subprocess.run(["strip", "-s", library], check=True)
    for arch in ("sm_90a", "sm_100a"):
        code = extract(library, MANGLED, (arch,))
        assert architecture(code) == arch
        assert {"_Z6kernelILi1EEvPi", MANGLED} <= set(fatbin.reader.text_sections(code))
    with pytest.raises(CodeNotFound, match="is in none of its"):
        extract(library, "_Z6kernelILi3EEvPi", HOPPER)
