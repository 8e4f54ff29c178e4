"""What the audit says of one kernel, for the row that shows whether the checks agree."""

from __future__ import annotations

import pytest

from pdl_stress.audit.single import in_words

SOURCE = r"""
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
extern "C" __global__ void good(const volatile float* x, float* o) { WAIT; o[threadIdx.x] = x[threadIdx.x]; }
extern "C" __global__ void early(const volatile float* x, float* o) {
    float v = x[threadIdx.x]; WAIT; o[threadIdx.x] = v; }
extern "C" __global__ void never(const volatile float* x, float* o) { o[threadIdx.x] = x[threadIdx.x]; }
"""


@pytest.fixture(scope="module")
def code() -> bytes:
    from cuda.core import Program, ProgramOptions

    compiled = Program(SOURCE, "c++", ProgramOptions(std="c++17", arch="sm_90a")).compile("cubin").code
    assert isinstance(compiled, bytes)
    return compiled


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("good", "all 2 accesses after the wait"),
        ("early", "1 of 2 accesses may be before the wait; parameter 0"),
        ("never", "never waits"),
        ("gone", "not audited: the cubin does not hold it"),
    ],
)
def test_one_kernel_in_words(code: bytes, kernel: str, text: str) -> None:
    assert in_words(code, kernel) == text


def test_what_cannot_be_read_is_said() -> None:
    assert in_words(b"no cubin", "k").startswith("not audited: ")


def test_without_a_disassembler_the_rest_goes_on(code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdl_stress.audit.listing.find_tool", lambda name: None)
    assert in_words(code + b" ", "good").startswith("not audited: ")
