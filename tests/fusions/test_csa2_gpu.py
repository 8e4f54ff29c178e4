"""CSA2's hidden-state projections on a GPU, with every tinygemm2 that is usable here: numbers, bits, graphs, host."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from recording import BF16, Counting, assert_close, linear, normal, same_bits

from fusions.csa2 import HiddenStateProjections
from fusions.csa2 import Path as Route
from fusions.libraries import OpFailed, Unavailable
from fusions.ops import choice

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

NQ, NKV, K = 1280, 512, 5120
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (choice.CHOICE, choice.POLICY):
        monkeypatch.delenv(name, raising=False)
    with torch.no_grad():
        yield


def usable(name: str) -> Any:
    """The real op of this name; skips where it is not usable, or does not build."""
    op = choice.OPS[name]
    why = op.refusal(GPU, K)
    if why:
        pytest.skip(f"{name}: {why}")
    try:
        op(normal(1, K, device="cuda"), normal(16, K, device="cuda"))
    except (Unavailable, OpFailed) as error:  # a library that does not import, or cannot build its kernel here
        pytest.skip(f"{name}: {str(error)[:300]}")
    return op


@pytest.fixture(scope="module", params=["native", "flashinfer", "trtllm"])
def op(request: pytest.FixtureRequest) -> Any:
    return usable(request.param)


class Attention(nn.Module):
    def __init__(
        self, real: Any, nq: int = NQ, nkv: int = NKV, k: int = K, seed: int = 1, scale: float = 1.0, **settings: Any
    ) -> None:
        """``real``: the op, whose calls are counted; ``op=None`` among the settings leaves the choice open."""
        super().__init__()
        self.wq_a = linear(normal(nq, k, seed=seed, device="cuda", scale=scale))
        self.wkv = linear(normal(nkv, k, seed=seed + 1, device="cuda", scale=scale))
        self.counting = Counting(real)
        settings = {"policy": "*", "op": self.counting, **settings}
        self.projections = HiddenStateProjections(self.wq_a, self.wkv, **settings)

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.wq_a.weight, self.wkv.weight

    def plain(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.wq_a(hidden), self.wkv(hidden)


def fused(op: Any, **settings: Any) -> Attention:
    attention = Attention(op, **settings)
    assert attention.projections.post_load_weights()
    return attention


def tokens(count: int, seed: int = 0, k: int = K) -> torch.Tensor:
    return normal(count, k, seed=seed + 100, device="cuda")


def reload(attention: Attention, seed: int) -> None:
    """In place, as a loader does; then waits, as whoever reloads must."""
    for weight, part in zip(attention.weights, (seed, seed + 1), strict=True):
        weight.copy_(normal(*weight.shape, seed=part, device="cuda"))
    torch.cuda.current_stream().synchronize()


# -- the acceptance test of the change this restates -------------------------------------------------------------------


@pytest.mark.parametrize(("nq", "nkv", "k"), [(NQ, NKV, K), (128, 512, 128)])
def test_acceptance(op: Any, nq: int, nkv: int, k: int) -> None:
    attention = Attention(op, nq, nkv, k, scale=k**-0.5)
    projections, counting = attention.projections, attention.counting
    assert projections.post_load_weights()
    weight = projections._parts.weight
    assert weight is not None
    assert attention.wq_a.weight.data_ptr() == weight.data_ptr()
    assert attention.wkv.weight.data_ptr() == weight[nq:].data_ptr()

    def run(count: int, columns: list[int]) -> None:
        hidden = tokens(count, k=k)
        counting.taken()
        results = projections.project(hidden)
        assert counting.taken() == columns
        for result, each in zip(results, attention.weights, strict=True):
            assert (result.shape, result.stride()) == ((count, each.shape[0]), (each.shape[0], 1))
            want = hidden.float() @ each.float().t()
            torch.testing.assert_close(result.float(), want, rtol=1e-2, atol=1e-2)

    for count, columns in ((1, [nq + nkv]), (2, [nq, nkv]), (8, [nq, nkv]), (9, []), (32, [])):
        run(count, columns)

    hidden = tokens(1, k=k)
    projections.project(hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = projections.project(hidden)
    for seed in range(3):
        hidden.copy_(tokens(1, seed, k))
        graph.replay()
        assert all(map(same_bits, captured, projections.project(hidden)))

    for each in attention.weights:
        each.copy_(normal(*each.shape, seed=9, device="cuda", scale=k**-0.5))
    torch.cuda.synchronize()
    run(1, [nq + nkv])
    attention.wkv.weight = nn.Parameter(normal(nkv, k, seed=5, device="cuda", scale=k**-0.5), requires_grad=False)
    run(1, [])
    run(2, [])
    assert projections.post_load_weights()
    run(1, [nq + nkv])


# -- dispatch ----------------------------------------------------------------------------------------------------------


def test_only_what_the_op_can_take_reaches_it(op: Any) -> None:
    attention = fused(op)
    projections, counting = attention.projections, attention.counting
    wide = normal(8, 2 * K, device="cuda")
    cases: list[tuple[torch.Tensor, Route]] = [
        (tokens(0), Route.LINEAR),
        (tokens(1), Route.FUSED),
        (tokens(7), Route.SEPARATE),
        (tokens(9), Route.LINEAR),
        (tokens(6).view(2, 3, K), Route.LINEAR),
        (wide[:, :K], Route.LINEAR),
        (wide[:1, :K], Route.FUSED),
        (wide.view(-1)[1 : K + 1].view(1, K), Route.LINEAR),
        (wide.view(-1)[8 : K + 8].view(1, K), Route.FUSED),
        (wide.view(-1)[: 2 * K].as_strided((1, K), (3, 1)), Route.FUSED),
    ]
    for hidden, path in cases:
        assert projections.explain(hidden)[0] is path
        counting.taken()
        results = projections.project(hidden)
        assert len(counting.taken()) == {Route.FUSED: 1, Route.SEPARATE: 2, Route.LINEAR: 0}[path]
        for result, want in zip(results, attention.plain(hidden), strict=True):
            assert result.shape == want.shape
            if path is Route.LINEAR:
                assert same_bits(result, want)
            else:
                torch.testing.assert_close(result, want, rtol=2.0**-6, atol=1.0)
    with torch.enable_grad():
        hidden = tokens(1).requires_grad_(True)
        sum(each.float().sum() for each in projections.project(hidden)).backward()
        assert hidden.grad is not None
    with pytest.raises(ValueError, match="hidden has K = 64"):
        projections.project(tokens(1, k=64))
    assert projections.explain(tokens(1).cpu())[0] is Route.LINEAR
    assert counting.taken() == []


def test_weights_on_the_cpu_are_not_fused_and_weights_moved_there_fall_back(op: Any) -> None:
    attention = Attention(op).cpu()
    assert not attention.projections.post_load_weights()
    attention = fused(op)
    attention.cpu()
    assert not attention.projections.is_fused
    hidden = tokens(1).cpu()
    assert attention.projections.explain(hidden)[0] is Route.LINEAR
    assert all(map(same_bits, attention.projections.project(hidden), attention.plain(hidden)))
    attention.cuda()
    assert not attention.projections.is_fused
    assert attention.projections.post_load_weights()


def test_the_policy_and_the_choice_are_asked_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention(usable("native"), op=None, policy=None)
    number = choice.capability(GPU)
    monkeypatch.setenv(choice.POLICY, str(number))
    monkeypatch.setenv(choice.CHOICE, "native")
    assert attention.projections.post_load_weights()
    assert attention.projections.explain(tokens(1)) == (Route.FUSED, "native tinygemm2")
    monkeypatch.setenv(choice.CHOICE, "off")
    assert attention.projections.explain(tokens(1))[0] is Route.LINEAR
    monkeypatch.setenv(choice.CHOICE, "native")
    monkeypatch.setenv(choice.POLICY, str(number + 1))
    assert "policy: compute capability" in attention.projections.explain(tokens(1))[1]


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9])
def test_results_are_one_rounding_away_from_exact(op: Any, count: int) -> None:
    attention = fused(op)
    for seed in range(5):
        hidden = tokens(count, seed)
        for result, weight in zip(attention.projections.project(hidden), attention.weights, strict=True):
            if count <= 8:
                assert_close(result, hidden, weight)
            else:  # cuBLAS may add parts of K in BF16
                torch.testing.assert_close(result.float(), hidden.float() @ weight.float().t(), rtol=2.0**-6, atol=1.0)


def test_fused_and_separate_have_the_same_bits_and_no_row_depends_on_others(op: Any) -> None:
    attention = fused(op)
    q, kv = attention.weights
    hidden = tokens(8)
    together = attention.projections.project(hidden)
    for row in range(8):
        one = hidden[row : row + 1]
        results = attention.projections.project(one)
        assert all(map(same_bits, results, (op(one, q), op(one, kv))))
        assert all(map(same_bits, results, (each[row : row + 1] for each in together)))
    separate = HiddenStateProjections(attention.wq_a, attention.wkv, op=op, policy="*", fuse_one_token=False)
    assert separate.post_load_weights()
    assert separate.explain(hidden[:1])[0] is Route.SEPARATE
    assert all(map(same_bits, separate.project(hidden[:1]), attention.projections.project(hidden[:1])))


def test_a_hundred_runs_have_the_same_bits(op: Any) -> None:
    attention = fused(op)
    for count in (1, 8):
        hidden = tokens(count)
        want = attention.projections.project(hidden)
        for _ in range(100):
            assert all(map(same_bits, attention.projections.project(hidden), want))


def test_reloaded_weights_give_the_bits_of_a_fresh_module(op: Any) -> None:
    attention = fused(op)
    reload(attention, 40)
    fresh = fused(op, seed=40)
    assert all(map(torch.equal, attention.weights, fresh.weights))
    for count in (1, 5):
        assert all(map(same_bits, attention.projections.project(tokens(count)), fresh.projections(tokens(count))))


def test_zeros_give_positive_zeros_and_a_bad_row_stays_alone(op: Any) -> None:
    attention = fused(op)
    for count in (1, 8):
        for result in attention.projections.project(torch.zeros(count, K, device="cuda", dtype=BF16)):
            assert (result.view(torch.int16) == 0).all()
    hidden = tokens(8)
    clean = attention.projections.project(hidden)
    for bad, value in itertools.product((0, 3, 7), (float("nan"), float("inf"))):
        spoilt = hidden.clone()
        spoilt[bad, 1025] = value
        for result, want in zip(attention.projections.project(spoilt), clean, strict=True):
            others = [row for row in range(8) if row != bad]
            assert same_bits(result[others], want[others])
            assert not result[bad].isfinite().any()


def test_zeros_as_a_bias_are_no_bias(op: Any) -> None:
    weight, zeros = normal(NKV, K, device="cuda"), torch.zeros(NKV, device="cuda", dtype=BF16)
    for count in (1, 8):
        assert same_bits(op(tokens(count), weight), op(tokens(count), weight, zeros))


def test_the_usable_ops_agree_bit_for_bit() -> None:
    ops = [each for each in choice.OPS.values() if not each.refusal(GPU, K)]
    if len(ops) < 2:
        pytest.skip("one op is usable")
    ops = [usable(each.name) for each in ops]
    attention = fused(ops[0])
    for count in (1, 4, 8):
        results = [each(tokens(count), attention.wkv.weight) for each in ops]
        assert all(same_bits(results[0], result) for result in results[1:]), [each.name for each in ops]


# -- graphs ------------------------------------------------------------------------------------------------------------


def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_replay_has_the_bits_of_an_eager_call_and_sees_reloaded_weights(op: Any, count: int) -> None:
    attention = fused(op)
    hidden = tokens(count)
    attention.counting.taken()
    graph, results = capture(lambda: attention.projections.project(hidden))
    assert len(attention.counting.taken()) == 4 * (1 if count == 1 else 2)
    seen = []
    for seed in range(3):
        if seed:
            reload(attention, 60 + 10 * seed)
        for other in range(3):
            hidden.copy_(tokens(count, 10 * seed + other))
            for each in results:
                each.fill_(float("nan"))
            graph.replay()
            want = attention.projections.project(hidden)
            assert all(map(same_bits, results, want))
            for result, weight in zip(results, attention.weights, strict=True):
                assert_close(result, hidden, weight)
            seen.append(results[0].clone())
    assert all(not same_bits(a, b) for a, b in itertools.combinations(seen, 2))


def test_a_graph_from_before_a_replacement_goes_on_with_the_weights_it_has(op: Any) -> None:
    """The documented limit: it reads the old fused weight, which the graph's owner has to keep alive."""
    attention = fused(op)
    old = attention.projections._parts.weight
    hidden = tokens(1)
    graph, results = capture(lambda: attention.projections.project(hidden))
    graph.replay()
    want = [each.clone() for each in results]
    attention.wkv.weight = nn.Parameter(normal(NKV, K, seed=77, device="cuda"), requires_grad=False)
    assert attention.projections.post_load_weights()
    assert attention.projections._parts.weight is not old
    graph.replay()
    assert all(map(same_bits, results, want))
    assert not same_bits(attention.projections.project(hidden)[1], want[1])


def test_hooks_in_a_capture_are_refused_and_leave_the_weights(op: Any) -> None:
    attention = fused(op)
    hidden = tokens(1)
    attention.projections.project(hidden)
    torch.cuda.synchronize()
    before = [each.data_ptr() for each in attention.weights]
    refused = []
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for change in (attention.projections.post_load_weights, attention.projections.release):
            try:
                change()
            except RuntimeError as error:
                refused.append("being captured" in str(error))
        attention.projections.project(hidden)
        graph.capture_end()
    assert refused == [True, True]
    assert [each.data_ptr() for each in attention.weights] == before
    assert attention.projections.is_fused


# -- the host ----------------------------------------------------------------------------------------------------------


def test_neither_the_alias_check_nor_a_projection_waits_or_allocates_more_than_its_results(op: Any) -> None:
    attention = fused(op)
    hiddens = {count: tokens(count) for count in (1, 2, 8)}
    for hidden in hiddens.values():  # kernels are built and loaded
        attention.projections.project(hidden)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert attention.projections.is_fused
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        for count, hidden in hiddens.items():
            start = torch.cuda.memory_stats()["allocation.all.allocated"]
            attention.projections.explain(hidden)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == start
            held = torch.cuda.memory_allocated()
            results = attention.projections.project(hidden)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] - start == (1 if count == 1 else 2)
            grown = torch.cuda.memory_allocated() - held
            assert 0 <= grown - sum(each.nbytes for each in results) < 1024  # rounding to 512 bytes
            del results
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_hook_holds_one_copy_of_the_weights_and_release_too(op: Any) -> None:
    attention = Attention(op)
    gc.collect()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    small = 3 << 20  # an op's zeros, and what the allocator does not split off; the weights are 18 MB
    assert attention.projections.post_load_weights()
    assert abs(torch.cuda.memory_allocated() - start) <= small
    attention.projections.release()
    assert abs(torch.cuda.memory_allocated() - start) <= small


def test_a_projection_runs_on_the_current_stream(op: Any) -> None:
    """Behind a long kernel on that stream, and with another stream idle."""
    attention = fused(op)
    hidden, source = tokens(1), tokens(1, seed=9)
    want = attention.projections.project(source)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        hidden.copy_(source)
        results = attention.projections.project(hidden)
    stream.synchronize()
    assert all(map(same_bits, results, want))


# -- custom ops and tracing --------------------------------------------------------------------------------------------


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting(usable("native"))
    monkeypatch.setattr(choice, "OPS", {"native": counting})
    return counting


def test_the_custom_ops_are_well_formed(native: Counting) -> None:
    storage = normal(48 + 32, 128, device="cuda")
    for count in (1, 3):
        hidden = tokens(count, k=128)
        torch.library.opcheck(torch.ops.fusions.projection.default, (hidden, storage[:48]))
        torch.library.opcheck(torch.ops.fusions.tinygemm2.default, (hidden, storage[:48], None))
        torch.library.opcheck(torch.ops.fusions.tinygemm2.default, (hidden, storage[:48], normal(48, device="cuda")))
    for kv in (storage[48:], storage[48:].clone()):
        torch.library.opcheck(torch.ops.fusions.row_projection.default, (tokens(1, k=128), storage[:48], kv))
    assert native.taken()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_projection_has_the_bits_of_an_eager_one(native: Counting, backend: str) -> None:
    if backend == "inductor":
        pytest.importorskip("triton")
    torch.compiler.reset()
    attention = Attention(native, nq=256, nkv=64, k=512, op=None)
    assert attention.projections.post_load_weights()
    run: Any = torch.compile(attention.projections.project, fullgraph=True, backend=backend)
    for count, columns in ((1, [320]), (2, [256, 64]), (8, [256, 64]), (9, [])):
        hidden = tokens(count, k=512)
        want = attention.projections.project(hidden)
        native.taken()
        results = run(hidden)
        assert native.taken() == columns
        for result, each in zip(results, want, strict=True):
            assert result.stride() == each.stride()
            if columns:
                assert same_bits(result, each)
            else:
                torch.testing.assert_close(result, each, rtol=2.0**-6, atol=0.25)
    hidden = tokens(1, k=512)
    for weight in attention.weights:
        weight.copy_(normal(*weight.shape, seed=33, device="cuda"))
    torch.cuda.synchronize()
    assert all(map(same_bits, run(hidden), attention.projections.project(hidden)))
    attention.wkv.weight = nn.Parameter(normal(64, 512, seed=34, device="cuda"), requires_grad=False)
    for result, want in zip(run(hidden), attention.plain(hidden), strict=True):
        torch.testing.assert_close(result, want, rtol=2.0**-6, atol=0.25)


def test_tinygemm2_is_traced_as_one_op(native: Counting) -> None:
    torch.compiler.reset()
    weight = normal(64, 512, device="cuda")
    run: Any = torch.compile(choice.tinygemm2, fullgraph=True, backend="aot_eager")
    hidden = tokens(3, k=512)
    assert same_bits(run(hidden, weight), native.op(hidden, weight))
    assert native.taken() == [64]
