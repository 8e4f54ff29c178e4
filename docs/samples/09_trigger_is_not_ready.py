"""The kernel before triggers once its data is there: is that as good as a wait (F11)?

    pdl-stress check docs/samples/09_trigger_is_not_ready.py

`produce` is a kernel with two warps. Warp 0 triggers at once, warp 1 writes both halves five microseconds later. One
thread's trigger counts for its whole CTA (R4), so the next kernel starts before warp 1 has written anything; and a
trigger only allows the next grid to be scheduled, it does not say that data is ready (R3). The fixed consumer waits:
for the completion of `produce`, not for its trigger (R1). The producer stays as it is and is right in both subjects
(R2).

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_trusts_the_trigger` | FAIL | `data`: `produce` → `consume_at_once`; and its early write of `out` |
| `fixed_waits` | PASS | `produce` and `consume_after_wait` touch everything after their waits |
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

extern "C" __global__ void produce(const volatile float* x, volatile float* data) {
    int i = blockIdx.x * blockDim.x + threadIdx.x % 32;
    if (threadIdx.x < 32) {
        trigger();
    } else {
        wait();
        delay(5000);
        data[i] = x[i] + 1;
        data[i + 32] = x[i + 32] + 1;
    }
}

extern "C" __global__ void consume_at_once(const volatile float* data, volatile float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = 2 * data[i];
}

extern "C" __global__ void consume_after_wait(const volatile float* data, volatile float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    wait();
    out[i] = 2 * data[i];
}
"""
produce = cuda_kernel(SOURCE, "produce")
consume_at_once = cuda_kernel(SOURCE, "consume_at_once")
consume_after_wait = cuda_kernel(SOURCE, "consume_after_wait")


def inputs():
    return {
        "x": torch.randn(1024, device="cuda"),
        "data": torch.empty(1024, device="cuda"),
        "out": torch.empty(1024, device="cuda"),
    }


@subject(inputs)
def broken_trusts_the_trigger(x, data, out):
    produce(x, data, grid=16, block=64, pdl=True)
    consume_at_once(data, out, grid=4, block=256, pdl=True)


@subject(inputs)
def fixed_waits(x, data, out):
    produce(x, data, grid=16, block=64, pdl=True)
    consume_after_wait(data, out, grid=4, block=256, pdl=True)
