"""Kernels that hang or fault cost the worker, not the campaign."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from pdl_stress import Chain, Outcome, catalog, op
from pdl_stress.campaign import run_on_gpu
from pdl_stress.cuda.worker import Worker
from pdl_stress.plan import Plan

pytestmark = pytest.mark.gpu

SOURCE = r"""
extern "C" __global__ void hang(const unsigned short* in, unsigned short* out) {
  for (;;) asm volatile("nanosleep.u32 1000;"); out[threadIdx.x] = in[threadIdx.x]; }
extern "C" __global__ void fault(const unsigned short* in, unsigned short* out) {
  *(volatile int*)16 = 1; out[threadIdx.x] = in[threadIdx.x]; }
"""


@cache
def kernel(name: str) -> Any:
    from cuda.core import Device, Program, ProgramOptions

    device = Device(0)
    device.set_current()
    return Program(SOURCE, "c++", ProgramOptions(std="c++17", arch="sm_90a")).compile("cubin").get_kernel(name)


def bad_op(name: str) -> Any:
    @op(reads=("input",), writes=("out",), name=name)
    def launch_it(input: Any, out: Any, *, pdl: bool) -> None:
        import torch
        from cuda.core import Device, LaunchConfig, launch

        from pdl_stress.cuda.kernels import TorchStream

        stream = Device(0).create_stream(TorchStream(torch.cuda.current_stream()))
        launch(stream, LaunchConfig(grid=1, block=64), kernel(name), input.data_ptr(), out.data_ptr())

    return launch_it


def load(name: str) -> Chain:
    if name not in ("hang", "fault"):
        return catalog.load(name)
    chain = Chain(name)
    hidden, out = chain.input("hidden", (1, 64), "bfloat16"), chain.buffer("out", (1, 64), "bfloat16")
    chain.step("bad", bad_op(name), input=hidden, out=out)
    return chain


@pytest.mark.parametrize("name", ["hang", "fault"])
def test_the_campaign_goes_on_after_a_bad_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdl_stress.cuda import worker as module

    monkeypatch.setattr(module, "START_SECONDS", 15.0)
    plan = Plan(replays=1000, faults=("F02", "F07"), delays_us=(10.0,))
    good = load("csa2-fused-m1")
    with Worker(load, time_limit=1.0 if name == "hang" else 10.0) as worker:
        bad = run_on_gpu([load(name)], plan, worker)[0]
        assert bad.verdict is Outcome.ERROR
        assert bad.errors
    with Worker(load, time_limit=10.0) as worker:
        assert run_on_gpu([good], plan, worker)[0].verdict is Outcome.PASS
