"""Can I check a kernel through the torch op that launches it?

    pdl-stress check docs/samples/12_torch_custom_op.py

A subject is any callable that launches on torch's current stream, so nothing is different: call the op. This one
allocates its result, as most ops do, so the tensor between the two calls is no argument of the subject. The fault is
that of sample 02, in the second call (F02): `silu_never_waits` reads what the first call is still writing. The fixed
twin waits first (R1).

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_op` | FAIL | the first op's result: `silu_waits` → `silu_never_waits` |
| `fixed_op` | PASS | both launches of `silu_waits` touch everything after their waits |
"""

import torch

from pdl_stress import cuda_kernel, subject

SOURCE = r"""
__device__ float silu(float v) { return v / (1 + expf(-v)); }

extern "C" __global__ void silu_waits(const volatile float* x, volatile float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    out[i] = silu(x[i]);
}

extern "C" __global__ void silu_never_waits(const volatile float* x, volatile float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = silu(x[i]);
}
"""
silu_waits = cuda_kernel(SOURCE, "silu_waits")
silu_never_waits = cuda_kernel(SOURCE, "silu_never_waits")


@torch.library.custom_op("pdl_samples::silu", mutates_args=())
def silu(x: torch.Tensor, waits: bool) -> torch.Tensor:
    out = torch.empty_like(x)
    kernel = silu_waits if waits else silu_never_waits
    kernel(x, out, grid=x.numel() // 256, block=256, pdl=True)
    return out


@silu.register_fake
def _(x, waits):
    return torch.empty_like(x)


@subject(lambda: {"x": torch.randn(8, 256, device="cuda")})
def broken_op(x):
    return silu(silu(x, True), False)


@subject(lambda: {"x": torch.randn(8, 256, device="cuda")})
def fixed_op(x):
    return silu(silu(x, True), True)
