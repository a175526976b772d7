"""Check which models, autoencoders and schedulers fit together in a pipeline."""

import inspect
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from diffusers import (
    AsymmetricAutoencoderKL,
    AutoencoderKL,
    AutoencoderTiny,
    DDPMParallelScheduler,
    DDPMScheduler,
    SchedulerMixin,
    UNet2DConditionModel,
    UNet2DModel,
    VQModel,
)
from diffusers.utils.torch_utils import unwrap_module
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.models.unets import ScaleLongUNet2DConditionModel, ScaleLongUNet2DModel
from scalelong_diffusers.models.uvit import UViTModel
from scalelong_diffusers.noise import FLOW_SCHEDULERS


# `from_pipe` reuses a component only if its exact class is in the signature of the new pipeline, so all are listed.
Denoiser = UNet2DModel | UNet2DConditionModel | ScaleLongUNet2DModel | ScaleLongUNet2DConditionModel | UViTModel
Autoencoder = AutoencoderKL | AutoencoderTiny | AsymmetricAutoencoderKL | VQModel


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of `torch.compile` and DDP."""
    # accelerate's function for this visits all submodules, which is too slow for every step.
    model = unwrap_module(model)
    while isinstance(model, DistributedDataParallel):
        model = unwrap_module(model.module)
    return model


def required_conditions(model: nn.Module) -> dict[str, str]:
    """Return the inputs that the model's forward needs besides sample and timestep, with the config entry of each."""
    config = model.config
    needed = {
        "class_labels": "num_class_embeds",
        "class_labels that are not class numbers": "class_embed_type",
        "added_cond_kwargs": "addition_embed_type",
        "timestep_cond": "time_cond_proj_dim",
    }
    conditions = {name: f"{key}={config[key]!r}" for name, key in needed.items() if config.get(key) is not None}
    if config.get("encoder_hid_dim_type") not in (None, "text_proj"):
        conditions["image_embeds"] = f"encoder_hid_dim_type={config.encoder_hid_dim_type!r}"
    has_cross_attention = config.get("cross_attention_dim") is not None
    if isinstance(model, UNet2DConditionModel):  # its config has a cross_attention_dim even without such blocks
        blocks = [*config.down_block_types, *config.up_block_types, config.mid_block_type]
        has_cross_attention = any("CrossAttn" in str(block) for block in blocks)
    if has_cross_attention:
        conditions["encoder_hidden_states"] = f"cross_attention_dim={config.cross_attention_dim}"
    return conditions


def uses_predicted_variance(scheduler: SchedulerMixin) -> bool:
    """Return whether the scheduler samples with a predicted variance. All others take only the predicted mean."""
    return isinstance(scheduler, DDPMScheduler | DDPMParallelScheduler) and _has_learned_variance(scheduler)


def _has_learned_variance(scheduler: SchedulerMixin) -> bool:
    # A config that was copied from another scheduler can have entries that this scheduler does not read.
    if "variance_type" not in inspect.signature(type(scheduler).__init__).parameters:
        return False
    return scheduler.config.get("variance_type") in ("learned", "learned_range")


def square_size(model: nn.Module) -> int | None:
    """Return the height and width of the model's samples, or None if its config names no square."""
    size = model.config.sample_size
    size = size[0] if isinstance(size, tuple | list) and len(set(size)) == 1 else size
    return size if isinstance(size, int) else None


def size_multiple(model: nn.Module) -> int:
    """Return the number that the height and width of the model's samples must be multiples of."""
    if isinstance(model, UViTModel):
        return model.config.patch_size
    if isinstance(model, UNet2DConditionModel):
        return 1  # it interpolates if the sizes of the two paths differ
    return 2 ** (len(model.config.block_out_channels) - 1)


def vae_factor(vae: Autoencoder | None) -> int:
    """Return how many times larger an image is than its latents, along one side."""
    return 1 if vae is None else 2 ** (len(vae.config.block_out_channels) - 1)


def bytes_per_pixel(model: nn.Module, factor: int) -> float:
    """Return the bytes that sampling takes for each pixel, at least: for the image or the first hidden state."""
    is_uvit = isinstance(model, UViTModel)
    width = model.config.hidden_size / model.config.patch_size**2 if is_uvit else model.config.block_out_channels[0]
    return max(width / factor**2, 3) * model.dtype.itemsize


def check_size(name: str, value: int, multiple: int = 1):
    """Check that a count or size is a positive multiple of `multiple`."""
    if value < 1 or value % multiple:
        below = value // multiple * multiple
        nearest = f"{below} or {below + multiple}" if below > 0 else multiple
        accepted = "at least 1" if multiple == 1 else f"a multiple of {multiple} (the nearest: {nearest})"
        raise UserError(f"{name} must be {accepted}, got {value}")


def set_timesteps(scheduler: SchedulerMixin, num_inference_steps: int):
    """Set the number of steps of a scheduler, or raise a `UserError` if it cannot take so many."""
    check_size("num_inference_steps", num_inference_steps)
    name, limit = type(scheduler).__name__, scheduler.config.get("num_train_timesteps", math.inf)
    steps = min(num_inference_steps, limit)
    try:
        scheduler.set_timesteps(steps, device="cpu")
    except ValueError as error:
        raise UserError(f"{name} cannot take num_inference_steps={num_inference_steps}: {error}") from error
    # DPM-Solver and UniPC round one timestep more than they take to integers, and divide by zero between equal ones.
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is not None and scheduler.order == 1 and not sigmas[:-1].diff().all():
        limit = steps - 1
    if num_inference_steps > limit:
        raise UserError(f"num_inference_steps must be at most {limit} for this {name}, got {num_inference_steps}")


def scale_model_input(scheduler: SchedulerMixin, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Return the model's input for a noisy sample. Schedulers of flow matching take the sample itself."""
    is_flow = isinstance(scheduler, FLOW_SCHEDULERS)
    return sample if is_flow else scheduler.scale_model_input(sample, timestep)


def initial_noise_scale(scheduler: SchedulerMixin) -> float:
    """Return the standard deviation of the noise that sampling starts from."""
    return 1.0 if isinstance(scheduler, FLOW_SCHEDULERS) else scheduler.init_noise_sigma


def check_schedule(scheduler: SchedulerMixin, given: Mapping[str, Sequence[float]]):
    """Check that custom timesteps or sigmas descend, that the model knows them, and that the scheduler takes them."""
    for name, values in given.items():
        if not values or any(later >= earlier for earlier, later in pairwise(values)):
            raise UserError(f"{name} must be numbers in descending order, got {values!r:.200}")
    limit = scheduler.config.get("num_train_timesteps", math.inf)
    if given.get("timesteps", [0])[0] >= limit:
        raise UserError(
            f"timesteps must be below {limit}, the scheduler's num_train_timesteps, got {given['timesteps']!r:.200}"
        )
    if unknown := set(given).difference(inspect.signature(scheduler.set_timesteps).parameters):
        raise UserError(f"{type(scheduler).__name__} takes no {min(unknown)}: use another scheduler")


def check_channels(model: nn.Module, vae: Autoencoder | None):
    """Check that the channels of the model's input, its output and the vae's latents agree."""
    channels, out_channels = model.config.in_channels, model.config.out_channels
    latent_channels = channels if vae is None else vae.config.latent_channels
    # The default of a U-ViT's out_channels is None: as many as in_channels.
    if out_channels not in (None, channels, 2 * channels) or latent_channels != channels:
        raise UserError(
            f"this {type(model).__name__} has in_channels={channels} and out_channels={out_channels}; out_channels "
            f"must be {channels}, or {2 * channels} with a variance, and the vae's latents must have {channels} "
            f"channels, got {latent_channels}"
        )


def check_scheduler(scheduler: SchedulerMixin, model: nn.Module):
    """Check that the model predicts the variance that the scheduler reads, and that no channels are dropped."""
    if not _has_learned_variance(scheduler):
        return
    channels, out_channels = model.config.in_channels, model.config.out_channels
    needs_variance = uses_predicted_variance(scheduler)
    if out_channels != 2 * channels if needs_variance else channels > 3:
        problem = (
            f"but this model predicts no variance ({out_channels=}); set variance_type='fixed_small'"
            if needs_variance
            else f"which drops all but 3 channels, but this model has {channels}; set variance_type=None"
        )
        name = type(scheduler).__name__
        raise UserError(f"{name} has variance_type={scheduler.config.variance_type!r}, {problem} in the scheduler")
