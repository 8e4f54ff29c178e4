"""The native tinygemm2 on a GPU: its numbers, its bits, its behaviours."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fusions.ops.native import Behaviour, rmsnorm, tinygemm2
from fusions.ops.native import code as native

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def normal(*shape, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(BF16)


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def assert_close(out, x, weight, bias=None):
    """One BF16 rounding, and FP32 accumulation in proportion to the sum of the products' magnitudes."""
    exact = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    error = (out.double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-8 + magnitude * 2.0**-18).all(), (tuple(x.shape), tuple(weight.shape))


def test_it_is_close_to_the_exact_result_for_many_shapes():
    choose = random.Random(0)
    shapes = [(1, 16, 64), (8, 16, 64), (9, 32, 128), (40, 16, 8192), (1, 1792, 5120), (8, 1280, 5120), (2, 512, 1280)]
    shapes += [(choose.randint(1, 40), 16 * choose.randint(1, 40), 64 * choose.randint(1, 110)) for _ in range(200)]
    for seed, (rows, features, width) in enumerate(shapes):
        x, weight = normal(rows, width, seed=seed), normal(features, width, seed=seed + 1000)
        bias = normal(features, seed=seed + 2000) * 8 if seed % 2 else None
        assert_close(tinygemm2(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("width", range(64, 2304, 64))
def test_every_tail_of_k(width):
    x, weight = normal(3, width), normal(32, width, seed=1)
    assert_close(tinygemm2(x, weight), x, weight)


def products(terms, width):
    """x [1, K] and weight [16, K] whose only products, for every feature, are `terms` {k: value}, exact in BF16."""
    x = torch.zeros(1, width, device="cuda", dtype=BF16)
    weight = torch.zeros(16, width, device="cuda", dtype=BF16)
    for k, value in terms.items():
        x[0, k] = 1.0 if abs(value) < 2**12 else 2.0**12
        weight[:, k] = value / float(x[0, k])
    return x, weight


@pytest.mark.parametrize("order", sorted(set(itertools.permutations((2.0**24, -(2.0**24), 1.0, 1.0)))))
def test_the_four_warps_are_added_in_order_and_then_the_bias(order):
    """In FP32 2^24 + 1 is 2^24 (to even): each order of addition has its own result."""
    x, weight = products({256 * warp + 17: value for warp, value in enumerate(order)}, 1024)
    for added in (0.0, 1.0, -1.0, 2.0**24, -(2.0**24)):
        want = torch.tensor(order[0])
        for value in (*order[1:], added):
            want = want + torch.tensor(value)
        out = tinygemm2(x, weight, torch.full((16,), added, device="cuda", dtype=BF16))
        assert (out == want.to(BF16).item()).all(), (order, added, want, out)


def test_a_warp_keeps_one_accumulator_over_all_turns_of_k():
    """Terms of warp 0 in turns 0, 1, 2: 2^24 + 1 + 1 is 2^24 one by one; two accumulators would give 2^24 + 2."""
    x, weight = products({5: 2.0**24, 1024 + 5: 1.0, 2048 + 5: 1.0}, 3072)
    minus = torch.full((16,), -(2.0**24), device="cuda", dtype=BF16)
    assert (tinygemm2(x, weight, minus) == 0).all()
    # In the other order the ones survive.
    x, weight = products({5: 1.0, 1024 + 5: 1.0, 2048 + 5: 2.0**24}, 3072)
    assert (tinygemm2(x, weight, minus) == 2).all()


def test_no_element_depends_on_its_neighbours():
    """Fused equals separate, one row equals the same row among others."""
    for rows, width in ((1, 5120), (8, 5120), (13, 1280), (20, 7168)):
        x = normal(rows, width)
        parts = [normal(features, width, seed=features) for features in (1280, 512, 16)]
        biases = [normal(part.shape[0], seed=7) for part in parts]
        fused = tinygemm2(x, torch.cat(parts), torch.cat(biases))
        at = 0
        for part, bias in zip(parts, biases, strict=True):
            assert same_bits(tinygemm2(x, part, bias), fused[:, at : at + part.shape[0]].contiguous())
            at += part.shape[0]
        for row in range(rows):
            one = tinygemm2(x[row : row + 1], torch.cat(parts), torch.cat(biases))
            assert same_bits(one, fused[row : row + 1])


def test_a_bias_is_added_before_the_one_rounding():
    x, weight = normal(8, 1280), normal(64, 1280, seed=1)
    zero, big = torch.zeros(64, device="cuda", dtype=BF16), normal(64, seed=3) * 512
    assert same_bits(tinygemm2(x, weight, zero), tinygemm2(x, weight))
    assert_close(tinygemm2(x, weight, big), x, weight, big)
    assert not same_bits(tinygemm2(x, weight, big), tinygemm2(x, weight) + big)  # two roundings differ somewhere


def test_strides_of_x_weight_and_out_do_not_change_a_bit():
    for rows, features, width in ((1, 48, 320), (5, 48, 1280), (17, 32, 2048)):
        x, weight = normal(rows, width), normal(features, width, seed=1)
        want = tinygemm2(x, weight)
        wide_x = torch.full((rows, width + 24), float("nan"), device="cuda", dtype=BF16)
        wide_weight = torch.full((features, width + 8), float("nan"), device="cuda", dtype=BF16)
        wide_x[:, 8 : 8 + width], wide_weight[:, :width] = x, weight
        assert same_bits(tinygemm2(wide_x[:, 8 : 8 + width], wide_weight[:, :width]), want)
        for offset, pad in ((0, 0), (1, 2), (3, 5), (8, 16)):
            target = torch.full((rows * (features + pad) + offset + 4,), 3.0, device="cuda", dtype=BF16)
            out = target[offset:].as_strided((rows, features), (features + pad, 1))
            assert tinygemm2(x, weight, out=out) is out
            assert same_bits(out.contiguous(), want)
            out.fill_(3.0)
            assert (target == 3.0).all(), "wrote outside its rows"


def behaviours(waits, **fixed):
    for wait, trigger, early in itertools.product(waits, native.TRIGGERS, (True, False)):
        if (early or wait not in ("one_warp", "never")) and (wait, trigger) != ("never", "after_wait"):
            yield Behaviour(wait, trigger, early_weights=early, **fixed)


def test_every_behaviour_gives_the_same_bits_behind_finished_work():
    x, weight, bias = normal(11, 3136), normal(96, 3136, seed=1), normal(96, seed=2)
    want = tinygemm2(x, weight, bias, pdl=False)
    assert same_bits(tinygemm2(x, weight, bias), want)
    for behaviour in behaviours(native.WAITS):
        torch.cuda.synchronize()
        assert same_bits(tinygemm2(x, weight, bias, behaviour=behaviour), want), behaviour
    for trigger in ("entry", "after_wait", "before_stores", "after_stores"):
        fenced = Behaviour("loaders", trigger, fence=True)
        assert same_bits(tinygemm2(x, weight, bias, behaviour=fenced), want), fenced


def test_a_thousand_runs_are_identical():
    x, weight = normal(8, 5120), normal(1792, 5120, seed=1)
    want = tinygemm2(x, weight).clone()
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        different += (tinygemm2(x, weight).view(torch.int16) != want.view(torch.int16)).any()
    assert different.item() == 0


def test_it_is_captured_and_replayed_on_new_input():
    x, weight = normal(4, 1280), normal(512, 1280, seed=1)
    out = torch.empty(4, 512, device="cuda", dtype=BF16)
    tinygemm2(x, weight, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tinygemm2(x, weight, out=out)
    for seed in range(3):
        x.copy_(normal(4, 1280, seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out, tinygemm2(x, weight))


def test_no_rows_launch_nothing():
    assert tinygemm2(normal(0, 128), normal(32, 128)).shape == (0, 32)


def test_delay_and_stamps():
    x, weight = normal(3, 512), normal(64, 512)
    behaviour = Behaviour("loaders", "before_stores", delay=True, stamps=True)
    want = tinygemm2(x, weight)
    for delay in (0, 300_000):
        stamps = torch.tensor([2**63 - 1, 2**63 - 1, 0, 0], device="cuda")
        assert same_bits(tinygemm2(x, weight, behaviour=behaviour, delay_ns=delay, stamps=stamps), want)
        entry, first_read, last_store, exit_ = stamps.tolist()
        assert 0 < entry <= first_read <= last_store <= exit_ < 2**63 - 1
        assert delay <= last_store - first_read < delay + 250_000


def count_stale(produce, consume, out, want, poisoned, pdl):
    """Replays of 20 whose result is not `want`."""
    stale = 0
    for _ in range(20):
        poisoned.fill_(float("nan"))
        produce()
        consume(pdl)
        torch.cuda.synchronize()
        stale += not same_bits(out, want)
    return stale


CAUGHT = [("branch", 0), ("one_warp", 0), ("late", 0), ("never", 0)]
CLEAN = [("all", 0), ("loaders", 0), ("barrier", 0), ("branch", 1)]


@pytest.mark.parametrize(("wait", "flag"), CAUGHT + CLEAN)
def test_behind_an_early_trigger_the_faults_are_stale_and_the_rest_is_not(wait, flag):
    """The producer of x is rmsnorm: it triggers 100 us before its stores."""
    source, gain = normal(8, 5120), normal(5120, seed=1)
    weight, bias = normal(256, 5120, seed=2), normal(256, seed=3)
    producer, x = Behaviour("all", "before_stores", delay=True), torch.empty_like(source)
    out = torch.empty(8, 256, device="cuda", dtype=BF16)
    rmsnorm(source, gain, out=x, behaviour=producer)
    for early in (True,) if wait in ("one_warp", "never") else (True, False):
        consumer = Behaviour(wait, "after_stores", early_weights=early)
        want = tinygemm2(x, weight, bias, behaviour=consumer, flag=flag).clone()

        def consume(pdl, consumer=consumer):
            tinygemm2(x, weight, bias, out=out, behaviour=consumer, flag=flag, pdl=pdl)

        def produce():
            rmsnorm(source, gain, out=x, behaviour=producer, delay_ns=100_000)

        assert count_stale(produce, consume, out, want, x, pdl=False) == 0
        stale = count_stale(produce, consume, out, want, x, pdl=True)
        assert stale >= 15 if (wait, flag) in CAUGHT else stale == 0, (early, stale)


@pytest.mark.parametrize("late_operand", ["weight", "bias"])
@pytest.mark.parametrize("wait", ["all", "loaders", "barrier", "branch"])
def test_late_weights_are_stale_exactly_where_they_are_read_before_the_wait(late_operand, wait):
    x, gain = normal(8, 1280), normal(1280, seed=1)
    source = normal(32, 1280, seed=2)
    weight, bias = source.clone(), normal(32, seed=3)
    producer = Behaviour("all", "before_stores", delay=True)
    out = torch.empty(8, 32, device="cuda", dtype=BF16)
    target, read, scale = (
        (weight, source, gain) if late_operand == "weight" else (bias[None], source[:1, :32], gain[:32])
    )
    read = read.contiguous()
    rmsnorm(read, scale, out=target)
    want = tinygemm2(x, weight, bias, pdl=False).clone()

    def produce():
        rmsnorm(read, scale, out=target, behaviour=producer, delay_ns=100_000)

    for early in (True, False):

        def consume(pdl, early=early):
            behaviour = Behaviour(wait, "after_stores", early_weights=early)
            tinygemm2(x, weight, bias, out=out, behaviour=behaviour, flag=1, pdl=pdl)

        assert count_stale(produce, consume, out, want, target, pdl=False) == 0
        stale = count_stale(produce, consume, out, want, target, pdl=True)
        assert stale >= 15 if early else stale == 0, stale


@pytest.mark.parametrize("trigger", native.TRIGGERS)
def test_as_producer_every_trigger_is_safe_for_a_consumer_that_waits(trigger):
    """And only the triggers before the stores expose one that does not."""
    x, weight, gain = normal(8, 1280), normal(512, 1280, seed=1), normal(512, seed=2)
    producer = Behaviour("loaders", trigger, delay=True)
    between, out = (torch.empty(8, 512, device="cuda", dtype=BF16) for _ in range(2))
    want = rmsnorm(tinygemm2(x, weight), gain).clone()

    def produce():
        tinygemm2(x, weight, out=between, behaviour=producer, delay_ns=100_000)

    for wait in ("all", "never"):

        def consume(pdl, wait=wait):
            rmsnorm(between, gain, out=out, behaviour=Behaviour(wait), pdl=pdl)

        consume(False)  # compiled before anything is timed
        stale = count_stale(produce, consume, out, want, between, pdl=True)
        if wait == "all":
            assert stale == 0
        elif trigger in ("entry", "after_wait", "before_stores"):
            assert stale >= 15
