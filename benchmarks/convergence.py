"""
When is training with scaled skips faster, and by how much?

    python benchmarks/convergence.py [--parts A C D] [--jobs 2] [--data /usr/share/datasets/fashion-mnist]
    python benchmarks/convergence.py --quick      three methods, one seed, 1,000 steps: ten minutes on two cores
    python benchmarks/convergence.py --report     only the tables and the figure, from the lines that are there

The protocol, fixed before the first run:

- Fashion-MNIST, 28 x 28 pixels, from Debian's package dataset-fashion-mnist, a folder or the Hub.
- `train_unconditional.py`: epsilon, linear betas, a U-ViT of 20 layers, width 64, 4 heads, patch 4, batches of 32,
  AdamW with weight decay 0.03, warm-up of 100 steps and a constant rate, clipping at 1.0, 2,000 steps.
- Every 50 steps: the loss of 512 test images with noise and timesteps that stay the same, of the averaged weights
  (decay 0.995, reached by and by as the scripts do it) and of the raw ones. What is reported is that of the averaged
  weights, and that of the raw ones beside it. The final loss is the mean of the last three.
- A target is reached at the first of three evaluations in a row that are all below it. The target is the final loss of
  the plain model, which takes it all 2,000 steps. The result is 2,000 / the method's steps.

Parts:

- A, tuned rates, which is the claim that counts: five rates, one seed, for all methods; then each method at its best
  rate (of the lowest final loss) with seeds 0 to 2. The target is that of the plain model at its best rate with the
  same seed; median and range over the seeds.
- B, equal settings, the paper's protocol: the runs of A at equal rates; the target is that of the plain model there.
- C, one thing changed at a time, at the best rates of A: 12 and 28 layers, batches of 16 and 64; and a small U-Net
  with rates of its own.
- D, what of CS it is: a plain model whose half of `skip_proj` that reads the skip is initialised times k, is trained
  at a rate times k, or both with everything that makes it equal to CS (benchmarks/without_factors.py).

Each run is a process of one thread. Interrupted, the same command goes on. A finished run is a line of
benchmarks/convergence.jsonl, and is not done again.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure import machine


# What each is called, and its flags.
METHODS = {
    "none": ("--skip_scaling=none",),
    "cs 0.9": ("--skip_scaling=cs", "--kappa=0.9"),
    "ls per skip": ("--skip_scaling=ls", "--no-skip_scaling_shared"),
    "inv_sqrt2": ("--skip_scaling=inv_sqrt2",),
    "cs 0.7": ("--skip_scaling=cs", "--kappa=0.7"),
    "ls shared": ("--skip_scaling=ls", "--skip_scaling_shared"),
    "ls per skip, identity": ("--skip_scaling=ls", "--no-skip_scaling_shared", "--skip_scaling_init=identity"),
}
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
SEEDS = (0, 1, 2)
STEPS, QUICK_STEPS = 2_000, 1_000
QUICK_METHODS = ("none", "cs 0.9", "ls per skip")
QUICK_RATE = 1e-3
SIZE = 28
_IMAGES = {"sample_size": SIZE, "in_channels": 1, "out_channels": 1}
_UVIT = {"_class_name": "UViTModel", **_IMAGES, "patch_size": 4, "hidden_size": 64, "num_attention_heads": 4}
MODELS = {
    "uvit-20": {**_UVIT, "num_layers": 20},
    "uvit-12": {**_UVIT, "num_layers": 12},
    "uvit-28": {**_UVIT, "num_layers": 28},
    "unet": {
        "_class_name": "ScaleLongUNet2DModel",
        **_IMAGES,
        "block_out_channels": [32, 32, 64],
        "layers_per_block": 2,
        "norm_num_groups": 16,
        "attention_head_dim": 16,
        "down_block_types": ["DownBlock2D", "DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D", "UpBlock2D"],
    },
}
TRAINING = {
    "resolution": SIZE,
    "lr_warmup_steps": 100,
    "lr_scheduler": "constant_with_warmup",
    "adam_weight_decay": 0.03,
    "max_grad_norm": 1.0,
    "ema_decay": 0.995,
    "validation_size": 512,
    "validation_steps": 50,
    "logging_steps": 10,
    "sample_steps": 0,
    "checkpointing_steps": 500,
    "checkpoints_total_limit": 1,
}
# Gradients are looked at once the steep part is over.
SETTLED = 500


@dataclass(frozen=True)
class Run:
    """`of_cs` is of part D: what stands for the factors."""

    method: str
    learning_rate: float
    seed: int = 0
    model: str = "uvit-20"
    batch_size: int = 32
    steps: int = STEPS
    of_cs: str | None = None

    @property
    def name(self) -> str:
        words = (self.model, self.method, self.of_cs, f"{self.learning_rate:g}", f"batch{self.batch_size}")
        name = "-".join([*filter(None, words), f"seed{self.seed}", f"{self.steps}"])
        return name.replace(" ", "_").replace(",", "")


class Results:
    """The lines of finished runs."""

    def __init__(self, file: Path):
        self.file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.lines = {Run(**line["run"]): line for line in map(json.loads, lines)}

    def add(self, run: Run, figures: dict[str, Any]):
        line = {"run": asdict(run), **figures, "machine": machine()}
        with open(self.file, "a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines[run] = line

    def __contains__(self, run: Run) -> bool:
        return run in self.lines

    def evaluations(self, run: Run, raw: bool = False) -> list[tuple[int, float]]:
        return [(step, losses[raw]) for step, *losses in self.lines[run]["evaluations"]]

    def final_loss(self, run: Run, raw: bool = False) -> float:
        """Infinite for a run that could not go on."""
        if self.lines[run]["stopped"]:
            return float("inf")
        return statistics.mean(loss for _, loss in self.evaluations(run, raw)[-3:])

    def steps_to(self, target: float, run: Run, raw: bool = False) -> int | None:
        """The first of three evaluations in a row that are all below the target."""
        curve = self.evaluations(run, raw)
        for three in zip(curve, curve[1:], curve[2:]):
            if all(loss < target for _, loss in three):
                return three[0][0]
        return None

    def best_rate(self, method: str, model: str = "uvit-20") -> float | None:
        """That of the lowest final loss; None before all rates are there."""
        runs = rates_of(method, model)
        if not all(run in self for run in runs):
            return None
        return min(runs, key=self.final_loss).learning_rate


def rates_of(method: str, model: str = "uvit-20") -> list[Run]:
    return [Run(method, rate, model=model) for rate in RATES]


def seeds_of(method: str, rate: float) -> list[Run]:
    return [Run(method, rate, seed) for seed in SEEDS]


def variations_of(method: str, rate: float) -> dict[str, Run]:
    return {
        "12 layers": Run(method, rate, model="uvit-12"),
        "28 layers": Run(method, rate, model="uvit-28"),
        "batch 16": Run(method, rate, batch_size=16),
        "batch 64": Run(method, rate, batch_size=64),
    }


def without_factors_of(rate: float) -> dict[str, Run]:
    return {of_cs: Run("cs 0.9", rate, of_cs=of_cs) for of_cs in ("init", "rate", "both")}


def runs_of(part: str, results: Results) -> Iterable[Run]:
    """What is to be run, where the best rates that it rests on are known."""
    if part == "quick":
        yield from (Run(method, QUICK_RATE, steps=QUICK_STEPS) for method in QUICK_METHODS)
        return
    best = {method: results.best_rate(method) for method in METHODS}
    known = {method: rate for method, rate in best.items() if rate is not None}
    if part == "A":
        yield from (run for method in METHODS for run in rates_of(method))
        yield from (run for method, rate in known.items() for run in seeds_of(method, rate))
    elif part == "C":
        yield from (run for method, rate in known.items() for run in variations_of(method, rate).values())
        yield from (run for method in METHODS for run in rates_of(method, "unet"))
    elif part == "D" and "cs 0.9" in known:
        yield from without_factors_of(known["cs 0.9"]).values()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("A", "C", "D"), default=["A", "C", "D"])
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS), metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist", help="a folder, or an id on the Hub")
    parser.add_argument("--folder", type=Path, default=Path("runs/convergence"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    quick = arguments.quick
    results = Results(arguments.folder / "quick.jsonl" if quick else Path(__file__).with_suffix(".jsonl"))
    if not arguments.report:
        team = Team(arguments.folder, data_flag(arguments.data, arguments.folder), results, arguments.jobs)
        for part in ["quick"] if quick else arguments.parts:
            # Twice: best rates are known only when all rates are done.
            for _ in range(2):
                team.do([run for run in runs_of(part, results) if run.method in arguments.methods])


def data_flag(data: str, folder: Path) -> str:
    """Debian's files are written anew as the parquet files that a script reads."""
    if not Path(data).is_dir():
        return f"--dataset_name={data}"
    if not list(Path(data).glob("*-images-idx3-ubyte.gz")):
        return f"--train_data_dir={data}"
    import datasets
    import numpy as np
    from PIL import Image

    out = (folder / "fashion-mnist").resolve()
    out.mkdir(exist_ok=True)
    for split, stem in (("train", "train"), ("test", "t10k")):
        file = out / f"{split}.parquet"
        if file.exists():
            continue
        with gzip.open(Path(data, f"{stem}-images-idx3-ubyte.gz")) as images:
            pixels = np.frombuffer(images.read(), np.uint8, offset=16).reshape(-1, SIZE, SIZE)
        columns = {"image": [Image.fromarray(image) for image in pixels]}
        table = datasets.Dataset.from_dict(columns, features=datasets.Features({"image": datasets.Image()}))
        table.to_parquet(file.with_suffix(".partial"))
        file.with_suffix(".partial").rename(file)
    return f"--train_data_dir={out}"


class Team:
    """Some runs at a time, each in a process of its own."""

    def __init__(self, folder: Path, data: str, results: Results, jobs: int):
        self.folder = folder
        self.data = data
        self.results = results
        self.jobs = jobs
        self.processes: dict[Run, subprocess.Popen] = {}
        self.durations: list[float] = []

    def do(self, runs: list[Run]):
        waiting = [run for run in dict.fromkeys(runs) if run not in self.results]
        started = {}
        try:
            while waiting or self.processes:
                while waiting and len(self.processes) < self.jobs:
                    run = waiting.pop(0)
                    started[run] = time.monotonic()
                    self.processes[run] = self._start(run)
                time.sleep(1)
                for run in [run for run, process in self.processes.items() if process.poll() is not None]:
                    self._collect(run, self.processes.pop(run))
                    self.durations.append(time.monotonic() - started[run])
                    self._say(run, len(waiting))
        except BaseException:
            # Each saves a checkpoint, and is gone on with by the same command.
            for process in self.processes.values():
                process.terminate()
                process.wait()
            raise

    def _start(self, run: Run) -> subprocess.Popen:
        folder = self.folder / run.name
        config = self.folder / f"{run.model}.json"
        config.write_text(json.dumps(MODELS[run.model]))
        settings = {
            **TRAINING,
            "output_dir": folder,
            "model_config_name_or_path": config,
            "learning_rate": run.learning_rate,
            "seed": run.seed,
            "train_batch_size": run.batch_size,
            "max_train_steps": run.steps,
        }
        words = [self.data, *METHODS[run.method], *(f"--{name}={value}" for name, value in settings.items())]
        if any(folder.glob("checkpoint-*")):
            words.append("--resume_from_checkpoint=latest")
        script = ["-m", "scalelong_diffusers.train.train_unconditional"]
        if run.of_cs is not None:
            script = [str(Path(__file__).with_name("without_factors.py")), f"--of_cs={run.of_cs}"]
        return subprocess.Popen(
            [sys.executable, *script, *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=open(self._errors(run), "w"),
            start_new_session=True,
        )

    def _errors(self, run: Run) -> Path:
        return self.folder / f"{run.name}.log"

    def _collect(self, run: Run, process: subprocess.Popen):
        said = self._errors(run).read_text().strip().splitlines()
        stopped = said[-1] if process.returncode else None
        if stopped is not None and "not finite" not in stopped:
            sys.exit(f"{run.name} ended with {process.returncode}: {stopped}")
        lines = [json.loads(line) for line in (self.folder / run.name / "metrics.jsonl").read_text().splitlines()]
        evaluated = [line for line in lines if "validation_loss" in line]
        norms = [line["grad_norm"] for line in lines if line["step"] > SETTLED and line["grad_norm"] is not None]
        self.results.add(
            run,
            {
                "stopped": stopped,
                "evaluations": [
                    [line["step"], round(line["validation_loss"], 5), round(line["validation_loss_raw"], 5)]
                    for line in evaluated
                ],
                "grad_norm": {"mean": statistics.mean(norms), "max": max(norms)} if norms else None,
                "images_per_second": statistics.median(line["images_per_second"] for line in lines),
            },
        )

    def _say(self, run: Run, waiting: int):
        seconds = statistics.median(self.durations) * (waiting / self.jobs + 1) if waiting else 0
        print(
            f"{run.name}: loss {self.results.final_loss(run):.4f}; {waiting} more, about {seconds / 60:.0f} minutes",
            flush=True,
        )


if __name__ == "__main__":
    main()
