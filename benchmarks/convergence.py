"""
In how many fewer steps do models train whose long skips are scaled, or whose skip layers start as a sum?

    python benchmarks/convergence.py [--workloads NAME ...] [--methods NAME ...] [--jobs 2] [--data FOLDER_OR_HUB_ID]
    python benchmarks/convergence.py --quick      two methods, one seed, 500 steps
    python benchmarks/convergence.py --report     only the tables and the figure, from the finished runs

The protocol, fixed before the first run:

- Data: Fashion-MNIST, 28 x 28 pixels, from Debian's package dataset-fashion-mnist, a folder or the Hub.
- Training: the package's own scripts with epsilon prediction, linear betas, AdamW with beta2 0.999 and weight decay
  0.03, 100 warm-up steps and then a constant learning rate, gradients clipped at 1.0, a maximum EMA decay of 0.995.
- Every 50 steps: the loss of 256 held-out images with fixed noise, in EMA and in raw weights. All numbers in the
  tables use EMA weights. The final loss is the mean of the last three validations.
- Workloads: a U-ViT with 20 layers, width 64, 4 heads and patch size 7 with batches of 32 images for 1,500 steps; the
  same with one change (12 or 28 layers; batches of 16 for 2,000 steps or of 64 for 1,000 steps; patch size 4 for 1,000
  steps); the same on the package's shapes with classes at 16 x 16 pixels and patch size 4; and a small U-Net for 1,000
  steps.
- Methods: METHODS in convergence_runs.py. METHODS_ON names the methods of each workload. "residual" was chosen by
  pilot runs with seeds 0 and 1 on the first workload and on the U-Net; they are not part of the results.
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
- Comparison: each method at its best setting with the fresh seeds 1 to 8. The target is the lowest final loss of all
  plain runs on that workload, tuning runs included. (At first it was the median over seeds. It was made stricter after
  the first two seeds, which showed that plain runs can diverge.) A run reaches the target at the first of three
  consecutive validations below it; a run that does not, or that diverges, needs infinitely many steps. The speed-up of
  a run is the number of steps of the whole training / the steps to the target. The plain model sets the target, so its
  speed-up is 1. Reported are the median over seeds and the smallest speed-up. By a one-sided sign test, the true
  median is at least the smallest of 8 speed-ups with p = 1/256.
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
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from convergence_report import draw_figure, quick_table, tables
from convergence_runs import (
    FID_PARTS,
    METHODS,
    METHODS_ON,
    QUICK,
    STOPPED_EARLY,
    TRAINING,
    WORKLOADS,
    Results,
    Run,
    curve,
)
from fashion_mnist import data_source, feature_network
from measure import exit_on_signals

from scalelong_diffusers.errors import UserError


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
        scheduler = Scheduler(folder, data_source(arguments.data, folder), results, arguments.jobs)
        for workload in [QUICK] if quick else arguments.workloads:
            scheduler.run_all(workload, arguments.methods)
            report(results, quick)


def report(results: Results, quick: bool):
    print(quick_table(results) if quick else tables(results), flush=True)
    if not quick:
        draw_figure(results, FIGURES)


class Scheduler:
    """Runs several trainings at a time, each in its own process."""

    def __init__(self, folder: Path, data: dict[str, str], results: Results, jobs: int):
        self.folder = folder
        self.data = data
        self.results = results
        self.jobs = jobs
        self.processes: dict[Run, subprocess.Popen] = {}
        self.accuracy: float | None = None

    def run_all(self, workload: str, methods: list[str]):
        """Run all planned runs of a workload that have no results, and add their results."""
        try:
            while (waiting := self._waiting(workload, methods)) or self.processes:
                for run in waiting[: self.jobs - len(self.processes)]:
                    self.processes[run] = self._start(run)
                time.sleep(1)
                for run, process in list(self.processes.items()):
                    early = process.poll() is None and self._is_hopeless(run)
                    if early:
                        process.terminate()
                        process.wait()
                    if process.poll() is not None:
                        self._collect(run, process, early)
                        del self.processes[run]
                        self._report(run, len(self._waiting(workload, methods)))
        except BaseException:
            # Each run saves a checkpoint, and the same command resumes it.
            for process in self.processes.values():
                process.terminate()
            for process in self.processes.values():
                process.wait()
            raise

    def _waiting(self, workload: str, methods: list[str]) -> list[Run]:
        planned = self.results.planned_runs(workload, methods)
        return [run for run in planned if run not in self.results and run not in self.processes]

    def _start(self, run: Run) -> subprocess.Popen:
        workload = WORKLOADS[run.workload]
        config = self.folder / f"{run.name}.json"
        config.write_text(json.dumps(run.model))
        settings = {
            **TRAINING,
            **(self.data if workload.uses_fashion_mnist else {}),
            "output_dir": self._output(run),
            "model_config_name_or_path": config,
            "learning_rate": run.learning_rate,
            "adam_beta1": run.beta1,
            "seed": run.seed,
            "train_batch_size": workload.batch_size,
            "max_train_steps": workload.steps,
            **workload.flags,
            **run.flags,
            **(self._fid_settings(run) if run.measures_fid else {}),
        }
        words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items()]
        if any(self._output(run).glob("checkpoint-*")):
            words.append("--resume_from_checkpoint=latest")
        with open(self._error_log(run), "w") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", f"scalelong_diffusers.train.{workload.script}", *words],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches only the benchmark, which stops its runs
            )

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

    def _output(self, run: Run) -> Path:
        return self.folder / run.name

    def _error_log(self, run: Run) -> Path:
        return self.folder / f"{run.name}.log"

    def _log(self, run: Run) -> list[dict[str, Any]]:
        """Return the complete lines of the run's log."""
        file = self._output(run) / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def _is_hopeless(self, run: Run) -> bool:
        if not run.is_tuning:
            return False
        return self.results.is_hopeless(run, curve(_evaluations(self._log(run))))

    def _collect(self, run: Run, process: subprocess.Popen, early: bool = False):
        messages = self._error_log(run).read_text().strip().splitlines() or ["no error message"]
        stopped = STOPPED_EARLY if early else messages[-1] if process.returncode else None
        if stopped is not None and not early and "finite" not in stopped:
            sys.exit(f"{run.name} exited with code {process.returncode}: {stopped}")
        lines = self._log(run)
        steps = [line["step"] for line in lines]
        if steps != sorted(set(steps)):
            sys.exit(f"{self._output(run)} was written by two processes: delete it and run the benchmark again")
        fids = [[line["step"], round(line["fid"], 3)] for line in lines if "fid" in line]
        measured = {
            "stopped": stopped,
            "evaluations": _evaluations(lines),
            "images_per_second": statistics.median(line["images_per_second"] for line in lines) if lines else None,
        }
        self.results.add(run, {**measured, **({"fid": fids, "accuracy": self.accuracy} if fids else {})})
        self._delete(run)

    def _delete(self, run: Run):
        """Delete the folder of a finished run, and keep its log."""
        log = self._output(run) / "metrics.jsonl"
        if log.exists():
            log.replace(self.folder / f"{run.name}.jsonl")
        shutil.rmtree(self._output(run), ignore_errors=True)

    def _report(self, run: Run, waiting: int):
        outcome = self.results.lines[run]["stopped"] or f"loss {self.results.final_loss(run):.4f}"
        print(f"{time.strftime('%H:%M')} {run.name}: {outcome}; {waiting} runs are waiting", flush=True)


def _evaluations(log: list[dict[str, Any]]) -> list[list[float | None]]:
    """Return step, loss in EMA weights and in raw weights of each validation. None means that it was not finite."""
    names = ("validation_loss", "validation_loss_raw")
    return [
        [line["step"], *(None if line[name] is None else round(line[name], 5) for name in names)]
        for line in log
        if names[0] in line
    ]


if __name__ == "__main__":
    main()
