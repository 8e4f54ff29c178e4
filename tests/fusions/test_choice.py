"""Which tinygemm2 runs, and where: the environment, stand-ins for the ops, known-bad versions, the custom op."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from recording import BF16, Recording, same_bits, whole

from fusions import libraries
from fusions.libraries import Unavailable
from fusions.ops import choice, flashinfer, trtllm
from fusions.ops.choice import OPS, FlashInfer, Native, Policy, TrtLlm, choose

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is asked for, nothing is remembered, nothing is installed but a compiler; GPU 0 is of 9.0."""
    if "tensorrt_llm" in sys.modules or "flashinfer" in sys.modules:
        pytest.skip("a real library is loaded")
    names = (choice.CHOICE, choice.POLICY, libraries.ALLOW_KNOWN_BAD, *flashinfer.TINYGEMM2_OTHERS)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    gpu(monkeypatch, 90)
    monkeypatch.setattr(choice, "_has_compiler", lambda: True)
    monkeypatch.setattr(libraries.Library, "installed", lambda self: False)
    versions(monkeypatch)
    yield
    trtllm.version_refusal.cache_clear()
    choice._flashinfer_refusal.cache_clear()


def gpu(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(choice, "_capability", lambda index: number)


def versions(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    def look(name: str) -> str:
        if name.replace("-", "_") not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name.replace("-", "_")]

    monkeypatch.setattr(metadata, "version", look)
    trtllm.version_refusal.cache_clear()
    choice._flashinfer_refusal.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    monkeypatch.setattr(libraries.Library, "installed", lambda self: self.distribution.replace("-", "_") in found)
    versions(monkeypatch, **found)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """``torch.ops.trtllm.tinygemm2`` on the CPU; the calls."""
    calls: list[Any] = []

    def tinygemm2(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        calls.append((input, weight, bias))
        return (input.float() @ weight.float().t() + bias).to(BF16)

    library: Any = torch.library.Library("trtllm", "FRAGMENT")
    library.define("tinygemm2(Tensor input, Tensor weight, Tensor bias) -> Tensor")
    library.impl("tinygemm2", tinygemm2, "CPU")
    trtllm._zeros.clear()
    yield calls
    library._destroy()
    vars(torch.ops.trtllm).pop("tinygemm2", None)
    trtllm._zeros.clear()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recording]:
    made = {name: Recording(name) for name in OPS}
    monkeypatch.setattr(choice, "OPS", made)
    return made


# -- FUSIONS_TINYGEMM --------------------------------------------------------------------------------------------------


def test_the_order_is_tensorrt_llm_then_flashinfer_then_native() -> None:
    assert list(OPS) == ["trtllm", "flashinfer", "native"]
    assert all(key == op.name for key, op in OPS.items())


@pytest.mark.parametrize("value", [None, "", "auto"])
def test_auto_takes_the_first_that_can_and_else_says_why_for_each(
    value: str | None, stand_ins: dict[str, Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv(choice.CHOICE, value)
    for name in ("trtllm", "flashinfer", "native"):
        assert choose(CPU, 64) == (stand_ins[name], "")
        stand_ins[name].why = f"no {name}"
    assert choose(CPU, 64) == (None, "trtllm: no trtllm; flashinfer: no flashinfer; native: no native")


@pytest.mark.parametrize("name", list(OPS))
def test_a_name_takes_that_one_or_none(
    name: str, stand_ins: dict[str, Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(choice.CHOICE, name)
    assert choose(CPU, 64) == (stand_ins[name], "")
    stand_ins[name].why = "is broken"
    assert choose(CPU, 64) == (None, f"{name}: is broken")


def test_off_takes_none_and_a_forced_op_does_not_ask(
    stand_ins: dict[str, Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(choice.CHOICE, "off")
    assert choose(CPU, 64) == (None, "FUSIONS_TINYGEMM=off")
    mine = Recording("mine")
    assert choose(CPU, 64, mine) == (mine, "")
    mine.why = "is tired"
    assert choose(CPU, 64, mine) == (None, "mine is tired")


@pytest.mark.parametrize("value", ["Auto", "cublas", "native,flashinfer", " "])
def test_a_name_of_nothing_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.CHOICE, value)
    with pytest.raises(ValueError, match="names no op; expected auto, trtllm, flashinfer, native or off"):
        choose(GPU, 64)


def test_the_environment_is_read_at_every_call(
    stand_ins: dict[str, Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("native", "trtllm", "flashinfer"):
        monkeypatch.setenv(choice.CHOICE, name)
        choice.tinygemm2(whole(2, 64), whole(16, 64))
    assert [len(each.calls) for each in stand_ins.values()] == [1, 1, 1]


# -- the three ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_no_op_takes_the_cpu(op: Any, stand_in: list[Any]) -> None:
    assert not op.supports(CPU)
    assert "runs on CUDA devices, not on cpu" in op.refusal(CPU, 64)


def test_native_takes_9_0_and_later_with_a_compiler_and_a_k_of_64s(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Native()
    assert op.refusal(GPU, 5120) == ""
    assert op.refusal(GPU, 5128) == "K = 5128 is no multiple of 64"
    assert op.supports(GPU)
    gpu(monkeypatch, 89)
    assert op.refusal(GPU, 64) == "needs compute capability 9.0 or higher, cuda:0 has 8.9"
    gpu(monkeypatch, 121)
    assert op.supports(GPU)
    monkeypatch.setattr(choice, "_has_compiler", lambda: False)
    assert "pip install pdl-stress" in op.refusal(GPU, 64)


def test_flashinfer_takes_its_gpus_its_versions_and_a_k_of_8s(monkeypatch: pytest.MonkeyPatch) -> None:
    op = FlashInfer()
    assert "FlashInfer is not installed" in op.refusal(GPU, 5120)
    installed(monkeypatch, flashinfer_python="0.7.4")
    assert op.refusal(GPU, 5120) == op.refusal(GPU, 360) == ""
    assert "K = 56 is" in op.refusal(GPU, 56)
    assert "K = 100 is" in op.refusal(GPU, 100)
    gpu(monkeypatch, 89)
    assert op.refusal(GPU, 5120) == "does not support compute capability 8.9"
    gpu(monkeypatch, 90)
    installed(monkeypatch, flashinfer_python="0.6.13")
    assert "older than 0.6.14" in op.refusal(GPU, 5120)


@pytest.mark.parametrize("name", flashinfer.TINYGEMM2_OTHERS)
def test_flashinfer_is_passed_over_where_a_call_would_refuse_the_environment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, flashinfer_python="0.7.4")
    assert choose(GPU, 5120)[0] is OPS["flashinfer"]
    monkeypatch.setenv(name, "1")
    assert name in FlashInfer().refusal(GPU, 5120)
    assert choose(GPU, 5120)[0] is OPS["native"]


def test_tensorrt_llm_counts_once_its_op_is_registered(monkeypatch: pytest.MonkeyPatch, stand_in: list[Any]) -> None:
    op = TrtLlm()
    assert choose(GPU, 5120) == (OPS["trtllm"], "")
    assert "K = 5124 is no multiple of 8" in op.refusal(GPU, 5124)
    for number, fits in ((90, True), (100, True), (103, True), (89, False), (107, False), (120, False)):
        gpu(monkeypatch, number)
        assert op.supports(GPU) is fits


def test_without_the_op_tensorrt_llm_is_passed_over_although_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tensorrt_llm="1.3.0rc19")
    assert "is not registered; import tensorrt_llm first" in TrtLlm().refusal(GPU, 64)
    assert choose(GPU, 5120)[0] is OPS["native"]


def test_auto_skips_a_known_bad_version_above_k_1024(monkeypatch: pytest.MonkeyPatch, stand_in: list[Any]) -> None:
    installed(monkeypatch, tensorrt_llm="1.2.1")
    op = OPS["trtllm"]
    assert "known bad" in str(op.known_bad)
    assert choose(GPU, 1024)[0] is op
    assert choose(GPU, 1032)[0] is None  # native: no multiple of 64
    assert choose(GPU, 5120)[0] is OPS["native"]
    assert op.supports(GPU)
    monkeypatch.setenv(choice.CHOICE, "trtllm")
    assert choose(GPU, 5120)[0] is None
    assert "known bad" in choose(GPU, 5120)[1]
    monkeypatch.setenv(libraries.ALLOW_KNOWN_BAD, "1")
    assert choose(GPU, 5120)[0] is op
    assert op.known_bad
    installed(monkeypatch, tensorrt_llm="1.3.0")
    assert op.known_bad is None


def test_the_op_is_looked_up_through_its_attribute_at_every_call(
    monkeypatch: pytest.MonkeyPatch, stand_in: list[Any]
) -> None:
    op, x, weight = TrtLlm(), whole(2, 64), whole(16, 64, seed=1)
    op(x, weight)
    assert len(stand_in) == 1
    assert (stand_in[0][2] == 0).all()
    replaced: list[Any] = []

    def other(input: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        replaced.append(bias)
        return input.new_ones(2, 16)

    monkeypatch.setattr(torch.ops.trtllm, "tinygemm2", other)
    assert (op(x, weight) == 1).all()
    assert len(stand_in) == len(replaced) == 1
    assert op.supports(GPU)


def test_preparing_makes_the_zeros_that_calls_without_a_bias_read(stand_in: list[Any]) -> None:
    op = TrtLlm()
    op.prepare(CPU, (48, 32, 16))
    kept = dict(trtllm._zeros)
    assert sorted(columns for _, columns in kept) == [16, 32, 48]
    op(whole(2, 64), whole(32, 64))
    assert trtllm._zeros == kept
    assert stand_in[0][2].data_ptr() == kept[CPU, 32].data_ptr()


def test_asking_imports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both are there, and importing either would end this test."""
    for name in ("flashinfer", "tensorrt_llm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.undo()
    for name in (choice.CHOICE, *flashinfer.TINYGEMM2_OTHERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    gpu(monkeypatch, 90)
    versions(monkeypatch, flashinfer_python="0.7.4", tensorrt_llm="1.3.0")
    for op in OPS.values():
        for device in (CPU, GPU):
            op.supports(device)
            op.refusal(device, 5120)
            assert op.known_bad is None
    assert FlashInfer().supports(GPU)
    assert choose(GPU, 5120)[0] is OPS["flashinfer"]
    assert not {"flashinfer", "tensorrt_llm"} & set(sys.modules)


# -- tinygemm2 ---------------------------------------------------------------------------------------------------------


def test_tinygemm2_calls_the_chosen_op_and_never_with_no_rows(stand_ins: dict[str, Recording]) -> None:
    x, weight, bias = whole(3, 64), whole(16, 64, seed=1), whole(16, seed=2)
    want = (x.float() @ weight.float().t() + bias).to(BF16)
    assert same_bits(choice.tinygemm2(x, weight, bias), want)
    (call,) = stand_ins["trtllm"].taken()
    assert call.bias
    assert choice.tinygemm2(x[:0], weight).shape == (0, 16)
    assert stand_ins["trtllm"].taken() == []


def test_tinygemm2_without_an_op_says_why_not_for_each() -> None:
    with pytest.raises(Unavailable, match=r"no tinygemm2 for K = 64 on cpu: trtllm: .*; flashinfer: .*; native: runs"):
        choice.tinygemm2(whole(2, 64), whole(16, 64))
    with pytest.raises(ValueError, match=r"expected \[M, K\] and \[N, K\]"):
        choice.tinygemm2(whole(64), whole(16, 64))


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_the_custom_op_is_well_formed(rows: int, bias: bool, stand_ins: dict[str, Recording]) -> None:
    arguments = (whole(rows, 64), whole(16, 64, seed=1), whole(16, seed=2) if bias else None)
    torch.library.opcheck(torch.ops.fusions.tinygemm2.default, arguments)


def test_it_is_compiled_as_one_custom_op(stand_ins: dict[str, Recording]) -> None:
    def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return choice.tinygemm2(x, weight) * 2

    compiled: Callable[..., torch.Tensor] = torch.compile(twice, fullgraph=True, backend="aot_eager")
    x, weight = whole(3, 64), whole(16, 64, seed=1)
    assert same_bits(compiled(x, weight), twice(x, weight))
    assert len(stand_ins["trtllm"].taken()) == 2


# -- FUSIONS_TINYGEMM_SM -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "capabilities"),
    [("*", None), (" * ", None), ("", ()), (",", ()), ("90", (90,)), (" 90, 107 ,", (90, 107)), ("90,90", (90,))],
)
def test_a_policy_is_a_list_of_capabilities_or_all(text: str, capabilities: tuple[int, ...] | None) -> None:
    assert Policy.parse(text).capabilities == (None if capabilities is None else frozenset(capabilities))


@pytest.mark.parametrize("text", ["9.0", "sm_90", "90 107", "*,90", "-90", "90;107", "all"])
def test_a_policy_of_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected capabilities such as 90,107 for 9.0 and 10.7, or \*"):
        Policy.parse(text)


def test_the_policy_is_90_and_107_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Policy.current().capabilities == {90, 107}
    monkeypatch.setenv(choice.POLICY, "100")
    assert Policy.current().capabilities == {100}
    monkeypatch.setenv(choice.POLICY, "")
    assert Policy.current().capabilities == frozenset()


def test_a_policy_allows_its_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.parse("90,107")
    for number, allowed in ((90, True), (107, True), (100, False), (9, False)):
        gpu(monkeypatch, number)
        assert (policy.refusal(GPU) == "") is allowed
    gpu(monkeypatch, 100)
    assert policy.refusal(GPU) == "policy: compute capability 10.0 is not in FUSIONS_TINYGEMM_SM=90,107"
    assert policy.refusal(CPU) == "policy: cpu is no GPU"
    assert Policy.parse("*").refusal(CPU) == Policy.parse("*").refusal(GPU) == ""
