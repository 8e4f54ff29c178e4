"""Subjects: how they are declared, found by name, and found again in another process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pdl_stress import Op, Subject, UsageError, op, subject
from pdl_stress.discovery import discover
from pdl_stress.isolation import Distant
from pdl_stress.locating import load_file, locate
from pdl_stress.subjects import CheckPlan, as_subject

FILE = Path(__file__).parent / "subject_file.py"


def make() -> Any:
    return 1


def test_a_decorated_function_is_a_subject_and_can_still_be_called() -> None:
    @subject(make, independent=["w"])
    def double(x: int) -> int:
        return 2 * x

    assert isinstance(double, Subject)
    assert (double.name, double.independent, double(4)) == ("double", ("w",), 8)
    assert as_subject(double) is double


@op(reads=("x", "w"), writes=("out",), independent=("w",))
def my_op(x: Any, w: Any, out: Any, *, pdl: bool) -> Any:
    return (x, w, out, pdl)


def test_an_ops_contract_is_what_its_subject_declares() -> None:
    assert isinstance(my_op, Op)
    one = as_subject(my_op, make)
    assert one(x=1, w=2, out=3) == (1, 2, 3, True)
    assert (one.name, one.independent) == ("my_op", ("w",))
    assert [one.declared(name) for name in ("x", "w", "w[0]", "w.a", "out", "wide", "other")] == [
        "dependent", "independent", "independent", "independent", "dependent", "", "",
    ]  # fmt: skip
    assert as_subject(len, make).declared("x") == ""


@pytest.mark.parametrize(
    ("arguments", "settings", "text"),
    [
        ((len, None), {}, "make_inputs is None"),
        ((len, 3), {}, "make_inputs is 3"),
        ((5, make), {}, "5 cannot be called"),
        ((len, make), {"independent": "weight"}, r"expected a tuple of names, for example \('weight',\)"),
    ],
)
def test_what_is_no_subject(arguments: Any, settings: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        as_subject(*arguments, **settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replays", 0), ("replays", True), ("replays", 1.5), ("control_replays", -1), ("delays_us", ()),
        ("delays_us", (0.0,)), ("delays_us", (10.0, 1.0)), ("delays_us", (math.nan,)), ("delays_us", (1e9,)),
        ("time_limit", 0), ("time_limit", math.nan),
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        CheckPlan(**{field: value})


# -- by name -----------------------------------------------------------------------------------------------------------


def test_the_subjects_of_a_file() -> None:
    assert [one.name for one in discover(str(FILE))] == ["first", "the second"]
    assert [one.name for one in discover(f"{FILE}::second")] == ["the second"]
    assert [one.name for one in discover(f"{FILE}::the second")] == ["the second"]
    assert load_file(FILE) is load_file(FILE), "loaded once"


@pytest.mark.parametrize(
    ("content", "target", "text"),
    [
        (None, "gone.py", "is no file"),
        ("x = 1", "one.py", "has no subject; decorate"),
        ("raise ValueError('boo')", "one.py", "one.py cannot be loaded: ValueError: boo"),
        ("def", "one.py", "cannot be loaded: SyntaxError"),
        ("from pdl_stress import subject\nf = subject(len)(len)", "one.py::g", "has no subject 'g'; it has f"),
        (None, "word", "neither FILE.py"),
        (None, "word::name", "neither FILE.py"),
    ],
)
def test_what_is_not_there(content: str | None, target: str, text: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "one.py").write_text(content)
    with pytest.raises(UsageError, match=text):
        discover(str(tmp_path / target) if ".py" in target else target)


class Point:
    name, value = "mine", "package:thing"

    def __init__(self, found: Any) -> None:
        self._found = found

    def load(self) -> Any:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def test_what_packages_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = as_subject(len, make)
    monkeypatch.setattr("pdl_stress.discovery.entry_points", lambda group: [Point(one)])
    assert discover("mine") == [one]
    for found, text in ((3, "is 3; expected a subject"), (ImportError("no torch"), "ImportError: no torch")):
        monkeypatch.setattr("pdl_stress.discovery.entry_points", lambda group, found=found: [Point(found)])
        with pytest.raises(UsageError, match=text):
            discover("mine")
    with pytest.raises(UsageError, match="installed packages offer mine"):
        discover("yours")


# -- in another process ------------------------------------------------------------------------------------------------


def test_what_is_at_the_top_of_a_module_can_be_found_again() -> None:
    module = load_file(FILE)
    assert locate(module.make_inputs).module == "", "no other process has a module of that name"
    for obj, wanted in ((module.make_inputs, module.make_inputs), (module.Holder.inner, module.Holder.inner)):
        place = locate(obj)
        assert place.load() is wanted
    assert locate(discover).load() is discover
    assert locate(discover).module == "pdl_stress.discovery"


@pytest.mark.parametrize("obj", [lambda: 1, 5, "text", [].append], ids=["lambda", "number", "text", "bound"])
def test_what_no_other_process_can_find(obj: Any) -> None:
    with pytest.raises(UsageError, match="cannot be sent to a child process"):
        locate(obj)


def test_a_function_inside_a_function_cannot_be_found() -> None:
    def inside() -> None: ...

    with pytest.raises(UsageError, match="isolate=False"):
        locate(inside)


def test_a_subject_is_loaded_again_with_all_that_it_declares() -> None:
    first, second = discover(str(FILE))
    again = Distant.of(first).load()
    assert (again.fn, again.make_inputs, again.name) == (first.fn, first.make_inputs, "first")
    with pytest.raises(UsageError, match="cannot be sent"):
        Distant.of(second)  # its code is a lambda
    place = Distant.of(as_subject(first.fn, first.make_inputs, independent=("w",), code=make))
    assert (place.load().independent, place.load().code) == (("w",), make)


def test_a_name_that_is_gone_is_said() -> None:
    place = locate(discover)
    with pytest.raises(UsageError, match="has no 'nothing'"):
        type(place)(place.module, place.file, "nothing").load()
