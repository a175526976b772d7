"""The size and the settings of a run. Settings are printed, stored in the folder and compared when a run resumes."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffusers import ModelMixin
from torch import nn

from scalelong_diffusers.data import TrainingData
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import checksum
from scalelong_diffusers.options import flat_options, options_of
from scalelong_diffusers.patching import skip_connections
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.training.config import RunConfig


if TYPE_CHECKING:
    from scalelong_diffusers.training.run import TrainingRun

SETTINGS_FILE = "settings.json"
DEFAULT_BATCH_SIZE = 16
_SHOWN_CLASSES = 10


@dataclass(frozen=True)
class RunSize:
    """Batch sizes and the number of steps, which depend on the data and the number of processes."""

    train_batch_size: int  # per process and forward pass
    total_batch_size: int  # per optimizer step
    max_train_steps: int
    num_processes: int

    @classmethod
    def of(cls, config: RunConfig, num_processes: int, num_samples: int) -> "RunSize":
        options = config.optimization
        shares = num_processes * options.gradient_accumulation_steps
        per_process = options.train_batch_size
        if per_process is None and options.total_batch_size is None:
            per_process = DEFAULT_BATCH_SIZE
        elif per_process is None:
            per_process, rest = divmod(options.total_batch_size, shares)
            if rest or not per_process:
                raise UserError(
                    f"--total_batch_size {options.total_batch_size} is not divisible by {num_processes} processes x "
                    f"{options.gradient_accumulation_steps} accumulations: pass --train_batch_size"
                )
        total = per_process * shares
        if options.total_batch_size not in (None, total):
            raise UserError(
                f"--total_batch_size {options.total_batch_size} is not --train_batch_size {per_process} x "
                f"{num_processes} processes x {options.gradient_accumulation_steps} accumulations: pass one of them"
            )
        if total > num_samples:
            raise UserError(
                f"a step takes {total} images (--train_batch_size {per_process} x --gradient_accumulation_steps "
                f"{options.gradient_accumulation_steps} x {num_processes} processes), but there are only "
                f"{num_samples} to train on: use a smaller batch"
            )
        steps = options.max_train_steps or math.ceil(num_samples * options.num_train_epochs / total)
        return cls(per_process, total, steps, num_processes)


def describe_settings(run: "TrainingRun") -> dict[str, Any]:
    """Return all options of a run by flag, and the values derived from them."""
    train, validation = run.data.train.num_samples, run.data.validation.num_samples
    scaling = skip_connections(run.modules["unet"]).config
    settings = {
        **flat_options(run.config),
        **run.config.skip_start,
        **flat_options(scaling),
        "skip_scaling_options": scaling.options or None,
        **dataclasses.asdict(run.size),
        "resolution": run.resolution,
        "mixed_precision": run.accelerator.mixed_precision,
        "distributed_type": run.accelerator.distributed_type.value,
        "skip_scaling_warmup_steps": run.warmup_steps,
        "data": f"{run.data.description}: {train:,} for training, {validation:,} for validation"
        + _describe_classes(run.data),
        "data_fingerprint": run.data.fingerprint,
        **{name: run.modules["unet"].config.get(name) for name in ("mup_base_width", "mup_base_depth")},
        "model": _describe_model(run.modules["unet"], scaling),
        "architecture": _architecture_checksum(run.modules["unet"]),
    }
    return dict(sorted(settings.items()))


def _describe_classes(data: TrainingData) -> str:
    names = data.class_names or []
    more = ", ..." if len(names) > _SHOWN_CLASSES else ""
    listed = f": {', '.join(names[:_SHOWN_CLASSES])}{more}" if names else ""
    return "" if data.num_classes is None else f"; {data.num_classes:,} classes{listed}"


def _describe_model(model: nn.Module, scaling: SkipScalingConfig) -> str:
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    part = "" if trained == total else f", {trained:,} trained"
    return f"{type(model).__name__}, {total:,} parameters{part}, {scaling}"


def _architecture_checksum(model: ModelMixin) -> str:
    """Return a checksum of the model's config without the entries that are compared one by one."""
    others = ("skip_scaling", "skip_init", "zero_init_residual", "mup_base_width", "mup_base_depth")
    config = {name: value for name, value in model.config.items() if name[0] != "_" and name not in others}
    return checksum(json.dumps(config, sort_keys=True))[:12]


# These must be equal if a run evaluates before and after it is resumed, so that FID and KID are comparable.
_EVALUATION_SETTINGS = {
    *("num_eval_images", "eval_metric", "eval_features", "eval_reference", "num_inference_steps", "guidance_scale")
}


def check_same_settings(
    checkpoint: str, config: RunConfig, before: dict[str, Any], now: dict[str, Any], allow_changes: bool
):
    """Raise a `UserError` if a run is resumed with settings that must not change."""
    now = json.loads(json.dumps(now))  # as `before` was stored
    options = list(options_of(type(config)))
    # Runs of earlier versions lack newer options.
    before = {**{flag: field.default for flag, field, _ in options}, **before}
    on_resume = {flag: details.on_resume for flag, _, details in options}
    on_resume |= {"architecture": "fixed", "model": "fixed", "skip_scaling_options": "fixed"}
    free = {name for name, rule in on_resume.items() if rule == "free"}
    free |= {"num_processes", "distributed_type"}
    # The description of the model explains a checksum that differs.
    if before.get("architecture") == now.get("architecture"):
        free.add("model")
    # With a constant learning rate a run can be made longer. Otherwise its length is part of the schedule.
    if now["lr_scheduler"].startswith("constant"):
        free.add("max_train_steps")
    # Equal data may be described differently, for example if its folder was moved.
    if before.get("data_fingerprint") == now["data_fingerprint"]:
        free.add("data")
    # The fields of another method differ anyway.
    if before.get("skip_scaling") != now.get("skip_scaling"):
        free |= {flag for flag, _, _ in options_of(SkipScalingConfig)} - {"skip_scaling"} | {"skip_scaling_options"}
    if not (before.get("eval_steps") and now["eval_steps"]):
        free |= _EVALUATION_SETTINGS
    changed = {
        name: f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in {**before, **now}
        if name not in free and before.get(name) != now.get(name)
    }
    if fixed := [change for name, change in changed.items() if on_resume.get(name) == "fixed"]:
        raise UserError(f"{checkpoint} holds the weights of another model: {'; '.join(fixed)}; start a new run")
    if changed and not allow_changes:
        raise UserError(
            f"{checkpoint} belongs to a run with other settings: {'; '.join(changed.values())}; pass the same "
            "settings, or --allow_changed_settings"
        )


def inexact_resume_warning(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return a warning if a streaming run is resumed with another division of the data among its readers."""
    changed = [name for name in ("train_batch_size", "num_processes") if before.get(name) != now[name]]
    workers = [max(1, settings.get("dataloader_num_workers") or 0) for settings in (before, now)]
    if workers[0] != workers[1]:  # without workers, the process itself is the reader
        changed.append("dataloader_num_workers")
    if not now["streaming"] or not changed:
        return None
    return (
        f"streaming resumes inexactly, because {' and '.join(changed)} changed: in this epoch some images may be "
        "used twice and others not at all"
    )
