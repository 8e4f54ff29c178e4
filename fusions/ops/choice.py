"""Which tinygemm2 runs: TensorRT-LLM's, FlashInfer's, the native one, or none. Decided at every call.

``FUSIONS_TINYGEMM`` chooses: ``auto`` (the first usable of the three), one of their names, or ``off``. TensorRT-LLM is
never imported for it, since that starts MPI: its op counts once it is registered.

*Policy* is another question: on which GPUs a projection should leave cuBLAS at all. ``FUSIONS_TINYGEMM_SM`` lists
compute capabilities, default ``90,107``: where a gain was measured (sm_90, ``benchmarks/fusions.py``) or reported
(sm_107); ``*`` is every one that the op supports.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from fusions.libraries import FLASHINFER, TENSORRT_LLM, TRTLLM_BAD_ABOVE_K, Refusal, Unavailable, known_bad_allowed
from fusions.ops import flashinfer, native, trtllm

CHOICE = "FUSIONS_TINYGEMM"
POLICY = "FUSIONS_TINYGEMM_SM"
DEFAULT_POLICY = "90,107"


class TinyGemmOp(Protocol):
    """A BF16 projection of few rows: ``x[M, K] @ weight[N, K]^T (+ bias[N])`` as a new dense tensor ``[M, N]``.

    ``name``: for reports. ``known_bad``: what is known against the version in use, or ``None``.
    """

    name: str

    @property
    def known_bad(self) -> str | None: ...

    def supports(self, device: torch.device) -> bool:
        """Whether the op runs on this device. Never tried: a trial may end the process."""
        ...

    def refusal(self, device: torch.device, k: int) -> str:
        """Why the op does not take operands of this K on this device; empty if it does."""
        ...

    def prepare(self, device: torch.device, columns: Iterable[int]) -> None:
        """Makes what calls without a bias for these N need, and waits for it; outside of captures."""
        ...

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, /) -> torch.Tensor: ...


class _Adapter:
    """What the three ops share."""

    name = ""

    @property
    def known_bad(self) -> str | None:
        return None

    def supports(self, device: torch.device) -> bool:
        return not self._unsupported(device)

    def refusal(self, device: torch.device, k: int) -> str:
        return self._unsupported(device) or self._unfit(k)

    def prepare(self, device: torch.device, columns: Iterable[int]) -> None:
        """Nothing to do: no bias is needed."""

    def _unsupported(self, device: torch.device) -> str:
        raise NotImplementedError

    def _unfit(self, k: int) -> str:
        raise NotImplementedError


class Native(_Adapter):
    """:func:`fusions.ops.native.tinygemm2`."""

    name = "native"

    def _unsupported(self, device: torch.device) -> str:
        if device.type != "cuda":
            return f"runs on CUDA devices, not on {device}"
        if capability(device) < 90:
            return f"needs compute capability 9.0 or higher, {device} has {_dotted(device)}"
        return "" if _has_compiler() else "needs cuda-core and NVRTC: pip install pdl-stress"

    def _unfit(self, k: int) -> str:
        return f"K = {k} is no multiple of 64" if k % 64 else ""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return native.tinygemm2(x, weight, bias)


class FlashInfer(_Adapter):
    """:func:`fusions.ops.flashinfer.tinygemm2`, with FlashInfer's own choice of kernel."""

    name = "flashinfer"
    CAPABILITIES = (90, 100, 103, 107, 110, 120, 121)

    def _unsupported(self, device: torch.device) -> str:
        if device.type != "cuda":
            return f"runs on CUDA devices, not on {device}"
        if capability(device) not in self.CAPABILITIES:
            return f"does not support compute capability {_dotted(device)}"
        found = _flashinfer_refusal()
        if found:
            return str(found)
        forced = [name for name in flashinfer.TINYGEMM2_OTHERS if os.environ.get(name) == "1"]
        return f"{forced[0]}=1 keeps it from choosing a kernel by itself" if forced else ""  # a call would raise that

    def _unfit(self, k: int) -> str:
        return f"K = {k} is no multiple of 8, or below 64" if k % 8 or k < 64 else ""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return flashinfer.tinygemm2(x, weight, bias, out=x.new_empty((x.shape[0], weight.shape[0])))


class TrtLlm(_Adapter):
    """``torch.ops.trtllm.tinygemm2``, looked up at every call; has been tested against stand-ins only."""

    name = "trtllm"

    @property
    def known_bad(self) -> str | None:
        found = _trtllm_refusal()
        return str(found) if found else None

    def _unsupported(self, device: torch.device) -> str:
        if not trtllm.registered(trtllm.TINYGEMM2):
            return "torch.ops.trtllm.tinygemm2 is not registered; import tensorrt_llm first"
        if device.type == "cuda" and capability(device) not in trtllm.CAPABILITIES:
            return f"supports compute capability {_dotted(device)} in no version seen"
        return "" if device.type == "cuda" else f"runs on CUDA devices, not on {device}"

    def _unfit(self, k: int) -> str:
        if k % 8:
            return f"K = {k} is no multiple of 8"
        return (self.known_bad or "") if k > TRTLLM_BAD_ABOVE_K and not known_bad_allowed() else ""

    def prepare(self, device: torch.device, columns: Iterable[int]) -> None:
        for count in columns:
            trtllm.zero_bias(device, count)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return trtllm.tinygemm2(x, weight, bias)


OPS: dict[str, TinyGemmOp] = {"trtllm": TrtLlm(), "flashinfer": FlashInfer(), "native": Native()}
"""The ops by the names that ``FUSIONS_TINYGEMM`` takes, in the order in which ``auto`` asks them."""


def choose(device: torch.device, k: int, forced: TinyGemmOp | None = None) -> tuple[TinyGemmOp | None, str]:
    """The op for operands of this K on this device, or ``None``; and why none, or empty.

    Args:
        forced: an op that the caller chose; the environment is not asked.

    Raises:
        ValueError: ``FUSIONS_TINYGEMM`` names no op.
    """
    if forced is not None:
        why = forced.refusal(device, k)
        return (None, f"{forced.name} {why}") if why else (forced, "")
    name = os.environ.get(CHOICE, "auto") or "auto"
    if name == "off":
        return None, f"{CHOICE}=off"
    if name != "auto" and name not in OPS:
        raise ValueError(f"{CHOICE}={name!r} names no op; expected auto, {', '.join(OPS)} or off")
    reasons = []
    for key, op in OPS.items():
        if name in ("auto", key):
            why = op.refusal(device, k)
            if not why:
                return op, ""
            reasons.append(f"{key}: {why}")
    return None, "; ".join(reasons)


def tinygemm2(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """out[M, N] = x[M, K] @ weight[N, K]^T (+ bias[N]) by the op that ``FUSIONS_TINYGEMM`` chooses.

    BF16, FP32 accumulation, rounded once; contiguous and 16-byte aligned; N % 16 == 0. The result is a new dense
    tensor. Launched with the PDL attribute; weight and bias are read before the kernel's wait, so no kernel in flight
    may write them. Under torch.compile it is the custom op ``fusions::tinygemm2``.

    Raises:
        Unavailable: no op can be used here, with the reason for each.
        ValueError: operands that the op does not take.
    """
    if torch.compiler.is_compiling():
        found: torch.Tensor = torch.ops.fusions.tinygemm2(x, weight, bias)
        return found
    return _tinygemm2(x, weight, bias)


def _tinygemm2(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"tinygemm2: x {tuple(x.shape)} and weight {tuple(weight.shape)}, expected [M, K] and [N, K]")
    op, why = choose(x.device, x.shape[1])
    if op is None:
        raise Unavailable(f"no tinygemm2 for K = {x.shape[1]} on {x.device}: {why}")
    if x.shape[0] == 0:  # TensorRT-LLM's would launch an empty grid
        return x.new_empty((0, weight.shape[0]))
    return op(x, weight, bias)


@torch.library.custom_op("fusions::tinygemm2", mutates_args=())
def _custom(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _tinygemm2(x, weight, bias)


@_custom.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


# -- policy ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """On which compute capabilities a projection leaves cuBLAS; ``None``: on all that its op supports."""

    capabilities: frozenset[int] | None

    @staticmethod
    @lru_cache(maxsize=16)
    def parse(text: str) -> Policy:
        """``*``, or capabilities such as ``90,107``.

        Raises:
            ValueError: anything else.
        """
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if parts == ["*"]:
            return Policy(None)
        if not all(part.isdigit() for part in parts):
            raise ValueError(f"{POLICY}={text!r}: expected capabilities such as 90,107 for 9.0 and 10.7, or *")
        return Policy(frozenset(map(int, parts)))

    @staticmethod
    def current() -> Policy:
        """What ``FUSIONS_TINYGEMM_SM`` says now."""
        return Policy.parse(os.environ.get(POLICY, DEFAULT_POLICY))

    def refusal(self, device: torch.device) -> str:
        """Why not on this device; empty if it is allowed."""
        if self.capabilities is None:
            return ""
        if device.type != "cuda":
            return f"policy: {device} is no GPU"
        if capability(device) in self.capabilities:
            return ""
        allowed = ",".join(map(str, sorted(self.capabilities)))
        return f"policy: compute capability {_dotted(device)} is not in {POLICY}={allowed}"


# -- what is looked up once --------------------------------------------------------------------------------------------


def capability(device: torch.device) -> int:
    """90 for compute capability 9.0."""
    index: int | None = device.index  # torch says it is always there; torch.device("cuda") has none
    return _capability(torch.cuda.current_device() if index is None else index)


@lru_cache(maxsize=64)
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def _dotted(device: torch.device) -> str:
    number = capability(device)
    return f"{number // 10}.{number % 10}"


@lru_cache(maxsize=1)
def _has_compiler() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("cuda", "cuda.core", "cuda.bindings"))


@lru_cache(maxsize=1)
def _flashinfer_refusal() -> Refusal | None:
    """Once: reading an installed version takes a millisecond."""
    return FLASHINFER.refusal("tinygemm2")


def _trtllm_refusal() -> Refusal | None:
    return trtllm.version_refusal(TENSORRT_LLM.loaded())
