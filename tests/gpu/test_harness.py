"""The harness on a GPU: does it see a single wrong bit, read the edges it says, and count what it ran?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pdl_stress import Chain, Outcome, UsageError, catalog, op, stress
from pdl_stress.faults import plant
from pdl_stress.jobs import ArmJob, delayed_variants

pytestmark = pytest.mark.gpu

CHAIN = "csa2-fused-m1"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    from pdl_stress.cuda.bench import Bench

    return Bench(catalog.load(CHAIN), seed=1)


def flip_bit(bench: Any, index: int, buffer: str, byte: int, bit: int = 0) -> None:
    start, _ = bench.memory.layout[buffer]
    bench.memory.reference(False)[index, start + byte] ^= 1 << bit


@pytest.mark.parametrize("buffer", ["hidden", "x", "qkv", "q", "kv"])
@pytest.mark.parametrize("back_to_back", [False, True])
def test_one_wrong_bit_is_seen_in_every_replay_of_its_input(bench: Any, buffer: str, back_to_back: bool) -> None:
    """A reference off by one bit stands for a result off by one bit. Pool of 256: 512 replays meet it twice."""
    captured = bench.capture(bench.chain, back_to_back=back_to_back)
    _, size = bench.memory.layout[buffer]
    index = 31  # the last replay of a graph, so that shared buffers of a back-to-back graph still hold it
    flip_bit(bench, index, buffer, size - 1, 7)
    try:
        counts = bench.run(captured, 512)
    finally:
        flip_bit(bench, index, buffer, size - 1, 7)
    if buffer == "hidden":
        assert counts.mismatches == 2, "hidden is written from the changed reference, so what follows differs"
        return
    assert (counts.replays, counts.mismatches, counts.first_bad) == (512, 2, index)
    assert counts.agree
    reference = bench.memory.reference(False)[index].cpu()
    assert bool((counts.snapshot == reference).all()), "the snapshot holds what the GPU computed"
    assert bench.run(captured, 512).mismatches == 0


def test_edges_are_what_the_arm_says(bench: Any) -> None:
    captured = bench.capture(bench.chain)
    pairs = bench.chain.edges
    assert {e.kind for pair in pairs for e in captured.after(pair[0])} == {"programmatic"}
    assert all(len(captured.after(pair[0])) == bench.unroll for pair in pairs)
    assert captured.serialize(pairs[1][0]) == bench.unroll
    kinds = [{e.kind for e in captured.after(pair[0])} for pair in pairs]
    assert kinds == [{"programmatic"}, {"full"}, {"programmatic"}, {"programmatic"}]
    captured.serialize()
    assert {e.kind for pair in pairs for e in captured.after(pair[0])} == {"full"}


def test_grading_is_joined_to_what_a_kernel_that_never_waits_leaves_behind(bench: Any) -> None:
    from pdl_stress.cuda import graphs

    broken = bench.chain.varied({"q_norm": {"wait": "never"}})
    captured = bench.capture(broken)
    into_boundary = {int(e.source) for e in graphs.edges(captured.raw) if int(e.target) in captured.boundaries}
    assert int(captured.last[0, "projection"]) in into_boundary
    clean = bench.capture(bench.chain)
    into_boundary = {int(e.source) for e in graphs.edges(clean.raw) if int(e.target) in clean.boundaries}
    assert int(clean.last[0, "projection"]) not in into_boundary


def test_cold_weights_rotate_over_sets_that_differ(bench: Any) -> None:
    import torch

    count = bench.memory.weight_sets(True)
    sets = bench.memory.constants
    size = sum(t.numel() * t.element_size() for t in sets[0].values())
    assert count * size >= 2 * torch.cuda.get_device_properties(0).L2_cache_size
    assert not torch.equal(sets[0]["wqkv"], sets[1]["wqkv"])
    assert bench.run(bench.capture(bench.chain, rotated=True), 512).mismatches == 0


def test_equal_inputs_are_refused() -> None:
    import torch

    from pdl_stress.cuda.bench import Bench
    from pdl_stress.cuda.memory import WeakReference

    bench = Bench(catalog.load(CHAIN))
    bench.memory.inputs["hidden"] = torch.ones_like(bench.memory.inputs["hidden"])
    with pytest.raises(WeakReference, match="same row 0 of 'hidden'"):
        bench.capture(bench.chain)


def test_time_limit(bench: Any) -> None:
    from pdl_stress.cuda.waiting import TimeLimit

    slow = bench.chain.varied({"projection": {"delay_us": 500.0}})
    captured = bench.capture(slow)
    limit, bench.time_limit = bench.time_limit, 0.2
    try:
        with pytest.raises(TimeLimit):
            bench.run(captured, 2000)
    finally:
        bench.time_limit = limit
        import torch

        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("planted", "edge"),
    [
        ("F00@q_norm", ("projection", "q_norm", "qkv")),
        ("F01@input_norm", ("producer", "input_norm", "hidden")),
        ("F02@projection", ("input_norm", "projection", "x")),
        ("F04@q_norm", ("projection", "q_norm", "qkv")),
        ("F05@projection", ("input_norm", "projection", "x")),
        ("F07@kv_norm", ("projection", "kv_norm", "qkv")),
        ("F28@projection", ("late_weight", "projection", "wqkv")),
    ],
)
def test_a_planted_fault_is_found_and_named(bench: Any, planted: str, edge: tuple[str, str, str]) -> None:
    from pdl_stress.cuda.executor import Executor

    chain = catalog.load(CHAIN)
    answer = Executor(lambda name: chain).execute(
        ArmJob(CHAIN, chain.fingerprint, "planted", 512, planted=plant(chain, planted))
    )
    mismatch = answer.arm.mismatch
    assert answer.arm.mismatches > 0
    assert mismatch is not None
    assert (mismatch.writer, mismatch.reader, mismatch.buffer) == edge
    assert mismatch.held == "poison"
    assert mismatch.cured_by
    assert not mismatch.also_serialized


def test_every_data_edge_is_exposed_by_its_delayed_arm(bench: Any) -> None:
    from pdl_stress.cuda.exposure import stamped

    for name in {edge.writer for edge in bench.chain.data_edges}:
        ((_, changes),) = delayed_variants(bench.chain, bench.chain[name], 10.0)
        found = stamped(bench, bench.chain.varied(changes))
        for (writer, reader, _), share in found.exposed.items():
            if writer == name:
                assert share == 1.0, (writer, reader)
    deployed = stamped(bench, bench.chain)
    # Triggers sit after the stores, so as deployed nothing that skips a step can be exposed.
    assert deployed.exposed["projection", "kv_norm", "qkv"] == 0.0
    ((_, changes),) = delayed_variants(bench.chain, bench.chain["kv_norm"], 10.0)
    around = stamped(bench, bench.chain.varied(changes), back_to_back=True)
    assert around.overlap["kv_norm", "producer"] > 0.5, "the next replay starts while this one still runs"


@op(reads=("input",), writes=("out",))
def torch_double(input: Any, out: Any, *, pdl: bool) -> None:
    import torch

    torch.mul(input, 2, out=out)


def test_an_op_without_pdl_is_inconclusive() -> None:
    """Launched without the attribute: clean, but with full edges nothing was tested."""
    chain = Chain("double")
    hidden, out = chain.input("hidden", (4, 64), "bfloat16"), chain.buffer("out", (4, 64), "bfloat16")
    chain.step("double", torch_double, input=hidden, out=out)
    verdict = stress(chain, machine="cuda", replays=1000)
    assert verdict.case.mismatches == 0
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any("is full" in reason for reason in verdict.case.reasons)


def test_integer_inputs_are_refused() -> None:
    chain = Chain("ints")
    hidden, out = chain.input("hidden", (4, 64), "int32"), chain.buffer("out", (4, 64), "int32")
    chain.step("double", torch_double, input=hidden, out=out)
    verdict = stress(chain, machine="cuda", replays=1000)
    assert verdict.outcome is Outcome.ERROR
    assert any("int32" in text for text in verdict.case.errors)
    assert not isinstance(verdict, UsageError)


def test_a_chain_that_ends_in_place_has_no_ring() -> None:
    """Its last step updates a buffer that is read too: nothing is output only, and back to back must still count."""
    from pdl_stress.catalog import ops

    chain = Chain("in-place")
    hidden, x = chain.input("hidden", (2, 512), "bfloat16"), chain.buffer("x", (2, 512), "bfloat16")
    gain = chain.constant("gain", (512,), "bfloat16")
    chain.step("norm", ops.rmsnorm, input=hidden, weight=gain, out=x)
    chain.step("again", ops.rmsnorm, input=x, weight=gain, out=x)
    from pdl_stress.cuda.bench import Bench

    bench = Bench(chain)
    for back_to_back in (False, True):
        counts = bench.run(bench.capture(chain, back_to_back=back_to_back), 512)
        assert (counts.replays, counts.mismatches, counts.agree) == (512, 0, True)


def test_a_counted_mismatch_outlives_a_failed_explanation(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdl_stress.cuda import executor as module

    def broken(*_: Any) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(module, "diagnose", broken)
    chain = catalog.load(CHAIN)
    job = ArmJob(CHAIN, chain.fingerprint, "planted", 512, planted=plant(chain, "F02@q_norm"))
    arm = module.Executor(lambda name: chain).execute(job).arm
    assert arm.mismatches == 512
    assert "no idea" in arm.note
