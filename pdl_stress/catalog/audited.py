"""The native kernels for the static audit: their machine code, and their declared contracts by parameter."""

from __future__ import annotations

from pathlib import Path

from fusions.ops.native import code as native
from pdl_stress.audit.declared import Declared

from .ops import LAYERNORM_CONTRACT, RMSNORM_CONTRACT, TINYGEMM2_CONTRACT

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_120a")

CONTRACTS = {
    "rmsnorm": Declared(RMSNORM_CONTRACT, {0: "input", 1: "weight", 2: "out", 10: "stamps"}, frozenset({"stamps"})),
    "layernorm": Declared(
        LAYERNORM_CONTRACT, {0: "input", 1: "weight", 2: "bias", 3: "out", 11: "stamps"}, frozenset({"stamps"})
    ),
    # The bias is the projection's own, a weight like the other, and no operand of any step.
    "tinygemm2": Declared(
        TINYGEMM2_CONTRACT, {0: "weight", 1: "input", 2: "out", 3: "bias", 10: "stamps"}, frozenset({"bias", "stamps"})
    ),
}
"""Of the kernels as they are deployed."""


def write_cubins(folder: Path, arch: str | None = None) -> list[Path]:
    """Compiles the deployed native kernels into a folder, for one architecture or for all that ship. Needs NVRTC."""
    paths = []
    for chosen in (arch,) if arch else ARCHITECTURES:
        for kernel in native.KERNELS:
            path = folder / f"{kernel}-{chosen}.cubin"
            path.write_bytes(native.cubin(kernel, native.DEPLOYED[kernel], chosen))
            paths.append(path)
    return paths
