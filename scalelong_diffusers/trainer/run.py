"""The beginning and the end of a run: its folder, its settings, and the pipeline that it leaves behind."""

import argparse
import math
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import ProjectConfiguration
from diffusers import DiffusionPipeline

from scalelong_diffusers.data import TrainingData
from scalelong_diffusers.files import write_json
from scalelong_diffusers.messages import near_miss
from scalelong_diffusers.model_card import CardFacts
from scalelong_diffusers.sharing import push_to_hub
from scalelong_diffusers.trainer.checkpoints import Checkpoints, replace_folder
from scalelong_diffusers.trainer.loop import TrainingLoop, TrainingStopped, on_main_process


SETTINGS_FILE = "settings.json"

# What may differ between a run and its continuation: where things are, what is shown, and how the work is shared out.
_FREE = {
    *(
        "output_dir",
        "logging_dir",
        "train_data_dir",
        "precomputed_dir",
        "cache_dir",
        "report_to",
        "tracker_project_name",
    ),
    *("logging_steps", "validation_steps", "sample_steps", "num_samples", "num_inference_steps"),
    *("checkpointing_steps", "checkpoints_total_limit", "resume_from_checkpoint", "allow_changed_settings"),
    *("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo"),
    *("train_batch_size", "gradient_accumulation_steps", "dataloader_num_workers", "num_train_epochs"),
    *("compile", "max_nonfinite_losses", "condition"),
}


def run_script(main: Callable[[], None]):
    """Run a training script's `main`; a run that can not begin or go on ends in one line on stderr, and exit code."""
    try:
        main()
    except TrainingStopped as stopped:
        print(f"{Path(sys.argv[0]).stem}: {stopped}", file=sys.stderr)
        if torch.distributed.is_initialized():
            # What DDP holds is not taken apart in a safe order here, and torch waits for ever then.
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(stopped.exit_code)
        sys.exit(stopped.exit_code)


@contextmanager
def mistakes_as_sentences(interrupted: str = "interrupted before the first step"):
    """Around all that comes before training: what was asked wrongly ends the run with a sentence and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise TrainingStopped(" ".join(str(error).split()), exit_code=2) from error
    except KeyboardInterrupt as error:
        raise TrainingStopped(interrupted, exit_code=130) from error


def start(args: argparse.Namespace) -> Accelerator:
    """The accelerator, once it is known that the output folder can be written and holds no other run."""
    folder = Path(args.output_dir)
    _check_tracker(args.report_to)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=None if args.report_to == "none" else args.report_to,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=folder / args.logging_dir),
    )
    if args.report_to not in ("none", "all") and not accelerator.log_with:
        raise ValueError(
            f"--report_to {args.report_to} needs a package that is not there: pip install {args.report_to}"
        )
    check_processes(accelerator)
    _share_out_batch(args, accelerator.num_processes)
    torch.backends.cuda.matmul.allow_tf32 = args.allow_tf32
    on_main_process(accelerator, lambda: _prepare_folder(args, folder))
    return accelerator


def check_processes(accelerator: Accelerator):
    """Refuse processes that do not know of each other, or that share out their work otherwise than is meant here."""
    supported = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in supported:
        raise ValueError(
            f"the scripts train with DDP, and accelerate is set up for {accelerator.distributed_type.value}"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) != accelerator.num_processes:
        raise ValueError(
            f"{os.environ['WORLD_SIZE']} processes were started, and accelerate finds no GPU for them: on CPUs set "
            "ACCELERATE_USE_CPU=1"
        )


def settle(args: argparse.Namespace, accelerator: Accelerator, data: TrainingData) -> dict[str, Any]:
    """
    Complete the settings by what the data says, print them, and keep them with the run.

    Returned is what the run depends on, and what has to be the same where it is resumed.
    """
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
    shown = {name: value for name, value in sorted(vars(args).items()) if name not in ("hub_token", "condition")}
    shown["data"] = f"{data.description} ({data.fingerprint})"
    for name, value in shown.items():
        accelerator.print(f"{name}: {value}")
    on_main_process(accelerator, lambda: write_json(Path(args.output_dir, SETTINGS_FILE), shown))
    if accelerator.trackers == [] and args.report_to != "none":
        scalars = {name: value for name, value in shown.items() if isinstance(value, (int, float, str, bool))}
        accelerator.init_trackers(args.tracker_project_name, config=scalars)
    # With a constant rate a run can be made longer; otherwise its length is part of the schedule.
    free = _FREE | ({"max_train_steps"} if args.lr_scheduler.startswith("constant") else set())
    return {name: value for name, value in shown.items() if name not in free}


def save_pipeline(loop: TrainingLoop, pipeline: DiffusionPipeline, card: dict[str, Any] | None = None):
    """
    Save the pipeline with the averaged weights into the run's folder, and push it, if that is asked for.

    `card` are fields of a `CardFacts` that the run does not know itself.
    """
    args = loop.args
    with loop.evaluating():
        loop.on_main_process(lambda: _save_into(pipeline, loop.folder))
        if args.push_to_hub:
            loop.on_main_process(lambda: _push(loop, pipeline, card or {}))
    loop.finish()


def _check_tracker(name: str):
    if name in ("none", "all"):
        return
    if name not in LOGGER_TYPE_TO_CLASS:
        accepted = ["none", "all", *LOGGER_TYPE_TO_CLASS]
        raise ValueError(f"--report_to {name} is unknown{near_miss(name, accepted)}; accepted: {', '.join(accepted)}")
    if name not in get_available_trackers():
        raise ValueError(f"--report_to {name} needs its package, which is not installed: pip install {name}")


def _share_out_batch(args: argparse.Namespace, num_processes: int):
    if args.train_batch_size is not None:
        return
    if args.total_batch_size is None:
        args.train_batch_size = 16
        return
    shares = num_processes * args.gradient_accumulation_steps
    if args.total_batch_size % shares:
        raise ValueError(
            f"preset {args.preset} has batches of {args.total_batch_size}, which {num_processes} processes x "
            f"{args.gradient_accumulation_steps} accumulations can not share out evenly: give --train_batch_size"
        )
    args.train_batch_size = args.total_batch_size // shares


def _prepare_folder(args: argparse.Namespace, folder: Path):
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"--output_dir {folder} can not be written: {error}") from error
    checkpoints = Checkpoints(folder)
    if args.resume_from_checkpoint is None and (checkpoints.steps() or (folder / SETTINGS_FILE).exists()):
        raise ValueError(
            f"--output_dir {folder} holds another run: go on with it by --resume_from_checkpoint latest, or give "
            "another folder"
        )
    checkpoints.remove_leftovers()


def _save_into(pipeline: DiffusionPipeline, folder: Path):
    """Saved aside and moved, the index last: an index names what is there."""
    aside = folder / ".partial-pipeline"
    pipeline.save_pretrained(aside)
    for path in sorted(aside.iterdir(), key=lambda path: path.name == DiffusionPipeline.config_name):
        if path.is_dir():
            replace_folder(path, folder / path.name)
        else:
            os.replace(path, folder / path.name)
    shutil.rmtree(aside)


def _push(loop: TrainingLoop, pipeline: DiffusionPipeline, card: dict[str, Any]):
    """A push that fails costs nothing but the push."""
    args = loop.args
    repo_id = args.hub_model_id or loop.folder.resolve().name
    loss = loop.metrics.last("validation_loss")
    facts = {
        "preset": args.preset,
        "training_data": loop.data.description,
        "training": {
            "steps": loop.global_step,
            "batch size": loop.batch_size,
            "learning rate": args.learning_rate,
            "EMA": args.ema_decay if args.use_ema else "no",
        },
        "metrics": None if loss is None else {"validation loss (fixed noise, held-out images)": f"{loss:.4f}"},
        **card,
    }
    try:
        url = push_to_hub(
            pipeline, repo_id, private=args.hub_private_repo, token=args.hub_token, card=CardFacts.parse(facts)
        )
        loop.accelerator.print(f"pushed: {url}")
    except (OSError, ValueError) as error:
        print(
            f"warning: the push to {repo_id} failed ({error}); the model is whole in {loop.folder}: "
            f'push_to_hub({type(pipeline).__name__}.from_pretrained("{loop.folder}"), "{repo_id}") tries again',
            file=sys.stderr,
        )
