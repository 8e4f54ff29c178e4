"""The native RMSNorm on a GPU: its numbers, its bits, its behaviours."""

from __future__ import annotations

import math

import pytest
import torch

from fusions.ops.native import Behaviour, rmsnorm
from fusions.ops.native import code as native

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
WIDTHS = (1, 7, 62, 64, 100, 128, 512, 1280, 1536, 2050, 5120, 7168, 8192, 8200, 16384)
CORRECT = [Behaviour(wait, trigger) for wait in ("all", "barrier") for trigger in native.TRIGGERS]
CORRECT += [Behaviour("all", trigger, fence=True) for trigger in native.TRIGGERS if trigger != "none"]


def normal(*shape, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(BF16)


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def reference(x, weight, eps):
    x = x.double()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def butterfly(sums):
    """The sum that every lane of a warp holds after a butterfly over the last dimension, in FP32."""
    lanes = torch.arange(32, device=sums.device)
    for offset in (16, 8, 4, 2, 1):
        sums = sums + sums[..., lanes ^ offset]
    return sums[..., 0]


def emulated_mean(x):
    """The mean of a row's squares with the kernel's order of additions; exact where the width is a power of two."""
    rows, width = x.shape
    vec = math.gcd(8, width)
    threads = (min(1024, width // vec) + 31) // 32 * 32
    rounds = -(-width // (threads * vec))
    padded = torch.zeros(rows, rounds * threads * vec, device=x.device, dtype=torch.float64)
    padded[:, :width] = x
    padded = padded.view(rows, rounds, threads, vec)
    sums = torch.zeros(rows, threads, device=x.device)
    for turn in range(rounds):
        for element in range(
            vec
        ):  # an FMA: the square of a BF16 number is exact in FP64, and so nearly always is the sum
            sums = (padded[:, turn, :, element] ** 2 + sums.double()).float()
    warps = torch.zeros(rows, 32, device=x.device)
    warps[:, : threads // 32] = butterfly(sums.view(rows, -1, 32))
    return butterfly(warps) / width


def scaled(x, scale, weight, ulps=0):
    """The last steps: two products in FP32, one rounding; `scale` moved by so many units in its last place."""
    moved = (scale.view(torch.int32) + ulps).view(torch.float32)
    return ((x.float() * moved[:, None]) * (0.0 + weight.float())).to(BF16)


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_within_one_rounding_of_the_exact_result(width):
    for rows, scale in ((1, 1.0), (3, 1e-3), (17, 1e3)):
        x, weight = normal(rows, width, seed=rows) * scale, normal(width, seed=9)
        exact = reference(x, weight, 1e-6)
        error = (rmsnorm(x, weight).double() - exact).abs()
        # Half a unit in the last place of BF16, and the FP32 error of sum, division, rsqrt and products.
        assert (error <= exact.abs() * (2.0**-8 + 2.0**-19)).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bits_follow_from_the_documented_operations(width):
    x, weight = normal(16, width, seed=width), normal(width, seed=1)
    got, scale = rmsnorm(x, weight), torch.rsqrt(emulated_mean(x) + 1e-6)
    matches = torch.zeros(16, dtype=torch.bool, device="cuda")
    for ulps in range(-4, 5):  # division and rsqrt are approximate on a GPU
        matches |= (scaled(x, scale, weight, ulps).view(torch.int16) == got.view(torch.int16)).all(-1)
    assert matches.all()


@pytest.mark.parametrize("width", [64, 512, 4096, 16384])
def test_the_order_of_the_sum_is_the_documented_one(width):
    """An eps that cancels the mean but for 8 units in its last place makes one such unit visible in the result."""
    weight = normal(width, seed=1)
    for seed in range(48):
        x = normal(1, width, seed=seed)
        mean = emulated_mean(x)
        eps = (8 * (torch.nextafter(mean, 2 * mean) - mean) - mean).item()
        assert same_bits(rmsnorm(x, weight, eps=eps), scaled(x, torch.rsqrt(mean + eps), weight)), seed


def test_eps_zero_rows_and_negative_zero_gains():
    weight = normal(64)
    assert same_bits(
        rmsnorm(torch.zeros(2, 64, device="cuda", dtype=BF16), weight).abs(), torch.zeros_like(weight).expand(2, 64)
    )
    x = normal(2, 64)
    exact = reference(x, weight, 100.0)
    assert ((rmsnorm(x, weight, eps=100.0).double() - exact).abs() <= exact.abs() * 2.0**-7.9).all()
    positive = rmsnorm(x.abs(), torch.full_like(weight, -0.0))
    assert same_bits(positive, torch.zeros_like(positive))


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_strides_and_alignment_do_not_change_a_bit(width):
    rows = 5
    x, weight = normal(rows, width), normal(width, seed=1)
    want = rmsnorm(x, weight)
    for row in range(rows):
        assert same_bits(rmsnorm(x[row : row + 1], weight), want[row : row + 1])
    for pad in (1, 3, 8, 24):
        for offset in (0, 1, 5):
            storage = torch.full((rows * (width + pad) + offset,), 7.0, device="cuda", dtype=BF16)
            view = storage[offset:].as_strided((rows, width), (width + pad, 1))
            view.copy_(x)
            assert same_bits(rmsnorm(view, weight), want)
            target = torch.full_like(storage, 3.0)
            out = target[offset:].as_strided((rows, width), (width + pad, 1))
            assert rmsnorm(x, weight, out=out) is out
            assert same_bits(out, want)
            out.fill_(3.0)
            assert (target == 3.0).all(), "wrote outside its rows"
    gains = torch.zeros(width + 3, device="cuda", dtype=BF16)[3:]
    gains.copy_(weight)
    assert same_bits(rmsnorm(x, gains), want)
    rmsnorm(x, weight, out=x)
    assert same_bits(x, want), "in place"


def test_every_behaviour_gives_the_same_bits_behind_finished_work():
    x, weight = normal(8, 5120), normal(5120, seed=1)
    want = rmsnorm(x, weight, pdl=False)
    for wait in native.WAITS:
        for trigger in native.TRIGGERS:
            if wait == "loaders" or (wait, trigger) == ("never", "after_wait"):
                continue
            torch.cuda.synchronize()
            assert same_bits(rmsnorm(x, weight, behaviour=Behaviour(wait, trigger)), want), (wait, trigger)
    for behaviour in CORRECT:
        assert same_bits(rmsnorm(x, weight, behaviour=behaviour), want), behaviour


def test_a_thousand_runs_are_identical():
    x, weight = normal(4, 5120), normal(5120, seed=1)
    want = rmsnorm(x, weight).clone()
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        different += (rmsnorm(x, weight).view(torch.int16) != want.view(torch.int16)).any()
    assert different.item() == 0


def test_it_is_captured_and_replayed_on_new_input():
    x, weight = normal(4, 1280), normal(1280, seed=1)
    out = torch.empty_like(x)
    rmsnorm(x, weight, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rmsnorm(x, weight, out=out)
    for seed in range(3):
        x.copy_(normal(4, 1280, seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out, rmsnorm(x, weight))


def test_no_rows_launch_nothing():
    assert rmsnorm(normal(0, 64), normal(64)).shape == (0, 64)


def test_delay_and_stamps():
    x, weight = normal(3, 512), normal(512)
    behaviour = Behaviour("all", "before_stores", delay=True, stamps=True)
    want = rmsnorm(x, weight)
    for delay in (0, 300_000):
        stamps = torch.tensor([2**63 - 1, 2**63 - 1, 0, 0], device="cuda")
        assert same_bits(rmsnorm(x, weight, behaviour=behaviour, delay_ns=delay, stamps=stamps), want)
        entry, first_read, last_store, exit_ = stamps.tolist()
        assert 0 < entry <= first_read <= last_store <= exit_ < 2**63 - 1
        assert delay <= last_store - first_read < delay + 250_000


@pytest.mark.parametrize(
    ("wait", "flag", "stale"),
    [
        ("all", 0, False),
        ("barrier", 0, False),
        ("branch", 1, False),
        ("branch", 0, True),
        ("one_warp", 0, True),
        ("late", 0, True),
        ("never", 0, True),
    ],
)
def test_behind_an_early_trigger_the_faults_are_stale_and_the_rest_is_not(wait, flag, stale):
    """The producer is this kernel too: it triggers 100 us before its stores."""
    source, weight, gain = normal(4, 5120), normal(5120, seed=1), normal(5120, seed=2)
    producer = Behaviour("all", "before_stores", delay=True)
    consumer = Behaviour(wait, "after_stores")
    between, out = torch.empty_like(source), torch.empty_like(source)
    rmsnorm(source, weight, out=between, behaviour=producer)
    want = rmsnorm(between, gain, behaviour=consumer, flag=flag).clone()
    wrong = {True: 0, False: 0}
    for pdl in (True, False):
        for _ in range(20):
            between.fill_(float("nan"))
            rmsnorm(source, weight, out=between, behaviour=producer, delay_ns=100_000)
            rmsnorm(between, gain, out=out, behaviour=consumer, flag=flag, pdl=pdl)
            torch.cuda.synchronize()
            wrong[pdl] += not same_bits(out, want)
    assert wrong[False] == 0
    assert wrong[True] >= 15 if stale else wrong[True] == 0
