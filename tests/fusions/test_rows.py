"""Row views of one weight: what is fused, what is refused, and what every change leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from recording import BF16, linear, same_bits, whole

from fusions import rows as rows_module
from fusions.rows import Limits, RowViews

K = 16
NAMES = "abcd"


def views(*counts: int, k: int = K, limits: Limits | None = None, dtype: torch.dtype = BF16) -> RowViews:
    parts = [linear(whole(count, k, seed=seed).to(dtype)) for seed, count in enumerate(counts)]
    return RowViews(tuple(zip(NAMES, parts, strict=False)), limits)


def pointers(parts: RowViews) -> list[int]:
    return [each.weight.data_ptr() for each in parts.linears]


def clones(parts: RowViews) -> list[torch.Tensor]:
    return [each.weight.detach().clone() for each in parts.linears]


# -- fusing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(8,), (8, 4), (1, 1), (16, 8, 4), (3, 1, 2, 5)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_the_parts_become_rows_in_their_order(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = views(*counts, dtype=dtype)
    before, objects = clones(parts), [each.weight for each in parts.linears]
    assert parts.fuse() == parts.broken() == ""
    assert parts.weight is not None
    assert torch.equal(parts.weight, torch.cat(before))
    assert not parts.weight.requires_grad
    for name, each, value, parameter in zip(parts.names, parts.linears, before, objects, strict=True):
        assert each.weight is parameter
        assert torch.equal(each.weight, value)
        assert each.weight.data_ptr() == parts.weight[parts.rows(name)].data_ptr()
        assert each.weight.is_contiguous()
        assert parts.intact(name)
        assert list(each.state_dict()) == ["weight"]


def test_fusing_again_moves_nothing() -> None:
    parts = views(8, 4)
    parts.fuse()
    fused, before = parts.weight, pointers(parts)
    assert parts.fuse() == ""
    assert parts.weight is fused
    assert pointers(parts) == before


def test_a_weight_that_is_transposed_in_memory_is_copied_row_by_row() -> None:
    value = whole(K, 8).t()
    parts = RowViews((("a", linear(value)), ("b", linear(whole(4, K, seed=1)))))
    assert parts.fuse() == ""
    assert torch.equal(parts.linears[0].weight, value)
    assert parts.linears[0].weight.is_contiguous()


def test_a_gap_or_another_order_in_one_storage_is_not_taken_for_fused() -> None:
    storage = whole(16, K)
    for first, second in ((storage[:8], storage[9:13]), (storage[8:], storage[:8])):
        parts = RowViews((("a", linear(first)), ("b", linear(second))))
        assert not parts.detect()
        assert parts.weight is None


def test_parts_one_behind_the_other_are_detected_and_not_copied() -> None:
    storage = whole(16, K)
    parts = RowViews((("a", linear(storage[2:10])), ("b", linear(storage[10:13]))))
    before = pointers(parts)
    assert parts.detect()
    assert parts.weight is not None
    assert torch.equal(parts.weight, storage[2:13])
    assert parts.weight.data_ptr() == before[0]
    assert pointers(parts) == before
    assert parts.fuse() == ""
    assert pointers(parts) == before


def test_inference_mode_leaves_weights_that_can_be_reloaded_outside() -> None:
    parts = views(8, 4)
    with torch.inference_mode():
        parts.fuse()
    parts.linears[1].weight.copy_(whole(4, K, seed=9))
    assert parts.broken() == ""
    with torch.inference_mode():
        storage = whole(16, K)
        loaded = RowViews((("a", linear(storage[:8])), ("b", linear(storage[8:]))))
    assert loaded.fuse() == ""
    assert torch.equal(loaded.weight, storage)  # type: ignore[arg-type]


# -- refusals ----------------------------------------------------------------------------------------------------------


def tied_object() -> RowViews:
    one = linear(whole(8, K))
    return RowViews((("a", one), ("b", one)))


def tied_rows() -> RowViews:
    storage = whole(12, K)
    return RowViews((("a", linear(storage[:8])), ("b", linear(storage[4:]))), Limits(allow_foreign_views=True))


def tied_strided() -> RowViews:
    """Rows 0 2 4 6 and rows 4 to 7."""
    storage = whole(8, K)
    return RowViews((("a", linear(storage[::2])), ("b", linear(storage[4:]))), Limits(allow_foreign_views=True))


def foreign() -> RowViews:
    storage = whole(20, K)
    return RowViews((("a", linear(storage[:8])), ("b", linear(storage[12:]))))


def replaced(weight: Any, limits: Limits | None = None) -> RowViews:
    return RowViews((("a", linear(whole(8, K))), ("b", linear(weight))), limits)


def flat() -> RowViews:
    parts = views(8, 8)
    parts.linears[1].weight = nn.Parameter(whole(K), requires_grad=False)
    return parts


def emptied() -> RowViews:
    parts = views(8, 8)
    parts.linears[1].weight.data = whole(0, K)
    return parts


class Subclass(torch.Tensor):
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "one module twice": (tied_object, "a and b share memory"),
    "shared rows": (tied_rows, "a and b share memory"),
    "shared rows of a strided one": (tied_strided, "share memory"),
    "a foreign view": (foreign, "a is a view of a larger storage"),
    "meta": (lambda: replaced(whole(8, K).to("meta")), "b is on the meta device"),
    "empty": (emptied, "b has an empty weight"),
    "one dimension": (flat, "b has a weight of 1 dimensions"),
    "sparse": (lambda: replaced(whole(8, K).to_sparse()), "b has a weight of layout torch.sparse_coo"),
    "subclass": (lambda: replaced(whole(8, K).as_subclass(Subclass)), "b has a Subclass as its weight"),
    "another dtype": (lambda: replaced(whole(8, K).half()), "b has dtype torch.float16, a has torch.bfloat16"),
    "no float": (lambda: replaced(whole(8, K).to(torch.int8)), "b has a weight of torch.int8"),
    "dtypes": (lambda: replaced(whole(8, K), Limits((torch.float32,))), "a has a weight of torch.bfloat16, not torch."),
    "another K": (lambda: replaced(whole(8, K + 8)), "b has K 24, a has 16"),
    "K": (lambda: views(8, 8, k=20, limits=Limits(k_multiple=8)), "a has K = 20, no multiple of 8"),
    "rows": (lambda: views(16, 8, limits=Limits(row_multiple=16)), "b has 8 rows, no multiple of 16"),
    "training": (lambda: RowViews((("a", linear(whole(8, K), trained=True)),)), "a is being trained"),
    "missing": (lambda: RowViews((("a", linear(whole(8, K))), ("b", None))), "b is missing"),
    "identity": (lambda: RowViews((("a", nn.Identity()),)), "a is a Identity without a weight"),
}


@pytest.mark.parametrize(("build", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_fused_is_left_as_it_is_with_a_reason(build: Any, words: str) -> None:
    parts = build()
    weights = [getattr(each, "weight", None) for each in parts.linears]
    before = [(id(w), w.data_ptr() if w.layout is torch.strided else 0, w._version) for w in weights if w is not None]
    assert words in parts.refusal()
    assert parts.fuse() == parts.refusal()
    assert parts.weight is None
    assert parts.broken() == "not fused"
    after = [getattr(each, "weight", None) for each in parts.linears]
    assert before == [
        (id(w), w.data_ptr() if w.layout is torch.strided else 0, w._version) for w in after if w is not None
    ]


def test_foreign_views_are_fused_where_that_is_allowed_and_the_foreign_storage_is_left_alone() -> None:
    storage = whole(20, K)
    kept = storage.clone()
    parts = RowViews((("a", linear(storage[:8])), ("b", linear(storage[12:]))), Limits(allow_foreign_views=True))
    assert parts.fuse() == ""
    parts.linears[0].weight.zero_()
    assert torch.equal(storage, kept)


def test_names_are_named_once() -> None:
    with pytest.raises(ValueError, match="two have one name"):
        RowViews((("a", linear(whole(8, K))), ("a", linear(whole(8, K)))))


# -- a broken alias ----------------------------------------------------------------------------------------------------


def other_parameter(part: Any) -> None:
    part.weight = nn.Parameter(whole(*part.weight.shape, seed=5), requires_grad=False)


def other_data(part: Any) -> None:
    part.weight.data = whole(*part.weight.shape, seed=5)


def other_dtype(part: Any) -> None:
    part.weight.data = part.weight.data.view(torch.float16)  # the same memory


def fewer_rows(part: Any) -> None:
    part.weight.data = part.weight.data[:-1]


def other_strides(part: Any) -> None:
    part.weight.data = part.weight.data.as_strided(part.weight.shape, (1, part.weight.shape[0]))


def no_weight(part: Any) -> None:
    del part.weight


def none_weight(part: Any) -> None:
    part.weight = None


class Wrapper(torch.Tensor):
    """Holds its values elsewhere and has no storage, as quantized weights do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner)
        return func(*(each.inner if isinstance(each, Wrapper) else each for each in args), **(kwargs or {}))


def wrapped(part: Any) -> None:
    part.weight = nn.Parameter(Wrapper(part.weight.detach().clone()), requires_grad=False)


def sparse(part: Any) -> None:
    part.weight = nn.Parameter(part.weight.detach().to_sparse(), requires_grad=False)


def to_meta(part: Any) -> None:
    part.to("meta")


BREAKS = [
    other_parameter,
    other_data,
    other_dtype,
    fewer_rows,
    other_strides,
    no_weight,
    none_weight,
    wrapped,
    sparse,
    to_meta,
]


@pytest.mark.parametrize("change", BREAKS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_whatever_takes_a_part_away_is_seen_and_survived(change: Any, place: int) -> None:
    parts = views(8, 4, 8)
    parts.fuse()
    values = clones(parts)
    change(parts.linears[place])
    assert parts.broken() == f"{NAMES[place]} is no longer a view of the fused weight"
    assert [parts.intact(name) for name in parts.names] == [at != place for at in range(3)]
    refusal = parts.refusal()
    assert parts.fuse() == refusal
    assert (parts.broken() == "") == (refusal == "")
    parts.release()
    assert parts.broken() == "not fused"
    for at, value in enumerate(values):
        if at != place:
            weight = parts.linears[at].weight
            assert torch.equal(weight, value)
            assert weight.untyped_storage().nbytes() == weight.numel() * weight.itemsize


def test_a_weight_whose_memory_was_given_up_is_not_in_place() -> None:
    parts = views(8, 4)
    parts.fuse()
    parts.linears[0].weight.untyped_storage().resize_(0)
    assert parts.broken() == "the fused weight has no memory"


def test_swapped_parameters_are_fused_anew_with_their_values() -> None:
    parts = views(8, 8)
    parts.fuse()
    values = clones(parts)
    a, b = parts.linears
    a.weight, b.weight = b.weight, a.weight
    assert parts.broken()
    assert parts.fuse() == ""
    assert torch.equal(parts.weight, torch.cat(values[::-1]))  # type: ignore[arg-type]


def test_weights_that_move_together_with_their_storage_stay_in_place() -> None:
    parts = views(8, 4)
    parts.fuse()
    values = clones(parts)
    nn.ModuleList(parts.linears).share_memory()
    assert torch.equal(torch.cat([each.weight for each in parts.linears]), torch.cat(values))
    assert parts.broken() or torch.equal(parts.weight, torch.cat(values))  # type: ignore[arg-type]


# -- letting go --------------------------------------------------------------------------------------------------------


def test_release_gives_each_part_its_own_storage_and_keeps_the_parameters() -> None:
    parts = views(8, 4)
    parts.fuse()
    values, objects = clones(parts), [each.weight for each in parts.linears]
    parts.release()
    assert parts.weight is None
    assert all(each.weight is kept for each, kept in zip(parts.linears, objects, strict=True))
    assert all(map(same_bits, clones(parts), values))
    assert len({each.weight.untyped_storage().data_ptr() for each in parts.linears}) == 2
    parts.release()  # and again: nothing to do


def test_release_after_a_refusal_finds_the_views_that_are_left() -> None:
    parts = views(8, 4)
    parts.fuse()
    parts.linears[0].weight.requires_grad_(True)
    assert parts.fuse()
    parts.release()
    assert [each.weight.untyped_storage().nbytes() for each in parts.linears] == [8 * K * 2, 4 * K * 2]


def test_parts_left_in_an_old_fused_weight_are_no_foreign_views() -> None:
    """After a refusal, and with one part replaced meanwhile."""
    parts = views(8, 4)
    parts.fuse()
    other_parameter(parts.linears[1])
    parts.linears[0].weight.requires_grad_(True)
    assert "trained" in parts.fuse()
    parts.linears[0].weight.requires_grad_(False)
    values = clones(parts)
    assert parts.fuse() == ""
    assert torch.equal(parts.weight, torch.cat(values))  # type: ignore[arg-type]


def test_an_old_fused_weight_is_not_held_once_no_part_is_in_it() -> None:
    parts = views(8, 4)
    parts.fuse()
    parts.linears[0].weight.requires_grad_(True)
    parts.fuse()
    storage = whole(12, K)
    for each, value in zip(parts.linears, (storage[:8], storage[8:]), strict=True):
        each.weight = nn.Parameter(value, requires_grad=False)
    assert parts.detect()
    assert parts._former is None
    other_parameter(parts.linears[0])
    other_parameter(parts.linears[1])
    parts.forget()
    assert parts._former is None


def test_nothing_is_moved_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = views(8, 4)
    before = pointers(parts)
    monkeypatch.setattr("fusions.capturing.is_capturing", lambda: True)
    for change in (parts.fuse, parts.release):
        with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
            change()
    assert pointers(parts) == before


def test_the_fused_weight_is_waited_for_after_a_fusion_and_after_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(rows_module, "_wait", waits.append)
    parts = views(8, 4)
    for _ in range(2):
        parts.fuse()
        assert len(waits) == 1
        assert waits.pop() is parts.weight


# -- any order of changes ----------------------------------------------------------------------------------------------


class RowViewsMachine(RuleBasedStateMachine):
    """Values are kept beside the weights; what is in place is found again from addresses alone."""

    @initialize(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), strict=st.booleans())
    def build(self, counts: list[int], strict: bool) -> None:
        self.seed = 100
        self.parts = views(*counts, limits=Limits(allow_foreign_views=not strict))
        self.values = clones(self.parts)

    def fresh(self, place: int) -> torch.Tensor:
        self.seed += 1
        self.values[place] = whole(*self.values[place].shape, seed=self.seed)
        return self.values[place].clone()

    places = st.integers(0, 3)

    def at(self, place: int) -> tuple[int, Any]:
        place %= len(self.parts.linears)
        return place, self.parts.linears[place]

    @rule()
    def fuse(self) -> None:
        trained = any(each.weight.requires_grad for each in self.parts.linears)
        before, whole_before = pointers(self.parts), self.parts.broken() == ""
        why = self.parts.fuse()
        assert bool(why) == trained, why
        if why or whole_before:
            assert pointers(self.parts) == before
        assert (self.parts.weight is None) == bool(why)

    @rule()
    def detect(self) -> None:
        before = pointers(self.parts)
        assert self.parts.detect() == (self.parts.broken() == "")
        assert pointers(self.parts) == before

    @rule()
    def release(self) -> None:
        self.parts.release()
        storages = {each.weight.untyped_storage().data_ptr() for each in self.parts.linears}
        assert len(storages) == len(self.parts.linears)

    @rule()
    def forget(self) -> None:
        before = pointers(self.parts)
        self.parts.forget()
        assert pointers(self.parts) == before

    @rule(place=places)
    def reload(self, place: int) -> None:
        place, part = self.at(place)
        with torch.no_grad():
            part.weight.copy_(self.fresh(place))

    @rule(place=places, data=st.booleans())
    def replace(self, place: int, data: bool) -> None:
        place, part = self.at(place)
        if data:
            part.weight.data = self.fresh(place)
        else:
            part.weight = nn.Parameter(self.fresh(place), requires_grad=False)

    @rule(place=places, trained=st.booleans())
    def train(self, place: int, trained: bool) -> None:
        self.at(place)[1].weight.requires_grad_(trained)

    @precondition(lambda self: len(self.parts.linears) > 1)
    @rule()
    def swap(self) -> None:
        a, b = self.parts.linears[:2]
        if a.weight.shape == b.weight.shape:
            a.weight, b.weight = b.weight, a.weight
            self.values[:2] = self.values[1::-1]

    @invariant()
    def values_are_kept(self) -> None:
        assert all(map(same_bits, clones(self.parts), self.values))

    @invariant()
    def in_place_is_told_from_addresses(self) -> None:
        fused = self.parts.weight
        if fused is None:
            assert self.parts.broken() == "not fused"
            return
        start = fused.data_ptr()
        for name, each in zip(self.parts.names, self.parts.linears, strict=True):
            assert self.parts.intact(name) == (each.weight.data_ptr() == start)
            start += each.weight.numel() * 2
        intact = all(map(self.parts.intact, self.parts.names))
        assert (self.parts.broken() == "") == intact
        if intact:
            assert same_bits(fused, torch.cat(self.values))


RowViewsMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRowViewsInAnyOrder = RowViewsMachine.TestCase
