"""The readers behind the audit: nvdisasm's JSON, a cubin's records, damaged files. No GPU."""

from __future__ import annotations

import json
import random
import struct
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdl_stress.audit import Question, inputs, listing, scan
from pdl_stress.audit.image import images
from pdl_stress.audit.inputs import Unreadable
from pdl_stress.audit.listing import BadListing, Instruction, disassemble, read_listing, split_operands
from pdl_stress.audit.operands import address, parse
from pdl_stress.outcome import Outcome
from pdl_stress.sass.cubin import BadCubin, functions
from tests.audit import corpus

KERNEL = """
extern "C" __global__ void reads(const float* x, char c, float* y, long long n, const __grid_constant__ TensorMap map) {
    WAIT; st(y + threadIdx.x, ld(x + threadIdx.x)); TRIGGER;
}
extern "C" __global__ void other(float* y) { st(y, 1.0f); }
"""


@pytest.fixture(scope="module")
def cubin():
    return corpus.compiled(corpus.HEAD + KERNEL, lineinfo=True)


def listed(*slots, name="k"):
    return json.dumps([{}, [{"function-name": name, "start": 0, "length": 0, "sass-instructions": list(slots)}]])


# --- listings ---------------------------------------------------------------------------------------------------------


def test_a_listing_becomes_instructions():
    text = listed(
        {"opcode": "LDG.E.64", "operands": "R2,desc[UR4][R2.64+0x10]", "source-file-id": 0, "source-line": 7},
        {"predicate": "@!P0", "opcode": "BRA", "operands": "0x0", "other-attributes": {"control-flow": "True"}},
        {"opcode": "BAR.SYNC", "operands": "0x0", "other-attributes": {"inter-warp-barrier": "True"}},
    )
    head, found = json.loads(text)
    text = json.dumps([head, found, {"directories": ["/src"], "files": [{"dir-idx": 0, "file": "a.cu"}]}])
    function = read_listing(text)["k"]
    load, branch, barrier = function.instructions
    assert load == Instruction(0, "LDG.E.64", "", ("R2", "desc[UR4][R2.64+0x10]"), ("/src/a.cu", 7))
    assert (load.base, load.modifiers) == ("LDG", ("E", "64"))
    assert (branch.guard, branch.offset, branch.operands) == ("!P0", 16, ("0x0",))
    assert branch.line == ("/src/a.cu", 7), "the line stands until another is named"
    assert barrier.meets
    assert not load.meets
    assert function.at(16) is branch
    assert function.at(8) is None
    assert function.at(48) is None
    assert str(branch) == "@!P0 BRA 0x0"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON"),
        ("{}", "not the listing that was expected"),
        ("[{}]", "not the listing that was expected"),
        ("[{}, {}]", "not the listing that was expected"),
        ("[{}, [1]]", "lists a int where a function was expected"),
        ('[{}, [{"function-name": "k"}]]', "without a name or without instructions"),
        ('[{}, [{"function-name": 1, "sass-instructions": []}]]', "without a name or without instructions"),
        (listed(5), r"lists a int at k\+0x0"),
        (listed({"opcode": "NOP"}, {}), r"no opcode at k\+0x10"),
        (listed({"opcode": 7}), "no opcode"),
        (listed({"opcode": "MOV", "operands": 3}), "no text"),
        (listed({"opcode": "MOV", "predicate": []}), "no text"),
        ('[{}, [{"function-name": "k", "start": 64, "sass-instructions": []}]]', "from offset 64"),
        (
            '[{}, [{"function-name": "k", "sass-instructions": []}, {"function-name": "k", "sass-instructions": []}]]',
            "twice",
        ),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_listing_is_refused(text, reason):
    with pytest.raises(BadListing, match=reason):
        read_listing(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["function-name", "sass-instructions", "opcode", "operands", "predicate", "start"]), inner
        )
    ),
    max_leaves=30,
)


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_any_json_is_read_or_refused(content):
    try:
        found = read_listing(json.dumps(content))
    except BadListing:
        return
    assert all(function.name == name for name, function in found.items())


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="R1234PU[]c0x+-.,!|~descT {}()", max_size=24))
def test_any_operands_are_read(text):
    for part in split_operands(text):
        parse(part)
        address(part)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("R2,desc[UR4][R2.64]", ("R2", "desc[UR4][R2.64]")),
        ("", ()),
        ("[UR8],[UR20]", ("[UR8]", "[UR20]")),
        ('R2 -0xb0 (*"BRANCH_TARGETS .L,.M"*)', ('R2 -0xb0 (*"BRANCH_TARGETS .L,.M"*)',)),
    ],
)
def test_operands_are_split_outside_brackets(text, parts):
    assert split_operands(text) == parts


def test_operands_are_what_they_say():
    assert (parse("-R2.reuse").kind, parse("-R2.reuse").name, parse("-R2.reuse").negative) == ("register", "R2", True)
    assert parse("!UP0").negative
    assert parse("|R3|").changed
    assert parse("~R3").changed
    assert parse("R3.H1").changed
    assert not parse("R3.64").changed
    assert (parse("c[0x0][0x210]").bank, parse("c[0x0][0x210]").value) == (0, 0x210)
    assert parse("c[0x4][RZ]").value == 0
    assert parse("c[0x2][R4]").kind == "bank"
    assert parse("-0xb0").value == -0xB0
    assert parse("010").value == 10
    assert address("desc[UR4][R2.64+UR6+-0x10]").registers == ("R2", "UR6")
    assert address("desc[UR4][R2.64+UR6+-0x10]").constant == -0x10
    assert address("[RZ]").registers == ()


# --- nvdisasm ---------------------------------------------------------------------------------------------------------


def test_only_the_chosen_functions_are_listed_with_their_lines(cubin):
    (chosen,) = (function for function in functions(cubin) if function.name == "reads")
    found = disassemble(cubin, [chosen])
    assert list(found) == ["reads"]
    waits = [one for one in found["reads"].instructions if one.base == "ACQBULK"]
    assert len(waits) == 1
    assert waits[0].line is not None
    assert waits[0].line[1] == (corpus.HEAD + KERNEL).split("\n").index(KERNEL.split("\n")[2]) + 1
    assert set(disassemble(cubin)) == {"reads", "other"}


def fake(tmp_path, monkeypatch, script):
    program = tmp_path / "nvdisasm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(listing, "find_tool", lambda name: str(program))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'nvdisasm fatal : bad' >&2; exit 1", "nvdisasm cannot read the cubin: nvdisasm fatal : bad"),
        ("exit 9", "exit code 9"),
        ("exit 0", "exit code 0"),
        ("echo text", "is not JSON"),
    ],
)
def test_a_disassembler_that_fails_is_told(cubin, script, reason, tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, script)
    with pytest.raises(BadListing, match=reason):
        disassemble(cubin)


def test_a_disassembler_that_hangs_is_given_up(cubin, tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(listing, "TIME_LIMIT", 0.2)
    with pytest.raises(BadListing, match="no answer within"):
        disassemble(cubin)


def test_a_missing_disassembler_is_told(cubin, monkeypatch):
    monkeypatch.setattr(listing, "find_tool", lambda name: None)
    with pytest.raises(BadListing, match="pip install nvidia-cuda-nvdisasm"):
        disassemble(cubin)


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "base"), [("sm_90a", 0x210), ("sm_100a", 0x380), ("sm_120a", 0x380)])
def test_parameters_are_where_the_compiler_put_them(arch, base):
    found = images(corpus.compiled(corpus.HEAD + KERNEL, arch), ("reads",))["reads"]
    assert found.base == base
    assert [(p.ordinal, p.offset - base, p.size) for p in found.parameters][:4] == [
        (0, 0, 8),
        (1, 8, 1),
        (2, 16, 8),
        (3, 24, 8),
    ]
    tensor_map = found.parameters[4]
    assert (tensor_map.size, tensor_map.offset % 64) == (128, 0)
    assert [parameter.may_point for parameter in found.parameters] == [True, False, True, True, True]
    assert found.parameter_at(base + 3).ordinal == 0
    assert found.parameter_at(base + 9) is None
    assert found.parameter_at(base + 10_000) is None


# --- damaged files ----------------------------------------------------------------------------------------------------


def audited(tmp_path, code, name="k.cubin"):
    path = tmp_path / name
    path.write_bytes(code)
    return scan([path], Question(strict=True))


def test_a_truncated_cubin_is_an_error_of_its_file_and_never_a_pass(tmp_path, cubin):
    for size in (0, 1, 16, 63, 64, 200, len(cubin) // 2, len(cubin) - 1):
        report = audited(tmp_path, cubin[:size])
        assert [file for file, _ in report.errors] == ["k.cubin"]
        assert not report.kernels
        assert report.outcome is Outcome.ERROR


def test_a_damaged_cubin_gives_an_error_or_a_report(tmp_path, cubin):
    """Bytes of the headers and records are changed, at random: whatever comes, it is no exception."""
    chance = random.Random(7)
    errors = 0
    for _ in range(15):
        code = bytearray(cubin)
        for _ in range(chance.choice((1, 4, 30))):
            code[chance.randrange(len(code))] = chance.randrange(256)
        report = audited(tmp_path, bytes(code))
        errors += bool(report.errors)
        assert report.errors or report.kernels or report.silent
        assert all(file and reason for file, reason in report.errors)
    assert errors


def test_a_record_that_reaches_too_far_is_told(cubin):
    """The first record of the kernel's section is given a length behind the section's end."""
    code = bytearray(cubin)
    at = bytes(code).index(struct.pack("<BBH", 4, 0x17, 12))
    code[at + 2 : at + 4] = (0xFFF0).to_bytes(2, "little")
    with pytest.raises(BadCubin, match="reaches behind its end"):
        images(bytes(code), ("reads", "other"))


def test_the_scan_goes_on_behind_a_bad_file(tmp_path, cubin):
    bad, good, text = tmp_path / "bad.cubin", tmp_path / "good.cubin", tmp_path / "notes.txt"
    bad.write_bytes(cubin[:100])
    good.write_bytes(cubin)
    text.write_text("no machine code")
    report = scan([bad, text, good], Question())
    assert [file for file, _ in report.errors] == ["bad.cubin", "notes.txt"]
    assert [kernel.name for kernel in report.kernels] == ["reads"]
    assert report.silent == {"good.cubin": 1}


def test_a_library_that_is_cut_off_is_an_error(tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(b"\x7fELF\x02\x01" + bytes(200))
    report = scan([path], Question())
    assert len(report.errors) == 1
    assert report.outcome is Outcome.ERROR


def test_a_library_is_taken_apart_one_cubin_at_a_time(tmp_path):
    """A fat binary of two architectures, as compilers write it."""
    codes = [corpus.compiled(corpus.HEAD + KERNEL, arch) for arch in ("sm_90a", "sm_100a")]
    path = tmp_path / "two.fatbin"
    path.write_bytes(fat_binary(*zip(codes, (90, 100), strict=True)))
    report = scan([path], Question())
    assert not report.errors
    assert [(kernel.name, kernel.arch) for kernel in report.kernels] == [("reads", "sm_90a"), ("reads", "sm_100a")]
    assert report.cubins == 2
    only = scan([path], Question(arch="sm_90a"))
    assert [kernel.arch for kernel in only.kernels] == ["sm_90a"]
    both = scan([path], Question(), jobs=2)
    assert [(kernel.name, kernel.arch, kernel.findings) for kernel in both.kernels] == [
        (kernel.name, kernel.arch, kernel.findings) for kernel in report.kernels
    ]


def fat_binary(*entries):
    """An uncompressed fat binary: a header of 16 bytes, then entries with headers of 64."""
    body = b""
    for code, number in entries:
        data = code + bytes(-len(code) % 8)
        body += struct.pack("<HHIQIIHHIIIQQQ", 2, 0x101, 64, len(data), 0, 0, 8, 1, number, 0, 0, 0x100011, 0, 0) + data
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_ptx_needs_its_compiler(tmp_path, monkeypatch):
    path = tmp_path / "k.ptx"
    path.write_text(".version 8.0\n.target sm_90\n")
    monkeypatch.setattr(inputs, "find_tool", lambda name: None)
    with pytest.raises(Unreadable, match="ptxas"):
        list(inputs.cubins(path, None))


def test_a_tool_that_fails_is_told(tmp_path, monkeypatch):
    def failing(*arguments, **named):
        return subprocess.CompletedProcess(arguments, 255, "", "cuobjdump fatal : broken")

    monkeypatch.setattr(inputs.subprocess, "run", failing)
    path = tmp_path / "lib.so"
    path.write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(Unreadable, match="cuobjdump fatal : broken"):
        list(inputs.cubins(path, None))
