"""May a kernel store before its wait, if all that it reads is constant (F08, write after read)?

    pdl-stress check docs/samples/06_overwrites_what_is_still_read.py

`read_late` triggers, passes five microseconds, and only then reads `state`. The next kernel puts `next` into `state`.
Nobody writes `next`, so it may be loaded before the wait, but the store into `state` may not stand there: the trigger
says nothing about what the kernel before has still to read, only its completion does (R1, R3). The fixed twin loads
early and stores after its wait. Reused buffers and recycled allocations make this fault.

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: reader → writer) |
|---|---|---|
| `broken_stores_first` | FAIL | `state`: `read_late` → `replace_first`; wrong elements are in `out` |
| `fixed_waits_first` | PASS | `replace_after_wait` writes `state` after its wait |
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

extern "C" __global__ void read_late(const volatile float* state, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    wait();
    trigger();
    delay(5000);
    out[i] = 2 * state[i];
}

extern "C" __global__ void replace_first(const volatile float* next, volatile float* state) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    state[i] = next[i];
    wait();
}

extern "C" __global__ void replace_after_wait(const volatile float* next, volatile float* state) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float value = next[i];
    wait();
    state[i] = value;
}
"""
read_late = cuda_kernel(SOURCE, "read_late")
replace_first = cuda_kernel(SOURCE, "replace_first")
replace_after_wait = cuda_kernel(SOURCE, "replace_after_wait")


def inputs():
    return {
        "state": torch.randn(2048, device="cuda"),
        "next": torch.randn(2048, device="cuda"),
        "out": torch.empty(2048, device="cuda"),
    }


@subject(inputs, independent=("next",))
def broken_stores_first(state, next, out):
    read_late(state, out, grid=8, block=256, pdl=True)
    replace_first(next, state, grid=8, block=256, pdl=True)


@subject(inputs, independent=("next",))
def fixed_waits_first(state, next, out):
    read_late(state, out, grid=8, block=256, pdl=True)
    replace_after_wait(next, state, grid=8, block=256, pdl=True)
