"""What if a kernel waits, but has read something before (F01)?

    pdl-stress check docs/samples/03_reads_before_the_wait.py

The usual suspects are a bias, a length, a pointer array, loaded "early, to hide the latency". A wait orders only what
stands behind it (R1): `bias` was loaded before it, so its value may be that of the step before, although `x` is right.
The fixed twin loads both after its wait. If no kernel in flight ever writes `bias`, loading it early is right: declare
it `independent=("bias",)`, as sample 11 does with a weight.

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_bias_first` | FAIL | `bias`: stand-in → `add_bias_first`; `x` and `out` are in order |
| `fixed_wait_first` | PASS | `add_wait_first` reads `x` and `bias`, and writes `out`, after its wait |

The pointers are volatile so that the compiler leaves the loads where they stand. It may move a plain load from before a
wait to behind it, and undo the fault.
"""

import torch

from pdl_stress import cuda_kernel, subject

SOURCE = r"""
extern "C" __global__ void add_bias_first(const volatile float* x, const volatile float* bias, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float b = bias[threadIdx.x];
    asm volatile("griddepcontrol.wait;" ::: "memory");
    out[i] = x[i] + b;
}

extern "C" __global__ void add_wait_first(const volatile float* x, const volatile float* bias, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    float b = bias[threadIdx.x];
    out[i] = x[i] + b;
}
"""
add_bias_first = cuda_kernel(SOURCE, "add_bias_first")
add_wait_first = cuda_kernel(SOURCE, "add_wait_first")


def inputs():
    return {
        "x": torch.randn(8, 256, device="cuda"),
        "bias": torch.randn(256, device="cuda"),
        "out": torch.empty(8, 256, device="cuda"),
    }


@subject(inputs)
def broken_bias_first(x, bias, out):
    add_bias_first(x, bias, out, grid=8, block=256, pdl=True)


@subject(inputs)
def fixed_wait_first(x, bias, out):
    add_wait_first(x, bias, out, grid=8, block=256, pdl=True)
