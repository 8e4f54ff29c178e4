"""Known forms of the methods that are changed, and what is said about unknown ones."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusions.integrations.methods import CannotRewrite, Method, build, difference


@dataclass(frozen=True)
class Form:
    """A method whose change has been checked.

    Args:
        kind: what is installed on it.
        source: where the method was seen.
    """

    kind: str
    source: str


STAND_IN = "stand-in, tests/fusions/stand_ins.py"

KNOWN_FORMS: dict[str, Form] = {
    "90b4f976deceab1d": Form("csa2", f"{STAND_IN}: DeepseekV41Attention.forward"),
    "36f3de9dc5e21788": Form("indexer", f"{STAND_IN}: Indexer.pre_indexer_proj"),
    "910723f7034512c3": Form("indexer", f"{STAND_IN}: OptionalIndexer.forward"),
    "9bca1a7719d96992": Form("qkv_a", f"{STAND_IN}: DeepseekV32Attention.forward"),
}
"""By the hash of the method. These are **methods of our stand-ins, and no others**: no TensorRT-LLM source was at hand,
so none of its methods is known. A hash of one can be added once its change was checked."""


class UnknownForm(RuntimeError):
    """A method is of no known form, or of one that cannot be changed. Nothing was changed. The message has the patch
    to apply by hand."""


@dataclass(frozen=True)
class Patch:
    """What is done to a class, for people.

    Args:
        finds: the method, by what it does.
        setup: what to write where the instance is made, and who calls it.
        instead: what to write in the method, where that cannot be shown for the very source.
    """

    finds: str
    setup: str
    instead: str

    def text(self, lines: str = "") -> str:
        return f"Nothing was changed. To do it by hand, {self.setup}\nand in the method:\n{lines or self.instead}"


Change = Callable[[Method, str], ast.FunctionDef]


def recognise(
    kind: str,
    module: Any,
    method: Method | None,
    change: Change,
    callees: tuple[str, str | None],
    patch: Patch,
    force: bool,
) -> tuple[Method, Callable[..., Any]]:
    """The method and its changed function, if its form is known or force is meant.

    Args:
        change: makes the changed tree, given what to call: ``callees[0]`` where this is installed, ``callees[1]`` in a
            patch by hand, if that is of the same shape.

    Raises:
        UnknownForm: otherwise.
    """
    name = f"install_{kind}: {type(module).__name__}"
    if method is None:
        raise UnknownForm(f"{name} has no method, with a source to read, that {patch.finds}.\n{patch.text()}")
    where = f"{name}.{method.name} (form {method.digest})"
    if method.name in vars(module):
        raise UnknownForm(f"{where} was replaced on the instance by somebody else.\n{patch.text()}")
    try:
        function = build(method, change(method, callees[0]))
        shown = "" if callees[1] is None else difference(method, change(method, callees[1]))
    except CannotRewrite as error:
        raise UnknownForm(f"{where} cannot be changed: {error}.\n{patch.text()}") from error
    form = KNOWN_FORMS.get(method.digest)
    if not force and (form is None or form.kind != kind):
        raise UnknownForm(
            f"{where} is of no known form.\n{patch.text(shown)}\nOr pass force=True: then this is done, and undone if "
            "results on random input differ. Or, once it was checked, add the form to "
            "fusions.integrations.forms.KNOWN_FORMS."
        )
    return method, function
