"""Prepare a U-Net for fine-tuning: scale its skips without changing its output, and add a LoRA."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.training_utils import cast_training_params
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.internals import adapter_names
from scalelong_diffusers.models.mixin import SkipScalingMixin, resolve_skip_scaling
from scalelong_diffusers.patching import apply_skip_scaling
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.training.stable_diffusion import StableDiffusion


# The attention projections, as in diffusers' own scripts for Stable Diffusion.
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


def prepare_for_fine_tuning(
    pipe: StableDiffusion,
    skip_scaling: SkipScalingConfig | Mapping[str, Any] | str,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
) -> dict[str, nn.Parameter]:
    """
    Scale the long skips of the pipeline's U-Net without changing its output, and return the trainable parameters.

    These are all parameters or, with `lora_rank`, only the LoRA and the gates, in float32. Factors that do
    not start at 1 get strength 0 (see [`config_without_jump`]); increase it to 1 during the first steps with
    `set_skip_scaling_strength`. A U-Net that already has this scaling keeps its gates and strength. Call this before
    EMA weights, optimizer and accelerator see the U-Net.
    """
    unet = pipe.unet
    config = resolve_skip_scaling(unet, config_without_jump(skip_scaling))
    present = unet.skip_scaler.config if isinstance(unet, SkipScalingMixin) else SkipScalingConfig("none")
    is_scaled = present.method != "none"
    names = adapter_names(unet)
    if names:
        raise UserError(
            f"this {type(unet).__name__} has the adapter {', '.join(names)}; merge it into the weights first: "
            "pipe.fuse_lora(), then pipe.unload_lora_weights()"
        )
    if is_scaled and not config.equals_except_strength(present):
        raise UserError(
            f"this {type(unet).__name__} was trained with {present}; use the same, or call remove_skip_scaling before "
            f"fine-tuning with {config}"
        )
    if lora_rank is None and lora_alpha is not None:
        raise UserError(f"lora_alpha={lora_alpha} needs lora_rank")
    if lora_rank is not None:
        from peft import LoraConfig  # optional

        lora_alpha = lora_rank if lora_alpha is None else lora_alpha
        lora = LoraConfig(
            r=lora_rank, lora_alpha=lora_alpha, init_lora_weights="gaussian", target_modules=list(LORA_TARGETS)
        )
    if not is_scaled:
        apply_skip_scaling(pipe, config)
    unet.requires_grad_(lora_rank is None)
    if lora_rank is not None:
        unet.add_adapter(lora)
        unet.skip_scaler.requires_grad_(True)  # PEFT freezes everything except the LoRA
        cast_training_params(unet, torch.float32)
    return {name: parameter for name, parameter in unet.named_parameters() if parameter.requires_grad}


def config_without_jump(skip_scaling: SkipScalingConfig | Mapping[str, Any] | str) -> SkipScalingConfig:
    """Return the config with strength 0 if its factors do not start at 1, so that a trained model's output stays."""
    config = SkipScalingConfig.parse(skip_scaling)
    return config if starts_at_identity(config) else dataclasses.replace(config, strength=0.0)


def starts_at_identity(config: SkipScalingConfig) -> bool:
    """Return whether every factor is 1 before training, at any strength."""
    return config.method in ("none", "learnable") or config.init == "identity"
