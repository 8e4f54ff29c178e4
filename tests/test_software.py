"""The findings on software, the origin of the code, and what the management library says. No GPU is needed or faked."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pdl_stress.cuda import nvml, provenance, toolchain
from pdl_stress.cuda.findings import Status

# --- the toolchain ----------------------------------------------------------------------------------------------------


@pytest.fixture
def torch_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a made-up torch in place: ``torch_of("13.0")``, ``torch_of(None)`` for a CPU build."""

    def make(cuda: str | None, *, keep_graph: bool = True) -> None:
        if keep_graph:

            def new(cls: type, keep_graph: bool = False) -> object: ...
        else:

            def new(cls: type) -> object: ...  # type: ignore[misc]

        torch = types.SimpleNamespace(
            version=types.SimpleNamespace(cuda=cuda),
            cuda=types.SimpleNamespace(CUDAGraph=types.SimpleNamespace(__new__=new)),
        )
        monkeypatch.setattr(toolchain, "_import", lambda name: torch)
        versions = {"torch": "2.99", "cuda-core": "1.2.2", "cuda-bindings": "13.5.0"}
        monkeypatch.setattr(toolchain, "version_of", versions.get)

    return make


def test_a_complete_toolchain_does_not_block(torch_of: Any) -> None:
    torch_of("13.0")
    assert toolchain.blocker() is None


def test_a_cpu_build_of_torch_blocks_only_where_there_is_a_device(torch_of: Any) -> None:
    torch_of(None)
    assert "built without CUDA" in (toolchain.blocker() or "")
    assert toolchain._torch(needed=False).status is Status.OK


def test_a_torch_without_keep_graph_blocks(torch_of: Any) -> None:
    torch_of("12.8", keep_graph=False)
    assert "keep_graph" in (toolchain.blocker() or "")


@pytest.mark.parametrize("missing", ["torch", "cuda-core", "cuda-bindings"])
def test_a_missing_package_blocks_and_is_named(torch_of: Any, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    torch_of("13.0")
    have = toolchain.version_of
    monkeypatch.setattr(toolchain, "version_of", lambda name: None if name == missing else have(name))
    assert (toolchain.blocker() or "").startswith(f"{missing}: not installed")


def test_old_bindings_block(torch_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_of("13.0")
    monkeypatch.setattr(toolchain, "version_of", lambda name: "12.9.1")
    assert "12.9.1, older than 13" in (toolchain.blocker() or "")


def test_a_missing_tool_says_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_tool", lambda name: None)
    found = {finding.name: finding for finding in toolchain.inspect(needed=False)}
    for name in ("nvdisasm", "cuobjdump", "nvcc", "compute-sanitizer"):
        assert found[name].status is Status.ABSENT
        assert found[name].advice


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("Cuda compilation tools, release 13.0, V13.0.88", "13.0.88"),
        ("Version 2026.4.0.0 (build 1)", "2026.4.0.0"),
        ("?", "found"),
    ],
)
def test_tool_versions_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: str, value: str) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=printed)
    monkeypatch.setattr(toolchain, "find_tool", lambda name: name)
    monkeypatch.setattr(toolchain.subprocess, "run", lambda *args, **kwargs: done)
    assert toolchain._tool("nvcc", "").value == value


def test_a_tool_that_does_not_run_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "nvdisasm"
    broken.write_text("not a program")
    monkeypatch.setattr(toolchain, "find_tool", lambda name: str(broken))
    assert toolchain._tool("nvdisasm", "").status is Status.ABSENT


def test_ops_need_a_device_and_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: "13.5")
    assert toolchain.ops("no GPU")[0].status is Status.ABSENT
    assert toolchain.ops(None)[0].status is Status.OK
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: None)
    assert toolchain.ops(None)[0].status is Status.ABSENT


def test_libraries_are_looked_up_and_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(toolchain, "find_tool", lambda name: name)
    found = toolchain.ops(None)[1]
    assert (found.name, found.status) == ("ops: flashinfer", Status.OK)
    assert found.value.startswith("flashinfer-python ")


# --- where the code comes from ----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, text in {"pdl_stress/a.py": "a", "fusions/ops/k.cu": "k", "fusions/ops/h.cuh": "h"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_source_hash_does_not_depend_on_where_the_tree_lies(tree: Path, tmp_path: Path) -> None:
    before = provenance.source_sha256(tree)
    assert len(bytes.fromhex(before)) == 32
    tree.rename(tmp_path / "elsewhere")
    assert provenance.source_sha256(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("name", ["pdl_stress/a.py", "fusions/ops/k.cu", "fusions/ops/h.cuh", "pdl_stress/new.py"])
def test_source_hash_changes_with_any_source(tree: Path, name: str) -> None:
    before = provenance.source_sha256(tree)
    (tree / name).write_text("changed")
    assert provenance.source_sha256(tree) != before


def test_source_hash_changes_with_a_name_and_a_border(tree: Path) -> None:
    before = provenance.source_sha256(tree)
    (tree / "pdl_stress/a.py").rename(tree / "pdl_stress/b.py")
    assert provenance.source_sha256(tree) != before


def test_source_hash_ignores_what_is_no_source(tree: Path) -> None:
    before = provenance.source_sha256(tree)
    (tree / "pdl_stress" / "__pycache__").mkdir()
    (tree / "pdl_stress" / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    (tree / "README.md").write_text("x")
    assert provenance.source_sha256(tree) == before


@pytest.fixture
def checkout(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    for name in list(os.environ):
        if name.startswith("GIT_"):  # as under a git hook: they would point at another repository
            monkeypatch.delenv(name)
    git = ["git", "-C", str(tree), "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    try:
        subprocess.run([*git, "init", "-q"], check=True)
        assert provenance.commit(tree) is None  # no commit yet
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    return tree


def test_commit_of_a_clean_checkout(checkout: Path) -> None:
    found = provenance.commit(checkout)
    assert found is not None
    assert len(bytes.fromhex(found)) == 20


@pytest.mark.parametrize("name", ["pdl_stress/a.py", "fusions/new.cu"])
def test_a_changed_or_new_source_is_dirty(checkout: Path, name: str) -> None:
    (checkout / name).write_text("changed")
    assert (provenance.commit(checkout) or "").endswith("-dirty")


def test_a_file_that_did_not_run_is_not_dirty(checkout: Path) -> None:
    (checkout / "results.json").write_text("{}")
    assert not (provenance.commit(checkout) or "-dirty").endswith("-dirty")


def test_the_commit_given_from_outside_wins(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, " abc123 ")
    assert provenance.commit(checkout) == "abc123"


def test_a_package_inside_some_other_repository_has_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = checkout / "venv" / "site-packages"
    inside.mkdir(parents=True)
    assert provenance.commit(inside) is None


# --- NVML -------------------------------------------------------------------------------------------------------------


def test_nvidia_smi_stands_in_for_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "580.95.05, Disabled, 1980, 3201, 1980, [N/A]\n"
    monkeypatch.setattr(nvml.shutil, "which", lambda name: name)
    monkeypatch.setattr(nvml.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess([], 0, stdout=line))
    assert nvml._state_by_smi("0000:01:00.0") == nvml.State("580.95.05", False, 1980, 3201, 1980, None)


@pytest.mark.parametrize("output", ["", "No devices were found\n"])
def test_an_answer_that_makes_no_sense_is_no_answer(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.setattr(nvml.shutil, "which", lambda name: name)
    monkeypatch.setattr(nvml.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess([], 0, stdout=output))
    assert nvml._state_by_smi("0000:01:00.0") == nvml.State()


def test_no_management_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("no libnvidia-ml")

    monkeypatch.setattr(nvml, "_open", fail)
    monkeypatch.setattr(nvml.shutil, "which", lambda name: None)
    assert nvml.count() is None
    assert nvml.state("0000:01:00.0") == nvml.State()


def test_nvml_that_refuses_one_question_still_answers_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")

    closed: list[bool] = []
    fake = types.SimpleNamespace(
        ClockType=types.SimpleNamespace(CLOCK_SM=1, CLOCK_MEM=2),
        device_get_handle_by_pci_bus_id_v2=lambda bus_id: 7,
        system_get_driver_version=lambda: "580.95",
        device_get_mig_mode=refuse,
        device_get_clock_info=lambda handle, kind: 100 * kind,
        device_get_max_clock_info=refuse,
        shutdown=lambda: closed.append(True),
    )
    monkeypatch.setattr(nvml, "_open", lambda: fake)
    assert nvml.state("0000:01:00.0") == nvml.State("580.95", None, 100, 200, None, None)
    assert closed


def test_a_result_names_the_libraries_whose_kernels_it_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "version_of", {"flashinfer-python": "0.7.4", "torch": "2.99"}.get)
    found = provenance.software()
    assert (found["flashinfer"], found["tensorrt_llm"], found["torch"]) == ("0.7.4", None, "2.99")
