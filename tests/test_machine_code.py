"""The machine code of every variant is what its behaviour says. No GPU."""

from __future__ import annotations

import itertools

import pytest

from fusions.ops.native import Behaviour, gemm, norm
from fusions.ops.native import code as native
from pdl_stress.catalog import machine_code
from pdl_stress.sass.cubin import instructions, text_sections

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


def test_the_variants_are_the_expected_number():
    assert len(list(variants("rmsnorm"))) == len(list(variants("layernorm"))) == 52
    assert len(list(variants("tinygemm2"))) == 106


@pytest.mark.parametrize("kernel", native.KERNELS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_deployed_kernels_and_single_faults_hold_what_they_say(kernel, arch):
    deployed = native.DEPLOYED[kernel]
    machine_code.verify(kernel, deployed, arch)
    for wait in ("barrier", "one_warp", "branch", "late", "never"):
        machine_code.verify(kernel, Behaviour(wait, "after_stores"), arch)
    for trigger in native.TRIGGERS:
        machine_code.verify(
            kernel, Behaviour(deployed.wait, trigger, fence=trigger != "none", delay=True, stamps=True), arch
        )


@pytest.mark.parametrize("kernel", native.KERNELS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_variant_holds_what_it_says(kernel, arch):
    for behaviour in variants(kernel):
        machine_code.verify(kernel, behaviour, arch)


@pytest.mark.parametrize("kernel", native.KERNELS)
def test_delay_and_stamps_change_no_order(kernel):
    for behaviour in variants(kernel, fences=(False,), extras=(True,)):
        machine_code.verify(kernel, behaviour)


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
    parameters = {
        "rmsnorm": norm.RmsnormParameters,
        "layernorm": norm.LayernormParameters,
        "tinygemm2": gemm._Parameters,
    }[kernel]
    assert [size for _, _, size in layout] == [getattr(parameters, name).size for name, *_ in parameters._fields_]


def parameter_layout(cubin, kernel):
    """[(ordinal, offset, size)] from the kernel's `.nv.info` section: a record of kind 0x17 holds one parameter."""
    code = every_section(cubin)[f".nv.info.{kernel}"]
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


def every_section(cubin):
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
    census = machine_code.pdl_census(native.cubin(kernel, made))
    with pytest.raises(machine_code.SassMismatch, match=field):
        machine_code.check(census, machine_code.expected_census(kernel, claimed), "a variant")


def test_verify_looks_at_the_code_it_names(monkeypatch):
    """A compiler that drops the wait is found by `verify` itself."""
    cubin = bytearray(native.cubin("rmsnorm", Behaviour("all")))
    (wait,) = (i for i in instructions(bytes(cubin)) if i.opcode == "ACQBULK")
    start = bytes(cubin).index(text_sections(bytes(cubin))["rmsnorm"])
    cubin[start + wait.offset] = 0x18  # NOP is 0x918
    cubin[start + wait.offset + 1] = cubin[start + wait.offset + 1] & 0xF0 | 0x9
    monkeypatch.setattr(native, "cubin", lambda *_: bytes(cubin))
    with pytest.raises(machine_code.SassMismatch, match="waits is 0, expected 1"):
        machine_code.verify("rmsnorm", Behaviour("all"))


# Marked points moved by a slip of the hand. The barrier's own place shows on a GPU only: offsets say nothing there.
WAIT = "    wait_before_reads(warp, flag);\n"
FIRST_READ = "    if (first < width) mine = load_vector(row + first, vec, wide_x);\n"
GAIN = "        gain = load_vector(weight + first, vec, wide_weight);\n"
FIRST_STORE = "    if (first < width) store_vector(out_row + first, result, vec, wide_out);\n"
TRIGGER = "    trigger_after_stores();\n"


@pytest.mark.parametrize(
    ("behaviour", "changes", "field"),
    [
        (Behaviour("all"), {WAIT: "", FIRST_READ: FIRST_READ + WAIT}, "loads_before_wait"),
        (Behaviour("all"), {WAIT: ""}, "waits is 0, expected 1"),
        (Behaviour("barrier"), {WAIT: "", FIRST_READ: FIRST_READ + WAIT}, "loads_before_wait"),
        (Behaviour("all"), {TRIGGER: "", FIRST_STORE: TRIGGER + FIRST_STORE}, "stores_after_trigger"),
        (Behaviour("all"), {TRIGGER: "", WAIT: TRIGGER + WAIT}, "triggers_before_wait"),
        (Behaviour("all"), {TRIGGER: ""}, "triggers is 0, expected 1"),
        (Behaviour("all", fence=True), {TRIGGER: ""}, "fences is 0"),
        (
            Behaviour("late"),
            {WAIT: "    pdl_wait();\n", "    pdl_wait();\n    TRIGGER_AT(AFTER_WAIT);\n": ""},
            "loads_before_wait is 0, expected 1 or more",
        ),
        (
            Behaviour("all", "before_stores"),
            {"    TRIGGER_AT(BEFORE_STORES);\n": "", FIRST_STORE: FIRST_STORE + "    TRIGGER_AT(BEFORE_STORES);\n"},
            "stores_before_trigger",
        ),
        (
            Behaviour("all", "entry"),
            {"    TRIGGER_AT(ENTRY);\n": "", WAIT: WAIT + "    TRIGGER_AT(ENTRY);\n"},
            "triggers_before_wait is 0",
        ),
        (
            Behaviour("all", fence=True, delay=True),
            {"    delay_point(delay_ns);\n": "    pdl_trigger();\n    delay_point(delay_ns);\n"},
            "triggers is 2, expected 1",
        ),
    ],
)
def test_a_misplaced_point_of_the_layernorm_is_found(monkeypatch, behaviour, changes, field):
    text = native.source("layernorm", behaviour)
    body = text.index('extern "C"')
    for old, new in changes.items():
        assert text.count(old, body) == 1, old
        text = text[:body] + text[body:].replace(old, new)
    code = native.compiled(text, "layernorm", "sm_90a")
    monkeypatch.setattr(native, "cubin", lambda *_: code)
    with pytest.raises(machine_code.SassMismatch, match=field):
        machine_code.verify("layernorm", behaviour)


def test_what_is_no_cubin_is_refused():
    with pytest.raises(ValueError, match="not a cubin"):
        machine_code.pdl_census(b"PK\x03\x04" + bytes(64))
