"""
`scalelong demo` trains the same small, deep U-ViT with two starts of its skip layers, and compares them on a page.

All settings are fixed in this file. Both runs have the same seed, data and number of steps and differ only in RUNS.
They train at the same time, each with one thread.
"""

import argparse
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from scalelong_diffusers.cli.demo_page import Frame, Run, build_page
from scalelong_diffusers.cli.demo_picture import draw_film
from scalelong_diffusers.data import COLORS, SHAPE_CLASSES, SHAPES, recognize
from scalelong_diffusers.data.shapes import Drawing
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.experiments.results import machine
from scalelong_diffusers.experiments.trainings import exit_on_signals, read_log
from scalelong_diffusers.files import PARTIAL, read_json_file
from scalelong_diffusers.locks import LOCK_FILE, locked
from scalelong_diffusers.pipelines.grids import cut_grid, draw_grid
from scalelong_diffusers.terminal import print_lines


# Everything in which the two runs differ: flags of the training script and fields of the model's config.
RUNS = {
    "plain": {
        "label": "plain U-ViT",
        "flags": {"learning_rate": 4e-3, "skip_init": "reference"},
        "model": {"block_scale": 1.0},
    },
    "residual": {
        "label": "residual start",
        "flags": {"learning_rate": 8e-3, "skip_init": "sum", "skip_lr_scale": 0.1},
        "model": {"block_scale": "rezero"},
    },
}
STEPS, QUICK_STEPS = 2400, 150
# The ratio of steps by seed, from pilot runs with these settings. Others tried the rates 2e-3 and 8e-3 for the plain
# run, and 4e-3 and 1.6e-2 for the other one.
PILOT = {0: STEPS / 960, 1: STEPS / 1320, 2: STEPS / 1140}
MODEL = {
    "sample_size": 16,
    "patch_size": 2,
    "hidden_size": 64,
    "num_layers": 12,
    "num_attention_heads": 4,
    "mlp_ratio": 2.0,
    "num_class_embeds": len(SHAPE_CLASSES) + 1,
}
# The scripts read class folders in this order.
CLASSES = sorted(SHAPE_CLASSES)
NUM_IMAGES = 6000
TRAINING = {
    "seed": 0,
    "resolution": 16,
    "train_batch_size": 32,
    "skip_scaling": "none",
    # The model learns to draw fastest if it predicts the clean image and the loss is weighted by the SNR.
    "prediction_type": "sample",
    "snr_gamma": 1,
    "ddpm_beta_schedule": "squaredcos_cap_v2",
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 100,
    "adam_beta2": 0.99,
    "adam_weight_decay": 0.03,
    "max_grad_norm": 1.0,
    "ema_decay": 0.998,
    "class_dropout": 0.1,
    "logging_steps": 10,
}
FILM = "samples.png"
SAMPLES = 4 * len(CLASSES)
SAMPLING = {"scheduler": "dpm++", "steps": 25, "guidance": 2.0, "seed": 0, "batch_size": 30}


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "demo",
        help="train a small U-ViT with two starts of its skip layers, and compare them",
        description=(
            "Train a small U-ViT twice, plain and with the residual start, to draw shapes in colors, and write a page "
            "that compares the two runs. If interrupted, run the same command again to resume."
        ),
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help=f"train {QUICK_STEPS} steps, just to see that it works")
    length.add_argument("--steps", type=int, default=STEPS, help="steps of each run (default: %(default)s)")
    parser.add_argument(
        "--output_dir", type=Path, metavar="DIR", help="folder (default: runs/demo, or runs/demo-STEPS)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    steps = QUICK_STEPS if arguments.quick else arguments.steps
    least, most = TRAINING["logging_steps"], 1_000_000
    if not least <= steps <= most:
        raise UserError(f"steps must be at least {least} and at most {most:,}, got {steps}")
    default = Path("runs", "demo" if steps == STEPS else f"demo-{steps}")
    folder = (arguments.output_dir or default).resolve()
    exit_on_signals()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --output_dir {folder}: {error}") from error
    page = folder / "index.html"
    with locked(folder):
        train(folder, steps)
        runs = [finish_run(folder / name, steps) for name in RUNS]
        settings = {"model": f"UViTModel({_joined(MODEL)})", "max_train_steps": steps, **TRAINING}
        settings |= {"sampling": _joined(SAMPLING), "evaluated images": SAMPLES}
        content = build_page(runs, settings, {**machine(), "threads": "1 per run"}, PILOT, full_steps=STEPS)
        page.write_text(content, encoding="utf-8")
        (folder / FILM).write_bytes(draw_film(runs))
    print_lines(f"samples during training: {folder / FILM}", f"open {page.as_uri()}")
    return 0


# Training


def draw_images(folder: Path):
    """Write the dataset: a folder per class."""
    if folder.exists():
        return
    partial = folder.with_name("data.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for number in range(NUM_IMAGES):
        drawing = easier(Drawing.from_number(number))
        file = partial / f"{drawing.color} {drawing.shape}" / f"{number:05d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawing.paint(MODEL["sample_size"])).save(file)
    partial.rename(folder)


def easier(drawing: Drawing) -> Drawing:
    """
    Return the drawing with a large, upright shape near the middle.

    A small U-ViT learns these in minutes. The package's built-in shapes vary more and would take it much longer.
    """
    x, y = (0.5 + (c - 0.5) / 8 for c in drawing.center)
    return dataclasses.replace(drawing, center=(x, y), radius=0.27 + 0.375 * drawing.radius, angle=0.0)


def train(folder: Path, steps: int):
    """Train the models at the same time, resume their interrupted runs, and keep their finished runs."""
    commands = {name: training_command(folder / name, steps) for name in RUNS}
    waiting = {name: command for name, command in commands.items() if command is not None}
    if not waiting:
        return
    draw_images(folder / "data")
    print_lines(f"training {len(waiting)} of {len(RUNS)} models; their output is in {folder}/*.log")
    processes = {}
    with stopped_on_errors(processes):
        for name, command in waiting.items():
            processes[name] = start_training(command, _log_file(folder / name))
        watch(processes, folder, steps)


def watch(processes: dict[str, subprocess.Popen], folder: Path, steps: int):
    """Show the progress of trainings until all of them have ended."""
    with progress_bars([folder / name for name in processes], steps) as bars:
        is_running = True
        while is_running:
            time.sleep(0.5)
            is_running = any(process.poll() is None for process in processes.values())
            for bar, (name, process) in zip(bars, processes.items()):
                show_progress(bar, read_log(folder / name))
                check_exit(folder / name, process)


def training_command(folder: Path, steps: int) -> list[str] | None:
    """Prepare the folder of a run and return the command that trains it, or None if it has finished."""
    run = RUNS[folder.name]
    settings = {
        "train_data_dir": str(folder.parent / "data"),
        **TRAINING,
        **run["flags"],
        "max_train_steps": steps,
        "validation_steps": max(10, steps // 40),
        "checkpointing_steps": max(1, steps // 4),
        "sample_steps": film_steps(steps)[0],
        "num_samples": len(CLASSES),
        "num_inference_steps": SAMPLING["steps"],
        "guidance_scale": SAMPLING["guidance"],
    }
    config = folder.with_suffix(".json")
    model = json.dumps({"_class_name": "UViTModel", **MODEL, **run["model"]})
    has_same_model = config.exists() and config.read_text() == model
    has_same_settings = has_same_model and _read_settings(folder).items() >= settings.items()
    if has_same_settings and (folder / "model_index.json").exists():
        return None
    if folder.exists() and not (has_same_settings and any(folder.glob("checkpoint-*"))):
        if not _is_run_without_checkpoint(folder):
            raise UserError(f"{folder} contains other files: pass another --output_dir, or delete it")
        with locked(folder):  # its training may have survived the demo
            shutil.rmtree(folder)
    config.write_text(model)
    paths = {"output_dir": folder, "model_config_name_or_path": config, "checkpoints_total_limit": 1}
    resume = {"resume_from_checkpoint": "latest"} if folder.exists() else {}
    flags = [f"--{name}={value}" for name, value in {**settings, **paths, **resume}.items()]
    return [sys.executable, "-m", "scalelong_diffusers.train.train_class_conditional", *flags]


def start_training(command: list[str], log: Path) -> subprocess.Popen:
    """Start a training with one thread, so that two of them do not slow each other down on two cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(log, "w") as errors:
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )


@contextmanager
def stopped_on_errors(processes: dict[str, subprocess.Popen]) -> Iterator[None]:
    """Stop the processes if the block raises. Ctrl-C reaches only the demo: each process has its own session."""
    try:
        yield
    except BaseException:
        for process in processes.values():
            process.terminate()  # a training saves a checkpoint
        for process in processes.values():
            process.wait()
        raise


@contextmanager
def progress_bars(folders: list[Path], steps: int) -> Iterator[list[tqdm]]:
    """Show a progress bar per run, below each other."""
    width = max(len(run["label"]) for run in RUNS.values())
    layout = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}]{postfix}"
    bars = [
        tqdm(
            desc=RUNS[folder.name]["label"].ljust(width),
            total=steps,
            initial=_last_step(read_log(folder)),
            position=position,
            bar_format=layout,
        )
        for position, folder in enumerate(folders)
    ]
    try:
        yield bars
    finally:
        for bar in bars:  # from the top, so that the lines stay in order
            bar.close()


def show_progress(bar: tqdm, metrics: list[dict[str, Any]]):
    """Update a progress bar to the last line of a run's log."""
    losses = [line["validation_loss"] for line in metrics if line.get("validation_loss") is not None]
    if losses:
        bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
    bar.update(_last_step(metrics) - bar.n)


def check_exit(folder: Path, process: subprocess.Popen):
    """Exit if a training has failed, unless it diverged."""
    if process.poll() and not has_diverged(folder):
        sys.exit(f"scalelong: the training in {folder} failed: {_last_message(folder)}")


def has_diverged(folder: Path) -> bool:
    """Return whether the training stopped because its loss or its weights were not finite."""
    return not (folder / "model_index.json").exists() and "finite" in _last_message(folder)


# Results


def finish_run(folder: Path, steps: int) -> Run:
    """Sample the trained model, unless it diverged, and collect everything that the page shows of the run."""
    run = RUNS[folder.name]
    images = folder / "images"
    numbers = () if has_diverged(folder) else range(SAMPLES)
    if numbers:
        print_lines(f"sampling the {run['label']}")
        sample(folder, images)
    samples = [(CLASSES[k % len(CLASSES)], images / f"{k:06d}.png") for k in numbers]
    return Run(
        label=run["label"],
        differences={**run["flags"], **run["model"]},
        metrics=read_log(folder),
        film=[read_frame(folder, step) for step in film_steps(steps)],
        images=[(wanted, file.read_bytes(), recognize_class(Image.open(file))) for wanted, file in samples],
    )


def sample(folder: Path, images: Path):
    """Make the images that are missing, and show the progress bar of the command, but not its other output."""
    flags = [f"--{name}={value}" for name, value in SAMPLING.items()]
    paths = [str(folder), "--out", str(images)]
    command = [sys.executable, "-m", "scalelong_diffusers.cli", "sample", *paths, "-n", str(SAMPLES), *flags]
    processes = {}
    with stopped_on_errors(processes):
        processes["sample"] = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        code = processes["sample"].wait()
    if code:
        sys.exit(code)


def film_steps(steps: int) -> list[int]:
    """Return the steps of the film strip: the quarters of the training."""
    return [*(part * (steps // 4) for part in (1, 2, 3)), steps]


def read_frame(folder: Path, step: int) -> Frame:
    """Read the sample grid of a step, with the colors as columns and the shapes as rows."""
    file = folder / "samples" / f"step-{step:06d}.png"
    if not file.exists():  # the model made no finite images
        return Frame(step, None, 0)
    with Image.open(file) as picture:
        images = dict(zip(CLASSES, cut_grid(picture, (MODEL["sample_size"],) * 2, has_titles=True)))
    png = io.BytesIO()
    ordered = [images[f"{color} {shape}"] for shape in SHAPES for color in COLORS]
    draw_grid(ordered, columns=len(COLORS)).save(png, format="PNG")
    return Frame(step, png.getvalue(), sum(recognize_class(image) == wanted for wanted, image in images.items()))


def recognize_class(image: Image.Image) -> str:
    """Return the class that an image shows, judged by its pixels."""
    found = recognize(image.convert("RGB"))
    if found is None:
        return "nothing"
    color, shape = found
    return f"{color} {shape or 'something'}"


def _is_run_without_checkpoint(folder: Path) -> bool:
    """Return whether a folder is empty or has only what a training writes before its first checkpoint."""
    names = {path.name for path in folder.iterdir() if path.name != LOCK_FILE and not path.name.startswith(PARTIAL)}
    return not names or {"settings.json"} <= names <= {"settings.json", "metrics.jsonl", "samples", "unfinished"}


def _read_settings(folder: Path) -> dict[str, Any]:
    file = folder / "settings.json"
    return read_json_file(file) if file.exists() else {}


def _last_step(metrics: list[dict[str, Any]]) -> int:
    return metrics[-1]["step"] if metrics else 0


def _log_file(folder: Path) -> Path:
    return folder.with_suffix(".log")


def _last_message(folder: Path) -> str:
    lines = _log_file(folder).read_text().strip().splitlines()
    return lines[-1] if lines else "no message"


def _joined(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
