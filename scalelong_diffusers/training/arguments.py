"""The flags that the training scripts share, and what a preset and the flags together come to."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from diffusers.optimization import SchedulerType

from scalelong_diffusers.arguments import ArgumentParser, add_skip_scaling_arguments
from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.options import add_options
from scalelong_diffusers.presets import PRESETS, Preset, get_preset
from scalelong_diffusers.training.noise import BETA_SCHEDULES, PREDICTION_TYPES


def training_parser(description: str, condition: str | None) -> ArgumentParser:
    """
    A parser with all flags of a script that trains from nothing; a script adds its own.

    `condition` is what the model is told: None, "class" or "text". It says which presets fit.
    """
    parser = ArgumentParser(description=description)
    _add_model_arguments(parser)
    _add_shared_arguments(parser)
    _add_noise_arguments(parser.add_argument_group("noise"))
    parser.set_defaults(condition=condition, skip_scaling="cs")
    return parser


def parse_training_arguments(parser: ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of a `training_parser`, with those of `--preset` as defaults."""
    first = ArgumentParser(add_help=False)
    first.add_argument("--preset")
    preset_name = first.parse_known_args(argv)[0].preset
    if preset_name is not None:
        try:
            preset = get_preset(preset_name)
            check_condition(preset, parser.get_default("condition"))
        except ValueError as error:
            parser.error(str(error))
        known = {action.dest for action in parser._actions} | {"total_batch_size"}
        parser.set_defaults(**{name: value for name, value in preset_flags(preset).items() if name in known})
    arguments = parser.parse_args(argv)
    _check_shared_arguments(parser, arguments)
    _check_model_arguments(parser, arguments)
    return arguments


def fine_tuning_parser(description: str) -> ArgumentParser:
    """A parser without the flags of what a model that is there has settled: the model itself, its noise, a preset."""
    parser = ArgumentParser(description=description)
    _add_shared_arguments(parser)
    parser.set_defaults(preset=None)
    return parser


def parse_fine_tuning_arguments(parser: ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    arguments = parser.parse_args(argv)
    _check_shared_arguments(parser, arguments)
    return arguments


def preset_flags(preset: Preset) -> dict[str, Any]:
    """What the flags default to under a preset. What the papers do not say keeps the script's own default."""
    schedule = preset.scheduler or {}
    betas = preset.adam_betas or (None, None)
    flags = {
        "resolution": preset.config["sample_size"] * (_LATENT_PIXELS if preset.is_latent else 1),
        "crop_size": preset.crop_size,
        "random_flip": preset.random_flip,
        "ddpm_beta_schedule": schedule.get("beta_schedule"),
        "continuous_time": preset.noise is not None and preset.noise.startswith("VP-SDE"),
        "learning_rate": preset.learning_rate,
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "adam_weight_decay": 0.0 if preset.optimizer == "Adam" else preset.adam_weight_decay,
        "lr_scheduler": preset.lr_scheduler,
        "lr_warmup_steps": preset.lr_warmup_steps,
        # U-ViT's own training does not clip, and where images are not square it is their middle that is seen.
        "max_grad_norm": preset.max_grad_norm or 0.0,
        "center_crop": True,
        "max_train_steps": preset.max_train_steps,
        "ema_decay": preset.ema_decay,
        "class_dropout": preset.condition_dropout or 0.0,
        "proportion_empty_prompts": preset.condition_dropout,
        "guidance_scale": preset.guidance_scale,
        "total_batch_size": preset.train_batch_size,
        "latent_scale": preset.latent_scale,
    }
    return {name: value for name, value in flags.items() if value is not None}


def check_condition(preset: Preset, condition: str | None):
    """Refuse the preset of another task."""
    if preset.condition != condition:
        script = {None: "unconditional", "class": "class_conditional", "text": "text_to_image"}[preset.condition]
        fitting = [row.name for row in PRESETS.values() if row.condition == condition]
        raise ValueError(f"preset {preset.name} is for train_{script}.py; accepted here: {', '.join(fitting)}")


def _add_shared_arguments(parser: ArgumentParser):
    add_skip_scaling_arguments(parser)
    add_options(parser, DataConfig, "data")
    parser.set_defaults(**dataclasses.asdict(DataConfig()))
    _add_optimization_arguments(parser.add_argument_group("optimization"))
    _add_monitoring_arguments(parser.add_argument_group("monitoring"))
    _add_checkpoint_arguments(parser.add_argument_group("output, checkpoints and the Hub"))
    # Of a preset alone: how many images a step has over all processes and accumulations.
    parser.set_defaults(total_batch_size=None)


def _add_model_arguments(parser: ArgumentParser):
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--preset", metavar="NAME", help="an experiment of the paper, which sets what no flag does: scalelong presets")
    add("--model_type", choices=("uvit", "unet"), help="a small one, where nothing else names a model (uvit)")
    add("--model_config_name_or_path", metavar="PATH", help="the config.json of a model, its folder, or an id")
    add("--pretrained_vae_model_name_or_path", metavar="PATH", help="an autoencoder: the model then makes its latents")
    add("--latent_scale", type=float, help="the factor on the latents; the autoencoder's own by default")


def _add_noise_arguments(group):
    add = group.add_argument
    add("--prediction_type", choices=PREDICTION_TYPES, default="epsilon", help="what the model predicts")
    add("--ddpm_beta_schedule", choices=BETA_SCHEDULES, default="linear", help="squaredcos_cap_v2 is the cosine")
    add(
        "--continuous_time", **_SWITCH, default=False, help="real times instead of 1000 steps, as U-ViT's pixel models"
    )


def _add_optimization_arguments(group):
    add = group.add_argument
    add("--seed", type=int, default=0)
    add("--train_batch_size", type=int, help="images in each process at a time (16, or the preset's shared out)")
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--num_train_epochs", type=int, default=100)
    add("--max_train_steps", type=int, help="optimizer steps; it goes before --num_train_epochs")
    add("--learning_rate", type=float, default=2e-4)
    add("--lr_scheduler", choices=_LR_SCHEDULERS, default="constant_with_warmup")
    add("--lr_warmup_steps", type=int, default=500, help="optimizer steps")
    add("--lr_num_cycles", type=int, default=1, help="of cosine_with_restarts")
    add("--lr_power", type=float, default=1.0, help="of polynomial")
    add("--adam_beta1", type=float, default=0.9)
    add("--adam_beta2", type=float, default=0.999)
    add("--adam_weight_decay", type=float, default=0.01)
    add("--adam_epsilon", type=float, default=1e-8)
    add("--snr_gamma", type=float, help="min-SNR weighting of the loss; 5 is usual")
    add("--max_grad_norm", type=float, default=1.0, help="0 does not clip")
    add("--use_ema", **_SWITCH, default=True, help="average the weights, and save and show the average")
    add("--ema_decay", type=float, default=0.9999, help="reached by and by: (1 + step) / (10 + step) before")
    add("--mixed_precision", choices=("no", "fp16", "bf16"), help="the weights stay in fp32")
    add("--gradient_checkpointing", action="store_true")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--allow_tf32", action="store_true", help="faster matrix products on Ampere GPUs and later")
    add("--skip_scaling_warmup_steps", type=int, default=0, help="move the scaling's strength from 0 to its value")
    add("--max_nonfinite_losses", type=int, default=10, help="so many in a row end the run")


def _add_monitoring_arguments(group):
    add = group.add_argument
    add("--logging_steps", type=int, default=50, help="a line in metrics.jsonl")
    add(
        "--validation_steps",
        type=int,
        default=1000,
        help="the loss on images held out, with noise that stays the same",
    )
    add("--sample_steps", type=int, default=1000, help="a grid of samples; 0 for none")
    add("--num_samples", type=int, default=16, help="how many images the grid has")
    add("--num_inference_steps", type=int, default=25, help="of the sampler, for the grid")
    add("--eval_steps", type=int, default=0, help="FID and KID of samples; 0 (default) for never, since it takes long")
    add("--num_eval_images", type=int, default=10_000, help="as many as in the paper's curves by default")
    add("--eval_metric", default="fid,kid", help="fid, kid or both")
    add("--eval_features", default="inception", metavar="NETWORK", help="or a vision model's folder or id")
    add("--eval_reference", metavar="DATA", help="as scalelong evaluate has it; the training images by default")
    add("--report_to", default="none", help="tensorboard, wandb, trackio... as accelerate knows them")
    add("--tracker_project_name", default="scalelong")
    add("--logging_dir", default="logs", help="inside --output_dir")


def _add_checkpoint_arguments(group):
    add = group.add_argument
    add("--output_dir", default="scalelong-model", help="becomes the folder of a pipeline")
    add("--checkpointing_steps", type=int, default=1000)
    add("--checkpoints_total_limit", type=int, help="how many are kept")
    add("--resume_from_checkpoint", metavar="latest|PATH", help="go on with a run")
    add("--allow_changed_settings", action="store_true", help="go on with other settings than the run had")
    add("--push_to_hub", action="store_true", help="push the pipeline at the end")
    add("--hub_model_id", metavar="USER/NAME", help="the name of --output_dir by default")
    add("--hub_token")
    add("--hub_private_repo", action="store_true")


# The autoencoder of the papers' latent models makes one entry of 8 x 8 pixels.
_LATENT_PIXELS = 8

_SWITCH = {"action": argparse.BooleanOptionalAction}

# Those of diffusers, but for the one whose rules no flag could say.
_LR_SCHEDULERS = [name.value for name in SchedulerType if name != SchedulerType.PIECEWISE_CONSTANT]

_AT_LEAST = {
    "train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 1,
    "max_train_steps": 1,
    "lr_warmup_steps": 0,
    "skip_scaling_warmup_steps": 0,
    "max_nonfinite_losses": 1,
    "logging_steps": 1,
    "validation_steps": 0,
    "sample_steps": 0,
    "num_samples": 1,
    "num_inference_steps": 1,
    "eval_steps": 0,
    "num_eval_images": 2,
    "checkpointing_steps": 1,
    "checkpoints_total_limit": 1,
    "max_grad_norm": 0,
    "adam_weight_decay": 0,
    "learning_rate": 0,
}


def _check_shared_arguments(parser: ArgumentParser, arguments: argparse.Namespace):
    for name, least in _AT_LEAST.items():
        value = getattr(arguments, name)
        if value is not None and not value >= least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    for name in ("adam_beta1", "adam_beta2", "ema_decay"):
        if not 0 <= getattr(arguments, name) < 1:
            parser.error(f"--{name} must be in [0, 1), got {getattr(arguments, name)}")
    if arguments.snr_gamma is not None and not arguments.snr_gamma > 0:
        parser.error(f"--snr_gamma must be above 0, got {arguments.snr_gamma}")
    for flag in ("hub_model_id", "hub_token", "hub_private_repo"):
        if getattr(arguments, flag) and not arguments.push_to_hub:
            parser.error(f"--{flag} needs --push_to_hub")
    if arguments.skip_scaling_warmup_steps:
        for flag, value in (("skip_scaling", "none"), ("skip_scaling_strength", 0)):
            if getattr(arguments, flag) == value:
                parser.error(f"--skip_scaling_warmup_steps has nothing to warm up with --{flag} {value}")


def _check_model_arguments(parser: ArgumentParser, arguments: argparse.Namespace):
    naming = ("preset", "model_config_name_or_path", "model_type")
    given = [f"--{flag}" for flag in naming if getattr(arguments, flag) is not None]
    if len(given) > 1:
        parser.error(f"{' and '.join(given)} can not go together: give one of them")
    if arguments.pretrained_vae_model_name_or_path is None:
        if arguments.preset is not None and get_preset(arguments.preset).is_latent:
            parser.error(
                f"preset {arguments.preset} makes latents: it needs --pretrained_vae_model_name_or_path, such as "
                "stabilityai/sd-vae-ft-ema"
            )
        if arguments.latent_scale is not None:
            parser.error("--latent_scale needs --pretrained_vae_model_name_or_path")
