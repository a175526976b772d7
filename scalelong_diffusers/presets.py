"""
Every experiment of the paper, and of U-ViT that it stands on, as one table: the model and how it was trained.

What the papers do not say, or what an experiment does not have, is None.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from scalelong_diffusers.errors import did_you_mean
from scalelong_diffusers.models.mixin import SkipScalingMixin
from scalelong_diffusers.models.unets import ScaleLongUNet2DConditionModel, ScaleLongUNet2DModel
from scalelong_diffusers.models.uvit import TIMESTEP_CONVENTIONS, UViTModel


@dataclass(frozen=True)
class Preset:
    """
    One experiment.

    Args:
        model_class: the class of the model, and `config` what it is built with.
        parameters: how many the model has without gates; `num_skips` its long skips.
        data: what it was trained on, `crop_size` what was cut out of the middle of its images, and `random_flip`
            whether half of them were mirrored.
        latent_scale: the factor on the latents of Stable Diffusion's autoencoder, where it was trained on these.
        text_encoder: what made the hidden states of the text.
        max_train_steps: optimizer steps, of `train_batch_size` images each.
        loss: what is minimised, and `noise` what is added to the data.
        scheduler: the config of a diffusers scheduler with that noise.
        condition_dropout: how often the class or text was left out, which guidance needs.
        null_class: the class that stands for none.
        guidance_scale: as in diffusers, where 1 is none: U-ViT's s plus 1.
        sampler: how the published FID was sampled, in `num_inference_steps`.
        fid_reference: what that FID was computed against.
    """

    name: str
    model_class: type[SkipScalingMixin]
    config: dict[str, Any]
    parameters: int
    num_skips: int
    data: str
    crop_size: int | None = None
    random_flip: bool | None = None
    latent_scale: float | None = None
    text_encoder: str | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    adam_betas: tuple[float, float] | None = None
    adam_weight_decay: float | None = None
    lr_scheduler: str | None = None
    lr_warmup_steps: int | None = None
    max_grad_norm: float | None = None
    train_batch_size: int | None = None
    max_train_steps: int | None = None
    ema_decay: float | None = None
    loss: str | None = None
    noise: str | None = None
    scheduler: dict[str, Any] | None = None
    condition_dropout: float | None = None
    null_class: int | None = None
    guidance_scale: float | None = None
    sampler: str | None = None
    num_inference_steps: int | None = None
    fid_reference: str | None = None

    @property
    def condition(self) -> Literal["class", "text"] | None:
        """What the model is told of the image."""
        if "cross_attention_dim" in self.config:
            return "text"
        return "class" if "num_class_embeds" in self.config else None

    @property
    def is_latent(self) -> bool:
        """Whether the model makes latents of Stable Diffusion's autoencoder, and not pixels."""
        return self.config.get("in_channels") == 4

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"model_class": self.model_class.__name__}


_SIZES = {
    "S": {"hidden_size": 512, "num_layers": 12, "num_attention_heads": 8},
    "S-deep": {"hidden_size": 512, "num_layers": 16, "num_attention_heads": 8},
    "M": {"hidden_size": 768, "num_layers": 16, "num_attention_heads": 12},
    "L": {"hidden_size": 1024, "num_layers": 20, "num_attention_heads": 16},
    "H": {"hidden_size": 1152, "num_layers": 28, "num_attention_heads": 16},
}
_LOSS = "mean squared error of the predicted noise"
_UVIT = {
    "model_class": UViTModel,
    "optimizer": "AdamW",
    "adam_weight_decay": 0.03,
    "lr_scheduler": "constant_with_warmup",
    "ema_decay": 0.9999,
    "loss": _LOSS,
}
_LINEAR_BETAS = {"num_train_timesteps": 1000, "beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}
_STABLE_DIFFUSION_BETAS = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
}
# What was added to the data, by what the network was shown of its time.
_NOISE = {
    "continuous": {"noise": "VP-SDE, beta 0.1 to 20, t ~ U(0, 1)", "scheduler": _LINEAR_BETAS},
    "discrete": {"noise": "Stable Diffusion's betas, n in 1..1000", "scheduler": _STABLE_DIFFUSION_BETAS},
}


def _uvit(
    name: str, size: str, sample_size: int, patch_size: int, in_channels: int, timesteps: str, **fields
) -> Preset:
    """A row whose config is spelt in the words of U-ViT's tables."""
    config = {
        "sample_size": sample_size,
        "patch_size": patch_size,
        "in_channels": in_channels,
        **_SIZES[size],
        **fields.pop("config", {}),
        **TIMESTEP_CONVENTIONS[timesteps],
    }
    return Preset(name, config=config, num_skips=config["num_layers"] // 2, **_UVIT, **_NOISE[timesteps], **fields)


_IMAGENET64 = {
    "data": "ImageNet, 64 x 64",
    "random_flip": True,
    "config": {"num_class_embeds": 1000},
    "learning_rate": 3e-4,
    "adam_betas": (0.99, 0.99),
    "lr_warmup_steps": 5_000,
    "train_batch_size": 1024,
    "max_train_steps": 300_000,
    "sampler": "DPM-Solver",
    "num_inference_steps": 50,
    "fid_reference": "ImageNet's training statistics",
}
_IMAGENET_LATENT = {
    "random_flip": True,
    "latent_scale": 0.18215,
    "learning_rate": 2e-4,
    "adam_betas": (0.99, 0.99),
    "lr_warmup_steps": 5_000,
    "train_batch_size": 1024,
    "null_class": 1000,
    "num_inference_steps": 50,
    "fid_reference": "ImageNet's training statistics",
}
_IMAGENET_LATENT_L = {
    **_IMAGENET_LATENT,
    "config": {"num_class_embeds": 1001},
    "condition_dropout": 0.15,
    "sampler": "DPM-Solver",
}
_IMAGENET_LATENT_H = {
    **_IMAGENET_LATENT,
    "config": {"num_class_embeds": 1001, "final_conv": False},
    "condition_dropout": 0.1,
    "sampler": "DPM-Solver++",
}
_MSCOCO = {
    "data": "MS-COCO, 256 x 256, 82,783 images, one of their captions at random",
    "random_flip": False,
    "latent_scale": 0.23010,
    "text_encoder": "CLIP ViT-L/14",
    "config": {"cross_attention_dim": 768, "context_length": 77},
    "learning_rate": 2e-4,
    "adam_betas": (0.9, 0.9),
    "lr_warmup_steps": 5_000,
    "train_batch_size": 256,
    "max_train_steps": 1_000_000,
    "condition_dropout": 0.1,
    "guidance_scale": 2.0,
    "sampler": "DPM-Solver++",
    "num_inference_steps": 50,
    "fid_reference": "MS-COCO's validation images, 30k samples",
}

_ROWS = [
    _uvit(
        "cifar10-uvit-s-2", "S", 32, 2, 3, "continuous",
        parameters=44_255_328, data="CIFAR-10", random_flip=True, learning_rate=2e-4, adam_betas=(0.99, 0.999),
        lr_warmup_steps=2_500, train_batch_size=128, max_train_steps=500_000, sampler="reverse SDE",
        num_inference_steps=1000, fid_reference="its training images, 50k",
    ),
    _uvit(
        "celeba64-uvit-s-4", "S", 64, 4, 3, "continuous",
        parameters=44_292_228, data="CelebA at 64 x 64", crop_size=128, random_flip=True,
        learning_rate=2e-4, adam_betas=(0.99, 0.99), lr_warmup_steps=5_000, train_batch_size=128,
        max_train_steps=500_000, sampler="reverse SDE", num_inference_steps=1000,
        fid_reference="its training images, 50k",
    ),
    _uvit("imagenet64-uvit-m-4", "M", 64, 4, 3, "continuous", parameters=130_940_292, **_IMAGENET64),
    _uvit("imagenet64-uvit-l-4", "L", 64, 4, 3, "continuous", parameters=286_827_652, **_IMAGENET64),
    _uvit(
        "imagenet256-uvit-l-2", "L", 32, 2, 4, "continuous",
        parameters=286_763_172, data="ImageNet, 256 x 256", max_train_steps=300_000, guidance_scale=1.4,
        **_IMAGENET_LATENT_L,
    ),
    _uvit(
        "imagenet256-uvit-h-2", "H", 32, 2, 4, "discrete",
        parameters=500_832_016, data="ImageNet, 256 x 256", max_train_steps=500_000, guidance_scale=1.4,
        **_IMAGENET_LATENT_H,
    ),
    _uvit(
        "imagenet512-uvit-l-4", "L", 64, 4, 4, "continuous",
        parameters=286_861_524, data="ImageNet, 512 x 512", max_train_steps=500_000, guidance_scale=1.7,
        **_IMAGENET_LATENT_L,
    ),
    _uvit(
        "imagenet512-uvit-h-4", "H", 64, 4, 4, "discrete",
        parameters=500_942_656, data="ImageNet, 512 x 512", max_train_steps=500_000, guidance_scale=1.7,
        **_IMAGENET_LATENT_H,
    ),
    _uvit("mscoco-uvit-s-2", "S", 32, 2, 4, "discrete", parameters=44_692_644, **_MSCOCO),
    _uvit("mscoco-uvit-s-2-deep", "S-deep", 32, 2, 4, "discrete", parameters=58_345_636, **_MSCOCO),
    Preset(
        "cifar10-unet",
        ScaleLongUNet2DModel,
        config={
            "sample_size": 32,
            "layers_per_block": 2,
            "block_out_channels": (128, 256, 256, 256),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": None,
            "dropout": 0.1,
            "norm_eps": 1e-6,
            "flip_sin_to_cos": False,
            "freq_shift": 1,
            "downsample_padding": 0,
        },
        parameters=35_746_307,
        num_skips=12,
        data="CIFAR-10",
        optimizer="Adam",
        learning_rate=2e-4,
        lr_warmup_steps=5_000,
        max_grad_norm=1.0,
        train_batch_size=128,
        max_train_steps=800_000,
        noise="betas 1e-4 to 0.02, linear",
        scheduler=_LINEAR_BETAS,
    ),
    # The papers give the sizes of the other two alone; these are the configs that come closest.
    Preset(
        "imagenet64-unet",
        ScaleLongUNet2DModel,
        config={
            "sample_size": 64,
            "layers_per_block": 2,
            "block_out_channels": (160, 320, 480, 640),
            "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
            "attention_head_dim": 32,
            "resnet_time_scale_shift": "scale_shift",
            "attn_norm_num_groups": 32,
            "num_class_embeds": 1000,
            "norm_eps": 1e-5,
        },
        parameters=144_395_363,
        num_skips=12,
        data="ImageNet, 64 x 64",
    ),
    Preset(
        "mscoco-unet",
        ScaleLongUNet2DConditionModel,
        config={
            "sample_size": 32,
            "in_channels": 4,
            "layers_per_block": 2,
            "block_out_channels": (128, 256, 384),
            "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 768,
            "attention_head_dim": 8,
        },
        parameters=52_708_356,
        num_skips=9,
        data="MS-COCO, 256 x 256",
    ),
]  # fmt: skip
PRESETS = {row.name: row for row in _ROWS}


def get_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}; accepted: {', '.join(PRESETS)}")
    return PRESETS[name]


def model_from_preset(name: str, **overrides) -> SkipScalingMixin:
    """
    The model that a preset names, freshly initialised; `overrides` go before its config.

    ```python
    model = model_from_preset("imagenet64-uvit-l-4", skip_scaling="ls")
    ```
    """
    return get_preset(name).model_class.from_preset(name, **overrides)
