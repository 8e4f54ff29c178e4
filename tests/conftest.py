"""Chains that several test modules look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pdl_stress import Chain, KernelContract, Op, Wait, catalog, model


def _native(*reads: str) -> Op:
    contract = KernelContract(reads, ("o",))
    return Op("native", contract, lambda **_: None, contract, waits=frozenset(Wait))


@pytest.fixture
def residual_chain() -> Chain:
    """A -> B -> R, and R reads both A's x and B's y."""
    chain = Chain("residual")
    hidden = chain.input("h", (4,), "float32")
    x, y, z = (chain.buffer(name, (4,), "float32") for name in "xyz")
    chain.step("A", _native("a"), a=hidden, o=x)
    chain.step("B", _native("a"), a=x, o=y)
    chain.step("R", _native("a", "b"), a=x, b=y, o=z)
    return chain


_ANSWERS: dict[Any, Any] = {}


@pytest.fixture
def remembered_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model answers each question about a chain once: for tests that are about what follows from its answers.

    A question is told by all that the model looks at: the chain's steps and buffers, the CTAs of each step, the edge
    or the rules.
    """

    def remembering(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def answer(chain: Chain, *args: Any, **named: Any) -> Any:
            key = (name, chain.fingerprint, *(step.ctas for step in chain.steps), *args, *sorted(named.items()))
            if key not in _ANSWERS:
                _ANSWERS[key] = ask(chain, *args, **named)
            return _ANSWERS[key]

        return answer

    for name in ("expect", "judge", "explain", "find_races"):
        monkeypatch.setattr(model, name, remembering(name, getattr(model, name)))


@pytest.fixture
def in_place() -> Chain:
    """gemm writes x, scale changes it in place, norm reads it; none can be rebuilt."""
    chain = Chain("in-place")
    x, y = chain.buffer("x", (4,), "float32"), chain.buffer("y", (4,), "float32")

    def fixed(name: str, **contract: tuple[str, ...]) -> Op:
        made = KernelContract(**contract)
        return Op(name, made, lambda **_: None, made)

    chain.step("gemm", fixed("gemm", reads=("a",), writes=("o",)), a=chain.input("h", (4,), "float32"), o=x)
    chain.step("scale", fixed("scale", reads=("x",), writes=("x",)), x=x)
    chain.step("norm", fixed("norm", reads=("a",), writes=("o",)), a=x, o=y)
    return chain


@pytest.fixture
def library() -> Callable[..., Chain]:
    """``library(name)``: a shipped chain whose kernels (or only those of the steps ``only``) cannot be rebuilt."""

    def build(name: str, only: tuple[str, ...] | None = None) -> Chain:
        native = catalog.load(name)
        chain = Chain(native.name, native.title)
        chain.buffers = native.buffers
        for step in native.steps:
            fixed = not step.source and (only is None or step.name in only)
            chain._steps.append(replace(step, op=replace(step.op, waits=frozenset())) if fixed else step)
        return chain

    return build
