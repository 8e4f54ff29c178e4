"""The indexer's two projections: how they are computed, from which weights, and what is refused."""

from __future__ import annotations

import copy
import io
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from fusions import indexer_gemm
from fusions.checkpoint import dequantize_blocks, dequantize_rows
from fusions.indexer import BF16_SWITCH, COMPUTES, STORAGES, WRAPPED, IndexerProjection, Path
from fusions.indexer_gemm import Arithmetic
from fusions.tf32 import is_on, tf32

DK, NH = 128, 64
FP8 = torch.float8_e4m3fn
DTYPES = {
    "tf32": torch.float32,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16_fp32out": torch.bfloat16,
}


class Indexer(torch.nn.Module):
    """The owner of the two Linears, as a model has it."""

    def __init__(self, h=256, dk=DK, nh=NH, **options):
        super().__init__()
        compute = options.get("compute", "tf32")
        generator = torch.Generator().manual_seed(h + dk)
        for name, rows in (("wk", dk), ("weights_proj", nh)):
            module = torch.nn.Linear(h, rows, bias=False, dtype=DTYPES[compute]).requires_grad_(False)
            module.weight.copy_(torch.randn(rows, h, generator=generator))
            self.add_module(name, module)
        self.k_norm = torch.nn.LayerNorm(dk)
        self.projection = IndexerProjection(self.wk, self.weights_proj, **options)


def loaded(**options):
    indexer = Indexer(**options)
    assert indexer.projection.post_load_weights() is True
    return indexer


def tokens(count, h=256, dtype=torch.bfloat16, seed=0):
    return torch.randn(count, h, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(hidden, weight):
    """(FP64 product, sum of the magnitudes)."""
    x, w = hidden.double(), weight.double()
    return x @ w.t(), x.abs() @ w.abs().t()


def assert_projects(indexer, hidden, slack=2.0**-18):
    """What :meth:`project` gives is what the weights *now* give."""
    key, weights = indexer.projection(hidden)
    for got, module in ((key, indexer.wk), (weights, indexer.weights_proj)):
        want, magnitude = exact(hidden, module.weight)
        rounding = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps / 2
        assert got.shape == want.shape
        assert ((got.double() - want).abs() <= rounding * want.abs() + slack * magnitude).all()
    return key, weights


class Products(TorchDispatchMode):
    """Counts matrix products, and operations that copy or make anything."""

    def __init__(self):
        super().__init__()
        self.count, self.names = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))


def products(indexer, hidden):
    with Products() as seen:
        indexer.projection(hidden)
    return seen.count


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("compute", COMPUTES)
def test_one_product_for_both(compute, storage):
    indexer = loaded(compute=compute, storage=storage)
    hidden = tokens(5)
    assert products(indexer, hidden) == 1
    assert indexer.projection.explain(hidden)[0] is Path.FUSED
    indexer.projection.release()
    assert products(indexer, hidden) == 2
    path, why = indexer.projection.explain(hidden)
    assert path is Path.SEPARATE
    assert why.startswith("not fused: post_load_weights() puts them together; computed with ")


@pytest.mark.parametrize("kind", ["full mantissa", "exact in BF16"])
@pytest.mark.parametrize("compute", ["tf32", "fp32"])
@pytest.mark.parametrize("fused", [True, False])
def test_fp32_bounds_at_full_size(compute, kind, fused):
    """On the CPU ``tf32`` is FP32 too."""
    indexer = loaded(h=7168, compute=compute)
    if kind == "exact in BF16":
        for module in (indexer.wk, indexer.weights_proj):
            module.weight.copy_(module.weight.bfloat16())
    if not fused:
        indexer.projection.release()
    assert indexer.projection.is_fused is fused
    key, weights = assert_projects(indexer, tokens(8, 7168))
    assert key.dtype == torch.bfloat16
    want, _ = exact(tokens(8, 7168), indexer.weights_proj.weight)
    magnitude = (tokens(8, 7168).double() ** 2 @ indexer.weights_proj.weight.double().t() ** 2).sqrt()
    assert ((weights.double() - want) / magnitude).pow(2).mean().sqrt() < 5e-6
    assert_projects(indexer, tokens(8, 7168, torch.float32))


def test_one_signed_data_stay_within_the_bound():
    """Here errors of one sign add up: 2^-20 of the magnitude would not do for every accumulation order."""
    indexer = loaded(h=7168, compute="fp32")
    for module in (indexer.wk, indexer.weights_proj):
        module.weight.abs_()
    assert_projects(indexer, tokens(4, 7168, torch.float32).abs())


@pytest.mark.parametrize("fused", [True, False])
def test_bf16_bounds_at_full_size(fused):
    indexer = loaded(h=7168, compute="bf16")
    if not fused:
        indexer.projection.release()
    hidden = tokens(8, 7168)
    key, weights = indexer.projection(hidden)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, weights.bfloat16().float())  # rounded once already
    for got, module in ((key, indexer.wk), (weights, indexer.weights_proj)):
        want, magnitude = exact(hidden, module.weight)
        assert ((got.double() - want).abs() <= 2.0**-8 * want.abs() + 2.0**-17 * magnitude).all()


def test_bf16_with_fp32_results_is_not_rounded():
    indexer = loaded(h=7168, compute="bf16_fp32out")
    _, weights = assert_projects(indexer, tokens(8, 7168))
    assert not torch.equal(weights, weights.bfloat16().float())


def overlap(found, wanted, k):
    """The share of the k best keys that two score matrices [T, keys] agree on."""
    pairs = zip(found.topk(k, 1).indices.tolist(), wanted.topk(k, 1).indices.tolist(), strict=True)
    return sum(len(set(one) & set(other)) for one, other in pairs) / (k * found.shape[0])


@pytest.mark.parametrize(("compute", "least"), [("fp32", 0.999), ("bf16_fp32out", 0.999), ("bf16", 0.997)])
def test_the_best_keys_are_those_of_fp64(compute, least):
    """4096 keys, k = 2048. BF16 results cost some of them: they are why FP32 is the default."""
    count, keys, k = 4, 4096, 2048
    indexer = loaded(compute=compute)
    hidden = tokens(keys)
    queries = torch.randn(count, NH, DK, generator=torch.Generator().manual_seed(1)).double()

    def scores(key, weights):
        total = torch.zeros(count, keys, dtype=torch.float64)
        for head in range(NH):
            total += weights[:, head, None].double() * torch.relu(queries[:, head] @ key.double().t())
        return total

    key, weights = indexer.projection(hidden)
    reference = scores(exact(hidden, indexer.wk.weight)[0], exact(hidden[:count], indexer.weights_proj.weight)[0])
    assert overlap(scores(key, indexer.projection.scale_weights(weights[:count])), reference, k) >= least


# -- layout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("compute", COMPUTES)
def test_layout_of_the_results(compute, fused, count, dtype):
    indexer = loaded(compute=compute)
    if not fused:
        indexer.projection.release()
    hidden = tokens(count, dtype=dtype)
    key, weights = indexer.projection(hidden)
    assert (key.shape, key.dtype, key.stride()) == ((count, DK), dtype, (DK, 1))
    assert (weights.shape, weights.dtype, weights.stride(-1)) == ((count, NH), torch.float32, 1)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (key, weights, hidden, indexer.wk.weight)}
    assert len(storages) == 4 or not count
    scaled = indexer.projection.scale_weights(weights)
    assert (scaled.dtype, scaled.stride()) == (torch.float32, (NH, 1))


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (2, 0), (0, 3), (2, 3, 2), ()])
def test_leading_dimensions_are_kept(shape, compute):
    indexer = loaded(compute=compute)
    hidden = torch.randn(*shape, 256).bfloat16()
    key, weights = indexer.projection(hidden)
    flat = indexer.projection(hidden.reshape(-1, 256))
    assert torch.equal(key, flat[0].view(*shape, DK))
    assert torch.equal(weights, flat[1].reshape(*shape, NH))
    assert key.is_contiguous()


def test_rows_need_not_be_dense():
    indexer = loaded()
    wide = tokens(12, 300)
    for hidden in (wide[::2, 3:259], wide[:, :256].t().contiguous().t(), wide[:1].expand(4, -1)[:, :256]):
        assert_projects(indexer, hidden)
    assert_projects(indexer, tokens(12, 256, torch.float32)[::3])
    pages = tokens(24, 300).view(4, 6, 300)[:, 1:3, 7:263]
    assert torch.equal(indexer.projection(pages)[0], indexer.projection(pages.contiguous())[0])


def test_a_quantized_wrapper_brings_its_tensor():
    indexer, hidden = loaded(), tokens(3)
    wrapper = SimpleNamespace(fp4_tensor=torch.zeros(3, 128, dtype=torch.uint8), **{WRAPPED: hidden})
    assert torch.equal(indexer.projection(wrapper)[0], indexer.projection(hidden)[0])
    assert indexer.projection.explain(wrapper) == indexer.projection.explain(hidden)
    for without in (SimpleNamespace(**{WRAPPED: None}), SimpleNamespace(), None):
        with pytest.raises(ValueError, match=f"without a tensor as its {WRAPPED}"):
            indexer.projection(without)


@pytest.mark.parametrize("compute", COMPUTES)
def test_meta_gives_shapes(compute):
    indexer = loaded(compute=compute)
    key, weights = indexer.projection(tokens(3).to("meta"))
    assert (key.device.type, key.shape, key.dtype) == ("meta", (3, DK), torch.bfloat16)
    assert (weights.device.type, weights.shape, weights.dtype) == ("meta", (3, NH), torch.float32)
    assert "shapes only" in indexer.projection.explain(tokens(3).to("meta"))[1]


def test_the_hook_on_meta_weights_defers():
    indexer = Indexer().to("meta")
    assert indexer.projection.post_load_weights() is False
    assert indexer.projection(torch.empty(3, 256, device="meta"))[1].shape == (3, NH)
    with pytest.raises(ValueError, match="hidden is on cpu, wk is on meta"):
        indexer.projection(tokens(3))
    indexer.to_empty(device="cpu")
    indexer.load_state_dict(Indexer().state_dict())
    assert_projects(indexer, tokens(3))
    assert indexer.projection.post_load_weights() is True
    assert_projects(indexer, tokens(3))


# -- scaling -----------------------------------------------------------------------------------------------------------


def test_the_factor():
    assert loaded().projection.factor == pytest.approx(0.011048543456039806, rel=1e-15)
    assert loaded(dk=64, nh=16).projection.factor == 1 / 32


def test_scaling_for_fp8_queries_goes_from_left_to_right():
    projection = loaded().projection
    weights = torch.randn(50, NH + 3, generator=torch.Generator().manual_seed(1))[:, 3:]
    q_scale = torch.rand(50, NH, 1, generator=torch.Generator().manual_seed(2)) * 3
    found = projection.scale_weights(weights, q_scale)
    factor = torch.tensor(projection.factor, dtype=torch.float32)
    assert torch.equal(found, (weights * q_scale.squeeze(-1)) * factor)
    assert not torch.equal(found, weights * (q_scale.squeeze(-1) * factor))
    assert found.is_contiguous()


def test_scaling_for_fp4_queries_is_in_fp32():
    projection = loaded().projection
    weights = torch.randn(5, NH).bfloat16()
    found = projection.scale_weights(weights)
    assert torch.equal(found, weights.float() * projection.factor)
    assert found.dtype == torch.float32


def test_scaling_keeps_leading_dimensions_and_refuses_other_shapes():
    projection = loaded().projection
    assert projection.scale_weights(torch.ones(2, 3, NH), torch.ones(2, 3, NH, 1)).shape == (2, 3, NH)
    assert projection.scale_weights(torch.ones(0, NH), torch.ones(0, NH, 1)).shape == (0, NH)
    for shape in ((5, NH), (1, NH, 1), (5, 1, 1), (5, NH, 2)):
        with pytest.raises(ValueError, match=re.escape(f"q_scale has shape {shape}; expected (5, 64, 1)")):
            projection.scale_weights(torch.ones(5, NH), torch.ones(shape))


# -- arithmetic --------------------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("process", [True, False])
@pytest.mark.parametrize(
    ("capability", "compute", "inside"),
    [(90, "tf32", True), (80, "tf32", True), (90, "fp32", False), (75, "tf32", None), (75, "fp32", None)],
)
def test_the_switch_around_the_products(monkeypatch, capability, compute, inside, process):
    """On GPUs with TF32 ``compute`` decides, elsewhere nothing is switched; and it is back after an error."""
    seen = []

    def recorded(x, weight):
        seen.append(is_on())
        if len(seen) == 2:
            raise KeyError
        return linear(x, weight)

    monkeypatch.setattr(indexer_gemm, "capability", lambda device: capability)
    monkeypatch.setattr(indexer_gemm, "linear", recorded)
    hidden, weight = tokens(2).as_subclass(OnGpu), torch.ones(3, 256)
    before = is_on()
    with tf32(process):
        with pytest.raises(KeyError):
            indexer_gemm.products(hidden, (weight, weight), compute)
        assert is_on() is process
    assert is_on() is before
    assert seen == [process if inside is None else inside] * 2


def test_what_each_arithmetic_needs(monkeypatch):
    capability = 90
    monkeypatch.setattr(indexer_gemm, "capability", lambda device: capability)
    x, weight = tokens(2).as_subclass(OnGpu), torch.ones(3, 256).bfloat16()
    arithmetic = indexer_gemm.arithmetic
    assert arithmetic(x, (weight,), "tf32") == (Arithmetic.TF32, "")
    assert arithmetic(x, (weight,), "fp32") == (Arithmetic.FP32, "")
    assert arithmetic(x, (weight,), "bf16") == (Arithmetic.NATIVE, "")
    assert arithmetic(x, (weight,), "bf16_fp32out") == (Arithmetic.FP32_OUT, "")
    how, why = arithmetic(x.float(), (weight,), "bf16")
    assert how is Arithmetic.NATIVE
    assert why.endswith("are mixed: computed in torch.float32")
    for operands, reason in (
        ((x.float(), (weight,)), "hidden is torch.float32, not torch.bfloat16"),
        ((x, (weight, weight.float())), "a weight is torch.float32, not torch.bfloat16"),
        ((x.detach().requires_grad_(), (weight,)), "a gradient is needed"),
    ):
        assert arithmetic(*operands, "bf16_fp32out") == (Arithmetic.FP32, reason)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert arithmetic(x, (weight,), "tf32") == (Arithmetic.TF32, "NVIDIA_TF32_OVERRIDE=0 turns TF32 off")
    monkeypatch.setattr(indexer_gemm, "_HAS_OUT_DTYPE", False)
    assert arithmetic(x, (weight,), "bf16_fp32out")[1].endswith("has no out_dtype")
    capability = 75
    assert arithmetic(x, (weight,), "tf32") == (Arithmetic.FP32, "cpu has no TF32")
    assert arithmetic(x, (weight,), "bf16_fp32out") == (Arithmetic.FP32, "cpu has no BF16 GEMM")


@pytest.mark.parametrize("compute", COMPUTES)
def test_autocast_does_not_change_a_bit(compute):
    indexer, hidden = loaded(compute=compute), tokens(5)
    want = indexer.projection(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        found = indexer.projection(hidden)
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))


@pytest.mark.parametrize("compute", COMPUTES)
def test_gradients_reach_hidden(compute):
    indexer = loaded(compute=compute)
    hidden = tokens(3, dtype=torch.float32).requires_grad_()
    key, weights = indexer.projection(hidden)
    (key.sum() + (2 * weights).sum()).backward()
    want = indexer.wk.weight.double().sum(0) + 2 * indexer.weights_proj.weight.double().sum(0)
    torch.testing.assert_close(hidden.grad.double(), want.expand(3, -1), rtol=1e-2, atol=0.2)
    with torch.inference_mode():
        assert not indexer.projection(hidden)[0].requires_grad


@pytest.mark.parametrize("storage", STORAGES)
def test_gradients_reach_weights_that_came_to_be_trained(storage):
    indexer, hidden = loaded(storage=storage), tokens(3)
    indexer.weights_proj.requires_grad_()
    path, why = indexer.projection.explain(hidden)
    assert path is Path.SEPARATE
    assert "a gradient is needed" in why
    indexer.projection(hidden)[1].sum().backward()
    torch.testing.assert_close(indexer.weights_proj.weight.grad, hidden.float().sum(0).expand(NH, -1))
    with torch.no_grad():
        assert indexer.projection.explain(hidden)[0] is Path.FUSED


# -- which weights -----------------------------------------------------------------------------------------------------


def in_place(module, value):
    module.weight.copy_(value)


def through_data(module, value):
    module.weight.data.copy_(value)


def from_state(module, value):
    module.load_state_dict({"weight": value})


def by_assignment(module, value):
    module.load_state_dict({"weight": value.clone()}, assign=True)
    module.requires_grad_(False)


def new_parameter(module, value):
    module.weight = torch.nn.Parameter(value.clone(), requires_grad=False)


def new_data(module, value):
    module.weight.data = value.clone()


def same_memory(module, value):
    """A new Parameter over the old one's memory, with a count of writes of its own that is just as high."""
    old = module.weight
    module.weight = torch.nn.Parameter(old.data, requires_grad=False)
    while module.weight._version < old._version:
        module.weight.add_(0)
    old.copy_(value)


CHANGES = (in_place, through_data, from_state, by_assignment, new_parameter, new_data, same_memory)


UNSEEN = ("copy", through_data)  # torch does not count it: test_a_write_through_data_needs_the_hook


@pytest.mark.parametrize("name", ["wk", "weights_proj"])
@pytest.mark.parametrize(
    ("storage", "change"), [pair for pair in itertools.product(STORAGES, CHANGES) if pair != UNSEEN]
)
def test_new_weights_are_used_without_the_hook(storage, change, name):
    indexer, hidden = loaded(storage=storage), tokens(4)
    assert_projects(indexer, hidden)
    module = getattr(indexer, name)
    change(module, torch.randn_like(module.weight))
    stays = storage == "copy" or change in (in_place, through_data, from_state, same_memory)
    assert indexer.projection.explain(hidden)[0] is (Path.FUSED if stays else Path.SEPARATE)
    assert_projects(indexer, hidden)
    assert products(indexer, hidden) == (1 if stays else 2)
    assert indexer.projection.post_load_weights() is True
    assert products(indexer, hidden) == 1
    assert_projects(indexer, hidden)


def test_a_write_through_data_needs_the_hook():
    """What a copy cannot see, and the reason why ``alias`` is the default."""
    indexer, hidden = loaded(storage="copy"), tokens(4)
    before, version = indexer.projection.fused_weight, indexer.wk.weight._version
    indexer.wk.weight.data.copy_(torch.randn(DK, 256))
    assert indexer.wk.weight._version == version  # this is why
    assert indexer.projection.is_fused
    assert indexer.projection.post_load_weights() is True
    assert_projects(indexer, hidden)
    assert indexer.projection.fused_weight is before  # graphs read it


def test_an_address_that_is_used_again_is_no_old_weight():
    """A freed weight's memory may be the next weight's: same address, same count of writes, other values."""
    indexer, hidden = loaded(storage="copy"), tokens(4)
    for seed in range(20):
        shape = indexer.wk.weight.shape
        indexer.wk.weight = None
        value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        indexer.wk.weight = torch.nn.Parameter(torch.empty(shape), requires_grad=False)
        indexer.wk.weight.copy_(value)
        assert_projects(indexer, hidden)


def test_a_copy_is_renewed_in_its_memory():
    indexer, hidden = loaded(storage="copy"), tokens(2)
    fused = indexer.projection.fused_weight
    indexer.wk.weight.zero_()
    assert not indexer.projection.is_fused
    assert indexer.projection.fused_weight is None
    path, why = indexer.projection.explain(hidden)
    assert path is Path.FUSED
    assert why.startswith("wk has changed since the fused weight was copied: copied anew first")
    assert (indexer.projection(hidden)[0] == 0).all()
    assert indexer.projection.fused_weight is fused
    new_parameter(indexer.wk, torch.ones(DK, 256))
    assert_projects(indexer, hidden)
    assert indexer.projection.fused_weight is fused


def test_a_copy_leaves_the_parameters_alone():
    indexer = Indexer(storage="copy")
    pointers = [module.weight.data_ptr() for module in (indexer.wk, indexer.weights_proj)]
    indexer.projection.post_load_weights()
    assert [module.weight.data_ptr() for module in (indexer.wk, indexer.weights_proj)] == pointers


def test_a_copy_is_dropped_when_the_weights_no_longer_fit():
    indexer, hidden = loaded(storage="copy"), tokens(2)
    new_parameter(indexer.wk, torch.randn(DK, 256).bfloat16())
    path, why = indexer.projection.explain(hidden)
    assert path is Path.SEPARATE
    assert "wk has a weight of torch.bfloat16, not torch.float32" in why
    assert_projects(indexer, hidden)
    assert indexer.projection._rows.weight is None


def test_no_copy_of_weights_whose_writes_are_not_counted():
    with torch.inference_mode():
        indexer = Indexer(storage="copy")
    assert indexer.projection.post_load_weights() is False
    assert "of which torch counts no writes" in indexer.projection.explain(tokens(2))[1]
    assert_projects(indexer, tokens(2))


def test_an_alias_keeps_its_memory_over_hooks_and_reloads():
    indexer = loaded()
    pointers = [module.weight.data_ptr() for module in (indexer.wk, indexer.weights_proj)]
    assert pointers[1] - pointers[0] == DK * 256 * 4
    indexer.load_state_dict(Indexer(dk=DK).state_dict())
    for hook in (indexer.projection.post_load_weights, indexer.projection.cache_derived_state):
        assert hook() is True
    assert [module.weight.data_ptr() for module in (indexer.wk, indexer.weights_proj)] == pointers
    indexer.projection.release()
    assert not indexer.projection.is_fused
    assert indexer.wk.weight.untyped_storage().nbytes() == DK * 256 * 4


def test_the_derived_state_step_moves_no_weight():
    indexer = Indexer()
    pointers = [module.weight.data_ptr() for module in (indexer.wk, indexer.weights_proj)]
    assert indexer.projection.cache_derived_state() is False
    assert [module.weight.data_ptr() for module in (indexer.wk, indexer.weights_proj)] == pointers
    assert_projects(indexer, tokens(2))
    laid_out = torch.randn(DK + NH, 256)
    indexer.wk.weight.data, indexer.weights_proj.weight.data = laid_out[:DK], laid_out[DK:]
    assert indexer.projection.cache_derived_state() is True
    assert products(indexer, tokens(2)) == 1
    assert Indexer(storage="copy").projection.cache_derived_state() is True


@pytest.mark.parametrize("storage", STORAGES)
def test_state_dict_deepcopy_and_pickle(storage):
    indexer = loaded(storage=storage)
    assert list(indexer.state_dict()) == ["wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias"]
    assert {name for name, _ in indexer.named_modules()} == {"", "wk", "weights_proj", "k_norm", "projection"}
    file = io.BytesIO()
    torch.save(indexer, file)
    file.seek(0)
    twins = [copy.deepcopy(indexer), torch.load(file, weights_only=False)]
    for twin in twins:
        assert twin.wk.weight.data_ptr() != indexer.wk.weight.data_ptr()
        twin.wk.weight.mul_(2)
        assert_projects(twin, tokens(3))
        assert twin.projection.post_load_weights() is True
        assert products(twin, tokens(3)) == 1
    assert_projects(indexer, tokens(3))


@pytest.mark.parametrize("storage", STORAGES)
def test_moving_the_model_breaks_nothing(storage):
    indexer = loaded(storage=storage)
    indexer.double().float()
    assert_projects(indexer, tokens(3))
    indexer.bfloat16()
    assert_projects(indexer, tokens(3))
    assert indexer.projection.post_load_weights() is False
    indexer.float()
    assert indexer.projection.post_load_weights() is True
    assert products(indexer, tokens(3)) == 1


# -- not fusable -------------------------------------------------------------------------------------------------------


def with_bias(indexer):
    indexer.wk.bias = torch.nn.Parameter(torch.full((DK,), 100.0), requires_grad=False)


def with_hook(indexer):
    indexer.weights_proj.register_forward_hook(lambda module, args, out: out + 100)


def with_quantization(indexer):
    indexer.wk.has_any_quant = True


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_bias, "wk has a bias"),
        (with_hook, "weights_proj has hooks, which a fused call would not run"),
        (with_quantization, "wk is quantized"),
    ],
)
def test_a_module_that_is_more_than_its_weight_is_called(change, says, storage):
    indexer, hidden = Indexer(storage=storage), tokens(3)
    change(indexer)
    assert indexer.projection.post_load_weights() is False
    assert indexer.projection.explain(hidden) == (Path.LINEAR, says)
    key, weights = indexer.projection(hidden)
    assert torch.equal(key, indexer.wk(hidden.float()).bfloat16())
    assert torch.equal(weights, indexer.weights_proj(hidden.float()))


def test_a_module_without_a_plain_weight_is_called():
    """As one that keeps its weight in shards."""

    class Sharded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            self.bias, self.out_features = None, DK

        def forward(self, x):
            return x[:, :DK] * 2

    plain = Indexer().weights_proj
    projection = IndexerProjection(Sharded(), plain)
    assert projection.post_load_weights() is False
    hidden = tokens(3)
    assert projection.explain(hidden) == (Path.LINEAR, "wk has no plain weight [N, K]")
    assert torch.equal(projection(hidden)[0], hidden[:, :DK] * 2)
    assert projection(hidden.to("meta"))[0].shape == (3, DK)
    assert projection.factor == loaded().projection.factor


@pytest.mark.parametrize(
    ("compute", "dtype", "says"),
    [
        ("tf32", torch.bfloat16, "not torch.float32"),
        ("bf16", torch.float32, "not torch.bfloat16 or torch.float16"),
        ("bf16_fp32out", torch.float32, "not torch.bfloat16"),
    ],
)
def test_weights_of_another_type_are_two_products(compute, dtype, says):
    indexer = Indexer(compute=compute).to(dtype)
    assert indexer.projection.post_load_weights() is False
    assert says in indexer.projection.explain(tokens(3))[1]
    assert_projects(indexer, tokens(3))


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_project_before_the_hook_names_it():
    for hidden in (tokens(2), tokens(2).to("meta")):
        with pytest.raises(RuntimeError, match=r"call post_load_weights\(\) once the weights are loaded"):
            Indexer().projection(hidden)


def bare(**options):
    return IndexerProjection(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), **options)


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="compute='fp16': expected one of tf32, fp32, bf16, bf16_fp32out"):
        bare(compute="fp16")
    with pytest.raises(ValueError, match="storage='view': expected one of alias, copy"):
        bare(storage="view")


@pytest.mark.parametrize("fused", [True, False])
def test_a_hidden_that_does_not_fit_is_refused(fused):
    indexer = loaded()
    if not fused:
        indexer.projection.release()
    for call in (indexer.projection.project, indexer.projection.explain):
        with pytest.raises(ValueError, match=re.escape("hidden has K = 255, wk has K = 256; pass hidden[..., K]")):
            call(tokens(2, 255))
        for wrong in (tokens(2).double(), tokens(2).to(FP8), tokens(2).int(), torch.tensor(1.0)):
            with pytest.raises(ValueError, match=r"expected \[\.\.\., H\] of torch.bfloat16, torch.float16, torch.flo"):
                call(wrong)


@pytest.fixture
def capturing(monkeypatch):
    def start():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    return start


@pytest.mark.parametrize("storage", STORAGES)
def test_weights_are_not_touched_during_a_capture(capturing, storage):
    indexer = loaded(storage=storage)
    state = {key: value.clone() for key, value in indexer.state_dict().items()}
    capturing()
    for call in ("post_load_weights", "transform_weights", "cache_derived_state", "release"):
        with pytest.raises(RuntimeError, match="CUDA graph is being captured"):
            getattr(indexer.projection, call)()
    with pytest.raises(RuntimeError, match="CUDA graph is being captured"):
        indexer.projection.load_weights({f"indexer.{key}": value + 1 for key, value in state.items()})
    assert all(torch.equal(value, state[key]) for key, value in indexer.state_dict().items())
    assert products(indexer, tokens(2)) == 1


def test_an_old_copy_is_not_captured(capturing):
    indexer = loaded(storage="copy")
    indexer.wk.weight.zero_()
    capturing()
    with pytest.raises(RuntimeError, match=r"wk has changed .* call post_load_weights\(\) before the capture"):
        indexer.projection(tokens(2))


def test_a_broken_alias_is_captured_as_two_products(capturing):
    indexer = loaded()
    new_parameter(indexer.wk, torch.zeros(DK, 256))
    capturing()
    assert products(indexer, tokens(2)) == 2
    assert (indexer.projection(tokens(2))[0] == 0).all()


# -- environment -------------------------------------------------------------------------------------------------------


def test_the_switch_for_bf16_is_read_at_construction_only(monkeypatch):
    before = Indexer()
    monkeypatch.setenv(BF16_SWITCH, "1")
    assert bare().compute == "bf16"
    assert before.projection.compute == "tf32"
    for explicit in ("fp32", "tf32"):
        assert bare(compute=explicit).compute == explicit  # the caller's word
    made = bare()
    monkeypatch.setenv(BF16_SWITCH, "0")
    assert made.compute == "bf16"
    assert bare().compute == "tf32"


# -- loading -----------------------------------------------------------------------------------------------------------


def stored(kind, rows, h, seed):
    """A checkpoint's tensors of one Linear by field, and the FP32 weight that they mean."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, h, generator=generator)
    if kind in (torch.bfloat16, torch.float16, torch.float32):
        return {"weight": weight.to(kind)}, weight.to(kind).float()
    codes = (weight * 50).to(FP8)
    if kind == "blocks":
        scales = torch.rand(-(-rows // 128), -(-h // 128), generator=generator) + 0.1
        return {"weight": codes, "weight_scale_inv": scales}, dequantize_blocks(codes, scales)
    scales = torch.rand(rows, generator=generator) + 0.1
    return {"weight": codes, "weight_scale": scales}, dequantize_rows(codes, scales)


def checkpoint(kinds, dk=130, nh=6, h=200, seed=0):
    tensors, meaning = {}, {}
    for at, (name, rows) in enumerate((("wk", dk), ("weights_proj", nh))):
        fields, meaning[name] = stored(kinds[at], rows, h, seed + at)
        tensors |= {f"indexer.{name}.{field}": tensor for field, tensor in fields.items()}
    return tensors, meaning


KINDS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, "blocks", "rows"])
SMALL = {"dk": 130, "nh": 6, "h": 200}


def assert_holds(indexer, meaning):
    for name, value in meaning.items():
        assert torch.equal(getattr(indexer, name).weight, value), name


@settings(max_examples=25, deadline=None)
@given(KINDS, KINDS, st.sampled_from(STORAGES))
def test_every_kind_of_checkpoint_is_loaded(first, second, storage):
    indexer = loaded(storage=storage, **SMALL)
    tensors, meaning = checkpoint((first, second))
    others = {
        "indexer.k_norm.weight": torch.zeros(130),
        "indexer.wq_b.weight": torch.zeros(1),
        "lm_head": torch.ones(1),
    }
    assert indexer.projection.load_weights(tensors | others) == set(tensors)
    assert_holds(indexer, meaning)
    assert_projects(indexer, tokens(3, 200))  # the reload needs no hook
    assert indexer.projection.post_load_weights() is True
    assert_projects(indexer, tokens(3, 200))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_buckets_in_any_order_give_the_same(data):
    """And codes are never seen in a Parameter: it has the old weight or the new one."""
    indexer = loaded(**SMALL)
    old = {name: getattr(indexer, name).weight.clone() for name in ("wk", "weights_proj")}
    for round_ in range(2):
        tensors, meaning = checkpoint((data.draw(KINDS), data.draw(KINDS)), seed=10 * round_)
        order = data.draw(st.permutations(sorted(tensors)))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=3)))
        for start, end in itertools.pairwise([0, *cuts, len(order)]):
            bucket = {key: tensors[key].clone() for key in order[start:end]}
            assert indexer.projection.load_weights(bucket, allow_partial_loading=True) == set(bucket)
            for tensor in bucket.values():
                tensor.view(torch.uint8).fill_(1)  # a loader uses its memory again
            for name, value in meaning.items():
                weight = getattr(indexer, name).weight
                assert torch.equal(weight, value) or torch.equal(weight, old[name])
        indexer.projection.finish_loading()
        assert_holds(indexer, meaning)
        old = meaning
    assert indexer.projection.is_fused


def test_a_scale_that_comes_late_is_waited_for_and_the_hook_checks():
    indexer = loaded(**SMALL)
    before = indexer.wk.weight.clone()
    tensors, meaning = checkpoint(("blocks", torch.bfloat16))
    scale = tensors.pop("indexer.wk.weight_scale_inv")
    indexer.projection.load_weights(tensors, allow_partial_loading=True)
    assert torch.equal(indexer.wk.weight, before)
    assert torch.equal(indexer.weights_proj.weight, meaning["weights_proj"])
    for check in ("finish_loading", "post_load_weights", "cache_derived_state"):
        with pytest.raises(
            ValueError, match=r"ended without wk\.weight_scale_inv or weight_scale; the Parameters are as"
        ):
            getattr(indexer.projection, check)()
    assert torch.equal(indexer.wk.weight, before)
    indexer.projection.load_weights({"indexer.wk.weight_scale_inv": scale}, allow_partial_loading=True)
    assert_holds(indexer, meaning)
    assert indexer.projection.post_load_weights() is True


def test_a_complete_load_forgets_what_waits():
    indexer = loaded(**SMALL)
    half, _ = checkpoint(("blocks", torch.bfloat16))
    del half["indexer.wk.weight_scale_inv"]
    indexer.projection.load_weights(half, allow_partial_loading=True)
    tensors, meaning = checkpoint((torch.float32, torch.float32), seed=5)
    indexer.projection.load_weights(tensors)
    indexer.projection.finish_loading()
    assert_holds(indexer, meaning)


def test_names_behind_a_layer():
    indexer = loaded(**SMALL)
    tensors, meaning = checkpoint(("rows", torch.bfloat16))
    prefix = "model.layers.3.self_attn."
    named = {f"{prefix}{key}": value for key, value in tensors.items()}
    assert indexer.projection.load_weights(named, prefix=f"{prefix}indexer.") == set(named)
    assert_holds(indexer, meaning)
    with pytest.raises(
        ValueError, match=r"indexer.wk.weight is missing; pass it in the same call, or in any later one"
    ):
        indexer.projection.load_weights(named)


FAULTS = {
    "no scale": lambda t: t.pop("indexer.wk.weight_scale_inv"),
    "no weight": lambda t: t.pop("indexer.weights_proj.weight"),
    "scale of another shape": lambda t: t.update({"indexer.wk.weight_scale_inv": torch.ones(1, 2)}),
    "scale of another type": lambda t: t.update({"indexer.wk.weight_scale_inv": torch.ones(2, 2).int()}),
    "two scales": lambda t: t.update({"indexer.wk.weight_scale": torch.ones(130)}),
    "a scale too many": lambda t: t.update({"indexer.weights_proj.weight_scale": torch.ones(6)}),
    "packed": lambda t: t.update({"indexer.wk.weight": torch.zeros(130, 100, dtype=torch.uint8)}),
    "another shape": lambda t: t.update({"indexer.weights_proj.weight": torch.zeros(6, 199)}),
    "another type": lambda t: t.update({"indexer.weights_proj.weight": torch.zeros(6, 200).double()}),
    "a bias": lambda t: t.update({"indexer.weights_proj.bias": torch.zeros(6)}),
}


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_an_error_leaves_everything_as_it_was(data):
    """Whatever is wrong, in whichever order the tensors are named, with anything waiting from before."""
    indexer = loaded(storage=data.draw(st.sampled_from(STORAGES)), **SMALL)
    partial = data.draw(st.booleans())
    fault = data.draw(st.sampled_from([name for name in FAULTS if not (partial and name in ("no scale", "no weight"))]))
    waiting, meaning = checkpoint(("blocks", torch.bfloat16), seed=7)
    late = {"indexer.wk.weight_scale_inv": waiting.pop("indexer.wk.weight_scale_inv")}
    indexer.projection.load_weights(waiting, allow_partial_loading=True)
    weights = [module.weight for module in (indexer.wk, indexer.weights_proj)]
    before = [(weight.clone(), weight._version, weight.data_ptr()) for weight in weights]
    tensors, _ = checkpoint(("blocks", torch.bfloat16))
    FAULTS[fault](tensors)
    shuffled = {key: tensors[key] for key in data.draw(st.permutations(sorted(tensors)))}
    with pytest.raises(ValueError, match=r"wk|weights_proj"):
        indexer.projection.load_weights(shuffled, allow_partial_loading=partial)
    for weight, (value, version, pointer) in zip(weights, before, strict=True):
        assert torch.equal(weight, value)
        assert (weight._version, weight.data_ptr()) == (version, pointer)
    indexer.projection.load_weights(late, allow_partial_loading=True)  # what waited still does
    assert_holds(indexer, meaning)


@pytest.mark.parametrize("compute", ["bf16", "bf16_fp32out"])
def test_values_that_bf16_cannot_hold(compute):
    indexer = loaded(compute=compute, **SMALL)
    before = indexer.wk.weight.clone()
    tensors, meaning = checkpoint(("rows", torch.bfloat16))
    if compute == "bf16":
        indexer.projection.load_weights(tensors)
        assert torch.equal(indexer.wk.weight, meaning["wk"].bfloat16())
        return
    with pytest.raises(ValueError, match=r"indexer.wk: torch.bfloat16 cannot hold .* make the Linear FP32"):
        indexer.projection.load_weights(tensors)
    assert torch.equal(indexer.wk.weight, before)
    tensors["indexer.wk.weight_scale"] = torch.full((130,), 2.0**-5)
    indexer.projection.load_weights(tensors)
    assert torch.equal(indexer.wk.weight.float(), tensors["indexer.wk.weight"].float() / 32)


def test_a_linear_that_cannot_take_a_plain_weight():
    tensors, _ = checkpoint((torch.float32, torch.float32))
    with pytest.raises(ValueError, match=r"wk's weight is torch.float32 \(130, 200\) on meta; expected a Parameter"):
        Indexer(**SMALL).to("meta").projection.load_weights(tensors)
    codes = Indexer(**SMALL)
    codes.wk.weight = torch.nn.Parameter(torch.zeros(130, 200).to(FP8), requires_grad=False)
    with pytest.raises(ValueError, match=r"wk's weight is torch.float8_e4m3fn .*load it by its own method"):
        codes.projection.load_weights(tensors)
    codes.wk.weight = None
    with pytest.raises(ValueError, match="wk's weight is missing"):
        codes.projection.load_weights(tensors)


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    """``compiled(indexer)``: the function, and the graphs that were made of it."""

    def build(indexer):
        graphs = []

        def backend(graph, inputs):
            graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
            return graph

        return torch.compile(indexer.projection, backend=backend, fullgraph=True), graphs

    torch.compiler.reset()
    yield build
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("compute", "storage"), [*((compute, "alias") for compute in COMPUTES), ("tf32", "copy"), ("bf16", "copy")]
)
def test_compiled_it_is_one_op(compiled, compute, storage):
    indexer = loaded(compute=compute, storage=storage)
    function, graphs = compiled(indexer)
    for hidden in (tokens(5), torch.randn(2, 3, 256).bfloat16()):
        key, weights = function(hidden)
        want = indexer.projection(hidden)
        torch.testing.assert_close(key, want[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(weights, want[1], rtol=1e-4, atol=1e-2)
        assert (key.shape, key.dtype, key.is_contiguous()) == (want[0].shape, want[0].dtype, True)
        assert (weights.shape, weights.dtype, weights.stride(-1)) == (want[1].shape, want[1].dtype, 1)
    for graph in graphs:
        assert sum("indexer_projection" in target for target in graph) == 1
        assert not any("linear" in target for target in graph)


@pytest.mark.parametrize("change", [in_place, through_data, new_parameter, new_data])
@pytest.mark.parametrize("storage", STORAGES)
def test_compiled_code_sees_what_is_there_when_it_runs(compiled, monkeypatch, storage, change):
    """The newest weights, and whether they are joined."""
    calls = []
    monkeypatch.setattr(indexer_gemm, "linear", lambda x, weight: calls.append(weight.shape[0]) or linear(x, weight))
    indexer = loaded(storage=storage)
    function, _ = compiled(indexer)
    function(tokens(4))
    joined, apart = [DK + NH], [DK, NH]
    assert calls == (joined if storage == "alias" else apart)
    calls.clear()
    change(indexer.wk, torch.randn(DK, 256))
    key, _ = function(tokens(4))
    want, magnitude = exact(tokens(4), indexer.wk.weight)
    assert ((key.double() - want).abs() <= 2.0**-8 * want.abs() + 2.0**-18 * magnitude).all()
    assert calls == (joined if storage == "alias" and change in (in_place, through_data) else apart)


def test_compiled_code_has_gradients(compiled):
    indexer = loaded()
    function, _ = compiled(indexer)
    hidden = tokens(3, dtype=torch.float32).requires_grad_()
    function(hidden)[1].sum().backward()
    torch.testing.assert_close(hidden.grad, indexer.weights_proj.weight.sum(0).expand(3, -1))


def test_compiled_code_calls_a_module_that_is_more_than_its_weight(compiled):
    indexer = Indexer()
    with_bias(indexer)
    indexer.projection.post_load_weights()
    function, _ = compiled(indexer)
    torch.testing.assert_close(function(tokens(3))[0], indexer.projection(tokens(3))[0])


@pytest.mark.parametrize(
    ("compute", "joined", "hidden"),
    [
        *((compute, True, tokens(4)) for compute in COMPUTES),
        ("tf32", False, tokens(4)),
        ("bf16", False, tokens(3, dtype=torch.float32)),
        ("fp32", True, tokens(0)),
    ],
)
def test_the_op_is_what_it_says_to_torch(compute, joined, hidden):
    both = torch.randn(192, 256).to(DTYPES[compute])
    wk, weights_proj = both[:DK], both[DK:] if joined else both[DK:].clone()
    torch.library.opcheck(torch.ops.fusions.indexer_projection, (hidden, wk, weights_proj, compute))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (slice(0, 128), slice(130, 192)),  # a gap
        (slice(128, 192), slice(0, 128)),  # the other order
        (slice(0, 128), slice(128, 192, 2)),
        (slice(0, 128, 2), slice(128, 192)),
    ],
)
def test_weights_that_are_not_behind_each_other_are_not_joined(first, second):
    both, hidden = torch.randn(192, 256), tokens(3, dtype=torch.float32)
    assert indexer_gemm.joined((both[first], both[second])) is None
    out = torch.ops.fusions.indexer_projection(hidden, both[first], both[second], "fp32")
    torch.testing.assert_close(out, torch.cat([hidden @ both[first].t(), hidden @ both[second].t()], 1))
    assert indexer_gemm.joined((both[:128], both[128:])).data_ptr() == both.data_ptr()
