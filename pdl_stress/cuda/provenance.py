"""Which code ran, and on what software: the part of a result file that lets someone else repeat the run.

Holds no host name, no user name and no absolute path, so that evidence can be published as it is.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

COMMIT_VARIABLE = "PDL_STRESS_COMMIT"
"""Environment variable with the commit, for machines that get the sources without their ``.git``."""

_ROOT = Path(__file__).resolve().parents[2]  # the checkout, or site-packages
_PACKAGES = ("pdl_stress", "fusions")
_SOURCES = frozenset({".py", ".cu", ".cuh", ".cpp"})
_GIT_TIMEOUT = 20  # seconds


def source_sha256(root: Path = _ROOT) -> str:
    """Return a hash over the sources of both packages: equal for a checkout and for the wheel built from it.

    Over each ``*.py``, ``*.cu``, ``*.cuh`` and ``*.cpp`` file in order of its relative POSIX path: lengths of path and
    content, path, content. Lengths, so that no two trees can run together into the same stream.
    """
    digest = hashlib.sha256()
    files = [path for package in _PACKAGES for path in (root / package).rglob("*") if path.suffix in _SOURCES]
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix().encode()
        content = path.read_bytes()
        digest.update(b"%d %d\n" % (len(name), len(content)))
        digest.update(name)
        digest.update(content)
    return digest.hexdigest()


def commit(root: Path = _ROOT) -> str | None:
    """Return the commit that the sources come from, or None where that is not known.

    ``PDL_STRESS_COMMIT`` wins. Else ``HEAD`` of the checkout that the packages lie in, with ``-dirty`` appended if the
    packages' files differ from it (other files did not run). An installed package has no checkout, even if the
    environment it is installed in lies inside some repository.
    """
    given = os.environ.get(COMMIT_VARIABLE, "").strip()
    if given:
        return given
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "--verify", "HEAD")
    if not head:
        return None
    changes = _git(root, "status", "--porcelain", "--", *_PACKAGES)
    return head if changes == "" else f"{head}-dirty"


def software() -> dict[str, object]:
    """Return versions of Python and of the packages that matter, None where one is not installed."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",  # no kernel release: it may name the machine's owner
        "torch": version_of("torch"),
        "cuda_core": version_of("cuda-core"),
        "cuda_bindings": version_of("cuda-bindings"),
        "flashinfer": version_of("flashinfer-python"),
        "tensorrt_llm": version_of("tensorrt-llm"),
    }


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution without importing it; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    """Return git's output, stripped; None if git is missing or fails (no commit yet, a checkout of another owner)."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
