"""Kernel names as in their sources, from mangled names as compilers make them; nodes of a graph. No driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdl_stress.cuda import nodes as module
from pdl_stress.cuda.nodes import _without_parameters, demangled

REAL = {
    # plain C names: our own kernels, NVRTC's and Triton's
    "rmsnorm": "rmsnorm",
    "pdl_stress_source": "pdl_stress_source",
    "triton_poi_fused_add_0": "triton_poi_fused_add_0",
    "__cudnn$kernel": "__cudnn$kernel",
    "": "",
    # functions, members of namespaces, anonymous ones
    "_Z6kernelPfi": "kernel",
    "_Z4initv": "init",
    "_ZN10flashinfer4norm9kernelOneEPKfS2_j": "flashinfer::norm::kernelOne",
    "_ZN12_GLOBAL__N_16kernelIiEEvT_": "(anonymous namespace)::kernel<int>",
    "_ZN2at6native12_GLOBAL__N_16kernelEPf": "at::native::(anonymous namespace)::kernel",
    # templates, whose arguments hold brackets of every kind
    "_Z6kernelIiEvT_": "kernel<int>",
    "_Z6kernelILi128ELb1EEvPf": "kernel<128, true>",
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_": (
        "at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
    ),
    "_Z6kernelIPFviEEvT_": "kernel<void (*)(int)>",
    "_Z6kernelIXadL_Z4funciEEEvv": "kernel<&(func(int))>",
    # parameters that are functions, arrays, templates themselves
    "_Z6kernelPFviE": "kernel",
    "_Z6kernelPFPFviEfE": "kernel",
    "_Z6kernelRA4_i": "kernel",
    "_Z6kernelSt4pairIiS_IifEE": "kernel",
    # operators and call operators
    "_ZN1AclEi": "A::operator()",
    "_ZN1AlsEi": "A::operator<<",
    "_ZN1ArsEi": "A::operator>>",
    "_ZltRK1AS1_": "operator<",
    "_ZgtRK1AS1_": "operator>",
    "_ZN1AptEv": "A::operator->",
    # not kernels, so nothing is cut: what comes behind the parameters belongs to the name
    "_ZNK1A3getEv": "A::get() const",
    "_ZN1A1fEi.constprop.0": "A::f(int) [clone .constprop.0]",
    # not names at all
    "_Z": "_Z",
    "_ZN": "_ZN",
    "_Znonsense": "_Znonsense",
    "not a name": "not a name",
}


@pytest.mark.parametrize("symbol", REAL)
def test_a_kernel_is_called_as_in_its_source_without_its_parameters(symbol: str) -> None:
    assert demangled(symbol) == REAL[symbol]


def test_a_kernel_of_a_lambda_keeps_the_lambda() -> None:
    """``at::native::gpu_kernel_impl`` and its like: the lambda's own parameters stand in the template's brackets."""
    symbol = "_Z6kernelIZ4mainEUliE_EvT_"
    assert demangled(symbol) == "kernel<main::{lambda(int)#1}>"


def test_where_torch_cannot_demangle_the_mangled_name_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delattr(torch._C, "_demangle")
    module.demangled.cache_clear()
    try:
        assert demangled("_Z6kernelPfi") == "_Z6kernelPfi"
    finally:
        module.demangled.cache_clear()


@given(symbol=st.text(max_size=20) | st.text("_ZNIEvi0123456789LSKRP", max_size=25).map(lambda text: f"_Z{text}"))
def test_no_symbol_is_too_strange(symbol: str) -> None:
    """Symbols come from binaries of others."""
    assert isinstance(demangled(symbol), str)


@given(name=st.text(alphabet="f<>(){}:,& *~-0", max_size=30) | st.text(max_size=30))
@example("operator()(int)")
@example("f(x->y)")
@example(")")
@example("(")
@example("()")
def test_what_is_cut_is_a_group_of_brackets_at_the_end(name: str) -> None:
    kept = _without_parameters(name)
    assert name.startswith(kept)
    cut = name[len(kept) :]
    if cut:
        assert (cut[0], cut[-1]) == ("(", ")")
        assert cut.count("(") + cut.count("<") == cut.count(")") + cut.count(">")


WORDS = st.sampled_from(["f", "kernel", "at::native::g", "(anonymous namespace)::k", "operator()"])
TYPES = st.recursive(
    st.sampled_from(["int", "float*", "void (*)(int)", "4", "A::{lambda(int)#1}", ""]),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda made: f"t<{', '.join(made)}>")
        | st.lists(inner, max_size=2).map(lambda made: f"void ({', '.join(made)})")
    ),
    max_leaves=5,
)


@given(word=WORDS, template=st.none() | TYPES, parameters=TYPES)
def test_of_a_function_exactly_its_parameter_list_is_cut(word: str, template: str | None, parameters: str) -> None:
    name = word if template is None else f"{word}<{template}>"
    assert _without_parameters(f"{name}({parameters})") == name


# --- nodes of a graph ----------------------------------------------------------------------------------------------


class Graph:
    """Nodes by number: their kinds, the edges between them, and what child graphs hold."""

    def __init__(self, kinds: dict[int, str], edges: list[tuple[int, int, str]], children: dict[int, Graph]) -> None:
        self.kinds, self.edges, self.children = kinds, edges, children


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    inner = Graph({7: "kernel", 8: "kernel"}, [(7, 8, "programmatic")], {})
    middle = Graph({5: "memset", 6: "child graph"}, [(5, 6, "full")], {6: inner})
    outer = Graph(
        {1: "kernel", 2: "child graph", 3: "kernel", 4: "memcpy"},
        [(1, 2, "full"), (2, 3, "full"), (1, 3, "programmatic"), (3, 4, "full")],
        {2: middle},
    )
    graphs = (outer, middle, inner)
    kinds = {node: kind for one in graphs for node, kind in one.kinds.items()}
    children = {node: child for one in graphs for node, child in one.children.items()}
    monkeypatch.setattr(module, "nodes", lambda one: list(one.kinds))
    monkeypatch.setattr(module, "kind", kinds.__getitem__)
    monkeypatch.setattr(module, "child", children.__getitem__)
    monkeypatch.setattr(
        module, "edges", lambda one: [SimpleNamespace(source=a, target=b, kind=kind) for a, b, kind in one.edges]
    )
    return outer


def test_edges_are_found_by_the_node_that_they_lead_to(graph: Any) -> None:
    found = {node: [edge.kind for edge in edges] for node, edges in module.incoming(graph).items()}
    assert found == {2: ["full"], 3: ["full", "programmatic"], 4: ["full"]}


def test_a_walk_meets_every_node_and_those_of_child_graphs_behind_the_one_that_holds_them(graph: Any) -> None:
    assert list(module.walk(graph)) == [
        ("", 1, []),
        ("", 2, ["full"]),
        ("1", 5, []),
        ("1", 6, ["full"]),
        ("1/1", 7, []),
        ("1/1", 8, ["programmatic"]),
        ("", 3, ["full", "programmatic"]),
        ("", 4, ["full"]),
    ]


def test_a_node_that_is_no_kernel_launches_none(graph: Any) -> None:
    assert module.kernel_of(4) is None
    assert module.kernel_of(5) is None
