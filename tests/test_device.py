"""The inspection of the machine, on machines that are made up here: a fake driver, fake folders, fake variables."""

from __future__ import annotations

import enum
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdl_stress._version import __version__
from pdl_stress.cuda import device, interference, nvml, toolchain
from pdl_stress.cuda.device import Presence, Status

ROOT = Path(__file__).resolve().parents[1]


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_STUB_LIBRARY = 34
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803
    CUDA_ERROR_UNKNOWN = 999


class FakeDriver:
    """``cuda.bindings.driver`` for made-up devices: same names, same ``(code, value)`` results."""

    class CUdevice_attribute(enum.IntEnum):
        CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
        CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133

    class CUcomputemode(enum.IntEnum):
        CU_COMPUTEMODE_DEFAULT = 0
        CU_COMPUTEMODE_PROHIBITED = 2

    def __init__(
        self,
        *capabilities: tuple[int, int],
        init: Code = Code.CUDA_SUCCESS,
        version: int = 13000,
        mode: int = 0,
        mps: int = 0,
        fails: str = "",
    ) -> None:
        self.capabilities, self.init, self.version, self.fails = capabilities, init, version, fails
        self.attributes = {20: mode, 133: mps}

    def _result(self, call: str, *values: Any) -> tuple[Any, ...]:
        if self.fails == call:
            return (Code.CUDA_ERROR_UNKNOWN, *(None for _ in values))
        return (Code.CUDA_SUCCESS, *values)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self._result("cuDriverGetVersion", self.version)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        return (self.init,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._result("cuDeviceGetCount", len(self.capabilities))

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return self._result("cuDeviceGet", index)

    def cuDeviceGetName(self, length: int, index: int) -> tuple[Any, ...]:
        return self._result("cuDeviceGetName", f"Made-up {index}".encode().ljust(length, b"\0"))

    def cuDeviceGetPCIBusId(self, length: int, index: int) -> tuple[Any, ...]:
        return self._result("cuDeviceGetPCIBusId", f"0000:0{index}:00.0".encode().ljust(length, b"\0"))

    def cuDeviceGetAttribute(self, attribute: int, index: int) -> tuple[Any, ...]:
        major, minor = self.capabilities[index]
        values = {75: major, 76: minor, **self.attributes}
        return self._result("cuDeviceGetAttribute", values[int(attribute)])


class Machine:
    """Sets up what the modules under test see."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.patch, self.root = patch, root
        for name in ("dev", "pci", "proc/self"):
            (root / name).mkdir(parents=True)
        patch.setattr(device, "_DEV", root / "dev")
        patch.setattr(device, "_PCI", root / "pci")
        patch.setattr(interference, "_PROC", root / "proc")
        patch.setattr(nvml, "count", lambda: None)
        patch.setattr(nvml, "state", lambda bus_id: nvml.State())
        patch.setattr(toolchain, "blocker", lambda: None)
        self.tracer(0)
        self.maps()

    def driver(self, driver: FakeDriver | Exception) -> Machine:
        def load() -> FakeDriver:
            if isinstance(driver, Exception):
                raise driver
            return driver

        self.patch.setattr(device, "_import_driver", load)
        return self

    def files(self, *names: str) -> Machine:
        for name in names:
            (self.root / "dev" / name).touch()
        return self

    def pci(self, vendor: str, kind: str) -> Machine:
        slot = self.root / "pci" / "0000:01:00.0"
        slot.mkdir()
        (slot / "vendor").write_text(vendor + "\n")
        (slot / "class").write_text(kind + "\n")
        return self

    def tracer(self, pid: int, name: str = "") -> Machine:
        (self.root / "proc/self/status").write_text(f"Name:\tpython\nTracerPid:\t{pid}\nUid:\t0\n")
        if name:
            (self.root / f"proc/{pid}").mkdir()
            (self.root / f"proc/{pid}/comm").write_text(name + "\n")
        return self

    def maps(self, *libraries: str) -> Machine:
        lines = [f"7f00-7f01 r-xp 0000 08:01 1234    /opt/some folder/{library}\n" for library in libraries]
        (self.root / "proc/self/maps").write_text("00-01 rw-p 0 00:00 0\n" + "".join(lines))
        return self


_LOADED = ("CUDA_", "CUDBG_", "NVTX_", "NV_", "NSYS_", "NVPROF_", "TRTLLM_", "LD_PRELOAD", "PDL_STRESS_")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine with nothing: no driver, no device files, no variable that matters."""
    for name in list(os.environ):
        if name.startswith(_LOADED):
            monkeypatch.delenv(name)
    return Machine(monkeypatch, tmp_path / "machine").driver(RuntimeError("libcuda not found"))


# --- presence: nothing, something broken, something good --------------------------------------------------------------


def test_no_driver_and_no_device_is_none(machine: Machine) -> None:
    assert device.presence() == (Presence.NONE, "no NVIDIA driver and no NVIDIA device")


def test_no_driver_but_a_device_file_is_unusable(machine: Machine) -> None:
    """A container with the device and without the library: a model run here would hide a broken set-up."""
    machine.files("nvidiactl", "nvidia0")
    seen = device.presence()
    assert seen.presence is Presence.UNUSABLE
    assert "device is present" in seen.reason
    assert "install the NVIDIA driver" in seen.reason


def test_control_files_alone_are_no_device(machine: Machine) -> None:
    machine.files("nvidiactl", "nvidia-uvm", "nvidia-modeset")
    assert device.presence().presence is Presence.NONE


@pytest.mark.parametrize(
    ("vendor", "kind", "told"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x8086", "0x030000", False)],
)
def test_an_unused_device_on_the_bus_is_none_but_told(machine: Machine, vendor: str, kind: str, told: bool) -> None:
    machine.pci(vendor, kind)
    seen = device.presence()
    assert seen.presence is Presence.NONE
    assert ("PCI" in seen.reason) is told


def test_without_bindings_a_device_is_unusable_and_the_fix_is_named(machine: Machine) -> None:
    machine.driver(ImportError("no cuda.bindings"))
    assert device.presence().presence is Presence.NONE
    machine.files("nvidia0")
    seen = device.presence()
    assert seen.presence is Presence.UNUSABLE
    assert "cuda-bindings" in seen.reason


@pytest.mark.parametrize("driver", [FakeDriver(init=Code.CUDA_ERROR_NO_DEVICE), FakeDriver()])
def test_driver_without_device_is_none(machine: Machine, driver: FakeDriver) -> None:
    machine.driver(driver)
    seen = device.presence()
    assert seen == (Presence.NONE, "an NVIDIA driver is installed, but there is no NVIDIA device")


def test_driver_that_misses_a_device_that_is_there_is_unusable(machine: Machine) -> None:
    machine.driver(FakeDriver(init=Code.CUDA_ERROR_NO_DEVICE)).files("nvidia0")
    assert device.presence().presence is Presence.UNUSABLE


def test_driver_that_misses_a_device_that_nvml_counts_is_unusable(machine: Machine) -> None:
    machine.driver(FakeDriver(init=Code.CUDA_ERROR_NO_DEVICE)).patch.setattr(nvml, "count", lambda: 1)
    assert device.presence().presence is Presence.UNUSABLE


@pytest.mark.parametrize("value", ["", "-1", "-1,0", "NoDevFiles"])
def test_a_device_that_the_user_hid_is_none_and_told(machine: Machine, value: str) -> None:
    machine.driver(FakeDriver(init=Code.CUDA_ERROR_NO_DEVICE)).files("nvidia0").patch.setenv(
        "CUDA_VISIBLE_DEVICES", value
    )
    seen = device.presence()
    assert seen.presence is Presence.NONE
    assert f"hidden by CUDA_VISIBLE_DEVICES={value!r}" in seen.reason


def test_a_wrong_choice_of_device_is_unusable_not_hidden(machine: Machine) -> None:
    machine.driver(FakeDriver(init=Code.CUDA_ERROR_NO_DEVICE)).files("nvidia0").patch.setenv(
        "CUDA_VISIBLE_DEVICES", "7"
    )
    seen = device.presence()
    assert seen.presence is Presence.UNUSABLE
    assert "'7' names no device" in seen.reason


def test_a_broken_driver_is_unusable_with_its_code(machine: Machine) -> None:
    machine.driver(FakeDriver(init=Code.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH))
    seen = device.presence()
    assert seen.presence is Presence.UNUSABLE
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)" in seen.reason


def test_the_toolkit_stub_is_no_driver(machine: Machine) -> None:
    machine.driver(FakeDriver(init=Code.CUDA_ERROR_STUB_LIBRARY))
    assert device.presence().presence is Presence.NONE


@pytest.mark.parametrize(
    "call",
    [
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetPCIBusId",
        "cuDeviceGetAttribute",
    ],
)
def test_each_return_code_is_checked(machine: Machine, call: str) -> None:
    machine.driver(FakeDriver((9, 0), fails=call))
    seen = device.presence()
    assert seen.presence is Presence.UNUSABLE
    assert f"{call} returned CUDA_ERROR_UNKNOWN (999)" in seen.reason


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0)])
def test_a_device_with_pdl_is_usable(machine: Machine, capability: tuple[int, int]) -> None:
    machine.driver(FakeDriver(capability))
    seen = device.presence()
    assert seen == (Presence.USABLE, f"Made-up 0, compute capability {capability[0]}.{capability[1]}")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9)])
def test_a_device_without_pdl_is_unusable_and_says_why(machine: Machine, capability: tuple[int, int]) -> None:
    """Fault F24: the architecture has no PDL; anything but a clear refusal would be a verdict on nothing."""
    machine.driver(FakeDriver(capability))
    seen = device.presence()
    assert seen.presence is Presence.UNUSABLE
    assert f"capability {capability[0]}.{capability[1]} has no Programmatic Dependent Launch" in seen.reason
    assert "9.0" in seen.reason


def test_an_old_driver_is_unusable(machine: Machine) -> None:
    machine.driver(FakeDriver((9, 0), version=12080))
    seen = device.presence()
    assert seen.presence is Presence.UNUSABLE
    assert "supports CUDA 12.8, at least 13.0 is needed" in seen.reason


def test_a_prohibited_device_is_unusable(machine: Machine) -> None:
    machine.driver(FakeDriver((9, 0), mode=2))
    seen = device.presence()
    assert seen.presence is Presence.UNUSABLE
    assert "prohibited" in seen.reason


def test_each_device_is_judged_by_itself(machine: Machine) -> None:
    machine.driver(FakeDriver((9, 0), (8, 0)))
    assert device.presence(0).presence is Presence.USABLE
    assert device.presence(1).presence is Presence.UNUSABLE
    for index in (2, -1):
        seen = device.presence(index)
        assert seen.presence is Presence.UNUSABLE
        assert f"no device {index}: CUDA sees 2" in seen.reason


def test_a_torch_without_cuda_makes_a_good_device_unusable(machine: Machine) -> None:
    machine.driver(FakeDriver((9, 0)))
    machine.patch.setattr(toolchain, "blocker", lambda: "torch: built without CUDA; install a CUDA build")
    seen = device.presence()
    assert seen.presence is Presence.UNUSABLE
    assert "built without CUDA" in seen.reason


# --- what blocks a verdict --------------------------------------------------------------------------------------------


def blockers() -> set[str]:
    return {finding.name for finding in device.verdict_blockers()}


def test_a_quiet_machine_blocks_nothing(machine: Machine) -> None:
    machine.maps("libc.so.6", "libcuda.so.1")
    assert device.verdict_blockers() == []


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "CUDA_LAUNCH_BLOCKING"),
        ("CUDBG_INJECTION_PATH", "/x/libcudadebugger.so", "debugger"),
        ("CUDA_INJECTION64_PATH", "/x/libToolsInjection64.so", "profiler"),
        ("NSYS_PROFILING_SESSION_ID", "12", "profiler"),
        ("NV_NSIGHT_INJECTION_PORT_BASE", "49152", "profiler"),
        ("NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "uds", "profiler"),
        ("NV_TPS_LAUNCH_TOKEN", "Interactive Profile", "profiler"),
        ("NV_COMPUTE_PROFILER_PERFWORKS_DIR", "/x", "profiler"),
        ("LD_PRELOAD", "/x/libfoo.so:/y/libcuda-injection.so", "profiler"),
        ("CUDA_INJECTION64_PATH", "/x/libsanitizer-collection.so", "sanitizer"),
        ("NV_SANITIZER_INJECTION_PORT_BASE", "49152", "sanitizer"),
        ("NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN", "0", "sanitizer"),
        ("LD_PRELOAD", "/x/libInterceptorInjectionTarget.so", "sanitizer"),
    ],
)
def test_each_variable_of_a_tool_blocks(machine: Machine, variable: str, value: str, name: str) -> None:
    machine.patch.setenv(variable, value)
    assert blockers() == {name}
    (finding,) = device.verdict_blockers()
    assert finding.advice
    assert "/x" not in finding.value  # what is found may go into a published report


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("CUDA_LAUNCH_BLOCKING", ""),
        ("NSYS_PROFILING_SESSION_ID", ""),
        ("NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT", "1"),
        ("CUDBG_USE_LEGACY_DEBUGGER", "1"),
        ("NVTX_INJECTION64_PATH", "/x/libcupti.so"),
        ("LD_PRELOAD", "/x/libjemalloc.so"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("TRTLLM_ENABLE_PDL", "0"),
    ],
)
def test_settings_that_change_no_launch_do_not_block(machine: Machine, variable: str, value: str) -> None:
    machine.patch.setenv(variable, value)
    assert blockers() == set()


@pytest.mark.parametrize(
    ("library", "name"), [("libToolsInjection64.so", "profiler"), ("libsanitizer-public.so.2", "sanitizer")]
)
def test_a_tool_library_in_the_process_blocks(machine: Machine, library: str, name: str) -> None:
    machine.maps("libc.so.6", library)
    assert blockers() == {name}


def test_cupti_alone_does_not_block(machine: Machine) -> None:
    """CUDA builds of torch link CUPTI: if its presence blocked, no run could ever pass."""
    machine.maps("libcupti.so.13")
    assert blockers() == set()


def test_a_tracer_blocks_and_is_named(machine: Machine) -> None:
    machine.tracer(4242, "cuda-gdb")
    (finding,) = device.verdict_blockers()
    assert (finding.name, "cuda-gdb" in finding.value) == ("debugger", True)


def test_a_tracer_out_of_sight_blocks(machine: Machine) -> None:
    machine.tracer(4243)
    (finding,) = device.verdict_blockers()
    assert "another process" in finding.value


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's procfs")
def test_the_real_procfs_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(name.startswith("libc") for name in interference._LIBRARY.findall(Path("/proc/self/maps").read_text()))
    assert "TracerPid" in Path("/proc/self/status").read_text()


def test_no_procfs_blocks_nothing(machine: Machine) -> None:
    machine.patch.setattr(interference, "_PROC", machine.root / "nowhere")
    assert blockers() == set()


def test_torch_profiler_blocks_while_it_records(machine: Machine) -> None:
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert blockers() == {"profiler"}
    assert blockers() == set()


def test_a_process_that_has_profiled_is_no_place_for_a_verdict(machine: Machine) -> None:
    """As where stress() is called a second time on a built chain of library kernels."""
    from pdl_stress.cuda import profiler

    assert profiler.used is False
    assert blockers() == set()
    machine.patch.setattr(profiler, "used", True)
    assert blockers() == {"profiler"}
    (finding,) = (f for f in interference.inspect() if f.name == "profiler")
    assert "pdl-stress has profiled in this process: start another" in finding.value
    machine.patch.delitem(sys.modules, profiler.__name__)
    assert blockers() == set(), "one that was never imported was never used"


# --- the whole inspection ---------------------------------------------------------------------------------------------


def by_name(index: int = 0) -> dict[str, device.Finding]:
    findings = device.inspect(index)
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names)), "names are keys for the reader"
    return {finding.name: finding for finding in findings}


MACHINES = {
    "nothing": RuntimeError("no libcuda"),
    "no bindings": ImportError("no cuda.bindings"),
    "no device": FakeDriver(),
    "broken": FakeDriver(init=Code.CUDA_ERROR_UNKNOWN),
    "good": FakeDriver((9, 0)),
    "two": FakeDriver((9, 0), (10, 0), mps=1),
    "old device": FakeDriver((8, 0)),
    "old driver": FakeDriver((9, 0), version=12040),
    "prohibited": FakeDriver((9, 0), mode=2),
}


@pytest.mark.parametrize("kind", MACHINES)
def test_a_finding_is_unusable_exactly_if_the_presence_is(machine: Machine, kind: str) -> None:
    machine.driver(MACHINES[kind])
    # The software of the machine under test is not under test: see the tests of the toolchain.
    machine.patch.setattr(toolchain, "inspect", lambda *, needed: [])
    unusable = any(finding.status is Status.UNUSABLE for finding in device.inspect())
    assert unusable is (device.presence().presence is Presence.UNUSABLE)


def test_without_a_device_nothing_is_an_error(machine: Machine) -> None:
    """The newcomer's laptop: a CPU build of torch is right there, and doctor must not shout."""
    findings = device.inspect()
    assert {finding.status for finding in findings} <= {Status.OK, Status.NOTE, Status.ABSENT}
    assert by_name()["NVIDIA device"].status is Status.ABSENT
    assert by_name()["ops: native"].status is Status.ABSENT


def test_a_good_device_is_described(machine: Machine) -> None:
    state = nvml.State("580.95", False, 1980, 3201, 1980, 3201)
    machine.driver(FakeDriver((9, 0), (10, 0))).patch.setattr(nvml, "state", lambda bus_id: state)
    found = by_name(1)
    assert found["GPU"].value == "Made-up 1 (device 1 of 2)"
    assert found["compute capability"].value.startswith("10.0, with Programmatic")
    assert found["driver"].value == "580.95"
    assert found["driver's CUDA"].value == "13.0"
    assert (found["MPS"].value, found["MIG"].value) == ("off", "off")


def test_sharing_is_noted(machine: Machine) -> None:
    machine.driver(FakeDriver((9, 0), mps=1)).patch.setattr(nvml, "state", lambda bus_id: nvml.State(mig=True))
    machine.patch.setenv("CUDA_VISIBLE_DEVICES", "3")
    found = by_name()
    assert {found[name].status for name in ("MPS", "MIG", "CUDA_VISIBLE_DEVICES")} == {Status.NOTE}


def test_notes_say_what_they_change(machine: Machine) -> None:
    for name, value in {
        "CUDA_MPS_PIPE_DIRECTORY": "/x",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TRTLLM_ENABLE_PDL": "0",
        "NVTX_INJECTION64_PATH": "/x/libcupti.so",
    }.items():
        machine.patch.setenv(name, value)
    found = by_name()
    for name in ("MPS", "CUDA_DEVICE_MAX_CONNECTIONS", "TRTLLM_ENABLE_PDL", "NVTX injection"):
        assert found[name].status is Status.NOTE
        assert found[name].advice
    assert "/x" not in found["NVTX injection"].value


# --- the environment of a result --------------------------------------------------------------------------------------

KEYS = {"machine", "gpu", "capability", "driver", "cuda", "torch", "version", "source_sha256", "commit", "clocks"}


def test_environment_of_a_model_run(machine: Machine) -> None:
    found = device.environment()
    assert set(found) >= KEYS
    assert found["machine"] == "model"
    assert (found["gpu"], found["capability"], found["driver"], found["cuda"], found["clocks"]) == (None,) * 5
    assert found["version"] == __version__
    json.dumps(found)


def test_environment_of_a_gpu_run(machine: Machine) -> None:
    state = nvml.State("580.95", False, 1900, 3201, 1980, 3201)
    machine.driver(FakeDriver((9, 0))).patch.setattr(nvml, "state", lambda bus_id: state)
    found = device.environment()
    assert (found["machine"], found["gpu"], found["capability"]) == ("cuda", "Made-up 0", "9.0")
    assert (found["driver"], found["cuda"]) == ("580.95", "13.0")
    assert found["clocks"] == {"sm_mhz": 1900, "sm_max_mhz": 1980, "mem_mhz": 3201, "mem_max_mhz": 3201}
    assert device.environment(machine="model")["machine"] == "model"


def test_environment_names_no_place_and_no_person(machine: Machine) -> None:
    told = json.dumps(device.environment())
    assert str(ROOT) not in told
    assert platform.node() not in told
    assert str(Path.home()) not in told


# --- importing --------------------------------------------------------------------------------------------------------


def test_importing_loads_neither_torch_nor_cuda() -> None:
    """The model, the reports and pytest's collection import this on machines without either."""
    code = (
        "import sys, pdl_stress.cuda.device\n"
        "heavy = sorted(n for n in sys.modules if n.split('.')[0] in ('torch', 'cuda', 'flashinfer', 'tensorrt_llm'))\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- on the hardware --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_real_device_is_usable_and_known_to_torch_by_the_same_name() -> None:
    import torch

    seen = device.presence()
    assert seen.presence is Presence.USABLE
    assert seen.reason.startswith(torch.cuda.get_device_name(0))
    found = by_name()
    assert found["compute capability"].value.startswith("{}.{}".format(*torch.cuda.get_device_capability(0)))
    assert not [finding for finding in found.values() if finding.status is Status.UNUSABLE]


@pytest.mark.gpu
def test_the_real_environment_is_complete() -> None:
    found = device.environment()
    assert found["machine"] == "cuda"
    for key in ("gpu", "capability", "driver", "cuda", "torch_cuda", "nvrtc"):
        assert found[key], key


@pytest.mark.gpu
def test_looking_creates_no_context() -> None:
    code = (
        "from cuda.bindings import driver\n"
        "from pdl_stress.cuda import device\n"
        "device.inspect(); device.environment()\n"
        "code, device_ = driver.cuDeviceGet(0); assert int(code) == 0\n"
        "code, flags, active = driver.cuDevicePrimaryCtxGetState(device_); assert int(code) == 0\n"
        "assert not active\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
