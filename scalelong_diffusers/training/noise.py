"""How data is noised in training, and what the model is to predict of it."""

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DDPMScheduler


BETA_SCHEDULES = {
    "linear": {"beta_start": 1e-4, "beta_end": 0.02},
    "scaled_linear": {"beta_start": 0.00085, "beta_end": 0.012},
    "squaredcos_cap_v2": {},
}
PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")

# The VP-SDE of U-ViT's pixel models, whose steps of 1/1000 are the linear betas.
_BETA_MIN, _BETA_MAX = 0.1, 20.0


class NoiseProcess:
    """
    x_t = alpha_t x + sigma_t noise, with alpha_t^2 + sigma_t^2 = 1, at the timesteps that the model is shown.

    Args:
        scheduler: the config of a diffusers scheduler: its betas and its prediction type.
        continuous: draw real times t ~ U(0, 1) of the VP-SDE whose steps the linear betas are, as U-ViT's pixel models
            are trained, instead of one of the scheduler's steps. The time t is the timestep 1000 t - 1, so that the
            scheduler's step n is the time (n + 1) / 1000.
        snr_gamma: of min-SNR weighting; None weighs all timesteps alike.
    """

    def __init__(self, scheduler: Mapping[str, Any], continuous: bool = False, snr_gamma: float | None = None):
        self.scheduler = DDPMScheduler.from_config(scheduler)
        self.prediction_type = self.scheduler.config.prediction_type
        self.num_timesteps = self.scheduler.config.num_train_timesteps
        self.continuous = continuous
        self.snr_gamma = snr_gamma
        alphas_cumprod = self.scheduler.alphas_cumprod.double()
        self._alphas, self._sigmas = alphas_cumprod.sqrt().float(), (1 - alphas_cumprod).sqrt().float()
        if continuous and self.scheduler.config.beta_schedule != "linear":
            raise ValueError(
                "--continuous_time is the continuous form of linear betas, got --ddpm_beta_schedule "
                f"{self.scheduler.config.beta_schedule}"
            )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "NoiseProcess":
        scheduler = {
            "num_train_timesteps": 1000,
            "beta_schedule": args.ddpm_beta_schedule,
            **BETA_SCHEDULES[args.ddpm_beta_schedule],
            "prediction_type": args.prediction_type,
        }
        return cls(scheduler, args.continuous_time, args.snr_gamma)

    def timesteps(self, uniform: torch.Tensor) -> torch.Tensor:
        """The timesteps for numbers in [0, 1)."""
        if self.continuous:
            return uniform * self.num_timesteps - 1
        return (uniform.double() * self.num_timesteps).long()

    def add_noise(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        alpha, sigma = self._alpha_sigma_like(clean, timesteps)
        return alpha * clean + sigma * noise

    def target(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """What the model is to predict."""
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return clean
        alpha, sigma = self._alpha_sigma_like(clean, timesteps)
        return alpha * noise - sigma * clean

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor:
        """
        What each sample's loss counts: min(SNR, gamma) where x is predicted (min-SNR, arXiv 2303.09556), and the same
        in terms of the other predictions.
        """
        if self.snr_gamma is None:
            return torch.ones(timesteps.shape, device=timesteps.device)
        alpha, sigma = self._alpha_sigma(timesteps)
        snr = (alpha / sigma) ** 2
        if self.prediction_type == "epsilon":
            return (self.snr_gamma / snr).clamp(max=1)
        if self.prediction_type == "sample":
            return snr.clamp(max=self.snr_gamma)
        return snr.clamp(max=self.snr_gamma) / (snr + 1)

    def _alpha_sigma_like(self, tensor: torch.Tensor, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (-1, *[1] * (tensor.dim() - 1))
        alpha, sigma = self._alpha_sigma(timesteps)
        return alpha.view(shape).to(tensor), sigma.view(shape).to(tensor)

    def _alpha_sigma(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.continuous:
            t = (timesteps + 1) / self.num_timesteps
            integral = _BETA_MIN * t + (_BETA_MAX - _BETA_MIN) * t**2 / 2  # of beta, from 0 to t
            return torch.exp(-integral / 2), torch.sqrt(-torch.expm1(-integral))
        self._alphas, self._sigmas = self._alphas.to(timesteps.device), self._sigmas.to(timesteps.device)
        return self._alphas[timesteps], self._sigmas[timesteps]
