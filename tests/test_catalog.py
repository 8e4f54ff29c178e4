"""The shipped chains: their shape, and that their contracts are the behaviours that the kernels ship with."""

from __future__ import annotations

import pytest

from fusions.ops import native
from pdl_stress import UsageError, catalog
from pdl_stress.catalog import ops


@pytest.mark.parametrize(("op", "kernel"), [(ops.rmsnorm, "rmsnorm"), (ops.tinygemm2, "tinygemm2")])
def test_the_declared_contract_is_the_deployed_behaviour(op: ops.Op, kernel: str) -> None:
    deployed = native.DEPLOYED[kernel]
    assert (str(op.deployed.wait), str(op.deployed.trigger), op.deployed.fence) == (
        deployed.wait,
        deployed.trigger,
        deployed.fence,
    )
    assert op.contract == op.deployed
    if kernel == "tinygemm2":
        assert op.deployed.is_independent("weight") is deployed.early_weights


@pytest.mark.parametrize("op", [ops.rmsnorm, ops.tinygemm2], ids=lambda op: op.name)
def test_every_declared_wait_compiles(op: ops.Op) -> None:
    for wait in op.waits:
        assert op.verify is not None
        assert "waits" in op.verify(op.contract.but(wait=wait), "sm_90a", True)


def test_the_four_chains_are_5120_to_1280_and_512() -> None:
    assert tuple(catalog.SHIPPED) == ("csa2-fused-m1", "csa2-separate-m1", "csa2-separate-m4", "csa2-separate-m8")
    for name, tokens in zip(catalog.SHIPPED, (1, 1, 4, 8), strict=True):
        chain = catalog.load(name)
        buffers = {b.name: b.shape for b in chain.buffers.values()}
        assert (buffers["hidden"], buffers["q"], buffers["kv"]) == ((tokens, 5120), (tokens, 1280), (tokens, 512))
        assert [s.name for s in chain.steps][:2] == ["producer", "input_norm"]
    fused = [(e.writer, e.reader, e.between) for e in catalog.load("csa2-fused-m1").data_edges]
    assert fused == [
        ("producer", "input_norm", ()),
        ("input_norm", "projection", ()),
        ("projection", "q_norm", ()),
        ("projection", "kv_norm", ("q_norm",)),
    ]


def test_an_unknown_chain_names_a_close_one() -> None:
    with pytest.raises(UsageError, match="Did you mean 'csa2-fused-m1'"):
        catalog.load("csa2-fused-m2")
