"""The paper's math in plain torch: the config, the factors and the gates of long skip connections."""

from scalelong_diffusers.scaling.config import METHODS, SkipScalingConfig
from scalelong_diffusers.scaling.factors import skip_energy, skip_factors, solve_kappa
from scalelong_diffusers.scaling.scaler import SkipScaler


__all__ = ["METHODS", "SkipScaler", "SkipScalingConfig", "skip_energy", "skip_factors", "solve_kappa"]
