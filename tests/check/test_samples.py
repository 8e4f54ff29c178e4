"""The samples load, say how they are run, and their kernels compile. Their verdicts need a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pdl_stress.discovery import discover
from pdl_stress.locating import load_file

FOLDER = Path(__file__).parents[2] / "docs" / "samples"
FILES = sorted(FOLDER.glob("*.py"))
NEEDS = {"13_triton": "triton", "14_flashinfer": "flashinfer"}
FAULTS = ("F01", "F02", "F04", "F05", "F08", "F09", "F10", "F11", "F13", "F28")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_sample_loads_and_says_what_it_shows(path: Path) -> None:
    need = NEEDS.get(path.stem)
    if need and importlib.util.find_spec(need) is None:
        pytest.skip(f"needs {need}")
    names = [one.name for one in discover(str(path))]
    text = load_file(path).__doc__ or ""
    assert f"pdl-stress check docs/samples/{path.name}" in text
    assert text.splitlines()[0].endswith("?")
    assert all(f"`{name}`" in text for name in names)
    kinds = {name.split("_")[0] for name in names}
    assert kinds <= {"broken", "fixed"} or path.stem.startswith("01"), "each broken kernel stands beside its repair"
    assert "broken" not in kinds or "fixed" in kinds


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_kernels_compile(path: Path) -> None:
    if path.stem in NEEDS:
        pytest.skip("has no CUDA source")
    from cuda.core import Program, ProgramOptions

    from pdl_stress.cuda.launching import _headers

    source = load_file(path).SOURCE
    code = Program(source, "c++", ProgramOptions(std="c++17", arch="sm_90a", **_headers())).compile("cubin")
    assert code.code


def test_the_samples_cover_the_faults_and_are_numbered() -> None:
    assert [path.stem[:2] for path in FILES] == [f"{n:02d}" for n in range(1, len(FILES) + 1)]
    first_lines = " ".join(path.read_text().split('"""')[1] for path in FILES)
    assert [fault for fault in FAULTS if fault not in first_lines] == []


def test_a_first_verdict_takes_fifteen_lines() -> None:
    code = FILES[0].read_text().split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
