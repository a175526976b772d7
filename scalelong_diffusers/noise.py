"""The forward diffusion processes of training: timesteps, noisy samples, targets and loss weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from diffusers import (
    DDPMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    SchedulerMixin,
)

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.options import check_options, option


BETA_SCHEDULES = {
    "linear": {"beta_start": 1e-4, "beta_end": 0.02},
    "scaled_linear": {"beta_start": 0.00085, "beta_end": 0.012},
    "squaredcos_cap_v2": {},
}
# What a model can predict about samples that are noised with betas.
BETA_PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")
FLOW, EDM = "flow", "edm"
# The options of a config that a prediction type reads.
_OF_BETAS = ("ddpm_beta_schedule", "continuous_time", "snr_gamma")
OPTIONS_OF = {
    **dict.fromkeys(BETA_PREDICTION_TYPES, _OF_BETAS),
    FLOW: ("weighting_scheme", "logit_mean", "logit_std", "flow_shift"),
    EDM: ("edm_sigma_data", "edm_p_mean", "edm_p_std"),
}
FLOW_SCHEDULERS = (FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler)
EDM_SCHEDULERS = (EDMDPMSolverMultistepScheduler, EDMEulerScheduler)

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
# Numbers in [0, 1) are kept this far from 0 and 1, where the normal quantiles are infinite.
_TAIL = 1e-6


@dataclass(frozen=True)
class NoiseConfig:
    prediction_type: str = option(
        "epsilon",
        "what the model predicts: noise, velocity or sample of a process with betas; the velocity of flow matching; "
        "or the output of EDM's preconditioning",
        choices=OPTIONS_OF,
    )
    ddpm_beta_schedule: str = option(
        "linear", "noise schedule; squaredcos_cap_v2 is the cosine schedule", choices=BETA_SCHEDULES
    )
    continuous_time: bool = option(
        False, "draw continuous timesteps, as for U-ViT's pixel models, instead of 1000 discrete ones"
    )
    weighting_scheme: str = option(
        "none",
        "flow: draw times uniformly (none), or more often in the middle",
        choices=("none", "logit_normal"),
    )
    logit_mean: float = option(0.0, "flow: mean of logit-normal times", at_least=-10, at_most=10)
    logit_std: float = option(1.0, "flow: standard deviation of logit-normal times", above=0, at_most=10)
    flow_shift: float = option(
        1.0, "flow: shift of the times in training and sampling; above 1: more noise", above=0, at_most=1000
    )
    edm_sigma_data: float = option(0.5, "edm: standard deviation of the data", above=0, at_most=1000)
    edm_p_mean: float = option(-1.2, "edm: mean of log sigma in training", at_least=-10, at_most=10)
    edm_p_std: float = option(1.2, "edm: standard deviation of log sigma in training", above=0, at_most=10)

    def __post_init__(self):
        check_options(self)
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default and field.name not in OPTIONS_OF[self.prediction_type]:
                raise UserError(f"{field.name} {value} has no effect with prediction_type {self.prediction_type}")


def without_unread_options(implied: Mapping[str, Any], prediction_type: str | None) -> dict[str, Any]:
    """Return implied options, without those that the passed prediction type, if there is one, does not read."""
    read, known = OPTIONS_OF.get(prediction_type), set().union(*OPTIONS_OF.values())
    return {flag: value for flag, value in implied.items() if read is None or flag in read or flag not in known}


class NoiseProcess(ABC):
    """
    x_t = alpha_t x + sigma_t noise is the input of the model, together with a timestep.

    Timesteps rise with the noise. They come from numbers in [0, 1), so that equal tenths of the interval are equally
    frequent in training.
    """

    @abstractmethod
    def timesteps(self, uniform: torch.Tensor) -> torch.Tensor:
        """Return the timesteps for numbers in [0, 1)."""

    @abstractmethod
    def target(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the model must predict."""

    @abstractmethod
    def sampling_scheduler(self) -> SchedulerMixin:
        """Return a fast scheduler that samples from a model trained with this process."""

    @abstractmethod
    def _alpha_sigma(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Return the loss weight of each sample."""
        return torch.ones_like(timesteps, dtype=torch.float32)

    def add_noise(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return the input of the model."""
        alpha, sigma = self._alpha_sigma_like(clean, timesteps)
        return alpha * clean + sigma * noise

    def _alpha_sigma_like(self, tensor: torch.Tensor, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        alpha, sigma = self._alpha_sigma(timesteps)
        return _like(tensor, alpha), _like(tensor, sigma)


class BetaProcess(NoiseProcess):
    """
    The process of DDPM, with alpha_t^2 + sigma_t^2 = 1.

    Args:
        scheduler: the config of a diffusers scheduler, which gives the betas and the prediction type.
        continuous: draw times t ~ U(0, 1) of the VP-SDE that the linear betas discretize, as U-ViT's pixel models do.
            The model receives the timestep 1000 t - 1, so step n of the scheduler is the time (n + 1) / 1000.
        snr_gamma: gamma of min-SNR weighting. None weights all timesteps equally.
    """

    def __init__(
        self, scheduler: Mapping[str, Any] | None = None, continuous: bool = False, snr_gamma: float | None = None
    ):
        self.scheduler = DDPMScheduler.from_config(scheduler or {})
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

    def timesteps(self, uniform: torch.Tensor) -> torch.Tensor:
        if self.continuous:
            return uniform * self.num_timesteps - 1
        return (uniform * self.num_timesteps).long()

    def target(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
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
            return super().weights(timesteps)
        alpha, sigma = self._alpha_sigma(timesteps)
        snr = (alpha / sigma) ** 2
        if self.prediction_type == "epsilon":
            return (self.snr_gamma / snr).clamp(max=1)
        if self.prediction_type == "sample":
            return snr.clamp(max=self.snr_gamma)
        return snr.clamp(max=self.snr_gamma) / (snr + 1)

    def sampling_scheduler(self) -> DPMSolverMultistepScheduler:
        return DPMSolverMultistepScheduler.from_config(self.scheduler.config)

    def _alpha_sigma(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.continuous:
            t = (timesteps + 1) / self.num_timesteps
            integral = _BETA_MIN * t + (_BETA_MAX - _BETA_MIN) * t**2 / 2  # of beta, from 0 to t
            return torch.exp(-integral / 2), torch.sqrt(-torch.expm1(-integral))
        # Moved once, in the first step.
        self._alphas, self._sigmas = self._alphas.to(timesteps.device), self._sigmas.to(timesteps.device)
        return self._alphas[timesteps], self._sigmas[timesteps]


class FlowProcess(NoiseProcess):
    """
    The straight paths of flow matching, x_t = (1 - t) x + t noise. The model predicts the velocity, noise - x.

    The model receives the timestep 1000 t.

    Args:
        shift: maps a time t to shift * t / (1 + (shift - 1) * t), in training and sampling.
        logit_normal: mean and standard deviation of logit(t) before the shift. None draws uniform times.
    """

    num_timesteps = 1000

    def __init__(self, shift: float = 1.0, logit_normal: tuple[float, float] | None = None):
        self.shift = shift
        self.logit_normal = logit_normal

    def timesteps(self, uniform: torch.Tensor) -> torch.Tensor:
        times = uniform if self.logit_normal is None else _normal_quantiles(uniform, *self.logit_normal).sigmoid()
        return self.num_timesteps * self.shift * times / (1 + (self.shift - 1) * times)

    def target(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        return noise - clean

    def sampling_scheduler(self) -> FlowMatchEulerDiscreteScheduler:
        return FlowMatchEulerDiscreteScheduler(shift=self.shift)

    def _alpha_sigma(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        times = timesteps / self.num_timesteps
        return 1 - times, times


class EDMProcess(NoiseProcess):
    """
    x + sigma * noise with the preconditioning of EDM (arXiv 2206.00364, Table 1).

    The model receives c_in (x + sigma * noise) and the timestep c_noise = log(sigma) / 4. It predicts
    (x - c_skip (x + sigma * noise)) / c_out, for which EDM's loss weight is 1.

    Args:
        sigma_data: standard deviation of the data.
        p_mean, p_std: mean and standard deviation of log(sigma) in training.
    """

    def __init__(self, sigma_data: float = 0.5, p_mean: float = -1.2, p_std: float = 1.2):
        self.sigma_data = sigma_data
        self.p_mean, self.p_std = p_mean, p_std

    def timesteps(self, uniform: torch.Tensor) -> torch.Tensor:
        return _normal_quantiles(uniform, self.p_mean, self.p_std) / 4

    def target(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        # The definition above, with c_skip and c_out inserted.
        c_in, c_in_sigma = self._alpha_sigma_like(clean, timesteps)
        return c_in_sigma / self.sigma_data * clean - c_in * self.sigma_data * noise

    def sampling_scheduler(self) -> EDMDPMSolverMultistepScheduler:
        return EDMDPMSolverMultistepScheduler(sigma_data=self.sigma_data)

    def _alpha_sigma(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sigma = (4 * timesteps).exp()
        c_in = (sigma**2 + self.sigma_data**2).rsqrt()
        return c_in, c_in * sigma


def noise_process(config: NoiseConfig, snr_gamma: float | None = None) -> NoiseProcess:
    """Return the noise process of a config."""
    if config.prediction_type in BETA_PREDICTION_TYPES:
        scheduler = {
            "num_train_timesteps": 1000,
            "beta_schedule": config.ddpm_beta_schedule,
            **BETA_SCHEDULES[config.ddpm_beta_schedule],
            "prediction_type": config.prediction_type,
        }
        return BetaProcess(scheduler, config.continuous_time, snr_gamma)
    if snr_gamma is not None:
        raise UserError(f"snr_gamma {snr_gamma} has no effect with prediction_type {config.prediction_type}")
    if config.prediction_type == FLOW:
        is_uniform = config.weighting_scheme == "none"
        return FlowProcess(config.flow_shift, None if is_uniform else (config.logit_mean, config.logit_std))
    return EDMProcess(config.edm_sigma_data, config.edm_p_mean, config.edm_p_std)


def trained_process(pipe: DiffusionPipeline, snr_gamma: float | None = None) -> NoiseProcess:
    """Return the noise process that a pipeline's model was trained with, as far as its scheduler tells."""
    name, config = type(pipe.scheduler).__name__, pipe.scheduler.config
    prediction_type = config.get("prediction_type", "epsilon")
    if isinstance(pipe.scheduler, FLOW_SCHEDULERS):
        options = NoiseConfig(FLOW, flow_shift=config.shift)
    elif isinstance(pipe.scheduler, EDM_SCHEDULERS) and prediction_type == "epsilon":
        options = NoiseConfig(EDM, edm_sigma_data=config.sigma_data)
    elif "beta_schedule" in config and prediction_type in BETA_PREDICTION_TYPES:
        betas = {entry: config[entry] for entry in _SCHEDULE if entry in config}
        return BetaProcess(betas, snr_gamma=snr_gamma)
    else:
        raise UserError(
            f"cannot train with {name}, which needs betas and a prediction_type of "
            f"{', '.join(BETA_PREDICTION_TYPES)}, got {prediction_type!r}; set another pipe.scheduler"
        )
    return noise_process(options, snr_gamma)


def _normal_quantiles(uniform: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    return mean + std * torch.special.ndtri(uniform.clamp(_TAIL, 1 - _TAIL))


def _like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return one value per sample in the shape, dtype and on the device of a tensor."""
    return values.view(-1, *[1] * (tensor.dim() - 1)).to(tensor)
