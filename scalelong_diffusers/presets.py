"""
The experiments of the paper and of U-ViT in one table: models, training and sampling.

Values that the papers do not state are missing.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.models.mixin import SkipScalingMixin
from scalelong_diffusers.models.unets import ScaleLongUNet2DConditionModel, ScaleLongUNet2DModel
from scalelong_diffusers.models.uvit import TIMESTEP_CONVENTIONS, UViTModel


Task = Literal["unconditional", "class-conditional", "text-to-image"]


@dataclass(frozen=True)
class Preset:
    """
    One experiment of the papers.

    Args:
        parameters: number of parameters of the model without gates.
        is_latent: whether the model works on latents of Stable Diffusion's autoencoder.
        training: values of training flags.
        noise: description of the noise process.
        scheduler: config of a diffusers scheduler with this noise.
    """

    name: str
    model_class: type[SkipScalingMixin]
    config: dict[str, Any]
    parameters: int
    num_skips: int
    task: Task
    data: str
    is_latent: bool = False
    training: dict[str, Any] = field(default_factory=dict)
    noise: str | None = None
    scheduler: dict[str, Any] | None = None
    text_encoder: str | None = None
    null_class: int | None = None
    sampler: str | None = None
    num_inference_steps: int | None = None
    fid_reference: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"model_class": self.model_class.__name__}


_SIZES = {
    "S": {"hidden_size": 512, "num_layers": 12, "num_attention_heads": 8},
    "S-deep": {"hidden_size": 512, "num_layers": 16, "num_attention_heads": 8},
    "M": {"hidden_size": 768, "num_layers": 16, "num_attention_heads": 12},
    "L": {"hidden_size": 1024, "num_layers": 20, "num_attention_heads": 16},
    "H": {"hidden_size": 1152, "num_layers": 28, "num_attention_heads": 16},
}
_LINEAR_BETAS = {"num_train_timesteps": 1000, "beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}
_STABLE_DIFFUSION_BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
# The noise process, by the timesteps that the network receives.
_NOISE = {
    "continuous": {"noise": "VP-SDE, beta 0.1 to 20, t ~ U(0, 1)", "scheduler": _LINEAR_BETAS},
    "discrete": {
        "noise": "Stable Diffusion's betas, n in 1..1000",
        "scheduler": _LINEAR_BETAS | _STABLE_DIFFUSION_BETAS,
    },
}
_UVIT_TRAINING = {
    "adam_weight_decay": 0.03,
    "adam_epsilon": 1e-8,
    "lr_scheduler": "constant_with_warmup",
    "max_grad_norm": 0.0,  # U-ViT trains without clipping
    "ema_decay": 0.9999,
    "center_crop": True,
}
_AUTOENCODER_FACTOR = 8


def _uvit(
    name: str, size: str, sample_size: int, patch_size: int, timesteps: str, betas: tuple[float, float],
    *, training: dict[str, Any], condition: dict[str, Any] | None = None, is_latent: bool = False, **fields,
) -> Preset:  # fmt: skip
    """Return a row of U-ViT's tables. `condition` adds fields to the model's config."""
    config = {
        "sample_size": sample_size,
        "patch_size": patch_size,
        "in_channels": 4 if is_latent else 3,
        **_SIZES[size],
        **(condition or {}),
        **TIMESTEP_CONVENTIONS[timesteps],
    }
    training = {
        "resolution": sample_size * (_AUTOENCODER_FACTOR if is_latent else 1),
        "ddpm_beta_schedule": _NOISE[timesteps]["scheduler"]["beta_schedule"],
        "continuous_time": timesteps == "continuous",
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        **_UVIT_TRAINING,
        **training,
    }
    fields |= {"num_skips": config["num_layers"] // 2, "is_latent": is_latent, **_NOISE[timesteps]}
    return Preset(name, UViTModel, config, training=training, **fields)


def _imagenet64(name: str, size: str, parameters: int) -> Preset:
    return _uvit(
        name, size, 64, 4, "continuous", (0.99, 0.99), condition={"num_class_embeds": 1000},
        parameters=parameters, task="class-conditional", data="ImageNet, 64 x 64",
        training={
            "learning_rate": 3e-4, "lr_warmup_steps": 5_000, "total_batch_size": 1024, "max_train_steps": 300_000,
            "random_flip": True, "class_dropout": 0.0,
        },
        sampler="DPM-Solver", num_inference_steps=50, fid_reference="ImageNet's training statistics",
    )  # fmt: skip


def _imagenet_latent(
    name: str, size: str, sample_size: int, patch_size: int, parameters: int, steps: int, guidance: float
) -> Preset:
    is_huge = size == "H"
    return _uvit(
        name, size, sample_size, patch_size, "discrete" if is_huge else "continuous", (0.99, 0.99), is_latent=True,
        condition={"num_class_embeds": 1001, **({"final_conv": False} if is_huge else {})},
        parameters=parameters, task="class-conditional",
        data=f"ImageNet, {sample_size * _AUTOENCODER_FACTOR} x {sample_size * _AUTOENCODER_FACTOR}",
        training={
            "learning_rate": 2e-4, "lr_warmup_steps": 5_000, "total_batch_size": 1024, "max_train_steps": steps,
            "random_flip": True, "latent_scale": 0.18215, "class_dropout": 0.1 if is_huge else 0.15,
            "guidance_scale": guidance,
        },
        null_class=1000, sampler="DPM-Solver++" if is_huge else "DPM-Solver", num_inference_steps=50,
        fid_reference="ImageNet's training statistics",
    )  # fmt: skip


def _mscoco(name: str, size: str, parameters: int) -> Preset:
    return _uvit(
        name, size, 32, 2, "discrete", (0.9, 0.9), is_latent=True,
        condition={"cross_attention_dim": 768, "context_length": 77},
        parameters=parameters, task="text-to-image",
        data="MS-COCO, 256 x 256, 82,783 images, one of their captions at random",
        training={
            "learning_rate": 2e-4, "lr_warmup_steps": 5_000, "total_batch_size": 256, "max_train_steps": 1_000_000,
            "random_flip": False, "latent_scale": 0.23010, "proportion_empty_prompts": 0.1, "guidance_scale": 2.0,
        },
        text_encoder="CLIP ViT-L/14", sampler="DPM-Solver++", num_inference_steps=50,
        fid_reference="MS-COCO's validation images, 30k samples",
    )  # fmt: skip


_ROWS = [
    _uvit(
        "cifar10-uvit-s-2", "S", 32, 2, "continuous", (0.99, 0.999),
        parameters=44_255_328, task="unconditional", data="CIFAR-10",
        training={
            "learning_rate": 2e-4, "lr_warmup_steps": 2_500, "total_batch_size": 128, "max_train_steps": 500_000,
            "random_flip": True,
        },
        sampler="reverse SDE", num_inference_steps=1000, fid_reference="its training images, 50k",
    ),
    _uvit(
        "celeba64-uvit-s-4", "S", 64, 4, "continuous", (0.99, 0.99),
        parameters=44_292_228, task="unconditional", data="CelebA at 64 x 64",
        training={
            "learning_rate": 2e-4, "lr_warmup_steps": 5_000, "total_batch_size": 128, "max_train_steps": 500_000,
            "crop_size": 128, "random_flip": True,
        },
        sampler="reverse SDE", num_inference_steps=1000, fid_reference="its training images, 50k",
    ),
    _imagenet64("imagenet64-uvit-m-4", "M", parameters=130_940_292),
    _imagenet64("imagenet64-uvit-l-4", "L", parameters=286_827_652),
    _imagenet_latent("imagenet256-uvit-l-2", "L", 32, 2, parameters=286_763_172, steps=300_000, guidance=1.4),
    _imagenet_latent("imagenet256-uvit-h-2", "H", 32, 2, parameters=500_832_016, steps=500_000, guidance=1.4),
    _imagenet_latent("imagenet512-uvit-l-4", "L", 64, 4, parameters=286_861_524, steps=500_000, guidance=1.7),
    _imagenet_latent("imagenet512-uvit-h-4", "H", 64, 4, parameters=500_942_656, steps=500_000, guidance=1.7),
    _mscoco("mscoco-uvit-s-2", "S", parameters=44_692_644),
    _mscoco("mscoco-uvit-s-2-deep", "S-deep", parameters=58_345_636),
    Preset(
        "cifar10-unet", ScaleLongUNet2DModel,
        config={
            "sample_size": 32, "layers_per_block": 2, "block_out_channels": (128, 256, 256, 256),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": None, "dropout": 0.1, "norm_eps": 1e-6, "flip_sin_to_cos": False, "freq_shift": 1,
            "downsample_padding": 0,
        },
        parameters=35_746_307, num_skips=12, task="unconditional", data="CIFAR-10",
        training={
            "resolution": 32, "center_crop": True, "ddpm_beta_schedule": "linear", "learning_rate": 2e-4,
            "adam_weight_decay": 0.0, "adam_epsilon": 1e-8,  # Adam
            "lr_warmup_steps": 5_000, "max_grad_norm": 1.0, "total_batch_size": 128, "max_train_steps": 800_000,
        },
        noise="betas 1e-4 to 0.02, linear", scheduler=_LINEAR_BETAS,
    ),
    # The papers state only the sizes of the next two models. These configs come closest.
    Preset(
        "imagenet64-unet", ScaleLongUNet2DModel,
        config={
            "sample_size": 64, "layers_per_block": 2, "block_out_channels": (160, 320, 480, 640),
            "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
            "attention_head_dim": 32, "resnet_time_scale_shift": "scale_shift", "attn_norm_num_groups": 32,
            "num_class_embeds": 1000, "norm_eps": 1e-5,
        },
        parameters=144_395_363, num_skips=12, task="class-conditional", data="ImageNet, 64 x 64",
        training={
            "resolution": 64, "center_crop": True, "adam_epsilon": 1e-8, "max_grad_norm": 0.0, "class_dropout": 0.0,
        },
    ),
    Preset(
        "mscoco-unet", ScaleLongUNet2DConditionModel,
        config={
            "sample_size": 32, "in_channels": 4, "layers_per_block": 2, "block_out_channels": (128, 256, 384),
            "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 768, "attention_head_dim": 8,
        },
        parameters=52_708_356, num_skips=9, task="text-to-image", data="MS-COCO, 256 x 256", is_latent=True,
        training={"resolution": 256, "center_crop": True, "adam_epsilon": 1e-8, "max_grad_norm": 0.0},
    ),
]  # fmt: skip
PRESETS = {row.name: row for row in _ROWS}


def get_preset(name: str) -> Preset:
    """Return the preset with this name."""
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}; accepted: {', '.join(PRESETS)}")
    return PRESETS[name]


def model_from_preset(name: str, **overrides) -> SkipScalingMixin:
    """
    Return the freshly initialized model of a preset. `overrides` replace entries of its config.

    ```python
    model = model_from_preset("imagenet64-uvit-l-4", skip_scaling="ls")
    ```
    """
    return get_preset(name).model_class.from_preset(name, **overrides)
