"""
In how many fewer steps do models train whose long skips are scaled, or whose skip layers start as a sum?

    python benchmarks/convergence.py [--workloads NAME ...] [--methods NAME ...] [--jobs 2] [--data FOLDER_OR_HUB_ID]
    python benchmarks/convergence.py --quick      two methods, one seed, 500 steps
    python benchmarks/convergence.py --report     only the tables and the figure, from the finished runs

The protocol, fixed before the first run:

- Data: Fashion-MNIST, 28 x 28 pixels, from Debian's package dataset-fashion-mnist, a folder or the Hub.
- Training: the package's own scripts with epsilon prediction, linear betas, AdamW with beta2 0.999, eps 1e-10 and
  weight decay 0.03, 100 warm-up steps and then a constant learning rate, gradients clipped at 1.0, a maximum EMA decay
  of 0.995.
- Every 50 steps: the loss of 256 held-out images with fixed noise, in EMA and in raw weights. All numbers in the
  tables use EMA weights. The final loss is the mean of the last three validations.
- Workloads: a U-ViT with 20 layers, width 64, 4 heads and patch size 7 with batches of 32 images for 1,500 steps; the
  same with one change (12 or 28 layers; batches of 16 for 2,000 steps or of 64 for 1,000 steps; patch size 4 for 1,000
  steps); the same on the package's shapes with classes at 16 x 16 pixels and patch size 4; and a small U-Net for 1,000
  steps.
- Methods: METHODS in convergence_runs.py. METHODS_ON names the methods of each workload. "residual" was chosen by
  pilot runs with seeds 0 and 1 on the first workload and on the U-Net; they are not part of the results.
- eps: at first it was 1e-8 for all methods. On the shapes, a residual run (seed 8) stayed on a plateau for 1,400
  steps, since the first gradients of its attention, 1e-9 to 1e-10, are below eps. With 1e-9 and less the same run
  leaves the plateau before step 450, with 1e-8 and more it stays. So all methods except "plain" changed to 1e-10 and
  were tuned again. "plain" keeps its finished runs; its best setting is repeated with the smaller eps on two
  workloads, and these runs count for the target, too. "residual, eps 1e-8" has the finished residual runs.
- Tuning: each method has the same budget on each workload: five learning rates (1e-3 to 1.6e-2) times two values of
  beta1 (0.9, 0.99), with seed 0. The best setting has the lowest final loss.
- Stopping rule: a tuning run is out of the race if its loss at 1/4 of its steps is above 2 times, or at 1/2 of its
  steps above 1.25 times, the lowest loss that a tuning run of the same method and workload has there, among the runs
  that are still in the race. (If no
  validation falls on that step, the last one before it counts.) The rule is applied to the curves of all ten runs when
  the best setting is chosen, so it does not matter which of two parallel runs is faster. In addition, a process is
  stopped as soon as finished runs show that it is out of the race, which only saves time.
- Divergence: a run diverges if it stops because of non-finite losses, or if its final loss, in EMA or raw weights, is
  above its first validation.
- Comparison: each finalist at its best setting with the fresh seeds 1 to 8. Finalists are "plain" and "residual", with
  both values of eps; the other methods are only tuned, on the first workload. (This was decided before they ran.)
  "residual + self-conditioning" and "residual + cs", the scripts' default, were added later. They take the best
  setting of "residual" without own tuning. The target of a run is the final loss of the plain run with the same seed,
  which sees the same data and the same noise in its validations. If that run diverges, it is the lowest final loss of
  all plain runs. A run reaches the target at the first of three consecutive validations below it; a run that does not,
  or that diverges, needs infinitely many steps. The speed-up of a run is the number of steps of the whole training /
  the steps to the target. The plain model sets the target, so its speed-up is 1. Reported are the median over seeds
  and the smallest speed-up. By a one-sided sign test, the true median is at least the smallest of 8 speed-ups with
  p = 1/256.
- The target changed twice. At first it was the median over the plain seeds, and after two seeds, which showed that
  plain runs can diverge, the lowest loss of all plain runs. When three workloads had finished, it became the plain run
  with the same seed: the validation noise depends on the seed, so the losses of two seeds cannot be compared. The
  speed-up to the best plain run of all seeds is still reported.
- The paper's protocol, as a second table: 20 layers, U-ViT's optimizer (beta1 0.99, no clipping), equal learning
  rates, seeds 1 and 2, no tuning and no stopping. The target is the plain model's final loss at the same rate and
  seed.
- Performance profiles as in AlgoPerf: the fraction of workloads on which a method's median steps to the target are
  within a factor tau of the best method's.
- Quality: FID of 1,000 samples (20 sampling steps) after each quarter of the training, for seeds 1 to 3 on two
  workloads. The features are those that a small ResNet learned from the labels of Fashion-MNIST (fashion_mnist.py).

Each run is a process with one thread. To resume after an interruption, run the same command again. Finished runs are
lines of benchmarks/convergence.jsonl and are not repeated. The folder of a finished run is deleted, except for its
log.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from convergence_report import draw_figure, quick_table, tables
from convergence_runs import (
    FID_PARTS,
    METHODS,
    METHODS_ON,
    QUICK,
    TRAINING,
    WORKLOADS,
    Results,
    Run,
    curve,
)

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.experiments.fashion_mnist import data_source, feature_network
from scalelong_diffusers.experiments.trainings import Scheduler, evaluations, exit_on_signals


DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
FIGURES = Path(__file__).parents[1] / "docs" / "images"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for flag, known in (("--workloads", METHODS_ON), ("--methods", METHODS)):
        names = ", ".join(f'"{name}"' for name in known)
        add(
            flag, nargs="+", choices=tuple(known), default=list(known), metavar="NAME",
            help=f"some of {names} (default: all)",
        )  # fmt: skip
    add("--quick", action="store_true", help="only two short runs, stored separately")
    add("--report", action="store_true", help="train nothing; print the tables and draw the figure of finished runs")
    add("--jobs", type=int, default=os.cpu_count(), help="number of runs at a time (default: one per core)")
    add("--data", default=DEBIAN_FOLDER, help="folder with Fashion-MNIST, or its Hub id (default: %(default)s)")
    add("--folder", type=Path, default=Path("runs/convergence"), help="folder of the runs (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    exit_on_signals()
    try:
        compare(arguments)
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to resume")
    except (OSError, UserError) as error:
        parser.error(str(error))


def compare(arguments: argparse.Namespace):
    folder, quick = arguments.folder.resolve(), arguments.quick
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(folder / "quick.jsonl" if quick else Path(__file__).with_suffix(".jsonl"))
    if arguments.report:
        report(results, quick)
        return
    with results.locked():
        scheduler = ConvergenceScheduler(folder, data_source(arguments.data, folder), results, arguments.jobs)
        for workload in [QUICK] if quick else arguments.workloads:
            scheduler.run_all(partial(results.planned_runs, workload, arguments.methods))
            report(results, quick)


def report(results: Results, quick: bool):
    print(quick_table(results) if quick else tables(results), flush=True)
    if not quick:
        draw_figure(results, FIGURES)


class ConvergenceScheduler(Scheduler[Run]):
    """Runs the trainings of this benchmark on a dataset."""

    def __init__(self, folder: Path, data: dict[str, str], results: Results, jobs: int):
        super().__init__(folder, results, jobs)
        self.data = data
        self.accuracy: float | None = None

    def script(self, run: Run) -> list[str]:
        return ["-m", f"scalelong_diffusers.train.{WORKLOADS[run.workload].script}"]

    def settings(self, run: Run) -> dict[str, Any]:
        workload = WORKLOADS[run.workload]
        return {
            **TRAINING,
            **(self.data if workload.uses_fashion_mnist else {}),
            "learning_rate": run.learning_rate,
            "adam_beta1": run.beta1,
            "seed": run.seed,
            "train_batch_size": workload.batch_size,
            "max_train_steps": workload.steps,
            **workload.flags,
            **run.flags,
            **(self._fid_settings(run) if run.measures_fid else {}),
        }

    def _fid_settings(self, run: Run) -> dict[str, str | int | Path]:
        network = self.folder / "feature-network"
        self.accuracy = feature_network(network, self.data)
        return {
            "eval_steps": run.steps // FID_PARTS,
            "num_eval_images": 1_000,
            "eval_features": network,
            "eval_metric": "fid",
            "num_inference_steps": 20,
        }

    def is_hopeless(self, run: Run, log: list[dict[str, Any]]) -> bool:
        return run.is_tuning and self.results.is_hopeless(run, curve(evaluations(log)))

    def measurements(self, log: list[dict[str, Any]]) -> dict[str, Any]:
        fids = [[line["step"], round(line["fid"], 3)] for line in log if "fid" in line]
        return {**super().measurements(log), **({"fid": fids, "accuracy": self.accuracy} if fids else {})}

    def outcome(self, run: Run) -> str:
        return self.results.lines[run]["stopped"] or f"loss {self.results.final_loss(run):.4f}"


if __name__ == "__main__":
    main()
