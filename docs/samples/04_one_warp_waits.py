"""Is it enough that one warp waits (F04)?

    pdl-stress check docs/samples/04_one_warp_waits.py

The wait blocks the thread that executes it and no other (R6). Here warp 0 waits, and the seven other warps go straight
on to their loads. The fixed twin has the same single waiting warp and a `__syncthreads()` behind it: the barrier holds
the other warps until warp 0 has come out of its wait, which orders their loads as well (R2).

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_no_barrier` | FAIL | `x`: stand-in → `scale_no_barrier`, element 32 first; and its early write of `out` |
| `fixed_barrier` | PASS | `scale_barrier` reads `x`, and writes `out`, after its wait |
"""

import torch

from pdl_stress import cuda_kernel, subject

SOURCE = r"""
extern "C" __global__ void scale_no_barrier(const volatile float* x, volatile float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x < 32) asm volatile("griddepcontrol.wait;" ::: "memory");
    out[i] = 2 * x[i];
}

extern "C" __global__ void scale_barrier(const volatile float* x, volatile float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x < 32) asm volatile("griddepcontrol.wait;" ::: "memory");
    __syncthreads();
    out[i] = 2 * x[i];
}
"""
scale_no_barrier = cuda_kernel(SOURCE, "scale_no_barrier")
scale_barrier = cuda_kernel(SOURCE, "scale_barrier")


def inputs():
    return {"x": torch.randn(2048, device="cuda"), "out": torch.empty(2048, device="cuda")}


@subject(inputs)
def broken_no_barrier(x, out):
    scale_no_barrier(x, out, grid=8, block=256, pdl=True)


@subject(inputs)
def fixed_barrier(x, out):
    scale_barrier(x, out, grid=8, block=256, pdl=True)
