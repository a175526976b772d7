"""Check which models, autoencoders and schedulers fit together in a pipeline."""

import inspect

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
    if _has_cross_attention(model):
        conditions["encoder_hidden_states"] = f"cross_attention_dim={config.cross_attention_dim}"
    return conditions


def _has_cross_attention(model: nn.Module) -> bool:
    if not isinstance(model, UNet2DConditionModel):
        return model.config.get("cross_attention_dim") is not None
    # Its config always has a cross_attention_dim, even if no block attends to text.
    blocks = [*model.config.down_block_types, *model.config.up_block_types, model.config.mid_block_type]
    return any("CrossAttn" in str(block) for block in blocks)


def accepts_text(model: nn.Module) -> bool:
    """Return whether the forward has the argument `encoder_hidden_states`, even if the model ignores it."""
    return not isinstance(model, UNet2DModel)


def uses_predicted_variance(scheduler: SchedulerMixin) -> bool:
    """Return whether the scheduler samples with a predicted variance. All others take only the predicted mean."""
    return isinstance(scheduler, DDPMScheduler | DDPMParallelScheduler) and _has_learned_variance(scheduler)


def _has_learned_variance(scheduler: SchedulerMixin) -> bool:
    # A config made from another scheduler's config has entries that this scheduler does not read.
    if "variance_type" not in inspect.signature(type(scheduler).__init__).parameters:
        return False
    return scheduler.config.get("variance_type") in ("learned", "learned_range")


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


def check_size(name: str, value: int, multiple: int):
    """Check that a count or size is a positive multiple of `multiple`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} must be an integer of at least 1, got {value!r}")
    if value % multiple:
        below = value // multiple * multiple
        nearest = f"{below} or {below + multiple}" if below else str(multiple)
        raise UserError(
            f"{name}={value} does not fit this model, whose images are multiples of {multiple} pixels; the nearest: "
            f"{nearest}"
        )


def check_channels(model: nn.Module, vae: Autoencoder | None):
    """Check that the channels of the model's input, its output and the vae's latents agree."""
    name, channels, out_channels = type(model).__name__, model.config.in_channels, model.config.out_channels
    # The default of a U-ViT's out_channels is None: as many as in_channels.
    if out_channels not in (None, channels, 2 * channels):
        raise UserError(
            f"this {name} has in_channels={channels} and out_channels={out_channels}; accepted: {channels}, or "
            f"{2 * channels} with a variance"
        )
    if vae is not None and vae.config.latent_channels != channels:
        raise UserError(
            f"the vae's latents have {vae.config.latent_channels} channels, but this {name} takes {channels}"
        )


def check_scheduler(scheduler: SchedulerMixin, model: nn.Module):
    """Check that the scheduler can sample from the output of this model."""
    name = type(scheduler).__name__
    needed = ("set_timesteps", "scale_model_input", "step", "init_noise_sigma")
    if missing := [attribute for attribute in needed if not hasattr(scheduler, attribute)]:
        raise UserError(f"{name} does not fit: it has no {', '.join(missing)}; use DDIMScheduler, for example")
    parameters = inspect.signature(scheduler.step).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    if extra := [p for p in required if p not in ("model_output", "timestep", "sample")]:
        raise UserError(f"{name} does not fit: each step also needs {', '.join(extra)}")
    if _has_learned_variance(scheduler):
        _check_variance(scheduler, model)


def _check_variance(scheduler: SchedulerMixin, model: nn.Module):
    name = f"{type(scheduler).__name__} has variance_type={scheduler.config.variance_type!r}"
    channels, out_channels = model.config.in_channels, model.config.out_channels
    if uses_predicted_variance(scheduler) and out_channels != 2 * channels:
        raise UserError(
            f"{name}, but this model predicts no variance (in_channels={channels}, out_channels={out_channels}); set "
            "variance_type='fixed_small' in the scheduler"
        )
    if not uses_predicted_variance(scheduler) and channels > 3:
        raise UserError(
            f"{name}, which drops all but 3 channels, but this model has {channels}; set variance_type=None in the "
            "scheduler"
        )
