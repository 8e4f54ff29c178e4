"""What the tests of the audit share: sources are compiled once for a run, and audited from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdl_stress.audit import Audited, Question, Report, scan
from tests.audit import corpus

Audit = Callable[..., Report]


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    """audit(code, ...): the report of a cubin, given as bytes; the rest as in `Question`."""

    def run(code: bytes, **question: object) -> Report:
        path = tmp_path / "code.cubin"
        path.write_bytes(code)
        return scan([path], Question(**question))  # type: ignore[arg-type]

    return run


@pytest.fixture
def audit_source(audit: Audit) -> Callable[..., Audited]:
    """audit_source(text, ...): the one kernel of a source, under the strict rule unless said otherwise."""

    def run(text: str, arch: str = "sm_90a", **question: object) -> Audited:
        report = audit(corpus.compiled(corpus.HEAD + text, arch), **{"strict": True, **question})
        assert not report.errors
        (kernel,) = report.kernels
        return kernel

    return run
