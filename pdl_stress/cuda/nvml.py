"""What only the management library knows about a GPU: driver release, MIG, clocks.

NVML through ``cuda.bindings`` where that has it, else ``nvidia-smi``, else nothing: no run depends on these facts.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

_SMI_TIMEOUT = 20  # seconds; a GPU that fell off the bus can make nvidia-smi hang
_SMI_FIELDS = ("driver_version", "mig.mode.current", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")


@dataclass(frozen=True)
class State:
    """One GPU as the management library sees it; None where it does not say. Clocks in MHz."""

    driver: str | None = None
    mig: bool | None = None
    sm_clock: int | None = None
    mem_clock: int | None = None
    sm_clock_max: int | None = None
    mem_clock_max: int | None = None


def count() -> int | None:
    """Return the number of GPUs that the driver manages, hidden ones too; None if it cannot be asked."""
    try:
        nvml = _open()
    except Exception:  # no bindings, no library, no driver: each has its own error, all mean the same here
        return None
    try:
        return int(nvml.device_get_count_v2())
    except Exception:  # asked for a fact, not for a verdict
        return None
    finally:
        _ask(nvml.shutdown)


def state(pci_bus_id: str) -> State:
    """Return the state of the GPU at ``pci_bus_id`` (``domain:bus:device.function``); never raises."""
    try:
        nvml = _open()
    except Exception:  # as in count()
        return _state_by_smi(pci_bus_id)
    try:
        handle = nvml.device_get_handle_by_pci_bus_id_v2(pci_bus_id)
        return State(
            driver=_ask(nvml.system_get_driver_version),
            mig=_flag(_ask(nvml.device_get_mig_mode, handle)),
            sm_clock=_ask(nvml.device_get_clock_info, handle, nvml.ClockType.CLOCK_SM),
            mem_clock=_ask(nvml.device_get_clock_info, handle, nvml.ClockType.CLOCK_MEM),
            sm_clock_max=_ask(nvml.device_get_max_clock_info, handle, nvml.ClockType.CLOCK_SM),
            mem_clock_max=_ask(nvml.device_get_max_clock_info, handle, nvml.ClockType.CLOCK_MEM),
        )
    except Exception:  # the device is known to CUDA and not to NVML: seen in containers
        return _state_by_smi(pci_bus_id)
    finally:
        _ask(nvml.shutdown)


def _open() -> Any:
    """Import and initialise NVML. Its functions raise on a bad return code. The caller shuts it down."""
    from cuda.bindings import nvml  # added within the 13.x series

    nvml.init_v2()
    return nvml


def _ask(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception:  # not supported by this GPU, or not permitted here
        return None


def _flag(mig_mode: tuple[int, int] | None) -> bool | None:
    return None if mig_mode is None else bool(mig_mode[0])


def _state_by_smi(pci_bus_id: str) -> State:
    program = shutil.which("nvidia-smi")
    if program is None:
        return State()
    query = f"--query-gpu={','.join(_SMI_FIELDS)}"
    try:
        done = subprocess.run(
            [program, f"--id={pci_bus_id}", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SMI_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return State()
    fields = [field.strip() for field in done.stdout.strip().split(",")]
    if len(fields) != len(_SMI_FIELDS):
        return State()
    numbers = [int(field) if field.isdigit() else None for field in fields[2:]]
    mig = {"Enabled": True, "Disabled": False}.get(fields[1])
    return State(fields[0], mig, *numbers)
