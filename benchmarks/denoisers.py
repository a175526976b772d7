"""The small models that probe.py and skip_cache.py measure. They are trained once, and their pipelines are kept."""

import shutil
from pathlib import Path
from typing import Any

from convergence import ConvergenceScheduler
from convergence_runs import BASE, CONDITIONED, UNET, Run

from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.trainings import read_log


SHAPES = "class-conditional shapes"
# The best learning rate of each method: in convergence.py and, for CS and LS, in its older runs with the plain start.
RATES = {
    BASE: {"plain, eps 1e-10": 2e-3, "residual": 4e-3, CONDITIONED: 4e-3, "cs": 2e-3, "ls": 2e-3},
    UNET: {"plain": 4e-3, "residual": 4e-3},
    SHAPES: {"plain, eps 1e-10": 2e-3, "residual": 1.6e-2},
}
LABELS = {"plain, eps 1e-10": "plain", CONDITIONED: "self-conditioning"}
SEEDS = (1, 2, 3)
RUNS = [
    Run(workload, method, rate, seed=seed)
    for seed in SEEDS
    for workload, methods in RATES.items()
    for method, rate in methods.items()
]


def label(run: Run) -> str:
    """Return the name of a run's method in tables."""
    return LABELS.get(run.method, run.method)


class DenoiserScheduler(ConvergenceScheduler):
    """Trains models as in convergence.py, without its measurements, and keeps their pipelines."""

    def __init__(self, folder: Path, data: dict[str, str]):
        super().__init__(folder, data, ResultFile(folder / "trained.jsonl", Run), jobs=1)

    def trained(self, run: Run) -> Path:
        """Return the folder of a trained pipeline. Train it if it is missing."""
        if run not in self.results:
            with self.results.locked():
                self.run_all(lambda: [run])
        return self._output(run)

    def settings(self, run: Run) -> dict[str, Any]:
        return {**super().settings(run), "validation_steps": 500}

    def _fid_settings(self, run: Run) -> dict[str, Any]:
        return {}

    def is_hopeless(self, run: Run, log: list[dict[str, Any]]) -> bool:
        return False

    def outcome(self, run: Run) -> str:
        return f"loss {self.final_loss(run):.4f}"

    def final_loss(self, run: Run) -> float:
        """Return the last validation loss of a trained model."""
        return read_log(self._output(run))[-1]["validation_loss"]

    def _delete(self, run: Run):
        for checkpoint in self._output(run).glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
