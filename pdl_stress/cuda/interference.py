"""Finds what would change the timing of kernels from outside: debuggers, profilers, sanitizers, blocking launches.

Ordering faults under PDL show only when kernels overlap. A tool that serializes launches, instruments kernels or stops
threads hides them, so a clean run under such a tool says nothing: its verdict is INCONCLUSIVE.

Sources of the names: the CUDA Programming Guide (``CUDA_LAUNCH_BLOCKING``, ``CUDA_DEVICE_MAX_CONNECTIONS``,
``CUDA_MPS_*``), the CUPTI guide (``CUDA_INJECTION64_PATH``), the NVTX headers (``NVTX_INJECTION64_PATH``), cuda-gdb's
sources (``CUDBG_INJECTION_PATH``), proc(5) (``TracerPid``). What the Nsight tools and compute-sanitizer export to the
process that they start is not documented; the names here are those that they do export and that other projects
(GROMACS among them) test for. A tool that leaves no such trace is not seen.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from pdl_stress.cuda.findings import Finding, Status

_PROC = Path("/proc")

_INJECTION = "CUDA_INJECTION64_PATH"

# Exported by a tool to the process that it profiles. Settings that people leave in their shells are not here.
_PROFILER_PREFIXES = ("NV_NSIGHT_INJECTION_", "NV_TPS_LAUNCH_", "NVPROF_")
_PROFILER_NAMES = ("NSYS_PROFILING_SESSION_ID", "NV_COMPUTE_PROFILER_PERFWORKS_DIR")
_SANITIZER_PREFIXES = ("NV_SANITIZER_INJECTION_",)

# Libraries that such tools put into the process, with the tool's name for people.
_TOOL_LIBRARIES = {
    "libToolsInjection": "Nsight Systems",
    "libcuda-injection": "Nsight Compute",
    "libTreeLauncher": "the launcher of an NVIDIA tool",
    "libInterceptorInjectionTarget": "compute-sanitizer",
    "libsanitizer-collection": "compute-sanitizer",
    "libsanitizer-public": "compute-sanitizer",
}
_SANITIZER = "compute-sanitizer"
_LIBRARY = re.compile(r"/([^/\s]+\.so[^/\s]*)")


def inspect() -> list[Finding]:
    """Return one finding per kind of interference, with status OK where there is none."""
    libraries = _foreign_libraries()
    return [_launch_blocking(), _debugger(), _profiler(libraries), _sanitizer(libraries), *_notes(libraries)]


def _launch_blocking() -> Finding:
    name = "CUDA_LAUNCH_BLOCKING"
    value = os.environ.get(name, "")
    if value in ("", "0"):
        return Finding(name, Status.OK, "off")
    return Finding(name, Status.BLOCKS_VERDICT, f"set to {value!r}: each launch waits", f"unset it: unset {name}")


def _debugger() -> Finding:
    name = "debugger"
    tracer = _tracer()
    if tracer:
        return Finding(
            name,
            Status.BLOCKS_VERDICT,
            f"this process is traced by {tracer}",
            "run without a debugger or strace; use --plant and the reports to look into a failure",
        )
    if os.environ.get("CUDBG_INJECTION_PATH"):
        return Finding(
            name, Status.BLOCKS_VERDICT, "CUDBG_INJECTION_PATH is set", "unset it: unset CUDBG_INJECTION_PATH"
        )
    return Finding(name, Status.OK, "none attached")


def _profiler(libraries: dict[str, str]) -> Finding:
    found = _set_variables(_PROFILER_NAMES, _PROFILER_PREFIXES)
    # The sanitizers use CUDA's injection variable too; theirs is reported as a sanitizer.
    injected = os.environ.get(_INJECTION, "")
    if injected and not _is_sanitizer(injected):
        found.append(f"{_INJECTION} = {_base_name(injected)}")
    found += [f"{library} ({tool})" for library, tool in libraries.items() if tool != _SANITIZER]
    if _torch_profiler_runs():
        found.append("torch.profiler is recording")
    if getattr(sys.modules.get("pdl_stress.cuda.profiler"), "used", False):
        found.append("pdl-stress has profiled in this process: start another, or give stress() a function")
    if found:
        return Finding(
            "profiler",
            Status.BLOCKS_VERDICT,
            "; ".join(found),
            "run without nsys, ncu or torch.profiler, and unset what they left in the environment",
        )
    return Finding("profiler", Status.OK, "none found")


def _sanitizer(libraries: dict[str, str]) -> Finding:
    found = _set_variables((), _SANITIZER_PREFIXES)
    injected = os.environ.get(_INJECTION, "")
    if injected and _is_sanitizer(injected):
        found.append(f"{_INJECTION} = {_base_name(injected)}")
    found += [library for library, tool in libraries.items() if tool == _SANITIZER]
    if found:
        return Finding(
            "sanitizer",
            Status.BLOCKS_VERDICT,
            "; ".join(found),
            "run without compute-sanitizer: it serializes kernels, so PDL never overlaps under it",
        )
    return Finding("sanitizer", Status.OK, "none found")


def _notes(libraries: dict[str, str]) -> Iterable[Finding]:
    environ = os.environ
    nvtx = environ.get("NVTX_INJECTION64_PATH")
    if nvtx:
        # No blocker: some container images set it for every process, and it acts only on code that uses NVTX.
        yield Finding(
            "NVTX injection",
            Status.NOTE,
            f"NVTX_INJECTION64_PATH = {_base_name(nvtx)}",
            "unset it if a profiler was not meant to be loaded",
        )
    connections = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections:
        yield Finding(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            Status.NOTE,
            connections,
            "few connections serialize streams: perturbations that use a second stream may do nothing",
        )
    trtllm = environ.get("TRTLLM_ENABLE_PDL")
    if trtllm:
        yield Finding(
            "TRTLLM_ENABLE_PDL",
            Status.NOTE,
            trtllm,
            "" if trtllm == "1" else "TensorRT-LLM's own kernels run without PDL: their chains show no overlap",
        )


# --- evidence -------------------------------------------------------------------------------------------------------


def _set_variables(names: tuple[str, ...], prefixes: tuple[str, ...]) -> list[str]:
    """Names, not values: values may hold paths."""
    return sorted(
        f"{name} is set" for name, value in os.environ.items() if value and (name in names or name.startswith(prefixes))
    )


def _foreign_libraries() -> dict[str, str]:
    """Map the file names of tool libraries, preloaded or mapped into this process, to the tool they belong to."""
    names = {_base_name(path) for path in re.split(r"[:\s]+", os.environ.get("LD_PRELOAD", "")) if path}
    with contextlib.suppress(OSError):  # no procfs: macOS, Windows
        names |= set(_LIBRARY.findall((_PROC / "self" / "maps").read_text(errors="replace")))
    return {name: tool for name in sorted(names) for stem, tool in _TOOL_LIBRARIES.items() if name.startswith(stem)}


def _tracer() -> str:
    """Name the process that traces this one, or return an empty string."""
    try:
        status = (_PROC / "self" / "status").read_text()
    except OSError:
        return ""
    match = re.search(r"^TracerPid:\s*(\d+)", status, re.MULTILINE)
    if match is None or int(match[1]) == 0:
        return ""
    try:
        return (_PROC / match[1] / "comm").read_text().strip() or "another process"
    except OSError:
        return "another process"


def _torch_profiler_runs() -> bool:
    """Whether torch.profiler records now. It does not where torch was never imported, so torch is not imported here.

    CUPTI's library alone proves nothing: CUDA builds of torch link it, so it is mapped in each of their processes.
    """
    profiler = sys.modules.get("torch.autograd.profiler")
    return bool(getattr(profiler, "_is_profiler_enabled", False))


def _is_sanitizer(path: str) -> bool:
    return "sanitizer" in _base_name(path).lower()


def _base_name(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]
