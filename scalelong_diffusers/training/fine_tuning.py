"""Prepare a U-Net for fine-tuning: scale its skips without changing its output, and add a LoRA."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.training_utils import cast_training_params
from diffusers.utils import is_peft_available
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.hub.adapters import NO_PEFT
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
    _check_lora(pipe.unet, lora_rank, lora_alpha)
    config = resolve_skip_scaling(pipe.unet, config_without_jump(skip_scaling))
    if not _has_scaling(pipe.unet, config):
        apply_skip_scaling(pipe, config)
    pipe.unet.requires_grad_(lora_rank is None)
    if lora_rank is not None:
        _add_lora(pipe.unet, lora_rank, lora_rank if lora_alpha is None else lora_alpha)
        pipe.unet.skip_scaler.requires_grad_(True)  # PEFT freezes everything except the LoRA
        cast_training_params(pipe.unet, torch.float32)
    return {name: parameter for name, parameter in pipe.unet.named_parameters() if parameter.requires_grad}


def config_without_jump(skip_scaling: SkipScalingConfig | Mapping[str, Any] | str) -> SkipScalingConfig:
    """Return the config with strength 0 if its factors do not start at 1, so that a trained model's output stays."""
    config = SkipScalingConfig.parse(skip_scaling)
    return config if starts_at_identity(config) else dataclasses.replace(config, strength=0.0)


def starts_at_identity(config: SkipScalingConfig) -> bool:
    """Return whether every factor is 1 before training, at any strength."""
    return config.method in ("none", "learnable") or config.init == "identity"


def _has_scaling(unet: nn.Module, config: SkipScalingConfig) -> bool:
    """Return whether the U-Net already has this scaling. Reject another one, because its loss changes the output."""
    if not isinstance(unet, SkipScalingMixin) or unet.skip_scaler.config.method == "none":
        return False
    present = unet.skip_scaler.config
    if not config.equals_except_strength(present):
        raise UserError(
            f"this {type(unet).__name__} was trained with {present}; use the same, or call remove_skip_scaling before "
            f"fine-tuning with {config}"
        )
    return True


def _check_lora(unet: nn.Module, rank: int | None, alpha: float | None):
    if names := adapter_names(unet):
        raise UserError(
            f"this {type(unet).__name__} has the adapter {', '.join(names)}; merge it into the weights first: "
            "pipe.fuse_lora(), then pipe.unload_lora_weights()"
        )
    if rank is None:
        if alpha is not None:
            raise UserError(f"lora_alpha={alpha!r} needs lora_rank")
        return
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise UserError(f"lora_rank must be an integer of at least 1, or None for no LoRA; got {rank!r}")
    if not is_peft_available():
        raise UserError(NO_PEFT)
    if not any(name.endswith(LORA_TARGETS) for name, _ in unet.named_modules()):
        raise UserError(
            f"this {type(unet).__name__} has no attention ({', '.join(LORA_TARGETS)}) that a LoRA could adapt; train "
            "all of it, without lora_rank"
        )


def _add_lora(unet: nn.Module, rank: int, alpha: float):
    from peft import LoraConfig  # optional

    unet.add_adapter(
        LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=list(LORA_TARGETS))
    )
