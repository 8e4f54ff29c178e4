"""Changes of a method's syntax tree: results of two calls from one, calls to another callee, optional arguments
provided, and a fused GEMM replaced with its casts.

Each returns a new tree, or raises :class:`fusions.integrations.methods.CannotRewrite`. They look at shapes only: that a
method still does the same afterwards is known from its hash, or checked by running it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from typing import Any

from fusions.integrations.methods import CannotRewrite, Method, is_path, without_docstring

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def hoist(method: Method, calls: Mapping[str, str], callee: str) -> ast.FunctionDef:
    """Puts ``a, b = callee(x)`` in front of the statement with the first of the calls ``self.A(x)`` and ``self.B(x)``,
    and the names in their places.

    Args:
        calls: the attribute of each call, and the name for its result, in order of the callee's results.
    """
    tree = copy.deepcopy(method.tree)
    scopes = [node for node in ast.walk(tree) if isinstance(node, _SCOPES) and node is not tree]
    inner = {id(node) for scope in scopes for node in ast.walk(scope)}
    found: dict[str, ast.Call] = {}
    for attribute in calls:
        sites = _calls(tree, method.receiver, attribute)
        if len(sites) != 1:
            raise CannotRewrite(f"it calls self.{attribute} {len(sites)} times, not once")
        if id(sites[0]) in inner:
            raise CannotRewrite(f"it calls self.{attribute} in a function of its own, maybe on another stream")
        found[attribute] = sites[0]
    arguments = [call.args[0] for call in found.values()]
    operand = arguments[0]
    if not isinstance(operand, ast.Name) or any(ast.dump(other) != ast.dump(operand) for other in arguments):
        raise CannotRewrite(f"self.{' and self.'.join(calls)} are not called with one variable")
    for name in calls.values():
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree)):
            raise CannotRewrite(f"it has a variable {name} already")
    first = min(found.values(), key=lambda call: (call.lineno, call.col_offset))
    block, start = _place(tree, first)
    ends = [_index(block, call) for call in found.values()]
    if any(end is None or end < start for end in ends):
        raise CannotRewrite(f"self.{' and self.'.join(calls)} are called in different branches")
    if not isinstance(block[start], _SIMPLE):
        raise CannotRewrite(f"self.{' or self.'.join(calls)} is called in the head of a block")
    for statement in block[start : max(end for end in ends if end is not None) + 1]:
        if operand.id in _stored(statement):
            raise CannotRewrite(f"{operand.id} is assigned to between the calls")
    _Replace({id(call): ast.Name(calls[name], ast.Load()) for name, call in found.items()}).visit(tree)
    block.insert(start, _statement(f"{', '.join(calls.values())} = {callee}({operand.id})"))
    return ast.fix_missing_locations(tree)


def provide(method: Method, names: tuple[str, str], hidden: str, condition: str, callee: str) -> ast.FunctionDef:
    """Puts ``a, b = callee(hidden)`` in front of everything, for two optional arguments of which none was given."""
    tree = copy.deepcopy(method.tree)
    arguments = {argument.arg for argument in (*tree.args.args, *tree.args.kwonlyargs)}
    missing = {*names, hidden} - arguments
    if missing:
        raise CannotRewrite(f"it has no argument {', '.join(sorted(missing))}")
    first, second = names
    test = f"if {first} is None and {second} is None{condition}:\n    {first}, {second} = {callee}({hidden})"
    tree.body.insert(len(tree.body) - len(without_docstring(tree.body)), _statement(test))
    return ast.fix_missing_locations(tree)


def redirect(method: Method, attribute: str, callee: str) -> ast.FunctionDef:
    """Every call ``self.A(x)`` becomes ``callee(x)``."""
    tree = copy.deepcopy(method.tree)
    sites = _calls(tree, method.receiver, attribute)
    if not sites:
        raise CannotRewrite(f"it does not call self.{attribute}")
    for site in sites:
        site.func = ast.parse(callee, mode="eval").body
    return ast.fix_missing_locations(tree)


def supersede(method: Method, attribute: str, hidden: str, callee: str) -> ast.FunctionDef:
    """Puts ``k, w = callee(hidden)`` for the statements from the first that mentions ``self.attribute``, a fused
    weight, to the one that splits the product into k and w, and the casts of k and w right behind it.

    Statements in between that assign to ``hidden`` stay (they unwrap it). The others go; nothing that they assign may
    be used later, and none may be of a kind that does more than compute.
    """
    tree = copy.deepcopy(method.tree)
    receiver, body = method.receiver, tree.body
    touches = [i for i, statement in enumerate(body) if _mentions(statement, receiver, attribute)]
    if not touches:
        raise CannotRewrite(f"no statement of its own level mentions self.{attribute}")
    split = next((i for i in range(touches[0], len(body)) if _is_split(body[i])), None)
    if split is None or touches[-1] > split:
        raise CannotRewrite(f"nothing behind self.{attribute} splits a product into two variables")
    statement = body[split]
    assert isinstance(statement, ast.Assign)
    pair = statement.targets[0]
    assert isinstance(pair, ast.Tuple)
    names = [element.id for element in pair.elts if isinstance(element, ast.Name)]
    end = split + 1
    while end < len(body) and _is_cast(body[end], names, hidden):
        end += 1
    kept, dropped = [], set()
    for statement in body[touches[0] : end]:
        if hidden in _stored(statement) and not _mentions(statement, receiver, attribute):
            kept.append(statement)
            continue
        if not isinstance(statement, (ast.Assign, ast.Assert, ast.With, ast.Try, ast.If)):
            raise CannotRewrite(f"a {type(statement).__name__} stands among the statements of the fused product")
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            raise CannotRewrite("it returns from among the statements of the fused product")
        dropped |= _stored(statement)
    used = {node.id for later in body[end:] for node in ast.walk(later) if isinstance(node, ast.Name)}
    leftover = (dropped & used) - set(names)
    if leftover:
        raise CannotRewrite(f"{', '.join(sorted(leftover))} of the fused product is used later on")
    body[touches[0] : end] = [*kept, _statement(f"{', '.join(names)} = {callee}({hidden})")]
    if any(isinstance(node, ast.Attribute) and node.attr in _FLAGS for node in ast.walk(tree)):
        raise CannotRewrite("it changes how FP32 matmuls compute, outside of the statements of the fused product")
    return ast.fix_missing_locations(tree)


_FLAGS = ("allow_tf32", "fp32_precision")


def _calls(tree: ast.AST, receiver: str, attribute: str) -> list[ast.Call]:
    """All calls ``self.attribute(x)``; the attribute must not be used in any other way."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and is_path(node.func, receiver, attribute)
        and len(node.args) == 1
        and not node.keywords
        and not isinstance(node.args[0], ast.Starred)
    ]
    if sum(is_path(node, receiver, attribute) for node in ast.walk(tree)) != len(calls):
        raise CannotRewrite(f"it uses self.{attribute} in other ways than calling it with one operand")
    return calls


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """All statement lists, outer ones first."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _place(tree: ast.AST, call: ast.Call) -> tuple[list[ast.stmt], int]:
    """The innermost block with the call, and the statement's index in it."""
    places = [(block, index) for block in _blocks(tree) if (index := _index(block, call)) is not None]
    return places[-1]


def _index(block: list[ast.stmt], node: ast.AST) -> int | None:
    return next((i for i, statement in enumerate(block) if any(child is node for child in ast.walk(statement))), None)


def _stored(statement: ast.AST) -> set[str]:
    """The variables that a statement assigns to or deletes."""
    return {
        node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }


def _mentions(statement: ast.AST, receiver: str, attribute: str) -> bool:
    return any(is_path(node, receiver, attribute) for node in ast.walk(statement))


def _is_split(statement: ast.stmt) -> bool:
    """``k, w = ... split ...``"""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0]
    splits = any(isinstance(node, ast.Attribute) and node.attr == "split" for node in ast.walk(statement.value))
    pair = isinstance(target, ast.Tuple) and len(target.elts) == 2
    return splits and pair and all(isinstance(element, ast.Name) for element in getattr(target, "elts", ()))


def _is_cast(statement: ast.stmt, names: list[str], hidden: str) -> bool:
    """``k = k.to(hidden.dtype)``, ``w = w.float()`` and the like: of one of the two alone."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    loads = {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
    return (
        isinstance(function, ast.Attribute)
        and function.attr in ("to", "float", "contiguous", "type_as")
        and len(_stored(statement)) == 1
        and next(iter(_stored(statement))) in names
        and loads <= {*_stored(statement), hidden, "torch"}
    )


def _statement(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


class _Replace(ast.NodeTransformer):
    def __init__(self, nodes: Mapping[int, ast.expr]) -> None:
        self._nodes = nodes

    def visit(self, node: ast.AST) -> Any:
        return self._nodes.get(id(node)) or super().visit(node)
