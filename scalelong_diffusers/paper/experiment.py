"""The kinds of runs behind the figures, and the folder that holds their results."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from scalelong_diffusers.charts import Panel
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.experiments.fashion_mnist import data_source
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.terminal import print_lines


# A run is a frozen dataclass with a name and a seed. `Simplify` maps it to itself, or to its short form in quick mode.
Run = Any
Simplify = Callable[[Run], Run]


@dataclass
class Workspace:
    """
    The folder of results, and how runs are executed.

    Args:
        data: folder with Fashion-MNIST, or its Hub id.
        jobs: number of trainings at a time.
    """

    folder: Path
    data: str
    jobs: int = 1

    @cached_property
    def runs(self) -> Path:
        """The folder for data and unfinished runs, which is created when it is first used."""
        folder = self.folder / "runs"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot write to --output_dir {self.folder}: {error}") from error
        return folder

    @cached_property
    def fashion_mnist(self) -> dict[str, str]:
        """The data option of the training script for Fashion-MNIST."""
        return data_source(self.data, self.runs)


@dataclass(frozen=True)
class Experiment:
    """
    A kind of run, whose results are lines of one file.

    Args:
        name: name of the result file.
        run_class: frozen dataclass that describes a run.
        shorten: return the short form of a run for quick mode.
        run_all: execute runs and add their results.
        seeds: default number of seeds. None: one run has many random draws, and there are no seeds to choose.
    """

    name: str
    run_class: type
    shorten: Simplify
    run_all: Callable[[ResultFile, Sequence[Run], Workspace], None]
    seeds: int | None = None

    def results(self, folder: Path) -> ResultFile:
        """Read the finished runs in a folder."""
        file = folder / f"{self.name}.jsonl"
        try:
            return ResultFile(file, self.run_class)
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{file} cannot be read as result lines ({reason}): pass another --output_dir") from error


@dataclass(frozen=True)
class Figure:
    """
    A figure, table, theorem or lemma of the paper.

    Args:
        title: what is shown.
        runs: return the runs with seed 0.
        tables: return Markdown tables of the finished runs. The second argument simplifies runs.
        panels: return charts of the finished runs.
    """

    title: str
    experiment: Experiment
    runs: Callable[[], list[Run]]
    tables: Callable[[ResultFile, Simplify], str]
    panels: Callable[[ResultFile, Simplify], list[Panel]] | None = None

    def planned(self, quick: bool, seeds: int | None = None) -> list[Run]:
        """Return all runs, each once, in order."""
        runs = list(dict.fromkeys(map(self.experiment.shorten, self.runs()) if quick else self.runs()))
        if self.experiment.seeds is None:
            return runs
        seeds = seeds or (1 if quick else self.experiment.seeds)
        return [dataclasses.replace(run, seed=seed) for seed in range(seeds) for run in runs]

    def simplify(self, quick: bool) -> Simplify:
        """Return the function that the tables receive."""
        return self.experiment.shorten if quick else lambda run: run


def measure_each(measure: Callable[[Run, Workspace], dict[str, Any]]) -> Callable[..., None]:
    """Return a `run_all` that measures one run after the other in this process."""

    def run_all(results: ResultFile, runs: Iterable[Run], workspace: Workspace):
        missing = [run for run in runs if run not in results]
        for number, run in enumerate(missing, start=1):
            results.add(run, measure(run, workspace))
            print_lines(f"{time.strftime('%H:%M')} {run.name} ({number} of {len(missing)})")

    return run_all


def lines_of_seeds(results: ResultFile, run: Run) -> list[dict[str, Any]]:
    """Return the lines of all finished runs that differ from this one in nothing but the seed."""
    return [line for finished, line in results.lines.items() if dataclasses.replace(finished, seed=run.seed) == run]
