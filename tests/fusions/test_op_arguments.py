"""Arguments that the ops refuse, with what to do about them. No GPU: the device is checked last."""

from __future__ import annotations

import pytest
import torch

from fusions.ops.native import DEPLOYED, Behaviour, layernorm, rmsnorm, tinygemm2

BF16 = torch.bfloat16


def zeros(*shape, dtype=BF16):
    return torch.zeros(*shape, dtype=dtype)


def aligned(rows, columns, offset=0, pitch=None):
    """A BF16 matrix whose first element lies `offset` elements past a 16-byte boundary."""
    pitch = pitch or columns
    storage = zeros(rows * pitch + offset + 8)
    start = (-storage.data_ptr() % 16) // 2 + offset
    return storage[start:].as_strided((rows, columns), (pitch, 1))


STAMPED = Behaviour("all", stamps=True)

RMSNORM = [
    ({"x": zeros(2, 64, dtype=torch.float16)}, "x is torch.float16, expected torch.bfloat16"),
    ({"x": zeros(2, 2, 64)}, "x has 3 dimensions"),
    ({"x": zeros(64, 2).t()}, "last dimension of x has stride 2"),
    ({"x": zeros(2, 0), "weight": zeros(0)}, "0 columns"),
    ({"weight": zeros(64, dtype=torch.float32)}, "weight is torch.float32"),
    ({"weight": zeros(1, 64)}, "weight has 2 dimensions"),
    ({"weight": zeros(32)}, r"weight has shape \(32,\), expected \(64,\)"),
    ({"weight": zeros(128)[::2]}, "last dimension of weight has stride 2"),
    ({"out": zeros(3, 64)}, r"out has shape \(3, 64\), expected \(2, 64\)"),
    ({"out": zeros(2, 64, dtype=torch.float32)}, "out is torch.float32"),
    ({"out": zeros(64, 2).t()}, "last dimension of out has stride 2"),
    ({"out": zeros(1, 64).expand(2, 64)}, "rows of out overlap"),
    ({"delay_ns": -1}, "delay_ns=-1"),
    ({"behaviour": STAMPED}, "pass stamps"),
    ({"behaviour": STAMPED, "stamps": zeros(4, dtype=torch.int32)}, "stamps is torch.int32"),
    ({"stamps": zeros(3, dtype=torch.int64)}, "expected four contiguous"),
    ({"stamps": zeros(8, dtype=torch.int64)[::2]}, "expected four contiguous"),
    ({}, "x is on cpu, expected a CUDA device"),
]

LAYERNORM = [
    *RMSNORM[:3],
    ({"x": zeros(2, 0), "weight": zeros(0), "bias": zeros(0)}, "0 columns"),
    *RMSNORM[4:],
    ({"bias": zeros(64, dtype=torch.float32)}, "bias is torch.float32"),
    ({"bias": zeros(1, 64)}, "bias has 2 dimensions"),
    ({"bias": zeros(65)}, r"bias has shape \(65,\), expected \(64,\)"),
    ({"bias": zeros(128)[::2]}, "last dimension of bias has stride 2"),
]

TINYGEMM2 = [
    ({"x": zeros(2, 128, dtype=torch.float32)}, "x is torch.float32"),
    ({"x": zeros(128)}, "x has 1 dimensions"),
    ({"x": zeros(128, 2).t()}, "last dimension of x has stride 2"),
    ({"x": zeros(2, 192)}, "x has K = 192 and weight K = 128"),
    ({"x": zeros(2, 96), "weight": zeros(32, 96)}, "K = 96, expected a positive multiple of 64"),
    ({"x": zeros(2, 0), "weight": zeros(32, 0)}, "K = 0, expected"),
    ({"x": aligned(2, 128, pitch=132)}, "rows of x are 132 elements apart"),
    ({"x": zeros(1, 128).expand(2, 128)}, "rows of x are 0 elements apart"),
    ({"x": aligned(2, 128, offset=1)}, "x starts at an address"),
    ({"weight": zeros(32, 128, dtype=torch.float16)}, "weight is torch.float16"),
    ({"weight": zeros(32, 2, 64)}, "weight has 3 dimensions"),
    ({"weight": zeros(24, 128)}, "N = 24, expected a positive multiple of 16"),
    ({"weight": zeros(0, 128)}, "N = 0, expected"),
    ({"weight": aligned(32, 128, offset=4)}, "weight starts at an address"),
    ({"weight": aligned(32, 128, pitch=130)}, "rows of weight are 130 elements apart"),
    ({"bias": zeros(31)}, r"bias has shape \(31,\), expected \(32,\)"),
    ({"bias": zeros(32, dtype=torch.float32)}, "bias is torch.float32"),
    ({"bias": zeros(64)[::2]}, "last dimension of bias has stride 2"),
    ({"out": zeros(2, 16)}, r"out has shape \(2, 16\), expected \(2, 32\)"),
    ({"out": zeros(32, 2).t()}, "last dimension of out has stride 2"),
    ({"out": zeros(1, 32).expand(2, 32)}, "rows of out overlap"),
    ({"delay_ns": 1 << 63}, "delay_ns="),
    ({"behaviour": STAMPED}, "pass stamps"),
    ({}, "x is on cpu, expected a CUDA device"),
]


@pytest.mark.parametrize(("changed", "message"), RMSNORM, ids=[message for _, message in RMSNORM])
def test_rmsnorm_refuses(changed, message):
    arguments = {"x": zeros(2, 64), "weight": zeros(64)} | changed
    with pytest.raises(ValueError, match=f"rmsnorm: .*{message}"):
        rmsnorm(**arguments)


@pytest.mark.parametrize(("changed", "message"), LAYERNORM, ids=[message for _, message in LAYERNORM])
def test_layernorm_refuses(changed, message):
    arguments = {"x": zeros(2, 64), "weight": zeros(64), "bias": zeros(64)} | changed
    with pytest.raises(ValueError, match=f"layernorm: .*{message}"):
        layernorm(**arguments)


@pytest.mark.parametrize(("changed", "message"), TINYGEMM2, ids=[message for _, message in TINYGEMM2])
def test_tinygemm2_refuses(changed, message):
    arguments = {"x": aligned(2, 128), "weight": aligned(32, 128)} | changed
    with pytest.raises(ValueError, match=f"tinygemm2: .*{message}"):
        tinygemm2(**arguments)


def test_the_deployed_behaviours_are_at_hand():
    assert Behaviour("all", "after_stores") == DEPLOYED["rmsnorm"] == DEPLOYED["layernorm"]
    assert Behaviour("loaders", "after_wait") == DEPLOYED["tinygemm2"]
