"""The paper's math in plain torch: the config, the factors and the gates of long skip connections."""

from scalelong_diffusers.scaling.config import SkipScalingConfig
from scalelong_diffusers.scaling.constants import ConstantFactor, ConstantWeights
from scalelong_diffusers.scaling.factors import skip_energy, skip_factors, solve_kappa
from scalelong_diffusers.scaling.methods import (
    METHODS,
    LongSkip,
    SkipFactor,
    SkipMethod,
    SkipMix,
    register_skip_method,
)
from scalelong_diffusers.scaling.scaler import SkipScaler


__all__ = [
    "METHODS",
    "ConstantFactor",
    "ConstantWeights",
    "LongSkip",
    "SkipFactor",
    "SkipMethod",
    "SkipMix",
    "SkipScaler",
    "SkipScalingConfig",
    "register_skip_method",
    "skip_energy",
    "skip_factors",
    "solve_kappa",
]
