"""Weights from a checkpoint: codes times scales, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusions.checkpoint import (
    BLOCK,
    SCALES,
    Buckets,
    StoredWeight,
    dequantize_blocks,
    dequantize_rows,
    is_exact,
)

FP8 = torch.float8_e4m3fn

edges = st.sampled_from([1, 2, 127, 128, 129, 200]) | st.integers(1, 160)


def codes(rows, columns, seed=0):
    """Every E4M3 code but NaN can occur."""
    numbers = torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return torch.where((numbers & 0x7F) == 0x7F, 0, numbers).to(torch.uint8).view(FP8)


def scales(*shape, seed=1):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 1e-2 + 1e-4


def blocks(rows, columns):
    return -(-rows // BLOCK), -(-columns // BLOCK)


def naive(coded, scale_at):
    """Element by element, one FP32 product each."""
    values = coded.float().numpy()
    out = np.empty_like(values)
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            out[row, column] = np.float32(values[row, column]) * np.float32(scale_at(row, column))
    return torch.from_numpy(out)


@settings(max_examples=25, deadline=None)
@given(edges, edges, st.integers(0, 99))
def test_each_block_has_its_scale(rows, columns, seed):
    coded, scale = codes(rows, columns, seed), scales(*blocks(rows, columns), seed=seed)
    values = scale.numpy()
    out = dequantize_blocks(coded, scale)
    assert out.dtype == torch.float32
    assert torch.equal(out, naive(coded, lambda row, column: values[row // 128, column // 128]))


@settings(max_examples=15, deadline=None)
@given(edges, edges, st.booleans())
def test_each_row_has_its_scale(rows, columns, as_column):
    coded, scale = codes(rows, columns), scales(rows)
    values = scale.numpy()
    out = dequantize_rows(coded, scale[:, None] if as_column else scale)
    assert out.dtype == torch.float32
    assert torch.equal(out, naive(coded, lambda row, _: values[row]))


def test_edge_blocks_of_an_odd_shape():
    """[130, 200]: 2 x 2 blocks, of 128 and 2 rows, and of 128 and 72 columns."""
    ones = torch.ones(130, 200).to(FP8)
    out = dequantize_blocks(ones, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert (out[:128, :128] == 1).all()
    assert (out[:128, 128:] == 2).all()
    assert (out[128:, :128] == 3).all()
    assert (out[128:, 128:] == 4).all()


@pytest.mark.parametrize("dtype", SCALES)
def test_scales_of_every_type(dtype):
    scale = torch.tensor([[0.5, 2.0]]).to(dtype)
    coded = codes(3, 200)
    assert torch.equal(dequantize_blocks(coded, scale)[:, 128:], coded.float()[:, 128:] * 2)
    assert torch.equal(dequantize_rows(coded[:2], scale.view(2))[0], coded.float()[0] * 0.5)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 3), (3, 2), (4,), (2, 2, 1), ()])
def test_other_numbers_of_blocks_are_refused(shape):
    with pytest.raises(ValueError, match=r"weight_scale_inv has shape .*expected \[2, 2\]"):
        dequantize_blocks(codes(130, 200), torch.ones(shape))


@pytest.mark.parametrize("shape", [(129,), (1,), (1, 130), (130, 2), ()])
def test_other_numbers_of_rows_are_refused(shape):
    with pytest.raises(ValueError, match=r"weight_scale has shape .*expected \[130\] or \[130, 1\]"):
        dequantize_rows(codes(130, 200), torch.ones(shape))


@pytest.mark.parametrize("dequantize", [dequantize_blocks, dequantize_rows])
def test_other_types_are_refused(dequantize):
    one = torch.ones(1, 1)
    for wrong in (one, one.to(torch.float8_e5m2), one.to(FP8)[0], one.to(torch.uint8)):
        with pytest.raises(ValueError, match=r"expected torch.float8_e4m3fn \[N, K\]"):
            dequantize(wrong, one)
    with pytest.raises(ValueError, match=r"is torch\.int32; expected one of"):
        dequantize(one.to(FP8), one.int())


# -- one weight --------------------------------------------------------------------------------------------------------


def checked(shape=(130, 200), **tensors):
    StoredWeight(**tensors).check("wk", shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_weights_are_exact(dtype):
    weight = torch.randn(130, 200).to(dtype)
    stored = StoredWeight(weight)
    stored.check("wk", (130, 200))
    assert stored.missing() == ""
    decoded = stored.decode(torch.device("cpu"))
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded.to(dtype), weight)


def test_either_kind_of_scale_is_multiplied_in():
    coded, inverse, row = codes(130, 200), scales(2, 2), scales(130)
    cpu = torch.device("cpu")
    assert torch.equal(StoredWeight(coded, inverse).decode(cpu), dequantize_blocks(coded, inverse))
    assert torch.equal(StoredWeight(coded, weight_scale=row).decode(cpu), dequantize_rows(coded, row))


def test_codes_without_a_scale_are_not_decoded():
    stored = StoredWeight(codes(130, 200))
    stored.check("wk", (130, 200))
    assert stored.missing() == "weight_scale_inv or weight_scale"
    with pytest.raises(ValueError, match="weight_scale_inv or weight_scale is missing"):
        stored.decode(torch.device("cpu"))
    assert StoredWeight(weight_scale_inv=scales(2, 2)).missing() == "weight"


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"weight": torch.zeros(130, 100, dtype=torch.uint8)}, "packed FP4: too coarse"),
        ({"weight": torch.zeros(130, 200, dtype=torch.float64)}, "wk.weight is torch.float64; expected one of"),
        ({"weight": torch.zeros(130, 200).to(torch.float8_e5m2)}, "wk.weight is torch.float8_e5m2; expected one of"),
        ({"weight": torch.zeros(200, 130)}, r"shape \(200, 130\); the Linear has \[130, 200\]"),
        ({"weight": torch.zeros(200)}, r"shape \(200,\)"),
        ({"weight": codes(130, 200), "weight_scale_inv": scales(1, 2)}, r"wk.weight_scale_inv has shape \(1, 2\)"),
        ({"weight": codes(130, 200), "weight_scale": scales(2)}, r"wk.weight_scale has shape \(2,\)"),
        ({"weight_scale_inv": scales(2, 1)}, r"wk.weight_scale_inv has shape \(2, 1\)"),
        ({"weight_scale": torch.ones(130).int()}, "wk.weight_scale is torch.int32"),
        (
            {"weight": codes(130, 200), "weight_scale_inv": scales(2, 2), "weight_scale": scales(130)},
            "weight_scale_inv and weight_scale",
        ),
        (
            {"weight": torch.zeros(130, 200), "weight_scale_inv": scales(2, 2)},
            "has a scale, and its weight is torch.fl",
        ),
    ],
)
def test_what_cannot_belong_to_the_weight_is_refused(tensors, says):
    with pytest.raises(ValueError, match=says):
        checked(**tensors)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no packed FP4 type")
def test_packed_fp4_is_refused_under_its_own_type_too():
    with pytest.raises(ValueError, match="packed FP4"):
        checked(weight=torch.zeros(130, 100, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))


# -- buckets -----------------------------------------------------------------------------------------------------------


def test_names_of_others_are_left_alone():
    buckets, taken = Buckets(("wk",)).add(
        {
            "x.wk.weight": torch.ones(1, 1),
            "x.wk.input_scale": torch.ones(1),
            "x.wkv.weight": torch.zeros(1, 1),
            "x.wq.bias": torch.zeros(1),
            "y.wk.weight": torch.zeros(1, 1),
            "wk.weight": torch.zeros(1, 1),
        },
        "x.",
    )
    assert taken == {"x.wk.weight", "x.wk.input_scale"}
    assert buckets.stored["wk"].weight.item() == 1
    assert set(buckets.stored) == {"wk"}


@pytest.mark.parametrize("field", ["bias", "weight_scale_2", "weight.extra", ""])
def test_what_no_field_is_for_is_refused(field):
    with pytest.raises(ValueError, match=rf"x.wk.{field}: a Linear without a bias was expected to have weight, "):
        Buckets(("wk",)).add({f"x.wk.{field}": torch.ones(1)}, "x.")


def test_what_waits_is_a_copy_and_the_rest_is_gone():
    coded, plain = codes(2, 2), torch.ones(2, 2)
    buckets, _ = Buckets(("a", "b")).add({"a.weight": coded, "b.weight": plain}, "")
    waiting = buckets.without(["b"])
    expected = coded.float().clone()
    coded.copy_(torch.zeros(2, 2))
    assert torch.equal(waiting.stored["a"].weight.float(), expected)
    assert waiting.stored["b"] == StoredWeight()
    assert waiting.unfinished() == ["a.weight_scale_inv or weight_scale"]


def test_adding_leaves_the_former_state_as_it_was():
    first = Buckets(("a",))
    second, _ = first.add({"a.weight": torch.ones(1, 1)}, "")
    assert first.unfinished() == second.unfinished() == []
    assert first.stored["a"].weight is None
    assert second.stored["a"].weight is not None


def test_exactness():
    assert is_exact(torch.tensor([1.0, 1.0 + 2.0**-7, float("nan"), float("inf")]), torch.bfloat16)
    assert not is_exact(torch.tensor([1.0, 1.0 + 2.0**-8]), torch.bfloat16)
    assert not is_exact(torch.tensor([1e5]), torch.float16)
    assert is_exact(torch.tensor([1.0 + 2.0**-23]), torch.float32)
