"""Real bugs, restated as small kernels of our own: found before their fix, clean after it. No GPU."""

from __future__ import annotations

import pytest

from pdl_stress.audit import Declared, Severity
from pdl_stress.contract import KernelContract, Trigger, Wait

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_120a")

# A merge of sorted tiles: the split points were read by an index computation in front of the wait.
MERGE = """
extern "C" __global__ void merge(const float* keys, const int* splits, float* out, int n) {{
    __shared__ float tile[512];
    {early}
    {wait}
    {late}
    for (int i = threadIdx.x; i < end - begin; i += blockDim.x) tile[i & 511] = ld(keys + begin + i);
    __syncthreads();
    for (int i = threadIdx.x; i < end - begin; i += blockDim.x) st(out + begin + i, tile[(i * 7) & 511]);
    TRIGGER;
}}
"""
SPLITS = """const int begin = *(const volatile int*)(splits + blockIdx.x);
    const int end = *(const volatile int*)(splits + blockIdx.x + 1);"""

# A matrix product whose wait hangs on a macro that the build of one architecture family did not define.
GEMM = """
#ifdef USE_PDL
#define MAYBE_WAIT WAIT
#else
#define MAYBE_WAIT
#endif
extern "C" __global__ void gemm(const float* a, const float* b, float* c, int n) {
    __shared__ float s[2][256];
    float sum = 0;
    MAYBE_WAIT;
    for (int k = 0; k < n; k += 256) {
        s[0][threadIdx.x] = ld(a + k + threadIdx.x);
        s[1][threadIdx.x] = ld(b + k + threadIdx.x);
        __syncthreads();
        for (int j = 0; j < 16; ++j) sum += s[0][(threadIdx.x + j) & 255] * s[1][j];
        __syncthreads();
    }
    TRIGGER;
    st(c + blockIdx.x * 256 + threadIdx.x, sum);
}
"""

# A scaled product: one warp loads the matrix by bulk copies and waits, another loads the scale factors and did not.
SCALES = """
extern "C" __global__ void scaled(const float* x, const float* scales, float* out, int n) {{
    __shared__ alignas(128) float tile[256];
    __shared__ alignas(128) float factors[256];
    __shared__ u64 full;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) init(&full, 2);
    __syncthreads();
    if (warp == 0) {{
        if (elected()) {{ WAIT; expect(&full, 1024); bulk(tile, x, 1024, &full); }}
    }} else if (warp == 1) {{
        if (elected()) {{ {wait} expect(&full, 1024); bulk(factors, scales, 1024, &full); }}
    }} else {{
        poll(&full, 0);
        st(out + threadIdx.x, tile[threadIdx.x & 255] * factors[threadIdx.x & 255]);
    }}
    __syncthreads();
    if (threadIdx.x == 0) TRIGGER;
}}
"""

# A sum whose operand was promised constant, so that the compiler took its load out of the loop, and over the wait.
HOISTED = """
extern "C" __global__ void sum(const float* {restrict} x, float* y, int n) {{
    float total = 0;
    for (int i = 0; i < n; ++i) {{
        asm volatile("griddepcontrol.wait;"{clobber});
        total += x[threadIdx.x] * i;
    }}
    asm volatile("griddepcontrol.wait;"{clobber});
    y[threadIdx.x] = total;
    TRIGGER;
}}
"""


def rules(kernel):
    return {finding.rule for finding in kernel.findings if finding.severity is not Severity.NOTE}


def subjects(kernel, rule):
    return {finding.subject for finding in kernel.findings if finding.rule == rule}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_merge_that_reads_its_split_points_before_the_wait(audit_source, arch):
    before = audit_source(MERGE.format(early=SPLITS, wait="WAIT;", late=""), arch)
    assert rules(before) == {"reads-before-wait"}
    assert subjects(before, "reads-before-wait") == {"parameter 1"}
    assert rules(audit_source(MERGE.format(early="", wait="WAIT;", late=SPLITS), arch)) == set()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_matrix_product_whose_wait_was_compiled_out(audit_source, arch):
    contract = KernelContract(("a", "b"), ("c",), (), Wait.ALL, Trigger.BEFORE_STORES)
    declared = {"gemm": Declared(contract, {0: "a", 1: "b", 2: "c"})}
    before = audit_source(GEMM, arch, strict=False, contracts=declared)
    assert rules(before) == {"never-waits"}
    after = audit_source("#define USE_PDL\n" + GEMM, arch, strict=False, contracts=declared)
    assert rules(after) == set()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_loader_of_scale_factors_that_does_not_wait(audit_source, arch):
    before = audit_source(SCALES.format(wait=""), arch)
    assert "waits-in-some-warps" in rules(before)
    assert subjects(before, "waits-in-some-warps") == {"parameter 1"}
    assert rules(audit_source(SCALES.format(wait="WAIT;"), arch)) == set()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_load_that_the_compiler_took_over_the_wait(audit_source, arch):
    before = audit_source(HOISTED.format(restrict="__restrict__", clobber=""), arch)
    assert rules(before) == {"hoisted-read"}
    assert subjects(before, "hoisted-read") == {"parameter 0"}
    after = audit_source(HOISTED.format(restrict="", clobber=' ::: "memory"'), arch)
    assert rules(after) == set()
