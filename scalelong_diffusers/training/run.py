"""The beginning and the end of a run: its folder, its settings, and the pipeline that it leaves behind."""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import ProjectConfiguration
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from transformers.utils import logging as transformers_logging

from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.hub.adapters import LORA_FILE, SCALING_FILE, save_adapter
from scalelong_diffusers.hub.model_card import CardFacts
from scalelong_diffusers.hub.sharing import push_adapter, push_to_hub
from scalelong_diffusers.training.checkpoints import Checkpoints, replace_folder
from scalelong_diffusers.training.loop import TrainingLoop, TrainingStopped, on_main_process


def run_script(main: Callable[[], None]):
    """Run a training script's `main`; a run that can not begin or go on ends in one line on stderr, and exit code."""
    try:
        main()
        return
    except TrainingStopped as error:
        stopped = error
    except UserError as error:
        stopped = TrainingStopped(str(error), exit_code=2, shared=True)
    except KeyboardInterrupt:
        message = (
            "interrupted at once; --resume_from_checkpoint latest goes on from the last checkpoint, if there is one"
        )
        stopped = TrainingStopped(message, exit_code=130)
    # What all processes say is said once on each machine.
    if not stopped.shared or os.environ.get("LOCAL_RANK", "0") == "0":
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
        raise TrainingStopped(" ".join(str(error).split()), exit_code=2, shared=True) from error
    except KeyboardInterrupt as error:
        raise TrainingStopped(interrupted, exit_code=130) from error


def start(args: argparse.Namespace) -> Accelerator:
    """The accelerator, once it is known that the output folder can be written and holds no other run."""
    folder = Path(args.output_dir)
    _check_tracker(args.report_to)
    # For each pipeline and text encoder that is read or written: what ends a run is to stand alone on stderr.
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=None if args.report_to == "none" else args.report_to,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=folder / args.logging_dir),
    )
    check_processes(accelerator)
    # accelerate may have been told by its launcher or its config file, too.
    args.mixed_precision = accelerator.mixed_precision
    if accelerator.gradient_accumulation_steps != args.gradient_accumulation_steps:
        raise ValueError(
            f"accelerate is set up for {accelerator.gradient_accumulation_steps} accumulations, and "
            f"--gradient_accumulation_steps is {args.gradient_accumulation_steps}: give the same"
        )
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


def save_pipeline(loop: TrainingLoop, pipeline: DiffusionPipeline, card: dict[str, Any] | None = None):
    """
    Save the pipeline with the averaged weights into the run's folder, and push it, if that is asked for.

    `card` are fields of a `CardFacts` that the run does not know itself.
    """
    load = f'{type(pipeline).__name__}.from_pretrained("{loop.folder}")'
    again = f'push_to_hub({load}, "{_repo_id(loop)}")'
    _save_and_push(loop, pipeline.save_pretrained, load, partial(push_to_hub, pipeline), again, card or {})


def save_adapter_alone(
    loop: TrainingLoop, pipeline: DiffusionPipeline, base_model: str, card: dict[str, Any] | None = None
):
    """Save and push the LoRA and the scaling of the pipeline's U-Net, which are loaded into `base_model`."""
    load = f'load_adapter(pipe, "{loop.folder}")'
    again = f'push_adapter({load}, "{_repo_id(loop)}", "{base_model}")'
    push = partial(push_adapter, pipeline, base_model=base_model)
    _save_and_push(loop, partial(save_adapter, pipeline), load, push, again, card or {})


def _save_and_push(
    loop: TrainingLoop,
    save: Callable[[Path], None],
    load: str,
    push: Callable[..., str],
    again: str,
    card: dict[str, Any],
):
    """
    `push` takes a repository and the options of `push_to_hub`. `load` and `again` are code to be shown, that loads
    what is saved and that tries the push once more.
    """
    with loop.evaluating():
        loop.write("the pipeline", lambda: _save_into(save, loop.folder))
        loop.accelerator.print(f"saved: {load}")
        is_main_process = loop.accelerator.is_main_process
        # Before the push, for which the others would wait, and in the end no longer.
        loop.finish()
        if loop.args.push_to_hub and is_main_process:
            _push(loop, push, again, card)


def _repo_id(loop: TrainingLoop) -> str:
    return loop.args.hub_model_id or loop.folder.resolve().name


def _check_tracker(name: str):
    if name in ("none", "all"):
        return
    if name not in LOGGER_TYPE_TO_CLASS:
        accepted = ["none", "all", *LOGGER_TYPE_TO_CLASS]
        raise ValueError(
            f"--report_to {name} is unknown{did_you_mean(name, accepted)}; accepted: {', '.join(accepted)}"
        )
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
        _try_to_write(folder)
    except OSError as error:
        raise OSError(f"--output_dir {folder} can not be written: {error}") from error
    checkpoints = Checkpoints(folder)
    checkpoints.remove_leftovers()
    if args.resume_from_checkpoint is not None:
        return
    # A run that ended before its first checkpoint has nothing to be lost.
    if checkpoints.steps():
        raise ValueError(
            f"--output_dir {folder} holds another run: go on with it by --resume_from_checkpoint latest, or give "
            "another folder"
        )
    indices = {DiffusionPipeline.config_name: "a pipeline", SCALING_FILE: "an adapter", LORA_FILE: "an adapter"}
    for name, what in indices.items():
        if (folder / name).exists():
            raise ValueError(f"--output_dir {folder} holds {what}: give another folder")


def _try_to_write(folder: Path):
    """What is made for it is removed again: a run that is refused leaves nothing behind."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    finally:
        for path in made:
            with suppress(OSError):  # another run may have begun in the same parent
                path.rmdir()


def _save_into(save: Callable[[Path], None], folder: Path):
    """Saved aside and moved, the index of a pipeline last: an index names what is there."""
    aside = folder / ".partial-pipeline"
    try:
        save(aside)
        for path in sorted(aside.iterdir(), key=lambda path: path.name == DiffusionPipeline.config_name):
            if path.is_dir():
                replace_folder(path, folder / path.name)
            else:
                os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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
        print(f"pushed: {url}")
    except (OSError, ValueError) as error:
        print(
            f"warning: the push to {_repo_id(loop)} failed ({error}); the model is whole in {loop.folder}: {again} "
            "tries again",
            file=sys.stderr,
        )
