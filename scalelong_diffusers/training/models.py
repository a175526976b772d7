"""Build the untrained model of a config, and load the autoencoder of a latent model."""

import inspect
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKL, ModelMixin

from scalelong_diffusers.data import TrainingData
from scalelong_diffusers.download import build_skeleton, load_model, read_json
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.memory import check_memory
from scalelong_diffusers.models.mixin import scaled_class_of
from scalelong_diffusers.models.skip_init import REFERENCE, start_layers
from scalelong_diffusers.models.unets import ScaleLongUNet2DConditionModel, ScaleLongUNet2DModel
from scalelong_diffusers.models.uvit import UViTModel
from scalelong_diffusers.patching import apply_skip_scaling
from scalelong_diffusers.pipelines.compatibility import (
    check_channels,
    check_size,
    required_conditions,
    size_multiple,
    square_size,
    vae_factor,
)
from scalelong_diffusers.presets import get_preset
from scalelong_diffusers.randomness import seed_for
from scalelong_diffusers.training.config import ModelConfig, TrainingConfig


# The built-in models have about ten million parameters, and the tiny one half a million.
_SMALL_UVIT = {"hidden_size": 256, "num_layers": 12, "num_attention_heads": 4, "block_scale": "rezero"}
_TINY_UVIT = {"hidden_size": 64, "num_layers": 12, "num_attention_heads": 4, "mlp_ratio": 2.0, "block_scale": "rezero"}
_SMALL_UNET = {
    "block_out_channels": (64, 128, 128),
    "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    "attention_head_dim": 32,
}
_SMALL_TEXT_UNET = {
    "block_out_channels": (64, 128, 128),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 4,  # the number of heads, despite its name in diffusers
}
_MAX_PATCHES_PER_SIDE, _MAX_TINY_PATCHES_PER_SIDE = 16, 8
# Flags that override the config of a U-ViT.
_UVIT_FLAGS = ("hidden_size", "mup_base_width", "mup_base_depth")
_DEFAULT_START = {"skip_init": REFERENCE, "zero_init_residual": False}


def load_vae(source: str, device: torch.device) -> AutoencoderKL:
    """Load a frozen autoencoder."""
    config = read_json(source, "config.json")
    if config is None or config.get("_class_name") != AutoencoderKL.__name__:
        raise UserError(
            f"--pretrained_vae_model_name_or_path {source} is not an AutoencoderKL; pass the vae folder of one"
        )
    return load_model(AutoencoderKL, source, f"the vae {source}").requires_grad_(False).eval().to(device)


def build_model(
    config: TrainingConfig,
    data: TrainingData,
    vae: AutoencoderKL | None,
    num_class_embeds: int | None,
    text: Mapping[str, Any] | None,
) -> ModelMixin:
    """Build the model of a config. Its initial weights depend only on the seed. See `TrainingRun.build_model`."""
    options, resolution = config.model, config.data.resolution
    factor = vae_factor(vae)
    check_size("--resolution", resolution, factor)
    channels = data.channels if vae is None else vae.config.latent_channels
    shape = {"sample_size": resolution // factor, "in_channels": channels, "out_channels": channels}
    classes = {} if num_class_embeds is None else {"num_class_embeds": num_class_embeds}
    torch.manual_seed(seed_for(config.optimization.seed, "model"))
    stored: dict[str, Any] = {}
    if options.model_config_name_or_path is not None:
        model, stored = _from_config(options)
        _check_condition(options.model_config_name_or_path, model, num_class_embeds, has_text=text is not None)
    elif options.preset is not None:
        preset = get_preset(options.preset)
        architecture = {**preset.config, **shape, **classes}
        model = _build(preset.model_class, architecture, options, f"preset {preset.name}")
    else:
        model = _small_model(options, resolution, {**shape, **classes, **(text or {})})
    _check_fit(model, resolution, factor, channels, vae)
    _check_image_size(data, model, factor)
    apply_skip_scaling(model, config.skip_scaling)
    own = {name: stored.get(name, default) for name, default in _DEFAULT_START.items()}
    given = config.skip_start
    start_layers(model, **{name: value if given[name] is None else given[name] for name, value in own.items()})
    return model


def _build(model_class: type[ModelMixin], config: Mapping[str, Any], options: ModelConfig, source: str) -> ModelMixin:
    """
    Build the model of a config and of the flags that override it, if its weights fit into the memory.

    `source` names the config in errors.
    """
    config = {**config, **_uvit_flags(model_class, config, options)}
    skeleton = build_skeleton(model_class, config, source)
    check_memory(f"the weights of {source}", sum(weight.nbytes for weight in skeleton.parameters()))
    return model_class.from_config(config)


def _uvit_flags(model_class: type[ModelMixin], config: Mapping[str, Any], options: ModelConfig) -> dict[str, int]:
    """Return the entries of a U-ViT's config that flags set."""
    flags = {name: getattr(options, name) for name in _UVIT_FLAGS if getattr(options, name) is not None}
    if flags and not issubclass(model_class, UViTModel):
        name, value = next(iter(flags.items()))
        raise UserError(f"--{name} {value} is for a U-ViT, and the model is a {model_class.__name__}: leave it out")
    if "hidden_size" in flags:
        defaults = {name: p.default for name, p in inspect.signature(UViTModel.__init__).parameters.items()}
        own = {**defaults, **config}
        head_width = own["hidden_size"] // own["num_attention_heads"]
        flags["num_attention_heads"], rest = divmod(flags["hidden_size"], head_width)
        if rest:
            raise UserError(
                f"--hidden_size must be a multiple of {head_width}, the width of a head, got {flags['hidden_size']}"
            )
    return flags


def _small_model(options: ModelConfig, resolution: int, config: dict[str, Any]) -> ModelMixin:
    if options.model_type == "unet" and "cross_attention_dim" in config:
        config.pop("context_length")  # it takes texts of any length
        return _build(ScaleLongUNet2DConditionModel, {**_SMALL_TEXT_UNET, **config}, options, "the built-in U-Net")
    if options.model_type == "unet":
        return _build(ScaleLongUNet2DModel, {**_SMALL_UNET, **config}, options, "the built-in U-Net")
    size = config["sample_size"]
    is_tiny = options.model_type == "tiny"
    patch_size = partial(_patch_size, max_patches=_MAX_TINY_PATCHES_PER_SIDE if is_tiny else _MAX_PATCHES_PER_SIDE)
    patch = patch_size(size)
    if patch is None:
        nearest = min(filter(patch_size, range(4, size + 17)), key=lambda n: abs(n - size))
        raise UserError(
            f"--resolution {resolution} is not divisible into patches for the small U-ViT; the nearest resolution "
            f"that is divisible: {nearest * (resolution // size)}"
        )
    small = _TINY_UVIT if is_tiny else _SMALL_UVIT
    return _build(UViTModel, {"patch_size": patch, **small, **config}, options, "the built-in U-ViT")


def _patch_size(size: int, max_patches: int) -> int | None:
    """Return the smallest patch size with 4 to `max_patches` patches per side; 1 only for the smallest images."""
    sizes = [p for p in range(2, size // 4 + 1) if size % p == 0 and size // p <= max_patches]
    return sizes[0] if sizes else (1 if 4 <= size < 8 else None)


def _from_config(options: ModelConfig) -> tuple[ModelMixin, dict[str, Any]]:
    """
    Build an untrained model from a config, and return both. Weights in the same folder are not loaded.

    The model has no skip scaling and its random init.
    """
    source = options.model_config_name_or_path
    if source.endswith(".json"):
        folder, name = os.path.split(source)
        config = read_json(folder or ".", name) if os.path.isfile(source) else None
    else:
        config = read_json(source, "config.json") or read_json(source, "unet/config.json")
    if config is None or "_class_name" not in config:
        raise UserError(
            f"{source} has no config.json of a model; accepted: a model's folder, its config.json or a Hub id"
        )
    model_class = scaled_class_of(config, source)
    applied_later = {"skip_scaling": "none", **_DEFAULT_START}
    plain = {name: applied_later.get(name, value) for name, value in config.items()}
    return _build(model_class, plain, options, source), config


def _check_condition(source: str, model: ModelMixin, num_class_embeds: int | None, has_text: bool):
    """Raise a `UserError` for the config of another task, or with another number of classes."""
    needed = set(required_conditions(model))
    given = {"class_labels"} if num_class_embeds is not None else set()
    given |= {"encoder_hidden_states"} if has_text else set()
    if needed != given:
        advice = f"; set its num_class_embeds to {num_class_embeds}" if "class_labels" in given - needed else ""
        raise UserError(
            f"{source} is a model that takes {' and '.join(sorted(needed)) or 'no condition'}, but this script "
            f"passes {' and '.join(sorted(given)) or 'none'}{advice}"
        )
    if num_class_embeds is not None and model.config.num_class_embeds != num_class_embeds:
        raise UserError(
            f"{source} has num_class_embeds={model.config.num_class_embeds}, but the data needs {num_class_embeds}"
        )


def _check_fit(model: ModelMixin, resolution: int, factor: int, channels: int, vae: AutoencoderKL | None):
    """Raise a `UserError` if the model does not fit the images or latents."""
    if model.config.in_channels != channels:
        what = "the images have" if vae is None else "the autoencoder's latents have"
        advice = "; a latent model needs --pretrained_vae_model_name_or_path" if vae is None and channels < 4 else ""
        raise UserError(f"the model takes {model.config.in_channels} channels, but {what} {channels}{advice}")
    if model.config.out_channels not in (None, channels):
        raise UserError(
            f"the model has out_channels={model.config.out_channels}, but must have {channels}: learned variances are "
            "not supported in training"
        )
    check_channels(model, vae)
    check_size("--resolution", resolution, size_multiple(model) * factor)
    if isinstance(model, UViTModel) and square_size(model) != resolution // factor:
        raise UserError(
            f"the model has sample_size={model.config.sample_size}, but --resolution {resolution} needs "
            f"{resolution // factor}"
        )


def _check_image_size(data: TrainingData, model: ModelMixin, factor: int):
    smallest = size_multiple(model) * factor
    if min(data.first_image_size) < smallest:
        width, height = data.first_image_size
        raise UserError(
            f"the first image has {width} x {height} pixels, fewer than the {smallest} x {smallest} that the model "
            "takes as one patch: train on larger images"
        )
