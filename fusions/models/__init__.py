"""Attention fronts that use the fused projections, to test and to time; ``python -m fusions.models`` runs them."""

from fusions.models.csa2_front import Csa2Config, Csa2DecodeStep, Csa2Front, Csa2Inputs, decode_step_csa2
from fusions.models.layers import randomize
from fusions.models.mla_front import (
    IndexerUse,
    MlaCaches,
    MlaConfig,
    MlaDecodeStep,
    MlaFront,
    MlaInputs,
    decode_step_mla,
)

__all__ = [
    "Csa2Config",
    "Csa2DecodeStep",
    "Csa2Front",
    "Csa2Inputs",
    "IndexerUse",
    "MlaCaches",
    "MlaConfig",
    "MlaDecodeStep",
    "MlaFront",
    "MlaInputs",
    "decode_step_csa2",
    "decode_step_mla",
    "randomize",
]
