"""The runs of the convergence benchmark, the results of finished runs, and the best learning rate of each method."""

import fcntl
import json
import math
import statistics
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure import machine


# Method names, as stored in the result lines, and their flags.
METHODS = {
    "none": ("--skip_scaling=none",),
    "cs 0.9": ("--skip_scaling=cs", "--kappa=0.9"),
    "ls per skip": ("--skip_scaling=ls", "--no-skip_scaling_shared", "--skip_scaling_init=paper"),
    "inv_sqrt2": ("--skip_scaling=inv_sqrt2",),
    "cs 0.7": ("--skip_scaling=cs", "--kappa=0.7"),
    "ls shared": ("--skip_scaling=ls", "--skip_scaling_shared", "--skip_scaling_init=paper"),
    "ls per skip, identity": ("--skip_scaling=ls", "--no-skip_scaling_shared", "--skip_scaling_init=identity"),
}
UVIT_RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
UNET_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
# Part F.
AS_UVIT = {"adam_beta1": 0.99, "adam_beta2": 0.999, "max_grad_norm": 0}
AS_UVIT_RATES = (5e-4, 1e-3, 2e-3, 4e-3)
SEEDS = (0, 1, 2)
STEPS, QUICK_STEPS = 2_000, 1_000
QUICK_METHODS = ("none", "cs 0.9", "ls per skip")
QUICK_RATE = 1e-3
# The two methods that differed most in part C with batch size 64.
FURTHEST_APART = ("none", "ls per skip, identity")
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
        "block_out_channels": [16, 32, 32],
        "layers_per_block": 2,
        "norm_num_groups": 8,
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
# Gradient norms are reported after this step, when the steep part of the loss curve is over.
SETTLED = 500


@dataclass(frozen=True)
class Run:
    """One training run. `of_cs` is the part of CS in part D, `as_uvit` means U-ViT's optimizer (part F)."""

    method: str
    learning_rate: float
    seed: int = 0
    model: str = "uvit-20"
    batch_size: int = 32
    steps: int = STEPS
    of_cs: str | None = None
    as_uvit: bool = False

    @property
    def name(self) -> str:
        optimizer = "as_uvit" if self.as_uvit else None
        words = (self.model, self.method, self.of_cs, optimizer, f"{self.learning_rate:g}", f"batch{self.batch_size}")
        name = "-".join([*filter(None, words), f"seed{self.seed}", f"{self.steps}"])
        return name.replace(" ", "_").replace(",", "")


class Results:
    """The results of finished runs: a file with one JSON line per run."""

    def __init__(self, file: Path):
        self.file = file
        self._read()

    def _read(self) -> int:
        """Read all complete lines and return their size in bytes; a truncated line may follow."""
        content = self.file.read_bytes() if self.file.exists() else b""
        size = content.rfind(b"\n") + 1
        self.lines = {Run(**line["run"]): line for line in map(json.loads, content[:size].splitlines())}
        return size

    @contextmanager
    def locked(self):
        """Lock the file against other processes, or exit if one holds it."""
        with open(self.file, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.exit(f"another process is adding runs to {self.file}: wait until it has finished")
            self._read()  # lines that the other process added before it ended
            yield

    def add(self, run: Run, measurements: dict[str, Any]):
        """Append the line of a run."""
        line = {"run": asdict(run), **measurements, "machine": {**machine(), "threads": 1}}
        size = self._read()  # again, since git may have changed the file during the run
        with open(self.file, "ab") as file:
            file.truncate(size)
            file.write(json.dumps(line).encode() + b"\n")
        self.lines[run] = line

    def __contains__(self, run: Run) -> bool:
        return run in self.lines

    def diverged(self, run: Run) -> bool:
        """Return whether the run stopped early or ended worse than it began, in EMA or raw weights."""
        if self.lines[run]["stopped"] is not None:
            return True
        curves = (self.evaluations(run, raw) for raw in (False, True))
        return not all(_mean_of_last(curve) <= curve[0][1] for curve in curves)

    def evaluations(self, run: Run, raw: bool = False) -> list[tuple[int, float]]:
        """Return (step, loss) pairs. A non-finite loss is infinite."""
        lines = self.lines[run]["evaluations"]
        return [(step, math.inf if losses[raw] is None else losses[raw]) for step, *losses in lines]

    def final_loss(self, run: Run, raw: bool = False) -> float:
        """Return the final loss, or infinity if the run diverged."""
        return math.inf if self.diverged(run) else _mean_of_last(self.evaluations(run, raw))

    def steps_to(self, target: float, run: Run, raw: bool = False) -> int | None:
        """Return the step of the first of three consecutive evaluations below the target."""
        curve = self.evaluations(run, raw)
        for three in zip(curve, curve[1:], curve[2:]):
            if all(loss < target for _, loss in three):
                return three[0][0]
        return None

    def best_rate(self, method: str, model: str = "uvit-20", as_uvit: bool = False) -> float | None:
        """Return the learning rate with the lowest final loss, or None until all learning rates have finished."""
        runs = learning_rate_runs(method, model, as_uvit)
        if not all(run in self for run in runs):
            return None
        return min(runs, key=self.final_loss).learning_rate


def _mean_of_last(curve: list[tuple[int, float]]) -> float:
    return statistics.mean(loss for _, loss in curve[-3:])


def quick_run(method: str) -> Run:
    """Return the run of a method with `--quick`."""
    return Run(method, QUICK_RATE, steps=QUICK_STEPS)


def learning_rate_runs(method: str, model: str = "uvit-20", as_uvit: bool = False) -> list[Run]:
    """Return the runs that tune the learning rate of a method."""
    rates = UNET_RATES if model == "unet" else AS_UVIT_RATES if as_uvit else UVIT_RATES
    return [Run(method, rate, model=model, as_uvit=as_uvit) for rate in rates]


def seed_runs(method: str, rate: float, **others) -> list[Run]:
    """Return the runs of a method with all seeds."""
    return [Run(method, rate, seed, **others) for seed in SEEDS]


def variation_runs(method: str, rate: float) -> dict[str, Run]:
    """Return the runs of part C that change one thing at a time."""
    return {
        "12 layers": Run(method, rate, model="uvit-12"),
        "28 layers": Run(method, rate, model="uvit-28"),
        "batch 16": Run(method, rate, batch_size=16),
        "batch 64": Run(method, rate, batch_size=64),
    }


def cs_equivalent_runs(rate: float) -> dict[str, Run]:
    """Return the runs of part D: plain models with parts of CS."""
    return {of_cs: Run("cs 0.9", rate, of_cs=of_cs) for of_cs in ("init", "rate", "both")}


def runs_of(part: str, results: Results) -> Iterable[Run]:
    """Yield the runs of a part whose best learning rates are known."""
    if part == "quick":
        yield from map(quick_run, QUICK_METHODS)
        return
    best = {method: results.best_rate(method) for method in METHODS}
    known = {method: rate for method, rate in best.items() if rate is not None}
    if part == "A":
        yield from (run for method in METHODS for run in learning_rate_runs(method))
        yield from (run for method, rate in known.items() for run in seed_runs(method, rate))
    elif part == "C":
        yield from (run for method in METHODS for run in learning_rate_runs(method, "unet"))
        yield from (run for method, rate in known.items() for run in variation_runs(method, rate).values())
    elif part == "E":
        for method in filter(known.get, FURTHEST_APART):
            yield from seed_runs(method, known[method], batch_size=64)
    elif part == "D" and "cs 0.9" in known:
        yield from cs_equivalent_runs(known["cs 0.9"]).values()
    elif part == "F":
        yield from (run for method in METHODS for run in learning_rate_runs(method, as_uvit=True))
        for method in METHODS:
            rate = results.best_rate(method, as_uvit=True)
            if rate is not None:
                yield from seed_runs(method, rate, as_uvit=True)
