"""When may an input be declared independent (F28)?

    pdl-stress check docs/samples/11_not_so_independent.py

`independent=("weight",)` says that no kernel in flight writes `weight`, so that it may be read before the wait. In the
first subject that is wrong: `update_late`, in the same chain, triggers and writes `weight` five microseconds later. A
kernel that loads `weight` before its wait then gets the old one (R1, R3). The fixed twin declares nothing, and loads it
after its wait. The last subject shows the declaration where it is right: nothing writes `weight`, and the early load is
a gain without a risk.

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_weight_is_written` | FAIL | `weight`: `update_late` → `weight_first` |
| `fixed_weight_after_wait` | PASS | `weight_after_wait` reads `weight` and `x` after its wait |
| `fixed_weight_is_not_written` | PASS | `weight_first` reads `weight` before its wait, as declared, and `x` after it |
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

extern "C" __global__ void update_late(const volatile float* step, volatile float* weight) {
    wait();
    trigger();
    delay(5000);
    weight[threadIdx.x] = 3 * step[threadIdx.x];
}

extern "C" __global__ void weight_first(const volatile float* x, const volatile float* weight, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float w = weight[threadIdx.x];
    wait();
    out[i] = w * x[i];
}

extern "C" __global__ void weight_after_wait(const volatile float* x, const volatile float* weight, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    wait();
    float w = weight[threadIdx.x];
    out[i] = w * x[i];
}
"""
update_late = cuda_kernel(SOURCE, "update_late")
weight_first = cuda_kernel(SOURCE, "weight_first")
weight_after_wait = cuda_kernel(SOURCE, "weight_after_wait")


def inputs():
    return {
        "x": torch.randn(8, 256, device="cuda"),
        "weight": torch.randn(256, device="cuda"),
        "step": torch.randn(256, device="cuda"),
        "out": torch.empty(8, 256, device="cuda"),
    }


@subject(inputs, independent=("weight",))
def broken_weight_is_written(x, weight, step, out):
    update_late(step, weight, grid=1, block=256, pdl=True)
    weight_first(x, weight, out, grid=8, block=256, pdl=True)


@subject(inputs)
def fixed_weight_after_wait(x, weight, step, out):
    update_late(step, weight, grid=1, block=256, pdl=True)
    weight_after_wait(x, weight, out, grid=8, block=256, pdl=True)


@subject(inputs, independent=("weight",))
def fixed_weight_is_not_written(x, weight, step, out):
    weight_first(x, weight, out, grid=8, block=256, pdl=True)
