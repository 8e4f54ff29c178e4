"""The pytest fixture: only PASS passes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest_plugins = ["pytester"]

TEST = """
import pytest
from pdl_stress import Outcome
from pdl_stress.api import Verdict
from pdl_stress.cuda.device import Presence, Sighting
from pdl_stress.results import CaseResult

seen = []

def check(fn, make_inputs, **settings):
    seen.append(settings)
    return Verdict(CaseResult("mine", "", [], "cuda", verdict=Outcome.{outcome}, reasons=["because"]))

@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr("pdl_stress.check", check)
    monkeypatch.setattr("pdl_stress.cuda.device.presence", lambda: Sighting(Presence.{presence}, "for a test"))

def test_it(pdl_check):
    assert pdl_check(1, 2, replays=5).outcome is Outcome.PASS
    assert seen == [dict(isolate=True, replays=5)]
    pdl_check(1, 2, isolate=False)
    assert seen[1] == dict(isolate=False)
"""


@pytest.mark.parametrize(
    ("outcome", "presence", "options", "wanted"),
    [
        ("PASS", "USABLE", [], {"passed": 1}),
        ("INCONCLUSIVE", "USABLE", [], {"failed": 1}),
        ("FAIL", "USABLE", [], {"failed": 1}),
        ("ERROR", "USABLE", [], {"failed": 1}),
        ("PASS", "NONE", [], {"skipped": 1}),
        ("FAIL", "NONE", ["--pdl-require-gpu"], {"failed": 1}),
        ("FAIL", "UNUSABLE", [], {"failed": 1}),
    ],
)
def test_what_passes(pytester: Any, outcome: str, presence: str, options: list[str], wanted: dict[str, int]) -> None:
    pytester.makepyfile(TEST.format(outcome=outcome, presence=presence))
    result = pytester.runpytest_inprocess("-p", "_pdl_stress_pytest", "-p", "no:cacheprovider", *options)
    result.assert_outcomes(**wanted)
    if wanted.get("failed"):
        result.stdout.fnmatch_lines([f"*{outcome}, not PASS*"])


def test_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, _pdl_stress_pytest; print([m for m in ('pdl_stress', 'torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
