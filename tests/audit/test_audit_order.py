"""Places where a wrong answer would be easy: the audit must find, or say that it does not know. No GPU."""

from __future__ import annotations

import pytest

from pdl_stress.audit import Severity
from pdl_stress.audit.graph import build
from pdl_stress.audit.image import Image
from pdl_stress.audit.listing import BadListing, Function, Instruction

BODY = 'extern "C" __global__ void k(const float* x, float* y, int* c, int n, int flag) {{ {} }}'
USE = "st(y + threadIdx.x, ld(x + threadIdx.x)); TRIGGER;"


def answer(kernel):
    """clean, unknown, or the rules that found something."""
    worse = {finding.rule for finding in kernel.findings if finding.severity < Severity.UNKNOWN}
    return sorted(worse) or ("unknown" if kernel.undecided else "clean")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # Barriers that look alike.
        (
            'if (threadIdx.x < 32) WAIT; asm volatile("bar.sync %0, 64;" ::"r"(threadIdx.x / 64 + 1) : "memory"); '
            + USE,
            "unknown",
        ),
        ('if (threadIdx.x < 32) WAIT; asm volatile("bar.arrive 1, 64;" ::: "memory"); ' + USE, ["waits-in-some-warps"]),
        ("__syncthreads(); if (threadIdx.x < 32) WAIT; " + USE, ["waits-in-some-warps"]),
        ("__syncthreads(); float a = ld(x); __syncthreads(); WAIT; st(y, a); TRIGGER;", ["reads-before-wait"]),
        ("if (threadIdx.x < 32) { WAIT; __syncthreads(); } else __syncthreads(); " + USE, "clean or unknown"),
        ("if (threadIdx.y == 0) WAIT; __syncthreads(); " + USE, "clean"),
        ("if (threadIdx.x < n) WAIT; __syncthreads(); " + USE, "unknown"),
        (
            "WAIT; if (ld(x) > 0) { if (threadIdx.x == 0) WAIT; } __syncthreads(); st(y, 1); TRIGGER;",
            "clean",
        ),
        # One condition, asked twice.
        ("if (flag) WAIT; if (flag) { " + USE + " }", "clean"),
        ("if (flag) WAIT; if (!flag) { " + USE + " }", ["waits-on-some-paths"]),
        ("if (threadIdx.x < 64) WAIT; if (threadIdx.x / 32 == 1) { " + USE + " }", "clean"),
        ("if (threadIdx.x < 64) WAIT; if (threadIdx.x / 32 == 2) { " + USE + " }", ["waits-in-some-warps"]),
        ("if (threadIdx.x - 64u < 32u) WAIT; if (threadIdx.x / 32 == 2) { " + USE + " }", "clean"),
        # Loops.
        ("for (int i = 0; i < 4; ++i) { if (i == 0) WAIT; st(y + i, ld(x + i)); } TRIGGER;", "clean or unknown"),
        ("for (int i = 0; i < n; ++i) { WAIT; st(y + i, ld(x + i)); } TRIGGER;", "clean"),
        (
            "for (int i = 0; i < n; ++i) { st(y + i, ld(x + i)); WAIT; } TRIGGER;",
            ["reads-before-wait", "writes-before-wait"],
        ),
        ("for (int i = 0; i < n; ++i) WAIT; st(y, 1); TRIGGER;", ["waits-on-some-paths"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_120a", marks=pytest.mark.slow)])
def test_what_is_easily_mistaken(audit_source, body, expected, arch):
    found = answer(audit_source(BODY.format(body), arch))
    assert found == expected or (expected == "clean or unknown" and found in ("clean", "unknown"))


def test_a_store_by_threads_that_do_not_wait_is_found_beside_a_barrier_of_two_places(audit_source):
    """Each side of the branch has a barrier of its own: the store before it is early, what follows may not be."""
    body = "if (threadIdx.x < 32) { WAIT; __syncthreads(); } else { st((float*)c, 1); __syncthreads(); } " + USE
    kernel = audit_source(BODY.format(body))
    early = [f for f in kernel.findings if f.severity is Severity.ERROR]
    assert {finding.subject for finding in early} == {"parameter 2"}


TENSORS = """
extern "C" __global__ void k(float* y, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                             const __grid_constant__ TensorMap c, const char* d) {
    __shared__ alignas(128) float s[1024];
    s[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %1}], [%2];"
                     ::"l"(&a), "r"(0), "r"(sh(s)) : "memory");
        asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %1}], [%2];"
                     ::"l"(&b), "r"(0), "r"(sh(s)) : "memory");
        asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %1}];" ::"l"(&c), "r"(0) : "memory");
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" ::"l"(y), "r"(sh(s)) : "memory");
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], 256;" ::"l"(d) : "memory");
    }
    WAIT;
}
"""


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_each_bulk_access_names_its_operand_and_prefetches_are_none(audit_source, arch):
    kernel = audit_source(TENSORS, arch)
    found = {(f.rule, f.subject) for f in kernel.findings if f.severity is Severity.ERROR}
    assert found == {("async-before-wait", f"parameter {number}") for number in (0, 1, 2)}


CALLED = """
typedef float (*Function)(const float*, int);
extern "C" __global__ void k(Function f, const float* x, float* y) {{ {} }}
"""


def test_a_call_that_is_not_followed_before_the_wait_is_no_clean_answer(audit_source):
    early = audit_source(CALLED.format("float a = f(x, 1); WAIT; st(y, a); TRIGGER;"))
    assert answer(early) == "unknown"
    assert any("there may be accesses that were not seen" in finding.message for finding in early.findings)
    assert answer(audit_source(CALLED.format("WAIT; st(y, f(x, 1)); TRIGGER;"))) == "clean"


def test_a_driver_service_is_no_unknown_call(audit_source):
    text = 'extern "C" int printf(const char*, ...); ' + BODY.format(f'printf("%d", flag); WAIT; {USE}')
    assert answer(audit_source(text)) == "clean"


def test_helpers_are_told_apart_by_their_caller(audit_source):
    """The same function is called before and behind the wait: only the first call is early."""
    kernel = audit_source(BODY.format("st(y, far_load((const float*)c, 1)); WAIT; st(y + 1, far_load(x, 1)); TRIGGER;"))
    found = {(f.rule, f.subject) for f in kernel.findings if f.severity is Severity.ERROR}
    assert found == {("reads-before-wait", "parameter 2"), ("writes-before-wait", "parameter 1")}


# --- graphs -----------------------------------------------------------------------------------------------------------


def code(*lines):
    """Instructions from `guard|opcode|operands`."""
    listed = []
    for index, line in enumerate(lines):
        guard, opcode, operands = ([*line.split("|"), "", ""])[:3] if "|" in line else ("", line, "")
        listed.append(Instruction(index * 16, opcode, guard, tuple(filter(None, operands.split(",")))))
    return Function("k", tuple(listed))


def edges(graph):
    return {
        (b.instructions[0].offset, graph.blocks[e.target].instructions[0].offset) for b in graph.blocks for e in b.edges
    }


def test_branches_and_exits_make_blocks():
    graph = build("k", {"k": code("P0|BRA|0x30", "P1|EXIT|", "|BRA|0x0", "EXIT")}, Image())
    assert edges(graph) == {(0, 0x30), (0, 0x10), (0x10, 0x20), (0x20, 0)}
    assert [block.exits for block in sorted(graph.blocks, key=lambda b: b.instructions[0].offset)] == [
        None,
        "P1",
        None,
        "",
    ]
    assert not graph.lost
    assert len(graph.cyclic) == 3


def test_an_indirect_branch_goes_where_the_cubin_says():
    function = code("|BRX|R2", "EXIT", "EXIT")
    known = build("k", {"k": function}, Image(indirect={0: (0x10, 0x20)}))
    assert edges(known) == {(0, 0x10), (0, 0x20)}
    assert not known.lost
    unknown = build("k", {"k": function}, Image())
    assert unknown.lost
    assert "targets of BRX R2 are not known" in unknown.notes[0]


def test_code_that_ends_without_an_exit_is_lost():
    assert build("k", {"k": code("NOP")}, Image()).lost


def test_a_branch_out_of_the_code_is_lost():
    assert build("k", {"k": code("|BRA|0x400")}, Image()).lost


def test_recursion_is_not_followed():
    graph = build("k", {"k": code("|CALL.REL.NOINC|`(k)`", "EXIT")}, Image())
    assert any("not followed" in note for note in graph.notes)
    assert len(graph.blocks) < 50


def test_a_kernel_that_is_not_listed_is_an_error():
    with pytest.raises(BadListing, match="does not list other"):
        build("other", {"k": code("EXIT")}, Image())
