"""Kernels that cannot be rebuilt, as a library's: compiled from a string here, launched on torch's stream."""

from __future__ import annotations

from functools import cache
from typing import Any

from pdl_stress import Chain, Op, Trigger, op

SIZE = 512

SOURCE = r"""
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define TRIGGER asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
typedef const volatile float* in_t;
// out = 2 in + 1, one thread an element. BF16 would round; float is exact enough to tell every input apart.
extern "C" __global__ void waits(in_t in, float* out, int n) {
  WAIT; int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = 2 * in[i] + 1; TRIGGER; }
extern "C" __global__ void waits_twice(in_t in, float* out, int n) {
  WAIT; WAIT; int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = 2 * in[i] + 1; TRIGGER; }
extern "C" __global__ void never(in_t in, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = 2 * in[i] + 1; TRIGGER; }
// What a kernel may do with data that it trusts. Without its wait these do it to poison.
extern "C" __global__ void hangs_on_poison(in_t in, float* out, int n) {
  WAIT; int i = blockIdx.x * blockDim.x + threadIdx.x; float x = i < n ? in[i] : 0;
  while (x != x) asm volatile("nanosleep.u32 1000;"); if (i < n) out[i] = 2 * x + 1; TRIGGER; }
extern "C" __global__ void faults_on_poison(in_t in, float* out, int n) {
  WAIT; int i = blockIdx.x * blockDim.x + threadIdx.x; float x = i < n ? in[i] : 0;
  if (x != x) *(volatile int*)16 = 1; if (i < n) out[i] = 2 * x + 1; TRIGGER; }
"""


@cache
def module() -> Any:
    import torch
    from cuda.core import Device, Program, ProgramOptions

    Device(0).set_current()
    major, minor = torch.cuda.get_device_capability()
    return Program(SOURCE, "c++", ProgramOptions(std="c++17", arch=f"sm_{major}{minor}a")).compile("cubin")


def start(name: str, pdl: bool, *arguments: Any) -> None:
    import numpy as np
    import torch
    from cuda.core import Device, LaunchConfig, launch

    from pdl_stress.cuda.kernels import TorchStream

    stream = Device(0).create_stream(TorchStream(torch.cuda.current_stream()))
    config = LaunchConfig(grid=4, block=128, programmatic_stream_serialization=pdl)
    source, out = arguments
    launch(stream, config, module().get_kernel(name), source.data_ptr(), out.data_ptr(), np.int32(source.numel()))


def clear(tensor: Any) -> None:
    """A memset, which torch's ``zero_`` need not be."""
    import torch
    from cuda.bindings import runtime

    size = tensor.numel() * tensor.element_size()
    (code,) = runtime.cudaMemsetAsync(tensor.data_ptr(), 0, size, torch.cuda.current_stream().cuda_stream)
    assert int(code) == 0


def library_op(name: str, *, known: bool = True, returns: bool = False, memset: bool = False) -> Op:
    """The op of one kernel of ``SOURCE``.

    Args:
        known: whether its machine code can be found.
        returns: whether it returns a new tensor, as a functional op of torch does.
        memset: whether it clears something before its kernel, as ops with a workspace do.
    """
    contract: dict[str, Any] = {
        "reads": ("input",), "writes": ("out",), "trigger": Trigger.AFTER_STORES, "name": name,
        "code": (lambda: [module()]) if known else None,
    }  # fmt: skip
    if returns:

        @op(**contract, returns=("out",))
        def functional(input: Any, *, pdl: bool) -> Any:
            import torch

            out = torch.empty_like(input)
            start(name, pdl, input, out)
            return out

        return functional

    @op(**contract)
    def in_place(input: Any, out: Any, *, pdl: bool) -> None:
        if memset:
            clear(out)
        start(name, pdl, input, out)

    return in_place


def library_chain(name: str, *ops: Op) -> Chain:
    """``ops`` one behind the other."""
    chain = Chain(name)
    last = chain.input("hidden", (1, SIZE), "float32")
    for number, each in enumerate(ops):
        out = chain.buffer(f"x{number}", (1, SIZE), "float32")
        chain.step(f"s{number}", each, input=last, out=out)
        last = out
    return chain


def load(name: str) -> Chain:
    """Chains by name, for workers. ``KERNEL``: between two kernels that wait; options behind a ``+``."""
    kernel, *options = name.split("+")
    middle = library_op(kernel, **{option.partition("=")[0]: option.partition("=")[2] != "0" for option in options})
    return library_chain(name.replace("+", ".").replace("=", "-"), library_op("waits"), middle, library_op("waits"))
