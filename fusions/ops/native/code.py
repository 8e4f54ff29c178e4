"""Native kernels: the PDL behaviour they are compiled for, their source, their machine code.

Importable without GPU and driver; `cubin` needs NVRTC only. Machine code is cached in memory and on disk
(`PDL_STRESS_CACHE`, else `~/.cache/pdl-stress`), keyed by source, options and NVRTC version.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

WAITS = ("all", "loaders", "barrier", "one_warp", "branch", "late", "never")
TRIGGERS = ("none", "entry", "after_wait", "before_stores", "after_stores")
KERNELS = ("rmsnorm", "layernorm", "tinygemm2")

_SOURCES = Path(__file__).parent / "csrc"
_NORMS = ("rmsnorm", "layernorm")
_MAGIC = b"pdl-stress cubin 1\n"


@dataclass(frozen=True)
class Behaviour:
    """The PDL behaviour a native kernel is compiled for: one source, marked points, the same parameters throughout.

    wait: which threads execute the wait, and where.
        all       every thread, before its first global read of a dependent operand
        loaders   every thread that loads a dependent operand; the others are ordered behind them (tinygemm2)
        barrier   one warp; a barrier behind it orders every dependent reader
        one_warp  one warp, no barrier: the other readers do not wait (fault F04)
        branch    under `if (flag)`, a kernel parameter (fault F05 where flag is 0)
        late      after the dependent reads (fault F01)
        never     no wait (fault F02)
    trigger: none, entry, after_wait (in the waiting threads), before_stores, or after_stores (all of the CTA's).
    fence: a device-scope fence directly before the trigger.
    early_weights: tinygemm2 fetches weights and bias before the wait (deployed); False: every thread that reads them is
        ordered behind a wait too. The norms always read their weight, and bias, after the wait.
    delay: the delay point is compiled in: the storing threads pass `delay_ns` directly before their stores.
    stamps: time stamps are compiled in.

    Raises ValueError for values that name nothing or contradict each other.
    """

    wait: str
    trigger: str = "after_stores"
    fence: bool = False
    early_weights: bool = True
    delay: bool = False
    stamps: bool = False

    def __post_init__(self) -> None:
        if self.wait not in WAITS:
            raise ValueError(f"wait={self.wait!r} is unknown; choose one of {', '.join(WAITS)}")
        if self.trigger not in TRIGGERS:
            raise ValueError(f"trigger={self.trigger!r} is unknown; choose one of {', '.join(TRIGGERS)}")
        if self.fence and self.trigger == "none":
            raise ValueError(
                "fence=True needs a trigger to stand before, and trigger is 'none'; choose a trigger or fence=False"
            )
        if self.wait == "never" and self.trigger == "after_wait":
            raise ValueError("trigger='after_wait' needs a wait, and wait is 'never'; choose trigger='entry'")
        if not self.early_weights and self.wait in ("one_warp", "never"):
            raise ValueError(
                f"early_weights=False orders the weights behind a wait, and wait={self.wait!r} orders nothing; choose "
                "early_weights=True or a wait that orders its readers"
            )


# As the kernels are used in a model. Norms: every thread waits before its first read, x and weight alike. tinygemm2:
# weights and bias are fetched before the wait, and the warps that load x wait. Norms trigger once all stores of the CTA
# are done. tinygemm2 triggers behind its wait: as correct, since its consumers wait for its completion and not for its
# trigger (R1, R2), and the next kernel's start is hidden behind the product: 1.4 us a projection on an H200.
DEPLOYED = {
    "rmsnorm": Behaviour(wait="all", trigger="after_stores"),
    "layernorm": Behaviour(wait="all", trigger="after_stores"),
    "tinygemm2": Behaviour(wait="loaders", trigger="after_wait"),
}


def validate(kernel: str, behaviour: Behaviour) -> None:
    """Raises ValueError where `kernel` is unknown or cannot have `behaviour`."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r} is unknown; choose one of {', '.join(KERNELS)}")
    if kernel in _NORMS and behaviour.wait == "loaders":
        raise ValueError(f"{kernel} has no loader threads, every thread loads; choose wait='all' instead of 'loaders'")
    if kernel in _NORMS and not behaviour.early_weights:
        raise ValueError(
            f"early_weights is for tinygemm2: {kernel} always reads its weight after the wait; leave it True"
        )


def source(kernel: str, behaviour: Behaviour) -> str:
    """The CUDA source of `kernel` with its marked points set to `behaviour`."""
    validate(kernel, behaviour)
    points = {
        "WAIT": f"WAIT_{behaviour.wait.upper()}",
        "TRIGGER": f"TRIGGER_{behaviour.trigger.upper()}",
        "FENCE": int(behaviour.fence),
        "EARLY_WEIGHTS": int(behaviour.early_weights),
        "DELAY": int(behaviour.delay),
        "STAMPS": int(behaviour.stamps),
    }
    defines = "".join(f"#define {name} {value}\n" for name, value in points.items())
    headers = ("pdl.cuh", "rows.cuh") if kernel in _NORMS else ("pdl.cuh",)
    return defines + "".join(map(_text, (*headers, f"{kernel}.cu")))


def cubin(kernel: str, behaviour: Behaviour, arch: str = "sm_90a") -> bytes:
    """The machine code of `kernel` (its name is also the symbol's) for `arch`; needs no GPU.

    Raises ValueError for a combination that does not exist and for an architecture without PDL.
    """
    if not re.fullmatch(r"sm_(9\d|1\d\d)[af]?", arch):
        raise ValueError(f"arch={arch!r}: programmatic dependent launch needs sm_90 or newer, such as 'sm_90a'")
    return _cubin(kernel, behaviour, arch)


@functools.cache
def _cubin(kernel: str, behaviour: Behaviour, arch: str) -> bytes:
    return compiled(source(kernel, behaviour), kernel, arch)


@functools.cache
def _text(name: str) -> str:
    return (_SOURCES / name).read_text(encoding="utf-8")


def compiled(text: str, name: str, arch: str) -> bytes:
    """CUDA C++ to cubin through NVRTC, through the disk cache."""
    std = "c++17"
    key = hashlib.sha256("\0".join((_nvrtc_version(), arch, std, name, text)).encode()).hexdigest()
    path = cache_directory() / f"{name}-{arch}-{key[:40]}.cubin"
    code = _read_entry(path)
    if code is None:
        code = _compile(text, name, arch, std)
        _write_entry(path, code)
    return code


def cache_directory() -> Path:
    """Where machine code is kept on disk; need not exist."""
    chosen = os.environ.get("PDL_STRESS_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "pdl-stress"


def _compile(text: str, name: str, arch: str, std: str) -> bytes:
    from cuda.core import Program, ProgramOptions

    code = Program(text, "c++", ProgramOptions(name=name, std=std, arch=arch)).compile("cubin").code
    if not isinstance(code, bytes):
        raise TypeError(f"NVRTC gave {type(code).__name__} for {name}, expected bytes")
    return code


@functools.cache
def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"nvrtcVersion failed: {error.name}; install the NVRTC that belongs to cuda-bindings")
    return f"{major}.{minor}"


def _read_entry(path: Path) -> bytes | None:
    """The code of a cache entry, None where it is absent or damaged."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, code = entry[len(_MAGIC) : len(_MAGIC) + 32], entry[len(_MAGIC) + 32 :]
    if not entry.startswith(_MAGIC) or hashlib.sha256(code).digest() != digest:
        return None
    return code


def _write_entry(path: Path, code: bytes) -> None:
    """Atomic: readers see a whole entry or none. A cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
