"""The skip of GPU tests in ``conftest.py``, in a small project with a made-up device module."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

DEVICE = """
from enum import Enum
class Presence(Enum):
    NONE, USABLE, UNUSABLE = range(3)
print("the driver was woken")
def presence():
    return Presence.{presence}, "{reason}"
"""

TESTS = """
import pytest
@pytest.mark.gpu
def test_on_gpu(): pass
def test_anywhere(): pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\npythonpath = .\nmarkers = gpu: needs a GPU\n")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(TESTS)
    return pytester


def machine(project: pytest.Pytester, presence: str, reason: str) -> None:
    package = project.mkpydir("pdl_stress")
    (package / "cuda").mkdir()
    (package / "cuda" / "__init__.py").touch()
    (package / "cuda" / "device.py").write_text(DEVICE.format(presence=presence, reason=reason))


@pytest.mark.parametrize("presence", ["NONE", "UNUSABLE"])
def test_gpu_tests_skip_with_the_reason(project: pytest.Pytester, presence: str) -> None:
    machine(project, presence, "capability 8.0 has no PDL")
    result = project.runpytest_subprocess("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["gpu tests skipped: capability 8.0 has no PDL", "*needs a GPU*capability 8.0 has no PDL"]
    )


def test_gpu_tests_run_on_a_usable_device_and_nothing_is_said(project: pytest.Pytester) -> None:
    machine(project, "USABLE", "a fine device")
    result = project.runpytest_subprocess()
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*gpu tests skipped*")


@pytest.mark.parametrize("selection", [["-m", "not gpu"], ["-k", "anywhere"]])
def test_the_driver_sleeps_while_no_gpu_test_is_selected(project: pytest.Pytester, selection: list[str]) -> None:
    machine(project, "NONE", "nothing")
    result = project.runpytest_subprocess("-s", *selection)
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.no_fnmatch_line("*driver was woken*")
    result.stdout.no_fnmatch_line("*gpu tests skipped*")


def test_a_gate_that_requires_a_gpu_fails_without_one(project: pytest.Pytester) -> None:
    machine(project, "NONE", "no NVIDIA driver")
    result = project.runpytest_subprocess("--require-gpu", "-m", "gpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--require-gpu: no NVIDIA driver*"])


def test_a_gate_that_requires_a_gpu_fails_if_nothing_would_use_it(project: pytest.Pytester) -> None:
    machine(project, "USABLE", "a fine device")
    result = project.runpytest_subprocess("--require-gpu", "-m", "not gpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(("option", "outcome"), [([], {"skipped": 1}), (["--slow"], {"passed": 1})])
def test_slow_tests_run_if_they_are_asked_for(project: pytest.Pytester, option: list[str], outcome: object) -> None:
    project.makeini("[pytest]\npythonpath = .\nmarkers =\n  gpu: needs a GPU\n  slow: takes long\n")
    project.makepyfile(test_long="import pytest\n@pytest.mark.slow\ndef test_all(): pass\n")
    result = project.runpytest_subprocess("test_long.py", *option)
    result.assert_outcomes(**outcome)  # type: ignore[arg-type]
