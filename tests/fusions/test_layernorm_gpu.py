"""The native LayerNorm on a GPU: its numbers, its bits, its behaviours."""

from __future__ import annotations

import math
import random

import pytest
import torch

from fusions.ops.native import Behaviour, layernorm
from fusions.ops.native import code as native

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
WIDTHS = (1, 7, 62, 64, 100, 128, 256, 264, 512, 1536, 2050, 7168, 8192, 8200, 16384)
CORRECT = [Behaviour(wait, trigger) for wait in ("all", "barrier") for trigger in native.TRIGGERS]
CORRECT += [Behaviour("all", trigger, fence=True) for trigger in native.TRIGGERS if trigger != "none"]


def normal(*shape, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(BF16)


def operands(rows, width, seed=0):
    return normal(rows, width, seed=3 * seed), normal(width, seed=3 * seed + 1), normal(width, seed=3 * seed + 2)


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def reference(x, weight, bias, eps=1e-6):
    """The exact result, and how far FP32 arithmetic may be from it before the rounding to BF16."""
    x, weight, bias = x.double(), weight.double(), bias.double()
    deviation = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt((deviation * deviation).mean(-1, keepdim=True) + eps)
    product = deviation * scale * weight
    # The sums' error grows with a thread's share of a row. The mean's is relative to mean(|x|), moves every deviation,
    # and adds its square to the variance.
    of_sums = 2.0**-24 * (16 + 10 + x.shape[-1] / 1024)
    of_mean = of_sums * x.abs().mean(-1, keepdim=True) * scale
    slack = of_mean * (1 + of_mean) * (weight.abs() + product.abs()) + (of_sums + 2.0**-21) * product.abs()
    return product + bias, slack + 2.0**-23 * bias.abs()


def check(got, x, weight, bias, eps=1e-6):
    """Half a unit in the last place of BF16, behind the slack; 2^-134 is that of its subnormal numbers."""
    exact, slack = reference(x, weight, bias, eps)
    excess = (got.double() - exact).abs() - slack - (exact.abs() + slack) * 2.0**-8 - 2.0**-134
    assert (excess <= 0).all(), f"{tuple(x.shape)}: off by {excess.max().item()} more than is allowed"


def butterfly(sums):
    """The sum that every lane of a warp holds after a butterfly over the last dimension, in FP32."""
    lanes = torch.arange(32, device=sums.device)
    for offset in (16, 8, 4, 2, 1):
        sums = sums + sums[..., lanes ^ offset]
    return sums[..., 0]


def emulated_sum(terms, add):
    """A row's sum with the kernel's order of additions; `add(sum, term)` is one of them, zero terms change nothing."""
    rows, width = terms.shape
    vec = math.gcd(8, width)
    threads = (min(1024, width // vec) + 31) // 32 * 32
    rounds = -(-width // (threads * vec))
    padded = torch.zeros(rows, rounds * threads * vec, device=terms.device)
    padded[:, :width] = terms
    padded = padded.view(rows, rounds, threads, vec)
    sums = torch.zeros(rows, threads, device=terms.device)
    for turn in range(rounds):
        for at in range(vec):
            sums = add(sums, padded[:, turn, :, at])
    warps = torch.zeros(rows, 32, device=terms.device)
    warps[:, : threads // 32] = butterfly(sums.view(rows, -1, 32))
    return butterfly(warps)


def fma(a, b, c):
    """In FP64, where the product is exact and the sum nearly always rounds to FP32 as if it were."""
    return (a.double() * b.double() + c.double()).float()


def emulated(x, weight, bias, eps=1e-6, ulps=0):
    """The documented operations in FP32; the scale is moved by so many units in its last place."""
    width = x.shape[-1]
    mean = emulated_sum(x.float(), torch.add) / width
    deviation = x.float() - mean[:, None]
    squares = emulated_sum(deviation, lambda total, term: fma(term, term, total))
    variance = fma(squares, torch.tensor(1.0 / width, device=x.device), torch.tensor(eps, device=x.device))
    scale = (torch.rsqrt(variance).view(torch.int32) + ulps).view(torch.float32)
    return fma(deviation * scale[:, None], weight.expand_as(x), bias.expand_as(x)).to(BF16)


def test_two_hundred_random_shapes_are_within_one_rounding_of_the_exact_result():
    choose = random.Random(1)
    for case in range(200):
        width = choose.choice([128, choose.choice(WIDTHS), choose.randint(1, 9000), 8 * choose.randint(1, 2500)])
        rows, scale, centre = choose.randint(1, 33), 10.0 ** choose.uniform(-3, 3), choose.choice([0.0, 0.0, 1.0, 30.0])
        x, weight, bias = operands(rows, width, seed=case)
        x = ((x + centre) * scale).to(BF16)
        check(layernorm(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bits_follow_from_the_documented_operations(width):
    """But for the scale, as rsqrt is approximate on a GPU, and for an FMA that FP64 rounds twice."""
    x, weight, bias = operands(16, width, seed=width)
    got = layernorm(x, weight, bias)
    matches = torch.zeros(16, dtype=torch.bool, device="cuda")
    for ulps in range(-4, 5):
        matches |= (emulated(x, weight, bias, ulps=ulps).view(torch.int16) == got.view(torch.int16)).all(-1)
    assert matches.all()


def test_it_is_layer_norm_as_torch_has_it():
    x, weight, bias = operands(64, 128)
    want = torch.nn.functional.layer_norm(x.float(), (128,), weight.float(), bias.float(), 1e-6)
    assert ((layernorm(x, weight, bias).float() - want).abs() <= want.abs() * 2.0**-7.9 + 2.0**-19).all()


@pytest.mark.parametrize("width", [*WIDTHS, 65536])
def test_equal_elements_give_the_bias(width):
    """A mean that is off by one unit in its last place would be amplified by rsqrt(eps) = 1000."""
    _, weight, bias = operands(1, width)
    for value in (0.0, 1.0, -3.140625, 1e-3, 65280.0, 1.0e30):
        x = torch.full((2, width), value, device="cuda", dtype=BF16)
        assert torch.equal(layernorm(x, weight, bias), bias.expand_as(x)), value


def test_a_mean_far_from_zero_does_not_cancel():
    """Neighbouring BF16 numbers around 1000: the variance is a millionth of the mean's square."""
    _, weight, bias = operands(1, 4096)
    x = 1000 + 4 * (normal(8, 4096) > 0).to(BF16)
    check(layernorm(x, weight, bias), x, weight, bias)


def test_eps_counts():
    x, weight, bias = operands(3, 128)
    for eps in (0.0, 1e-6, 1e-2, 100.0):
        check(layernorm(x, weight, bias, eps=eps), x, weight, bias, eps)
    assert not same_bits(layernorm(x, weight, bias, eps=1e-2), layernorm(x, weight, bias, eps=0.0))


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_strides_and_alignment_do_not_change_a_bit(width):
    rows = 5
    x, weight, bias = operands(rows, width)
    want = layernorm(x, weight, bias)
    for row in range(rows):
        assert same_bits(layernorm(x[row : row + 1], weight, bias), want[row : row + 1])
    for pad in (1, 3, 8, 24):
        for offset in (0, 1, 5):
            storage = torch.full((rows * (width + pad) + offset,), 7.0, device="cuda", dtype=BF16)
            view = storage[offset:].as_strided((rows, width), (width + pad, 1))
            view.copy_(x)
            assert same_bits(layernorm(view, weight, bias), want)
            target = torch.full_like(storage, 3.0)
            out = target[offset:].as_strided((rows, width), (width + pad, 1))
            assert layernorm(x, weight, bias, out=out) is out
            assert same_bits(out, want)
            out.fill_(3.0)
            assert (target == 3.0).all(), "wrote outside its rows"
    moved = torch.zeros(2, width + 3, device="cuda", dtype=BF16)
    moved[0, 3:], moved[1, 3:] = weight, bias
    assert same_bits(layernorm(x, moved[0, 3:], bias), want)
    assert same_bits(layernorm(x, weight, moved[1, 3:]), want)
    layernorm(x, weight, bias, out=x)
    assert same_bits(x, want), "in place"


def test_the_keys_within_a_projections_rows():
    """As behind DeepSeek-V3.2's joint projection: 128 of 2304 columns."""
    qkv, (_, weight, bias) = normal(17, 2304), operands(1, 128)
    keys = qkv[:, 2112:2240]
    assert same_bits(layernorm(keys, weight, bias), layernorm(keys.contiguous(), weight, bias))


@pytest.mark.parametrize("width", [128, 5120])
def test_every_behaviour_gives_the_same_bits_behind_finished_work(width):
    x, weight, bias = operands(8, width)
    want = layernorm(x, weight, bias, pdl=False)
    for wait in native.WAITS:
        for trigger in native.TRIGGERS:
            if wait == "loaders" or (wait, trigger) == ("never", "after_wait"):
                continue
            torch.cuda.synchronize()
            assert same_bits(layernorm(x, weight, bias, behaviour=Behaviour(wait, trigger)), want), (wait, trigger)
    for behaviour in CORRECT:
        assert same_bits(layernorm(x, weight, bias, behaviour=behaviour), want), behaviour


@pytest.mark.parametrize("width", [128, 5120])
def test_a_thousand_runs_are_identical(width):
    x, weight, bias = operands(4, width)
    want = layernorm(x, weight, bias).clone()
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        different += (layernorm(x, weight, bias).view(torch.int16) != want.view(torch.int16)).any()
    assert different.item() == 0


@pytest.mark.parametrize("width", [128, 1536])
def test_it_is_captured_and_replayed_on_new_input(width):
    x, weight, bias = operands(4, width)
    out = torch.empty_like(x)
    layernorm(x, weight, bias, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layernorm(x, weight, bias, out=out)
    for seed in range(3):
        x.copy_(normal(4, width, seed=seed + 100))
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out, layernorm(x, weight, bias))


def test_no_rows_launch_nothing():
    assert layernorm(normal(0, 64), normal(64), normal(64)).shape == (0, 64)


def test_delay_and_stamps():
    x, weight, bias = operands(3, 512)
    behaviour = Behaviour("all", "before_stores", delay=True, stamps=True)
    want = layernorm(x, weight, bias)
    for delay in (0, 300_000):
        stamps = torch.tensor([2**63 - 1, 2**63 - 1, 0, 0], device="cuda")
        assert same_bits(layernorm(x, weight, bias, behaviour=behaviour, delay_ns=delay, stamps=stamps), want)
        entry, first_read, last_store, exit_ = stamps.tolist()
        assert 0 < entry <= first_read <= last_store <= exit_ < 2**63 - 1
        assert delay <= last_store - first_read < delay + 250_000


@pytest.mark.parametrize("width", [128, 5120])
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
def test_behind_an_early_trigger_the_faults_are_stale_and_the_rest_is_not(width, wait, flag, stale):
    """The producer is this kernel too: it triggers 100 us before its stores. In a CTA of one warp, one is all."""
    stale = stale and (wait, width) != ("one_warp", 128)
    source, weight, bias = operands(4, width)
    producer = Behaviour("all", "before_stores", delay=True)
    consumer = Behaviour(wait, "after_stores")
    between, out = torch.empty_like(source), torch.empty_like(source)
    layernorm(source, weight, bias, out=between, behaviour=producer)
    want = layernorm(between, bias, weight, behaviour=consumer, flag=flag).clone()
    wrong = {True: 0, False: 0}
    for pdl in (True, False):
        for _ in range(20):
            between.fill_(float("nan"))
            layernorm(source, weight, bias, out=between, behaviour=producer, delay_ns=100_000)
            layernorm(between, bias, weight, out=out, behaviour=consumer, flag=flag, pdl=pdl)
            torch.cuda.synchronize()
            wrong[pdl] += not same_bits(out, want)
    assert wrong[False] == 0
    assert wrong[True] >= 15 if stale else wrong[True] == 0


@pytest.mark.parametrize("wait", ["all", "never"])
def test_gain_and_bias_are_read_after_the_wait(wait):
    """The producer writes the consumer's bias: independent of nothing, as the contract says."""
    source, weight, x = normal(1, 128), normal(128, seed=1), normal(2, 128, seed=2)
    producer = Behaviour("all", "before_stores", delay=True)
    made, out = torch.empty_like(source), torch.empty_like(x)
    zero = torch.zeros_like(weight)
    want = layernorm(x, weight, layernorm(source, weight, zero)[0])
    wrong = 0
    for _ in range(20):
        made.fill_(float("nan"))
        layernorm(source, weight, zero, out=made, behaviour=producer, delay_ns=100_000)
        layernorm(x, weight, made[0], out=out, behaviour=Behaviour(wait))
        torch.cuda.synchronize()
        wrong += not same_bits(out, want)
    assert wrong >= 15 if wait == "never" else wrong == 0
