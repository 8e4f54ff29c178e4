"""Does my Triton kernel honour PDL?

    pip install "pdl-stress[triton]"
    pdl-stress check docs/samples/13_triton.py

`launch_pdl=True` sets the PDL attribute and does nothing else: Triton puts no wait into the kernel for you. Without
`gdc_wait()` the loads race with the kernel before (F02). The fixed twin calls it before its first access (R1). It also
triggers early with `gdc_launch_dependents()`, which is safe however early it stands, if only the next kernel waits
(R2).

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_no_gdc_wait` | FAIL | `x`, `y`: stand-in → `add_no_wait`; and its early write of `out` |
| `fixed_gdc_wait` | PASS | `add_wait` reads `x` and `y`, and writes `out`, after its wait |

A Triton function needs a file that Python can read its source from, at module level, as here. In a loop, look where the
compiler's pipeliner puts the loads: it can move them above a wait that stands inside the loop.
"""

import torch
import triton
import triton.language as tl

from pdl_stress import subject


@triton.jit
def add_no_wait(x, y, out, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


@triton.jit
def add_wait(x, y, out, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_wait()
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


def inputs():
    return {
        "x": torch.randn(2048, device="cuda"),
        "y": torch.randn(2048, device="cuda"),
        "out": torch.empty(2048, device="cuda"),
    }


@subject(inputs)
def broken_no_gdc_wait(x, y, out):
    add_no_wait[(8,)](x, y, out, BLOCK=256, launch_pdl=True)


@subject(inputs)
def fixed_gdc_wait(x, y, out):
    add_wait[(8,)](x, y, out, BLOCK=256, launch_pdl=True)
