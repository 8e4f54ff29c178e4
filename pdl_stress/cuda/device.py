"""Is there a GPU that a run can use, and may the run give a verdict? Behind ``pdl-stress doctor`` and the campaign.

Works where there is no driver and no GPU. Creates no CUDA context, so it costs no device memory. Every return code of
the driver is checked.

The rules: ``--machine auto`` uses the model only if no NVIDIA device is there; a device that is there and cannot be
used is an error, never a silent model run. PDL needs compute capability 9.0 (Programming Guide, "Programmatic Dependent
Launch"); an older device is unusable and says so (fault F24).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from pdl_stress._version import __version__
from pdl_stress.cuda import interference, nvml, provenance, toolchain
from pdl_stress.cuda.findings import Finding, Status

__all__ = [
    "PDL_CAPABILITY",
    "Finding",
    "Gpu",
    "Presence",
    "Sighting",
    "Status",
    "environment",
    "inspect",
    "presence",
    "verdict_blockers",
]

PDL_CAPABILITY = (9, 0)
"""First compute capability with ``griddepcontrol``. On older ones the attribute is refused or does nothing."""

_DRIVER_CUDA = (13, 0)  # cubins of an NVRTC 13 load on drivers of the same major version or newer, not on 12.x

_DEV = Path("/dev")
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA_PCI_VENDOR = "0x10de"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME_BYTES = 256
_BUS_ID_BYTES = 32


class Presence(Enum):
    """Whether a run on the GPU is possible here."""

    NONE = "none"
    """No NVIDIA device for this process: ``auto`` uses the model."""
    USABLE = "usable"
    UNUSABLE = "unusable"
    """A device is there and cannot be used: an error for ``auto`` and ``cuda`` alike."""


class Sighting(NamedTuple):
    """What :func:`presence` saw, and why it says so, in words for the user."""

    presence: Presence
    reason: str


@dataclass(frozen=True)
class Gpu:
    """One device as the driver describes it."""

    name: str
    capability: tuple[int, int]
    pci_bus_id: str
    prohibited: bool
    """Compute mode *prohibited*: no process may create a context."""
    mps: bool
    """This process is a client of the Multi-Process Service."""


@dataclass(frozen=True)
class _Driver:
    """One look at the driver. ``sighting`` is final unless devices were found."""

    sighting: Sighting | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()


class _DriverError(Exception):
    """A call of the driver returned a code other than success."""

    def __init__(self, call: str, code: Any) -> None:
        self.code_name = getattr(code, "name", str(code))
        super().__init__(f"{call} returned {self.code_name} ({int(code)})")


def presence(device_index: int = 0) -> Sighting:
    """Say whether device ``device_index``, as CUDA counts them, can be used by this process, and why.

    Imports torch only if the device itself is fit, to see whether torch can drive it.
    """
    return _judge(_look(), device_index)


def verdict_blockers() -> list[Finding]:
    """Return what would make a verdict of a run in this process INCONCLUSIVE; empty if nothing does."""
    return [finding for finding in interference.inspect() if finding.status is Status.BLOCKS_VERDICT]


def inspect(device_index: int = 0) -> list[Finding]:
    """Return all findings on this machine and process, in the order in which to read them.

    One of them is UNUSABLE exactly if :func:`presence` is. Never raises for what it finds.
    """
    driver = _look()
    sighting = _judge(driver, device_index)
    there = sighting.presence is not Presence.NONE
    device_problem = None if sighting.presence is Presence.USABLE else sighting.reason
    return [
        _device_finding(sighting),
        *_gpu_findings(driver, device_index),
        *toolchain.inspect(needed=there),
        *interference.inspect(),
        *_sharing_findings(driver, device_index),
        *toolchain.ops(device_problem),
    ]


def environment(device_index: int = 0, machine: str | None = None) -> dict[str, object]:
    """Return the ``environment`` of ``results.json``: which code ran where. Clocks in MHz; None for what is not known.

    ``machine`` is what ran, ``"cuda"`` or ``"model"``; by default what ``auto`` would take. No host name, no user name,
    no absolute path.
    """
    driver = _look()
    gpu = driver.gpus[device_index] if 0 <= device_index < len(driver.gpus) else None
    state = nvml.state(gpu.pci_bus_id) if gpu else None
    usable = _judge(driver, device_index).presence is Presence.USABLE
    return {
        "machine": machine or ("cuda" if usable else "model"),
        "gpu": gpu.name if gpu else None,
        "capability": _dotted(gpu.capability) if gpu else None,
        "driver": state.driver if state else None,
        "cuda": _dotted(driver.cuda) if driver.cuda else None,
        "torch_cuda": toolchain.torch_cuda(),
        "nvrtc": toolchain.nvrtc_version(),
        **provenance.software(),
        "version": __version__,
        "source_sha256": provenance.source_sha256(),
        "commit": provenance.commit(),
        "mig": state.mig if state else None,
        "clocks": _clocks(state),
    }


# --- the driver -----------------------------------------------------------------------------------------------------


def _look() -> _Driver:
    """Ask the driver what is there, telling apart: no driver, no device, a hidden device, a device that fails."""
    try:
        driver = _import_driver()
        cuda = _cuda_version(driver)
    except ImportError:
        return _Driver(_without_driver("cuda-bindings is not installed: pip install 'cuda-bindings>=13,<14'"))
    except (RuntimeError, OSError):  # cuda.pathfinder's errors for a missing library are RuntimeErrors
        return _Driver(_without_driver("its driver library (libcuda) cannot be loaded: install the NVIDIA driver"))
    except _DriverError as error:
        return _Driver(Sighting(Presence.UNUSABLE, f"the NVIDIA driver does not answer: {error}"))
    try:
        _call(driver.cuInit, 0)
        count = int(_call(driver.cuDeviceGetCount))
        if count == 0:
            return _Driver(_without_device(), cuda)
        return _Driver(None, cuda, tuple(_describe(driver, index) for index in range(count)))
    except _DriverError as error:
        if error.code_name == "CUDA_ERROR_NO_DEVICE":
            return _Driver(_without_device(), cuda)
        if error.code_name == "CUDA_ERROR_STUB_LIBRARY":
            return _Driver(_without_driver("the libcuda that was loaded is the toolkit's stub, not a driver"), cuda)
        reason = (
            f"an NVIDIA driver is installed, but cannot be used: {error}; try nvidia-smi, reload the driver or reboot"
        )
        return _Driver(Sighting(Presence.UNUSABLE, reason), cuda)


def _import_driver() -> Any:
    from cuda.bindings import driver

    return driver


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver through ``cuda.bindings``, check the code, return the one value that comes with it, if any."""
    code, *values = function(*arguments)
    if int(code) != 0:
        raise _DriverError(getattr(function, "__name__", "a driver call"), code)
    return values[0] if values else None


def _cuda_version(driver: Any) -> tuple[int, int]:
    number = int(_call(driver.cuDriverGetVersion))  # 1000 * major + 10 * minor
    return number // 1000, number % 1000 // 10


def _describe(driver: Any, index: int) -> Gpu:
    attribute = driver.CUdevice_attribute
    device = _call(driver.cuDeviceGet, index)

    def get(name: str) -> int:
        return int(_call(driver.cuDeviceGetAttribute, getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    try:
        mps = bool(get("MPS_ENABLED"))
    except (AttributeError, _DriverError):  # newer than the oldest driver and bindings that we take
        mps = False
    return Gpu(
        name=_text(_call(driver.cuDeviceGetName, _NAME_BYTES, device)),
        capability=(get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR")),
        pci_bus_id=_text(_call(driver.cuDeviceGetPCIBusId, _BUS_ID_BYTES, device)),
        prohibited=get("COMPUTE_MODE") == int(driver.CUcomputemode.CU_COMPUTEMODE_PROHIBITED),
        mps=mps,
    )


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode(errors="replace")


# --- the judgement --------------------------------------------------------------------------------------------------


def _judge(driver: _Driver, index: int) -> Sighting:
    if driver.sighting is not None:
        return driver.sighting
    if not 0 <= index < len(driver.gpus):
        return Sighting(Presence.UNUSABLE, f"there is no device {index}: CUDA sees {len(driver.gpus)}, counted from 0")
    gpu = driver.gpus[index]
    problem = _unfit(gpu, driver.cuda) or toolchain.blocker()
    if problem is not None:
        return Sighting(Presence.UNUSABLE, f"{gpu.name}: {problem}")
    return Sighting(Presence.USABLE, f"{gpu.name}, compute capability {_dotted(gpu.capability)}")


def _unfit(gpu: Gpu, cuda: tuple[int, int] | None) -> str | None:
    if gpu.capability < PDL_CAPABILITY:
        return (
            f"compute capability {_dotted(gpu.capability)} has no Programmatic Dependent Launch, which came with "
            f"{_dotted(PDL_CAPABILITY)} (Hopper); use a newer GPU, or --machine model"
        )
    if cuda is not None and cuda < _DRIVER_CUDA:
        return (
            f"its driver supports CUDA {_dotted(cuda)}, at least {_dotted(_DRIVER_CUDA)} is needed; update the driver"
        )
    if gpu.prohibited:
        return "its compute mode is 'prohibited'; an administrator can change that with nvidia-smi --compute-mode=0"
    return None


def _without_driver(why: str) -> Sighting:
    """No driver to ask. Device files tell whether a device was given to this machine (or container) all the same."""
    if _device_files():
        return Sighting(Presence.UNUSABLE, f"an NVIDIA device is present, but {why}")
    if _on_pci_bus():
        # A container sees the PCI devices of its host, whether or not it may use them: no device of ours.
        return Sighting(
            Presence.NONE, "no NVIDIA driver; the PCI bus shows an NVIDIA device that this system does not use"
        )
    return Sighting(Presence.NONE, "no NVIDIA driver and no NVIDIA device")


def _without_device() -> Sighting:
    """The driver sees no device: there is none, or it is hidden, or it fails."""
    if not (_device_files() or nvml.count()):
        return Sighting(Presence.NONE, "an NVIDIA driver is installed, but there is no NVIDIA device")
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        return Sighting(
            Presence.UNUSABLE, "an NVIDIA device is present, but CUDA finds none: try nvidia-smi, check permissions"
        )
    # The first invalid entry hides itself and all after it (Programming Guide); these hide all of them on purpose.
    if visible.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return Sighting(Presence.NONE, f"the NVIDIA device is hidden by {_VISIBLE}={visible!r}")
    return Sighting(Presence.UNUSABLE, f"{_VISIBLE}={visible!r} names no device that is present; correct or unset it")


def _device_files() -> bool:
    return any(path.name[len("nvidia") :].isdigit() for path in _DEV.glob("nvidia*"))


def _on_pci_bus() -> bool:
    for device in _PCI.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _NVIDIA_PCI_VENDOR and kind.startswith("0x03"):  # display controllers, 3D controllers among them
            return True
    return False


# --- findings -------------------------------------------------------------------------------------------------------


def _device_finding(sighting: Sighting) -> Finding:
    status = {
        Presence.NONE: Status.ABSENT,
        Presence.USABLE: Status.OK,
        Presence.UNUSABLE: Status.UNUSABLE,
    }[sighting.presence]
    advice = "runs use the model: no kernel is launched" if sighting.presence is Presence.NONE else ""
    return Finding("NVIDIA device", status, sighting.reason, advice)


def _gpu_findings(driver: _Driver, index: int) -> list[Finding]:
    findings: list[Finding] = []
    if driver.cuda is not None:
        old = driver.cuda < _DRIVER_CUDA and bool(driver.gpus)
        status = Status.UNUSABLE if old else Status.OK
        advice = f"update the driver: CUDA {_dotted(_DRIVER_CUDA)} or newer is needed" if old else ""
        findings.append(Finding("driver's CUDA", status, _dotted(driver.cuda), advice))
    if not 0 <= index < len(driver.gpus):
        return findings
    gpu = driver.gpus[index]
    state = nvml.state(gpu.pci_bus_id)
    has_pdl = gpu.capability >= PDL_CAPABILITY
    others = f" (device {index} of {len(driver.gpus)})" if len(driver.gpus) > 1 else ""
    return [
        Finding("GPU", Status.OK, gpu.name + others),
        Finding(
            "compute capability",
            Status.OK if has_pdl else Status.UNUSABLE,
            f"{_dotted(gpu.capability)}, {'with' if has_pdl else 'without'} Programmatic Dependent Launch",
            "" if has_pdl else f"PDL needs {_dotted(PDL_CAPABILITY)} or newer",
        ),
        Finding("driver", Status.OK if state.driver else Status.NOTE, state.driver or "release not known"),
        *findings,
    ]


def _sharing_findings(driver: _Driver, index: int) -> list[Finding]:
    """Who else may use the device: co-tenants change timing. That weakens nothing, but explains numbers."""
    findings: list[Finding] = []
    gpu = driver.gpus[index] if 0 <= index < len(driver.gpus) else None
    visible = os.environ.get(_VISIBLE)
    if visible is not None:
        findings.append(Finding(_VISIBLE, Status.NOTE, repr(visible), "device numbers count these only"))
    if (gpu and gpu.mps) or os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        value = "this process is a client" if gpu and gpu.mps else "CUDA_MPS_PIPE_DIRECTORY is set"
        findings.append(Finding("MPS", Status.NOTE, value, "other clients may share the SMs and change the timing"))
    elif gpu:
        findings.append(Finding("MPS", Status.OK, "off"))
    mig = nvml.state(gpu.pci_bus_id).mig if gpu else None
    if mig:
        findings.append(Finding("MIG", Status.NOTE, "on", "this is a slice of a GPU: fewer SMs, other timing"))
    elif gpu:
        findings.append(Finding("MIG", Status.OK, "off" if mig is False else "not known, or not supported"))
    return findings


def _clocks(state: nvml.State | None) -> dict[str, int | None] | None:
    if state is None or state.sm_clock is None:
        return None
    return {
        "sm_mhz": state.sm_clock,
        "sm_max_mhz": state.sm_clock_max,
        "mem_mhz": state.mem_clock,
        "mem_max_mhz": state.mem_clock_max,
    }


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
