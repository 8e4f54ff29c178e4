"""Kernels that cannot be rebuilt: census, controls from their machine code, stand-ins, neighbours, profiler."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # spawned workers import the kernels by name too

from library_kernels import library_chain, library_op, load

from pdl_stress import Chain, Outcome, catalog
from pdl_stress.campaign import run_on_gpu
from pdl_stress.chain import Patch
from pdl_stress.cuda.worker import Worker
from pdl_stress.faults import RELOADED
from pdl_stress.jobs import NEIGHBOURS, CensusJob, delayed_variants
from pdl_stress.plan import Plan
from pdl_stress.results import CaseResult

pytestmark = pytest.mark.gpu

PLAN = Plan(replays=1024, delays_us=(10.0,))


def bench_of(chain: Chain) -> Any:
    from pdl_stress.cuda.bench import Bench

    return Bench(chain, time_limit=20.0)


def case_of(chain: Chain, plan: Plan = PLAN) -> CaseResult:
    from pdl_stress.cuda.executor import Executor

    (case,) = run_on_gpu([chain], plan, Executor(lambda name: chain, time_limit=20.0))
    return case


@pytest.fixture(scope="module")
def bench() -> Any:
    return bench_of(load("waits"))


# --- the whole campaign ---------------------------------------------------------------------------------------------


def test_kernels_that_cannot_be_rebuilt_pass_with_controls_from_their_machine_code() -> None:
    case = case_of(load("waits"))
    assert case.verdict is Outcome.PASS, case.reasons
    caught = {(c.writer, c.reader) for c in case.controls if c.expected == "caught" and c.verdict == "caught"}
    assert caught == {(e.writer, e.reader) for e in case.data_edges}
    assert all(c.verdict == "clean" for c in case.controls if c.variant == RELOADED)
    assert {c.variant for c in case.controls} >= {RELOADED, "never waits"}
    assert case.exposure.startswith("profiler")
    assert any("1 of 1 waits removed from given cubin" in line for line in case.sass.values())
    assert case.kernels == ["pdl_stress_source", "waits"]


@pytest.mark.parametrize("name", ["waits+returns", "waits_twice"])
def test_further_kernels_pass(name: str) -> None:
    """An op that returns its output; a kernel with two waits, of which either may be missing."""
    case = case_of(load(name))
    assert case.verdict is Outcome.PASS, case.reasons
    single = [c for c in case.controls if c.variant in ("wait 0 removed", "wait 1 removed")]
    assert len(single) == (2 if name == "waits_twice" else 0)
    assert all(c.expected == "unpromised" and not c.kills for c in single), "the other wait still orders the read"


def test_a_second_verdict_after_profiling_in_the_same_process_is_refused() -> None:
    assert case_of(load("waits")).verdict is Outcome.PASS
    again = case_of(load("waits"))
    assert again.verdict is Outcome.INCONCLUSIVE
    assert "has profiled in this process" in again.reasons[0]


def test_a_kernel_that_never_waits_fails_in_its_early_release_arm() -> None:
    case = case_of(load("never"))
    assert case.verdict is Outcome.FAIL
    assert any("the contract says that it waits" in reason for reason in case.reasons), "and its code says it does not"
    bad = {(arm.name, arm.step) for arm in case.arms if arm.mismatches}
    assert ("early release", "s0") in bad
    (worst,) = [arm.mismatch for arm in case.arms if (arm.name, arm.step) == ("early release", "s0")]
    assert worst is not None
    assert (worst.writer, worst.reader, worst.buffer, worst.held) == ("s0", "s1", "x0", "poison")
    assert "its machine code" not in case.uncontrolled.get("s1", "")
    assert "holds no wait" in case.uncontrolled["s1"]


def test_without_machine_code_there_is_no_control_and_no_pass() -> None:
    chain = library_chain("hidden-code", library_op("waits", known=False), library_op("waits", known=False))
    case = case_of(chain)
    assert case.verdict is Outcome.INCONCLUSIVE
    assert case.mismatches == 0
    assert set(case.uncontrolled) == {"s0", "s1"}
    assert any("no control of s0 is possible: no machine code of waits" in reason for reason in case.reasons)


def test_a_memset_between_two_kernels_is_named_and_costs_the_pass() -> None:
    case = case_of(load("waits+memset"))
    assert case.verdict is Outcome.INCONCLUSIVE
    assert [(node.step, node.kind) for node in case.nodes] == [
        ("producer", "kernel"),
        ("s0", "kernel"),
        ("s1", "memset"),
        ("s1", "kernel"),
        ("s2", "kernel"),
    ]
    assert any("graph edge s0->s1 is full" in reason for reason in case.reasons)


@pytest.mark.parametrize("name", ["hangs_on_poison", "faults_on_poison"])
def test_a_mutant_that_hangs_or_faults_costs_its_case_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdl_stress.cuda import worker as module

    monkeypatch.setattr(module, "START_SECONDS", 20.0)
    plan = Plan(replays=1024, delays_us=(10.0,), faults=("F02@s1",))
    with Worker(load, time_limit=2.0) as worker:
        bad, good = run_on_gpu([load(name), load("waits")], plan, worker)
    assert bad.verdict is Outcome.ERROR
    assert bad.mismatches == 0, "the kernel itself is in order"
    assert any("did not finish" in reason for reason in bad.reasons), bad.reasons
    assert good.verdict is Outcome.INCONCLUSIVE, "only one of its edges has controls in this plan"
    assert all(c.verdict in ("caught", "clean") for c in good.controls)


# --- parts ----------------------------------------------------------------------------------------------------------


def test_a_patched_kernel_goes_stale_and_a_reloaded_one_does_not(bench: Any) -> None:
    late = {"s0": {"trigger": "entry", "delay_us": 10.0}}
    for patch, kills in ((Patch(None), 512), (Patch(()), 0)):
        chain = bench.chain.varied({**late, "s1": {"patch": patch}})
        captured = bench.capture(chain)
        assert bench.run(captured, 512).mismatches == kills
        captured.serialize()
        assert bench.run(captured, 512).mismatches == 0, "the same binary with full edges"


def test_the_census_of_any_graph_walks_child_graphs_and_names_what_is_not_a_kernel() -> None:
    import torch
    from library_kernels import clear, module, start

    from pdl_stress.cuda import graphs
    from pdl_stress.cuda.calls import checked
    from pdl_stress.cuda.census import census
    from pdl_stress.sass.finder import CodeFinder

    side, source, out = torch.cuda.Stream(), torch.ones(512, device="cuda"), torch.ones(512, device="cuda")
    with torch.cuda.stream(side):
        start("waits", False, source, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(capture_error_mode="thread_local")
        start("waits", False, source, out)
        start("never", True, out, source)
        clear(out)
        start("waits", True, source, out)
        graph.capture_end()
    finder = CodeFinder()
    finder.add(module())
    found = census(graph.raw_cuda_graph(), finder)
    assert [node.kind for node in found] == ["kernel", "kernel", "memset", "kernel"]
    assert [node.name for node in found if node.kind == "kernel"] == ["waits", "never", "waits"]
    assert [(node.waits, node.triggers) for node in found if node.kind == "kernel"] == [(1, 1), (0, 1), (1, 1)]
    assert [node.incoming for node in found] == [[], ["programmatic"], ["full"], ["full"]]
    assert (found[0].grid, found[0].block) == ([4, 1, 1], [128, 1, 1])
    from cuda.bindings import runtime

    outer = checked(runtime.cudaGraphCreate(0), "cudaGraphCreate")
    checked(runtime.cudaGraphAddChildGraphNode(outer, None, 0, graph.raw_cuda_graph()), "cudaGraphAddChildGraphNode")
    nested = census(outer, finder)
    assert [node.kind for node in nested] == ["child graph", "kernel", "kernel", "memset", "kernel"]
    assert [node.step for node in nested] == ["", *["0"] * 4]
    assert graphs.make_full(graph.raw_cuda_graph(), graphs.edges(graph.raw_cuda_graph())) == 1
    assert {kind for node in census(graph.raw_cuda_graph(), finder) for kind in node.incoming} == {"full"}


@pytest.mark.parametrize("name", ["csa2-fused-m1", "csa2-separate-m8"])
def test_stand_ins_write_the_truth_of_every_step(name: str) -> None:
    """Whatever step is replaced, with the steps between replaced too, and back to back: bitwise the same."""
    from dataclasses import replace

    chain = catalog.load(name)
    for number, step in enumerate(chain.steps):
        if not step.source:
            chain._steps[number - 1] = replace(step, op=replace(step.op, waits=frozenset()))
    bench = bench_of(chain)
    for step in chain.steps:
        for _, changes in delayed_variants(chain, step, 2.0):
            variant = chain.varied(changes)
            for back_to_back in (False, True):
                counts = bench.run(bench.capture(variant, back_to_back=back_to_back), 512)
                assert (counts.mismatches, counts.agree) == (0, True), (step.name, back_to_back)


def test_a_stand_in_can_write_a_part_that_is_no_whole_word() -> None:
    chain = Chain("parts")
    hidden = chain.input("hidden", (4, 9), "float32")
    x, y = chain.buffer("x", (4, 9), "float32"), chain.buffer("y", (4, 9), "float32")

    from library_kernels import start

    from pdl_stress import op

    @op(reads=("a",), writes=("left", "right"), name="split")
    def split(a: Any, left: Any, right: Any, *, pdl: bool) -> None:
        left.copy_(a[:, :5] * 2)
        right.copy_(a[:, 5:] * 3)

    @op(reads=("a",), writes=("out",), name="whole")
    def whole(a: Any, out: Any, *, pdl: bool) -> None:
        start("waits", pdl, a, out)

    chain.step("split", split, a=hidden, left=x[:, :5], right=x[:, 5:])
    chain.step("whole", whole, a=x, out=y)
    bench = bench_of(chain)
    late = chain.varied({"split": {"trigger": "entry", "delay_us": 2.0}})
    counts = bench.run(bench.capture(late), 512)
    assert (counts.mismatches, counts.agree) == (0, True)
    start_of_x, _ = bench.memory.layout["x"]
    table = bench.memory.scatter_table(chain["split"]).cpu()
    assert (table[:, 0] - bench.memory.arena.data_ptr()).min() == start_of_x


@pytest.mark.parametrize("what", NEIGHBOURS)
def test_a_neighbour_runs_beside_the_chain_and_changes_no_bit(bench: Any, what: str) -> None:
    from pdl_stress.cuda import nodes

    captured = bench.capture(bench.chain, neighbour=what)
    symbols = [kernel.symbol for kernel in map(nodes.kernel_of, nodes.nodes(captured.raw)) if kernel]
    mine = "pdl_stress_hold" if "SMs" in what else "pdl_stress_stream"
    assert symbols.count(mine) == bench.unroll
    alone, beside = (bench.run(bench.capture(bench.chain, neighbour=n), 2048) for n in ("", what))
    assert (beside.mismatches, beside.agree) == (0, True)
    assert {len(captured.after(step)) for step, _ in bench.chain.edges} == {bench.unroll}, "it is on no edge under test"
    assert {edge.kind for step, _ in bench.chain.edges for edge in captured.after(step)} == {"programmatic"}
    assert alone.mismatches == 0


def test_the_profiler_and_the_stamps_see_the_same_overlap() -> None:
    from pdl_stress.cuda import exposure

    chain = catalog.load("csa2-fused-m1")
    bench = bench_of(chain)
    for step in chain.steps[:-1]:
        ((_, changes),) = delayed_variants(chain, step, 10.0)
        late = chain.varied(changes)
        stamps, profile = exposure.stamped(bench, late), exposure.profiled(bench, late)
        assert profile.method.startswith("profiler")
        for edge, share in stamps.exposed.items():
            if edge[0] == step.name:
                assert share > 0.9
                assert profile.exposed[edge] > 0.9
        wanted = {edge for edge, share in stamps.overlap.items() if share > 0.9}
        assert {edge for edge, share in profile.overlap.items() if share > 0.5} >= wanted


def test_a_census_of_the_native_chain_finds_what_the_contracts_say() -> None:
    from pdl_stress.cuda.executor import Executor

    chain = catalog.load("csa2-fused-m1")
    nodes = Executor(lambda name: chain).execute(CensusJob(chain.name, chain.fingerprint)).nodes
    assert [node.step for node in nodes] == [step.name for step in chain.steps]
    assert [node.waits for node in nodes] == [None, 1, 1, 1, 1], "the producer has a full edge, and is our own"
    assert [node.incoming for node in nodes] == [["full"], *[["programmatic"]] * 4]
