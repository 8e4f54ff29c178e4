"""The kernels of ``fusions``, its own and those it adapts, as ops of a chain: contracts, and how to rebuild the native.

The contracts stand here and nowhere else; controls and arms are these contracts with a field changed. Nothing here
imports a library of kernels, or torch: an op does so when it is first run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusions.libraries import FLASHINFER, TENSORRT_LLM, Library

from ..contract import KernelContract, Trigger, Wait
from ..errors import UsageError
from ..op import Op, Run, Shapes

RMSNORM_CONTRACT = KernelContract(
    reads=("input", "weight"), writes=("out",), wait=Wait.ALL, trigger=Trigger.AFTER_STORES
)
"""Every thread waits before its first global read (of the gain too), and triggers after its stores."""

LAYERNORM_CONTRACT = RMSNORM_CONTRACT.but(reads=("input", "weight", "bias"))
"""RMSNorm's; the bias is read after the wait too."""

TINYGEMM2_CONTRACT = KernelContract(
    reads=("input", "weight"),
    writes=("out",),
    independent=("weight",),
    wait=Wait.LOADERS,
    trigger=Trigger.AFTER_WAIT,
)
"""Weights are fetched before the wait. Only the activation loaders wait; all else is ordered behind their mbarrier.
They trigger directly after: consumers wait anyway (R1, R2), and their start is hidden behind the product."""

COMMON_WAITS = frozenset({Wait.BARRIER, Wait.ONE_WARP, Wait.BRANCH, Wait.LATE, Wait.NEVER})


def _behaviour(kernel: str, contract: KernelContract, delay_ns: int | None, stamps: Any) -> Any:
    from fusions.ops.native import Behaviour

    return Behaviour(
        wait=str(contract.wait),
        trigger=str(contract.trigger),
        fence=contract.fence,
        early_weights=kernel != "tinygemm2" or contract.is_independent("weight"),
        delay=delay_ns is not None,
        stamps=stamps is not None,
    )


def _run_rmsnorm(
    *, input: Any, weight: Any, out: Any, pdl: bool, contract: KernelContract = RMSNORM_CONTRACT,
    delay_ns: int | None = None, stamps: Any = None, eps: float = 1e-6,
) -> None:  # fmt: skip
    from fusions.ops.native import rmsnorm

    behaviour = _behaviour("rmsnorm", contract, delay_ns, stamps)
    rmsnorm(input, weight, out=out, eps=eps, pdl=pdl, behaviour=behaviour, delay_ns=delay_ns or 0, stamps=stamps)


def _run_layernorm(
    *, input: Any, weight: Any, bias: Any, out: Any, pdl: bool, contract: KernelContract = LAYERNORM_CONTRACT,
    delay_ns: int | None = None, stamps: Any = None, eps: float = 1e-6,
) -> None:  # fmt: skip
    from fusions.ops.native import layernorm

    behaviour = _behaviour("layernorm", contract, delay_ns, stamps)
    delay_ns = delay_ns or 0
    layernorm(input, weight, bias, out=out, eps=eps, pdl=pdl, behaviour=behaviour, delay_ns=delay_ns, stamps=stamps)


def _run_tinygemm2(
    *, input: Any, weight: Any, out: Any, pdl: bool, contract: KernelContract = TINYGEMM2_CONTRACT,
    delay_ns: int | None = None, stamps: Any = None,
) -> None:  # fmt: skip
    from fusions.ops.native import tinygemm2

    behaviour = _behaviour("tinygemm2", contract, delay_ns, stamps)
    tinygemm2(input, weight, out=out, pdl=pdl, behaviour=behaviour, delay_ns=delay_ns or 0, stamps=stamps)


def _verify(kernel: str) -> Any:
    def verify(contract: KernelContract, arch: str, delayed: bool) -> str:
        from pdl_stress.catalog import machine_code

        census = machine_code.verify(kernel, _behaviour(kernel, contract, 0 if delayed else None, None), arch)
        return f"{arch}: {census.waits} waits, {census.triggers} triggers, {census.fences} fences, as the contract says"

    return verify


def _native_code(kernel: str) -> Callable[[], list[bytes]]:
    def code() -> list[bytes]:
        import torch

        from fusions.ops.native import code as native

        major, minor = torch.cuda.get_device_capability()
        return [native.cubin(kernel, native.DEPLOYED[kernel], f"sm_{major}{minor}a")]

    return code


def _kept_cubins() -> list[Any]:
    from fusions.ops import flashinfer

    return list(flashinfer.kept_cubins())


def _norm_ctas(shapes: Shapes) -> int:
    return shapes["out"][0]


def _gemm_ctas(shapes: Shapes) -> int:
    rows, columns = shapes["out"]
    return -(-rows // 8) * -(-columns // 16)


rmsnorm = Op(
    "native rmsnorm",
    RMSNORM_CONTRACT,
    _run_rmsnorm,
    RMSNORM_CONTRACT,
    waits=COMMON_WAITS | {Wait.ALL},
    ctas=_norm_ctas,
    kernels=("rmsnorm",),
    verify=_verify("rmsnorm"),
    code=_native_code("rmsnorm"),
)

layernorm = Op(
    "native layernorm",
    LAYERNORM_CONTRACT,
    _run_layernorm,
    LAYERNORM_CONTRACT,
    waits=COMMON_WAITS | {Wait.ALL},
    ctas=_norm_ctas,
    kernels=("layernorm",),
    verify=_verify("layernorm"),
    code=_native_code("layernorm"),
)

tinygemm2 = Op(
    "native tinygemm2",
    TINYGEMM2_CONTRACT,
    _run_tinygemm2,
    TINYGEMM2_CONTRACT,
    waits=COMMON_WAITS | {Wait.LOADERS},
    ctas=_gemm_ctas,
    kernels=("tinygemm2",),
    verify=_verify("tinygemm2"),
    code=_native_code("tinygemm2"),
)

# -- libraries ---------------------------------------------------------------------------------------------------------

FLASHINFER_RMSNORM_CONTRACT = KernelContract(
    reads=("input", "weight"), writes=("out",), wait=Wait.ALL, trigger=Trigger.AFTER_STORES
)
"""CUDA (``norm.cuh``) and CuTe kernel alike: every thread waits first thing, and triggers after its own stores."""

FLASHINFER_TINYGEMM2_CONTRACT = TINYGEMM2_CONTRACT.but(trigger=Trigger.AFTER_WAIT)
"""``tinygemm2.cu``: the loaders of the activations wait, and trigger directly after. Weights are read before that."""

FLASHINFER_WGMMA_CONTRACT = FLASHINFER_TINYGEMM2_CONTRACT.but(independent=())
"""The wgmma programs: one warp loads weights and activations alike, and waits before either."""

TRTLLM_RMSNORM_CONTRACT = FLASHINFER_RMSNORM_CONTRACT
"""The op calls FlashInfer's RMSNorm."""

TRTLLM_TINYGEMM2_CONTRACT = TINYGEMM2_CONTRACT.but(trigger=Trigger.AFTER_WAIT)
"""Where it triggers depends on the version: after the wait, or before the stores. The earlier one leaves the consumer
less. Its bias, zeros that the adapter holds, is no operand of the chain."""


def _flashinfer_rmsnorm(kernel: str) -> Run:
    def run(*, input: Any, weight: Any, out: Any, pdl: bool, eps: float = 1e-6) -> None:
        from fusions.ops import flashinfer

        flashinfer.rmsnorm(input, weight, out=out, eps=eps, pdl=pdl, kernel=kernel)

    return run


def _flashinfer_tinygemm2(kernel: str) -> Run:
    def run(*, input: Any, weight: Any, out: Any, pdl: bool) -> None:
        from fusions.ops import flashinfer

        flashinfer.tinygemm2(input, weight, out=out, pdl=pdl, kernel=kernel)

    return run


def _check_pdl(op: str, pdl: bool) -> None:
    if not pdl:
        raise UsageError(f"TensorRT-LLM {op}: a step with pdl=False; the op has no such choice. Leave pdl True.")


def _trtllm_rmsnorm(*, input: Any, weight: Any, pdl: bool, eps: float = 1e-6) -> Any:
    _check_pdl("rmsnorm", pdl)  # whether it really is launched so, TRTLLM_ENABLE_PDL decides
    from fusions.ops import trtllm

    return trtllm.rmsnorm(input, weight, eps=eps)


def _trtllm_tinygemm2(*, input: Any, weight: Any, pdl: bool) -> Any:
    _check_pdl("tinygemm2", pdl)
    from fusions.ops import trtllm

    return trtllm.tinygemm2(input, weight)


def _library_op(name: str, contract: KernelContract, run: Run, **fields: Any) -> Op:
    """An op that is what it is. What it launches may depend on the GPU and the shapes, so its label names no kernel,
    and unless ``ctas`` says so its grids count as several CTAs."""
    return Op(name, contract, run, contract, kernels=(name,), **fields)


NARROW = 512
"""Columns. On sm_90, at 5120 and up to 8 tokens, FlashInfer 0.7.4 runs a wgmma program for 1280 and 1792 columns, and
tinygemm2 proper for 512."""


@dataclass(frozen=True)
class OpSet:
    """The ops that the shipped chains are made of, from whatever library.

    Args:
        wide_tinygemm2: for projections of more than :data:`NARROW` columns, where the library has another kernel for
            them, with a contract of its own.
    """

    rmsnorm: Op
    tinygemm2: Op
    wide_tinygemm2: Op | None = None

    def projection(self, columns: int) -> Op:
        """The op for a projection of 5120 to ``columns``, of 1 to 8 tokens."""
        return self.wide_tinygemm2 if self.wide_tinygemm2 and columns > NARROW else self.tinygemm2


NATIVE = OpSet(rmsnorm, tinygemm2)

OP_SETS: dict[str, OpSet] = {
    "native": NATIVE,
    "flashinfer": OpSet(
        _library_op(
            "FlashInfer rmsnorm", FLASHINFER_RMSNORM_CONTRACT, _flashinfer_rmsnorm("library"), code=_kept_cubins
        ),
        _library_op("FlashInfer tinygemm2", FLASHINFER_TINYGEMM2_CONTRACT, _flashinfer_tinygemm2("library")),
        _library_op("FlashInfer tinygemm2 (wide)", FLASHINFER_WGMMA_CONTRACT, _flashinfer_tinygemm2("library")),
    ),
    "flashinfer-reference": OpSet(
        _library_op(
            "FlashInfer rmsnorm (reference)",
            FLASHINFER_RMSNORM_CONTRACT,
            _flashinfer_rmsnorm("reference"),
            ctas=_norm_ctas,
        ),
        _library_op(
            "FlashInfer tinygemm2 (reference)",
            FLASHINFER_TINYGEMM2_CONTRACT,
            _flashinfer_tinygemm2("reference"),
            ctas=_gemm_ctas,
        ),
    ),
    "trtllm": OpSet(
        _library_op("TensorRT-LLM rmsnorm", TRTLLM_RMSNORM_CONTRACT, _trtllm_rmsnorm, returns=("out",)),
        _library_op(
            "TensorRT-LLM tinygemm2", TRTLLM_TINYGEMM2_CONTRACT, _trtllm_tinygemm2, returns=("out",), ctas=_gemm_ctas
        ),
    ),
}
"""The op sets, by the name that ``--ops`` takes."""

LIBRARIES: dict[str, Library] = {"flashinfer": FLASHINFER, "trtllm": TENSORRT_LLM}
"""The libraries behind the op sets, by the name of the set and of our extra."""

_LIBRARY_OF = {"flashinfer": FLASHINFER, "flashinfer-reference": FLASHINFER, "trtllm": TENSORRT_LLM}
_OPS = ("rmsnorm", "tinygemm2")


def op_set(spec: str) -> OpSet:
    """The op set of a name in :data:`OP_SETS`, of ``auto`` (native), or of a mix such as
    ``rmsnorm=native,tinygemm2=flashinfer``, in which an op that is not named is native.

    Raises:
        UsageError: anything else; the message lists the choices.
    """
    chosen = _chosen(spec)
    gemm = OP_SETS[chosen["tinygemm2"]]
    return OpSet(OP_SETS[chosen["rmsnorm"]].rmsnorm, gemm.tinygemm2, gemm.wide_tinygemm2)


def refusal(spec: str) -> str | None:
    """Why the libraries that these ops come from cannot be used here, with what to do, or None if nothing is known
    against them. Looks at what is installed and imports nothing, so a library that is broken shows only when it runs.

    Raises:
        UsageError: as :func:`op_set`.
    """
    for op, name in _chosen(spec).items():
        library = _LIBRARY_OF.get(name)
        found = library.refusal(op) if library else None
        if found:
            return f"ops {name}: {found}"
    return None


def _chosen(spec: str) -> dict[str, str]:
    """The name of the op set that each op is taken from."""
    if "=" not in spec:
        return dict.fromkeys(_OPS, _name(spec, spec))
    chosen: dict[str, str] = {}
    for part in spec.split(","):
        op, _, name = (text.strip() for text in part.partition("="))
        if op not in _OPS:
            raise UsageError(f"unknown op {op!r} in ops {spec!r}; {_CHOICES}")
        if op in chosen:
            raise UsageError(f"op {op!r} is chosen twice in ops {spec!r}; name each op once.")
        chosen[op] = _name(name, spec)
    return {op: chosen.get(op, "native") for op in _OPS}


def _name(name: str, spec: str) -> str:
    name = "native" if name == "auto" else name
    if name not in OP_SETS:
        raise UsageError(f"unknown ops {name!r}" + (f" in {spec!r}; " if name != spec else "; ") + _CHOICES)
    return name


_CHOICES = f"expected auto, {', '.join(OP_SETS)}, or a mix such as rmsnorm=native,tinygemm2=flashinfer."
