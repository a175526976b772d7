"""`scalelong paper` reruns figures, tables and theorems of the paper at a small size."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scalelong_diffusers.experiments.trainings import exit_on_signals
from scalelong_diffusers.options import add_options, build_config, check_options, option
from scalelong_diffusers.paper.experiment import Workspace
from scalelong_diffusers.paper.figures import FIGURES, get_figure, run_figure, tables, write_figure
from scalelong_diffusers.terminal import print_lines


DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
ALL, QUICK_FOLDER = "all", "quick"


@dataclass(frozen=True)
class PaperConfig:
    """Which runs are executed, and where their results are."""

    quick: bool = option(False, "few and short runs, at most five minutes for each figure; stored separately")
    report: bool = option(False, "run nothing; show the finished runs")
    seeds: int | None = option(
        None, "seeds of each run (default: 3, or 1 with --quick); theorems have 1,000 draws instead",
        at_least=1, at_most=100, metavar="N",
    )  # fmt: skip
    jobs: int | None = option(
        None, "trainings at a time, one thread each (default: one per core)", at_least=1, at_most=1_000
    )
    data: str = option(DEBIAN_FOLDER, "folder with Fashion-MNIST, or its Hub id")
    output_dir: str = option("runs/paper", "folder of the result lines and figures", metavar="DIR")

    def __post_init__(self):
        check_options(self)

    @property
    def folder(self) -> Path:
        return Path(self.output_dir, QUICK_FOLDER if self.quick else "")


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "paper",
        help="rerun figures, tables and theorems of the paper at a small size",
        description=(
            "Rerun figures, tables and theorems of the paper at a small size. Without FIGURE, list them. Finished "
            "runs are lines of a file and are not repeated; if interrupted, run the same command again."
        ),
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"some of {', '.join(FIGURES)}; or {ALL}")
    add_options(parser, PaperConfig)
    parser.add_argument("--json", action="store_true", help="print the result lines as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = build_config(PaperConfig, vars(arguments))
    names = list(FIGURES) if ALL in arguments.figures else list(dict.fromkeys(arguments.figures))
    for name in names:  # before the first run
        get_figure(name)
    if not names:
        print_lines(*_overview(config, arguments.json))
        return 0
    if not config.report:
        with contextlib.redirect_stdout(sys.stderr):  # stdout holds the report
            _run(names, config)
    for name in names:
        write_figure(name, config.folder, config.quick)
    print_lines(*(_json(names, config) if arguments.json else _report(names, config)))
    return 0


def _run(names: Sequence[str], config: PaperConfig):
    """Execute the missing runs of figures."""
    exit_on_signals()
    torch.set_num_threads(1)  # so that the results do not depend on the number of cores
    workspace = Workspace(config.folder, config.data, config.jobs or os.cpu_count())
    for name in names:
        run_figure(name, workspace, config.quick, config.seeds)


def _overview(config: PaperConfig, as_json: bool) -> list[str]:
    """Return one line for each figure, with the number of its finished runs."""
    rows = []
    for name, figure in FIGURES.items():
        planned = figure.planned(config.quick, config.seeds)
        results = figure.experiment.results(config.folder)
        finished = sum(run in results for run in planned)
        rows.append({"figure": name, "title": figure.title, "finished": finished, "planned": len(planned)})
    if as_json:
        return [json.dumps(rows)]
    heads = [f"{'figure':<12}{'finished runs':<15}about"]
    return heads + [f"{row['figure']:<12}{'{finished} of {planned}'.format(**row):<15}{row['title']}" for row in rows]


def _report(names: Sequence[str], config: PaperConfig) -> list[str]:
    lines = []
    for name in names:
        lines += [
            f"### {name}: {FIGURES[name].title}",
            "",
            *tables(name, config.folder, config.quick).splitlines(),
            "",
        ]
    return [*lines, f"The result lines and charts are in {config.folder}."]


def _json(names: Sequence[str], config: PaperConfig) -> list[str]:
    """Return the result lines of figures as JSON."""
    found: dict[str, list[Any]] = {}
    for name in names:
        figure = FIGURES[name]
        results = figure.experiment.results(config.folder)
        planned = figure.planned(config.quick, config.seeds)
        found[name] = [{**results.lines[run], "run": asdict(run)} for run in planned if run in results]
    return [json.dumps(found)]
