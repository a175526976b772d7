"""Measure the gates of a trained LS model, for Figure 7."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from scalelong_diffusers.diagnosis.observer import SkipStatistics
from scalelong_diffusers.randomness import generator_for


NUM_NOISES = 30
_LAST_TIMESTEP = 999
_GRID = 10_000


@torch.no_grad()
def gate_values(unet: nn.Module, seed: int = 0) -> list[list[float]]:
    """
    Return mean, lowest and highest factor of each skip, from i = 1, over 30 inputs of pure noise at the last timestep.

    The factor of an input is the mean over its tokens or channels.
    """
    size, statistics = unet.config.sample_size, SkipStatistics(unet)
    noise = torch.randn(
        NUM_NOISES, unet.config.in_channels, size, size, generator=generator_for(seed, "noise of figure 7")
    )
    with statistics.attached():
        unet.eval()(noise, torch.full((NUM_NOISES,), _LAST_TIMESTEP))
    factors = [k for _, k in sorted(statistics.values["factor"].items())]
    return [[k.mean().item(), k.min().item(), k.max().item()] for k in factors]


def fit_kappa(factors: Sequence[float]) -> dict[str, Any]:
    """
    Fit kappa^(i-1) (equation 8) to the factors k_1 ... k_N by least squares.

    Return kappa, the root mean square of the residuals, and the same for the best constant, which a useful fit beats.
    """
    k = torch.tensor(factors, dtype=torch.float64)
    kappas = torch.linspace(0, 1, _GRID + 1, dtype=torch.float64)[1:]
    curves = kappas[:, None] ** torch.arange(len(k), dtype=torch.float64)
    errors = (curves - k).square().mean(dim=1).sqrt()
    best = int(errors.argmin())
    return {"kappa": kappas[best].item(), "residual": errors[best].item(), "constant": k.std(unbiased=False).item()}
