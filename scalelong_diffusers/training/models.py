"""The model that the flags ask for, fresh and not yet trained."""

import argparse
from typing import Any

import torch
from diffusers import AutoencoderKL, ConfigMixin, ModelMixin

from scalelong_diffusers.arguments import skip_scaling_fields
from scalelong_diffusers.data import TrainingData
from scalelong_diffusers.download import read_json
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.models.unets import ScaleLongUNet2DConditionModel, ScaleLongUNet2DModel
from scalelong_diffusers.models.uvit import UViTModel
from scalelong_diffusers.patching import apply_skip_scaling
from scalelong_diffusers.pipelines.compatibility import (
    check_channels,
    check_size,
    required_conditions,
    size_multiple,
    vae_factor,
)
from scalelong_diffusers.presets import get_preset
from scalelong_diffusers.randomness import seed_for
from scalelong_diffusers.training.latents import check_autoencoder


# Where a model is named by nothing else. They are small: some ten million parameters.
_SMALL_UVIT = {"hidden_size": 256, "num_layers": 12, "num_attention_heads": 4}
_SMALL_UNET = {
    "block_out_channels": (64, 128, 128),
    "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    "attention_head_dim": 32,
}
_SMALL_UNET_OF_TEXT = {
    "block_out_channels": (64, 128, 128),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    # By the name of diffusers the width of a head, and in fact how many there are.
    "attention_head_dim": 4,
}
_LARGEST_GRID = 16


def load_vae(source: str | None, device: torch.device) -> AutoencoderKL | None:
    """The autoencoder whose latents the model makes, frozen."""
    if source is None:
        return None
    config = read_json(source, "config.json")
    if config is None or config.get("_class_name") != AutoencoderKL.__name__:
        raise UserError(
            f"--pretrained_vae_model_name_or_path {source} is no AutoencoderKL; give the vae folder of one"
        )
    return AutoencoderKL.from_pretrained(source).requires_grad_(False).eval().to(device)


def build_model(
    args: argparse.Namespace,
    data: TrainingData,
    vae: AutoencoderKL | None = None,
    num_class_embeds: int | None = None,
    text: dict[str, Any] | None = None,
) -> ModelMixin:
    """
    The model of `--preset`, `--model_config_name_or_path` or `--model_type`, with its skips scaled. Its weights depend
    on the seed.

    `num_class_embeds` is what the data asks of any model. `text`, the `cross_attention_dim` and `context_length` of an
    encoder, is what the small model is built for; a preset and a config have their own, which `CaptionEncoder` checks.
    """
    check_autoencoder(data, vae, args.pretrained_vae_model_name_or_path)
    factor = vae_factor(vae)
    check_size("--resolution", args.resolution, factor)
    channels = data.channels if vae is None else vae.config.latent_channels
    size = args.resolution // factor
    classes = {} if num_class_embeds is None else {"num_class_embeds": num_class_embeds}
    torch.manual_seed(seed_for(args.seed, "model"))
    if args.model_config_name_or_path is not None:
        model = _from_config(args.model_config_name_or_path)
        _check_condition(args.model_config_name_or_path, model, num_class_embeds, has_text=text is not None)
    elif args.preset is not None:
        preset = get_preset(args.preset)
        shape = {"sample_size": size, "in_channels": channels, "out_channels": channels}
        model = preset.model_class.from_config({**preset.config, **shape, **classes})
    else:
        model = _small_model(args, size, channels, {**classes, **(text or {})})
    _check_fit(args, model, size, factor, channels, vae)
    _check_images(data, model, factor)
    return apply_skip_scaling(model, skip_scaling_fields(args))


def _small_model(args: argparse.Namespace, size: int, channels: int, condition: dict[str, Any]) -> ModelMixin:
    shape = {"sample_size": size, "in_channels": channels, "out_channels": channels, **condition}
    if args.model_type == "unet" and "cross_attention_dim" in condition:
        shape.pop("context_length")  # it takes a text of any length
        return ScaleLongUNet2DConditionModel(**_SMALL_UNET_OF_TEXT, **shape)
    if args.model_type == "unet":
        return ScaleLongUNet2DModel(**_SMALL_UNET, **shape)
    patch = _patch_size(size)
    if patch is None:
        nearest = min(filter(_patch_size, range(4, size + 9)), key=lambda n: abs(n - size))
        raise ValueError(
            f"--resolution {args.resolution} can not be cut into patches for the small U-ViT; the nearest that can is "
            f"{nearest * (args.resolution // size)}"
        )
    return UViTModel(patch_size=patch, **_SMALL_UVIT, **shape)


def _patch_size(size: int) -> int | None:
    """Of 4 to 16 patches along a side, the most; patches of single pixels only where there would be fewer than 4."""
    sizes = [p for p in range(2, size // 4 + 1) if size % p == 0 and size // p <= _LARGEST_GRID]
    return sizes[0] if sizes else (1 if 4 <= size < 8 else None)


def _from_config(source: str) -> ModelMixin:
    """A fresh model of the architecture that a config names; its weights, where there are any, are not loaded."""
    import diffusers

    import scalelong_diffusers

    if source.endswith(".json"):
        config = ConfigMixin._dict_from_json_file(source)
    else:
        config = read_json(source, "config.json") or read_json(source, "unet/config.json")
    if config is None or "_class_name" not in config:
        raise ValueError(
            f"{source} has no config.json of a model; it may be a model's folder, its config.json or an id"
        )
    name = config["_class_name"]
    model_class = getattr(scalelong_diffusers, name, None) or getattr(diffusers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, ModelMixin)):
        raise ValueError(f"{source} is the config of {name}, which is no model of diffusers or of this package")
    return model_class.from_config({key: value for key, value in config.items() if key != "skip_scaling"})


def _check_condition(source: str, model: ModelMixin, num_class_embeds: int | None, has_text: bool):
    """Refuse a config of another task, and one with another number of classes."""
    needed = set(required_conditions(model))
    wanted = {"class_labels"} if num_class_embeds is not None else set()
    wanted |= {"encoder_hidden_states"} if has_text else set()
    if needed != wanted:
        advice = f"; set its num_class_embeds to {num_class_embeds}" if "class_labels" in wanted - needed else ""
        raise ValueError(
            f"{source} is a model that needs {' and '.join(sorted(needed)) or 'no condition'}, and this script gives "
            f"{' and '.join(sorted(wanted)) or 'none'}{advice}"
        )
    if num_class_embeds is not None and model.config.num_class_embeds != num_class_embeds:
        raise ValueError(
            f"{source} has num_class_embeds={model.config.num_class_embeds}, and the data asks for {num_class_embeds}"
        )


def _check_fit(args: argparse.Namespace, model: ModelMixin, size: int, factor: int, channels: int, vae):
    if model.config.in_channels != channels:
        what = "the images have" if vae is None else "the autoencoder's latents have"
        advice = (
            "; a model of latents needs --pretrained_vae_model_name_or_path" if vae is None and channels < 4 else ""
        )
        raise ValueError(f"the model takes {model.config.in_channels} channels, and {what} {channels}{advice}")
    if model.config.out_channels not in (None, channels):
        raise ValueError(
            f"the model has out_channels={model.config.out_channels}; to train it must have {channels}: a variance is "
            "not learned here"
        )
    check_channels(model, vae)
    check_size("--resolution", args.resolution, size_multiple(model) * factor)
    sample_size = model.config.sample_size
    if isinstance(model, UViTModel) and sample_size != size:
        raise ValueError(f"the model is made for images of {sample_size} pixels, and --resolution gives {size}")


def _check_images(data: TrainingData, model: ModelMixin, factor: int):
    smallest = size_multiple(model) * factor
    if min(data.first_image_size) < smallest:
        width, height = data.first_image_size
        raise ValueError(
            f"the first image is {width} x {height} pixels, smaller than the {smallest} x {smallest} that the model "
            "takes for one patch: train on larger images"
        )
