"""The software that a run on the GPU stands on: torch, CUDA's Python packages, NVRTC, binary tools, libraries of ops.

Nothing here needs a driver. torch is imported (its build tells whether it can use CUDA); FlashInfer and TensorRT-LLM
are looked up but never imported, since TensorRT-LLM starts MPI on import.
"""

from __future__ import annotations

import importlib
import inspect as inspection
import re
import subprocess
from typing import Any

from pdl_stress.catalog.ops import LIBRARIES
from pdl_stress.cuda.findings import Finding, Status
from pdl_stress.cuda.provenance import version_of
from pdl_stress.sass.tools import find_tool

_TOOL_TIMEOUT = 20  # seconds

_TOOLS = {
    "nvdisasm": "the audit and the check of controls' machine code need it: pip install nvidia-cuda-nvdisasm",
    "cuobjdump": "cubins inside libraries cannot be listed without it: pip install nvidia-cuda-cuobjdump",
    "nvcc": "only FlashInfer, which builds its kernels with it, needs the CUDA toolkit",
    "compute-sanitizer": "not needed for a verdict",
}

_TORCH = "install a CUDA build of torch >= 2.8"

_FLASHINFER_BUILT = "flashinfer-jit-cache"
"""The distribution with FlashInfer's kernels, built."""

_FLASHINFER_NVCC = (
    f"install the CUDA toolkit of torch's CUDA version and ninja, and set CUDA_HOME; or install {_FLASHINFER_BUILT}"
)


def blocker() -> str | None:
    """Return why this software cannot drive a GPU that is present, with what to do, or None if it can."""
    for finding in (
        _torch(needed=True),
        _graphs(needed=True),
        _package("cuda-core", needed=True),
        _bindings(needed=True),
    ):
        if finding.status is Status.UNUSABLE:
            return f"{finding.name}: {finding.value}; {finding.advice}"
    return None


def inspect(*, needed: bool) -> list[Finding]:
    """Return the findings on everything but the ops. ``needed``: a device is present, so what it needs is an error."""
    return [
        _torch(needed=needed),
        _graphs(needed=needed),
        _package("cuda-core", needed=needed),
        _bindings(needed=needed),
        _nvrtc(),
        _headers(),
        *(_tool(name, advice) for name, advice in _TOOLS.items()),
    ]


def ops(device_problem: str | None) -> list[Finding]:
    """Return which implementations of the kernels are available. ``device_problem``: why no kernel can run at all."""
    native = "ops: native"
    nvrtc = nvrtc_version()
    if device_problem is not None:
        ours = Finding(native, Status.ABSENT, f"needs a GPU with PDL: {device_problem}")
    elif nvrtc is None:
        ours = Finding(native, Status.ABSENT, "needs NVRTC, which does not load", "pip install nvidia-cuda-nvrtc")
    else:
        ours = Finding(native, Status.OK, f"compiled at run time by NVRTC {nvrtc}")
    return [
        ours,
        *(_library(op, device_problem) for op in LIBRARIES),
    ]


def torch_cuda() -> str | None:
    """Return the CUDA version that torch was built with; None for a CPU build or where torch cannot be imported."""
    torch = _import("torch")
    version = None if torch is None else torch.version.cuda
    return None if version is None else str(version)


def nvrtc_version() -> str | None:
    """Return NVRTC's version, ``"13.5"``, from the library itself; None if it does not load."""
    try:
        from cuda.bindings import nvrtc

        code, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):  # the package or the library is missing; pathfinder's error is a RuntimeError
        return None
    return f"{major}.{minor}" if int(code) == 0 else None


# --- single findings ------------------------------------------------------------------------------------------------


def _torch(*, needed: bool) -> Finding:
    missing = Status.UNUSABLE if needed else Status.ABSENT
    version = version_of("torch")
    if version is None or _import("torch") is None:
        return Finding("torch", missing, "not installed" if version is None else "does not import", _TORCH)
    built = torch_cuda()
    if built is None:
        # Without a device, a CPU build is what one wants.
        status = Status.UNUSABLE if needed else Status.OK
        return Finding("torch", status, f"{version}, built without CUDA", _TORCH if needed else "")
    return Finding("torch", Status.OK, f"{version}, built with CUDA {built}")


def _graphs(*, needed: bool) -> Finding:
    name = "torch CUDAGraph(keep_graph=True)"
    torch = _import("torch")
    if torch is None:
        return Finding(name, Status.ABSENT, "no torch", _TORCH)
    if "keep_graph" in inspection.signature(torch.cuda.CUDAGraph.__new__).parameters:
        return Finding(name, Status.OK, "supported")
    return Finding(name, Status.UNUSABLE if needed else Status.ABSENT, "not supported", _TORCH)


def _package(distribution: str, *, needed: bool) -> Finding:
    version = version_of(distribution)
    if version is None:
        status = Status.UNUSABLE if needed else Status.ABSENT
        return Finding(distribution, status, "not installed", f"pip install {distribution}")
    return Finding(distribution, Status.OK, version)


def _bindings(*, needed: bool) -> Finding:
    finding = _package("cuda-bindings", needed=needed)
    if finding.status is Status.OK and int(finding.value.split(".")[0]) < 13:
        # Calls that read and write a graph's edge data changed their signatures with CUDA 13.
        status = Status.UNUSABLE if needed else Status.ABSENT
        return Finding(finding.name, status, f"{finding.value}, older than 13", "pip install 'cuda-bindings>=13,<14'")
    return finding


def _nvrtc() -> Finding:
    version = nvrtc_version()
    if version is None:
        return Finding("NVRTC", Status.ABSENT, "does not load", "pip install nvidia-cuda-nvrtc")
    return Finding("NVRTC", Status.OK, version)


def _headers() -> Finding:
    name = "NVRTC bundled headers"
    # 13.3 is the first NVRTC with them; CUDA builds of torch may pin an older one.
    advice = "they came with NVRTC 13.3; with an older one, kernels need the include folder of a CUDA toolkit"
    try:
        from cuda.bindings import nvrtc

        code, info, _ = nvrtc.nvrtcGetBundledHeadersInfo()
    except (
        ImportError,
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # from before the headers were bundled; 13.0 raises TypeError
        return Finding(name, Status.ABSENT, "this NVRTC has none", advice)
    if int(code) != 0 or not info.available:
        return Finding(name, Status.ABSENT, "this NVRTC has none", advice)
    return Finding(name, Status.OK, f"CUDA {info.cudaVersionMajor}.{info.cudaVersionMinor}, {info.numFiles} files")


def _tool(name: str, advice: str) -> Finding:
    program = find_tool(name)
    if program is None:
        return Finding(name, Status.ABSENT, "not found", advice)
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_TOOL_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return Finding(name, Status.ABSENT, "found, but it does not run", advice)
    match = re.search(r"\bV(?:ersion )?(\d+(?:\.\d+)+)", done.stdout)
    return Finding(name, Status.OK, match[1] if match else "found")


def _library(op: str, device_problem: str | None) -> Finding:
    name, library = f"ops: {op}", LIBRARIES[op]
    refusal = library.refusal()
    if refusal is not None:
        found = "not installed" if not library.installed() else refusal.found
        return Finding(name, Status.ABSENT, found, refusal.advice)
    found = f"{library.distribution} {library.version() or 'of unknown version'}"
    if device_problem is not None:
        return Finding(name, Status.ABSENT, f"{found}, needs a GPU with PDL: {device_problem}")
    if op == "flashinfer" and find_tool("nvcc") is None and version_of(_FLASHINFER_BUILT) is None:
        return Finding(name, Status.ABSENT, f"{found}, and no nvcc to build its kernels with", _FLASHINFER_NVCC)
    allowed = library.version_refusal()
    if allowed is not None:  # and not refused: the environment lets it run
        return Finding(name, Status.NOTE, allowed.found, allowed.advice)
    return Finding(name, Status.OK, found)


def _import(name: str) -> Any:
    """Import a module that may be missing, or broken in its native part; None then."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None
