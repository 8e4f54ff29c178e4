"""Methods of classes that are not ours: finding them, telling known ones by their source, making changed ones.

A changed method is the class's own source with a few nodes of its syntax tree replaced, compiled in the globals of the
original. It is bound to an instance; the class keeps its own.
"""

from __future__ import annotations

import ast
import copy
import difflib
import hashlib
import inspect
import itertools
import linecache
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch


class CannotRewrite(ValueError):
    """The source has another shape than the change needs. The message says which, as the end of a sentence."""


@dataclass(frozen=True)
class Method:
    """A method as its class has it.

    Args:
        name: the attribute of the class.
        owner: the name of the class, for reports.
        function: without its decorators.
        tree: its syntax tree; not to be changed.
    """

    name: str
    owner: str
    function: FunctionType
    tree: ast.FunctionDef

    @property
    def digest(self) -> str:
        """A hash of what the source does: layout, comments, docstring and annotations do not count."""
        return hashlib.sha256(_serial(self.tree).encode()).hexdigest()[:16]

    @property
    def receiver(self) -> str:
        """What the method calls its instance."""
        arguments = [*self.tree.args.posonlyargs, *self.tree.args.args]
        if not arguments:
            raise CannotRewrite(f"{self.name} takes no self")
        return arguments[0].arg

    def calls(self, attribute: str) -> bool:
        """Whether it has ``self.attribute(...)``."""
        nodes = (node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return any(is_path(node, self.receiver, attribute) for node in nodes)

    def mentions(self, attribute: str) -> bool:
        """Whether it has ``self.attribute``; dots in it are followed."""
        return any(is_path(node, self.receiver, attribute) for node in ast.walk(self.tree))


def find(owner: type, calls: Iterable[str], mentions: Iterable[str] = ()) -> Method | None:
    """The first method, in order of the MRO, that calls and mentions all of these attributes of its instance; ``None``
    if there is none, or no source to look at."""
    calls, mentions = tuple(calls), tuple(mentions)
    seen: set[str] = set()
    for cls in owner.__mro__:
        if cls in (object, torch.nn.Module):
            break
        for name, value in vars(cls).items():
            if name in seen or not isinstance(value, FunctionType) or name == "__init__":
                continue
            seen.add(name)
            method = _read(cls, name, value)
            if method is not None and all(map(method.calls, calls)) and all(map(method.mentions, mentions)):
                return method
    return None


def named(owner: type, name: str) -> Method | None:
    """The method of this name; ``None`` if there is none, or no source to look at."""
    for cls in owner.__mro__:
        if name in vars(cls):
            value = vars(cls)[name]
            return _read(cls, name, value) if isinstance(value, FunctionType) else None
    return None


def difference(method: Method, changed: ast.FunctionDef) -> str:
    """Both sources as a diff without context, in the layout that ``ast.unparse`` gives."""
    before, after = (ast.unparse(tree).splitlines() for tree in (method.tree, changed))
    lines = difflib.unified_diff(before, after, n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


_numbers = itertools.count()


def build(method: Method, changed: ast.FunctionDef) -> Callable[..., Any]:
    """The changed method as a function, with the decorators, globals, defaults and free variables of the original.

    Raises:
        CannotRewrite: it has private names, which only a class body can give, or a free variable without a value.
    """
    original = method.function
    for node in ast.walk(changed):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name.startswith("__") and not name.endswith("__"):
            raise CannotRewrite(f"it uses the private name {name}")
    free = {}
    for name, cell in zip(original.__code__.co_freevars, original.__closure__ or (), strict=True):
        try:
            free[name] = cell.cell_contents
        except ValueError as error:
            raise CannotRewrite(f"its free variable {name} has no value yet") from error
    text = ast.unparse(_bare(changed))
    text = f"def _make({', '.join(free)}):\n{textwrap.indent(text, '    ')}\n    return {changed.name}\n"
    # The number keeps the sources of two instances apart for tracebacks.
    file = f"<{method.owner}.{method.name} with a fused projection {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: dict[str, Any] = {}
    exec(compile(text, file, "exec", dont_inherit=True), original.__globals__, made)
    function: Callable[..., Any] = made["_make"](**free)
    inner: Any = inspect.unwrap(function)
    inner.__defaults__, inner.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    return function


def _read(cls: type, name: str, value: FunctionType) -> Method | None:
    function = inspect.unwrap(value)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError, TypeError):  # no source, or a lambda in the middle of something
        return None
    if not isinstance(tree, ast.FunctionDef) or not isinstance(function, FunctionType):
        return None
    if not [*tree.args.posonlyargs, *tree.args.args]:
        return None
    return Method(name, cls.__name__, function, tree)


def _serial(node: Any) -> str:
    """The tree as text that is the same for every Python version: ``ast.dump`` and ``ast.unparse`` are not."""
    if isinstance(node, list):
        return "[" + ",".join(map(_serial, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.FunctionDef):
            value = without_docstring(value)
        if name in ("ctx", "kind", "type_comment", "type_params", "annotation", "returns") or value in (None, []):
            continue
        fields.append(f"{name}={_serial(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that do something."""
    first = body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_text else body


def _bare(tree: ast.FunctionDef) -> ast.FunctionDef:
    """Without annotations and defaults, whose names may be known in the class body only."""
    tree = copy.deepcopy(tree)
    tree.returns = None
    arguments = tree.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if value is None else ast.Constant(None) for value in arguments.kw_defaults]
    return tree


def is_path(node: ast.AST, receiver: str, path: str) -> bool:
    """Whether a node is ``self.a.b`` for the path ``a.b``."""
    for name in reversed(path.split(".")):
        if not isinstance(node, ast.Attribute) or node.attr != name:
            return False
        node = node.value
    return isinstance(node, ast.Name) and node.id == receiver
