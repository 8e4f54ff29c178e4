"""What if the wait stands on some paths only (F05)?

    pdl-stress check docs/samples/05_waits_on_some_paths.py

`scale_maybe_waits` waits only if its argument `waits` is set: think of a wait inside `if (bias != nullptr)`. On the
other path nothing orders its loads behind the stores of the kernel before (R1). The fixed twin waits on every path. The
last subject is the broken kernel again, launched so that it takes the good path: the check runs what you launch, and a
branch that is not taken is not checked. Give each path its own subject.

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_path_without_wait` | FAIL | `x`: stand-in → `scale_maybe_waits`; and its early write of `out` |
| `fixed_waits_on_every_path` | PASS | `scale_always_waits` reads `x`, and writes `out`, after its wait |
| `broken_but_not_on_this_path` | PASS | the fault is still there, and is not seen |
"""

import torch

from pdl_stress import cuda_kernel, subject

SOURCE = r"""
extern "C" __global__ void scale_maybe_waits(const volatile float* x, volatile float* out, int waits) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (waits) asm volatile("griddepcontrol.wait;" ::: "memory");
    out[i] = 2 * x[i];
}

extern "C" __global__ void scale_always_waits(const volatile float* x, volatile float* out, int negate) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    out[i] = negate ? -2 * x[i] : 2 * x[i];
}
"""
scale_maybe_waits = cuda_kernel(SOURCE, "scale_maybe_waits")
scale_always_waits = cuda_kernel(SOURCE, "scale_always_waits")


def inputs():
    return {"x": torch.randn(2048, device="cuda"), "out": torch.empty(2048, device="cuda")}


@subject(inputs)
def broken_path_without_wait(x, out):
    scale_maybe_waits(x, out, 0, grid=8, block=256, pdl=True)


@subject(inputs)
def fixed_waits_on_every_path(x, out):
    scale_always_waits(x, out, 0, grid=8, block=256, pdl=True)


@subject(inputs)
def broken_but_not_on_this_path(x, out):
    scale_maybe_waits(x, out, 1, grid=8, block=256, pdl=True)
