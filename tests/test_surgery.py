"""Which waits of which kernel of a step a patch removes. The machine code and the driver are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdl_stress import PdlStressError
from pdl_stress.chain import Patch
from pdl_stress.cuda import surgery as module
from pdl_stress.cuda.bench import Bench
from pdl_stress.cuda.surgery import Surgeon
from pdl_stress.sass.finder import CodeNotFound
from pdl_stress.sass.mutate import MutationError

Removed = list[tuple[str, tuple[int, ...] | None]]


class Finder:
    """``waits``: wait sites of each kernel whose code can be found."""

    def __init__(self, **waits: int) -> None:
        self.waits = waits

    def find(self, symbol: str, arch: str) -> Any:
        assert arch == "sm_90"
        if symbol not in self.waits:
            raise CodeNotFound(f"no library holds {symbol}")
        return SimpleNamespace(code=symbol.encode(), origin=f"lib{symbol}.so")


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    """Mutants are kept for the process; these tests make up what removes the waits."""
    module._mutant.cache_clear()


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> Removed:
    """What was put into nodes: ``(kernel, sites)`` each, in order."""
    done: Removed = []

    def kernel_of(node: str) -> Any:
        return None if node.startswith("mem") else SimpleNamespace(symbol=node)

    monkeypatch.setattr(module, "kernel_of", kernel_of)
    monkeypatch.setattr(module, "architecture", lambda: "sm_90")
    monkeypatch.setattr(module, "_swap", lambda kernel, twin: done.append((kernel.symbol, twin)))
    return done


def surgeon(monkeypatch: pytest.MonkeyPatch, **waits: int) -> tuple[Surgeon, Removed]:
    """A surgeon, and the mutants that it made."""
    made: Removed = []
    finder = Finder(**waits)
    monkeypatch.setattr(module, "wait_sites", lambda code, symbol: range(waits[symbol]))

    def remove_waits(code: bytes, symbol: str, sites: tuple[int, ...] | None) -> Any:
        assert code == symbol.encode()
        if any(site >= waits[symbol] for site in sites or ()):
            raise MutationError("no such site")
        made.append((symbol, sites))
        removed = range(waits[symbol]) if sites is None else sites
        return SimpleNamespace(code=(symbol, sites), removed=removed, checked="compared")

    monkeypatch.setattr(module, "remove_waits", remove_waits)

    class ObjectCode:
        @staticmethod
        def from_cubin(code: Any, *, name: str = "") -> Any:
            return SimpleNamespace(get_kernel=lambda symbol: SimpleNamespace(handle=code[1]))

    monkeypatch.setattr("cuda.core.ObjectCode", ObjectCode)
    return Surgeon(finder), made  # type: ignore[arg-type]


def test_all_waits_of_all_kernels_of_a_step_go(monkeypatch: pytest.MonkeyPatch, swapped: Removed) -> None:
    made, _ = surgeon(monkeypatch, a=2, b=1, none=0)
    lines = made.operate(["a", "memset", "none", "b"], Patch(None))
    assert swapped == [("a", None), ("b", None)], "a kernel without a wait is left alone"
    assert lines == ["2 of 2 waits removed from liba.so; compared", "1 of 1 waits removed from libb.so; compared"]


@pytest.mark.parametrize(
    ("remove", "expected"),
    [
        ((0,), [("a", (0,))]),
        ((1,), [("a", (1,))]),
        ((2,), [("b", (0,))]),
        ((4,), [("b", (2,))]),
        ((1, 3), [("a", (1,)), ("b", (1,))]),
        ((), [("a", ()), ("b", ())]),
    ],
)
def test_wait_sites_are_numbered_over_the_kernels_of_a_step(
    monkeypatch: pytest.MonkeyPatch, swapped: Removed, remove: tuple[int, ...], expected: Removed
) -> None:
    made, _ = surgeon(monkeypatch, a=2, none=0, b=3)
    lines = made.operate(["a", "none", "b"], Patch(remove))
    assert swapped == expected
    assert len(lines) == len(expected)


def test_a_kernel_that_is_loaded_again_keeps_its_waits(monkeypatch: pytest.MonkeyPatch, swapped: Removed) -> None:
    made, mutants = surgeon(monkeypatch, a=2)
    assert made.operate(["a"], Patch(())) == ["0 of 2 waits removed from liba.so; compared"]
    assert mutants == swapped == [("a", ())]


def test_a_twin_is_made_once_for_all_replays(monkeypatch: pytest.MonkeyPatch, swapped: Removed) -> None:
    made, mutants = surgeon(monkeypatch, a=2)
    for patch in (Patch(None), Patch((1,)), Patch(()), Patch(None), Patch((1,)), Patch(())):
        made.operate(["a"], patch)
    assert mutants == [("a", None), ("a", (1,)), ("a", ())]
    assert len(swapped) == 6, "every node gets it"


@pytest.mark.parametrize("patch", [Patch(None), Patch(()), Patch((0,)), Patch((5,))], ids=str)
@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (["none"], r"nothing to patch \(.*\): none, 0 waits"),
        (["memset"], r"nothing to patch \(.*\): no kernel, 0 waits"),
        ([], r"nothing to patch \(.*\): no kernel, 0 waits"),
    ],
)
def test_a_control_without_a_wait_to_remove_is_refused(
    monkeypatch: pytest.MonkeyPatch, swapped: Removed, nodes: list[str], words: str, patch: Patch
) -> None:
    """It would run the chain as it is, and its clean result would read as a missed fault."""
    made, _ = surgeon(monkeypatch, none=0)
    with pytest.raises(PdlStressError, match=words):
        made.operate(nodes, patch)
    assert swapped == []


def test_a_site_that_no_kernel_has_is_refused(monkeypatch: pytest.MonkeyPatch, swapped: Removed) -> None:
    made, _ = surgeon(monkeypatch, a=2)
    with pytest.raises(PdlStressError, match=r"nothing to patch \(wait 2 removed\): a, 2 waits"):
        made.operate(["a"], Patch((2,)))
    assert swapped == []


def test_a_kernel_whose_code_is_not_found_is_refused(monkeypatch: pytest.MonkeyPatch, swapped: Removed) -> None:
    made, _ = surgeon(monkeypatch, a=2)
    with pytest.raises(PdlStressError, match=r"nothing to patch .*: lost, 0 waits; .*no library holds lost"):
        made.operate(["lost"], Patch(None))
    assert swapped == []
    # Beside one that is found it may be a plain kernel, in a library of torch's; whether it is, the census has said.
    made.operate(["lost", "a"], Patch(None))
    assert [symbol for symbol, _ in swapped] == ["a"]


def test_code_that_cannot_be_changed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, swapped: Removed) -> None:
    made, _ = surgeon(monkeypatch, a=2)

    def refuse(*_: Any) -> Any:
        raise MutationError("the wait is encoded otherwise")

    monkeypatch.setattr(module, "remove_waits", refuse)
    with pytest.raises(PdlStressError, match=r"^a: the wait is encoded otherwise$"):
        made.operate(["a"], Patch(None))
    assert swapped == []


def test_evidence_of_two_steps_with_one_op_stands_side_by_side() -> None:
    """One of them overwrote the other, and a check of one looked like a check of both."""
    op = SimpleNamespace(name="rmsnorm")
    steps = [SimpleNamespace(name=n, op=op, patch=p) for n, p in (("a", Patch(None)), ("b", None), ("c", Patch(None)))]
    nodes = {(replay, step.name): [f"{step.name}{replay}"] for replay in (0, 1) for step in steps}
    operated: list[str] = []

    def operate(found: list[str], patch: Patch) -> list[str]:
        operated.extend(found)
        return [f"of {found[0][0]}", str(patch)]

    captured = SimpleNamespace(
        chain=SimpleNamespace(steps=steps), unroll=2, patched={},
        nodes_of=lambda replay: {step.name: nodes[replay, step.name] for step in steps},
    )  # fmt: skip
    bench = SimpleNamespace(surgeon=SimpleNamespace(operate=operate))
    Bench._patch(bench, captured)  # type: ignore[arg-type]
    assert operated == ["a0", "c0", "a1", "c1"], "in every replay"
    assert captured.patched == {
        "rmsnorm (a), all waits removed": "of a; all waits removed",
        "rmsnorm (c), all waits removed": "of c; all waits removed",
    }
