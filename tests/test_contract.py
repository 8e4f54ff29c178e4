"""A contract refuses what it cannot mean, and answers the questions that the model asks of it."""

from __future__ import annotations

from typing import Any

import pytest

from pdl_stress import KernelContract, Op, Trigger, UnsupportedVariant, UsageError, Wait, op


def _run(**_: Any) -> None:
    pass


def _op(contract: KernelContract, waits: frozenset[Wait] = frozenset()) -> Op:
    return Op("kernel", contract, _run, contract, waits=waits)


# --- the contract ---------------------------------------------------------------------------------------------------


def test_defaults_are_the_safe_ones() -> None:
    contract = KernelContract(reads=("a",), writes=("b",))
    assert (contract.wait, contract.trigger, contract.fence) == (Wait.ALL, Trigger.AFTER_STORES, False)
    assert not contract.is_independent("a")
    assert not contract.is_independent("b")


def test_operands_are_listed_once_reads_first() -> None:
    contract = KernelContract(reads=("a", "io"), writes=("io", "out"), independent=("a",))
    assert contract.operands == ("a", "io", "out")
    assert contract.is_independent("a")
    assert not contract.is_independent("io")


def test_words_may_be_plain_strings() -> None:
    contract = KernelContract(reads=["a"], wait="loaders", trigger="entry")  # type: ignore[arg-type]
    assert contract.wait is Wait.LOADERS
    assert contract.trigger is Trigger.ENTRY
    assert contract.reads == ("a",)
    assert hash(contract) == hash(KernelContract(("a",), wait=Wait.LOADERS, trigger=Trigger.ENTRY))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "names no operand"),
        ({"reads": "input"}, "`reads` is 'input'"),
        ({"reads": ("a",), "writes": "out"}, "`writes` is 'out'"),
        ({"reads": (1,)}, r"`reads` is \(1,\)"),
        ({"reads": 5}, "`reads` is 5"),
        ({"reads": ("a",), "independent": ("b",)}, r"\['b'\] are neither read nor written"),
        ({"reads": ("a",), "wait": "sometimes"}, "`wait` is 'sometimes'; expected one of all, loaders"),
        ({"reads": ("a",), "trigger": "soon"}, "`trigger` is 'soon'; expected one of none, entry"),
    ],
)
def test_a_contract_without_meaning_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        KernelContract(**fields)


def test_but_changes_only_what_is_named_and_checks_again() -> None:
    contract = KernelContract(reads=("a", "w"), writes=("o",), independent=("w",))
    other = contract.but(wait=Wait.NEVER, fence=True)
    assert (other.wait, other.fence, other.independent, other.trigger) == (
        Wait.NEVER,
        True,
        ("w",),
        Trigger.AFTER_STORES,
    )
    assert contract.wait is Wait.ALL
    with pytest.raises(UsageError, match="neither read nor written"):
        contract.but(independent=("x",))


def test_the_text_names_what_matters() -> None:
    contract = KernelContract(reads=("w",), independent=("w",), wait=Wait.LOADERS, trigger=Trigger.ENTRY, fence=True)
    assert str(contract) == "waits: loaders, triggers: entry behind a fence, independent: w"
    assert str(KernelContract(reads=("x",))) == "waits: all, triggers: after_stores"


@pytest.mark.parametrize(
    ("wait", "orders", "holds"),
    [
        (Wait.ALL, True, True),
        (Wait.LOADERS, True, True),
        (Wait.BARRIER, True, True),
        (Wait.ONE_WARP, False, True),
        (Wait.LATE, False, True),
        (Wait.BRANCH, False, False),
        (Wait.NEVER, False, False),
    ],
)
def test_what_each_wait_orders(wait: Wait, orders: bool, holds: bool) -> None:
    assert wait.orders_dependents is orders
    assert wait.holds_completion is holds


# --- ops ------------------------------------------------------------------------------------------------------------


def test_op_declares_a_contract_in_one_line() -> None:
    @op(reads=("input", "weight"), writes=("out",), independent=("weight",), wait=Wait.BARRIER, trigger=Trigger.NONE)
    def my_norm(*, input: Any, weight: Any, out: Any, pdl: bool) -> None:
        pass

    assert my_norm.name == "my_norm"
    assert my_norm.kernels == ("my_norm",)
    assert my_norm.contract == my_norm.deployed
    assert my_norm.contract == KernelContract(
        ("input", "weight"), ("out",), ("weight",), Wait.BARRIER, Trigger.NONE, False
    )
    assert not my_norm.rebuildable


def test_op_takes_a_name_and_the_names_of_its_kernels() -> None:
    named = op(reads=("a",), name="library norm", kernels=("k1", "k2"))(_run)
    assert (named.name, named.kernels) == ("library norm", ("k1", "k2"))


@pytest.mark.parametrize("field", ["reads", "writes", "independent"])
def test_a_bare_string_is_not_taken_for_a_list_of_letters(field: str) -> None:
    fields: dict[str, Any] = {"reads": ("o", "u", "t"), field: "out"}
    with pytest.raises(UsageError, match="'out'"):
        op(**fields)


def test_op_refuses_an_unknown_word() -> None:
    with pytest.raises(UsageError, match="`wait` is 'sometimes'"):
        op(reads=("a",), wait="sometimes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`trigger` is 'soon'"):
        op(reads=("a",), trigger="soon")  # type: ignore[arg-type]


def test_an_op_is_rebuilt_with_the_waits_that_it_supports() -> None:
    native = _op(KernelContract(("a",), ("b",)), frozenset({Wait.ALL, Wait.NEVER}))
    broken = native.rebuilt(wait=Wait.NEVER, trigger=Trigger.ENTRY)
    assert broken.contract == native.contract.but(wait=Wait.NEVER, trigger=Trigger.ENTRY)
    assert broken.deployed == native.contract, "reports must tell what was changed"
    with pytest.raises(UnsupportedVariant, match="cannot wait as"):
        native.rebuilt(wait=Wait.BRANCH)


def test_an_op_that_cannot_be_rebuilt_says_so_unless_nothing_changes() -> None:
    library = _op(KernelContract(("a",), ("b",)))
    assert library.rebuilt() is library
    assert library.rebuilt(wait=Wait.ALL) is library
    with pytest.raises(UnsupportedVariant, match="kernel cannot be rebuilt"):
        library.rebuilt(trigger=Trigger.ENTRY)


def test_an_op_may_return_what_it_writes_instead_of_taking_it() -> None:
    @op(reads=("input",), writes=("out", "scale"), returns=("scale", "out"))
    def quantize(input: Any, *, pdl: bool) -> Any:
        return None

    assert quantize.returns == ("scale", "out"), "in the order in which it returns them"
    assert quantize.contract.writes == ("out", "scale")
    assert op(reads=("a",), writes=("b",))(lambda a, b, pdl: None).returns == ()


def test_an_op_takes_the_operands_that_it_does_not_return() -> None:
    with pytest.raises(UsageError, match="takes no argument 'out'"):
        op(reads=("input",), writes=("out",))(lambda input, pdl: None)
    op(reads=("input",), writes=("out",), returns=("out",))(lambda input, pdl: None)
    with pytest.raises(UsageError, match="takes no argument 'other'"):
        op(reads=("input",), writes=("out", "other"), returns=("out",))(lambda input, pdl: None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"returns": ("input",)}, r"it returns \['input'\]; expected operands that it writes and does not read"),
        ({"returns": ("both",)}, r"it returns \['both'\]"),
        ({"returns": ("out", "nothing")}, r"it returns \['nothing'\]"),
        ({"returns": "out"}, "operands 'out'; expected a tuple of names"),
    ],
    ids=["read", "updated in place", "unknown", "text"],
)
def test_an_op_returns_only_what_it_writes_anew(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        op(reads=("input", "both"), writes=("out", "both"), **fields)


def test_an_op_may_give_the_machine_code_of_its_kernels() -> None:
    def code() -> list[bytes]:
        return [b"cubin"]

    made = op(reads=("a",), writes=("b",), code=code)(_run)
    assert made.code is code
    assert op(reads=("a",), writes=("b",))(_run).code is None
    assert not made.rebuildable, "having the code does not make it one of ours"
