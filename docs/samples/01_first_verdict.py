"""Does my kernel honour PDL?

    pdl-stress check docs/samples/01_first_verdict.py

There is no fault in this file. `scale` is launched with the PDL attribute, so that it may start while the kernel before
it still runs, and it waits before it reads `x` (R1): whatever wrote `x` has completed by then. The check puts a kernel
in front of it that triggers at once and writes `x` late, then takes the wait out of the machine code of `scale`, and
expects to catch the twin that this makes.

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named |
|---|---|---|
| `scaled` | PASS | `scale` reads `x`, and writes `out`, after its wait |
"""

import torch

from pdl_stress import cuda_kernel, subject

SOURCE = r"""
extern "C" __global__ void scale(const float* x, float* out) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = 2 * x[i];
}"""
scale = cuda_kernel(SOURCE, "scale")


@subject(lambda: {"x": torch.randn(2048, device="cuda"), "out": torch.empty(2048, device="cuda")})
def scaled(x, out):
    scale(x, out, grid=8, block=256, pdl=True)
