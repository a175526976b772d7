"""Create the accelerator of a run, and check its processes and trackers."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    parse_flag_from_env,
)
from diffusers.utils import logging as diffusers_logging
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers.utils import logging as transformers_logging

from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.training.config import RunConfig


def make_accelerator(config: RunConfig) -> Accelerator:
    """Return the accelerator of a run."""
    options, tracker, folder = config.optimization, config.monitoring.report_to, Path(config.output.output_dir)
    _check_tracker(tracker)
    # Models are loaded and saved often. Their progress bars would hide the error message that ends a run.
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
    fsdp_plugin = _fsdp_plugin()
    if fsdp_plugin is not None and options.ema_snapshot_steps:
        raise UserError("--ema_snapshot_steps does not read the sharded weights of FSDP2: omit it, or use DDP")
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        log_with=None if tracker == "none" else tracker,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=folder / config.monitoring.logging_dir),
        fsdp_plugin=fsdp_plugin,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],  # no second copy of gradients
    )
    if fsdp_plugin is not None:
        _set_up_sharding(accelerator, fsdp_plugin)
    _check_processes(accelerator)
    if accelerator.gradient_accumulation_steps != options.gradient_accumulation_steps:
        raise UserError(
            f"accelerate is configured for {accelerator.gradient_accumulation_steps} accumulation steps and "
            f"--gradient_accumulation_steps is {options.gradient_accumulation_steps}: make them equal"
        )
    if options.allow_tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    return accelerator


# The names of engines in accelerate's environment variables.
_OTHER_ENGINES = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
_ACCEPTED = "accepted: DDP, or FSDP2, which divides the weights (--use_fsdp --fsdp_version 2)"


def _fsdp_plugin() -> FullyShardedDataParallelPlugin | None:
    """Return accelerate's settings of FSDP2, or None without FSDP. Raise a `UserError` for what is not supported."""
    for key, engine in _OTHER_ENGINES.items():
        if parse_flag_from_env(f"ACCELERATE_USE_{key}"):
            raise UserError(f"accelerate is configured for {engine}, which the scripts do not support; {_ACCEPTED}")
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return None
    version = os.environ.get("FSDP_VERSION", "1")  # accelerate's default
    if version != "2":
        raise UserError(f"accelerate is configured for FSDP version {version}; {_ACCEPTED}")
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy=os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"),
        # Otherwise transformers would load text encoders in the first process only.
        cpu_ram_efficient_loading=False,
    )
    if plugin.activation_checkpointing:
        raise UserError("fsdp_activation_checkpointing is not supported: use --gradient_checkpointing of the script")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise UserError("fsdp_offload_params is not supported, because each step would wait for the device")
    return plugin


def _set_up_sharding(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin):
    """Set the dtypes of FSDP2 as in DDP: inputs stay in float32, and so does the sum of gradients."""
    if accelerator.distributed_type == DistributedType.MULTI_CPU:  # accelerate shards on devices only, torch anywhere
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision),
        reduce_dtype=torch.float32 if accelerator.mixed_precision != "no" else None,
        cast_forward_inputs=False,  # bf16 would round the timesteps
    )


def _check_processes(accelerator: Accelerator):
    """Raise a `UserError` if the processes do not know each other, or use an engine that is not supported."""
    supported = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
    if accelerator.distributed_type not in supported:
        raise UserError(f"accelerate uses {accelerator.distributed_type.value}; {_ACCEPTED}")
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != accelerator.num_processes:
        raise UserError(
            f"{started} processes were started, but accelerate finds no GPU for them: set ACCELERATE_USE_CPU=1 to "
            "train on CPUs"
        )


def _check_tracker(name: str):
    if name in ("none", "all"):
        return
    if name not in LOGGER_TYPE_TO_CLASS:
        accepted = ["none", "all", *LOGGER_TYPE_TO_CLASS]
        raise UserError(
            f"--report_to must be one of {', '.join(accepted)}, got {name!r}{did_you_mean(name, accepted)}"
        )
    if name not in [tracker.value for tracker in get_available_trackers()]:
        raise UserError(f"--report_to {name} needs a package: pip install {name}")
