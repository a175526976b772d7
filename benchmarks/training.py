"""
Measure the cost of the training loop on top of forward, backward and optimizer step.

    python benchmarks/training.py [--rounds 12] [--only loop|loader|checkpoint|precomputed] [--json]
    python benchmarks/training.py --only published [--batch_size 4] [--mixed_precision bf16] [--json]

- loop: steps of the unconditional script, with data, noise, EMA, clipping and log, against a bare loop of the same
  model and optimizer with a fixed batch and noise, interleaved in one run.
- loader: images read per second without training.
- checkpoint: writing a checkpoint of the U-ViT S/2 of CIFAR-10.
- precomputed: steps from precomputed latents against steps with the autoencoder in the loop.
- published: steps of our script with DDPM's U-Net of CIFAR-10, eager and compiled, against diffusers' script with the
  stock class. It is not part of the others, since compiling takes minutes.
"""

import argparse
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import CLOCK, paired_ratio, paired_times, round_count
from precomputed import measure_precomputed, show_precomputed
from published_script import published_step

from scalelong_diffusers.data import DataConfig, TrainingData, load_training_data
from scalelong_diffusers.experiments.results import machine
from scalelong_diffusers.training import NoiseProcess, TrainingConfig, TrainingRun, make_config


LIMIT = 0.97
BATCH = 32
LOADED = 6_000  # images


def make_run(folder: Path, **options) -> tuple[TrainingRun, NoiseProcess]:
    run = TrainingRun(make_config(TrainingConfig, output_dir=str(folder), max_train_steps=10**6, **options))
    run.load_data()
    with contextlib.redirect_stdout(None):  # it prints the settings
        run.start({"unet": run.build_model()})
    return run, run.noise_process()


def our_step(run: TrainingRun, process: NoiseProcess) -> Callable[[], None]:
    batches = iter(run)

    def step():
        batch = next(batches)
        clean = batch["pixel_values"]
        noise = batch.normal_like(clean, "noise")
        timesteps = process.timesteps(batch.uniform("timestep"))
        prediction = run.models["unet"](process.add_noise(clean, noise, timesteps), timesteps).sample
        run.step(F.mse_loss(prediction, noise, reduction="none").mean(dim=(1, 2, 3)))

    return step


def bare_step(model: torch.nn.Module, data: TrainingData, process: NoiseProcess) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    batch = next(iter(data.train.batches(batch_size=BATCH)))
    noise = torch.randn_like(batch["pixel_values"])
    timesteps = process.timesteps(torch.rand(BATCH))
    noisy = process.add_noise(batch["pixel_values"], noise, timesteps)

    def step():
        F.mse_loss(model(noisy, timesteps).sample, noise).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_loop(rounds: int, folder: Path) -> dict:
    run, process = make_run(folder / "loop", resolution=32, train_batch_size=BATCH)
    steps = {"ours": our_step(run, process), "bare": bare_step(run.build_model(), run.data, process)}
    times = paired_times(steps, rounds)
    throughput = paired_ratio(times["bare"], times["ours"])
    seconds = sorted(times["ours"])[rounds // 2]
    return {"throughput": throughput, "images_per_second": BATCH / seconds}


def measure_loader() -> dict:
    rates = {}
    for resolution, workers in itertools.product((32, 64), (0, 2)):
        settings = DataConfig(resolution=resolution)
        data = load_training_data(settings, channels=3, needs_labels=False, needs_captions=False, seed=0)
        begin = time.perf_counter()
        for _ in data.train.batches(batch_size=BATCH, num_steps=LOADED // BATCH, num_workers=workers):
            pass
        rates[f"{resolution} px, {workers} workers"] = LOADED / (time.perf_counter() - begin)
    return rates


def measure_checkpoint(folder: Path) -> dict:
    options = {"preset": "cifar10-uvit-s-2", "train_batch_size": 8, "checkpoints_total_limit": 1}
    run, process = make_run(folder / "checkpoint", **options)
    step, writing, training = our_step(run, process), [], []
    for _ in range(4):
        begin = time.perf_counter()
        step()
        training.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        run.save_checkpoint()
        writing.append(time.perf_counter() - begin)
    path = run.checkpoints.path(run.global_step)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    every = run.config.output.checkpointing_steps
    return {
        "seconds": min(writing),
        "mebibytes": size / 2**20,
        "step_seconds": min(training),
        f"fraction of a step at one checkpoint per {every} steps": min(writing) / every / min(training),
    }


def measure_published(rounds: int, folder: Path, batch_size: int, **options) -> dict[str, dict]:
    """Return our speed relative to diffusers' script. `options` are flags for all, such as the model."""
    options |= {"train_batch_size": batch_size, "num_shapes": LOADED, "sample_steps": 0}
    runs = {name: make_run(folder / name, compile=name == "compiled", **options) for name in ("eager", "compiled")}
    steps = {"published": published_step(*runs["eager"])} | {name: our_step(*run) for name, run in runs.items()}
    times = paired_times(steps, rounds, clock=CLOCK)
    return {name: paired_ratio(times["published"], times[name]) for name in runs}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=round_count, default=12, help="number of rounds (default: %(default)s)")
    choices = ["loop", "loader", "checkpoint", "precomputed", "published"]
    parser.add_argument("--only", choices=choices, help="run one measurement (default: all but published)")
    parser.add_argument("--batch_size", type=int, default=4, help="for published (default: %(default)s)")
    parser.add_argument(
        "--mixed_precision", choices=["no", "bf16"], default="no", help="for published (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "loop": lambda: measure_loop(arguments.rounds, Path(folder)),
            "loader": measure_loader,
            "checkpoint": lambda: measure_checkpoint(Path(folder)),
            "precomputed": lambda: measure_precomputed(arguments.rounds, Path(folder)),
        }
        if arguments.only == "published":
            options = {"preset": "cifar10-unet", "mixed_precision": arguments.mixed_precision}
            parts = {
                "published": lambda: measure_published(arguments.rounds, Path(folder), arguments.batch_size, **options)
            }
        results = {name: part() for name, part in parts.items() if arguments.only in (None, name)}
    if arguments.json:
        print(json.dumps({"machine": machine(), "batch": BATCH, "results": results}))
        return
    print(", ".join(f"{key} {value}" for key, value in machine().items()) + f", batch {BATCH}")
    if "loop" in results:
        throughput = results["loop"]["throughput"]
        verdict = "ok" if throughput["high"] >= LIMIT else f"below {LIMIT}"
        print("loop: throughput / bare {ratio:.3f} [{low:.3f}, {high:.3f}]".format(**throughput), verdict)
        print(f"      {results['loop']['images_per_second']:.1f} images per second")
    for name in ("loader", "checkpoint"):
        for label, value in results.get(name, {}).items():
            print(f"{name}: {label} {value:.4g}")
    for name, speed in results.get("published", {}).items():
        label = f"published, {arguments.mixed_precision}, batch {arguments.batch_size}"
        print("{label}: {name} speed {ratio:.3f} [{low:.3f}, {high:.3f}]".format(label=label, name=name, **speed))
    if "precomputed" in results:
        show_precomputed(results["precomputed"])


if __name__ == "__main__":
    main()
