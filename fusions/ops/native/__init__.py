"""The native kernels: RMSNorm, LayerNorm and tinygemm2, compiled at first use for the GPU at hand."""

from fusions.ops.native.code import DEPLOYED, Behaviour
from fusions.ops.native.gemm import tinygemm2
from fusions.ops.native.norm import layernorm, rmsnorm

__all__ = ["DEPLOYED", "Behaviour", "layernorm", "rmsnorm", "tinygemm2"]
