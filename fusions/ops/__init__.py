"""The ops that the fused projections run on: native kernels, compiled at first use for the GPU at hand."""

from fusions.ops.native import Behaviour
from fusions.ops.rmsnorm import rmsnorm
from fusions.ops.tinygemm2 import tinygemm2

__all__ = ["Behaviour", "rmsnorm", "tinygemm2"]
