"""What the census says of a kernel node, and the controls that follow, on machine code compiled here. The driver's part
(which nodes a graph has, and what they launch) is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fusions.ops import Behaviour, native
from pdl_stress import Chain
from pdl_stress.cuda import census as module
from pdl_stress.cuda.nodes import Kernel
from pdl_stress.faults import RELOADED
from pdl_stress.jobs import ControlJob
from pdl_stress.plan import Plan, control_jobs, uncontrolled
from pdl_stress.sass.finder import CodeFinder

ARCHS = ("sm_90a", "sm_100a", "sm_120a")
PARAMS = SimpleNamespace(
    gridDimX=112, gridDimY=1, gridDimZ=1, blockDimX=384, blockDimY=1, blockDimZ=1, sharedMemBytes=197632
)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``node(kind, symbol, arch)``: a made-up node; ``describe`` asks for it."""

    def make(kind: str = "kernel", symbol: str = "tinygemm2", arch: str = "sm_90a") -> object:
        monkeypatch.setattr(module.graph_nodes, "kind", lambda _: kind)
        kernel = Kernel("node", symbol, PARAMS) if kind == "kernel" else None
        monkeypatch.setattr(module.graph_nodes, "kernel_of", lambda _: kernel)
        monkeypatch.setattr(module.graph_nodes, "attributes", lambda _: ["cluster 2x1x1"])
        monkeypatch.setattr(module, "architecture", lambda: arch.removesuffix("a"))
        return "node"

    return make


def finder(arch: str, wait: str = "loaders", kernel: str = "tinygemm2") -> CodeFinder:
    made = CodeFinder()
    made.add(native.cubin(kernel, Behaviour(wait), arch))
    return made


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("wait", "waits"), [("loaders", 1), ("all", 3), ("never", 0)])
def test_a_kernel_node_is_described_from_its_own_machine_code(arch: str, wait: str, waits: int, node: Any) -> None:
    found = module.describe(node(arch=arch), ["programmatic", "full"], finder(arch, wait), "projection")
    assert (found.kind, found.name, found.symbol, found.step) == ("kernel", "tinygemm2", "tinygemm2", "projection")
    assert (found.grid, found.block, found.shared_bytes) == ([112, 1, 1], [384, 1, 1], 197632)
    assert found.incoming == ["full", "programmatic"]
    assert found.attributes == ["cluster 2x1x1"]
    assert (found.waits, found.triggers, found.code) == (waits, 1, "given cubin")


def test_a_kernel_without_machine_code_says_where_it_was_looked_for(node: Any) -> None:
    found = module.describe(node(symbol="unheard_of"), [], finder("sm_90a"))
    assert (found.waits, found.triggers) == (None, None)
    assert found.code.startswith("no machine code of unheard_of for sm_90; looked into")
    other = module.describe(node(arch="sm_100a"), [], finder("sm_90a"))
    assert other.waits is None, "machine code of another GPU is not what runs"


def test_another_node_is_only_named(node: Any) -> None:
    found = module.describe(node("memset"), ["full"], finder("sm_90a"), "projection")
    assert (found.kind, found.step, found.incoming) == ("memset", "projection", ["full"])
    assert (found.name, found.waits, found.code) == ("", None, "")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("wait", "sites"), [("loaders", 1), ("all", 3), ("never", 0)])
def test_controls_follow_from_the_machine_code(arch: str, wait: str, sites: int, node: Any, library: Any) -> None:
    """One wait: taken away, and loaded again. Three: each alone as well. None: no control, and the step is named."""
    chain: Chain = library("csa2-fused-m1", only=("projection",))
    described = module.describe(node(arch=arch), ["programmatic"], finder(arch, wait), "projection")
    plan = Plan(faults=("F02@projection",), delays_us=(10.0,))
    jobs = [job for job in control_jobs(chain, plan, [described]) if isinstance(job, ControlJob)]
    variants = [job.control.variant for job in jobs]
    singles = [f"wait {site} removed" for site in range(sites)] if sites > 1 else []
    assert variants == (["never waits", RELOADED, *singles] if sites else [])
    assert [job.expected for job in jobs] == (["caught", "clean", *["unpromised"] * len(singles)] if sites else [])
    assert bool(uncontrolled(chain, [described])) is (sites == 0)
