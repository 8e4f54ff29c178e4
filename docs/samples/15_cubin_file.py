"""Can I check a kernel of which I have only a cubin file?

    pdl-stress check docs/samples/15_cubin_file.py

Name the file and the kernel, as mangled, and launch it like any other. This sample has no cubin to ship, so it builds
one into a temporary file at the first launch; with your own, `cubin_kernel("my.cubin", "_Z5scalePKfPf")` at the top of
the module is all. The fault is that of sample 03 (F01): the load of `x` stands before the wait, which orders only what
is behind it (R1). The fixed twin waits, then loads.

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_cubin` | FAIL | `x`: stand-in → `load_first`; `out` is in order |
| `fixed_cubin` | PASS | `wait_first` reads `x`, and writes `out`, after its wait |
"""

import functools
import tempfile
from pathlib import Path

import torch
from cuda.core import Program, ProgramOptions

from pdl_stress import cubin_kernel, subject

SOURCE = r"""
extern "C" __global__ void load_first(const volatile float* x, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float value = x[i];
    asm volatile("griddepcontrol.wait;" ::: "memory");
    out[i] = 2 * value;
}

extern "C" __global__ void wait_first(const volatile float* x, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    out[i] = 2 * x[i];
}
"""
FOLDER = tempfile.TemporaryDirectory()  # goes when the process ends


@functools.cache
def kernel(name):
    path = Path(FOLDER.name) / f"{name}.cubin"
    major, minor = torch.cuda.get_device_capability()
    options = ProgramOptions(arch=f"sm_{major}{minor}", std="c++17")
    path.write_bytes(Program(SOURCE, "c++", options).compile("cubin").code)
    return cubin_kernel(path, name)


def inputs():
    return {"x": torch.randn(2048, device="cuda"), "out": torch.empty(2048, device="cuda")}


@subject(inputs)
def broken_cubin(x, out):
    kernel("load_first")(x, out, grid=8, block=256, pdl=True)


@subject(inputs)
def fixed_cubin(x, out):
    kernel("wait_first")(x, out, grid=8, block=256, pdl=True)
