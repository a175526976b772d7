"""The forward diffusion process of training: timesteps, noisy samples, targets and loss weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DDPMScheduler, DiffusionPipeline

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.options import check_options, option


BETA_SCHEDULES = {
    "linear": {"beta_start": 1e-4, "beta_end": 0.02},
    "scaled_linear": {"beta_start": 0.00085, "beta_end": 0.012},
    "squaredcos_cap_v2": {},
}
PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")

# The entries of a scheduler's config that describe training; the others are about sampling.
_SCHEDULE = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "prediction_type",
    "rescale_betas_zero_snr",
)

# The VP-SDE of U-ViT's pixel models. Its steps of 1/1000 are the linear betas.
_BETA_MIN, _BETA_MAX = 0.1, 20.0


@dataclass(frozen=True)
class NoiseConfig:
    prediction_type: str = option("epsilon", "what the model predicts", choices=PREDICTION_TYPES)
    ddpm_beta_schedule: str = option(
        "linear", "noise schedule; squaredcos_cap_v2 is the cosine schedule", choices=BETA_SCHEDULES
    )
    continuous_time: bool = option(
        False, "draw continuous timesteps, as for U-ViT's pixel models, instead of 1000 discrete ones"
    )

    def __post_init__(self):
        check_options(self)


class NoiseProcess:
    """
    x_t = alpha_t x + sigma_t noise, with alpha_t^2 + sigma_t^2 = 1.

    Args:
        scheduler: the config of a diffusers scheduler, which gives the betas and the prediction type.
        continuous: draw times t ~ U(0, 1) of the VP-SDE that the linear betas discretize, as U-ViT's pixel models do.
            The model receives the timestep 1000 t - 1, so step n of the scheduler is the time (n + 1) / 1000.
        snr_gamma: gamma of min-SNR weighting. None weights all timesteps equally.
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
            raise UserError(
                f"--continuous_time needs --ddpm_beta_schedule linear, got {self.scheduler.config.beta_schedule}"
            )

    @classmethod
    def from_options(
        cls, beta_schedule: str, prediction_type: str, continuous: bool, snr_gamma: float | None
    ) -> "NoiseProcess":
        """Return the process of a training config's options."""
        scheduler = {
            "num_train_timesteps": 1000,
            "beta_schedule": beta_schedule,
            **BETA_SCHEDULES[beta_schedule],
            "prediction_type": prediction_type,
        }
        return cls(scheduler, continuous, snr_gamma)

    def timesteps(self, uniform: torch.Tensor) -> torch.Tensor:
        """Return the timesteps for numbers in [0, 1)."""
        if self.continuous:
            return uniform * self.num_timesteps - 1
        return (uniform * self.num_timesteps).long()

    def add_noise(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        alpha, sigma = self._alpha_sigma_like(clean, timesteps)
        return alpha * clean + sigma * noise

    def target(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the model must predict."""
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return clean
        alpha, sigma = self._alpha_sigma_like(clean, timesteps)
        return alpha * noise - sigma * clean

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor:
        """
        Return the loss weight of each sample: min(SNR, gamma) if the model predicts x (min-SNR, arXiv 2303.09556), and
        the equivalent for the other prediction types.
        """
        if self.snr_gamma is None:
            return torch.ones_like(timesteps, dtype=torch.float32)
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
        # Moved once, in the first step.
        self._alphas, self._sigmas = self._alphas.to(timesteps.device), self._sigmas.to(timesteps.device)
        return self._alphas[timesteps], self._sigmas[timesteps]


def training_schedule(pipe: DiffusionPipeline) -> DDPMScheduler:
    """Return the noise schedule and prediction type that the model was trained with."""
    name, config = type(pipe.scheduler).__name__, pipe.scheduler.config
    prediction_type = config.get("prediction_type", "epsilon")
    if "beta_schedule" not in config or prediction_type not in PREDICTION_TYPES:
        raise UserError(
            f"{name} cannot train a Stable Diffusion, which needs betas and a prediction_type of "
            f"{', '.join(PREDICTION_TYPES)}, got {prediction_type!r}; set another pipe.scheduler"
        )
    return DDPMScheduler(**{entry: config[entry] for entry in _SCHEDULE if entry in config})
