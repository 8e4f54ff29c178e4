"""The machine code of every variant is what its behaviour says. No GPU."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fusions.ops import native, sass
from fusions.ops.native import Behaviour

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_120a")


def variants(kernel, fences=(False, True), extras=(False,)):
    """Every behaviour that `kernel` can have."""
    for wait, trigger, fence, early, extra in itertools.product(
        native.WAITS, native.TRIGGERS, fences, (True, False), extras
    ):
        try:
            behaviour = Behaviour(wait, trigger, fence, early, delay=extra, stamps=extra)
            native.validate(kernel, behaviour)
        except ValueError:
            continue
        yield behaviour


def nvdisasm():
    """The disassembler on the path, or the wheel's; None where there is neither."""
    found = shutil.which("nvdisasm")
    if found is None and (spec := importlib.util.find_spec("nvidia")) is not None:
        for root in spec.submodule_search_locations or []:
            for path in Path(root).glob("*/bin/nvdisasm"):
                return str(path)
    return found


def test_the_variants_are_the_expected_number():
    assert len(list(variants("rmsnorm"))) == 52
    assert len(list(variants("tinygemm2"))) == 106


@pytest.mark.parametrize("kernel", native.KERNELS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_deployed_kernels_and_single_faults_hold_what_they_say(kernel, arch):
    deployed = native.DEPLOYED[kernel]
    sass.verify(kernel, deployed, arch)
    for wait in ("barrier", "one_warp", "branch", "late", "never"):
        sass.verify(kernel, Behaviour(wait, "after_stores"), arch)
    for trigger in native.TRIGGERS:
        sass.verify(kernel, Behaviour(deployed.wait, trigger, fence=trigger != "none", delay=True, stamps=True), arch)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", native.KERNELS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_variant_holds_what_it_says(kernel, arch):
    for behaviour in variants(kernel):
        sass.verify(kernel, behaviour, arch)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", native.KERNELS)
def test_delay_and_stamps_change_no_order(kernel):
    for behaviour in variants(kernel, fences=(False,), extras=(True,)):
        sass.verify(kernel, behaviour)


@pytest.mark.parametrize("kernel", native.KERNELS)
def test_variants_of_a_kernel_have_the_same_parameters(kernel):
    """Graph nodes exchange one variant for another: the parameter bank must have one size and one layout."""
    layouts = set()
    for behaviour in (
        native.DEPLOYED[kernel],
        Behaviour("never", "none"),
        Behaviour("branch", delay=True, stamps=True),
    ):
        cubin = native.cubin(kernel, behaviour)
        layouts.add(parameter_layout(cubin, kernel))
    (layout,) = layouts
    parameters = importlib.import_module(f"fusions.ops.{kernel}")._Parameters
    assert [size for _, _, size in layout] == [getattr(parameters, name).size for name, *_ in parameters._fields_]


def parameter_layout(cubin, kernel):
    """[(ordinal, offset, size)] from the kernel's `.nv.info` section: a record of kind 0x17 holds one parameter."""
    code = sass_sections(cubin)[f".nv.info.{kernel}"]
    found, at = [], 0
    while at < len(code):
        form, attribute, size = code[at], code[at + 1], int.from_bytes(code[at + 2 : at + 4], "little")
        if form == 0x04:
            if attribute == 0x17:
                record = code[at + 4 : at + 4 + size]
                ordinal, offset = int.from_bytes(record[4:6], "little"), int.from_bytes(record[6:8], "little")
                found.append((ordinal, offset, int.from_bytes(record[8:12], "little") >> 18))
            at += 4 + size
        else:
            at += 4
    return tuple(sorted(found))


def sass_sections(cubin):
    """Every section by name, read independently of the product's reader."""
    number = lambda at, size: int.from_bytes(cubin[at : at + size], "little")  # noqa: E731
    table, size, count, names = number(40, 8), number(58, 2), number(60, 2), number(62, 2)
    strings = number(table + names * size + 24, 8)
    sections = {}
    for header in range(table, table + count * size, size):
        start = strings + number(header, 4)
        name = cubin[start : cubin.index(b"\0", start)].decode()
        sections[name] = cubin[number(header + 24, 8) :][: number(header + 32, 8)]
    return sections


@pytest.mark.parametrize("kernel", native.KERNELS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_decoder_agrees_with_the_disassembler(kernel, arch, tmp_path):
    if (tool := nvdisasm()) is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    for behaviour in (
        native.DEPLOYED[kernel],
        Behaviour("branch", "after_stores", fence=True, delay=True, stamps=True),
        Behaviour("never", "none"),
    ):
        cubin = native.cubin(kernel, behaviour, arch)
        (tmp_path / "kernel.cubin").write_bytes(cubin)
        text = subprocess.run(
            [tool, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
        ).stdout
        line = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")
        known = set(sass.OPCODES.values())
        seen = [(m[3], m[2] is not None, int(m[1], 16)) for m in line.finditer(text)]
        decoded = sass.instructions(cubin)
        assert [i.offset for i in decoded] == [offset for _, _, offset in seen]
        assert [tuple(i) for i in decoded if i.opcode in known] == [entry for entry in seen if entry[0] in known]


@pytest.mark.parametrize(
    ("kernel", "made", "claimed", "field"),
    [
        ("rmsnorm", Behaviour("never"), Behaviour("all"), "waits is 0, expected 1"),
        ("rmsnorm", Behaviour("all"), Behaviour("never"), "waits is 1, expected 0"),
        ("rmsnorm", Behaviour("late"), Behaviour("all"), "loads_before_wait"),
        ("rmsnorm", Behaviour("all"), Behaviour("late"), "loads_before_wait is 0, expected 1 or more"),
        ("rmsnorm", Behaviour("all", "before_stores"), Behaviour("all"), "stores_after_trigger"),
        ("rmsnorm", Behaviour("all"), Behaviour("all", "before_stores"), "stores_before_trigger"),
        ("rmsnorm", Behaviour("all", "entry"), Behaviour("all", "after_wait"), "triggers_before_wait is 1, expected 0"),
        ("tinygemm2", Behaviour("loaders", "after_wait"), Behaviour("loaders", "entry"), "triggers_before_wait is 0"),
        ("tinygemm2", Behaviour("loaders", "none"), Behaviour("loaders"), "triggers is 0, expected 1"),
        ("tinygemm2", Behaviour("loaders"), Behaviour("loaders", "none"), "triggers is 1, expected 0"),
        ("tinygemm2", Behaviour("loaders"), Behaviour("loaders", fence=True), "fences is 0, expected 1 or more"),
        ("tinygemm2", Behaviour("loaders", fence=True), Behaviour("loaders"), "fences is"),
        ("tinygemm2", Behaviour("loaders"), Behaviour("loaders", early_weights=False), "waits is 1, expected 3"),
    ],
)
def test_a_variant_that_is_not_what_it_says_is_found(kernel, made, claimed, field):
    census = sass.pdl_census(native.cubin(kernel, made))
    with pytest.raises(sass.SassMismatch, match=field):
        sass.check(census, sass.expected_census(kernel, claimed), "a variant")


def test_verify_looks_at_the_code_it_names(monkeypatch):
    """A compiler that drops the wait is found by `verify` itself."""
    cubin = bytearray(native.cubin("rmsnorm", Behaviour("all")))
    (wait,) = (i for i in sass.instructions(bytes(cubin)) if i.opcode == "ACQBULK")
    start = bytes(cubin).index(sass.text_sections(bytes(cubin))["rmsnorm"])
    cubin[start + wait.offset] = 0x18  # NOP is 0x918
    cubin[start + wait.offset + 1] = cubin[start + wait.offset + 1] & 0xF0 | 0x9
    monkeypatch.setattr(native, "cubin", lambda *_: bytes(cubin))
    with pytest.raises(sass.SassMismatch, match="waits is 0, expected 1"):
        sass.verify("rmsnorm", Behaviour("all"))


def test_predicates_are_decoded():
    word = lambda guard: ((guard << 12) | 0x82E).to_bytes(16, "little")  # noqa: E731
    decoded = [i.predicated for i in sass._decode(word(7) + word(0) + word(8) + word(15))]
    assert decoded == [False, True, True, True]


def test_what_is_no_cubin_is_refused():
    with pytest.raises(ValueError, match="not a cubin"):
        sass.pdl_census(b"PK\x03\x04" + bytes(64))
