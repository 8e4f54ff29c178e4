"""Which one of forty kernels does not wait?

    pdl-stress check docs/samples/16_stack_of_layers.py

Ten layers of four kernels (norm, mix, gate, add), captured as one graph. Each triggers first and then waits, which is
safe because all of them wait (R2): a wait returns only when the kernel before has completed (R1), and that one has
waited in its turn. In the broken twin the gate of layer 5, and no other kernel, does not wait (F02). It reads `mixed`
before the mix kernel has written it; and from there on nothing promises that the kernels behind it see what the kernels
before it wrote (R8), although an H200 was never seen to break that.

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_gate_in_layer_5` | FAIL | `mixed`: `mix` → `gate_never_waits`; and its early write of `gated` |
| `fixed_stack` | PASS | 40 kernels; `mix` reads `weights` before its wait, as declared |
"""

import torch

from pdl_stress import cuda_kernel, subject

SOURCE = r"""
__device__ void trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ void trigger_then_wait() {
    trigger();
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// One CTA of 256 threads for each row of 256 values.
extern "C" __global__ void rms_norm(const volatile float* hidden, volatile float* normed) {
    __shared__ float squares[256];
    int t = threadIdx.x, i = blockIdx.x * 256 + t;
    trigger_then_wait();
    float value = hidden[i];
    squares[t] = value * value;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) squares[t] += squares[t + half];
    }
    __syncthreads();
    normed[i] = value * rsqrtf(squares[0] / 256 + 1e-6f);
}

extern "C" __global__ void mix(const volatile float* normed, const volatile float* weights, volatile float* mixed,
                               int layer) {
    int t = threadIdx.x, row = blockIdx.x * 256, far = (t + 17) % 256;
    float w0 = weights[layer * 512 + t], w1 = weights[layer * 512 + 256 + t];
    trigger_then_wait();
    mixed[row + t] = w0 * normed[row + t] + w1 * normed[row + far];
}

__device__ float silu(float v) { return v / (1 + expf(-v)); }

extern "C" __global__ void gate(const volatile float* mixed, volatile float* gated) {
    int i = blockIdx.x * 256 + threadIdx.x;
    trigger_then_wait();
    gated[i] = silu(mixed[i]);
}

extern "C" __global__ void gate_never_waits(const volatile float* mixed, volatile float* gated) {
    int i = blockIdx.x * 256 + threadIdx.x;
    trigger();
    gated[i] = silu(mixed[i]);
}

extern "C" __global__ void add(const volatile float* gated, volatile float* hidden) {
    int i = blockIdx.x * 256 + threadIdx.x;
    trigger_then_wait();
    hidden[i] = hidden[i] + gated[i];
}
"""
rms_norm, mix, gate, gate_never_waits, add = (
    cuda_kernel(SOURCE, name) for name in ("rms_norm", "mix", "gate", "gate_never_waits", "add")
)
LAYERS, ROWS = 10, 8


def inputs():
    rows = {name: torch.randn(ROWS, 256, device="cuda") for name in ("hidden", "normed", "mixed", "gated")}
    return {**rows, "weights": torch.randn(LAYERS, 2, 256, device="cuda")}


def run(hidden, normed, mixed, gated, weights, broken_layer):
    for layer in range(LAYERS):
        rms_norm(hidden, normed, grid=ROWS, block=256, pdl=True)
        mix(normed, weights, mixed, layer, grid=ROWS, block=256, pdl=True)
        (gate_never_waits if layer == broken_layer else gate)(mixed, gated, grid=ROWS, block=256, pdl=True)
        add(gated, hidden, grid=ROWS, block=256, pdl=True)


@subject(inputs, independent=("weights",))
def broken_gate_in_layer_5(hidden, normed, mixed, gated, weights):
    run(hidden, normed, mixed, gated, weights, broken_layer=5)


@subject(inputs, independent=("weights",))
def fixed_stack(hidden, normed, mixed, gated, weights):
    run(hidden, normed, mixed, gated, weights, broken_layer=None)
