"""What is known of a library without importing it: presence, version, refusals. No test needs one installed."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest

from fusions import libraries
from fusions.libraries import FLASHINFER, TENSORRT_LLM, Library, version_key

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Callable[[Library, str | None], None]:
    """Makes a library look installed, with that version in its metadata."""
    monkeypatch.delenv(libraries.ALLOW_KNOWN_BAD, raising=False)

    def have(library: Library, version: str | None) -> None:
        def look(distribution: str) -> str:
            if distribution != library.distribution or version is None:
                raise metadata.PackageNotFoundError(distribution)
            return version

        monkeypatch.setattr(metadata, "version", look)
        monkeypatch.setitem(sys.modules, library.module, types.ModuleType(library.module))

    return have


def test_versions_are_ordered_as_pep_440_says() -> None:
    ordered = [
        *("0.6.9", "0.6.13", "0.6.14.dev1", "0.6.14a1", "0.6.14b1", "0.6.14rc1.dev2", "0.6.14rc1", "0.6.14rc1.post1"),
        *("0.6.14rc2", "0.6.14rc10", "0.6.14", "0.6.14.post1", "0.6.15", "0.7", "1.2.1", "1.10"),
    ]
    keys = [version_key(text) for text in ordered]
    for a, b in pairwise(keys):
        assert a is not None
        assert b is not None
        assert a < b
    assert version_key("1.2") == version_key("1.2.0") == version_key("v1.2.0+cu130")


@pytest.mark.parametrize("text", ["", "main", "1.x", "0.0.0+unknown", "0"])
def test_what_is_no_version_has_no_key(text: str) -> None:
    assert version_key(text) is None


@pytest.mark.parametrize("library", [FLASHINFER, TENSORRT_LLM], ids=lambda library: library.extra)
def test_what_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.delitem(sys.modules, library.module, raising=False)
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    refusal = library.refusal()
    assert str(refusal) == f"{library.name} is not installed; pip install 'pdl-stress[{library.extra}]'"


def test_a_half_removed_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ValueError(f"{name}.__spec__ is None")

    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(libraries.importlib.util, "find_spec", broken)
    assert not FLASHINFER.installed()


@pytest.mark.parametrize(
    ("version", "refused"),
    [("0.6.13", True), ("0.6.14rc1", True), ("0.6.14", False), ("0.7.4+cu130", False), ("main", False), (None, False)],
)
def test_flashinfer_older_than_its_fix_is_refused(
    have: Callable[..., None], version: str | None, refused: bool
) -> None:
    have(FLASHINFER, version)
    refusal = FLASHINFER.refusal()
    assert (refusal is not None) is refused
    if refusal:
        assert f"flashinfer-python {version} is older than 0.6.14" in str(refusal)
        assert "#3630" in str(refusal)
        assert "pip install -U 'flashinfer-python>=0.6.14'" in str(refusal)


@pytest.mark.parametrize(
    ("version", "bad"),
    [
        *(("0.20.0", True), ("1.2.1", True), ("1.3.0rc0", True), ("1.3.0rc15.post1", True), ("1.3.0rc18", True)),
        *(("1.2.2", False), ("1.3.0rc19", False), ("1.3.0", False), ("unknown", False), (None, False)),
    ],
)
def test_tensorrt_llm_from_before_its_fix_is_known_bad(
    have: Callable[..., None], version: str | None, bad: bool
) -> None:
    have(TENSORRT_LLM, version)
    refusal = TENSORRT_LLM.refusal("tinygemm2")
    assert (refusal is not None) is bad
    assert TENSORRT_LLM.refusal("rmsnorm") is None, "only tinygemm2 is bad"
    if refusal:
        assert refusal.known_bad
        assert f"tensorrt-llm {version} is known bad: for K > 1024" in str(refusal)
        assert "#15338" in str(refusal)
        assert "FUSIONS_ALLOW_KNOWN_BAD=1 runs it all the same" in str(refusal)


def test_the_environment_allows_what_is_known_bad_and_nothing_else(
    have: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    have(TENSORRT_LLM, "1.2.1")
    monkeypatch.setenv(libraries.ALLOW_KNOWN_BAD, "0")
    assert TENSORRT_LLM.refusal() is not None
    monkeypatch.setenv(libraries.ALLOW_KNOWN_BAD, "1")
    assert TENSORRT_LLM.refusal() is None
    assert TENSORRT_LLM.version_refusal() is not None, "doctor still says so"
    have(FLASHINFER, "0.6.13")
    monkeypatch.setenv(libraries.ALLOW_KNOWN_BAD, "1")
    assert FLASHINFER.refusal() is not None, "too old is no choice"


def test_a_loaded_module_tells_its_version_where_no_metadata_does(have: Callable[..., None]) -> None:
    have(FLASHINFER, None)
    sys.modules["flashinfer"].__version__ = "0.6.1"  # type: ignore[attr-defined]
    assert FLASHINFER.version() == "0.6.1"
    assert FLASHINFER.refusal() is not None


def test_looking_imports_neither_a_library_nor_torch() -> None:
    code = (
        "import sys; from fusions.libraries import FLASHINFER, TENSORRT_LLM;"
        "[(l.refusal(), l.version()) for l in (FLASHINFER, TENSORRT_LLM)];"
        "bad = [m for m in ('torch', 'flashinfer', 'tensorrt_llm', 'fusions.ops') if m in sys.modules];"
        "print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
