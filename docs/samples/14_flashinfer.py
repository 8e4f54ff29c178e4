"""Does a library's kernel honour PDL, of which I have no source?

    pip install "pdl-stress[flashinfer]"
    pdl-stress check docs/samples/14_flashinfer.py

There is no fault in FlashInfer here. `tinygemm_bf16` loads its weight before its wait on purpose, while the kernel
before still runs: that is right as long as no kernel in flight writes the weight (R1), and its caller has to promise
that. `independent=("weight", "bias")` is this promise. The first subject is the same call without it: the check then
writes the weight late, and says that it is read too early. The machine code is found in the loaded library, so broken
twins are made of library kernels too.

Outcome (H200, expected, not measured yet):

| subject | verdict | what is named (buffer: writer → reader) |
|---|---|---|
| `broken_gemm_nothing_promised` | FAIL | `weight` (and `bias`, if that is read early too): stand-in → the GEMM kernel |
| `fixed_gemm_weight_promised` | PASS | `weight` read before the wait, as declared; `input` after it |
| `fixed_norm` | PASS | `input`, `weight` read, and `out` written, after the wait |
| `fixed_norm_then_gemm` | PASS | `normed`: the norm → the GEMM, after its wait |
"""

import flashinfer
import torch

from pdl_stress import subject


def random(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def gemm_inputs():
    return {
        "input": random(1, 5120),
        "weight": random(1792, 5120) / 64,
        "bias": random(1792),
        "out": torch.empty(1, 1792, dtype=torch.bfloat16, device="cuda"),
    }


def norm_inputs():
    return {"input": random(1, 5120), "weight": random(5120), "out": random(1, 5120)}


@subject(gemm_inputs)
def broken_gemm_nothing_promised(input, weight, bias, out):
    flashinfer.gemm.tinygemm_bf16(input, weight, out, bias=bias, use_pdl=True)


@subject(gemm_inputs, independent=("weight", "bias"))
def fixed_gemm_weight_promised(input, weight, bias, out):
    flashinfer.gemm.tinygemm_bf16(input, weight, out, bias=bias, use_pdl=True)


@subject(norm_inputs)
def fixed_norm(input, weight, out):
    flashinfer.norm.rmsnorm(input, weight, 1e-6, out=out, enable_pdl=True)


@subject(
    lambda: {**gemm_inputs(), "norm_weight": random(5120), "normed": random(1, 5120)},
    independent=("weight", "bias", "norm_weight"),
)
def fixed_norm_then_gemm(input, norm_weight, normed, weight, bias, out):
    flashinfer.norm.rmsnorm(input, norm_weight, 1e-6, out=normed, enable_pdl=True)
    flashinfer.gemm.tinygemm_bf16(normed, weight, out, bias=bias, use_pdl=True)
