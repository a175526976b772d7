"""What fits together in a pipeline: the conditions and sizes that a model takes, and the schedulers that sample it."""

import inspect

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
from diffusers.utils.torch_utils import is_compiled_module
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scalelong_diffusers.models.unets import ScaleLongUNet2DConditionModel, ScaleLongUNet2DModel
from scalelong_diffusers.models.uvit import UViTModel


# `from_pipe` takes over a component whose exact class stands in the signature of the new pipeline, so all stand here.
Denoiser = UNet2DModel | UNet2DConditionModel | ScaleLongUNet2DModel | ScaleLongUNet2DConditionModel | UViTModel
Autoencoder = AutoencoderKL | AutoencoderTiny | AsymmetricAutoencoderKL | VQModel


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside what `torch.compile` or DDP have wrapped around it."""
    # accelerate's function for this looks through all modules, which is too much for every step.
    while True:
        if is_compiled_module(model):
            model = model._orig_mod
        elif isinstance(model, DistributedDataParallel):
            model = model.module
        else:
            return model


def required_conditions(model: nn.Module) -> dict[str, str]:
    """What the model's forward needs beside sample and timestep, each with what in the config says so."""
    config = model.config
    needed = {
        "class_labels": "num_class_embeds",
        "class_labels that are no numbers of classes": "class_embed_type",
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
    # Its config always names a width of the text, also where no block attends to it.
    blocks = [*model.config.down_block_types, *model.config.up_block_types, model.config.mid_block_type]
    return any("CrossAttn" in str(block) for block in blocks)


def accepts_text(model: nn.Module) -> bool:
    """Whether the forward has the argument `encoder_hidden_states`, needed or not."""
    return not isinstance(model, UNet2DModel)


def predicts_variance(model: nn.Module) -> bool:
    """Whether the output is the mean and the variance, as in improved DDPM."""
    return model.config.out_channels == 2 * model.config.in_channels


def uses_predicted_variance(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler samples with the variance that a model predicts; all others are given the mean alone."""
    return isinstance(scheduler, DDPMScheduler | DDPMParallelScheduler) and _has_learned_variance(scheduler)


def _has_learned_variance(scheduler: SchedulerMixin) -> bool:
    # A config that was made from another scheduler's has entries that this one does not read.
    if "variance_type" not in inspect.signature(type(scheduler).__init__).parameters:
        return False
    return scheduler.config.get("variance_type") in ("learned", "learned_range")


def size_multiple(model: nn.Module) -> int:
    """Height and width of the model's samples are multiples of this."""
    if isinstance(model, UViTModel):
        return model.config.patch_size
    if isinstance(model, UNet2DConditionModel):
        return 1  # it interpolates where halving and doubling do not meet
    return 2 ** (len(model.config.block_out_channels) - 1)


def vae_factor(vae: Autoencoder | None) -> int:
    """How many pixels there are to an entry of a latent, along one side."""
    return 1 if vae is None else 2 ** (len(vae.config.block_out_channels) - 1)


def check_size(name: str, value: int, multiple: int):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if value % multiple:
        below = value // multiple * multiple
        nearest = f"{below} or {below + multiple}" if below else str(multiple)
        raise ValueError(
            f"{name}={value} does not fit this model, whose images are multiples of {multiple} pixels; the nearest: "
            f"{nearest}"
        )


def check_channels(model: nn.Module, vae: Autoencoder | None):
    """Refuse a model whose output is not of its sample's kind, and a vae of other latents."""
    name, channels, out_channels = type(model).__name__, model.config.in_channels, model.config.out_channels
    # A U-ViT without out_channels returns as many as it takes.
    if out_channels not in (None, channels, 2 * channels):
        raise ValueError(
            f"this {name} has in_channels={channels} and out_channels={out_channels}; accepted: {channels}, or "
            f"{2 * channels} with a variance"
        )
    if vae is not None and vae.config.latent_channels != channels:
        raise ValueError(
            f"the vae's latents have {vae.config.latent_channels} channels, but this {name} takes {channels}"
        )


def check_tensor(name: str, value: torch.Tensor):
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got a {type(value).__name__}")


def check_scheduler(scheduler: SchedulerMixin, model: nn.Module):
    """Refuse a scheduler that asks for more than a model's output, or that is no scheduler of diffusers."""
    name = type(scheduler).__name__
    if not isinstance(scheduler, SchedulerMixin):
        raise TypeError(f"scheduler must be a scheduler of diffusers, got {scheduler!r}")
    needed = ("set_timesteps", "scale_model_input", "step", "init_noise_sigma")
    if missing := [attribute for attribute in needed if not hasattr(scheduler, attribute)]:
        raise ValueError(f"{name} does not fit: it has no {', '.join(missing)}; DDIMScheduler, for one, fits")
    parameters = inspect.signature(scheduler.step).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    if extra := [p for p in required if p not in ("model_output", "timestep", "sample")]:
        raise ValueError(f"{name} does not fit: each step of it also needs {', '.join(extra)}")
    if _has_learned_variance(scheduler):
        _check_variance(scheduler, model)


def _check_variance(scheduler: SchedulerMixin, model: nn.Module):
    what = f"{type(scheduler).__name__} has variance_type={scheduler.config.variance_type!r}"
    channels = model.config.in_channels
    if uses_predicted_variance(scheduler) and not predicts_variance(model):
        raise ValueError(
            f"{what}, but this model predicts no variance (in_channels={channels}, "
            f"out_channels={model.config.out_channels}); give the scheduler variance_type='fixed_small'"
        )
    if not uses_predicted_variance(scheduler) and channels > 3:
        raise ValueError(
            f"{what}, with which it drops all but 3 channels, and this model has {channels}; give the scheduler "
            "variance_type=None"
        )
