"""Fine-tune Stable Diffusion: scale its U-Net without a jump, add a LoRA, load data and encode captions."""

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.training_utils import cast_training_params
from diffusers.utils import is_peft_available
from torch import nn

from scalelong_diffusers.data import Batch, DataConfig
from scalelong_diffusers.data.config import MAX_RESOLUTION, MAX_SHAPES
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.internals import adapter_names
from scalelong_diffusers.models.mixin import SkipScalingMixin, resolve_skip_scaling
from scalelong_diffusers.noise import FlowProcess, NoiseProcess, trained_process
from scalelong_diffusers.options import option
from scalelong_diffusers.patching import apply_skip_scaling, set_skip_scaling_strength
from scalelong_diffusers.pipelines.compatibility import check_size, square_size, vae_factor
from scalelong_diffusers.randomness import seed_for
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.training.config import OptimizationConfig
from scalelong_diffusers.training.latents import check_autoencoder
from scalelong_diffusers.training.stable_diffusion import (
    StableDiffusion,
    encode_tokens,
    load_stable_diffusion,
    tokenize_prompts,
    tokenizers,
)
from scalelong_diffusers.training.step import optimizer_groups
from scalelong_diffusers.training.text import check_validation_prompts


if TYPE_CHECKING:
    from scalelong_diffusers.training.run import TrainingRun

# Used if a scaling must be warmed up and --skip_scaling_warmup_steps is not set.
DEFAULT_WARMUP_STEPS = 500


@dataclass(frozen=True)
class FineTuningDataConfig(DataConfig):
    """
    The data config of a fine-tuning run. By default, the resolution is the pipeline's own.

    There is no default dataset, because it would spoil a trained model.
    """

    dataset_name: str | None = option(None, "dataset on the Hub", common=True)
    num_shapes: int | None = option(
        None, "try the script with this many of the built-in colored shapes", at_least=2, at_most=MAX_SHAPES
    )
    resolution: int | None = option(
        None,
        "scale and crop images to this width and height in pixels (default: the pipeline's own)",
        at_least=1,
        at_most=MAX_RESOLUTION,
        common=True,
    )

    def check_is_given(self):
        """Raise a `UserError` if no dataset is given."""
        if not any((self.dataset_name, self.train_data_dir, self.precomputed_dir, self.num_shapes)):
            raise UserError(
                "pass the images to train on: --train_data_dir, --dataset_name or --precomputed_dir (or --num_shapes, "
                "to try the script with drawn shapes)"
            )


class FineTuning:
    """
    The part of fine-tuning that a [`TrainingRun`] does not cover: the pipeline, its scaling and its captions.

    The run's config must have the options of `finetune_text_to_image.py`.
    """

    def __init__(self, run: "TrainingRun"):
        self.run = run
        self.config = config = run.config
        self.source = config.pretrained_model_name_or_path
        if config.use_8bit_adam and run.accelerator.is_fsdp2:
            raise UserError("--use_8bit_adam does not read the sharded weights of FSDP2: omit it, or use DDP")
        if config.lora_rank is not None:
            self._check_lora()
        self.pipe = load_stable_diffusion(self.source).to(run.device)
        self.pipe.set_progress_bar_config(disable=True)
        # The pipeline would print all captions that it truncates, in each step.
        logging.getLogger(type(self.pipe).__module__).setLevel(logging.ERROR)
        for tokenizer in tokenizers(self.pipe):
            check_validation_prompts(config.validation_prompts, tokenizer, tokenizer.model_max_length)
        run.vae = self.pipe.vae
        resolution = config.data.resolution or native_resolution(self.pipe)
        check_size("--resolution", resolution, vae_factor(self.pipe.vae))
        run.load_data(needs_captions=True, resolution=resolution)
        run.data.add_tokenizers(tokenize_prompts(self.pipe))
        check_autoencoder(run.data, self.pipe.vae, self.source)

    def noise_process(self) -> NoiseProcess:
        """Return the noise process that the pipeline was trained with."""
        process = trained_process(self.pipe, self.config.optimization.snr_gamma)
        if isinstance(process, FlowProcess):
            name = type(self.pipe.scheduler).__name__
            raise UserError(f"a {type(self.pipe).__name__} cannot sample with {name}: set another pipe.scheduler")
        return process

    def start(self):
        """Scale the U-Net without changing its first output, and start the run."""
        config, options = self.config, self.config.optimization
        torch.manual_seed(seed_for(options.seed, "model"))  # for gates and LoRA
        trained, warmup_steps = scale_without_jump(
            self.pipe, config.skip_scaling, options.skip_scaling_warmup_steps, config.lora_rank, config.lora_alpha
        )
        groups = optimizer_groups(options, [self.pipe.unet], trained)
        optimizer = eight_bit_adam(options, groups) if config.use_8bit_adam else None
        self.run.start({"unet": self.pipe.unet}, optimizer, warmup_steps)

    def encode_captions(self, batch: Batch) -> dict[str, Any]:
        """Return the U-Net's keyword arguments for a batch, with some captions dropped."""
        dropped = batch.uniform("dropped condition") < self.config.proportion_empty_prompts
        ids = {name: batch[name] for name in ("input_ids", "input_ids_2") if name in batch}
        return encode_tokens(self.pipe, ids, dropped, self.run.resolution)

    def save(self):
        """Save the pipeline, or only the adapter of a LoRA run."""
        if self.config.lora_rank is not None:
            self.run.save_adapter(self.pipe, self.source)
        else:
            is_hub_id = not os.path.exists(self.source)
            self.run.save(self.pipe, {"base_model": self.source} if is_hub_id else None)

    def _check_lora(self):
        if not is_peft_available():
            raise UserError(f"--lora_rank {self.config.lora_rank} needs a package: pip install peft")
        if self.config.output.push_to_hub and os.path.exists(self.source):
            raise UserError(
                "--push_to_hub of a LoRA needs the Hub id of its base model, but --pretrained_model_name_or_path "
                f"{self.source} is local: pass a Hub id, or push later with push_adapter"
            )


def native_resolution(pipe: StableDiffusion) -> int:
    """Return the resolution of the images that a pipeline makes by default."""
    size = square_size(pipe.unet)
    if size is None:
        found = pipe.unet.config.sample_size
        raise UserError(f"the unet has sample_size={found!r}, which is not a square: pass --resolution")
    return size * vae_factor(pipe.vae)


def scale_without_jump(
    pipe: StableDiffusion,
    skip_scaling: SkipScalingConfig | None,
    warmup_steps: int | None,
    lora_rank: int | None,
    lora_alpha: float | None,
) -> tuple[list[nn.Parameter], int]:
    """
    Scale the pipeline's U-Net and return its trained parameters and the number of warm-up steps.

    The first output of the U-Net is unchanged. A scaling that would change it is warmed up from strength 0.

    Args:
        skip_scaling: None: the U-Net keeps its scaling; a plain U-Net gets `"ls"`.
        warmup_steps: None: `DEFAULT_WARMUP_STEPS` if a warm-up is needed.
    """
    is_scaled = isinstance(pipe.unet, SkipScalingMixin) and pipe.unet.skip_scaler.config.method != "none"
    if skip_scaling is None:
        skip_scaling = pipe.unet.skip_scaler.config if is_scaled else SkipScalingConfig("ls")
    if is_scaled or starts_at_identity(skip_scaling):
        if warmup_steps:
            reason = "the U-Net is already scaled" if is_scaled else f"{skip_scaling.method} starts with factors of 1"
            raise UserError(f"--skip_scaling_warmup_steps {warmup_steps} has nothing to warm up: {reason}")
        warmup_steps = 0
    elif warmup_steps == 0:
        raise UserError(
            f"--skip_scaling {skip_scaling.method} without --skip_scaling_warmup_steps would change the output "
            "abruptly: pass a number of steps, or use --skip_scaling ls, which starts at 1"
        )
    elif warmup_steps is None:
        warmup_steps = DEFAULT_WARMUP_STEPS
    trained = prepare_for_fine_tuning(pipe, skip_scaling, lora_rank, lora_alpha)
    if warmup_steps:
        set_skip_scaling_strength(pipe, skip_scaling.strength)  # the run raises it from 0 to this value
    return list(trained.values()), warmup_steps


def eight_bit_adam(options: OptimizationConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return bitsandbytes' 8-bit AdamW."""
    try:
        from bitsandbytes.optim import AdamW8bit  # optional
    except ImportError as error:
        raise UserError("--use_8bit_adam needs a package: pip install bitsandbytes") from error
    return AdamW8bit(groups, betas=(options.adam_beta1, options.adam_beta2))


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
            f"this {type(unet).__name__} was trained with {present}; use the same scaling, or call "
            f"remove_skip_scaling before fine-tuning with {config}"
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
    """Return the config, with strength 0 unless its factors start at 1, to keep a trained model's output unchanged."""
    config = SkipScalingConfig.parse(skip_scaling)
    return config if starts_at_identity(config) else dataclasses.replace(config, strength=0.0)


def starts_at_identity(config: SkipScalingConfig) -> bool:
    """Return whether every factor is 1 before training, at any strength."""
    return config.method in ("none", "learnable", "token_gates") or config.init == "identity"
