"""
Do the rules of `scalelong diagnose` predict what happens in training?

    python benchmarks/diagnosis.py [--workloads NAME ...] [--limit N] [--jobs 2] [--data FOLDER_OR_HUB_ID]
    python benchmarks/diagnosis.py --report       only the tables, from the finished runs

The protocol, fixed before the first run:

- Runs: the finished runs of benchmarks/convergence.jsonl that its stopping rule did not end early. They have tuning
  runs with all learning rates, so some of them diverged.
- Each run trains again for its first 100 steps, the warm-up of its learning rate, with the same seed and settings.
  Then `scalelong diagnose` measures its EMA weights, which then average about ten steps, with 64 training images.
- What happened is taken from convergence.jsonl. A run "diverged" as defined there. A run "could gain" if another
  method, at its best setting and with the same seed, reached the run's final loss in at most 1 / 1.2 of the steps. A
  run that diverged could gain, too.
- For each rule, the tables count in how many runs it applied and what happened. p is the probability that a rule that
  guesses, and applies as often, is right at least as often (Fisher's exact test). A rule with p above 0.05 in both
  tables is dropped.

The figures are stored, not the verdicts, so that the tables show the present thresholds. Thresholds that are changed
after looking at the tables must be tested on other runs.

To resume after an interruption, run the same command again. Finished runs are lines of benchmarks/diagnosis.jsonl.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from convergence import DEBIAN_FOLDER, ConvergenceScheduler
from convergence_runs import METHODS_ON, PAPER, Results, Run

from scalelong_diffusers.diagnosis.rules import RULES
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.experiments.fashion_mnist import data_source
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.trainings import STOPPED_EARLY, exit_on_signals


WARM_UP, NUM_IMAGES, GAIN = 100, 64, 1.2
HERE = Path(__file__).parent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in METHODS_ON if name != PAPER]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    parser.add_argument("--limit", type=int, help="number of new runs (default: all)")
    parser.add_argument("--report", action="store_true", help="train nothing; print the tables of finished runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of runs at a time")
    parser.add_argument("--data", default=DEBIAN_FOLDER, help="folder with Fashion-MNIST, or its Hub id")
    parser.add_argument("--folder", type=Path, default=Path("runs/diagnosis"), help="folder of the runs")
    arguments = parser.parse_args()
    exit_on_signals()
    history, results = Results(HERE / "convergence.jsonl"), ResultFile(HERE / "diagnosis.jsonl", Run)
    try:
        if not arguments.report:
            validate(arguments, history, results)
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to resume")
    except (OSError, UserError) as error:
        parser.error(str(error))
    print(tables(history, results))


def validate(arguments: argparse.Namespace, history: Results, results: ResultFile[Run]):
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with results.locked():
        waiting = (run for run in known_runs(history, arguments.workloads) if run not in results)
        runs = list(islice(waiting, arguments.limit))
        source = data_source(arguments.data, folder)
        DiagnosisScheduler(folder, source, results, arguments.jobs).run_all(lambda: runs)


def known_runs(history: Results, workloads: list[str]) -> list[Run]:
    """Return the runs whose outcome is known."""
    return [
        run for run, line in history.lines.items() if run.workload in workloads and line["stopped"] != STOPPED_EARLY
    ]


class DiagnosisScheduler(ConvergenceScheduler):
    """Trains the first steps of each run, and diagnoses the model."""

    def settings(self, run: Run) -> dict[str, Any]:
        short = {"max_train_steps": WARM_UP, "checkpointing_steps": WARM_UP, "validation_steps": 0}
        return {**super().settings(run), **short}

    def _fid_settings(self, run: Run) -> dict[str, Any]:
        return {}

    def is_hopeless(self, run: Run, log: list[dict[str, Any]]) -> bool:
        return False

    def _collect(self, run: Run, process: subprocess.Popen, early: bool = False):
        self.figures = self._diagnose(run) if process.returncode == 0 else None
        super()._collect(run, process, early)

    def _diagnose(self, run: Run) -> dict[str, float | None]:
        checkpoint = self._output(run) / f"checkpoint-{WARM_UP}"
        command = [sys.executable, "-m", "scalelong_diffusers.cli", "diagnose", str(checkpoint), "--json"]
        printed = subprocess.run(
            [*command, "--num_images", str(NUM_IMAGES)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
        ).stdout  # fmt: skip
        return {finding["rule"]: finding["value"] for finding in json.loads(printed)["findings"]}

    def measurements(self, log: list[dict[str, Any]]) -> dict[str, Any]:
        return {"figures": self.figures}

    def outcome(self, run: Run) -> str:
        figures = self.results.lines[run]["figures"] or {}
        return ", ".join(f"{name} {value:.3g}" for name, value in figures.items() if value is not None) or "diverged"


def could_gain(history: Results, run: Run) -> bool:
    """Return whether another method with the same seed reached the run's final loss in 1.2 times fewer steps."""
    target = history.final_loss(run)
    if math.isinf(target):
        return True
    others = [other for method in METHODS_ON[run.workload] for other in best_runs(history, run, method)]
    return any(history.steps_to(target, other) * GAIN <= run.steps for other in others)


def best_runs(history: Results, run: Run, method: str) -> list[Run]:
    """Return the finished run of another method at its best setting, with the seed of a run."""
    setting = history.best_setting(run.workload, method) if method != run.method else None
    other = None if setting is None else Run(run.workload, method, *setting, run.seed)
    return [other] if other in history else []


def applies(figures: dict[str, float | None] | None, name: str, threshold: float) -> bool:
    """Return whether a rule applies to stored figures. A run without figures diverged in its first steps."""
    if figures is None:
        return name == "finite"
    return figures.get(name) is not None and figures[name] > threshold


def tables(history: Results, results: ResultFile[Run]) -> str:
    """Return the confusion tables as Markdown."""
    runs = [run for run in results.lines if run in history]
    if not runs:
        return "no finished runs"
    outcomes: dict[str, Callable[[Run], bool]] = {
        "could gain": lambda run: could_gain(history, run),
        "diverged": history.diverged,
    }
    lines = [f"{len(runs)} runs"]
    for title, happened in outcomes.items():
        lines += ["", f"| rule | applied and {title} | applied, not | not applied, {title} | neither | p |"]
        lines.append("|---|---|---|---|---|---|")
        truth = {run: happened(run) for run in runs}
        for name, threshold in {rule.name: rule.threshold for rule in RULES}.items():
            marks = [(applies(results.lines[run]["figures"], name, threshold), truth[run]) for run in runs]
            counts = [marks.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))]
            lines.append(f"| {name} | {' | '.join(map(str, counts))} | {fisher(*counts):.2g} |")
    return "\n".join(lines)


def fisher(both: int, first: int, second: int, neither: int) -> float:
    """Return the probability of at least `both` common cases if the two marks of a case were independent."""
    marked, others, drawn = both + second, first + neither, both + first
    total = math.comb(marked + others, drawn)
    ways = sum(math.comb(marked, k) * math.comb(others, drawn - k) for k in range(both, min(marked, drawn) + 1))
    return ways / total


if __name__ == "__main__":
    main()
