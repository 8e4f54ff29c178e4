"""What the census says of a kernel node, and the controls that follow, on machine code compiled here. The driver's part
(which nodes a graph has, and what they launch) is made up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fusions.ops.native import Behaviour
from fusions.ops.native import code as native
from pdl_stress import Chain, PdlStressError
from pdl_stress.cuda import census as module
from pdl_stress.cuda.nodes import Kernel
from pdl_stress.faults import RELOADED
from pdl_stress.plan import Plan, control_jobs, uncontrolled
from pdl_stress.sass.cubin import BadCubin
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


@pytest.mark.parametrize("error", [PdlStressError("cuobjdump was not found"), BadCubin("no section of that name")])
def test_machine_code_that_cannot_be_read_is_not_found_and_breaks_nothing(error: Exception, node: Any) -> None:
    """A step without controls costs the PASS; an exception would cost the whole case."""

    class Broken(CodeFinder):
        def find(self, symbol: str, arch: str) -> Any:
            raise error

    found = module.describe(node(), ["programmatic"], Broken(), "projection")
    assert (found.waits, found.triggers, found.code) == (None, None, str(error))
    assert found.incoming == ["programmatic"]


def test_machine_code_that_is_no_cubin_is_not_found_either(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sites are counted in may be damaged, although its symbol was found."""
    given = finder("sm_90a").find("tinygemm2", "sm_90")
    found = module.describe(node(), [], SimpleNamespace(find=lambda *_: replace(given, code=given.code[:200])), "s")  # type: ignore[arg-type]
    assert (found.waits, found.triggers) == (None, None)
    assert found.code


def test_without_a_finder_no_machine_code_is_looked_for(node: Any) -> None:
    """A kernel behind full edges may be in a library of a gigabyte."""
    found = module.describe(node(), ["full"], None, "projection")
    assert (found.name, found.step, found.grid, found.incoming) == ("tinygemm2", "projection", [112, 1, 1], ["full"])
    assert (found.waits, found.triggers, found.code) == (None, None, "not looked for")


def test_another_node_is_only_named(node: Any) -> None:
    found = module.describe(node("memset"), ["full"], finder("sm_90a"), "projection")
    assert (found.kind, found.step, found.incoming) == ("memset", "projection", ["full"])
    assert (found.name, found.waits, found.code) == ("", None, "")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("wait", "sites"), [("loaders", 1), ("all", 3), ("never", 0)])
def test_controls_follow_from_the_machine_code(arch: str, wait: str, sites: int, node: Any, library: Any) -> None:
    """One wait: loaded again, and taken away. Three: each alone as well. None: no control, and the step is named."""
    chain: Chain = library("csa2-fused-m1", only=("projection",))
    described = module.describe(node(arch=arch), ["programmatic"], finder(arch, wait), "projection")
    plan = Plan(faults=("F02@projection",), delays_us=(10.0,))
    jobs = control_jobs(chain, plan, [described])
    variants = [job.control.variant for job in jobs]
    singles = [f"wait {site} removed" for site in range(sites)] if sites > 1 else []
    assert variants == ([RELOADED, "never waits", *singles] if sites else [])
    assert [job.expected for job in jobs] == (["clean", "caught", *["unpromised"] * len(singles)] if sites else [])
    assert bool(uncontrolled(chain, [described])) is (sites == 0)
