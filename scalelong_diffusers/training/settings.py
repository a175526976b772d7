"""What a run is made of: shown, kept beside it and in each checkpoint, and compared when it is resumed."""

import argparse
import math
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from scalelong_diffusers.data import TrainingData
from scalelong_diffusers.files import write_json
from scalelong_diffusers.patching import skip_connections


SETTINGS_FILE = "settings.json"

# What may differ between a run and its continuation: where things are, what is shown, and how the work is shared out.
_FREE = {
    *("output_dir", "logging_dir", "train_data_dir", "precomputed_dir", "cache_dir"),
    *("report_to", "tracker_project_name", "logging_steps", "validation_steps", "sample_steps", "num_samples"),
    *("validation_prompts", "eval_steps"),
    *("checkpointing_steps", "checkpoints_total_limit", "resume_from_checkpoint", "allow_changed_settings"),
    *("push_to_hub", "hub_model_id", "hub_private_repo"),
    *("train_batch_size", "gradient_accumulation_steps", "dataloader_num_workers", "num_train_epochs"),
    *("compile", "max_nonfinite_losses", "on_bad_image"),
}
# What a run's FID and KID depend on: those of a checkpoint and of what goes on from it have to compare. They are free
# where either has none.
_OF_FIGURES = {
    *("num_eval_images", "eval_metric", "eval_features", "eval_reference"),
    *("num_inference_steps", "guidance_scale"),
}
# What the weights of a checkpoint are made for.
_FIXED = ("preset", "model_type", "kappa", "lora_rank", "train_text_encoder")


def settle(args: argparse.Namespace, accelerator: Accelerator, data: TrainingData, model: nn.Module) -> dict[str, Any]:
    """Complete the settings by what the data and the model say, and print them."""
    total = args.train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
    if total > data.train.num_samples:
        raise ValueError(
            f"a step takes {total} images (--train_batch_size {args.train_batch_size} x --gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps} x {accelerator.num_processes} processes), and there are "
            f"{data.train.num_samples} to train on: take a smaller batch"
        )
    args.total_batch_size = total
    if args.max_train_steps is None:
        args.max_train_steps = math.ceil(data.train.num_samples * args.num_train_epochs / total)
    settings = {name: value for name, value in sorted(vars(args).items()) if name not in ("hub_token", "condition")}
    counts = f"{data.train.num_samples:,} to train on, {data.validation.num_samples:,} to validate with"
    settings["data"] = f"{data.description}: {counts}"
    settings["data_fingerprint"] = data.fingerprint
    settings["model"] = _describe(model)
    for name, value in settings.items():
        accelerator.print(f"{name}: {value}")
    if args.lr_scheduler != "constant" and args.lr_warmup_steps >= args.max_train_steps:
        accelerator.print(
            f"warning: the rate is warmed up for {args.lr_warmup_steps} steps (--lr_warmup_steps), which the run of "
            f"{args.max_train_steps} does not reach"
        )
    return settings


def _describe(model: nn.Module) -> str:
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    part = "" if trained == total else f", {trained:,} of them trained"
    return f"{type(model).__name__}, {total:,} parameters{part}, {skip_connections(model).config}"


def keep_settings(folder: Path, settings: dict[str, Any]):
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SETTINGS_FILE, settings)


def check_same_run(checkpoint: Path, before: dict[str, Any], settings: dict[str, Any], allow_changes: bool):
    """Refuse to go on with other settings than a checkpoint's run had, unless that is wanted and can be."""
    # With a constant rate a run can be made longer; otherwise its length is part of the schedule.
    free = _FREE | ({"max_train_steps"} if settings["lr_scheduler"].startswith("constant") else set())
    # The same images may be described otherwise, as where their folder was moved.
    free |= {"data"} if before.get("data_fingerprint") == settings["data_fingerprint"] else set()
    free |= set() if before.get("eval_steps") and settings["eval_steps"] else _OF_FIGURES
    changed = {
        name: f"{name} was {before.get(name)!r} and is {settings.get(name)!r}"
        for name in {**before, **settings}
        if name not in free and before.get(name) != settings.get(name)
    }
    if changed and not allow_changes:
        raise ValueError(
            f"{checkpoint} is of a run with other settings: {'; '.join(changed.values())}; give the same, or "
            "--allow_changed_settings"
        )
    fixed = [said for name, said in changed.items() if name in _FIXED or name.startswith("skip_scaling")]
    if fixed:
        raise ValueError(f"{checkpoint} holds the weights of another model: {'; '.join(fixed)}; start a new run")
