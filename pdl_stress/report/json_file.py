"""``results.json``: the machine-readable form of a run (schema 1, described in ``docs/results.md``)."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..results import SCHEMA, CaseResult, RunResult

_CASE_FIRST = ("chain", "ops", "kernels", "verdict", "reasons", "arms", "replays", "mismatches")


def to_json(run: RunResult) -> dict[str, Any]:
    """The run as plain JSON data. On the model there are no rates and no bounds, so those keys hold null."""
    return {
        "schema": SCHEMA,
        "verdict": str(run.verdict),
        "command": run.command,
        "started": run.started,
        "seconds": round(run.seconds, 3),
        "environment": run.environment,
        "errors": run.errors,
        "cases": [_case(case) for case in run.cases],
    }


def write_json(run: RunResult, path: Path) -> None:
    """Writes the run; readers see the old file or the new one, never half of one."""
    text = json.dumps(to_json(run), indent=1) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _case(case: CaseResult) -> dict[str, Any]:
    data = asdict(case)
    data["verdict"] = str(case.verdict)
    data["replays"], data["mismatches"] = case.replays, case.mismatches
    data["edges"] = [
        {"from": e.source, "to": e.target, "kind": e.kind, "overlap": e.overlap, "overlapped_in": e.overlapped_in}
        for e in case.edges
    ]
    data["seconds"] = round(case.seconds, 3)
    if case.replays_per_second is not None:
        data["replays_per_second"] = round(case.replays_per_second)
    if case.machine == "model":
        for control in data["controls"]:
            del control["replays"], control["kills"]
    first = {key: data.pop(key) for key in _CASE_FIRST}
    return {**first, **data}
