"""The trainings behind Figures 1, 3c, 5, 6 and 7 and Tables 2 to 4: small models on Fashion-MNIST."""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalelong_diffusers.experiments.fashion_mnist import EPOCHS, IMAGES, SIZE, SMALL_UNET, feature_network
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.trainings import Scheduler
from scalelong_diffusers.models.unets import ScaleLongUNet2DModel
from scalelong_diffusers.models.uvit import UViTModel
from scalelong_diffusers.paper.experiment import Workspace
from scalelong_diffusers.paper.gates import gate_values


UVIT, UNET = "U-ViT", "U-Net"
_PAPERS_LS = {"skip_scaling": "ls", "skip_scaling_shared": True, "skip_scaling_init": "paper"}
PLAIN, INV_SQRT2, CS, LS = "plain", "1/sqrt(2)", "CS, 0.9", "LS"
MAIN_METHODS = (PLAIN, INV_SQRT2, CS, LS)
# Flags of the training script, and `block_scale`, which is a field of the model's config.
METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {"skip_scaling": "none"},
    INV_SQRT2: {"skip_scaling": "inv_sqrt2"},
    CS: {"skip_scaling": "cs", "kappa": 0.9},
    LS: _PAPERS_LS,
    "LS, r = 4": {**_PAPERS_LS, "skip_scaling_reduction": 4},
    "LS, r = 8": {**_PAPERS_LS, "skip_scaling_reduction": 8},
    "LS, ELU": {**_PAPERS_LS, "skip_scaling_activation": "elu"},
    "LS, Mish": {**_PAPERS_LS, "skip_scaling_activation": "mish"},
    "LS, IE": {**_PAPERS_LS, "skip_scaling_gate": "ie"},
    "learnable k": {"skip_scaling": "learnable"},
    "t = 0.1": {"skip_scaling": "none", "block_scale": 0.1},
    "t = 0.3": {"skip_scaling": "none", "block_scale": 0.3},
    "ReZero": {"skip_scaling": "none", "block_scale": "rezero"},
    "reversed CS, 0.9": {"skip_scaling": "cs", "kappa": 0.9, "skip_scaling_reverse": True},
}
_UVIT = {"_class_name": "UViTModel", **IMAGES, "hidden_size": 64, "num_attention_heads": 4}
# The optimizer of U-ViT on CIFAR-10. All methods have the same learning rate, as in the paper. Its 2e-4 is for models
# of eight times the width.
_OPTIMIZER = {
    "learning_rate": 1e-3,
    "lr_scheduler": "constant_with_warmup",
    "adam_beta1": 0.99,
    "adam_beta2": 0.999,
    "adam_weight_decay": 0.03,
    "max_grad_norm": 0,
    "ema_decay": 0.995,
}
PARTS = 4  # of a training, each of which ends with an evaluation
_VALIDATIONS, _FEATURE_LOGS = 20, 200
_QUICK_VALIDATIONS = 4
_QUICK_STEPS, _QUICK_EPOCHS, _QUICK_TRAINING_IMAGES = 20, 1, 1_000


@dataclass(frozen=True)
class Training:
    """A training of a small model on Fashion-MNIST."""

    method: str
    architecture: str = UVIT
    layers: int = 12
    patch_size: int = 7
    batch_size: int = 64
    extra_noise: float = 0.0
    steps: int = 2_000
    seed: int = 0

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.-]+", "_", "-".join(map(str, dataclasses.astuple(self))))

    @property
    def model(self) -> dict[str, Any]:
        """The config of the model."""
        if self.architecture == UNET:
            return SMALL_UNET
        scale = {name: value for name, value in METHODS[self.method].items() if name == "block_scale"}
        return {**_UVIT, "num_layers": self.layers, "patch_size": self.patch_size, **scale}

    @property
    def is_quick(self) -> bool:
        return self.steps == _QUICK_STEPS

    @property
    def flags(self) -> dict[str, Any]:
        """The flags of the training script, except for the dataset and the feature network."""
        method = {name: value for name, value in METHODS[self.method].items() if name != "block_scale"}
        is_quick = self.is_quick
        part = self.steps // (_QUICK_VALIDATIONS if is_quick else _VALIDATIONS)
        return {
            **_OPTIMIZER,
            **method,
            "skip_init": "reference",
            "resolution": SIZE,
            "seed": self.seed,
            "train_batch_size": self.batch_size,
            "max_train_steps": self.steps,
            "lr_warmup_steps": self.steps // 20,
            "extra_noise": self.extra_noise,
            "feature_steps": 2 if is_quick else self.steps // _FEATURE_LOGS,
            "logging_steps": part,
            "validation_steps": part,
            "validation_size": 32 if is_quick else 256,
            "sample_steps": 0,
            "checkpointing_steps": self.steps // PARTS,
            "eval_steps": self.steps if is_quick else self.steps // PARTS,
            "eval_metric": "fid",
            "num_eval_images": 64 if is_quick else 1_000,
            "num_inference_steps": 5 if is_quick else 20,
            **({"max_train_samples": _QUICK_TRAINING_IMAGES} if is_quick else {}),
        }


def shortened(training: Training) -> Training:
    """Return a training of a few steps with a small model. Batch sizes and depths stay different."""
    layers = 2 * (training.layers // 8) + 2
    batch_size = training.batch_size // 4
    return dataclasses.replace(training, steps=_QUICK_STEPS, layers=layers, batch_size=batch_size)


class FigureScheduler(Scheduler[Training]):
    """Runs the trainings of figures."""

    def __init__(self, workspace: Workspace, results: ResultFile[Training], epochs: int):
        super().__init__(workspace.runs.resolve(), results, workspace.jobs)
        self.data = workspace.fashion_mnist
        self.features = self.folder / "feature-network"
        self.accuracy = feature_network(self.features, self.data, epochs)

    def script(self, run: Training) -> list[str]:
        return ["-m", "scalelong_diffusers.paper.training_script"]

    def settings(self, run: Training) -> dict[str, Any]:
        return {**self.data, **run.flags, "eval_features": self.features}

    def measurements(self, log: list[dict[str, Any]]) -> dict[str, Any]:
        fids = [[line["step"], round(line["fid"], 3)] for line in log if "fid" in line]
        features = [
            [line["step"], *(float(f"{size:.4g}") for size in line["features"])]
            for line in log
            if "features" in line and None not in line["features"]  # of a run that diverges
        ]
        return {**super().measurements(log), "fid": fids, "accuracy": self.accuracy, "features": features}

    def inspect(self, run: Training, output: Path) -> dict[str, Any]:
        """Return the gates of an LS model (Figure 7)."""
        if METHODS[run.method]["skip_scaling"] != "ls":
            return {}
        model_class = UViTModel if run.architecture == UVIT else ScaleLongUNet2DModel
        return {"gates": gate_values(model_class.from_pretrained(output / "unet"), run.seed)}

    def outcome(self, run: Training) -> str:
        line = self.results.lines[run]
        return line["stopped"] or f"loss {line['evaluations'][-1][1]}, FID {json.dumps(line['fid'][-1:])}"


def run_all(results: ResultFile[Training], runs: Sequence[Training], workspace: Workspace):
    """Execute the trainings that have no results yet."""
    missing = [run for run in runs if run not in results]
    if missing:
        is_quick = all(run.is_quick for run in missing)
        scheduler = FigureScheduler(workspace, results, _QUICK_EPOCHS if is_quick else EPOCHS)
        scheduler.run_all(lambda: missing)
