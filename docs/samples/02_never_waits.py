"""What if a kernel is launched with the PDL attribute and never waits (F02)?

    pdl-stress check docs/samples/02_never_waits.py

The attribute lets the kernel start as soon as every CTA of the kernel before has triggered or exited (R4), and nothing
holds it back then: it reads `x` while `x` is still being written. A kernel before it that does not trigger is no cure
(R5). The fixed twin waits before its first access; the wait returns once the kernel before has completed and its stores
are visible (R1). The broken kernel also writes `out` too early, over whatever the kernel before did with it.

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_never_waits` | FAIL | `x`: stand-in → `scale_never_waits`; and its early write of `out` |
| `fixed_waits` | PASS | `scale_waits` reads `x`, and writes `out`, after its wait |
"""

import torch

from pdl_stress import cuda_kernel, subject

SOURCE = r"""
extern "C" __global__ void scale_never_waits(const volatile float* x, volatile float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = 2 * x[i];
}

extern "C" __global__ void scale_waits(const volatile float* x, volatile float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    out[i] = 2 * x[i];
}
"""
scale_never_waits = cuda_kernel(SOURCE, "scale_never_waits")
scale_waits = cuda_kernel(SOURCE, "scale_waits")


def inputs():
    return {"x": torch.randn(2048, device="cuda"), "out": torch.empty(2048, device="cuda")}


@subject(inputs)
def broken_never_waits(x, out):
    scale_never_waits(x, out, grid=8, block=256, pdl=True)


@subject(inputs)
def fixed_waits(x, out):
    scale_waits(x, out, grid=8, block=256, pdl=True)
