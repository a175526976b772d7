"""The commands that the attack kills, and their uninterrupted runs."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
from attack_parts import make_datasets, make_models
from attack_sandbox import WATCH, Command, Main
from safetensors.torch import load_file

from scalelong_diffusers import cli
from scalelong_diffusers.train import (
    finetune_text_to_image,
    precompute_latents,
    train_class_conditional,
    train_text_to_image,
    train_unconditional,
)
from scalelong_diffusers.training import run_script


# 27 training images in steps of 4, so that a run crosses an epoch. Every step is logged.
TRAINING = {
    "num_shapes": 30,
    "resolution": 8,
    "validation_size": 3,
    "train_batch_size": 4,
    "max_train_steps": 9,
    "checkpointing_steps": 2,
    "checkpoints_total_limit": 2,
    "logging_steps": 1,
    "validation_steps": 4,
    "sample_steps": 5,
    "num_samples": 1,
    "num_inference_steps": 1,
    "lr_warmup_steps": 3,
    "learning_rate": 0.01,
}
_PRECOMPUTING = {
    "num_shapes": 30,
    "resolution": 16,
    "center_crop": True,
    "random_flip": True,
    "with_labels": True,
    "batch_size": 4,
    "rows_per_shard": 5,
    "pretrained_vae_model_name_or_path": "{parts}/vae",
    "pretrained_text_encoder_name_or_path": "{parts}/clip",
}


@dataclass(frozen=True)
class Attacked:
    """
    A command that is attacked.

    Args:
        main: its function of the command line.
        flags: its flags, in which `{parts}` and `{output_dir}` are replaced by folders.
        resumes: it is a training, which continues with `--resume_from_checkpoint latest`.
        has_workers: it takes `--dataloader_num_workers`.
        index: file without which it refuses a folder that is not empty.
    """

    main: Main
    flags: Mapping[str, object]
    resumes: bool = False
    has_workers: bool = True
    index: str | None = None

    def words(self, parts: Path, output_dir: Path, processes: int = 1, **changes: object) -> list[str]:
        """Return the command line. Training divides its batch among the processes."""
        flags = {**self.flags, "output_dir": output_dir, **changes}
        if self.resumes:
            flags["train_batch_size"] = flags["train_batch_size"] // processes
        return to_words(flags, parts=parts, output_dir=output_dir)


def to_words(flags: Mapping[str, object], **folders: Path) -> list[str]:
    """Return the words of a command line. `True` turns a switch on. A blank name belongs to a positional argument."""
    words = []
    for name, value in flags.items():
        words += [f"--{name}"] if name.strip() else []
        for folder, path in folders.items():
            value = value.replace(f"{{{folder}}}", str(path)) if isinstance(value, str) else value
        words += [] if value is True else [str(value)]
    return words


def _script(module: ModuleType) -> Main:
    return lambda arguments: run_script(partial(module.main, arguments))


def cli_command(name: str) -> Main:
    """Return the function of a command of `scalelong`."""
    return lambda arguments: cli.main([name, *arguments])


_MODEL = "model_config_name_or_path"
_FINE_TUNING = {**TRAINING, "resolution": 16, "pretrained_model_name_or_path": "{parts}/stable_diffusion"}
_SAMPLING = {"": "{parts}/class_conditional", "num_images": 10, "batch_size": 2, "num_inference_steps": 2}
COMMANDS = {
    "unconditional": Attacked(
        _script(train_unconditional),
        {**TRAINING, _MODEL: "{parts}/model", "ema_snapshot_steps": 3},
        resumes=True,
    ),
    "class_conditional": Attacked(
        _script(train_class_conditional), {**TRAINING, _MODEL: "{parts}/model_of_classes"}, resumes=True
    ),
    "text_to_image": Attacked(
        _script(train_text_to_image), {**TRAINING, _MODEL: "{parts}/model_of_text"}, resumes=True
    ),
    "fine_tuning": Attacked(_script(finetune_text_to_image), _FINE_TUNING, resumes=True),
    "lora": Attacked(_script(finetune_text_to_image), {**_FINE_TUNING, "lora_rank": 2}, resumes=True),
    "precompute": Attacked(_script(precompute_latents), _PRECOMPUTING, index="index.json"),
    "sample": Attacked(cli_command("sample"), _SAMPLING, has_workers=False),
    "evaluate": Attacked(
        cli_command("evaluate"),
        {
            **_SAMPLING,
            "reference": "shapes",
            "num_shapes": 12,
            "features": "{parts}/network",
            "cache_dir": "{output_dir}.cache",
        },
    ),
    "diagnose": Attacked(
        cli_command("diagnose"), {"": "{parts}/model", "num_images": 8, "batch_size": 4}, has_workers=False
    ),
}


def make_parts(folder: Path):
    """Make all models, datasets and finished runs that cases read."""
    WATCH.install()
    make_models(folder)
    make_datasets(folder)
    for name in COMMANDS:
        finished_run(folder, name)
    for name in ("unconditional", "class_conditional", "text_to_image", "fine_tuning"):
        ignored = shutil.ignore_patterns("checkpoint-*", "samples", "metrics.jsonl")
        shutil.copytree(folder / name, folder / "pipelines" / name, ignore=ignored)
    statistics = next((folder / "evaluate.cache" / "statistics").iterdir())
    tensors = load_file(statistics)
    (folder / "statistics").mkdir()
    shutil.copy(statistics, folder / "statistics" / "stored.safetensors")
    np.savez(folder / "statistics" / "published.npz", mu=tensors["mean"].numpy(), sigma=tensors["covariance"].numpy())


@dataclass(frozen=True)
class FinishedRun:
    """An uninterrupted run of a command: its folder, its seconds, and the number of file changes by process."""

    folder: Path
    seconds: float
    changes: list[int]


def finished_run(parts: Path, name: str, processes: int = 1) -> FinishedRun:
    """Return the uninterrupted run of a command, which is made when it is first needed."""
    folder = parts / (name if processes == 1 else f"{name}-{processes}")
    facts = folder.with_suffix(".json")
    with open(folder.with_suffix(".lock"), "w") as lock:  # another case may make the same run
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not facts.exists():
            facts.write_text(json.dumps(_finish_run(parts, COMMANDS[name], folder, processes)))
    return FinishedRun(folder, **json.loads(facts.read_text()))


def _finish_run(parts: Path, attacked: Attacked, folder: Path, processes: int) -> dict[str, object]:
    files = [folder.with_suffix(f".changes-{rank}") for rank in range(processes)]

    def count_changes(words: list[str]):
        WATCH.counted = os.path.realpath(folder)
        try:
            attacked.main(words)
        finally:
            files[int(os.environ.get("RANK", 0))].write_text(str(WATCH.changes))

    started = time.monotonic()
    words = attacked.words(parts, folder, processes)
    command = Command(count_changes, words, folder.with_suffix(".output"), processes)
    if command.finish():
        raise RuntimeError(f"the command fails: {command.text}")
    changes = [int(file.read_text()) for file in files]
    return {"seconds": time.monotonic() - started, "changes": changes}
