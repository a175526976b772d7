"""Save the pipeline or adapter of a finished run in its folder, and push it to the Hub."""

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusers import DiffusionPipeline

from scalelong_diffusers.files import PARTIAL
from scalelong_diffusers.hub import adapters
from scalelong_diffusers.hub.model_card import last_samples, training_facts
from scalelong_diffusers.hub.sharing import create_repository, push_adapter, push_to_hub
from scalelong_diffusers.processes import run_on_main_process
from scalelong_diffusers.training.checkpoints import replace_folder
from scalelong_diffusers.training.script import TrainingStopped
from scalelong_diffusers.training.unfinished import PARTS_FOLDER


if TYPE_CHECKING:
    from scalelong_diffusers.training.run import TrainingRun


def save_pipeline(run: "TrainingRun", pipeline: DiffusionPipeline, card: Mapping[str, Any]):
    """Save and push a pipeline with EMA weights."""
    load = f'{type(pipeline).__name__}.from_pretrained("{run.folder}")'
    push_again = f'push_to_hub({load}, "{run.config.output.repo_id}")'
    _save_and_push(run, pipeline.save_pretrained, load, partial(push_to_hub, pipeline), push_again, card)


def save_adapter(run: "TrainingRun", pipeline: DiffusionPipeline, base_model: str):
    """Save and push the LoRA and the skip scaling of the pipeline's U-Net."""
    load = f'load_adapter(pipe, "{run.folder}")'
    push_again = f'push_adapter({load}, "{run.config.output.repo_id}", "{base_model}")'
    push = partial(push_adapter, pipeline, base_model=base_model)
    _save_and_push(run, partial(adapters.save_adapter, pipeline), load, push, push_again, {})


def _save_and_push(
    run: "TrainingRun",
    save: Callable[[Path], None],
    load: str,
    push: Callable[..., str],
    push_again: str,
    card: Mapping[str, Any],
):
    """
    Save, print how to load the result, and push.

    Args:
        load: code that loads the result, for the message.
        push_again: code that repeats a failed push, for the message.
    """
    with run.evaluating():
        run.write("the pipeline", lambda: _save_into(save, run.folder))
        run.print(f"saved: {load}")
        is_main_process = run.accelerator.is_main_process
        # The other processes do not wait for the push.
        run.finish()
        if run.config.output.push_to_hub and is_main_process:
            _push(run, push, push_again, card)


def _save_into(save: Callable[[Path], None], folder: Path):
    """Save into a temporary folder and move its content. The index comes last: it must not name missing folders."""
    aside = folder / f"{PARTIAL}pipeline"
    try:
        save(aside)
        for path in sorted(aside.iterdir(), key=lambda path: path.name == DiffusionPipeline.config_name):
            if path.is_dir():
                replace_folder(path, folder / path.name)
            else:
                os.replace(path, folder / path.name)
        shutil.rmtree(folder / PARTS_FOLDER, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _push(run: "TrainingRun", push: Callable[..., str], push_again: str, card: Mapping[str, Any]):
    """Push to the Hub. If that fails, the result is already saved."""
    loss = run.metrics.last("validation_loss")
    facts = training_facts(run.settings)
    facts["training"]["steps"] = run.global_step  # the script may have left the loop early
    facts |= {
        "metrics": None if loss is None else {"validation loss (fixed noise, held-out images)": f"{loss:.4f}"},
        "samples": last_samples(run.folder),
        **card,
    }
    output = run.config.output
    try:
        url = push(output.repo_id, private=output.hub_private_repo, card=facts)
        run.print(f"pushed: {url}")
    except (OSError, ValueError) as error:
        raise TrainingStopped(
            f"the push to {output.repo_id} failed ({error}); the model is saved in {run.folder}; to push it again, "
            f"run {push_again}"
        ) from error


def check_repository(run: "TrainingRun"):
    """Create the repository of a run that will be pushed, and check that files can be written to it."""
    output = run.config.output
    if output.push_to_hub:
        run_on_main_process(lambda: create_repository(output.repo_id, output.hub_private_repo))
