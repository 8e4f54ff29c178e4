"""Waits are taken out of machine code, and nothing else is: by bytes, by the reader, by nvdisasm. No GPU."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusions.ops.native import Behaviour
from fusions.ops.native import code as native
from pdl_stress.sass import mutate
from pdl_stress.sass.cubin import BadCubin, functions
from pdl_stress.sass.mutate import Mutant, MutationError, Site, remove_waits, triggers, wait_sites
from pdl_stress.sass.tools import WHEELS, find_tool

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_120a")

# (kernel, behaviour, wait sites): what the sources hold, counted by hand.
VARIANTS = [
    ("rmsnorm", Behaviour("never"), 0),
    ("rmsnorm", Behaviour("all"), 1),
    ("rmsnorm", Behaviour("branch"), 1),
    ("tinygemm2", Behaviour("never"), 0),
    ("tinygemm2", Behaviour("loaders"), 1),
    ("tinygemm2", Behaviour("all"), 3),
    ("tinygemm2", Behaviour("branch", early_weights=False), 3),
]

# An ACQBULK as it stands in code, as a constant, as data, and as code of two kernels and of a device function.
MANY = r"""
__constant__ unsigned pattern[4] = {0x0000782e, 0, 0, 0x000fe200};
__device__ unsigned data[8] = {0x0000782e, 0, 0, 0x000fe200, 0x0000782e, 0, 0, 0x000fe200};
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
__device__ __noinline__ void helper(int* p) { WAIT; atomicAdd(p, 3); }
extern "C" __global__ void first(int* p) { WAIT; atomicAdd(p, pattern[p[1] & 3]); WAIT; atomicAdd(p, data[p[2] & 7]); }
extern "C" __global__ void second(int* p) { WAIT; asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
extern "C" __global__ void calls(int* p) { helper(p); }
extern "C" __global__ void plain(int* p) { *p = 1; }
"""
ACQBULK = bytes.fromhex("2e780000000000000000000000e20f00")


@functools.cache
def many(arch="sm_90a", relocatable=False):
    from cuda.core import Program, ProgramOptions

    return Program(MANY, "c++", ProgramOptions(arch=arch, relocatable_device_code=relocatable)).compile("cubin").code


@functools.cache
def three_waits():
    return native.cubin("tinygemm2", Behaviour("all"))


@pytest.fixture
def no_disassembler(monkeypatch):
    monkeypatch.setattr(mutate, "find_tool", lambda name: None)


def nvdisasm():
    found = find_tool("nvdisasm")
    if found is None:
        pytest.skip(f"nvdisasm is not installed (pip install {WHEELS['nvdisasm']})")
    return found


@functools.cache
def listing(cubin):
    """Every instruction by nvdisasm: {(function, offset): (guard, opcode)}."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.cubin"
        path.write_bytes(cubin)
        answer = subprocess.run([nvdisasm(), "-json", path], capture_output=True, text=True, check=True).stdout
    _, listed = json.loads(answer)
    return {
        (function["function-name"], index * 16): (instruction.get("predicate", ""), instruction["opcode"])
        for function in listed
        for index, instruction in enumerate(function["sass-instructions"])
    }


def differing(a, b):
    assert len(a) == len(b)
    return [index for index in range(len(a)) if a[index] != b[index]]


def place(cubin, site):
    (function,) = (f for f in functions(cubin) if f.name == site.function)
    return function.offset + site.offset


def guarded(cubin, kernel, guard):
    """The cubin with another guard at the kernel's first wait: compilers branch around a wait instead."""
    code = bytearray(cubin)
    at = place(cubin, wait_sites(cubin, kernel)[0]) + 1
    code[at] = code[at] & 0x0F | guard << 4
    return bytes(code)


# --- sites ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("kernel", "behaviour", "count"), VARIANTS)
def test_the_sites_are_those_that_nvdisasm_lists(kernel, behaviour, count, arch):
    cubin = native.cubin(kernel, behaviour, arch)
    sites = wait_sites(cubin, kernel)
    assert len(sites) == count
    assert all(site.function == kernel for site in sites)
    seen = listing(cubin)
    assert [(s.function, s.offset) for s in sites] == [place for place, what in seen.items() if what[1] == "ACQBULK"]
    assert [(s.function, s.offset) for s in triggers(cubin, kernel)] == [
        place for place, what in seen.items() if what[1] == "PREEXIT"
    ]
    assert all(seen[s.function, s.offset][0] == s.predicate for s in sites)


@pytest.mark.parametrize(("guard", "text"), [(0, "@P0"), (6, "@P6"), (8, "@!P0"), (15, "@!PT")])
def test_a_guard_is_named_as_nvdisasm_names_it(guard, text):
    cubin = guarded(many(), "second", guard)
    (site,) = wait_sites(cubin, "second")
    assert site.predicate == text
    assert listing(cubin)["second", site.offset] == (text, "ACQBULK")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_device_function_counts_for_every_kernel_and_another_kernel_for_none(arch):
    cubin = many(arch, relocatable=True)
    helpers = [f.name for f in functions(cubin) if not f.kernel]
    assert helpers
    for kernel, own in (("first", 2), ("second", 1), ("plain", 0)):
        sites = wait_sites(cubin, kernel)
        assert [s.function for s in sites] == [kernel] * own + helpers, "the kernel's own first"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_device_function_inside_a_kernels_section_counts_for_that_kernel(arch):
    assert [len(wait_sites(many(arch), kernel)) for kernel in ("first", "second", "calls", "plain")] == [2, 1, 1, 0]


@pytest.mark.parametrize(
    ("at", "word", "counts"),
    [(0, 0x782E, True), (0, 0x792E, False), (0, 0x722E, False), (8, 0x782E, False), (4, 0x782E, False)],
    ids=["a wait", "another opcode", "another form", "an immediate", "operands"],
)
def test_only_the_low_twelve_bits_of_a_whole_slot_make_a_wait(at, word, counts):
    cubin = bytearray(many())
    (plain,) = (f for f in functions(many()) if f.name == "plain")
    place = plain.offset + plain.size - 32 + at  # padding behind the code
    cubin[place : place + 2] = word.to_bytes(2, "little")
    assert len(wait_sites(bytes(cubin), "plain")) == counts


# --- mutants ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("kernel", "behaviour", "count"), [v for v in VARIANTS if v[2]])
def test_each_site_and_all_sites_can_be_removed(kernel, behaviour, count, arch):
    cubin = native.cubin(kernel, behaviour, arch)
    before = listing(cubin)
    sites = wait_sites(cubin, kernel)
    for chosen in (None, *((index,) for index in range(count))):
        mutant = remove_waits(cubin, kernel, chosen)
        removed = sites if chosen is None else tuple(sites[index] for index in chosen)
        assert (mutant.removed, mutant.left) == (removed, count - len(removed))
        assert wait_sites(mutant.code, kernel) == tuple(s for s in sites if s not in removed)
        changed = {k: v for k, v in listing(mutant.code).items() if v != before[k]}
        assert changed == {(s.function, s.offset): (s.predicate, "NOP") for s in removed}
        assert mutant.checked.startswith("checked by nvdisasm 1")


@pytest.mark.parametrize("guard", [0, 7, 8, 15])
def test_guard_and_control_word_stay(guard):
    cubin = guarded(many(), "second", guard)
    (site,) = wait_sites(cubin, "second")
    mutant = remove_waits(cubin, "second")
    at = place(cubin, site)
    old, new = cubin[at : at + 16], mutant.code[at : at + 16]
    assert new[2:] == old[2:], "the control word, and what else is above the guard"
    assert new[1] >> 4 == old[1] >> 4 == guard
    assert int.from_bytes(new[:2], "little") & 0xFFF == 0x918
    assert listing(mutant.code)["second", site.offset] == (site.predicate, "NOP")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_the_named_kernel_changes_and_neither_constants_nor_data(arch):
    cubin = many(arch)
    assert cubin.count(ACQBULK[:12]) >= 3, "the pattern stands in a constant and in data"
    mutant = remove_waits(cubin, "first")
    slots = {place(cubin, site) for site in wait_sites(cubin, "first")}
    assert all(any(at <= index < at + 2 for at in slots) for index in differing(cubin, mutant.code))
    assert len(differing(cubin, mutant.code)) == 2 * len(slots)
    for other in ("second", "calls"):
        assert wait_sites(mutant.code, other) == wait_sites(cubin, other) != ()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_device_function_is_changed_for_all_its_callers(arch):
    cubin = many(arch, relocatable=True)
    mutant = remove_waits(cubin, "plain")
    assert {site.function for site in mutant.removed} == {f.name for f in functions(cubin) if not f.kernel}
    assert [s.function for s in wait_sites(mutant.code, "first")] == ["first", "first"]


def test_a_second_form_in_the_cubin_is_told(monkeypatch):
    assert "nv.capmerc" not in remove_waits(many("sm_90a"), "second").checked
    monkeypatch.setattr(mutate, "has_capsule", lambda cubin, function: function == "second")
    assert remove_waits(many("sm_90a"), "second").checked.endswith(
        "; a second form of the kernel in the cubin (.nv.capmerc) is unchanged"
    )
    assert "nv.capmerc" not in remove_waits(many("sm_90a"), "first").checked


def test_without_nvdisasm_the_mutant_is_the_same_and_says_by_what_it_was_checked(no_disassembler):
    mutant = remove_waits(three_waits(), "tinygemm2")
    assert mutant.checked == "nvdisasm not found: checked by the slot reader only"
    assert mutant.left == 0
    assert len(mutant.removed) == 3


@settings(deadline=None)
@given(chosen=st.sets(st.integers(0, 2)))
def test_laws(chosen):
    """A mutation touches the named slots only, whatever the order; none is the identity; the rest stays removable."""
    cubin, find, mutate.find_tool = three_waits(), mutate.find_tool, lambda name: None
    try:
        sites = wait_sites(cubin, "tinygemm2")
        mutant = remove_waits(cubin, "tinygemm2", tuple(sorted(chosen, reverse=True)))
        assert mutant.removed == tuple(sites[index] for index in sorted(chosen))
        at = {place(cubin, site) for site in mutant.removed}
        assert {index & ~1 for index in differing(cubin, mutant.code)} == at
        rest = remove_waits(mutant.code, "tinygemm2", tuple(range(mutant.left)))
        assert rest.code == remove_waits(cubin, "tinygemm2").code
        assert (mutant.code == cubin) == (not chosen)
    finally:
        mutate.find_tool = find


def test_removing_nothing_is_the_identity():
    assert remove_waits(three_waits(), "tinygemm2", ()) == Mutant(three_waits(), (), 3, "unchanged")
    assert remove_waits(many(), "plain", ()).code == many(), "also where there is nothing to remove"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "sites", "reason"),
    [
        ("third", None, "third is not in the cubin, which holds calls, first, plain, second"),
        ("third", (), "third is not in the cubin"),
        ("plain", None, r"plain has no wait \(ACQBULK\) to remove"),
        ("plain", (0,), "plain has no wait"),
        ("first", (2,), r"first has the wait sites 0 to 1; \(2,\) names another"),
        ("first", (0, -1), "names another"),
    ],
)
def test_what_cannot_be_removed_is_refused(kernel, sites, reason):
    with pytest.raises(MutationError, match=reason):
        remove_waits(many(), kernel, sites)


def test_a_device_function_is_no_kernel():
    name = next(f.name for f in functions(many(relocatable=True)) if not f.kernel)
    with pytest.raises(MutationError, match="is not in the cubin"):
        wait_sites(many(relocatable=True), name)


def test_what_is_no_cubin_is_refused():
    with pytest.raises(BadCubin):
        remove_waits(b"PK\x03\x04", "first")


@pytest.mark.parametrize("bit", [16, 40, 64, 104, 110, 115])
def test_a_wait_with_operands_or_a_scoreboard_is_refused(bit, no_disassembler):
    cubin = bytearray(many())
    cubin[place(many(), wait_sites(many(), "second")[0]) + bit // 8] ^= 1 << bit % 8
    with pytest.raises(MutationError, match=r"second\+0x[0-9a-f]+ is encoded 0x[0-9a-f]+: operands or a scoreboard"):
        remove_waits(bytes(cubin), "second")


def test_every_mutant_goes_through_the_slot_check(no_disassembler, monkeypatch):
    checked = []
    monkeypatch.setattr(mutate, "check_slots", lambda *arguments: checked.append(arguments))
    mutant = remove_waits(many(), "first", (1,))
    assert checked == [(many(), mutant.code, "first", mutant.removed)]


@pytest.mark.parametrize("bit", [0, 15, 16, 127, 128, -1])
def test_the_slot_check_finds_every_other_change(bit):
    """bit: from the start of the removed wait's slot: opcode, guard, operands, control word, the neighbours."""
    cubin = many()
    mutant = remove_waits(cubin, "second")
    mutate.check_slots(cubin, mutant.code, "second", mutant.removed)
    at, code = place(cubin, mutant.removed[0]) * 8 + bit, bytearray(mutant.code)
    code[at // 8] ^= 1 << at % 8
    with pytest.raises(MutationError, match=r"was to become a NOP|differs from the original"):
        mutate.check_slots(cubin, bytes(code), "second", mutant.removed)


def test_the_slot_check_finds_a_wait_that_is_still_there_and_one_that_is_gone_too():
    cubin = three_waits()
    one, every = remove_waits(cubin, "tinygemm2", (0,)), remove_waits(cubin, "tinygemm2")
    with pytest.raises(MutationError, match="was to become a NOP"):
        mutate.check_slots(cubin, one.code, "tinygemm2", every.removed)
    with pytest.raises(MutationError, match="differs from the original"):
        mutate.check_slots(cubin, every.code, "tinygemm2", one.removed)


REMOVED = (Site("k", 16, "@P0"),)
OLD = [{"opcode": "LDC", "operands": "R1"}, {"predicate": "@P0", "opcode": "ACQBULK"}, {"opcode": "EXIT"}]
NEW = [OLD[0], {"predicate": "@P0", "opcode": "NOP"}, OLD[2]]


def test_the_listing_check_accepts_the_removal():
    mutate.check_listings({"k": OLD}, {"k": NEW}, REMOVED)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ({"k": OLD}, {"k": OLD}, r"at k\+0x10: nothing new became nothing new, expected ACQBULK to become NOP"),
        ({"k": OLD}, {"k": [NEW[0], {"opcode": "NOP"}, NEW[2]]}, r"k\+0x10: @P0 ACQBULK became NOP"),
        ({"k": OLD}, {"k": [NEW[0], NEW[1] | {"operands": "R1"}, NEW[2]]}, r"k\+0x10"),
        ({"k": OLD}, {"k": [NEW[0], NEW[1], {"opcode": "NOP"}]}, r"k\+0x20: EXIT became NOP, expected no change"),
        ({"k": OLD}, {"k": [{"opcode": "LDC", "operands": "R2"}, *NEW[1:]]}, r"k\+0x0: LDC became LDC"),
        ({"k": [OLD[0], {"opcode": "BAR"}, OLD[2]]}, {"k": NEW}, r"k\+0x10: BAR became @P0 NOP"),
        ({"k": OLD}, {"k": NEW[:2]}, "longer or shorter"),
        ({"k": OLD}, {"k": NEW, "j": OLD}, "other functions"),
        ({"k": OLD, "j": OLD}, {"k": NEW, "j": NEW}, r"j\+0x10: @P0 ACQBULK became @P0 NOP, expected no change"),
    ],
)
def test_the_listing_check_finds_every_other_change(before, after, reason):
    with pytest.raises(MutationError, match=reason):
        mutate.check_listings(before, after, REMOVED)


# --- a disassembler that fails ----------------------------------------------------------------------------------------


def fake(tmp_path, monkeypatch, script):
    """A disassembler that runs `script` instead."""
    program = tmp_path / "nvdisasm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(mutate, "find_tool", lambda name: str(program))


def test_an_nvdisasm_that_cannot_read_the_original_is_no_objection(tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, "echo 'nvdisasm fatal   : No such architecture' >&2; exit 1")
    assert remove_waits(many(), "second").checked == (
        "nvdisasm cannot read the unchanged cubin (nvdisasm fatal   : No such architecture): "
        "checked by the slot reader only"
    )


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo '[]'", "not the listing that was expected"), ("echo text", "not the listing"), ("exit 9", "exit code 9")],
)
def test_an_answer_that_is_no_listing_is_told(script, reason, tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, script)
    assert reason in remove_waits(many(), "second").checked


def test_an_nvdisasm_that_hangs_is_given_up(tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(mutate, "TIME_LIMIT", 0.2)
    assert "no answer within" in remove_waits(many(), "second").checked


def test_an_nvdisasm_that_reads_the_original_but_not_the_mutant_is_an_error(tmp_path, monkeypatch):
    real = nvdisasm()
    (tmp_path / "count").write_text("0")
    fake(
        tmp_path, monkeypatch,
        f"n=$(cat {tmp_path}/count); echo $((n + 1)) > {tmp_path}/count; [ $n = 0 ] || exit 3; exec {real} \"$@\"",
    )  # fmt: skip
    with pytest.raises(MutationError, match="nvdisasm reads second, but not the mutant: exit code 3"):
        remove_waits(many(), "second")


def test_an_nvdisasm_that_sees_no_change_is_an_error(tmp_path, monkeypatch):
    real, original = nvdisasm(), tmp_path / "original.cubin"
    original.write_bytes(many())
    fake(tmp_path, monkeypatch, f"exec {real} -json {original}")
    with pytest.raises(MutationError, match="expected ACQBULK to become NOP"):
        remove_waits(many(), "second")


def test_a_mutant_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        remove_waits(many(), "second", ()).left = 0
