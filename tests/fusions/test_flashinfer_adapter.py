"""The FlashInfer adapter against a made-up FlashInfer, on the CPU: what it passes on, refuses and restores.

The made-up one behaves as FlashInfer 0.7.4's sources do: norm's choice is read from the environment on import,
tinygemm2's at every call.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from fusions.libraries import OpFailed, Unavailable
from fusions.ops import flashinfer

GEMM_SOURCE = """
import os
calls = []
names = ["FLASHINFER_DISABLE_TINYGEMM2_" + n for n in ("WGMMA", "TCGEN05", "SM100")]
error = None
def tinygemm_bf16(input, weight, out, bias=None, use_pdl=False):
    calls.append(dict(input=input, weight=weight, out=out, bias=bias, use_pdl=use_pdl,
                      off=[os.environ.get(n) for n in names]))
    if error is not None:
        raise error
    result = input.float() @ weight.float().T
    out.copy_(result if bias is None else result + bias)
"""

NORM_SOURCE = """
import os
_USE_CUDA_NORM = os.environ.get("FLASHINFER_USE_CUDA_NORM", "0") == "1" {or_no_dsl}
calls = []
error = None
def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    calls.append(dict(input=input, weight=weight, eps=eps, out=out, enable_pdl=enable_pdl))
    if error is not None:
        raise error
    x = input.float()
    out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)
    return out
import torch
"""

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Installs a made-up FlashInfer that nothing has imported yet."""
    for name in list(sys.modules):
        if name == "flashinfer" or name.startswith("flashinfer."):
            monkeypatch.delitem(sys.modules, name)
    for name in (flashinfer.CUDA_NORM, *flashinfer.TINYGEMM2_OTHERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(flashinfer, "_norm_imported", (None, ""))
    monkeypatch.setattr(flashinfer, "_good", {})

    def install(version: str = "0.7.4", *, dsl: bool = True, norm: str | None = None, top: str = "") -> None:
        package = tmp_path / "flashinfer"
        package.mkdir()
        (package / "__init__.py").write_text(top or "from . import norm, gemm\n")
        (package / "norm.py").write_text(
            norm if norm is not None else NORM_SOURCE.format(or_no_dsl="" if dsl else "or True")
        )
        (package / "gemm.py").write_text(GEMM_SOURCE)
        monkeypatch.syspath_prepend(str(tmp_path))
        real = metadata.version
        monkeypatch.setattr(metadata, "version", lambda name: version if name == "flashinfer-python" else real(name))

    return install


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    for name in list(sys.modules):
        if name == "flashinfer" or name.startswith("flashinfer."):
            del sys.modules[name]


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def norm_operands(rows: int = 2, width: int = 64) -> dict[str, torch.Tensor]:
    return {"x": bf16(rows, width), "weight": bf16(width), "out": torch.empty(rows, width, dtype=torch.bfloat16)}


def gemm_operands(rows: int = 2, width: int = 64, columns: int = 16) -> dict[str, Any]:
    out = torch.empty(rows, columns, dtype=torch.bfloat16)
    return {"x": bf16(rows, width), "weight": bf16(columns, width), "out": out}


# -- what is passed on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pdl", [True, False])
def test_rmsnorm_passes_everything_on(install: Install, pdl: bool) -> None:
    install()
    given = norm_operands()
    result = flashinfer.rmsnorm(given["x"], given["weight"], out=given["out"], eps=0.25, pdl=pdl)
    assert result is given["out"]
    (call,) = sys.modules["flashinfer.norm"].calls
    assert (call["input"], call["weight"], call["out"]) == (given["x"], given["weight"], given["out"])
    assert (call["eps"], call["enable_pdl"]) == (0.25, pdl)


def test_a_single_row_of_any_stride_is_given_as_the_dense_row_that_it_is(install: Install) -> None:
    install()
    given = gemm_operands(rows=1)
    given["x"], given["out"] = given["x"].as_strided((1, 64), (3, 1)), given["out"].as_strided((1, 16), (32, 1))
    assert flashinfer.tinygemm2(given["x"], given["weight"], out=given["out"]) is given["out"]
    (call,) = sys.modules["flashinfer.gemm"].calls
    for name, passed in (("x", call["input"]), ("out", call["out"])):
        assert passed.stride() == (passed.shape[1], 1)
        assert passed.data_ptr() == given[name].data_ptr()


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_tinygemm2_passes_everything_on(install: Install, pdl: bool, with_bias: bool) -> None:
    install()
    given = gemm_operands()
    bias = bf16(16) if with_bias else None
    result = flashinfer.tinygemm2(given["x"], given["weight"], bias, out=given["out"], pdl=pdl)
    assert result is given["out"]
    (call,) = sys.modules["flashinfer.gemm"].calls
    assert call["input"] is given["x"]
    assert call["weight"] is given["weight"]
    assert call["out"] is given["out"]
    assert call["bias"] is bias
    assert call["use_pdl"] is pdl


def test_the_pdl_attribute_is_asked_for_by_default(install: Install) -> None:
    install()
    flashinfer.rmsnorm(**norm_operands())
    flashinfer.tinygemm2(**gemm_operands())
    assert sys.modules["flashinfer.norm"].calls[0]["enable_pdl"] is True
    assert sys.modules["flashinfer.gemm"].calls[0]["use_pdl"] is True


def test_no_row_launches_nothing(install: Install) -> None:
    install()
    flashinfer.rmsnorm(**norm_operands(0))
    flashinfer.tinygemm2(**gemm_operands(0))
    assert sys.modules["flashinfer.norm"].calls == sys.modules["flashinfer.gemm"].calls == []


# -- the choice of kernel ----------------------------------------------------------------------------------------------


def test_the_reference_norm_is_chosen_on_import_and_the_environment_put_back(install: Install) -> None:
    install()
    flashinfer.rmsnorm(**norm_operands(), kernel="reference")
    assert sys.modules["flashinfer.norm"]._USE_CUDA_NORM is True
    assert flashinfer.CUDA_NORM not in os.environ
    flashinfer.rmsnorm(**norm_operands(), kernel="reference")
    with pytest.raises(Unavailable, match=r'imported for kernel="reference".*a new process for kernel="library"'):
        flashinfer.rmsnorm(**norm_operands())


def test_the_librarys_norm_is_left_to_it(install: Install) -> None:
    install()
    flashinfer.rmsnorm(**norm_operands())
    assert sys.modules["flashinfer.norm"]._USE_CUDA_NORM is False
    with pytest.raises(Unavailable, match="FLASHINFER_USE_CUDA_NORM=1 before the process starts"):
        flashinfer.rmsnorm(**norm_operands(), kernel="reference")
    assert len(sys.modules["flashinfer.norm"].calls) == 1


def test_an_import_by_somebody_else_is_noticed(install: Install) -> None:
    install()
    import flashinfer as theirs

    with pytest.raises(Unavailable, match="imported with its own choice"):
        flashinfer.rmsnorm(**norm_operands(), kernel="reference")
    assert theirs.norm.calls == []


def test_an_import_by_somebody_else_with_the_variable_set_is_the_reference(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setenv(flashinfer.CUDA_NORM, "1")
    __import__("flashinfer")
    flashinfer.rmsnorm(**norm_operands(), kernel="reference")
    with pytest.raises(Unavailable, match="FLASHINFER_USE_CUDA_NORM=1 keeps FlashInfer from choosing"):
        flashinfer.rmsnorm(**norm_operands())


def test_a_variable_that_is_set_too_late_forces_nothing(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    flashinfer.rmsnorm(**norm_operands())
    monkeypatch.setenv(flashinfer.CUDA_NORM, "1")
    flashinfer.rmsnorm(**norm_operands())
    with pytest.raises(Unavailable, match="imported with its own choice"):
        flashinfer.rmsnorm(**norm_operands(), kernel="reference")


def test_an_environment_that_forces_the_norm_is_noticed_before_the_import(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setenv(flashinfer.CUDA_NORM, "1")
    with pytest.raises(Unavailable, match="--ops flashinfer-reference"):
        flashinfer.rmsnorm(**norm_operands())
    assert "flashinfer" not in sys.modules
    flashinfer.rmsnorm(**norm_operands(), kernel="reference")
    assert os.environ[flashinfer.CUDA_NORM] == "1", "what was set stays set"


def test_without_the_dsl_the_cuda_norm_is_the_librarys_own_choice(install: Install) -> None:
    install(dsl=False)
    flashinfer.rmsnorm(**norm_operands())
    flashinfer.rmsnorm(**norm_operands(), kernel="reference")


def test_a_version_that_does_not_tell_its_choice_is_believed_to_read_the_variable(install: Install) -> None:
    install(norm=NORM_SOURCE.format(or_no_dsl="").replace("_USE_CUDA_NORM", "_ANOTHER_NAME", 1))
    flashinfer.rmsnorm(**norm_operands(), kernel="reference")
    assert sys.modules["flashinfer.norm"]._ANOTHER_NAME is True


def test_the_reference_gemm_is_chosen_for_the_call_only(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv(flashinfer.TINYGEMM2_OTHERS[1], "0")
    before = dict(os.environ)
    flashinfer.tinygemm2(**gemm_operands(), kernel="reference")
    assert dict(os.environ) == before
    flashinfer.tinygemm2(**gemm_operands())
    assert [call["off"] for call in sys.modules["flashinfer.gemm"].calls] == [["1", "1", "1"], [None, "0", None]]


def test_the_environment_is_put_back_after_a_failure(install: Install) -> None:
    install()
    flashinfer.available()
    sys.modules["flashinfer.gemm"].error = ZeroDivisionError("x")  # type: ignore[attr-defined]
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError):
        flashinfer.tinygemm2(**gemm_operands(), kernel="reference")
    assert dict(os.environ) == before


def test_two_threads_do_not_restore_each_others_environment(install: Install) -> None:
    install()
    flashinfer.available()
    inside, go = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> None:
        inside.set()
        go.wait(10)

    sys.modules["flashinfer.gemm"].tinygemm_bf16 = slow  # type: ignore[attr-defined]
    threads = [
        threading.Thread(target=flashinfer.tinygemm2, kwargs={**gemm_operands(), "kernel": "reference"})
        for _ in range(2)
    ]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    time.sleep(0.2)  # without a lock the second is inside by now
    go.set()
    for thread in threads:
        thread.join(10)
    assert not set(flashinfer.TINYGEMM2_OTHERS) & set(os.environ)


@pytest.mark.parametrize("name", flashinfer.TINYGEMM2_OTHERS)
def test_an_environment_that_forbids_a_gemm_is_noticed(
    install: Install, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install()
    monkeypatch.setenv(name, "1")
    with pytest.raises(Unavailable, match=f"{name}=1 keeps FlashInfer from choosing.*unset it"):
        flashinfer.tinygemm2(**gemm_operands())
    flashinfer.tinygemm2(**gemm_operands(), kernel="reference")
    assert os.environ[name] == "1"


@pytest.mark.parametrize("function", [flashinfer.rmsnorm, flashinfer.tinygemm2])
def test_an_unknown_kernel_is_refused(install: Install, function: Callable[..., Any]) -> None:
    install()
    operands = norm_operands() if function is flashinfer.rmsnorm else gemm_operands()
    with pytest.raises(ValueError, match="kernel='fast' is unknown; choose one of library, reference"):
        function(**operands, kernel="fast")


# -- availability ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", flashinfer.KERNELS)
def test_available_imports_with_the_choice_in_effect(install: Install, kernel: str) -> None:
    install()
    flashinfer.available(kernel)
    assert sys.modules["flashinfer.norm"]._USE_CUDA_NORM is (kernel == "reference")


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"FlashInfer is not installed; pip install 'pdl-stress\[flashinfer\]'"):
        flashinfer.available()
    with pytest.raises(Unavailable, match="not installed"):
        flashinfer.tinygemm2(**gemm_operands())


def test_too_old_is_refused_before_the_import(install: Install) -> None:
    install("0.6.13")
    for call in (
        flashinfer.available,
        lambda: flashinfer.rmsnorm(**norm_operands()),
        lambda: flashinfer.tinygemm2(**gemm_operands()),
    ):
        with pytest.raises(Unavailable, match=r"flashinfer-python 0.6.13 is older than 0.6.14"):
            call()
    assert "flashinfer" not in sys.modules


def test_too_old_is_refused_where_only_the_module_tells(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(top="__version__ = '0.6.13'\nfrom . import norm, gemm\n")

    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    with pytest.raises(Unavailable, match=r"0.6.13 is older than 0.6.14"):
        flashinfer.tinygemm2(**gemm_operands())
    assert sys.modules["flashinfer.gemm"].calls == []


def test_a_broken_import_shows_its_error(install: Install) -> None:
    install(top="raise OSError('libcuda.so.1: cannot open shared object file')\n")
    with pytest.raises(Unavailable, match=r"does not import: OSError: libcuda.so.1: cannot open.*reinstall"):
        flashinfer.available()


# -- operands ----------------------------------------------------------------------------------------------------------


def misaligned(*shape: int) -> torch.Tensor:
    """A contiguous tensor that starts 2 bytes behind a multiple of 16."""
    size = 1
    for n in shape:
        size *= n
    return torch.zeros(size + 1, dtype=torch.bfloat16)[1:].view(*shape)


GEMM_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(2, 64)}, "x is torch.float32, expected torch.bfloat16"),
    ({"x": bf16(2, 1, 64)}, "x has 3 dimensions"),
    ({"x": bf16(2, 128)[:, :64]}, r"x has strides \(128, 1\), expected a contiguous tensor; pass x.contiguous"),
    ({"weight": bf16(32, 64)[::2]}, "weight has strides"),
    ({"out": torch.empty(2, 32, dtype=torch.bfloat16)[:, :16]}, "out has strides"),
    ({"x": misaligned(2, 64)}, "x starts at an address that is no multiple of 16 bytes; pass x.clone"),
    ({"weight": misaligned(16, 64)}, "weight starts at an address"),
    ({"out": misaligned(2, 16)}, "out starts at an address"),
    ({"x": bf16(2, 128)}, "x has K = 128 and weight K = 64"),
    ({"x": bf16(2, 68), "weight": bf16(16, 68)}, "K = 68, expected a multiple of 8, at least 64"),
    ({"x": bf16(2, 56), "weight": bf16(16, 56)}, "K = 56, expected a multiple of 8, at least 64"),
    ({"weight": bf16(24, 64), "out": bf16(2, 24)}, "N = 24, expected a positive multiple of 16"),
    ({"weight": bf16(0, 64), "out": bf16(2, 0)}, "N = 0, expected a positive multiple of 16"),
    ({"out": bf16(3, 16)}, r"out has shape \(3, 16\), expected \(2, 16\)"),
    ({"bias": bf16(8)}, r"bias has shape \(8,\), expected \(16,\)"),
    ({"bias": bf16(32)[::2]}, "last dimension of bias has stride 2"),
    ({"bias": torch.zeros(16, dtype=torch.bfloat16, device="meta")}, "bias is on meta and x on cpu"),
]


@pytest.mark.parametrize(("wrong", "words"), GEMM_ERRORS, ids=[words[:40] for _, words in GEMM_ERRORS])
def test_what_tinygemm2_cannot_take_is_refused_before_the_call(
    install: Install, wrong: dict[str, Any], words: str
) -> None:
    install()
    with pytest.raises(ValueError, match=words):
        flashinfer.tinygemm2(**{**gemm_operands(), **wrong})
    assert "flashinfer" not in sys.modules


NORM_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(2, 64)}, "x is torch.float32"),
    ({"x": bf16(2, 128)[:, ::2]}, "last dimension of x has stride 2"),
    ({"weight": bf16(32)}, r"weight has shape \(32,\), expected \(64,\)"),
    ({"out": bf16(2, 32)}, r"out has shape \(2, 32\)"),
    ({"x": misaligned(2, 64)}, "x starts at an address that is no multiple of 16 bytes"),
    ({"weight": misaligned(64)}, "weight starts at an address"),
    ({"out": misaligned(2, 64)}, "out starts at an address"),
    ({"x": bf16(2, 68)[:, :64]}, "rows of x are 68 elements apart, expected a multiple of 8"),
    ({"out": bf16(2, 68)[:, :64]}, "rows of out are 68 elements apart"),
    ({"weight": torch.zeros(64, dtype=torch.bfloat16, device="meta")}, "weight is on meta and x on cpu"),
]


@pytest.mark.parametrize(("wrong", "words"), NORM_ERRORS, ids=[words[:40] for _, words in NORM_ERRORS])
def test_what_rmsnorm_cannot_take_is_refused_before_the_call(
    install: Install, wrong: dict[str, Any], words: str
) -> None:
    install()
    with pytest.raises(ValueError, match=words):
        flashinfer.rmsnorm(**{**norm_operands(), **wrong})
    assert "flashinfer" not in sys.modules


def test_rows_that_32_bits_cannot_count_are_refused(install: Install) -> None:
    install()
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    big = torch.empty(1 << 20, 1 << 12, **meta)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"x spans 2\^32 elements or more.*split the rows"):
        flashinfer.rmsnorm(big, torch.empty(1 << 12, **meta), out=big)  # type: ignore[call-overload]


def test_strided_rows_and_a_k_of_8s_are_taken(install: Install) -> None:
    install()
    rows = bf16(4, 96)[:, 32:]
    flashinfer.rmsnorm(rows, bf16(64), out=bf16(4, 64))
    flashinfer.tinygemm2(**gemm_operands(width=360))
    assert len(sys.modules["flashinfer.norm"].calls) == len(sys.modules["flashinfer.gemm"].calls) == 1


# -- failing builds ----------------------------------------------------------------------------------------------------


class MissingJITCacheError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Ninja build failed. Ninja output:\n" + "\n".join(f"line {i}" for i in range(50))), "line 49"),
        (RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"), "find nvcc"),
        (FileNotFoundError(2, "No such file or directory", "ninja"), "ninja"),
        (MissingJITCacheError("JIT compilation is disabled"), "disabled"),
    ],
    ids=["compile error", "no nvcc", "no ninja", "building forbidden"],
)
@pytest.mark.parametrize("op", ["norm", "gemm"])
def test_a_failing_build_shows_the_end_of_its_log(install: Install, error: Exception, words: str, op: str) -> None:
    install()
    flashinfer.available()
    sys.modules[f"flashinfer.{op}"].error = error  # type: ignore[attr-defined]
    with pytest.raises(OpFailed) as failed:
        flashinfer.rmsnorm(**norm_operands()) if op == "norm" else flashinfer.tinygemm2(**gemm_operands())
    text = str(failed.value)
    assert failed.value.__cause__ is error
    assert words in text
    assert text.count("  line ") in (0, 20), "twenty lines are enough"
    for what in ("could not build", "CUDA_HOME", "LIBRARY_PATH", "lib/stubs", "ninja", "FLASHINFER_DISABLE_JIT"):
        assert what in text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("input must be a 2D tensor"),
        FileNotFoundError(2, "No such file or directory", "weights.bin"),
    ],
    ids=["a fault", "a refusal", "a missing file"],
)
def test_what_is_no_build_failure_passes_through(install: Install, error: Exception) -> None:
    install()
    flashinfer.available()
    sys.modules["flashinfer.gemm"].error = error  # type: ignore[attr-defined]
    with pytest.raises(type(error)) as failed:
        flashinfer.tinygemm2(**gemm_operands())
    assert failed.value is error


def test_machine_code_of_the_cute_dsl_is_found_only_where_it_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("b.cubin", "deep/a.cubin", "other.ptx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    monkeypatch.delenv("CUTE_DSL_KEEP", raising=False)
    monkeypatch.delenv("CUTE_DSL_DUMP_DIR", raising=False)
    assert flashinfer.kept_cubins() == []
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path))
    assert flashinfer.kept_cubins() == [], "it was not asked to keep any"
    for kept, count in (("ptx", 0), ("cubin", 2), ("ir, cubin", 2), ("all", 2)):
        monkeypatch.setenv("CUTE_DSL_KEEP", kept)
        assert len(flashinfer.kept_cubins()) == count
    monkeypatch.delenv("CUTE_DSL_DUMP_DIR")
    assert flashinfer.kept_cubins() == []
