"""The native kernels of ``fusions`` as ops of a chain: their contracts, and how to rebuild them with another behaviour.

The contracts stand here and nowhere else; controls and arms are these contracts with a field changed.
"""

from __future__ import annotations

from typing import Any

from ..contract import KernelContract, Trigger, Wait
from ..op import Op, Shapes

RMSNORM_CONTRACT = KernelContract(
    reads=("input", "weight"), writes=("out",), wait=Wait.ALL, trigger=Trigger.AFTER_STORES
)
"""Every thread waits before its first global read (of the gain too), and triggers after its stores."""

TINYGEMM2_CONTRACT = KernelContract(
    reads=("input", "weight"),
    writes=("out",),
    independent=("weight",),
    wait=Wait.LOADERS,
    trigger=Trigger.AFTER_STORES,
)
"""Weights are fetched before the wait. Only the activation loaders wait; all else is ordered behind their mbarrier."""

COMMON_WAITS = frozenset({Wait.BARRIER, Wait.ONE_WARP, Wait.BRANCH, Wait.LATE, Wait.NEVER})


def _behaviour(kernel: str, contract: KernelContract, delay_ns: int | None, stamps: Any) -> Any:
    from fusions.ops import Behaviour

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
    from fusions.ops import rmsnorm

    behaviour = _behaviour("rmsnorm", contract, delay_ns, stamps)
    rmsnorm(input, weight, out=out, eps=eps, pdl=pdl, behaviour=behaviour, delay_ns=delay_ns or 0, stamps=stamps)


def _run_tinygemm2(
    *, input: Any, weight: Any, out: Any, pdl: bool, contract: KernelContract = TINYGEMM2_CONTRACT,
    delay_ns: int | None = None, stamps: Any = None,
) -> None:  # fmt: skip
    from fusions.ops import tinygemm2

    behaviour = _behaviour("tinygemm2", contract, delay_ns, stamps)
    tinygemm2(input, weight, out=out, pdl=pdl, behaviour=behaviour, delay_ns=delay_ns or 0, stamps=stamps)


def _verify(kernel: str) -> Any:
    def verify(contract: KernelContract, arch: str, delayed: bool) -> str:
        from fusions.ops import sass

        census = sass.verify(kernel, _behaviour(kernel, contract, 0 if delayed else None, None), arch)
        return f"{arch}: {census.waits} waits, {census.triggers} triggers, {census.fences} fences, as the contract says"

    return verify


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
)
