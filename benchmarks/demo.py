"""
Train the same small, deep U-ViT with and without skip scaling, and write a page that compares the runs (`make demo`).

    python benchmarks/demo.py [--quick | --steps N] [--folder runs/demo]

All settings are fixed in this file. Both runs have the same seed, data, learning rate and number of steps and differ
only in `--skip_scaling`. To resume after an interruption, run the same command again.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo_page import Run, build_page
from measure import exit_on_signals, machine
from PIL import Image

from scalelong_diffusers import UViTModel, load_pipeline, skip_connections
from scalelong_diffusers.data import SHAPE_CLASSES, recognize


MODEL = {"sample_size": 16, "patch_size": 4, "hidden_size": 64, "num_layers": 20, "num_attention_heads": 4}
TRAINING = {
    "seed": 0,
    "resolution": 16,
    "train_batch_size": 32,
    # The model learns to draw fastest if it predicts the clean image and the loss is weighted by the SNR.
    "prediction_type": "sample",
    "snr_gamma": 1,
    "ddpm_beta_schedule": "squaredcos_cap_v2",
    "learning_rate": 1e-3,
    "lr_warmup_steps": 100,
    "adam_weight_decay": 0.03,
    "max_grad_norm": 1.0,
    "ema_decay": 0.995,
    "class_dropout": 0.1,
    "logging_steps": 10,
}
STEPS, QUICK_STEPS = 3000, 300
# The difference between the runs, and their labels on the page.
RUNS = {"none": "without scaling", "cs": "with CS"}
SAMPLES = 4 * len(SHAPE_CLASSES)
SAMPLING = {"scheduler": "dpm++", "steps": 25, "guidance": 2.0, "seed": 0, "batch_size": 30}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags and choose the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--quick",
        action="store_const",
        dest="steps",
        const=QUICK_STEPS,
        help=f"train {QUICK_STEPS} steps, just to see that it works",
    )
    length.add_argument("--steps", type=int, help=f"steps of each run, at least 10 (default: {STEPS})")
    parser.add_argument("--folder", type=Path, help="output folder (default: runs/demo, or runs/demo-N for N steps)")
    parser.set_defaults(steps=STEPS)
    arguments = parser.parse_args(argv)
    if arguments.steps < TRAINING["logging_steps"]:
        parser.error(f"--steps must be at least {TRAINING['logging_steps']}, got {arguments.steps}")
    if arguments.folder is None:
        arguments.folder = Path("runs", "demo" if arguments.steps == STEPS else f"demo-{arguments.steps}")
    return arguments


def main():
    arguments = parse_args()
    exit_on_signals()
    folder = arguments.folder.resolve()
    steps = arguments.steps
    try:
        folder.mkdir(parents=True, exist_ok=True)
        runs = [make_run(folder / method, method, label, steps) for method, label in RUNS.items()]
    except KeyboardInterrupt:
        print("demo: interrupted; run the same command again to resume", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except FileExistsError:
        sys.exit(f"demo: {folder} is a file: pass another --folder")
    settings = {"model": f"UViTModel({_joined(MODEL)})", "max_train_steps": steps, **TRAINING}
    settings |= {"sampling": _joined(SAMPLING), "evaluated images": SAMPLES}
    page = folder / "index.html"
    page.write_text(build_page(runs, settings, machine(), full_steps=STEPS), encoding="utf-8")
    print(f"open {page.as_uri()}")


def make_run(folder: Path, method: str, label: str, steps: int) -> Run:
    """Train and sample one of the two models."""
    train(folder, method, label, steps)
    images = folder / "images"
    report(f"sampling the model {label}")
    sampling = [f"--{name}={value}" for name, value in SAMPLING.items()]
    call("scalelong_diffusers.cli", "sample", folder, "--out", images, "-n", SAMPLES, *sampling)
    samples = [(SHAPE_CLASSES[k % len(SHAPE_CLASSES)], images / f"{k:06d}.png") for k in range(SAMPLES)]
    return Run(
        label=label,
        metrics=[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        skips=skip_connections(load_pipeline(folder)),
        images=[(wanted, file.read_bytes(), recognize_class(file)) for wanted, file in samples],
    )


def train(folder: Path, method: str, label: str, steps: int):
    """Train a model, resume its interrupted run, or keep its finished run."""
    settings = {
        **TRAINING,
        "max_train_steps": steps,
        "validation_steps": max(10, steps // 20),
        "checkpointing_steps": max(1, steps // 4),
    }
    has_same_settings = _read_settings(folder).items() >= settings.items()
    if has_same_settings and (folder / "model_index.json").exists():
        return
    if folder.exists() and not (has_same_settings and any(folder.glob("checkpoint-*"))):
        if any(folder.iterdir()) and not _has_run_without_checkpoint(folder):
            sys.exit(f"demo: {folder} contains other files: pass another --folder, or delete it")
        shutil.rmtree(folder)
    config = folder.parent / "model.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    UViTModel(**MODEL, num_class_embeds=len(SHAPE_CLASSES) + 1).to_json_file(config)
    report(f"training the model {label}")
    flags = {"output_dir": folder, "model_config_name_or_path": config, "skip_scaling": method, "sample_steps": 0}
    arguments = [f"--{name}={value}" for name, value in {**settings, **flags}.items()]
    if folder.exists():
        arguments.append("--resume_from_checkpoint=latest")
    call("scalelong_diffusers.train.train_class_conditional", *arguments, "--checkpoints_total_limit=1")


def recognize_class(file: Path) -> str:
    """Return the class that an image shows, judged by its pixels."""
    with Image.open(file) as image:
        found = recognize(image.convert("RGB"))
    if found is None:
        return "nothing"
    color, shape = found
    return f"{color} {shape or 'something'}"


def call(module: str, *arguments: Any):
    """Run a command of the package and show its progress bar, but not its other output."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    # Ctrl-C reaches only the demo, which stops the command. During imports Python would print a traceback.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()  # it saves a checkpoint
        process.wait()
        raise
    if code:
        sys.exit(code)


def report(message: str):
    """Print a line immediately."""
    print(message, flush=True)


def _has_run_without_checkpoint(folder: Path) -> bool:
    saved = [*folder.glob("checkpoint-*"), *folder.glob("model_index.json")]
    return bool(_read_settings(folder)) and not saved


def _read_settings(folder: Path) -> dict[str, Any]:
    file = folder / "settings.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _joined(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


if __name__ == "__main__":
    main()
