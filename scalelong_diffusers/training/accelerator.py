"""Create the accelerator of a run, and check its processes and trackers."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import ProjectConfiguration
from diffusers.utils import logging as diffusers_logging
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
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        log_with=None if tracker == "none" else tracker,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=folder / config.monitoring.logging_dir),
    )
    _check_processes(accelerator)
    if accelerator.gradient_accumulation_steps != options.gradient_accumulation_steps:
        raise UserError(
            f"accelerate is configured for {accelerator.gradient_accumulation_steps} accumulation steps and "
            f"--gradient_accumulation_steps is {options.gradient_accumulation_steps}: make them equal"
        )
    if options.allow_tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    return accelerator


def _check_processes(accelerator: Accelerator):
    """Raise a `UserError` if the processes do not know each other, or are not plain DDP."""
    supported = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in supported:
        raise UserError(f"the scripts train with DDP, but accelerate uses {accelerator.distributed_type.value}")
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
