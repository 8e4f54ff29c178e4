"""Reads a ``results.json`` back, so that every format can be made from a stored run."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..results import SCHEMA, ArmResult, CaseResult, ControlResult, DataEdgeResult, EdgeResult, Mismatch, RunResult
from ..verdict import Outcome


def load_json(path: Path) -> RunResult:
    """The run that ``path`` holds.

    Raises:
        UsageError: the file cannot be read, or is no result of this schema; the text says what is wrong with it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise UsageError(f"{str(path)!r} has schema {data['schema']!r}; this version reads schema {SCHEMA}.")
        cases = [_case(case) for case in data["cases"]]
        return RunResult(
            Outcome(data["verdict"]),
            data["command"],
            data["started"],
            data["seconds"],
            data["environment"],
            cases,
            data["errors"],
        )
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{str(path)!r} is no result of pdl-stress run: {type(error).__name__}: {error}.") from error


def _case(data: dict[str, Any]) -> CaseResult:
    data = dict(data)
    data["verdict"] = Outcome(data["verdict"])
    data["edges"] = [EdgeResult(e["from"], e["to"], e["kind"], e["overlap"], e["overlapped_in"]) for e in data["edges"]]
    data["data_edges"] = [DataEdgeResult(**edge) for edge in data["data_edges"]]
    data["controls"] = [ControlResult(**control) for control in data["controls"]]
    data["arms"] = [_arm(arm) for arm in data["arms"]]
    known = {field.name for field in fields(CaseResult)}
    return CaseResult(**{key: value for key, value in data.items() if key in known})


def _arm(data: dict[str, Any]) -> ArmResult:
    mismatch = data["mismatch"]
    return ArmResult(**{**data, "mismatch": Mismatch(**mismatch) if mismatch else None})
