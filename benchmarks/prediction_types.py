"""
How well do models learn with flow matching and with EDM's preconditioning, compared with predicting the noise?

    python benchmarks/prediction_types.py [--models NAME ...] [--jobs 2] [--data FOLDER_OR_HUB_ID]
    python benchmarks/prediction_types.py --report      only the tables, from the finished runs

The protocol, fixed before the first run:

- Fashion-MNIST: the U-ViT with 20 layers and the U-Net of `convergence.py`, with the residual start, batches of 32 and
  its other settings, for 1,500 and 1,000 steps at a learning rate of 4e-3. FID of 1,000 samples with 20 steps of the
  scheduler that the script saves, with the features of a small ResNet that learned the labels (fashion_mnist.py).
- Shapes: a U-Net with classes on the package's built-in shapes at 16 x 16 pixels, for 2,000 steps with batches of 64.
  The pixels of 120 samples, four per class, with 25 steps and a guidance scale of 2, tell whether color and shape are
  the requested ones.
- Kinds: KINDS below. EDM's timesteps log(sigma) / 4 are from -1.6 to 1.1. A U-ViT reads them from a token without an
  MLP, which could be why users reported that it "does not work" with EDM. "edm, timestep to 1000" maps them to 0 to
  1000 in the config of the model.
- Two seeds. Losses of different kinds cannot be compared, so only samples count.

Each run is a process with one thread. To resume after an interruption, run the same command again. Finished runs are
lines of benchmarks/prediction_types.jsonl and are not repeated.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence import DEBIAN_FOLDER
from convergence_runs import BASE, METHODS, TRAINING, UNET, WORKLOADS
from PIL import Image

from scalelong_diffusers.data import SHAPE_CLASSES, recognize
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.experiments.fashion_mnist import data_source, feature_network
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.tables import markdown_table, over_seeds
from scalelong_diffusers.experiments.trainings import Scheduler, exit_on_signals
from scalelong_diffusers.pipelines.loading import load_pipeline
from scalelong_diffusers.randomness import generator_for


UVIT, SHAPES = "U-ViT", "shapes"
KINDS = {
    "epsilon": {},
    "v_prediction": {"prediction_type": "v_prediction"},
    "flow": {"prediction_type": "flow"},
    "flow, logit-normal": {"prediction_type": "flow", "weighting_scheme": "logit_normal"},
    "edm": {"prediction_type": "edm"},
}
RESCALED = "edm, timestep to 1000"
EDM_TIMESTEPS = {"timestep_scale": 375.0, "timestep_offset": 1.6}
SHAPES_UNET = {
    "_class_name": "ScaleLongUNet2DModel",
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": [24, 48, 96],
    "norm_num_groups": 8,
    "attention_head_dim": 8,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
    "num_class_embeds": len(SHAPE_CLASSES) + 1,
}
SHAPES_TRAINING = {
    "resolution": 16,
    "num_shapes": 50_000,
    "train_batch_size": 64,
    "max_train_steps": 2_000,
    "lr_scheduler": "cosine",
    "class_dropout": 0.1,
}
MODELS = {
    UVIT: (*KINDS, RESCALED),
    UNET: tuple(KINDS),
    SHAPES: ("epsilon", "flow", "edm"),
}
RATE, SEEDS = 4e-3, (1, 2)
FID_IMAGES, FID_STEPS = 1_000, 20
SHAPE_SAMPLES, SHAPE_STEPS, GUIDANCE = 4, 25, 2.0


@dataclass(frozen=True)
class Run:
    architecture: str
    kind: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.architecture}-{self.kind}-seed{self.seed}".replace(", ", "_").replace(" ", "_")

    @property
    def workload(self) -> str:
        return UNET if self.architecture == UNET else BASE

    @property
    def model(self) -> dict[str, Any]:
        if self.architecture == SHAPES:
            return SHAPES_UNET
        blocks = {"block_scale": "rezero"} if self.architecture == UVIT else {}
        timesteps = EDM_TIMESTEPS if self.kind == RESCALED else {}
        return {**WORKLOADS[self.workload].model, **blocks, **timesteps}

    @property
    def flags(self) -> dict[str, Any]:
        method = WORKLOADS[self.workload].methods.get("residual", METHODS["residual"])
        start = WORKLOADS[UNET].methods["residual"] if self.architecture == SHAPES else method
        flags = {name: value for name, value in start.items() if name != "block_scale"}
        return {**flags, **KINDS["edm" if self.kind == RESCALED else self.kind]}


class PredictionScheduler(Scheduler[Run]):
    def __init__(self, folder: Path, data: dict[str, str], results: ResultFile[Run], jobs: int):
        super().__init__(folder, results, jobs)
        self.data = data
        self.accuracy: float | None = None

    def script(self, run: Run) -> list[str]:
        script = "train_class_conditional" if run.architecture == SHAPES else "train_unconditional"
        return ["-m", f"scalelong_diffusers.train.{script}"]

    def settings(self, run: Run) -> dict[str, Any]:
        common = {**TRAINING, "learning_rate": RATE, "seed": run.seed, **run.flags}
        if run.architecture == SHAPES:
            return {**common, **SHAPES_TRAINING}
        workload, network = WORKLOADS[run.workload], self.folder / "feature-network"
        self.accuracy = feature_network(network, self.data)
        return {
            **common,
            **self.data,
            "train_batch_size": workload.batch_size,
            "max_train_steps": workload.steps,
            "eval_steps": workload.steps,
            "num_eval_images": FID_IMAGES,
            "eval_features": network,
            "eval_metric": "fid",
            "num_inference_steps": FID_STEPS,
        }

    def measurements(self, log: list[dict[str, Any]]) -> dict[str, Any]:
        fids = [round(line["fid"], 3) for line in log if "fid" in line]
        fid = {"fid": fids[-1], "accuracy": self.accuracy} if fids else {}
        return {**super().measurements(log), "bins": log[-1]["validation_loss_bins"] if log else None, **fid}

    def inspect(self, run: Run, output: Path) -> dict[str, Any]:
        return count_shapes(output) if run.architecture == SHAPES else {}

    def outcome(self, run: Run) -> str:
        line = self.results.lines[run]
        return line["stopped"] or (f"FID {line['fid']}" if "fid" in line else f"{line['right']} of {line['images']}")


def count_shapes(folder: Path) -> dict[str, int]:
    """Sample every class and count the images whose color, shape or both are right."""
    pipe = load_pipeline(str(folder))
    pipe.set_progress_bar_config(disable=True)
    found = {"images": 0, "color": 0, "shape": 0, "right": 0}
    for wanted in SHAPE_CLASSES:
        generators = [generator_for(0, "shapes", wanted, k) for k in range(SHAPE_SAMPLES)]
        options = {"num_inference_steps": SHAPE_STEPS, "guidance_scale": GUIDANCE, "generator": generators}
        for image in pipe([wanted] * SHAPE_SAMPLES, **options).images:
            _add(found, wanted, image)
    return found


def _add(found: dict[str, int], wanted: str, image: Image.Image):
    color, shape = recognize(image.convert("RGB")) or (None, None)
    wanted_color, wanted_shape = wanted.split()
    found["images"] += 1
    found["color"] += color == wanted_color
    found["shape"] += shape == wanted_shape
    found["right"] += (color, shape) == (wanted_color, wanted_shape)


def planned(models: Iterable[str]) -> list[Run]:
    return [Run(model, kind, seed) for model in models for seed in SEEDS for kind in MODELS[model]]


def tables(results: ResultFile[Run]) -> str:
    """Return one table of FIDs and one of shapes."""

    def values(model: str, kind: str, name: str) -> list[float]:
        lines = [results.lines.get(Run(model, kind, seed), {}) for seed in SEEDS]
        return [line[name] for line in lines if name in line]

    fids = [[kind, *(over_seeds(values(model, kind, "fid")) for model in (UVIT, UNET))] for kind in (*KINDS, RESCALED)]
    shapes = [
        [kind, *(over_seeds(values(SHAPES, kind, name)) for name in ("color", "shape", "right"))]
        for kind in MODELS[SHAPES]
    ]
    return "\n\n".join(
        [
            markdown_table(["FID", UVIT, UNET], fids),
            markdown_table(["right of 120", "color", "shape", "both"], shapes),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME", help="default: all")
    add("--report", action="store_true", help="train nothing; print the tables of the finished runs")
    add("--jobs", type=int, default=os.cpu_count(), help="number of runs at a time (default: one per core)")
    add("--data", default=DEBIAN_FOLDER, help="folder with Fashion-MNIST, or its Hub id (default: %(default)s)")
    add("--folder", type=Path, default=Path("runs/prediction_types"), help="folder of the runs (default: %(default)s)")
    arguments = parser.parse_args()
    exit_on_signals()
    results = ResultFile(Path(__file__).with_suffix(".jsonl"), Run)
    try:
        if not arguments.report:
            train(arguments, results)
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to resume")
    except (OSError, UserError) as error:
        parser.error(str(error))
    print(tables(results))


def train(arguments: argparse.Namespace, results: ResultFile[Run]):
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with results.locked():
        scheduler = PredictionScheduler(folder, data_source(arguments.data, folder), results, arguments.jobs)
        scheduler.run_all(lambda: planned(arguments.models))


if __name__ == "__main__":
    main()
