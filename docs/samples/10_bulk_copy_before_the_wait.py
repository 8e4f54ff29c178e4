"""May a bulk copy (TMA) be issued before the wait, if its data is used only afterwards (F13)?

    pdl-stress check docs/samples/10_bulk_copy_before_the_wait.py

`cp.async.bulk` reads global memory some time after it was issued, and nothing that stands behind it in the program
holds it back. Issued before the wait, it fills shared memory with what `x` held then; that the threads look at the tile
only after the wait does not help (R1: the wait orders what comes behind it). The fixed twin waits, and then issues the
copy. For `x` it would be enough that the issuing thread waits, since the mbarrier orders all others behind it (R2).

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_copy_first` | FAIL | `x`: stand-in → `copy_first`; `out` is in order |
| `fixed_wait_first` | PASS | `wait_first` reads `x`, and writes `out`, after its wait |
"""

import torch

from pdl_stress import cuda_kernel, subject

SOURCE = r"""
__device__ void wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ void init(unsigned bar) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ void bulk_copy(unsigned tile, const float* x, unsigned bytes, unsigned bar) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(tile),
                 "l"(__cvta_generic_to_global(x)), "r"(bytes), "r"(bar)
                 : "memory");
}

__device__ void arrived(unsigned bar) {
    int done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.s32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(bar) : "memory");
}

template <bool wait_before_copy>
__device__ void scale(const float* x, float* out) {
    __shared__ alignas(128) float tile[256];
    __shared__ alignas(8) unsigned long long bar;
    const int first = blockIdx.x * 256;
    if (threadIdx.x == 0) init(shared_address(&bar));
    __syncthreads();
    if (wait_before_copy) wait();
    if (threadIdx.x == 0) bulk_copy(shared_address(tile), x + first, sizeof(tile), shared_address(&bar));
    if (!wait_before_copy) wait();
    arrived(shared_address(&bar));
    out[first + threadIdx.x] = 2 * tile[threadIdx.x];
}

extern "C" __global__ void copy_first(const float* x, float* out) { scale<false>(x, out); }
extern "C" __global__ void wait_first(const float* x, float* out) { scale<true>(x, out); }
"""
copy_first = cuda_kernel(SOURCE, "copy_first")
wait_first = cuda_kernel(SOURCE, "wait_first")


def inputs():
    return {"x": torch.randn(2048, device="cuda"), "out": torch.empty(2048, device="cuda")}


@subject(inputs)
def broken_copy_first(x, out):
    copy_first(x, out, grid=8, block=256, pdl=True)


@subject(inputs)
def fixed_wait_first(x, out):
    wait_first(x, out, grid=8, block=256, pdl=True)
