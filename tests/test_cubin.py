"""The reader of cubins, against NVIDIA's own tools, and against files that are cut off or damaged. No GPU."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusions.ops.native import Behaviour
from fusions.ops.native import code as native
from pdl_stress.sass import cubin as reader
from pdl_stress.sass.tools import WHEELS, find_tool

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_120a")

TWO_KERNELS = r"""
__device__ __noinline__ void helper(int* p) { asm volatile("griddepcontrol.wait;" ::: "memory"); atomicAdd(p, 3); }
extern "C" __global__ void first(int* p) { helper(p); }
extern "C" __global__ void second(int* p) { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); *p = 1; }
"""


def tool(name):
    found = find_tool(name)
    if found is None:
        pytest.skip(f"{name} is not installed (pip install {WHEELS[name]})")
    return found


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def relocatable(arch):
    """A cubin that was not linked: there a device function that was not inlined has a code section of its own."""
    from cuda.core import Program, ProgramOptions

    return Program(TWO_KERNELS, "c++", ProgramOptions(arch=arch, relocatable_device_code=True)).compile("cubin").code


def rmsnorm():
    return native.cubin("rmsnorm", Behaviour("all"))


@pytest.mark.parametrize("kernel", native.KERNELS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_decoder_agrees_with_the_disassembler(kernel, arch, tmp_path):
    nvdisasm = tool("nvdisasm")
    for behaviour in (
        native.DEPLOYED[kernel],
        Behaviour("branch", "after_stores", fence=True, delay=True, stamps=True),
        Behaviour("never", "none"),
    ):
        cubin = native.cubin(kernel, behaviour, arch)
        (tmp_path / "kernel.cubin").write_bytes(cubin)
        text = output(nvdisasm, "-c", tmp_path / "kernel.cubin")
        line = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")
        known = set(reader.OPCODES.values())
        seen = [(m[3], m[2] is not None, int(m[1], 16)) for m in line.finditer(text)]
        decoded = reader.instructions(cubin)
        assert [i.offset for i in decoded] == [offset for _, _, offset in seen]
        assert [tuple(i) for i in decoded if i.opcode in known] == [entry for entry in seen if entry[0] in known]


def test_predicates_are_decoded():
    word = lambda guard: ((guard << 12) | 0x82E).to_bytes(16, "little")  # noqa: E731
    decoded = [i.predicated for i in reader.decode(word(7) + word(0) + word(8) + word(15))]
    assert decoded == [False, True, True, True]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_and_device_functions_are_told_apart_as_cuobjdump_does(arch, tmp_path):
    code = relocatable(arch)
    kernels = {f.name for f in reader.functions(code) if f.kernel}
    others = {f.name for f in reader.functions(code) if not f.kernel}
    assert kernels == {"first", "second"}
    assert others, "the helper, and a copy of it that knows its callers"
    assert all(name.startswith("_Z6helperPi") for name in others)
    (tmp_path / "code.cubin").write_bytes(code)
    lines = [line.split() for line in output(tool("cuobjdump"), "-symbols", tmp_path / "code.cubin").splitlines()]
    entries = {words[-1] for words in lines if words and words[0].endswith("FUNC") and "ENTRY" in words[-2]}
    assert kernels == entries


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_function_is_where_and_what_its_symbol_says(arch, tmp_path):
    nvdisasm, code = tool("nvdisasm"), relocatable(arch)
    (tmp_path / "code.cubin").write_bytes(code)
    for function in reader.functions(code):
        assert function.size == len(reader.text_sections(code)[function.name]) > 0
        _, listed = json.loads(output(nvdisasm, "-json", "-fun", str(function.symbol), tmp_path / "code.cubin"))
        assert [(each["function-name"], each["length"]) for each in listed] == [(function.name, function.size)]


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103a", "sm_110a", "sm_120", "sm_120a"])
def test_the_architecture_is_what_cuobjdump_says(arch, tmp_path):
    code = native.cubin("rmsnorm", Behaviour("all"), arch)
    assert reader.architecture(code) == arch
    (tmp_path / "code.cubin").write_bytes(code)
    assert f" sm={arch.removeprefix('sm_')}," in output(tool("cuobjdump"), "-elf", tmp_path / "code.cubin")


def test_a_family_cubin_goes_by_the_plain_name():
    assert reader.architecture(native.cubin("rmsnorm", Behaviour("all"), "sm_100f")) == "sm_100"


@pytest.mark.parametrize(
    ("abi", "flags", "arch"),
    [
        ((51, 7), 0x5A055A, "sm_90"),  # as CUDA 12.4 writes them
        ((51, 7), 0x5A0D5A, "sm_90a"),
        ((65, 8), 0x6006402, "sm_100"),  # as CUDA 12.8 writes them
        ((65, 8), 0x600640A, "sm_100a"),
    ],
)
def test_the_architecture_in_older_headers(abi, flags, arch):
    code = bytearray(native.cubin("rmsnorm", Behaviour("all"), "sm_90"))
    code[7:9] = bytes(abi)
    code[0x30:0x34] = flags.to_bytes(4, "little")
    assert reader.architecture(bytes(code)) == arch


def test_an_unknown_header_is_refused_not_guessed_at():
    code = bytearray(rmsnorm())
    code[8] = 9
    with pytest.raises(reader.BadCubin, match="OS/ABI 65, version 9; known are"):
        reader.architecture(bytes(code))


def test_relocatable_code_is_told_apart():
    assert reader.is_relocatable(relocatable("sm_90a"))
    assert not reader.is_relocatable(rmsnorm())


def test_a_second_form_of_a_function_is_seen():
    code = bytearray(rmsnorm())
    assert not reader.has_capsule(bytes(code), "rmsnorm")
    # A section name that is used once and is as long as the wanted one: the reader must see it by its name alone.
    at = code.index(b".nv.constant0.rmsnorm\0")
    code[at : at + 22] = b".nv.capmerc.text.abcd\0"
    assert reader.has_capsule(bytes(code), "abcd")


def read_all(code):
    reader.functions(code)
    reader.text_sections(code)
    reader.instructions(code)
    reader.architecture(code)
    reader.is_relocatable(code)
    reader.has_capsule(code, "rmsnorm")


@pytest.mark.parametrize("make", [rmsnorm, lambda: relocatable("sm_100a")], ids=["linked", "relocatable"])
def test_a_cubin_cut_off_anywhere_is_refused(make):
    code = make()
    read_all(code)
    for length in range(len(code)):
        with pytest.raises(reader.BadCubin, match=r"not a cubin|cut off"):
            reader.functions(code[:length])


@given(
    flips=st.lists(
        st.tuples(st.integers(0, len(rmsnorm()) - 1) | st.integers(0, 0x3F), st.integers(1, 255)),
        min_size=1,
        max_size=8,
    ),
    keep=st.none() | st.integers(0, len(rmsnorm())),
)
def test_damage_gives_bad_cubin_and_no_other_error(flips, keep):
    code = bytearray(rmsnorm())
    for at, change in flips:
        code[at] ^= change
    try:
        read_all(bytes(code)[:keep])
    except reader.BadCubin as error:
        assert str(error)  # noqa: PT017 - that it is not raised is as good


@given(st.data())
def test_damaged_tables_give_bad_cubin_and_no_other_error(data):
    """As above, at the bytes that the reader follows: section headers, names, symbols."""
    code = bytearray(rmsnorm())
    table = int.from_bytes(code[0x28:0x30], "little")
    symbols = next(s for s in reader.sections(bytes(code)) if s.name == ".symtab")
    places = [*range(table, table + 64 * 20), *range(symbols.offset, symbols.offset + symbols.size)]
    for _ in range(data.draw(st.integers(1, 4))):
        code[data.draw(st.sampled_from(places))] = data.draw(st.integers(0, 255))
    try:
        read_all(bytes(code))
    except reader.BadCubin as error:
        assert str(error)  # noqa: PT017


def headers(code):
    """Where each section's header stands, by the section's name."""
    table = int.from_bytes(code[0x28:0x30], "little")
    return {section.name: table + 0x40 * index for index, section in enumerate(reader.sections(code))}


@pytest.mark.parametrize(
    ("section", "at", "value", "reason"),
    [
        (None, 0x20, 1 << 40, "the program headers: up to byte"),
        (None, 0x28, 1 << 40, "the section table: up to byte"),
        (None, 0x3A, 0x3F, "names no section table"),
        (None, 0x3C, 0, "names no section table"),
        (None, 0x3E, 0xFF, "names no section table"),
        (".shstrtab", 0x20, 1 << 40, "the section names: up to byte"),
        (".text.rmsnorm", 0x00, 1 << 20, "a name lies outside its string table"),
        (".text.rmsnorm", 0x18, 1 << 40, r"section '\.text\.rmsnorm': up to byte"),
        (".text.rmsnorm", 0x20, 1 << 40, r"section '\.text\.rmsnorm': up to byte"),
        (".symtab", 0x20, 1 << 40, r"section '\.symtab': up to byte"),
        (".symtab", 0x28, 0xFFFF, "names no string table"),
        (".symtab", 0x04, 1, "0 symbol tables, expected one"),
        (".text.rmsnorm", 0x04, 2, "2 symbol tables, expected one"),
    ],
)
def test_each_damage_is_told(section, at, value, reason):
    """at: bytes from the start of the section's header, of the file's where section is None."""
    code = bytearray(rmsnorm())
    place = at + (headers(rmsnorm())[section] if section else 0)
    size = 8 if value == 1 << 40 else 4 if section else 2
    code[place : place + size] = value.to_bytes(size, "little")
    with pytest.raises(reader.BadCubin, match=reason):
        reader.functions(bytes(code))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (b"", "not a cubin"),
        (b"PK\x03\x04" + bytes(64), "take the code before any compression"),
        (b"\x7fELF\x02\x01\x01" + bytes(11) + b"\x3e\0" + bytes(64), r"machine 62, expected 190 \(CUDA\)"),
    ],
)
def test_what_is_no_cubin_is_refused(code, reason):
    with pytest.raises(ValueError, match=reason):
        reader.text_sections(code)
