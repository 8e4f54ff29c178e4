"""The shipped chains: their shape, and that their contracts are the behaviours that the kernels ship with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fusions.ops.native import code as native
from pdl_stress import Chain, UsageError, catalog
from pdl_stress.catalog import ops


@pytest.mark.parametrize(
    ("op", "kernel"), [(ops.rmsnorm, "rmsnorm"), (ops.layernorm, "layernorm"), (ops.tinygemm2, "tinygemm2")]
)
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


@pytest.mark.parametrize("op", [ops.rmsnorm, ops.layernorm, ops.tinygemm2], ids=lambda op: op.name)
def test_every_declared_wait_compiles(op: ops.Op) -> None:
    for wait in op.waits:
        assert op.verify is not None
        assert "waits" in op.verify(op.rebuilt(wait=wait).contract, "sm_90a", True)


def test_the_four_chains_are_5120_to_1280_and_512() -> None:
    assert catalog.CSA2 == ("csa2-fused-m1", "csa2-separate-m1", "csa2-separate-m4", "csa2-separate-m8")
    for name, tokens in zip(catalog.CSA2, (1, 1, 4, 8), strict=True):
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


class Entry:
    """An entry point as an installed package offers it."""

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self.name, self.value, self.build = name, f"their_package:{name}", build

    def load(self) -> Callable[[], Any]:
        return self.build


def theirs(name: str = "theirs") -> Chain:
    chain = Chain(name)
    x = chain.buffer("x", (1, 512), "bfloat16")
    gain = chain.constant("gain", (512,), "bfloat16")
    chain.step("norm", ops.rmsnorm, input=chain.input("hidden", (1, 512), "bfloat16"), weight=gain, out=x)
    return chain


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def offer(*entries: Entry) -> None:
        monkeypatch.setattr(catalog, "entry_points", lambda group: list(entries))
        catalog.names.cache_clear()

    yield offer
    monkeypatch.undo()
    catalog.names.cache_clear()


def test_an_installed_package_offers_chains(offer: Callable[..., None]) -> None:
    offer(Entry("theirs", theirs), Entry("csa2-fused-m1", theirs))
    assert catalog.names() == (*catalog.SHIPPED, "theirs"), "a name that ships is not taken over"
    assert catalog.load("theirs").fingerprint == theirs().fingerprint
    assert catalog.load("csa2-fused-m1").name == "csa2-fused-m1"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: theirs("another"), "chain 'theirs' calls itself 'another'; the two names must be the same"),
        (lambda: 5, "entry point 'their_package:theirs' gave int, not a pdl_stress.Chain"),
        (lambda: 1 / 0, "chain 'theirs' of entry point 'their_package:theirs' failed to load: ZeroDivisionError"),
        (lambda: Chain("theirs"), "it needs at least one input and one step"),
    ],
    ids=["another name", "no chain", "an exception", "an empty chain"],
)
def test_what_a_package_offers_wrongly_is_refused(offer: Callable[..., None], build: Any, words: str) -> None:
    """A job names its chain: under another name its answers would be those of a stranger."""
    offer(Entry("theirs", build))
    with pytest.raises(UsageError, match=words):
        catalog.load("theirs")


def test_an_unknown_chain_names_a_close_one() -> None:
    with pytest.raises(UsageError, match="Did you mean 'csa2-fused-m1'"):
        catalog.load("csa2-fused-m2")
