"""What a U-Net needs before it is fine-tuned: skips that are scaled without a jump, and what is to be trained."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.training_utils import cast_training_params
from diffusers.utils import is_peft_available
from torch import nn

from scalelong_diffusers.hub.adapters import NO_PEFT, adapter_names
from scalelong_diffusers.models.mixin import SkipScalingMixin, resolve_skip_scaling
from scalelong_diffusers.patching import apply_skip_scaling
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.training.stable_diffusion import StableDiffusion


# The attention's projections, as in diffusers' own scripts for Stable Diffusion.
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


def prepare_for_fine_tuning(
    pipe: StableDiffusion,
    skip_scaling: SkipScalingConfig | Mapping[str, Any] | str,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
) -> dict[str, nn.Parameter]:
    """
    Scale the long skips of the pipeline's U-Net so that its output is still what it was, and return the parameters to
    be trained, by name: all of them or, with `lora_rank`, those of LoRA and of the gates alone, in float32.

    Factors that do not start at 1 have the strength 0 now (see [`config_without_jump`]); raise it to 1 in the first
    steps with `set_skip_scaling_strength`. A U-Net that has this scaling already is left as it is, gates and strength.
    Done before EMA, optimizer and accelerator see the U-Net.
    """
    _check_lora(pipe.unet, lora_rank, lora_alpha)
    config = resolve_skip_scaling(pipe.unet, config_without_jump(skip_scaling))
    if not _is_scaled_as(pipe.unet, config):
        apply_skip_scaling(pipe, config)
    pipe.unet.requires_grad_(lora_rank is None)
    if lora_rank is not None:
        _add_lora(pipe.unet, lora_rank, lora_rank if lora_alpha is None else lora_alpha)
        # PEFT freezes all that is not its own.
        pipe.unet.skip_scaler.requires_grad_(True)
        cast_training_params(pipe.unet, torch.float32)
    return {name: parameter for name, parameter in pipe.unet.named_parameters() if parameter.requires_grad}


def config_without_jump(skip_scaling: SkipScalingConfig | Mapping[str, Any] | str) -> SkipScalingConfig:
    """
    The scaling that a trained model starts with: gates that begin at exactly 1 (of `ls`, `init` is `"identity"` unless
    it is given), and strength 0 where the factors begin elsewhere.
    """
    config = config_for_fine_tuning(skip_scaling)
    return config if starts_at_identity(config) else dataclasses.replace(config, strength=0.0)


def config_for_fine_tuning(skip_scaling: SkipScalingConfig | Mapping[str, Any] | str) -> SkipScalingConfig:
    """What is asked for, with gates that begin at 1 unless their `init` is given."""
    if isinstance(skip_scaling, str):
        skip_scaling = {"method": skip_scaling}
    if isinstance(skip_scaling, Mapping) and skip_scaling.get("method") == "ls":
        skip_scaling = {"init": "identity", **skip_scaling}
    return SkipScalingConfig.parse(skip_scaling)


def starts_at_identity(config: SkipScalingConfig) -> bool:
    """Whether every factor is 1 before training, at any strength."""
    return config.method in ("none", "learnable") or config.init == "identity"


def _is_scaled_as(unet: nn.Module, config: SkipScalingConfig) -> bool:
    """Whether there is this scaling already; an error where there is another, which would be lost with a jump."""
    if not isinstance(unet, SkipScalingMixin) or unet.skip_scaler.config.method == "none":
        return False
    present = unet.skip_scaler.config
    if not config.equals_except_strength(present):
        raise ValueError(
            f"this {type(unet).__name__} was trained with {present}; go on with that, or take it away with "
            f"remove_skip_scaling before it is fine-tuned with {config}"
        )
    return True


def _check_lora(unet: nn.Module, rank: int | None, alpha: float | None):
    if names := adapter_names(unet):
        raise ValueError(
            f"this {type(unet).__name__} has the adapter {', '.join(names)}; make it part of the weights before it is "
            "trained further: pipe.fuse_lora(), then pipe.unload_lora_weights()"
        )
    if rank is None:
        if alpha is not None:
            raise ValueError(f"lora_alpha={alpha!r} is not used without lora_rank")
        return
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora_rank must be a whole number of at least 1, or None for no LoRA; got {rank!r}")
    if not is_peft_available():
        raise ImportError(NO_PEFT)
    if not any(name.endswith(LORA_TARGETS) for name, _ in unet.named_modules()):
        raise ValueError(
            f"this {type(unet).__name__} has no attention ({', '.join(LORA_TARGETS)}) that LoRA could adapt; train "
            "all of it, without lora_rank"
        )


def _add_lora(unet: nn.Module, rank: int, alpha: float):
    from peft import LoraConfig  # optional

    unet.add_adapter(
        LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=list(LORA_TARGETS))
    )
