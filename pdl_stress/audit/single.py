"""The audit of one kernel that is at hand as a cubin, in a few words."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from pdl_stress.audit.scan import Audited, Question, scan_cubin


@lru_cache(maxsize=64)
def in_words(code: bytes, kernel: str) -> str:
    """What the audit says of ``kernel`` (a mangled name) in a cubin; why, where it says nothing. Never raises."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(code)
            report = scan_cubin(path, "its cubin", Question(explained=kernel))
    except Exception as error:  # a way of looking at the kernel, beside others: it must not end them
        return f"not audited: {type(error).__name__}: {error}"
    found = next((one for one in report.kernels if one.name == kernel), None)
    if found is None:
        return f"not audited: {report.errors[0][1] if report.errors else 'the cubin does not hold it'}"
    return _words(found)


def _words(found: Audited) -> str:
    after, before, unknown = found.touches
    if not found.waits:
        return "never waits"
    parts = [f"{before} of {after + before + unknown} accesses may be before the wait"] if before else []
    if unknown:
        parts.append(f"{unknown} not decided")
    if early := sorted({f.subject for f in found.findings if f.subject and "before-wait" in f.rule}):
        parts.append(", ".join(early))
    return "; ".join(parts) or f"all {after} accesses after the wait"
