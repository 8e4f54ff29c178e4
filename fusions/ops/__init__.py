"""The ops that the fused projections run on: native, FlashInfer's, TensorRT-LLM's, and the choice among them."""

from fusions.ops.choice import OPS, Policy, TinyGemmOp, choose, tinygemm2

__all__ = ["OPS", "Policy", "TinyGemmOp", "choose", "tinygemm2"]
