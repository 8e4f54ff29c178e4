"""Chains: what is refused while one is built, which edges it has, and what a variant of it keeps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdl_stress import Chain, KernelContract, Op, Trigger, UnsupportedVariant, UsageError, Wait, catalog
from pdl_stress.chain import PRODUCER, Role, box_within, boxes_overlap, source_step


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


def test_step_names_are_unique_and_the_producer_is_reserved() -> None:
    chain = pipeline()
    for name in ("first", PRODUCER):
        with pytest.raises(UsageError, match="the name is taken"):
            chain.step(name, kernel(), a=chain.buffers["x"], o=chain.buffers["y"])


def test_a_callable_is_no_op() -> None:
    chain = pipeline()
    with pytest.raises(UsageError, match="is no op; declare its contract"):
        chain.step("s", print, a=chain.buffers["x"], o=chain.buffers["y"])  # type: ignore[arg-type]


def test_a_read_needs_an_earlier_write_of_that_part() -> None:
    chain = Chain("c")
    hidden, x, y = chain.input("h", (4,), "f"), chain.buffer("x", (4,), "f"), chain.buffer("y", (4,), "f")
    with pytest.raises(UsageError, match="reads x, which no earlier step has written"):
        chain.step("s", kernel(), a=x, o=y)
    chain.step("half", kernel(), a=hidden, o=x[:2])
    with pytest.raises(UsageError, match=r"reads x\[2:4\], which no earlier step has written"):
        chain.step("s", kernel(), a=x[2:], o=y)
    chain.step("s", kernel(), a=x[1:3], o=y)


@pytest.mark.parametrize("role", ["input", "constant"])
def test_inputs_and_constants_are_not_written(role: str) -> None:
    chain = pipeline()
    target = getattr(chain, role)("target", (4,), "f")
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
    hidden, x, y = chain.input("h", (4,), "f"), chain.buffer("x", (4,), "f"), chain.buffer("y", (4,), "f")
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
    chain.input("h", (4,), "f")
    with pytest.raises(UsageError, match="at least one input and one step"):
        chain.check()
    chain = pipeline()
    chain.constant("idle", (4,), "f")
    with pytest.raises(UsageError, match=r"no step uses \['idle'\]"):
        chain.check()


def test_check_refuses_an_input_that_only_the_producer_touches() -> None:
    """Otherwise a chain of constants has no data edge at all, and would be ordered for want of anything to order."""
    chain = Chain("c")
    chain.input("h", (4,), "f")
    weight, x = chain.constant("w", (4,), "f"), chain.buffer("x", (4,), "f")
    chain.step("s", kernel(), a=weight, o=x)
    with pytest.raises(UsageError, match=r"no step uses \['h'\]"):
        chain.check()


def test_an_unknown_step_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no step 'fourth'; its steps are \['producer', 'first', 'second', 'third'\]"):
        pipeline()["fourth"]


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
    hidden, x = chain.input("h", (4,), "f"), chain.buffer("x", (4,), "f")
    weight = chain.constant("w", (32, 2), "f")
    chain.step("s", kernel(("a", "w")), a=hidden, w=weight, o=x)
    late = source_step("late", {"rows": weight[:16]})
    other = chain.varied({}, insert=("s", late))
    assert [step.name for step in other.steps] == ["producer", "late", "s"]
    assert ("late", "s", "w") in {(e.writer, e.reader, e.buffer) for e in other.data_edges}
    assert [step.name for step in chain.steps] == ["producer", "s"]


def test_variants_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="no step 'fourth'"):
        pipeline().varied({"fourth": {"delay_us": 1.0}})
    chain = Chain("c")
    chain.step("s", kernel(fixed=True), a=chain.input("h", (4,), "f"), o=chain.buffer("x", (4,), "f"))
    assert chain.varied({"s": {"delay_us": 1.0}})["s"].delay_us == 1.0
    with pytest.raises(UnsupportedVariant, match="cannot be rebuilt"):
        chain.varied({"s": {"trigger": Trigger.ENTRY}})


# --- the catalogue --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.SHIPPED)
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
