"""Reads a ``results.json`` back, so that every format can be made from a stored run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..errors import UsageError
from ..outcome import Outcome, worst
from ..results import SCHEMA, CaseResult, EdgeResult, RunResult

_KEYS: Mapping[type, Mapping[str, str]] = {EdgeResult: {"source": "from", "target": "to"}}
"""Fields that have another name in the file."""

_REQUIRED: Mapping[type, tuple[str, ...]] = {
    RunResult: ("errors",),
    CaseResult: ("verdict", "arms", "edges", "data_edges", "controls", "timeline", "errors", "blockers"),
}
"""Fields without which no verdict stands, although they have a default."""


def load_json(path: Path) -> RunResult:
    """The run that ``path`` holds.

    Raises:
        UsageError: the file cannot be read, or is no result of this schema; the text says what is wrong with it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"it holds {type(data).__name__}, expected an object")
        if data.get("schema") != SCHEMA:
            raise UsageError(f"{str(path)!r} has schema {data.get('schema')!r}; this version reads schema {SCHEMA}.")
        run: RunResult = _read(RunResult, data, "run")
        follows = worst([Outcome.ERROR] * bool(run.errors) + [case.verdict for case in run.cases])
        if run.verdict is not follows:
            raise ValueError(f"its verdict is {run.verdict}, but {follows} follows from its cases")
        return run
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # among them bad UTF-8 and bad JSON
        raise UsageError(f"{str(path)!r} is no result of pdl-stress run: {error}.") from error


def _read(kind: Any, value: Any, where: str) -> Any:
    """``value``, checked to be what the annotation ``kind`` says. Raises ValueError."""
    if kind is Any:
        return value
    arguments = get_args(kind)
    if get_origin(kind) is list and isinstance(value, list):
        return [_read(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value)]
    if get_origin(kind) is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(_read(part, item, where) for part, item in zip(arguments, value, strict=True))
    if get_origin(kind) is dict and isinstance(value, dict):
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if get_origin(kind) is UnionType:
        if value is None and NoneType in arguments:
            return None
        return _read(next(part for part in arguments if part is not NoneType), value, where)
    if kind is Outcome and value in list(map(str, Outcome)):
        return Outcome(value)
    if hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
        return _read_fields(kind, value, where)
    if kind is float and type(value) is int:
        return value
    if type(value) is not kind:  # type, not isinstance: true is no number of replays
        raise ValueError(f"{where} is {str(value)[:40]!r}, expected {getattr(kind, '__name__', kind)}")
    return value


def _read_fields(kind: Any, data: dict[str, Any], where: str) -> Any:
    hints, found = get_type_hints(kind), {}
    for field in fields(kind):
        key = _KEYS.get(kind, {}).get(field.name, field.name)
        if key in data:
            found[field.name] = _read(hints[field.name], data[key], f"{where}.{key}")
        elif field.name in _REQUIRED.get(kind, ()) or (field.default is MISSING and field.default_factory is MISSING):
            raise ValueError(f"{where} has no {key!r}")
    return kind(**found)
