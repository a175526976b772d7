"""The typed config of a training run. Flags, checks, `--help`, `settings.json` and resuming derive from the fields."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, ClassVar, TypeVar

from diffusers.optimization import SchedulerType

from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.download import check_repo_id, use_cache_if_offline
from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.models.skip_init import SKIP_INITS
from scalelong_diffusers.noise import NoiseConfig, noise_process, without_unread_options
from scalelong_diffusers.options import (
    ArgumentParser,
    add_options,
    as_flags,
    build_config,
    check_options,
    flat_options,
    nested_config,
    option,
    options_of,
)
from scalelong_diffusers.pipelines.base import LATENT_SCALE
from scalelong_diffusers.presets import PRESETS, Task, get_preset
from scalelong_diffusers.scaling import SkipScalingConfig


# piecewise_constant needs rules, for which there is no flag.
LR_SCHEDULERS = [name.value for name in SchedulerType if name != SchedulerType.PIECEWISE_CONSTANT]


# How the built-in small models start. docs/which_method.md has the measurements.
BUILT_IN_STARTS = {
    "uvit": {"skip_init": "sum", "zero_init_residual": False, "skip_lr_scale": 0.1},
    "unet": {"skip_init": "zero", "zero_init_residual": True, "skip_lr_scale": 1.0},
}
BUILT_IN_STARTS["tiny"] = BUILT_IN_STARTS["uvit"]
# The settings with which `--model_type tiny` learns fast, mostly as in `make demo`.
TINY_TRAINING = {
    "max_train_steps": 3000,
    "train_batch_size": 32,
    "learning_rate": 4e-3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 100,
    "adam_beta2": 0.99,
    "adam_weight_decay": 0.03,
    "ema_decay": 0.998,
    # Predicting the clean image with a loss weighted by the SNR is learned fastest.
    "prediction_type": "sample",
    "snr_gamma": 1.0,
    "ddpm_beta_schedule": "squaredcos_cap_v2",
    "skip_scaling": "none",
    "sample_steps": 500,
    "validation_steps": 500,
}


@dataclass(frozen=True)
class ModelConfig:
    preset: str | None = option(
        None, "start from an experiment of the paper (see scalelong presets); other flags override it",
        metavar="NAME", on_resume="free", common=True,
    )  # fmt: skip
    model_type: str | None = option(
        None, "built-in small model if no config or preset is given (default: uvit); tiny: a U-ViT and settings for a "
        "run of minutes on a CPU",
        choices=("uvit", "unet", "tiny"), on_resume="free", common=True,
    )  # fmt: skip
    model_config_name_or_path: str | None = option(
        None, "architecture of the model: a config.json, a model folder or a Hub id", metavar="PATH"
    )
    skip_init: str | None = option(
        None, "start of the layers that read the long skips (default: sum for the built-in U-ViT, zero for the "
        "built-in U-Net, otherwise as in the model's config)", choices=SKIP_INITS, on_resume="fixed",
    )  # fmt: skip
    zero_init_residual: bool | None = option(
        None, "start the last layers of residual branches at zero (default: yes for the built-in U-Net, otherwise as "
        "in the model's config)", on_resume="fixed",
    )  # fmt: skip
    skip_lr_scale: float | None = option(
        None, "multiply the learning rate of the layers through which the long skips join the residual path "
        "(default: 0.1 for the built-in U-ViT, otherwise 1)", at_least=0, at_most=1000,
    )  # fmt: skip
    hidden_size: int | None = option(
        None, "width of the U-ViT, with heads as wide as before (default: the preset's or the config's)",
        at_least=1, at_most=65_536, on_resume="free",
    )  # fmt: skip
    mup_base_width: int | None = option(
        None, "train a U-ViT with muP: the learning rate was tuned for this width", at_least=1, at_most=65_536,
        on_resume="fixed",
    )  # fmt: skip
    mup_base_depth: int | None = option(
        None, "the same for the number of layers of a U-ViT with the residual start", at_least=1, at_most=1000,
        on_resume="fixed",
    )  # fmt: skip
    pretrained_vae_model_name_or_path: str | None = option(
        None,
        "folder or Hub id of an AutoencoderKL; the model is trained on its latents",
        metavar="PATH",
        common=True,
    )
    latent_scale: float | None = option(
        None, "factor that scales the latents (default: the autoencoder's own)", **LATENT_SCALE
    )

    def __post_init__(self):
        check_options(self)
        names = ("preset", "model_config_name_or_path", "model_type")
        given = [f"--{name}" for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} cannot be combined: pass one of them")
        if self.pretrained_vae_model_name_or_path is None:
            if self.preset is not None and get_preset(self.preset).is_latent:
                raise UserError(
                    f"preset {self.preset} is a latent model: pass --pretrained_vae_model_name_or_path, for example "
                    "stabilityai/sd-vae-ft-ema"
                )
            if self.latent_scale is not None:
                raise UserError("--latent_scale needs --pretrained_vae_model_name_or_path")


@dataclass(frozen=True)
class OptimizationConfig:
    seed: int = option(0, "seed of weights, data order, noise and samples", at_least=0, at_most=2**63 - 1)
    train_batch_size: int | None = option(
        None, "images per process and forward pass (default: 16, or derived from --total_batch_size)",
        at_least=1, at_most=1_000_000, on_resume="free", common=True,
    )  # fmt: skip
    total_batch_size: int | None = option(
        None, "images per optimizer step over all processes and accumulations, instead of --train_batch_size",
        at_least=1, at_most=10**9,
    )  # fmt: skip
    gradient_accumulation_steps: int = option(
        1, "forward and backward passes per optimizer step", at_least=1, at_most=1_000_000, on_resume="free"
    )
    num_train_epochs: int = option(100, "number of epochs", at_least=1, at_most=1_000_000, on_resume="free")
    max_train_steps: int | None = option(
        None,
        "number of optimizer steps; overrides --num_train_epochs",
        at_least=1,
        at_most=10**9,
        common=True,
    )
    learning_rate: float = option(2e-4, "peak learning rate", at_least=1e-12, at_most=1, common=True)
    lr_scheduler: str = option("constant_with_warmup", "learning rate schedule", choices=LR_SCHEDULERS)
    lr_warmup_steps: int = option(
        500, "number of optimizer steps until the peak learning rate", at_least=0, at_most=10**9
    )
    lr_num_cycles: int = option(
        1, "number of restarts of the cosine_with_restarts schedule", at_least=1, at_most=1_000_000
    )
    lr_power: float = option(1.0, "exponent of the polynomial schedule", at_least=0.01, at_most=100)
    adam_beta1: float = option(0.9, "AdamW beta1", at_least=0, below=1)
    adam_beta2: float = option(0.999, "AdamW beta2", at_least=0, below=1)
    adam_weight_decay: float = option(0.01, "AdamW weight decay", at_least=0, at_most=100)
    # torch's 1e-8 exceeds the first gradients of attention in small models, which then stay on a plateau:
    # docs/which_method.md.
    adam_epsilon: float = option(1e-10, "AdamW epsilon", at_least=1e-20, at_most=100)
    snr_gamma: float | None = option(
        None, "min-SNR weighting of the loss; 5 is usual", at_least=0.001, at_most=1_000_000
    )
    max_grad_norm: float = option(
        1.0, "clip gradients at this norm; 0 turns clipping off", at_least=0, at_most=1_000_000
    )
    use_ema: bool = option(True, "keep EMA weights, and use them for samples and the saved model")
    ema_decay: float = option(
        0.9999, "maximum EMA decay; it ramps up as (1 + step) / (10 + step)", at_least=0, below=1
    )
    ema_snapshot_steps: int | None = option(
        None, "keep two more averages and save snapshots of them every N steps, from which `scalelong ema` makes EMA "
        "weights of any length after training (default: never)", at_least=1, at_most=10**9,
    )  # fmt: skip
    mixed_precision: str | None = option(
        None, "compute in this dtype; the weights stay in fp32 (default: accelerate's configuration)",
        choices=("no", "fp16", "bf16"), common=True,
    )  # fmt: skip
    gradient_checkpointing: bool = option(False, "save memory by recomputing activations", on_resume="free")
    compile: bool = option(False, "compile the model with torch.compile", on_resume="free")
    compile_repeated_blocks: bool = option(
        False, "with --compile: compile the repeated blocks of a model, which takes a fraction of the time; models "
        "without repeated blocks are compiled as a whole", on_resume="free",
    )  # fmt: skip
    allow_tf32: bool = option(False, "allow TF32 matrix products, which are faster on Ampere GPUs and later")
    skip_scaling_warmup_steps: int | None = option(
        None,
        "number of steps in which the strength of the scaling rises from 0 to its value",
        at_least=0,
        at_most=10**9,
    )
    max_nonfinite_losses: int = option(
        10,
        "stop after this many consecutive steps with a non-finite loss or gradient",
        at_least=1,
        at_most=10**9,
        on_resume="free",
    )

    def __post_init__(self):
        check_options(self)
        if self.compile_repeated_blocks and not self.compile:
            raise UserError("--compile_repeated_blocks needs --compile")


@dataclass(frozen=True)
class MonitoringConfig:
    logging_steps: int = option(50, "log every N steps", at_least=1, at_most=10**9, on_resume="free")
    validation_steps: int = option(
        1000, "compute the loss on held-out images with fixed noise every N steps (0: never)",
        at_least=0, at_most=10**9, on_resume="free",
    )  # fmt: skip
    sample_steps: int = option(
        1000,
        "save a sample grid every N steps (0: never)",
        at_least=0,
        at_most=10**9,
        on_resume="free",
        common=True,
    )
    num_samples: int = option(16, "images in a sample grid", at_least=1, at_most=10_000, on_resume="free")
    # More do not fit a DPM-Solver for 1000 training timesteps.
    num_inference_steps: int = option(25, "sampling steps for sample grids and evaluations", at_least=1, at_most=999)
    eval_steps: int = option(
        0,
        "compute FID and KID of samples every N steps (0: never); this takes long",
        at_least=0,
        at_most=10**9,
        on_resume="free",
    )
    num_eval_images: int = option(
        10_000, "images per evaluation, as in the paper's curves", at_least=2, at_most=10_000_000
    )
    eval_metric: str = option("fid,kid", "fid, kid or both")
    eval_features: str = option("inception", "feature network: inception, or a vision model's folder or Hub id")
    eval_reference: str | None = option(
        None, "reference images or statistics, as for scalelong evaluate (default: the training images)",
        metavar="DATA",
    )  # fmt: skip
    diagnose_steps: int = option(
        0, "log features and gradients of the long skips every N steps (0: never); see docs/diagnose.md",
        at_least=0, at_most=10**9, on_resume="free",
    )  # fmt: skip
    report_to: str = option(
        "none",
        "tracker, such as tensorboard, wandb or trackio; 'all' uses all that are installed",
        on_resume="free",
    )
    tracker_project_name: str = option("scalelong", "project name in trackers", on_resume="free")
    logging_dir: str = option("logs", "folder inside --output_dir for tracker files", on_resume="free")

    def __post_init__(self):
        check_options(self)
        for name in ("logging_dir", "tracker_project_name"):  # folders, for tensorboard
            path = PurePath(getattr(self, name))
            if path.is_absolute() or ".." in path.parts:
                raise UserError(f"{name} must not lead out of --output_dir, got {str(path)!r}")


@dataclass(frozen=True)
class OutputConfig:
    output_dir: str = option(
        "scalelong-model",
        "folder for the pipeline, checkpoints, samples and logs",
        on_resume="free",
        common=True,
    )
    checkpointing_steps: int = option(
        1000, "save a checkpoint every N steps", at_least=1, at_most=10**9, on_resume="free"
    )
    checkpoints_total_limit: int | None = option(
        None, "keep only the latest N checkpoints", at_least=1, at_most=10**9, on_resume="free"
    )
    resume_from_checkpoint: str | None = option(
        None,
        "resume a run from its latest checkpoint or from the one at PATH",
        metavar="latest|PATH",
        on_resume="free",
        common=True,
    )
    allow_changed_settings: bool = option(False, "resume even if settings have changed", on_resume="free")
    push_to_hub: bool = option(False, "push the pipeline to the Hub after training", on_resume="free", common=True)
    hub_model_id: str | None = option(
        None, "repository to push to (default: the name of --output_dir)", metavar="USER/NAME", on_resume="free"
    )
    hub_private_repo: bool = option(False, "create the repository as private", on_resume="free")

    def __post_init__(self):
        check_options(self)
        for name in ("hub_model_id", "hub_private_repo"):
            if getattr(self, name) and not self.push_to_hub:
                raise UserError(f"--{name} needs --push_to_hub")
        if self.push_to_hub:
            check_repo_id("hub_model_id", self.repo_id)

    @property
    def repo_id(self) -> str:
        """The repository to push to."""
        return self.hub_model_id or Path(self.output_dir).resolve().name


@dataclass(frozen=True)
class RunConfig:
    """The groups of options that training from scratch and fine-tuning share."""

    # The method if no skip scaling flag is passed.
    default_skip_scaling: ClassVar[str | None] = None

    data: DataConfig = field(default_factory=DataConfig)
    skip_scaling: SkipScalingConfig | None = None
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    monitoring: MonitoringConfig = field(default_factory=MonitoringConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self):
        if self.skip_scaling is not None:
            object.__setattr__(self, "skip_scaling", SkipScalingConfig.parse(self.skip_scaling))
        check_options(self)
        if self.monitoring.diagnose_steps and self.optimization.compile:
            raise UserError("--diagnose_steps needs hooks, which a compiled model ignores: leave out --compile")

    @property
    def skip_start(self) -> Mapping[str, Any]:
        """How the skip layers start and learn, by flag. Nothing for a trained model."""
        return {}

    @classmethod
    def implied_options(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options, by flag, that the passed options imply."""
        return {}


@dataclass(frozen=True)
class TrainingConfig(RunConfig):
    """
    The config of a run that trains a model from scratch. A script adds its own options in a subclass.

    ```python
    config = TrainingConfig(data=DataConfig(train_data_dir="flowers", resolution=64))
    config = make_config(TrainingConfig, preset="cifar10-uvit-s-2", dataset_name="uoft-cs/cifar10")
    ```
    """

    default_skip_scaling: ClassVar[str | None] = "cs"
    task: ClassVar[Task] = "unconditional"

    skip_scaling: SkipScalingConfig = field(default_factory=lambda: SkipScalingConfig("cs"))
    model: ModelConfig = field(default_factory=ModelConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)

    def __post_init__(self):
        super().__post_init__()
        is_plain = self.skip_scaling.method == "none"
        if self.optimization.skip_scaling_warmup_steps and (is_plain or self.skip_scaling.strength == 0):
            reason = "--skip_scaling none" if is_plain else "--skip_scaling_strength 0"
            raise UserError(f"--skip_scaling_warmup_steps has nothing to warm up with {reason}")
        noise_process(self.noise, self.optimization.snr_gamma)  # reports options that do not fit before data is loaded

    @property
    def skip_start(self) -> Mapping[str, Any]:
        model = self.model
        is_built_in = model.preset is None and model.model_config_name_or_path is None
        defaults = BUILT_IN_STARTS[model.model_type or "uvit"] if is_built_in else {}
        flags = ("skip_init", "zero_init_residual", "skip_lr_scale")
        return {flag: defaults.get(flag) if getattr(model, flag) is None else getattr(model, flag) for flag in flags}

    @classmethod
    def implied_options(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        if values.get("model_type") == "tiny":
            return _without_overridden(TINY_TRAINING, values)
        if values.get("preset") is None:
            return {}
        preset = get_preset(values["preset"])
        if preset.task != cls.task:
            script = preset.task.replace("-", "_")
            accepted = ", ".join(row.name for row in PRESETS.values() if row.task == cls.task)
            raise UserError(f"preset {preset.name} is for train_{script}.py; accepted here: {accepted}")
        return _without_overridden(preset.training, values)


def _without_overridden(implied: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out implied options that the passed batch size or prediction type overrides."""
    sizes = ("train_batch_size", "total_batch_size")
    is_set = any(values.get(name) is not None for name in sizes)
    fitting = without_unread_options(implied, values.get("prediction_type"))
    return {name: value for name, value in fitting.items() if not (is_set and name in sizes)}


Config = TypeVar("Config", bound=RunConfig)


def make_config(config_class: type[Config], **values) -> Config:
    """
    Build a config from values by flag. A preset sets the values that are not passed.

    ```python
    config = make_config(TrainingConfig, resolution=64, learning_rate=1e-4, skip_scaling="cs", kappa=0.8)
    ```
    """
    accepted = {flag for flag, _, _ in options_of(config_class)}
    if unknown := sorted(set(values) - accepted):
        raise UserError(f"{config_class.__name__} has no option {unknown[0]!r}{did_you_mean(unknown[0], accepted)}")
    values = {**config_class.implied_options(values), **values}
    given = {"skip_scaling": config_class.default_skip_scaling, **values}
    if isinstance(given["skip_scaling"], str | None):
        scaling = SkipScalingConfig.from_flags({flag: value for flag, value in given.items() if value is not None})
    else:
        scaling = SkipScalingConfig.parse(given["skip_scaling"])
    return build_config(config_class, values, skip_scaling=scaling)


def make_parser(config_class: type[RunConfig], description: str) -> ArgumentParser:
    """Return a parser with a flag for every option of a config class."""
    common = [flag for flag, _, details in options_of(config_class) if details.common]
    parser = ArgumentParser(usage="%(prog)s [options]", description=description.strip(), common=common)
    add_options(parser, config_class, "this script")
    default = config_class.default_skip_scaling or "the scaling of the pipeline, or ls if it has none"
    add_options(parser, SkipScalingConfig, "skip scaling", f"default of --skip_scaling: {default}", optional=True)
    for entry in dataclasses.fields(config_class):
        group = nested_config(config_class, entry)
        if group not in (None, SkipScalingConfig):
            add_options(parser, group, entry.name, defaults=entry.default_factory())
    parser.add_argument("--hub_token", type=_refuse_token, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _refuse_token(token: str):
    # `accelerate launch` prints the whole command if a run fails.
    raise argparse.ArgumentTypeError("no token is accepted on the command line; run `hf auth login`, or set HF_TOKEN")


def parse_config(config_class: type[Config], description: str, argv: Sequence[str] | None = None) -> Config:
    """
    Parse the flags of a script. Invalid values end the program with one line and exit code 2.

    `--help` shows `description`, usually the docstring of the script.
    """
    parser = make_parser(config_class, description)
    values = vars(parser.parse_args(argv))
    try:
        config = make_config(config_class, **values)
        use_cache_if_offline(
            value
            for flag, value in flat_options(config).items()
            if value is not None and (flag == "dataset_name" or flag.endswith("_name_or_path"))
        )
        return config
    except UserError as error:
        parser.error(as_flags(str(error), [flag for flag, _, _ in options_of(config_class)]))
