"""Chains: what is refused while one is built, which edges it has, and what a variant of it keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdl_stress import Chain, KernelContract, Op, Trigger, UnsupportedVariant, UsageError, Wait, catalog
from pdl_stress.buffers import DTYPES, Role, box_within, boxes_overlap, covered
from pdl_stress.chain import LATE_WEIGHT, PRODUCER, Patch, source_step
from pdl_stress.faults import plan_controls
from pdl_stress.jobs import plan_arms


def kernel(reads: tuple[str, ...] = ("a",), writes: tuple[str, ...] = ("o",), *, fixed: bool = False) -> Op:
    contract = KernelContract(reads, writes)

    def run(**_: Any) -> None:
        raise AssertionError("no kernel runs in these tests")

    return Op("kernel", contract, run, contract, waits=frozenset() if fixed else frozenset(Wait))


def pipeline() -> Chain:
    """input -> first -> x -> second -> y, and third reads the halves of both."""
    chain = Chain("pipeline")
    hidden = chain.input("hidden", (2, 8), "bfloat16")
    x, y, z = (chain.buffer(name, (2, 8), "bfloat16") for name in "xyz")
    chain.step("first", kernel(), a=hidden, o=x)
    chain.step("second", kernel(), a=x[:, :4], o=y)
    chain.step("third", kernel(("a", "b")), a=x[:, 4:], b=y, o=z)
    return chain


# --- buffers and views ----------------------------------------------------------------------------------------------


def test_dtypes_may_be_torch_dtypes() -> None:
    import torch

    chain = Chain("c")
    assert chain.input("a", (1,), torch.bfloat16).dtype == "bfloat16"
    assert chain.buffer("b", torch.Size([2, 3]), "torch.float32").dtype == "float32"
    assert chain.buffers["b"].shape == (2, 3)


@pytest.mark.parametrize(
    "dtype", ["f", "float", "bf16", "complex64", "torch.qint8", "", "Float32", None, float, object()]
)
def test_a_dtype_that_torch_does_not_have_is_refused_where_it_is_written(dtype: Any) -> None:
    for make in ("input", "constant", "buffer"):
        with pytest.raises(UsageError, match=r"buffer 'x': dtype .*; expected one of bool, uint8, .*bfloat16, float32"):
            getattr(Chain("c"), make)("x", (4,), dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_name_is_one_of_torch(name: str) -> None:
    import torch

    assert isinstance(getattr(torch, name), torch.dtype)
    assert Chain("c").buffer("x", (4,), getattr(torch, name)).dtype == name


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (-1,), (-1, -1), 5, ("q",), (1.5,), None])
def test_bad_shapes_are_refused(shape: Any) -> None:
    with pytest.raises(UsageError, match="shape"):
        Chain("c").buffer("x", shape, "float32")


@pytest.mark.parametrize("name", ["", "1x", "a b", "[red]", "a/b", "ü", "a\n"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="name"):
        Chain(name)
    with pytest.raises(UsageError, match="name"):
        Chain("c").input(name, (1,), "float32")
    chain = pipeline()
    with pytest.raises(UsageError, match="name"):
        chain.step(name, kernel(), a=chain.buffers["x"], o=chain.buffers["y"])


def test_a_buffer_name_is_taken_once() -> None:
    chain = Chain("c")
    chain.input("x", (1,), "float32")
    with pytest.raises(UsageError, match="'x' exists already"):
        chain.constant("x", (1,), "float32")


def test_views_are_boxes_and_print_as_slices() -> None:
    qkv = Chain("c").buffer("qkv", (2, 8), "bfloat16")
    assert str(qkv.whole) == "qkv"
    assert str(qkv[:, :4]) == "qkv[:, 0:4]"
    assert str(qkv[1:]) == "qkv[1:2, :]"
    assert qkv[:, -3:].box == ((0, 2), (5, 8))
    assert qkv[:, -3:].shape == (2, 3)
    assert qkv[:, -3:].slices == (slice(0, 2), slice(5, 8))
    assert qkv[0:100].box == qkv.whole.box


@pytest.mark.parametrize("index", [0, slice(None, None, 2), slice(3, 3), slice(2, 1), "x", (slice(None),) * 3])
def test_other_indices_are_refused(index: Any) -> None:
    buffer = Chain("c").buffer("x", (4, 4), "float32")
    with pytest.raises(UsageError, match="buffer 'x'"):
        buffer[index]


SPANS = st.tuples(st.integers(0, 6), st.integers(1, 6)).map(lambda span: (span[0], span[0] + span[1]))
BOXES = st.tuples(SPANS, SPANS)


@given(a=BOXES, b=BOXES)
def test_boxes_are_sets_of_elements(a: Any, b: Any) -> None:
    def elements(box: Any) -> set[tuple[int, int]]:
        return {(i, j) for i in range(*box[0]) for j in range(*box[1])}

    assert boxes_overlap(a, b) == bool(elements(a) & elements(b))
    assert box_within(a, b) == (elements(a) <= elements(b))


@given(box=BOXES, by=st.lists(BOXES, max_size=4))
def test_covered_means_that_no_element_is_left(box: Any, by: list[Any]) -> None:
    def elements(box: Any) -> set[tuple[int, int]]:
        return {(i, j) for i in range(*box[0]) for j in range(*box[1])}

    assert covered(box, by) == (elements(box) <= set().union(*map(elements, by)))


def test_views_of_different_buffers_never_overlap() -> None:
    chain = Chain("c")
    x, y = chain.buffer("x", (4,), "float32"), chain.buffer("y", (4,), "float32")
    assert x.whole.overlaps(x[1:2])
    assert not x.whole.overlaps(y.whole)


# --- steps ----------------------------------------------------------------------------------------------------------


def test_operands_must_be_those_of_the_contract() -> None:
    chain = pipeline()
    x, y = chain.buffers["x"], chain.buffers["y"]
    with pytest.raises(UsageError, match=r"\['a'\] given; the contract of kernel names \['a', 'o'\]"):
        chain.step("s", kernel(), a=x)
    with pytest.raises(UsageError, match=r"\['a', 'extra', 'o'\] given"):
        chain.step("s", kernel(), a=x, o=y, extra=x)


@pytest.mark.parametrize("thing", [5, None, "x"])
def test_operands_must_be_buffers(thing: Any) -> None:
    chain = pipeline()
    with pytest.raises(UsageError, match="'a' is no buffer or view of chain 'pipeline'"):
        chain.step("s", kernel(), a=thing, o=chain.buffers["y"])


def test_a_buffer_of_another_chain_is_foreign_even_under_the_same_name() -> None:
    chain, other = pipeline(), pipeline()
    with pytest.raises(UsageError, match="no buffer or view of chain"):
        chain.step("s", kernel(), a=other.buffers["x"], o=chain.buffers["y"])


def test_step_names_are_unique_and_those_of_the_harness_are_reserved() -> None:
    chain = pipeline()
    for name, why in (("first", "the name is taken"), (PRODUCER, "is reserved"), (LATE_WEIGHT, "is reserved")):
        with pytest.raises(UsageError, match=why):
            chain.step(name, kernel(), a=chain.buffers["x"], o=chain.buffers["y"])


def test_a_callable_is_no_op() -> None:
    chain = pipeline()
    with pytest.raises(UsageError, match="is no op; declare its contract"):
        chain.step("s", print, a=chain.buffers["x"], o=chain.buffers["y"])  # type: ignore[arg-type]


def test_a_read_needs_an_earlier_write_of_that_part() -> None:
    chain = Chain("c")
    hidden, x, y = (
        chain.input("h", (4,), "float32"),
        chain.buffer("x", (4,), "float32"),
        chain.buffer("y", (4,), "float32"),
    )
    with pytest.raises(UsageError, match="reads x, which no earlier step has written"):
        chain.step("s", kernel(), a=x, o=y)
    chain.step("half", kernel(), a=hidden, o=x[:2])
    for part in (x[2:], x[1:3], x):
        with pytest.raises(UsageError, match=r"reads x.*, not all of which earlier steps have written"):
            chain.step("s", kernel(), a=part, o=y)
    chain.step("s", kernel(), a=x[:2], o=y[:2])
    chain.step("other_half", kernel(), a=hidden, o=x[2:])
    chain.step("t", kernel(), a=x[1:3], o=y[2:])  # two steps wrote it together


def test_what_another_buffer_holds_covers_nothing() -> None:
    chain = Chain("c")
    hidden, x, y = (chain.input("h", (4,), "int8"), *(chain.buffer(n, (4,), "int8") for n in "xy"))
    chain.step("first", kernel(), a=hidden, o=x)
    with pytest.raises(UsageError, match="reads y, which no earlier step has written"):
        chain.step("s", kernel(("a", "b")), a=x, b=y, o=y)


@pytest.mark.parametrize("role", ["input", "constant"])
def test_inputs_and_constants_are_not_written(role: str) -> None:
    chain = pipeline()
    target = getattr(chain, role)("target", (4,), "float32")
    with pytest.raises(UsageError, match=f"of role {role}"):
        chain.step("s", kernel(), a=chain.buffers["x"], o=target)


def test_a_refused_step_leaves_the_chain_as_it_was() -> None:
    chain = pipeline()
    before = [step.name for step in chain.steps]
    with pytest.raises(UsageError):
        chain.step("s", kernel(), a=chain.buffers["x"], o=chain.buffers["hidden"])
    assert [step.name for step in chain.steps] == before


# --- reading --------------------------------------------------------------------------------------------------------


def test_the_producer_comes_first_and_writes_every_input() -> None:
    chain = pipeline()
    producer = chain.steps[0]
    assert (producer.name, producer.source, producer.pdl) == (PRODUCER, True, True)
    assert [view.buffer.name for _, view in producer.writes()] == ["hidden"]
    assert producer.contract.trigger is Trigger.ENTRY
    assert producer.contract.wait is Wait.ALL
    assert [b.role for b in chain.buffers.values()] == [Role.INPUT, *[Role.INTERMEDIATE] * 3]


def test_graph_edges_are_neighbours_and_data_edges_follow_memory() -> None:
    chain = pipeline()
    assert chain.edges == [("producer", "first"), ("first", "second"), ("second", "third")]
    assert [str(edge) for edge in chain.data_edges] == [
        "producer -> first through hidden",
        "first -> second through x",
        "first -> third through x (skips second)",
        "second -> third through y",
    ]


@pytest.mark.parametrize(
    ("plain", "edges", "data_edges"),
    [
        ("first", ["first-second", "second-third"], ["first-second", "first-third", "second-third"]),
        ("second", ["producer-first", "second-third"], ["producer-first", "second-third"]),
        ("third", ["producer-first", "first-second"], ["producer-first", "first-second"]),
    ],
)
def test_nothing_is_under_test_behind_the_full_edge_to_a_step_without_pdl(
    plain: str, edges: list[str], data_edges: list[str]
) -> None:
    chain = pipeline()
    chain._steps = [replace(step, pdl=step.name != plain) for step in chain._steps]
    assert ["-".join(edge) for edge in chain.edges] == edges
    assert [f"{edge.writer}-{edge.reader}" for edge in chain.data_edges] == data_edges


def test_data_edges_of_the_shipped_chains() -> None:
    def found(name: str) -> set[tuple[str, str, tuple[str, ...]]]:
        return {(edge.writer, edge.reader, edge.between) for edge in catalog.load(name).data_edges}

    assert found("csa2-fused-m1") == {
        ("producer", "input_norm", ()),
        ("input_norm", "projection", ()),
        ("projection", "q_norm", ()),
        ("projection", "kv_norm", ("q_norm",)),
    }
    assert found("csa2-separate-m8") == {
        ("producer", "input_norm", ()),
        ("input_norm", "q_projection", ()),
        ("input_norm", "kv_projection", ("q_projection",)),
        ("q_projection", "q_norm", ("kv_projection",)),
        ("kv_projection", "kv_norm", ("q_norm",)),
    }


def test_a_later_writer_hides_an_earlier_one_only_where_it_covers_the_read() -> None:
    chain = Chain("c")
    hidden, x, y = (
        chain.input("h", (4,), "float32"),
        chain.buffer("x", (4,), "float32"),
        chain.buffer("y", (4,), "float32"),
    )
    chain.step("whole", kernel(), a=hidden, o=x)
    chain.step("half", kernel(), a=hidden, o=x[:2])
    chain.step("reads_half", kernel(), a=x[:2], o=y[:2])
    chain.step("reads_all", kernel(), a=x, o=y[2:])
    edges = {(edge.writer, edge.reader) for edge in chain.data_edges if edge.buffer == "x"}
    assert edges == {("half", "reads_half"), ("half", "reads_all"), ("whole", "reads_all")}


def test_check_wants_an_input_a_step_and_no_idle_buffer() -> None:
    pipeline().check()
    with pytest.raises(UsageError, match="at least one input and one step"):
        Chain("c").check()
    chain = Chain("c")
    chain.input("h", (4,), "float32")
    with pytest.raises(UsageError, match="at least one input and one step"):
        chain.check()
    chain = pipeline()
    chain.constant("idle", (4,), "float32")
    with pytest.raises(UsageError, match=r"no step uses \['idle'\]"):
        chain.check()


def test_check_refuses_an_input_that_only_the_producer_touches() -> None:
    """Otherwise a chain of constants has no data edge at all, and would be ordered for want of anything to order."""
    chain = Chain("c")
    chain.input("h", (4,), "float32")
    weight, x = chain.constant("w", (4,), "float32"), chain.buffer("x", (4,), "float32")
    chain.step("s", kernel(), a=weight, o=x)
    with pytest.raises(UsageError, match=r"no step uses \['h'\]"):
        chain.check()


@pytest.mark.parametrize("count", [0, -1])
def test_check_refuses_a_step_without_a_cta(count: int) -> None:
    """The model would find every order in a grid that does nothing."""
    chain = Chain("c")
    none = replace(kernel(), ctas=lambda shapes: count)
    chain.step("s", none, a=chain.input("h", (4,), "float32"), o=chain.buffer("x", (4,), "float32"))
    with pytest.raises(UsageError, match=f"step 's': kernel says it runs {count} CTAs; expected at least one"):
        chain.check()
    with pytest.raises(UsageError, match="expected at least one"):
        _ = chain["s"].ctas


def test_an_unknown_step_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no step 'fourth'; its steps are \['producer', 'first', 'second', 'third'\]"):
        pipeline()["fourth"]


# --- memory that is written again ---------------------------------------------------------------------------------


def again(**operands: str) -> Chain:
    """s1 writes x and s2 reads it; then ``operands`` of one more step, as text."""
    chain = Chain("again")
    hidden = chain.input("h", (4,), "float32")
    x, y, z = (chain.buffer(name, (4,), "float32") for name in "xyz")
    chain.step("s1", kernel(), a=hidden, o=x)
    chain.step("s2", kernel(), a=x, o=y)
    named = {"h": hidden, "x": x, "y": y, "z": z, "x[:2]": x[:2], "y[2:]": y[2:]}
    chain.step("s3", kernel(tuple(k for k in operands if k != "o")), **{k: named[v] for k, v in operands.items()})
    return chain


@pytest.mark.parametrize(
    ("operands", "reuses"),
    [
        ({"a": "h", "o": "z"}, []),
        ({"a": "h", "o": "x"}, ["s3 writes x, which s1 wrote", "s3 writes x, which s2 reads"]),
        ({"a": "h", "o": "x[:2]"}, ["s3 writes x[0:2], which s1 wrote", "s3 writes x[0:2], which s2 reads"]),
        ({"a": "h", "o": "y"}, ["s3 writes y, which s2 wrote"]),
        ({"a": "y", "o": "y"}, []),
        ({"a": "h", "b": "y[2:]", "o": "y[2:]"}, []),
        ({"a": "x", "o": "x"}, ["s3 writes x, which s2 reads"]),
    ],
)
def test_buffers_that_are_written_again_are_listed(operands: dict[str, str], reuses: list[str]) -> None:
    """An update in place of what a step itself reads is ordered by that data edge."""
    assert again(**operands).reuses == reuses


def halves(*read: str) -> Chain:
    """low and high write the halves of x; then last reads ``read`` of it and writes all of x."""
    chain = Chain("halves")
    hidden, x, y = (
        chain.input("h", (4,), "float32"),
        chain.buffer("x", (4,), "float32"),
        chain.buffer("y", (4,), "float32"),
    )
    chain.step("low", kernel(), a=hidden, o=x[:2])
    chain.step("high", kernel(), a=hidden, o=x[2:])
    chain.step("other", kernel(), a=hidden, o=y)
    views = {"low": x[:2], "high": x[2:], "all": x, "y": y}
    chain.step("last", kernel(read), **{name: views[name] for name in read}, o=x)
    return chain


@pytest.mark.parametrize(
    ("read", "overwritten"),
    [
        (("all",), []),
        (("low", "high"), []),
        (("low",), ["high"]),
        (("high",), ["low"]),
        (("y",), ["low", "high"]),
        (("y", "low"), ["high"]),
    ],
)
def test_a_read_orders_a_write_behind_the_steps_whose_data_it_reads_and_no_others(
    read: tuple[str, ...], overwritten: list[str]
) -> None:
    """That it reads another part of what it overwrites is no data edge to this one."""
    assert halves(*read).reuses == [f"last writes x, which {name} wrote" for name in overwritten]


def test_each_view_that_a_step_wrote_must_be_read_to_be_ordered() -> None:
    chain = Chain("c")
    hidden, x = chain.input("h", (4,), "float32"), chain.buffer("x", (4,), "float32")
    contract = KernelContract(("a",), ("o", "p"))
    both = Op("both", contract, lambda **_: None, contract)
    chain.step("both", both, a=hidden, o=x[:2], p=x[2:])
    chain.step("last", kernel(), a=x[:2], o=x)
    assert chain.reuses == ["last writes x, which both wrote"]


@pytest.mark.parametrize("name", catalog.SHIPPED)
def test_no_shipped_chain_writes_a_buffer_again(name: str) -> None:
    assert catalog.load(name).reuses == []


def test_halves_of_one_buffer_are_no_reuse() -> None:
    chain = Chain("c")
    hidden, x = chain.input("h", (4,), "float32"), chain.buffer("x", (4,), "float32")
    chain.step("left", kernel(), a=hidden, o=x[:2])
    chain.step("right", kernel(), a=hidden, o=x[2:])
    assert chain.reuses == []


# --- which chain it is ---------------------------------------------------------------------------------------------


def marked(
    name: str = "c", *, op: Op | None = None, dtype: str = "float32", size: int = 4, eps: float = 1e-5,
    pdl: bool = True, part: slice = slice(0, 2), step: str = "s", role: str = "constant", extra: bool = False,
) -> Chain:  # fmt: skip
    chain = Chain(name)
    weight = getattr(chain, role)("w", (size,), dtype)
    hidden, x = chain.input("h", (4,), "float32"), chain.buffer("x", (4,), "float32")
    params = {"eps": eps, "mode": "fast"}
    chain.step(step, op or kernel(("a", "w")), pdl=pdl, params=params, a=hidden[part], w=weight, o=x)
    if extra:
        chain.step("t", kernel(), a=x, o=chain.buffer("y", (4,), "float32"))
    return chain


def test_the_same_chain_built_twice_has_one_fingerprint() -> None:
    assert marked().fingerprint == marked().fingerprint
    assert len(marked().fingerprint) == 16
    shuffled = Chain("c")
    weight = shuffled.constant("w", (4,), "float32")
    hidden, x = shuffled.input("h", (4,), "float32"), shuffled.buffer("x", (4,), "float32")
    params = {"mode": "fast", "eps": 1e-5}
    shuffled.step("s", kernel(("a", "w")), params=params, o=x, w=weight, a=hidden[0:2])
    assert shuffled.fingerprint == marked().fingerprint, "keyword arguments have no order"


def test_a_parameter_without_a_text_of_its_own_is_the_same_everywhere() -> None:
    """The default text of an object or a function holds its address, which no two processes share."""

    def with_parameter(value: Any) -> str:
        chain = Chain("c")
        hidden, x = chain.input("h", (4,), "float32"), chain.buffer("x", (4,), "float32")
        chain.step("s", kernel(), params={"config": value}, a=hidden, o=x)
        return chain.fingerprint

    class Config: ...

    one, two = Config(), Config()
    assert repr(one) != repr(two)
    assert with_parameter(one) == with_parameter(two) != with_parameter(object())
    assert with_parameter(0x10) != with_parameter(0x11)


OTHERS: dict[str, dict[str, Any]] = {
    "name": {"name": "d"},
    "step": {"step": "t"},
    "kernel": {"op": replace(kernel(("a", "w")), name="another kernel")},
    "binary": {"op": replace(kernel(("a", "w")), kernels=("kernel_v2",))},
    "wait": {"op": replace(kernel(("a", "w")), contract=KernelContract(("a", "w"), ("o",), wait=Wait.NEVER))},
    "trigger": {"op": replace(kernel(("a", "w")), contract=KernelContract(("a", "w"), ("o",), trigger=Trigger.ENTRY))},
    "fence": {"op": replace(kernel(("a", "w")), contract=KernelContract(("a", "w"), ("o",), fence=True))},
    "independent": {"op": replace(kernel(("a", "w")), contract=KernelContract(("a", "w"), ("o",), ("w",)))},
    "dtype": {"dtype": "bfloat16"},
    "shape": {"size": 8},
    "parameter": {"eps": 1e-6},
    "attribute": {"pdl": False},
    "view": {"part": slice(2, 4)},
    "role": {"role": "input"},
    "one step more": {"extra": True},
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_makes_another_chain_makes_another_fingerprint(what: str) -> None:
    marks = {key: marked(**fields).fingerprint for key, fields in OTHERS.items()}
    assert marks[what] != marked().fingerprint
    assert len(set(marks.values())) == len(OTHERS)


def test_a_variant_has_its_own_fingerprint() -> None:
    chain = pipeline()
    assert chain.varied({}).fingerprint == chain.fingerprint
    assert chain.varied({"first": {"delay_us": 0.0}}).fingerprint != chain.fingerprint
    assert chain.varied({"second": {"wait": Wait.NEVER}}).fingerprint != chain.fingerprint


def test_fingerprints_are_the_same_in_every_process() -> None:
    """They are compared between a parent and its child; nothing in them may depend on an address or a hash seed."""
    code = "from pdl_stress import catalog; print(*[catalog.load(name).fingerprint for name in catalog.SHIPPED])"
    here = [catalog.load(name).fingerprint for name in catalog.SHIPPED]
    root = Path(__file__).resolve().parent.parent
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == here
    assert len(set(here)) == len(here)


def test_a_modelled_chain_can_be_rebuilt_and_is_otherwise_the_same() -> None:
    chain = Chain("c")
    chain.step("s", kernel(fixed=True), a=chain.input("h", (4,), "float32"), o=chain.buffer("x", (4,), "float32"))
    modelled = chain.modelled()
    assert modelled.fingerprint == chain.fingerprint
    assert all(step.op.rebuildable for step in modelled.steps)
    assert not chain["s"].op.rebuildable
    assert modelled.varied({"s": {"wait": "never"}})["s"].contract.wait is Wait.NEVER
    assert [str(edge) for edge in modelled.data_edges] == [str(edge) for edge in chain.data_edges]


# --- variants -------------------------------------------------------------------------------------------------------


def test_a_variant_changes_what_is_named_and_nothing_else() -> None:
    chain = pipeline()
    other = chain.varied({"second": {"wait": Wait.NEVER, "delay_us": 5.0}, PRODUCER: {"delay_us": 3.0}})
    assert other["second"].contract == chain["second"].contract.but(wait=Wait.NEVER)
    assert (other["second"].delay_us, other[PRODUCER].delay_us, other["first"].delay_us) == (5.0, 3.0, None)
    assert chain["second"].contract.wait is Wait.ALL
    assert chain["second"].delay_us is None
    for name in ("first", "third"):
        assert other[name].op is chain[name].op
    assert other.buffers is chain.buffers
    assert [s.name for s in other.steps] == [s.name for s in chain.steps]
    assert [str(e) for e in other.data_edges] == [str(e) for e in chain.data_edges]


def test_a_variant_of_a_variant_keeps_both_changes() -> None:
    once = pipeline().varied({"first": {"trigger": "entry", "delay_us": 1.0}})
    twice = once.varied({"third": {"wait": "never"}})
    assert twice["first"].contract.trigger is Trigger.ENTRY
    assert twice["first"].delay_us == 1.0
    assert twice["third"].contract.wait is Wait.NEVER
    assert [s.name for s in twice.steps].count(PRODUCER) == 1


def test_a_step_can_be_inserted() -> None:
    chain = Chain("c")
    hidden, x = chain.input("h", (4,), "float32"), chain.buffer("x", (4,), "float32")
    weight = chain.constant("w", (32, 2), "float32")
    chain.step("s", kernel(("a", "w")), a=hidden, w=weight, o=x)
    late = source_step("late", {"rows": weight[:16]})
    other = chain.varied({}, insert=("s", late))
    assert [step.name for step in other.steps] == ["producer", "late", "s"]
    assert ("late", "s", "w") in {(e.writer, e.reader, e.buffer) for e in other.data_edges}
    assert [step.name for step in chain.steps] == ["producer", "s"]


def test_variants_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="no step 'fourth'"):
        pipeline().varied({"fourth": {"delay_us": 1.0}})
    chain = fixed_chain()
    for fields in (
        {"wait": Wait.LATE},
        {"wait": Wait.NEVER, "trigger": Trigger.ENTRY},
        {"wait": Wait.NEVER, "delay_us": 1.0},
        {"independent": ()},
        {"patch": Patch(None), "trigger": Trigger.ENTRY},
        {"patch": Patch(()), "delay_us": 1.0},
        {"patch": Patch((1,)), "wait": Wait.NEVER},
        {"trigger": Trigger.ENTRY, "independent": ("a",)},
    ):
        with pytest.raises(UnsupportedVariant, match="kernel cannot be rebuilt"):
            chain.varied({"s": fields})
    for name in ("second", PRODUCER):
        with pytest.raises(UnsupportedVariant, match="rebuilt, not patched"):
            pipeline().varied({name: {"patch": Patch(())}})
    with pytest.raises(UnsupportedVariant, match="early-release source cannot wait as"):
        chain.varied({"s": {"trigger": Trigger.ENTRY}}).varied({"s": {"wait": Wait.NEVER}})


def test_a_kernel_that_cannot_be_rebuilt_gives_way_to_a_stand_in_that_writes_its_outputs() -> None:
    chain = fixed_chain()
    for fields in (
        {"trigger": Trigger.ENTRY},
        {"delay_us": 1.0},
        {"trigger": "before_stores", "fence": True, "delay_us": 2.0},
    ):
        other = chain.varied({"s": fields})
        assert [step.name for step in other.steps] == [step.name for step in chain.steps]
        stand_in = other["s"]
        assert stand_in.source
        assert stand_in.patch is None
        assert [(name, str(view)) for name, view in stand_in.writes()] == [("o", "x")]
        assert list(stand_in.reads()) == []
        assert stand_in.delay_us == fields.get("delay_us")
        assert stand_in.contract.trigger == fields.get("trigger", Trigger.ENTRY)
        assert stand_in.contract.fence is fields.get("fence", False)
        assert stand_in.contract.wait is Wait.ALL, "or it would write before its own predecessors are done (R8)"
        assert stand_in.op.kernels == ("pdl_stress_source",)
        assert stand_in.op.rebuildable, "it is our own kernel"


def test_a_stand_in_can_be_varied_again() -> None:
    once = fixed_chain().varied({"s": {"trigger": Trigger.AFTER_WAIT}})
    twice = once.varied({"s": {"delay_us": 3.0, "fence": True}})["s"]
    assert (twice.delay_us, twice.contract.trigger, twice.contract.fence) == (3.0, Trigger.AFTER_WAIT, True)
    assert twice.source


@pytest.mark.parametrize("pdl", [True, False])
def test_a_stand_in_is_launched_as_its_step_is(pdl: bool) -> None:
    """With the attribute on a step that has none it would make an edge that the chain does not have."""
    chain = Chain("c")
    hidden, x = chain.input("h", (4,), "float32"), chain.buffer("x", (4,), "float32")
    chain.step("s", kernel(fixed=True), pdl=pdl, a=hidden, o=x)
    assert chain.varied({"s": {"delay_us": 1.0}})["s"].pdl is pdl
    assert chain.varied({"s": {"wait": Wait.NEVER}})["s"].pdl is pdl


def test_a_stand_in_writes_every_output_and_no_more() -> None:
    chain = Chain("c")
    x, y = chain.buffer("x", (2, 8), "float32"), chain.buffer("y", (2, 8), "float32")
    hidden, weight = chain.input("h", (2, 8), "float32"), chain.constant("w", (8,), "float32")
    op = kernel(("a", "w"), ("o", "p"), fixed=True)
    chain.step("s", op, a=hidden, w=weight, o=x[:, 2:6], p=y, params={"eps": 1.0})
    chain.step("t", kernel(("a", "b")), a=x[:, 2:6], b=y, o=x[:, :2])
    stand_in = chain.varied({"s": {"trigger": Trigger.ENTRY, "delay_us": 2.0}})["s"]
    assert {name: str(view) for name, view in stand_in.writes()} == {"o": "x[:, 2:6]", "p": "y"}
    assert set(stand_in.operands) == {"o", "p"}
    assert stand_in.contract.operands == ("o", "p")
    assert stand_in.params == {}, "it is launched by the harness"
    edges = [str(edge) for edge in chain.varied({"s": {"delay_us": 2.0}}).data_edges]
    assert edges == ["s -> t through x", "s -> t through y"], "its readers are the same, its writer is gone"


def test_what_writes_nothing_has_no_stand_in() -> None:
    chain = fixed_chain()
    x = chain.buffers["x"]
    chain.step("checks", kernel(("a",), (), fixed=True), a=x)
    with pytest.raises(UnsupportedVariant, match="kernel cannot be rebuilt"):
        chain.varied({"checks": {"delay_us": 1.0}})
    assert chain.varied({"checks": {"wait": Wait.NEVER}})["checks"].patch == Patch(None)


def test_a_kernel_that_cannot_be_rebuilt_is_left_alone_if_nothing_is_asked_of_it() -> None:
    chain = fixed_chain()
    for fields in ({}, {"delay_us": None}, {"patch": None}):
        assert chain.varied({"s": fields})["s"] is chain["s"]


def test_of_a_kernel_that_cannot_be_rebuilt_the_waits_can_be_removed() -> None:
    chain = fixed_chain()
    never = chain.varied({"s": {"wait": Wait.NEVER}})["s"]
    assert (never.patch, never.contract.wait, never.source) == (Patch(None), Wait.NEVER, False)
    assert never.op.run is chain["s"].op.run, "its own kernel, patched in the captured graph"
    for patch in (Patch(()), Patch((1,))):
        step = chain.varied({"s": {"patch": patch}})["s"]
        assert (step.patch, step.contract) == (patch, chain["s"].contract)
        assert step.op == chain["s"].op
        assert (step.delay_us, step.source, step.operands) == (None, False, chain["s"].operands)
    assert chain["s"].patch is None, "the chain under test stays as it is"
    both = chain.varied({"s": {"patch": Patch(None)}})["s"]
    assert (both.patch, both.contract.wait) == (Patch(None), Wait.NEVER), "the model must know of it"
    assert both.op.deployed == chain["s"].contract, "reports must tell what was changed"
    assert chain.varied({"s": {}})["s"].patch is None
    assert list(map(str, (Patch(None), Patch(()), Patch((0, 2))))) == [
        "all waits removed",
        "loaded again",
        "wait 0, 2 removed",
    ]


def test_no_stand_in_writes_what_a_later_step_changes() -> None:
    """It would write the end of the chain's memory: the later step would then change it twice."""
    chain = Chain("c")
    x, y = chain.buffer("x", (4, 8), "float32"), chain.buffer("y", (4, 8), "float32")
    chain.step("norm", kernel(fixed=True), a=chain.input("h", (4, 8), "float32"), o=x)
    chain.step("add", kernel(fixed=True), a=x[:2], o=x[:2])
    chain.step("other", kernel(fixed=True), a=x[2:], o=y)
    late: dict[str, Any] = {"trigger": "entry", "delay_us": 2.0}
    with pytest.raises(UnsupportedVariant, match=r"take the place of 'norm': 'add' changes x\[0:2, :\]"):
        chain.varied({"norm": late})
    for name in ("add", "other"):
        assert chain.varied({name: late})[name].source
    arms = {(job.step, job.name) for job in plan_arms(chain, 1000, (2.0,)) if job.step}
    assert {step for step, _ in arms} == {"producer", "add", "other"}, "no arm claims to have delayed it"
    controls = plan_controls(chain, None, (2.0,))
    assert {c.edge.writer for c in controls} == {"producer"}, "only the producer's lateness can be told"


def test_a_library_step_that_writes_nothing_has_no_arm_of_its_own() -> None:
    chain = Chain("c")
    x = chain.buffer("x", (4,), "float32")
    chain.step("norm", kernel(fixed=True), a=chain.input("h", (4,), "float32"), o=x)
    chain.step("check", kernel(("a",), (), fixed=True), a=x)
    assert "check" not in {job.step for job in plan_arms(chain, 1000, (2.0,))}


def fixed_chain() -> Chain:
    chain = Chain("c")
    chain.step("s", kernel(fixed=True), a=chain.input("h", (4,), "float32"), o=chain.buffer("x", (4,), "float32"))
    return chain


# --- the catalogue --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.CSA2)
def test_shipped_chains_carry_their_names(name: str) -> None:
    chain = catalog.load(name)
    assert chain.name == name
    assert name in catalog.names()
    assert all(step.op.rebuildable for step in chain.steps)
    assert len(chain.edges) == len(chain.steps) - 1


def test_an_unknown_chain_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"unknown chain 'csa2-fused'.*Did you mean 'csa2-fused-m1'"):
        catalog.load("csa2-fused")
    with pytest.raises(UsageError, match=r"shows csa2-fused-m1, [^?]*$"):
        catalog.load("zzzzzz")
