"""The libraries whose kernels can stand in for the native ones: whether they are there, and which versions are refused.

Looks at what is installed and imports none of it, nor torch: TensorRT-LLM starts MPI when it is imported. The adapters
are :mod:`fusions.ops.flashinfer` and :mod:`fusions.ops.trtllm`. Every limit on a version stands here and nowhere else.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata

FLASHINFER_OLDEST = "0.6.14"
"""The first FlashInfer release whose tinygemm2 waits for the right stage (its pull request #3630)."""

TRTLLM_KNOWN_BAD = (("0", "1.2.1"), ("1.3.0.dev0", "1.3.0rc18"))
"""TensorRT-LLM versions from before its pull request #15338 (opened 2026-06-13), both ends included: what PyPI had, and
the release candidates that were published by then. rc19 may be either; it is not refused."""

TRTLLM_BAD_ABOVE_K = 1024
"""The ring of tinygemm2 turns once per 1024 of K, and the stale barrier is polled from the second turn on."""

ALLOW_KNOWN_BAD = "FUSIONS_ALLOW_KNOWN_BAD"
"""Environment variable; ``1`` lets known-bad versions run."""


class Unavailable(RuntimeError):
    """A library's op cannot be used here: absent, too old, broken, or not this GPU's. The message says what to do."""


class KnownBad(Unavailable):
    """The installed version of the op is known to give wrong results."""


class OpFailed(RuntimeError):
    """A library could not do what was asked of it, such as build its kernel. The message holds its last words."""


@dataclass(frozen=True)
class Refusal:
    """Why a library is not used: what was found, and what to do about it."""

    found: str
    advice: str
    known_bad: bool = False

    def __str__(self) -> str:
        return f"{self.found}; {self.advice}"


@dataclass(frozen=True)
class Library:
    """A library: its name for people, the module to import, the distribution that brings it, and our extra for it."""

    name: str
    module: str
    distribution: str
    extra: str

    def installed(self) -> bool:
        """True if an import would find it."""
        if self.module in sys.modules:  # find_spec raises for a module without a spec
            return sys.modules[self.module] is not None
        try:
            return importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):  # a half-removed package
            return False

    def loaded(self) -> bool:
        """True if this process has imported it."""
        return self.module in sys.modules

    def version(self) -> str | None:
        """The version, without importing anything; None if neither the metadata nor a loaded module tells."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            loaded = getattr(sys.modules.get(self.module), "__version__", None)
            return loaded if isinstance(loaded, str) else None

    def refusal(self, op: str = "") -> Refusal | None:
        """Why ``op`` (``rmsnorm``, ``tinygemm2``; empty: any) of this library is not used; None if nothing is known
        against it, or the environment allows what is known bad."""
        if not self.installed():
            return Refusal(f"{self.name} is not installed", f"pip install 'pdl-stress[{self.extra}]'")
        found = self.version_refusal(op)
        return None if found and found.known_bad and known_bad_allowed() else found

    def version_refusal(self, op: str = "") -> Refusal | None:
        """What speaks against the installed version, whatever the environment allows. Nothing does if it is unknown."""
        version = self.version()
        key = version_key(version or "")
        if key is None:
            return None
        if self is FLASHINFER and key < _key(FLASHINFER_OLDEST):
            return Refusal(
                f"{self.distribution} {version} is older than {FLASHINFER_OLDEST}: its tinygemm2 can read a stage of "
                "its ring before it is filled (fixed by FlashInfer #3630)",
                f"pip install -U '{self.distribution}>={FLASHINFER_OLDEST}'",
            )
        if self is TENSORRT_LLM and op in ("", "tinygemm2"):
            for first, last in TRTLLM_KNOWN_BAD:
                if _key(first) <= key <= _key(last):
                    return Refusal(
                        f"{self.distribution} {version} is known bad: for K > {TRTLLM_BAD_ABOVE_K} its tinygemm2 can "
                        "read a stage of its ring before it is filled, and then corrupts its result or hangs (fixed "
                        "by TensorRT-LLM #15338)",
                        f"use a later version or other ops; {ALLOW_KNOWN_BAD}=1 runs it all the same",
                        known_bad=True,
                    )
        return None


FLASHINFER = Library("FlashInfer", "flashinfer", "flashinfer-python", "flashinfer")
TENSORRT_LLM = Library("TensorRT-LLM", "tensorrt_llm", "tensorrt-llm", "trtllm")


def known_bad_allowed() -> bool:
    """True if the environment lets known-bad versions run."""
    return os.environ.get(ALLOW_KNOWN_BAD) == "1"


_Key = tuple[tuple[int, ...], tuple[int, int], int, float]

_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<pre>a|b|rc)[-_.]?(?P<number>\d+))?"
    r"(?:[-_.]?post[-_.]?(?P<post>\d+))?"
    r"(?:[-_.]?dev[-_.]?(?P<dev>\d+))?"
    r"(?:\+.*)?",
    re.IGNORECASE,
)
_PRE = {"a": 0, "b": 1, "rc": 2}


def version_key(text: str) -> _Key | None:
    """A key that orders versions as PEP 440 does, local parts ignored; None for what is no version, or is 0 (as builds
    from a checkout without its tags call themselves)."""
    match = _VERSION.fullmatch(text)
    if match is None:
        return None
    release = [int(part) for part in match["release"].split(".")]
    while release and release[-1] == 0:
        release.pop()
    if not release:
        return None
    if match["pre"]:
        pre = (_PRE[match["pre"].lower()], int(match["number"]))
    else:
        pre = (-1, 0) if match["dev"] and not match["post"] else (len(_PRE), 0)
    post = int(match["post"]) if match["post"] else -1
    return tuple(release), pre, post, int(match["dev"]) if match["dev"] else float("inf")


def _key(text: str) -> _Key:
    return version_key(text) or ((), (0, 0), 0, 0.0)
