"""`scalelong convert` turns a `.pth` of U-ViT or ScaleLong into the folder of a `UViTModel`."""

import argparse
from typing import Any

from scalelong_diffusers.models.conversion import CheckpointDetails, convert_from_reference
from scalelong_diffusers.models.uvit import TIMESTEP_CONVENTIONS
from scalelong_diffusers.options import add_options, options_of
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.terminal import print_lines


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "convert",
        help="turn a .pth of U-ViT or ScaleLong into the folder of a UViTModel",
        description="Convert a .pth of U-ViT or ScaleLong. The flags give settings that the weights do not contain.",
    )
    parser.add_argument("source", metavar="IN", help="a .pth, or a training folder with nnet_ema.pth")
    parser.add_argument("target", metavar="OUT", help="folder to write; it must not exist or must be empty")
    parser.add_argument("--num_attention_heads", type=int, metavar="N", help="number of heads in each block")
    parser.add_argument(
        "--timesteps",
        choices=TIMESTEP_CONVENTIONS,
        help="timesteps of the network: t * 999 with t in (0, 1] (continuous), or 1 .. 1000 (discrete)",
    )
    parser.add_argument(
        "--context_length", type=int, metavar="N", help="number of text tokens of a text-to-image model"
    )
    add_options(parser, SkipScalingConfig, "skip scaling", optional=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    details = CheckpointDetails(
        num_attention_heads=arguments.num_attention_heads,
        timesteps=arguments.timesteps,
        skip_scaling=_given_fields(vars(arguments)),
        context_length=arguments.context_length,
    )
    model = convert_from_reference(arguments.source, arguments.target, details)
    config = model.config
    print_lines(
        f"{arguments.target}: UViTModel with {model.num_parameters():,} parameters, {config.num_layers} + 1 blocks, "
        f"{config.num_attention_heads} heads, timesteps (t + {config.timestep_offset:g}) * "
        f"{config.timestep_scale:g}, {model.skip_scaler.config}"
    )
    return 0


def _given_fields(values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the skip scaling fields that were passed as flags, without defaults, or None without a method."""
    if SkipScalingConfig.from_flags(values) is None:
        return None
    return {field.name: values[flag] for flag, field, _ in options_of(SkipScalingConfig) if flag in values}
