"""May a kernel store before its wait, if nobody reads the buffer meanwhile (F09, write after write)?

    pdl-stress check docs/samples/07_overwritten_by_the_kernel_before.py

`fill_late` triggers, passes five microseconds, and then writes all of `out`. The next kernel puts `patch` over the
first half. If it stores before its wait, the late fill lands on top of it, and the patch is lost. The wait returns only
when the kernel before has completed (R1), so a store behind the wait comes last, as it must. `patch` itself may be
loaded early: no kernel writes it.

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → writer) |
|---|---|---|
| `broken_stores_first` | FAIL | `out`: `fill_late` → `patch_first` |
| `fixed_waits_first` | PASS | `patch_after_wait` writes `out` after its wait |
"""

import torch

from pdl_stress import cuda_kernel, subject

SOURCE = r"""
__device__ void wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ void trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ unsigned long long now() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
    return t;
}
__device__ void delay(int ns) {
    for (unsigned long long start = now(); now() - start < ns;) {}
}

extern "C" __global__ void fill_late(const volatile float* x, volatile float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    wait();
    trigger();
    delay(5000);
    out[i] = x[i];
}

extern "C" __global__ void patch_first(const volatile float* patch, volatile float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = patch[i];
    wait();
}

extern "C" __global__ void patch_after_wait(const volatile float* patch, volatile float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float value = patch[i];
    wait();
    out[i] = value;
}
"""
fill_late = cuda_kernel(SOURCE, "fill_late")
patch_first = cuda_kernel(SOURCE, "patch_first")
patch_after_wait = cuda_kernel(SOURCE, "patch_after_wait")


def inputs():
    return {
        "x": torch.randn(2048, device="cuda"),
        "patch": torch.randn(1024, device="cuda"),
        "out": torch.empty(2048, device="cuda"),
    }


@subject(inputs, independent=("patch",))
def broken_stores_first(x, patch, out):
    fill_late(x, out, grid=8, block=256, pdl=True)
    patch_first(patch, out, grid=4, block=256, pdl=True)


@subject(inputs, independent=("patch",))
def fixed_waits_first(x, patch, out):
    fill_late(x, out, grid=8, block=256, pdl=True)
    patch_after_wait(patch, out, grid=4, block=256, pdl=True)
