"""The methods without parameters: constant factors of the skip, and of the hidden state and the skip together."""

import math

import torch

from scalelong_diffusers.scaling.factors import skip_factors
from scalelong_diffusers.scaling.methods import LongSkip, SkipFactor, SkipMix, register_skip_method


class ConstantFactor(SkipFactor):
    """k_i is a Python float, which does not promote the skip's dtype."""

    def __init__(self, skip: LongSkip, value: float):
        super().__init__(skip)
        self.value = value

    def forward(self, skip: torch.Tensor) -> float:
        return self.value

    def initial_weights(self) -> tuple[float, float]:
        return 1.0, self.value


class ConstantWeights(SkipMix):
    """The hidden state and the skip are multiplied by one float each."""

    def __init__(self, skip: LongSkip, hidden_weight: float, skip_weight: float):
        super().__init__(skip)
        self.hidden_weight = hidden_weight
        self.skip_weight = skip_weight

    def forward(self, hidden: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden * self.hidden_weight, skip * self.skip_weight

    def initial_weights(self) -> tuple[float, float]:
        return self.hidden_weight, self.skip_weight


@register_skip_method("none", has_parameters=False)
def no_scaling(skip: LongSkip) -> ConstantFactor:
    return _factor(skip, "none")


@register_skip_method("inv_sqrt2", has_parameters=False)
def inverse_square_root_of_two(skip: LongSkip) -> ConstantFactor:
    return _factor(skip, "inv_sqrt2")


@register_skip_method("constant", has_parameters=False)
def universal_scaling(skip: LongSkip, kappa: float = 0.9) -> ConstantFactor:
    return _factor(skip, "constant", kappa)


@register_skip_method("cs", has_parameters=False)
def constant_scaling(skip: LongSkip, kappa: float = 0.9, reverse: bool = False) -> ConstantFactor:
    return _factor(skip, "cs", kappa, reverse)


@register_skip_method("compensated_cs", has_parameters=False)
def compensated_scaling(skip: LongSkip, kappa: float = 0.9) -> ConstantWeights:
    """CS that keeps the magnitude: [h, k s] is multiplied by sqrt((Nh + Ns) / (Nh + k^2 Ns)), with Nh, Ns channels."""
    k = skip_factors("cs", skip.count, kappa)[skip.index - 1]
    scale = math.sqrt((skip.hidden_width + skip.width) / (skip.hidden_width + k**2 * skip.width))
    return ConstantWeights(skip, scale, scale * k)


@register_skip_method("mp_cat", has_parameters=False)
def magnitude_preserving_concatenation(skip: LongSkip, balance: float = 0.5) -> ConstantWeights:
    """EDM2's mp_cat: weights 1 - balance and balance, each divided by the root of its width, at equal magnitude."""
    scale = math.sqrt((skip.hidden_width + skip.width) / ((1 - balance) ** 2 + balance**2))
    return ConstantWeights(
        skip, scale * (1 - balance) / math.sqrt(skip.hidden_width), scale * balance / math.sqrt(skip.width)
    )


@register_skip_method("linear", has_parameters=False)
def linear_scaling(skip: LongSkip, kappa: float = 0.9) -> ConstantFactor:
    """k_i falls evenly from 1 for the outermost skip to kappa for the deepest, as in Skip-Tuning."""
    return _factor(skip, "linear", kappa)


def _factor(skip: LongSkip, method: str, kappa: float | None = None, reverse: bool | None = None):
    return ConstantFactor(skip, skip_factors(method, skip.count, kappa, reverse)[skip.index - 1])
