"""May a counter be reset before the wait (F10)?

    pdl-stress check docs/samples/08_resets_a_counter_early.py

`count_late` triggers, passes five microseconds, and then adds to 64 counters. The next kernel resets them for the next
round. If it does so before its wait, the late additions land on counters that were reset already, and the next round
starts with them. The fixed twin resets after its wait, when the kernel before has completed (R1). The counters are
integers: sums of floats by atomics differ from run to run, and a check that compares bits is then INCONCLUSIVE.

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → writer) |
|---|---|---|
| `broken_resets_first` | FAIL | `counters`: `count_late` → `reset_first` |
| `fixed_waits_first` | PASS | `reset_after_wait` writes `counters` after its wait |
| `broken_resets_to_zero_first` | FAIL | as above |
| `fixed_resets_to_zero_after_wait` | PASS | as above; or INCONCLUSIVE: see below |

Most counters are reset to zero, as in the last two subjects: the same bytes in all generations, of which the check may
see less.
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

extern "C" __global__ void count_late(const volatile int* x, int* counters) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    wait();
    trigger();
    delay(5000);
    atomicAdd(&counters[i % 64], x[i]);
}

extern "C" __global__ void reset_first(const volatile int* start, volatile int* counters) {
    counters[threadIdx.x] = start[threadIdx.x];
    wait();
}

extern "C" __global__ void reset_after_wait(const volatile int* start, volatile int* counters) {
    int value = start[threadIdx.x];
    wait();
    counters[threadIdx.x] = value;
}
"""
count_late = cuda_kernel(SOURCE, "count_late")
reset_first = cuda_kernel(SOURCE, "reset_first")
reset_after_wait = cuda_kernel(SOURCE, "reset_after_wait")


def random(n):
    return torch.randint(1, 1000, (n,), dtype=torch.int32, device="cuda")


def to_start():
    return {"x": random(2048), "start": random(64), "counters": random(64)}


def to_zero():
    return {**to_start(), "start": torch.zeros(64, dtype=torch.int32, device="cuda")}


def run(reset, x, start, counters):
    count_late(x, counters, grid=8, block=256, pdl=True)
    reset(start, counters, grid=1, block=64, pdl=True)


@subject(to_start, independent=("start",))
def broken_resets_first(x, start, counters):
    run(reset_first, x, start, counters)


@subject(to_start, independent=("start",))
def fixed_waits_first(x, start, counters):
    run(reset_after_wait, x, start, counters)


@subject(to_zero, independent=("start",))
def broken_resets_to_zero_first(x, start, counters):
    run(reset_first, x, start, counters)


@subject(to_zero, independent=("start",))
def fixed_resets_to_zero_after_wait(x, start, counters):
    run(reset_after_wait, x, start, counters)
