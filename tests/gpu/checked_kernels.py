"""Small kernels for tests of ``check``: right ones, and each fault as a kernel that knows nothing of the harness."""

from __future__ import annotations

from functools import cache
from typing import Any

from pdl_stress import CudaKernel, Subject, cuda_kernel, subject

N = 512

SOURCE = r"""
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define TRIGGER asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#define I int i = blockIdx.x * blockDim.x + threadIdx.x
typedef const volatile float* in_t;
typedef volatile float* out_t;
static __device__ void nap(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}
extern "C" __global__ void good(in_t x, out_t o, int n) { WAIT; I; if (i < n) o[i] = 2 * x[i] + 1; TRIGGER; }
extern "C" __global__ void never(in_t x, out_t o, int n) { I; if (i < n) o[i] = 2 * x[i] + 1; TRIGGER; }
extern "C" __global__ void early_read(in_t x, out_t o, int n) {
    I; float v = i < n ? x[i] : 0; WAIT; if (i < n) o[i] = 2 * v + 1; TRIGGER; }
extern "C" __global__ void branch(in_t x, out_t o, int n) {
    if (n < 0) WAIT; I; if (i < n) o[i] = 2 * x[i] + 1; TRIGGER; }
extern "C" __global__ void one_warp(in_t x, out_t o, int n) {
    if (threadIdx.x < 32) WAIT; I; if (i < n) o[i] = 2 * x[i] + 1; TRIGGER; }
extern "C" __global__ void barrier(in_t x, out_t o, int n) {
    if (threadIdx.x < 32) WAIT; __syncthreads(); I; if (i < n) o[i] = 2 * x[i] + 1; TRIGGER; }
extern "C" __global__ void late_store(in_t x, out_t o, int n) {
    WAIT; TRIGGER; I; float v = i < n ? x[i] : 0; nap(5000); if (i < n) o[i] = 2 * v + 1; }
extern "C" __global__ void late_load(in_t x, out_t o, int n) {
    WAIT; TRIGGER; nap(5000); I; if (i < n) o[i] = 2 * x[i] + 1; }
extern "C" __global__ void early_store(in_t x, out_t o, int n) {
    I; if (i < n) o[i] = 7 + i; WAIT; if (i < n) o[i] = o[i] + x[i]; TRIGGER; }
extern "C" __global__ void store(in_t x, out_t o, int n) { WAIT; I; if (i < n) o[i] = 7 + i + x[i]; TRIGGER; }
extern "C" __global__ void bumps(in_t x, out_t o, out_t count, int n) {
    WAIT; I; if (i < n) o[i] = x[i] + count[i]; if (i < n) count[i] = count[i] + 1; TRIGGER; }
extern "C" __global__ void hangs(in_t x, out_t o, int n) { I; while (x[0] == x[0]) nap(1000); o[i] = 0; }
extern "C" __global__ void faults(in_t x, out_t o, int n) { *(volatile int*)16 = 1; }
"""


@cache
def kernel(name: str) -> CudaKernel:
    return cuda_kernel(SOURCE, name)


def run(name: str, x: Any, out: Any, *others: Any, pdl: bool = True) -> None:
    kernel(name)(x, out, *others, N, grid=4, block=128, pdl=pdl)


def two() -> dict[str, Any]:
    import torch

    return {"x": torch.randn(N, device="cuda"), "out": torch.randn(N, device="cuda")}


def three() -> dict[str, Any]:
    import torch

    return {**two(), "mid": torch.randn(N, device="cuda")}


@subject(two)
def good(x: Any, out: Any) -> None:
    run("good", x, out)


@subject(two)
def hangs(x: Any, out: Any) -> None:
    run("hangs", x, out)


@subject(two)
def faults(x: Any, out: Any) -> None:
    run("faults", x, out)


def single(name: str) -> Subject:
    return Subject(name, lambda x, out: run(name, x, out), two)


def pair(first: str, second: str, back: str = "") -> Subject:
    """``first`` from x to mid, ``second`` from mid to out; or, with ``back``, from out to that buffer."""

    def fn(x: Any, mid: Any, out: Any) -> None:
        run(first, x, mid)
        if back:
            run(second, out, {"x": x, "mid": mid}[back])
        else:
            run(second, mid, out)

    return Subject(f"{first}, {second}", fn, three)
