"""The workloads, methods and runs of the convergence benchmark, and the results of finished runs."""

import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalelong_diffusers.experiments.fashion_mnist import IMAGES, SIZE, SMALL_UNET
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.trainings import STOPPED_EARLY


_PLAIN = {"skip_scaling": "none", "skip_init": "reference"}
_CS, _LS = {"skip_scaling": "cs", "kappa": 0.9}, {"skip_scaling": "ls"}
_PAPERS_LS = {**_LS, "skip_scaling_shared": True, "skip_scaling_init": "paper"}
# The residual path starts as the sum of hidden state and skip, residual branches start at 0 (ReZero in a U-ViT), and
# the layers that form the sum learn slowly. In a U-Net the skips join only in the branches.
_SUM, _REZERO = {"skip_init": "sum"}, {"block_scale": "rezero"}
_RESIDUAL = {**_SUM, **_REZERO, "skip_lr_scale": 0.1}
_RESIDUAL_UNET = {"skip_init": "zero", "zero_init_residual": True}
_SELF_CONDITIONING = {"self_conditioning": True}
WITH_CS, CONDITIONED = "residual + cs", "residual + self-conditioning"

_EPS_1E_8 = {"adam_epsilon": 1e-8}

# Method names, as stored in the result lines, and their flags. Some are fields of the model's config.
_MODEL_FIELDS = ("block_scale", "self_conditioning")
METHODS = {
    "plain": {**_PLAIN, **_EPS_1E_8},
    "plain, eps 1e-10": _PLAIN,
    "cs": {**_PLAIN, **_CS},
    "ls": {**_PLAIN, **_LS},
    "sum": {**_PLAIN, **_SUM},
    "rezero": {**_PLAIN, **_REZERO},
    "sum + rezero": {**_PLAIN, **_SUM, **_REZERO},
    "residual": {**_PLAIN, **_RESIDUAL},
    "residual, eps 1e-8": {**_PLAIN, **_RESIDUAL, **_EPS_1E_8},
    WITH_CS: {**_PLAIN, **_RESIDUAL, **_CS},
    CONDITIONED: {**_PLAIN, **_RESIDUAL, **_SELF_CONDITIONING},
    "ls (paper)": {**_PLAIN, **_PAPERS_LS},
}
PLAIN, BASE, PAPER, QUICK, UNET = "plain", "20 layers", "paper", "quick", "U-Net"
EVERYWHERE = (PLAIN, "residual")
_BOTH_EPS = ("plain", "plain, eps 1e-10", "residual", "residual, eps 1e-8")
# The methods that run on each workload.
METHODS_ON = {
    BASE: (*_BOTH_EPS, "cs", "ls", "sum", "rezero", "sum + rezero", WITH_CS, CONDITIONED),
    "12 layers": (*EVERYWHERE, "residual, eps 1e-8"),
    "28 layers": EVERYWHERE,
    "batch 16": EVERYWHERE,
    "batch 64": EVERYWHERE,
    "patch 4": EVERYWHERE,
    "class-conditional shapes": _BOTH_EPS,
    UNET: (*EVERYWHERE, CONDITIONED),
    PAPER: ("plain", "cs", "ls (paper)", "residual"),
}
# The methods that train with all seeds; the others are only tuned. Controls take the best setting of another method.
CONTROLS = {"plain, eps 1e-10": PLAIN, CONDITIONED: "residual", WITH_CS: "residual"}
FINALISTS = (*_BOTH_EPS, CONDITIONED, WITH_CS)
TUNED = tuple(name for name in METHODS_ON if name != PAPER)

# From the middle outwards, so that the first runs can stop later ones.
RATES = (4e-3, 2e-3, 8e-3, 1e-3, 1.6e-2)
BETA1S = (0.9, 0.99)
SEEDS = (1, 2, 3, 4, 5, 6, 7, 8)
PAPER_RATES, PAPER_BETA1, PAPER_SEEDS = (5e-4, 1e-3, 2e-3, 4e-3), 0.99, (1, 2)
QUICK_RATES = {PLAIN: 2e-3, "residual": 4e-3}
# A tuning run stops after this fraction of its steps if its loss is above this factor times the lowest loss there.
STOP_ABOVE = {1 / 4: 2.0, 1 / 2: 1.25}
FID_WORKLOADS, FID_SEEDS, FID_PARTS = (BASE, "patch 4"), (1, 2, 3), 4

VALIDATION_STEPS = 50
_UVIT = {
    "_class_name": "UViTModel",
    **IMAGES,
    "patch_size": 7,
    "hidden_size": 64,
    "num_layers": 20,
    "num_attention_heads": 4,
}
# 30 classes, and one without a class.
_SHAPES = {"sample_size": 16, "in_channels": 3, "out_channels": 3, "patch_size": 4, "num_class_embeds": 31}


@dataclass(frozen=True)
class Workload:
    """A model, a dataset and a length of training. `flags` override TRAINING, and `methods` override METHODS."""

    model: dict[str, Any] = field(default_factory=lambda: _UVIT)
    batch_size: int = 32
    steps: int = 1_500
    script: str = "train_unconditional"
    flags: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    uses_fashion_mnist: bool = True


WORKLOADS = {
    BASE: Workload(),
    "12 layers": Workload({**_UVIT, "num_layers": 12}),
    "28 layers": Workload({**_UVIT, "num_layers": 28}),
    "batch 16": Workload(batch_size=16, steps=2_000),
    "batch 64": Workload(batch_size=64, steps=1_000),
    "patch 4": Workload({**_UVIT, "patch_size": 4}, steps=1_000),
    "class-conditional shapes": Workload(
        {**_UVIT, **_SHAPES},
        script="train_class_conditional",
        flags={"resolution": 16, "num_shapes": 50_000},
        uses_fashion_mnist=False,
    ),
    UNET: Workload(
        SMALL_UNET,
        steps=1_000,
        methods={
            "residual": {**_PLAIN, **_RESIDUAL_UNET},
            CONDITIONED: {**_PLAIN, **_RESIDUAL_UNET, **_SELF_CONDITIONING},
        },
    ),
    PAPER: Workload(flags={"max_grad_norm": 0, **_EPS_1E_8}),
    QUICK: Workload(steps=500),
}
TRAINING = {
    "resolution": SIZE,
    "lr_warmup_steps": 100,
    "lr_scheduler": "constant_with_warmup",
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-10,
    "adam_weight_decay": 0.03,
    "max_grad_norm": 1.0,
    "ema_decay": 0.995,
    "validation_size": 256,
    "validation_steps": VALIDATION_STEPS,
    "logging_steps": 50,
    "sample_steps": 0,
    "checkpointing_steps": 500,
}


@dataclass(frozen=True)
class Run:
    workload: str
    method: str
    learning_rate: float
    beta1: float = 0.9
    seed: int = 0

    @property
    def name(self) -> str:
        words = f"{self.workload}-{self.method}-{self.learning_rate:g}-{self.beta1}-seed{self.seed}"
        return re.sub(r"[^\w.-]+", "_", words)

    @property
    def steps(self) -> int:
        return WORKLOADS[self.workload].steps

    @property
    def flags(self) -> dict[str, Any]:
        """The flags of the method."""
        return {name: value for name, value in self._method.items() if name not in _MODEL_FIELDS}

    @property
    def model(self) -> dict[str, Any]:
        """The config of the model."""
        changes = {name: value for name, value in self._method.items() if name in _MODEL_FIELDS}
        return {**WORKLOADS[self.workload].model, **changes}

    @property
    def _method(self) -> dict[str, Any]:
        return WORKLOADS[self.workload].methods.get(self.method, METHODS[self.method])

    @property
    def is_tuning(self) -> bool:
        return self.workload in TUNED and self.seed not in SEEDS

    @property
    def measures_fid(self) -> bool:
        return self.workload in FID_WORKLOADS and self.method in EVERYWHERE and self.seed in FID_SEEDS

    def decisions(self) -> Iterable[tuple[int, float]]:
        """Yield the steps at which a tuning run may stop, and the factor. They are the last validations until then."""
        for fraction, factor in STOP_ABOVE.items():
            yield int(self.steps * fraction) // VALIDATION_STEPS * VALIDATION_STEPS, factor


def tuning_runs(workload: str, method: str) -> list[Run]:
    return [Run(workload, method, rate, beta1) for rate in RATES for beta1 in BETA1S]


class Results(ResultFile[Run]):
    """The results of finished runs, and what follows from them."""

    def __init__(self, file: Path):
        super().__init__(file, Run)

    def diverged(self, run: Run) -> bool:
        """Return whether the run stopped by itself or ended worse than it began, in EMA or raw weights."""
        if self.lines[run]["stopped"] is not None:
            return self.lines[run]["stopped"] != STOPPED_EARLY
        curves = (self.evaluations(run, raw) for raw in (False, True))
        return not all(_mean_of_last(curve) <= curve[0][1] for curve in curves)

    def evaluations(self, run: Run, raw: bool = False) -> list[tuple[int, float]]:
        """Return the (step, loss) pairs of a finished run."""
        return curve(self.lines[run]["evaluations"], raw)

    def final_loss(self, run: Run) -> float:
        """Return the final loss in EMA weights, or infinity if the run diverged or was stopped."""
        is_complete = self.lines[run]["stopped"] is None and not self.diverged(run)
        return _mean_of_last(self.evaluations(run)) if is_complete else math.inf

    def steps_to(self, target: float, run: Run) -> float:
        """Return the step of the first of three consecutive evaluations below the target, or infinity."""
        curve = [] if self.diverged(run) else self.evaluations(run)
        for three in zip(curve, curve[1:], curve[2:]):
            if all(loss < target for _, loss in three):
                return three[0][0]
        return math.inf

    def is_hopeless(self, run: Run, curve: Iterable[tuple[int, float]]) -> bool:
        """Return whether the stopping rule stops a tuning run with these (step, loss) pairs."""
        curve = dict(curve)
        others = [other for other in tuning_runs(run.workload, run.method) if other in self and other != run]
        curves = [dict(self.evaluations(other)) for other in others]
        for step, factor in run.decisions():
            losses = [other[step] for other in curves if step in other]
            if step in curve and losses and curve[step] > factor * min(losses):
                return True
            lowest = min([*losses, curve.get(step, math.inf)])
            curves = [other for other in curves if step in other and other[step] <= factor * lowest]
        return False

    def best_setting(self, workload: str, method: str) -> tuple[float, float] | None:
        """Return learning rate and beta1 of the lowest final loss, or None until all tuning runs have finished."""
        runs = tuning_runs(workload, CONTROLS.get(method, method))
        if not all(run in self for run in runs):
            return None
        runs = [run for run in runs if not self.is_hopeless(run, self.evaluations(run))]
        best = min(runs, key=self.final_loss)
        return best.learning_rate, best.beta1

    def seed_runs(self, workload: str, method: str) -> list[Run]:
        """Return a finalist's runs of all seeds at the best setting, or no run until the setting is known."""
        setting = self.best_setting(workload, method) if method in FINALISTS else None
        return [] if setting is None else [Run(workload, method, *setting, seed) for seed in SEEDS]

    def planned_runs(self, workload: str, methods: Iterable[str]) -> list[Run]:
        """Return the runs of a workload whose settings are known, in order: tuning runs first."""
        methods = [method for method in METHODS_ON.get(workload, QUICK_RATES) if method in methods]
        if workload == QUICK:
            return [Run(QUICK, method, QUICK_RATES[method]) for method in methods]
        if workload == PAPER:
            return [run for rate in PAPER_RATES for method in methods for run in paper_runs(method, rate)]
        tuning = [run for method in methods if method not in CONTROLS for run in tuning_runs(workload, method)]
        return tuning + [run for method in methods for run in self.seed_runs(workload, method)]


def paper_runs(method: str, rate: float) -> list[Run]:
    return [Run(PAPER, method, rate, PAPER_BETA1, seed) for seed in PAPER_SEEDS]


def curve(evaluations: list[list[float | None]], raw: bool = False) -> list[tuple[int, float]]:
    """Return (step, loss) pairs of evaluations as in the result lines. A non-finite loss is infinite."""
    return [(step, math.inf if losses[raw] is None else losses[raw]) for step, *losses in evaluations]


def _mean_of_last(curve: list[tuple[int, float]]) -> float:
    return statistics.mean(loss for _, loss in curve[-3:])
