"""What the flags of fine-tuning come to: a scaling that starts without a jump, and the optimizer."""

import argparse
from collections.abc import Iterable

import torch
from torch import nn

from scalelong_diffusers.arguments import skip_scaling_fields
from scalelong_diffusers.models.mixin import SkipScalingMixin
from scalelong_diffusers.patching import set_skip_scaling_strength
from scalelong_diffusers.pipelines.compatibility import check_size, vae_factor
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.training.fine_tuning import (
    config_for_fine_tuning,
    prepare_for_fine_tuning,
    starts_at_identity,
)
from scalelong_diffusers.training.stable_diffusion import StableDiffusion


# Where a scaling has to be warmed up and --skip_scaling_warmup_steps does not say how long.
_WARMUP_STEPS = 500


def settle_resolution(args: argparse.Namespace, pipe: StableDiffusion):
    """Where `--resolution` is not given it is that of the images that the pipeline makes."""
    size, factor = pipe.unet.config.sample_size, vae_factor(pipe.vae)
    if args.resolution is None:
        if not isinstance(size, int):
            raise ValueError(
                f"the unet of {args.pretrained_model_name_or_path} has sample_size={size!r}, which names no side of "
                "square images: give --resolution"
            )
        args.resolution = size * factor
    check_size("--resolution", args.resolution, factor)


def scale_without_jump(args: argparse.Namespace, pipe: StableDiffusion) -> dict[str, nn.Parameter]:
    """
    Scale the pipeline's U-Net as the flags say, and return what of it is trained, by name. Its first output is
    unchanged: what would change it is warmed up by the loop, from 0 to the strength that it has here.
    """
    is_scaled = isinstance(pipe.unet, SkipScalingMixin) and pipe.unet.skip_scaler.config.method != "none"
    wanted = _wanted_scaling(args, pipe.unet.skip_scaler.config if is_scaled else None)
    if is_scaled or starts_at_identity(wanted):
        if args.skip_scaling_warmup_steps:
            reason = f"{args.pretrained_model_name_or_path} is scaled already" if is_scaled else _starts_at_one(args)
            raise ValueError(
                f"--skip_scaling_warmup_steps {args.skip_scaling_warmup_steps} has nothing to warm up: {reason}"
            )
        args.skip_scaling_warmup_steps = 0
    elif args.skip_scaling_warmup_steps == 0:
        raise ValueError(
            f"--skip_scaling {wanted.method} without --skip_scaling_warmup_steps would change what the model makes at "
            "once: give some, or --skip_scaling ls, which starts at 1"
        )
    elif args.skip_scaling_warmup_steps is None:
        args.skip_scaling_warmup_steps = _WARMUP_STEPS
    trained = prepare_for_fine_tuning(pipe, wanted, args.lora_rank, args.lora_alpha)
    if args.skip_scaling_warmup_steps:
        set_skip_scaling_strength(pipe, wanted.strength)
    return trained


def _wanted_scaling(args: argparse.Namespace, present: SkipScalingConfig | None) -> SkipScalingConfig:
    """Without `--skip_scaling` the one that is there, or else `ls`."""
    if args.skip_scaling is None and present is None:
        args.skip_scaling = "ls"
    fields = skip_scaling_fields(args)
    wanted = present if fields is None else config_for_fine_tuning(fields)
    args.skip_scaling = wanted.method
    return wanted


def check_warmup(args: argparse.Namespace):
    """Once the length of the run is known: the scaling has to be in force at its end."""
    if args.skip_scaling_warmup_steps >= args.max_train_steps:
        raise ValueError(
            f"--skip_scaling_warmup_steps {args.skip_scaling_warmup_steps} does not end within the run's "
            f"{args.max_train_steps} steps: warm up for fewer, or train longer"
        )


def eight_bit_adam(args: argparse.Namespace, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit  # optional
    except ImportError as error:
        raise ValueError("--use_8bit_adam needs a package that is not there: pip install bitsandbytes") from error
    return AdamW8bit(
        parameters,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.adam_weight_decay,
        eps=args.adam_epsilon,
    )


def _starts_at_one(args: argparse.Namespace) -> str:
    return f"--skip_scaling {args.skip_scaling} starts with factors of 1 here"
