"""
`make demo`: the same small, deep U-ViT trained twice, with and without skip scaling, and a page that compares them.

    python benchmarks/demo.py [--quick | --steps N] [--folder runs/demo]

Everything is fixed here, before the first run: both runs have the same seed, data, rate and number of steps, and
differ in `--skip_scaling` alone. Interrupted, the same command goes on.
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

from demo_page import Run, page_of
from measure import exit_when_told, machine
from PIL import Image

from scalelong_diffusers import UViTModel, load_pipeline, skip_connections
from scalelong_diffusers.data import SHAPE_CLASSES, recognize


MODEL = {"sample_size": 16, "patch_size": 4, "hidden_size": 64, "num_layers": 20, "num_attention_heads": 4}
TRAINING = {
    "seed": 0,
    "resolution": 16,
    "train_batch_size": 32,
    # What learns to draw soonest: the clean image is predicted, its loss weighted by the SNR.
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
# What differs, and what the page calls it.
RUNS = {"none": "without scaling", "cs": "with CS"}
SAMPLES = 4 * len(SHAPE_CLASSES)
SAMPLING = {"scheduler": "dpm++", "steps": 25, "guidance": 2.0, "seed": 0, "batch_size": 30}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_const", dest="steps", const=QUICK_STEPS, help=f"{QUICK_STEPS} steps")
    length.add_argument("--steps", type=int, help=f"of each training, 10 or more (default {STEPS})")
    parser.add_argument("--folder", type=Path, help="runs/demo by default, and runs/demo-N for N steps")
    parser.set_defaults(steps=STEPS)
    arguments = parser.parse_args(argv)
    if arguments.steps < TRAINING["logging_steps"]:
        parser.error(f"--steps must be at least {TRAINING['logging_steps']}, got {arguments.steps}")
    if arguments.folder is None:
        arguments.folder = Path("runs", "demo" if arguments.steps == STEPS else f"demo-{arguments.steps}")
    return arguments


def main():
    arguments = parse_args()
    exit_when_told()
    folder = arguments.folder.resolve()
    steps = arguments.steps
    try:
        folder.mkdir(parents=True, exist_ok=True)
        runs = [make_run(folder / method, method, label, steps) for method, label in RUNS.items()]
    except KeyboardInterrupt:
        print("demo: interrupted; the same command goes on", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except FileExistsError:
        sys.exit(f"demo: {folder} is a file: give another --folder")
    settings = {"model": f"UViTModel({_words(MODEL)})", "max_train_steps": steps, **TRAINING}
    settings |= {"sampling": _words(SAMPLING), "images measured": SAMPLES}
    page = folder / "index.html"
    page.write_text(page_of(runs, settings, machine(), steps_of_whole_demo=STEPS), encoding="utf-8")
    print(f"open {page.as_uri()}")


def make_run(folder: Path, method: str, label: str, steps: int) -> Run:
    train(folder, method, label, steps)
    images = folder / "images"
    say(f"sampling the model {label}")
    sampling = [f"--{name}={value}" for name, value in SAMPLING.items()]
    call("scalelong_diffusers.cli", "sample", folder, "--out", images, "-n", SAMPLES, *sampling)
    drawn = [(SHAPE_CLASSES[k % len(SHAPE_CLASSES)], images / f"{k:06d}.png") for k in range(SAMPLES)]
    return Run(
        label=label,
        metrics=[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        skips=skip_connections(load_pipeline(folder)),
        images=[(asked, file.read_bytes(), read(file)) for asked, file in drawn],
    )


def train(folder: Path, method: str, label: str, steps: int):
    """Train, go on where it was interrupted, or leave a run that is finished as it is."""
    settings = {
        **TRAINING,
        "max_train_steps": steps,
        "validation_steps": max(10, steps // 20),
        "checkpointing_steps": max(1, steps // 4),
    }
    if (folder / "model_index.json").exists() and _settings_of(folder).items() >= settings.items():
        return
    is_same_run = _settings_of(folder).items() >= settings.items() and any(folder.glob("checkpoint-*"))
    if folder.exists() and not is_same_run:
        if any(folder.iterdir()) and not _ended_before_its_first_checkpoint(folder):
            sys.exit(f"demo: {folder} holds something else: give another --folder, or delete it")
        shutil.rmtree(folder)
    config = folder.parent / "model.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    UViTModel(**MODEL, num_class_embeds=len(SHAPE_CLASSES) + 1).to_json_file(config)
    say(f"training the model {label}")
    flags = {"output_dir": folder, "model_config_name_or_path": config, "skip_scaling": method, "sample_steps": 0}
    words = [f"--{name}={value}" for name, value in {**settings, **flags}.items()]
    if folder.exists():
        words.append("--resume_from_checkpoint=latest")
    call("scalelong_diffusers.train.train_class_conditional", *words, "--checkpoints_total_limit=1")


def read(file: Path) -> str:
    """What an image shows, from its pixels."""
    with Image.open(file) as image:
        found = recognize(image.convert("RGB"))
    if found is None:
        return "nothing"
    colour, shape = found
    return f"{colour} {shape or 'something'}"


def call(module: str, *words: Any):
    """Run a command of the package; its progress is shown, what it prints beside is not."""
    command = [sys.executable, "-m", module, *map(str, words)]
    # Ctrl-C is for the demo, which ends it: also while it still imports, when Python would show where.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()  # and it saves what it has
        process.wait()
        raise
    if code:
        sys.exit(code)


def say(what: str):
    print(what, flush=True)


def _ended_before_its_first_checkpoint(folder: Path) -> bool:
    saved = [*folder.glob("checkpoint-*"), *folder.glob("model_index.json")]
    return bool(_settings_of(folder)) and not saved


def _settings_of(folder: Path) -> dict[str, Any]:
    file = folder / "settings.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _words(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


if __name__ == "__main__":
    main()
