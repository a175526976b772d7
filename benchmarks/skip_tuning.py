"""
Does a trained model draw better images if its long skips are scaled only while it samples (Skip-Tuning)?

    python benchmarks/skip_tuning.py [--jobs 2] [--data FOLDER_OR_HUB_ID]
    python benchmarks/skip_tuning.py --report     only the table, from the finished samplings

The protocol, fixed before the first run:

- Models: a small U-Net (1,000 steps, 9 long skips) and a U-ViT with 20 layers (1,500 steps, 10 long skips), trained on
  Fashion-MNIST without scaling, at the best setting of the method "plain" of benchmarks/convergence.py, with seeds 3
  and 4. (Plain U-ViTs with seeds 1, 2 and 6 are unstable there.) EMA weights are sampled.
- Scaling: the method "linear": the factors fall evenly from 1 for the outermost skip to rho for the deepest. rho is 1
  (the model as it was trained), 0.9, 0.8, 0.7, 0.6 and 0.5.
- Sampling: 5, 10 and 20 steps of DPM-Solver++, and for the U-ViT, which is faster, of DDIM too. Both are
  deterministic, and all samplings start from the same 1,000 noises.
- Quality: FID of the 1,000 images against all training images. The features are those that a small ResNet learned from
  the labels of Fashion-MNIST (fashion_mnist.py).
- Reported: FID for rho = 1, and for the others FID divided by the FID of the same model for rho = 1. A value of rho
  counts as better or worse only if both seeds agree.

To resume after an interruption, run the same command again. Finished samplings are lines of
benchmarks/skip_tuning.jsonl; the trained models stay in --folder.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from convergence import DEBIAN_FOLDER, ConvergenceScheduler
from convergence_runs import BASE, PLAIN, UNET, Results
from convergence_runs import Run as Training

from scalelong_diffusers import ScaleLongUnconditionalPipeline, apply_skip_scaling
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.evaluation import evaluate_images, load_features, open_reference, reference_statistics
from scalelong_diffusers.experiments.fashion_mnist import SIZE, data_source, feature_network
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.tables import markdown_table, over_seeds
from scalelong_diffusers.experiments.trainings import exit_on_signals
from scalelong_diffusers.pipelines.sampling import scheduler_by_name


MODELS = {"U-ViT": (BASE, 2e-3), "U-Net": (UNET, 4e-3)}  # workload and learning rate
SETTINGS = (("U-ViT", "dpm++"), ("U-Net", "dpm++"), ("U-ViT", "ddim"))
SEEDS, STEPS, RHOS = (3, 4), (5, 10, 20), (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
NUM_IMAGES, BATCH_SIZE = 1_000, 50


@dataclass(frozen=True)
class Sampling:
    model: str
    seed: int
    scheduler: str
    steps: int
    rho: float

    @property
    def training(self) -> Training:
        workload, rate = MODELS[self.model]
        return Training(workload, PLAIN, rate, 0.9, self.seed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--report", action="store_true", help="sample nothing; print the table of finished samplings")
    add("--jobs", type=int, default=os.cpu_count(), help="number of trainings at a time (default: one per core)")
    add("--data", default=DEBIAN_FOLDER, help="folder with Fashion-MNIST, or its Hub id (default: %(default)s)")
    add("--folder", type=Path, default=Path("runs/skip_tuning"), help="folder of the models (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    exit_on_signals()
    results = ResultFile(Path(__file__).with_suffix(".jsonl"), Sampling)
    try:
        if not arguments.report:
            sample_all(arguments, results)
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to resume")
    except (OSError, UserError) as error:
        parser.error(str(error))
    print(table(results))


class ModelTrainer(ConvergenceScheduler):
    """Trains the models and keeps them."""

    def _fid_settings(self, run: Training) -> dict[str, Any]:
        return {}

    def _delete(self, run: Training):
        pass


def sample_all(arguments: argparse.Namespace, results: ResultFile[Sampling]):
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with results.locked():
        source = data_source(arguments.data, folder)
        accuracy = feature_network(folder / "feature-network", source)
        trainer = ModelTrainer(folder, source, Results(folder / "trainings.jsonl"), arguments.jobs)
        judge = Judge(folder, source)
        for setting in SETTINGS:
            waiting = [sampling for sampling in samplings(*setting) if sampling not in results]
            trainer.run_all(partial(trainings_of, waiting))
            for sampling in waiting:
                fid = judge.fid(folder / sampling.training.name, sampling)
                results.add(sampling, {"fid": round(fid, 3), "accuracy": accuracy})
                print(f"{sampling}: FID {fid:.2f}", flush=True)


def trainings_of(samplings: list[Sampling]) -> set[Training]:
    return {sampling.training for sampling in samplings}


def samplings(model: str, scheduler: str) -> list[Sampling]:
    """Return the samplings of a setting. The first ones already show a coarse picture."""
    return [
        Sampling(model, seed, scheduler, steps, rho)
        for rho in (*RHOS[::2], *RHOS[1::2])
        for seed in SEEDS
        for steps in STEPS
    ]


class Judge:
    """Measures FID with the feature network in a folder and the training images."""

    def __init__(self, folder: Path, source: dict[str, str]):
        self.features = load_features(str(folder / "feature-network"))
        images = open_reference(next(iter(source.values())), SIZE, channels=1)
        torch.set_num_threads(1)
        self.reference, _ = reference_statistics(images, self.features, folder)

    def fid(self, model: Path, sampling: Sampling) -> float:
        return evaluate_images(sampled_images(model, sampling), self.reference, self.features, ["fid"])["fid"]


def sampled_images(model: Path, sampling: Sampling) -> Iterator[torch.Tensor]:
    """Yield batches of uint8 images (batch, 3, height, width)."""
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = scheduler_by_name(sampling.scheduler, pipe.scheduler)
    apply_skip_scaling(pipe, {"method": "linear", "kappa": sampling.rho})
    noises = torch.randn(NUM_IMAGES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    for latents in noises.split(BATCH_SIZE):
        images = pipe(len(latents), sampling.steps, latents=latents, output_type="pt").images
        yield images.mul(255).round().to(torch.uint8).expand(-1, 3, -1, -1)


def table(results: ResultFile[Sampling]) -> str:
    """Return FID for rho = 1 and the ratios to it, over the finished seeds."""
    heads = ("model", "scheduler", "steps", "FID, rho = 1", *(f"rho = {rho:g}" for rho in RHOS[1:]))
    rows = [(*setting, str(steps), *cells(results, *setting, steps)) for setting in SETTINGS for steps in STEPS]
    return markdown_table(heads, rows)


def cells(results: ResultFile[Sampling], model: str, scheduler: str, steps: int) -> list[str]:
    def fids(rho: float) -> list[float]:
        runs = [Sampling(model, seed, scheduler, steps, rho) for seed in SEEDS]
        return [results.lines[run]["fid"] for run in runs if run in results]

    unscaled = fids(1.0)
    ratios = [[fid / base for fid, base in zip(fids(rho), unscaled)] for rho in RHOS[1:]]
    return [over_seeds(unscaled), *(over_seeds(values, ".2f") for values in ratios)]


if __name__ == "__main__":
    main()
