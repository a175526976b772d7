"""The beginning and the end of a run: its folder, its settings, and the pipeline that it leaves behind."""

import argparse
import math
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import ProjectConfiguration
from diffusers import DiffusionPipeline
from PIL import Image
from transformers.utils.logging import disable_progress_bar

from scalelong_diffusers.adapters import save_adapter
from scalelong_diffusers.data import TrainingData
from scalelong_diffusers.files import write_json
from scalelong_diffusers.messages import near_miss
from scalelong_diffusers.model_card import CardFacts
from scalelong_diffusers.sharing import push_adapter, push_to_hub
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
    *("validation_prompts", "guidance_scale"),
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
    disable_progress_bar()  # of transformers, for each text encoder that is read or written
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=None if args.report_to == "none" else args.report_to,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=folder / args.logging_dir),
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
    if args.report_to != "none":
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
    again = f'push_to_hub({type(pipeline).__name__}.from_pretrained("{loop.folder}"), "{_repo_id(loop)}")'
    _save_and_push(loop, pipeline.save_pretrained, partial(push_to_hub, pipeline), again, card or {})


def save_adapter_alone(
    loop: TrainingLoop, pipeline: DiffusionPipeline, base_model: str, card: dict[str, Any] | None = None
):
    """Save and push the LoRA and the scaling of the pipeline's U-Net, which are loaded into `base_model`."""
    again = f'push_adapter(load_adapter(pipe, "{loop.folder}"), "{_repo_id(loop)}", "{base_model}")'
    push = partial(push_adapter, pipeline, base_model=base_model)
    _save_and_push(loop, partial(save_adapter, pipeline), push, again, card or {})


def _save_and_push(
    loop: TrainingLoop, save: Callable[[Path], None], push: Callable[..., str], again: str, card: dict[str, Any]
):
    """`push` takes a repository and the options of `push_to_hub`; `again` is the code that would try it again."""
    with loop.evaluating():
        loop.on_main_process(lambda: _save_into(save, loop.folder))
        if loop.args.push_to_hub:
            loop.on_main_process(lambda: _push(loop, push, again, card))
    loop.finish()


def _repo_id(loop: TrainingLoop) -> str:
    return loop.args.hub_model_id or loop.folder.resolve().name


def _check_tracker(name: str):
    if name in ("none", "all"):
        return
    if name not in LOGGER_TYPE_TO_CLASS:
        accepted = ["none", "all", *LOGGER_TYPE_TO_CLASS]
        raise ValueError(f"--report_to {name} is unknown{near_miss(name, accepted)}; accepted: {', '.join(accepted)}")
    if name not in [tracker.value for tracker in get_available_trackers()]:
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


def _save_into(save: Callable[[Path], None], folder: Path):
    """Saved aside and moved, the index of a pipeline last: an index names what is there."""
    aside = folder / ".partial-pipeline"
    save(aside)
    for path in sorted(aside.iterdir(), key=lambda path: path.name == DiffusionPipeline.config_name):
        if path.is_dir():
            replace_folder(path, folder / path.name)
        else:
            os.replace(path, folder / path.name)
    shutil.rmtree(aside)


def _push(loop: TrainingLoop, push: Callable[..., str], again: str, card: dict[str, Any]):
    """A push that fails costs nothing but the push."""
    args = loop.args
    loss = loop.metrics.last("validation_loss")
    grids = sorted((loop.folder / "samples").glob("*.png"))
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
        "samples": Image.open(grids[-1]) if grids else None,
        **card,
    }
    try:
        url = push(_repo_id(loop), private=args.hub_private_repo, token=args.hub_token, card=CardFacts.parse(facts))
        loop.accelerator.print(f"pushed: {url}")
    except (OSError, ValueError) as error:
        print(
            f"warning: the push to {_repo_id(loop)} failed ({error}); the model is whole in {loop.folder}: {again} "
            "tries again",
            file=sys.stderr,
        )
