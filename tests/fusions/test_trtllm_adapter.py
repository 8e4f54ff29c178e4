"""The TensorRT-LLM adapter against stand-ins registered under its ops' names, on the CPU. No TensorRT-LLM is needed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from fusions import libraries
from fusions.libraries import KnownBad, Unavailable
from fusions.ops import trtllm

SCHEMAS = {
    "tinygemm2": "tinygemm2(Tensor input, Tensor weight, Tensor bias) -> Tensor",
    "flashinfer_rmsnorm": "flashinfer_rmsnorm(Tensor input, Tensor weight, float eps) -> Tensor",
}


class StandIns:
    """The ops, on the CPU; remembers what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.library: Any = None

    def register(self, *names: str) -> None:
        self.library = torch.library.Library("trtllm", "FRAGMENT")
        for name in names or SCHEMAS:
            self.library.define(SCHEMAS[name])
            self.library.impl(name, getattr(self, name), "CPU")

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
        for name in SCHEMAS:
            vars(torch.ops.trtllm).pop(name, None)

    def tinygemm2(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        self.calls.append((input, weight, bias))
        return (input.float() @ weight.float().T + bias).to(torch.bfloat16)

    def flashinfer_rmsnorm(self, input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.calls.append((input, weight, eps))
        x = input.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(torch.bfloat16)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    """Nothing is registered and no TensorRT-LLM is installed, until a test says so."""
    if "tensorrt_llm" in sys.modules:
        pytest.skip("a real TensorRT-LLM is loaded")
    monkeypatch.delenv(libraries.ALLOW_KNOWN_BAD, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    version(monkeypatch, None)
    trtllm._zeros.clear()
    stand_ins = StandIns()
    yield stand_ins
    stand_ins.remove()
    trtllm._zeros.clear()
    trtllm.version_refusal.cache_clear()


def version(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    def look(name: str) -> str:
        if name != "tensorrt-llm" or text is None:
            raise metadata.PackageNotFoundError(name)
        return text

    monkeypatch.setattr(metadata, "version", look)
    trtllm.version_refusal.cache_clear()


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape


# -- what is passed on -------------------------------------------------------------------------------------------------


def test_rmsnorm_passes_everything_on_and_returns_a_new_tensor(ops: StandIns) -> None:
    ops.register()
    x, weight = bf16(2, 64), bf16(64)
    result = trtllm.rmsnorm(x, weight, eps=0.25)
    ((input, gain, eps),) = ops.calls
    assert same(input, x)
    assert same(gain, weight)
    assert eps == 0.25
    assert result.shape == x.shape
    assert result.data_ptr() != x.data_ptr()


def test_tinygemm2_passes_everything_on_and_returns_a_new_tensor(ops: StandIns) -> None:
    ops.register()
    x, weight, bias = bf16(2, 64), bf16(16, 64), bf16(16)
    result = trtllm.tinygemm2(x, weight, bias)
    ((input, matrix, added),) = ops.calls
    assert same(input, x)
    assert same(matrix, weight)
    assert same(added, bias)
    assert torch.equal(result, (x.float() @ weight.float().T + bias).to(torch.bfloat16))


def test_without_a_bias_it_gets_zeros_that_are_made_once_per_width(ops: StandIns) -> None:
    ops.register()
    x = bf16(2, 64)
    for columns in (16, 16, 32):
        trtllm.tinygemm2(x, bf16(columns, 64))
    first, second, third = (bias for _, _, bias in ops.calls)
    assert same(first, second)
    assert first.dtype is torch.bfloat16
    assert first.shape == (16,)
    assert not first.any()
    assert third.shape == (32,)
    assert len(trtllm._zeros) == 2


def test_neither_takes_pdl_or_out(ops: StandIns) -> None:
    ops.register()
    for name in ("pdl", "out"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            trtllm.tinygemm2(bf16(2, 64), bf16(16, 64), **{name: None})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            trtllm.rmsnorm(bf16(2, 64), bf16(64), **{name: None})  # type: ignore[arg-type]


def test_the_op_is_looked_up_at_every_call(ops: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    ops.register()
    trtllm.tinygemm2(bf16(2, 64), bf16(16, 64))
    marker = bf16(2, 16)
    monkeypatch.setattr(torch.ops.trtllm, "tinygemm2", lambda *_: marker)
    assert trtllm.tinygemm2(bf16(2, 64), bf16(16, 64)) is marker


def test_an_op_of_another_kind_is_noticed(ops: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    ops.register()
    monkeypatch.setattr(torch.ops.trtllm, "tinygemm2", lambda *_: None)
    with pytest.raises(TypeError, match="returned NoneType, expected a tensor: the op is of another version"):
        trtllm.tinygemm2(bf16(2, 64), bf16(16, 64))


# -- availability ------------------------------------------------------------------------------------------------------


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    (folder / "tensorrt_llm").mkdir()
    (folder / "tensorrt_llm" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "tensorrt_llm", types.ModuleType("tensorrt_llm"))  # to be restored to nothing
    monkeypatch.delitem(sys.modules, "tensorrt_llm")


def test_ops_that_are_registered_are_available_and_nothing_is_imported(
    ops: StandIns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "raise SystemExit('imported')")
    ops.register()
    trtllm.available()
    trtllm.tinygemm2(bf16(2, 64), bf16(16, 64))


def test_nothing_registered_and_nothing_installed(ops: StandIns) -> None:
    words = r"TensorRT-LLM is not installed; pip install 'pdl-stress\[trtllm\]'"
    for call in (
        trtllm.available,
        lambda: trtllm.tinygemm2(bf16(2, 64), bf16(16, 64)),
        lambda: trtllm.rmsnorm(bf16(2, 64), bf16(64)),
    ):
        with pytest.raises(Unavailable, match=words):
            call()


def test_each_op_is_available_by_itself(ops: StandIns) -> None:
    ops.register("tinygemm2")
    trtllm.available("tinygemm2")
    trtllm.tinygemm2(bf16(2, 64), bf16(16, 64))
    with pytest.raises(Unavailable):
        trtllm.available()
    with pytest.raises(Unavailable):
        trtllm.available("flashinfer_rmsnorm")


def test_importing_it_may_register_the_ops(ops: StandIns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "import builtins\nbuiltins._register()\n")
    monkeypatch.setattr("builtins._register", ops.register, raising=False)
    trtllm.available()
    assert "tensorrt_llm" in sys.modules


def test_a_broken_import_shows_its_error(ops: StandIns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "raise OSError('libmpi.so.40: cannot open shared object file')")
    with pytest.raises(Unavailable, match=r"does not import: OSError: libmpi.so.40: cannot open.*reinstall"):
        trtllm.available()


def test_a_version_without_an_op_says_which(ops: StandIns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "")
    version(monkeypatch, "0.9.0")
    ops.register("tinygemm2")
    with pytest.raises(Unavailable) as refused:
        trtllm.available()
    assert "tensorrt-llm 0.9.0 registers no torch.ops.trtllm.flashinfer_rmsnorm" in str(refused.value)
    assert "FlashInfer: is it installed?" in str(refused.value)


# -- known bad versions ------------------------------------------------------------------------------------------------


def test_a_known_bad_version_is_refused_above_a_k_of_1024(ops: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    ops.register()
    version(monkeypatch, "1.2.1")
    trtllm.tinygemm2(bf16(2, 1024), bf16(16, 1024))
    trtllm.rmsnorm(bf16(2, 5120), bf16(5120))
    ops.calls.clear()
    with pytest.raises(KnownBad) as refused:
        trtllm.tinygemm2(bf16(2, 1032), bf16(16, 1032))
    for words in (
        *("K = 1032", "tensorrt-llm 1.2.1 is known bad", "#15338", "use a later version or other ops"),
        *("FUSIONS_ALLOW_KNOWN_BAD=1", "force=True"),
    ):
        assert words in str(refused.value)
    assert ops.calls == []


def test_a_known_bad_version_can_be_run_on_purpose(ops: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    ops.register()
    version(monkeypatch, "1.2.1")
    trtllm.tinygemm2(bf16(2, 2048), bf16(16, 2048), force=True)
    monkeypatch.setenv(libraries.ALLOW_KNOWN_BAD, "1")
    trtllm.tinygemm2(bf16(2, 2048), bf16(16, 2048))
    assert len(ops.calls) == 2


@pytest.mark.parametrize("text", [None, "1.3.0rc19", "1.3.0", "main"])
def test_other_versions_and_unknown_ones_are_not_refused(
    ops: StandIns, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    ops.register()
    version(monkeypatch, text)
    trtllm.tinygemm2(bf16(2, 2048), bf16(16, 2048))


def test_a_known_bad_version_is_refused_before_it_is_imported(
    ops: StandIns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "raise SystemExit('imported')")
    version(monkeypatch, "1.2.1")
    with pytest.raises(KnownBad):
        trtllm.tinygemm2(bf16(2, 2048), bf16(16, 2048))


def test_a_known_bad_version_that_only_the_module_tells_is_refused_after_the_import(
    ops: StandIns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "__version__ = '1.2.0'\nimport builtins\nbuiltins._register()\n")
    monkeypatch.setattr("builtins._register", ops.register, raising=False)
    with pytest.raises(KnownBad, match=r"1.2.0 is known bad"):
        trtllm.tinygemm2(bf16(2, 2048), bf16(16, 2048))
    assert ops.calls == []


# -- the GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_supported_gpus(capability: tuple[int, int]) -> None:
    trtllm._check_capability("op", capability, force=False)


@pytest.mark.parametrize("capability", [(8, 9), (11, 0), (12, 0), (12, 1)])
@pytest.mark.parametrize("force", [False, True])
def test_a_gpu_that_is_not_supported_is_refused_in_any_case(capability: tuple[int, int], force: bool) -> None:
    words = rf"compute capability {capability[0]}\.{capability[1]}.*expected one of 9.0, 10.0, 10.3"
    with pytest.raises(Unavailable, match=words):
        trtllm._check_capability("op", capability, force)


def test_a_gpu_that_may_be_supported_takes_force() -> None:
    with pytest.raises(Unavailable, match="if yours does, pass force=True"):
        trtllm._check_capability("op", (10, 7), force=False)
    trtllm._check_capability("op", (10, 7), force=True)


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_the_gpu_is_looked_up_and_never_tried(ops: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    ops.register()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    with pytest.raises(Unavailable, match=r"compute capability 12.0"):
        trtllm.tinygemm2(bf16(2, 64).as_subclass(OnGpu), bf16(16, 64))
    assert ops.calls == []


def test_the_zeros_are_not_made_inside_a_capture(ops: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture would record the fill, and the kept zeros would hold anything until the graph runs."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="call it once before the capture, or pass a bias"):
        trtllm.zero_bias(torch.device("cuda", 0), 16)
    trtllm._zeros[torch.device("cuda", 0), 16] = kept = bf16(16)
    assert trtllm.zero_bias(torch.device("cuda", 0), 16) is kept


# -- operands ----------------------------------------------------------------------------------------------------------


def misaligned(*shape: int) -> torch.Tensor:
    size = int(torch.Size(shape).numel())
    return torch.zeros(size + 1, dtype=torch.bfloat16)[1:].view(*shape)


GEMM_ERRORS: list[tuple[dict[str, torch.Tensor], str]] = [
    ({"x": bf16(0, 64)}, "M = 0, expected 1 to 524280; skip the call where there is no row"),
    ({"x": bf16(2, 68), "weight": bf16(16, 68)}, "K = 68, expected a multiple of 8"),
    ({"x": bf16(2, 0), "weight": bf16(16, 0)}, "K = 0, expected a multiple of 8, at least 8"),
    ({"x": bf16(2, 128)}, "x has K = 128 and weight K = 64"),
    ({"weight": bf16(24, 64)}, "N = 24, expected a positive multiple of 16"),
    ({"x": misaligned(2, 64)}, "x starts at an address that is no multiple of 16 bytes"),
    ({"weight": misaligned(16, 64)}, "weight starts at an address that is no multiple of 16 bytes"),
    ({"x": bf16(2, 1, 64)}, "x has 3 dimensions"),
    ({"x": bf16(2, 128)[:, :64]}, "x has strides"),
    ({"weight": bf16(32, 64)[::2]}, "weight has strides"),
    ({"weight": torch.zeros(16, 64)}, "weight is torch.float32, expected torch.bfloat16"),
    ({"bias": bf16(1, 16)}, "bias has 2 dimensions"),
    ({"bias": bf16(32)}, r"bias has shape \(32,\), expected \(16,\)"),
    ({"bias": torch.zeros(16)}, "bias is torch.float32"),
    ({"weight": torch.zeros(16, 64, dtype=torch.bfloat16, device="meta")}, "weight is on meta and x on cpu"),
]


@pytest.mark.parametrize(("wrong", "words"), GEMM_ERRORS, ids=[words[:40] for _, words in GEMM_ERRORS])
def test_what_tinygemm2_cannot_take_is_refused_before_the_call(
    ops: StandIns, wrong: dict[str, torch.Tensor], words: str
) -> None:
    ops.register()
    with pytest.raises(ValueError, match=words):
        trtllm.tinygemm2(**{"x": bf16(2, 64), "weight": bf16(16, 64), **wrong})  # type: ignore[arg-type]
    assert ops.calls == []


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (bf16(0, 64), bf16(64), "x has no rows, expected at least one"),
        (torch.zeros(2, 64), bf16(64), "x is torch.float32"),
        (misaligned(2, 64), bf16(64), "x starts at an address"),
        (bf16(2, 64), bf16(32), r"weight has shape \(32,\)"),
        (bf16(2, 68)[:, :64], bf16(64), "rows of x are 68 elements apart"),
    ],
    ids=["no rows", "another dtype", "misaligned", "another width", "odd rows"],
)
def test_what_rmsnorm_cannot_take_is_refused_before_the_call(
    ops: StandIns, x: torch.Tensor, weight: torch.Tensor, words: str
) -> None:
    ops.register()
    with pytest.raises(ValueError, match=words):
        trtllm.rmsnorm(x, weight)
    assert ops.calls == []


def test_a_k_of_8s_is_taken(ops: StandIns) -> None:
    ops.register()
    call: Callable[..., torch.Tensor] = trtllm.tinygemm2
    assert call(bf16(1, 8), bf16(16, 8)).shape == (1, 16)
