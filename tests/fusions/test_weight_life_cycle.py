"""Whatever happens to the weights, in any order: results are those of the current weights, keys and shapes of the state
are those of an unfused model, and no weight that moved away is taken for fused."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn
from torch.nn.functional import linear as F_linear

sys.path.insert(0, str(Path(__file__).parent))

from recording import BF16, Recording, linear, same_bits, whole

from fusions.csa2 import HiddenStateProjections
from fusions.csa2 import Path as Route

K = 64
PARTS = ("wq_a", "wkv")
OUTSIDE = {"wq_a": "like_q", "wkv": "like_kv"}
HIDDEN = {count: whole(count, K, seed=count) for count in (1, 3, 9)}


class Model(nn.Module):
    """The two Linears, their projections, and two Linears elsewhere that can be tied to them."""

    def __init__(self, nq: int, nkv: int) -> None:
        super().__init__()
        self.wq_a, self.wkv = linear(whole(nq, K, seed=1)), linear(whole(nkv, K, seed=2))
        self.like_q, self.like_kv = linear(whole(nq, K, seed=3)), linear(whole(nkv, K, seed=4))
        self.projections = HiddenStateProjections(self.wq_a, self.wkv, op=Recording(), policy="*")

    def part(self, name: str) -> nn.Linear:
        part = getattr(self, name)
        assert isinstance(part, nn.Linear)
        return part


NAMES = (*PARTS, *OUTSIDE.values())


def through_a_file(thing: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


class LifeCycle(RuleBasedStateMachine):
    """``values``: what each Linear's weight must be, kept apart; ``ties``: sets of Linears with one Parameter."""

    parts, names = st.sampled_from(PARTS), st.sampled_from(NAMES)

    @initialize(nkv=st.sampled_from((16, 32)))
    def build(self, nkv: int) -> None:
        self.sizes = (32, nkv)
        self.model, self.seed = Model(*self.sizes), 100
        self.values = {name: self.weight(name).detach().clone() for name in NAMES}
        self.ties = {name: {name} for name in NAMES}
        self.dtype = BF16
        self.shapes = {f"{name}.weight": self.weight(name).shape for name in NAMES}

    def weight(self, name: str) -> nn.Parameter:
        return self.model.part(name).weight

    def fresh(self, name: str) -> torch.Tensor:
        self.seed += 1
        return whole(*self.values[name].shape, seed=self.seed)

    def written(self, name: str, value: torch.Tensor) -> torch.Tensor:
        for each in self.ties[name]:
            self.values[each] = value
        return value.clone().to(self.dtype)

    def untie(self, name: str) -> None:
        self.ties[name].discard(name)
        self.ties[name] = {name}

    # -- loading -------------------------------------------------------------------------------------------------------

    @rule(name=names, by_data=st.booleans())
    def reload_one(self, name: str, by_data: bool) -> None:
        value = self.written(name, self.fresh(name))
        with torch.no_grad():
            (self.weight(name).data if by_data else self.weight(name)).copy_(value)

    @rule(name=parts, first=st.integers(0, 15), count=st.integers(1, 16))
    def reload_rows(self, name: str, first: int, count: int) -> None:
        value, rows = self.values[name].clone(), slice(first, first + count)
        value[rows] = self.fresh(name)[rows]
        self.written(name, value)
        with torch.no_grad():
            self.weight(name)[rows].copy_(value[rows])

    @rule(assign=st.booleans(), one_storage=st.booleans(), names=st.sets(names, min_size=1))
    def load_state_dict(self, assign: bool, one_storage: bool, names: set[str]) -> None:
        """``one_storage``: what is assigned are views of one tensor, with a gap behind each."""
        state = {}
        for name in sorted(names):
            if assign:
                self.untie(name)
            value = self.written(name, self.fresh(name))
            state |= {f"{each}.weight": value for each in self.ties[name] & names}
        if one_storage:
            padded = torch.cat([torch.cat([each, each[:1]]) for each in state.values()])
            pieces = padded.split([len(each) + 1 for each in state.values()])
            state = {key: piece[:-1] for key, piece in zip(state, pieces, strict=True)}
        self.model.load_state_dict(state, strict=False, assign=assign)

    # -- replacing -----------------------------------------------------------------------------------------------------

    @rule(name=names)
    def replace_parameter(self, name: str) -> None:
        self.untie(name)
        self.model.part(name).weight = nn.Parameter(self.written(name, self.fresh(name)), requires_grad=False)

    @rule(name=names)
    def replace_data(self, name: str) -> None:
        self.weight(name).data = self.written(name, self.fresh(name))

    @precondition(lambda self: self.dtype is BF16)
    @rule(dtype=st.sampled_from((torch.float16, torch.float32)))
    def to_another_dtype(self, dtype: torch.dtype) -> None:
        self.model.to(dtype)
        self.dtype = dtype

    @rule()
    def to_bf16(self) -> None:
        self.model.to(BF16)
        self.dtype = BF16

    @rule(name=parts)
    def tie_to_one_outside(self, name: str) -> None:
        """The outside one's values are given up."""
        other = OUTSIDE[name]
        self.untie(other)
        self.model.part(other).weight = self.weight(name)
        self.join(name, other)

    @rule(name=parts)
    def take_the_outside_ones(self, name: str) -> None:
        other = OUTSIDE[name]
        self.untie(name)
        self.model.part(name).weight = self.weight(other)
        self.join(other, name)

    @precondition(lambda self: self.sizes[0] == self.sizes[1])
    @rule(name=parts)
    def tie_the_two(self, name: str) -> None:
        other = PARTS[1 - PARTS.index(name)]
        self.untie(other)
        self.model.part(other).weight = self.weight(name)
        self.join(name, other)

    def join(self, kept: str, other: str) -> None:
        self.ties[kept].add(other)
        self.ties[other] = self.ties[kept]
        self.values[other] = self.values[kept]

    @rule(name=names, trained=st.booleans())
    def train(self, name: str, trained: bool) -> None:
        self.weight(name).requires_grad_(trained)

    # -- another model -------------------------------------------------------------------------------------------------

    @rule()
    def go_on_with_a_copy(self) -> None:
        self.model = copy.deepcopy(self.model)

    @rule()
    def go_on_with_a_pickled_one(self) -> None:
        self.model = through_a_file(self.model, weights_only=False)

    @rule(assign=st.booleans())
    def go_on_with_a_fresh_one(self, assign: bool) -> None:
        state = through_a_file(self.model.state_dict(), weights_only=True)
        self.model = Model(*self.sizes).to(self.dtype)
        self.model.load_state_dict(state, assign=assign)
        taken: set[int] = set()
        for name in NAMES:
            self.untie(name)
            weight = self.weight(name)
            if weight.data_ptr() in taken:  # what was one tensor in the file is one again, under two Parameters
                weight.data = weight.data.clone()
            taken.add(weight.data_ptr())

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def pointers(self) -> list[int]:
        return [self.weight(name).data_ptr() for name in PARTS]

    @rule()
    def hook_twice(self) -> None:
        weights = [self.weight(name) for name in PARTS]
        before, was_fused = self.pointers(), self.model.projections.is_fused
        apart = all(each.untyped_storage().nbytes() == each.numel() * each.itemsize for each in weights)
        unfit = self.dtype is not BF16 or weights[0] is weights[1] or any(each.requires_grad for each in weights)
        unfit = unfit or before[0] == before[1]
        fused = self.model.projections.post_load_weights()
        assert fused == self.model.projections.is_fused
        if unfit:
            assert not fused
        elif apart or was_fused:
            assert fused
        if not fused or was_fused:
            assert self.pointers() == before
        after = self.pointers()
        assert self.model.projections.post_load_weights() == fused
        assert self.pointers() == after
        for name, weight in zip(PARTS, weights, strict=True):
            assert self.weight(name) is weight

    @rule()
    def cache_derived_state(self) -> None:
        before = self.pointers()
        if self.model.projections.cache_derived_state():
            assert self.model.projections.is_fused
        assert self.pointers() == before

    @rule()
    def release(self) -> None:
        self.model.projections.release()
        assert not self.model.projections.is_fused

    # -- always --------------------------------------------------------------------------------------------------------

    @invariant()
    def results_are_those_of_the_current_weights(self) -> None:
        projections, op = self.model.projections, self.model.projections.op
        assert isinstance(op, Recording)
        for count, whole_hidden in HIDDEN.items():
            hidden = whole_hidden.to(self.dtype)
            for mode in (torch.no_grad(), torch.enable_grad())[: 2 if count == 1 else 1]:
                with mode:
                    path, _ = projections.explain(hidden)
                    op.taken()
                    results = projections.project(hidden)
                assert len(op.taken()) == {Route.FUSED: 1, Route.SEPARATE: 2, Route.LINEAR: 0}[path]
                trained = torch.enable_grad is type(mode) and any(self.weight(name).requires_grad for name in PARTS)
                few = projections.is_fused and count != 9 and not trained
                assert path is ((Route.FUSED if count == 1 else Route.SEPARATE) if few else Route.LINEAR)
                for name, result in zip(PARTS, results, strict=True):
                    assert result.requires_grad == (trained and self.weight(name).requires_grad)
                    assert torch.equal(result, F_linear(hidden, self.weight(name)))
                    assert result.stride() == (result.shape[1], 1)

    @invariant()
    def weights_keep_their_values(self) -> None:
        for name in NAMES:
            assert same_bits(self.weight(name).detach().to(BF16), self.values[name]), name

    @invariant()
    def the_state_is_that_of_an_unfused_model(self) -> None:
        state = self.model.state_dict()
        assert {key: value.shape for key, value in state.items()} == self.shapes
        assert all(value.is_contiguous() for value in state.values())

    @invariant()
    def fused_means_one_behind_the_other_in_the_fused_weight(self) -> None:
        projections = self.model.projections
        fused = projections._parts.weight
        q, kv = (self.weight(name) for name in PARTS)
        intact = (
            fused is not None
            and q.dtype is kv.dtype is fused.dtype
            and q.data_ptr() == fused.data_ptr()
            and kv.data_ptr() == fused.data_ptr() + q.nbytes
            and fused.shape == (q.shape[0] + kv.shape[0], K)
        )
        assert projections.is_fused == intact
        if fused is not None and intact:
            assert same_bits(fused, torch.cat([q.detach(), kv.detach()]))


LifeCycle.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLifeCycle = LifeCycle.TestCase
