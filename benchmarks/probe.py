"""
Do scaled long skips, or another start of the skip layers, change what the blocks of a model know?

    python benchmarks/probe.py [--limit N] [--data FOLDER_OR_HUB_ID]
    python benchmarks/probe.py --report       only the tables and the figure, from the finished runs

The protocol, fixed before the first run:

- Models: the U-ViT of convergence.py with 20 layers, trained on Fashion-MNIST for 1,500 steps as there: plain, with
  the residual start, with CS (kappa 0.9) and with LS (gates that start at 1). Each has its tuned learning rate (RATES
  in denoisers.py) and the seeds 1 to 3. EMA weights are measured.
- `scalelong probe` with 5,000 training and 2,500 test images at the timesteps 11, 51, 101 and 201. The labels were
  not used in the training of the models.
- Reported are, for each method and part of the model, the accuracies of the best timestep of each model as the median
  and range over the seeds. "Deep" blocks are the third of the blocks around the middle. Methods are compared seed by
  seed with the plain model.

To resume after an interruption, run the same command again. Finished runs are lines of benchmarks/probe.jsonl. The
trained models stay in runs/denoisers, where skip_cache.py finds them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from convergence import DEBIAN_FOLDER, FIGURES
from convergence_runs import Run
from denoisers import RUNS, DenoiserScheduler, label

from scalelong_diffusers.charts import Panel, figure
from scalelong_diffusers.diagnosis.probe import PIXELS
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.experiments.fashion_mnist import data_source
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.tables import markdown_table, over_seeds
from scalelong_diffusers.experiments.trainings import exit_on_signals


TIMESTEPS = (11, 51, 101, 201)
FLAGS = {"num_images": 5_000, "num_test_images": 2_500, "grid": 1}
PLAIN = "plain"
HERE = Path(__file__).parent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="number of new runs (default: all)")
    parser.add_argument("--report", action="store_true", help="measure nothing; show the finished runs")
    parser.add_argument("--data", default=DEBIAN_FOLDER, help="folder with Fashion-MNIST, or its Hub id")
    parser.add_argument("--folder", type=Path, default=Path("runs/denoisers"), help="folder of the trained models")
    arguments = parser.parse_args()
    exit_on_signals()
    results = ResultFile(HERE / "probe.jsonl", Run)
    try:
        if not arguments.report:
            measure(arguments, results)
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to resume")
    except (OSError, UserError) as error:
        parser.error(str(error))
    report(results)


def measure(arguments: argparse.Namespace, results: ResultFile[Run]):
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = data_source(arguments.data, folder)
    scheduler = DenoiserScheduler(folder, data)
    with results.locked():
        for run in islice((run for run in RUNS if run not in results), arguments.limit):
            measured = probe(scheduler.trained(run), data)
            results.add(run, {"loss": scheduler.final_loss(run), **measured})
            print(f"{run.name}: {results.lines[run]['summary']}", flush=True)


def probe(pipeline: Path, data: dict[str, str]) -> dict[str, Any]:
    """Return the accuracies of a trained model."""
    words = [f"--{name}={value}" for name, value in {**FLAGS, **data}.items()]
    command = [sys.executable, "-m", "scalelong_diffusers.cli", "probe", str(pipeline), "--json", *words]
    printed = subprocess.run(
        [*command, "--timesteps", *map(str, TIMESTEPS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
    ).stdout  # fmt: skip
    result = json.loads(printed)
    accuracies = {block["block"]: [round(value, 4) for value in block["accuracies"]] for block in result["blocks"]}
    best = max(
        ((max(values), name) for name, values in accuracies.items() if name != PIXELS), key=lambda pair: pair[0]
    )
    names = ("num_images", "num_test_images", "num_classes", "chance", "timesteps")
    return {"summary": f"{best[1]} {best[0]:.4f}", **{name: result[name] for name in names}, "accuracies": accuracies}


def parts(accuracies: dict[str, list[float]]) -> dict[str, list[str]]:
    """Return the names of the blocks of each part of a model."""
    blocks = [name for name in accuracies if name != PIXELS]
    third = len(blocks) // 3
    return {
        "pixels": [PIXELS],
        "first third": blocks[:third],
        "deep third": blocks[third : len(blocks) - third],
        "last third": blocks[len(blocks) - third :],
        "all blocks": blocks,
    }


def best_of_part(line: dict[str, Any], part: str) -> float:
    """Return the best accuracy of a part of a model in percent."""
    return 100 * max(max(line["accuracies"][name]) for name in parts(line["accuracies"])[part])


def report(results: ResultFile[Run]):
    by_method: dict[str, dict[int, dict[str, Any]]] = {}
    for run, line in results.lines.items():
        by_method.setdefault(label(run), {})[run.seed] = line
    if not by_method:
        print("no finished runs")
        return
    names = list(parts(next(iter(results.lines.values()))["accuracies"]))
    heads = ("method", "seeds", "loss", *names, "deep third - plain")
    rows = []
    for method, lines in by_method.items():
        cells = [over_seeds([best_of_part(line, part) for line in lines.values()], ".1f") for part in names]
        loss = over_seeds([line["loss"] for line in lines.values()], ".4f")
        plain = by_method.get(PLAIN, {})
        gains = [
            best_of_part(lines[s], "deep third") - best_of_part(plain[s], "deep third") for s in lines if s in plain
        ]
        rows.append((method, str(len(lines)), loss, *cells, "" if method == PLAIN else over_seeds(gains, "+.1f")))
    print(markdown_table(heads, rows), flush=True)
    draw(by_method)


def draw(by_method: dict[str, dict[int, dict[str, Any]]]):
    """Draw the accuracy of each block at each timestep, the median over the seeds."""
    panels = []
    for k, timestep in enumerate(TIMESTEPS):
        curves = {PIXELS: []}
        for method, lines in by_method.items():
            several = [list(line["accuracies"].values()) for line in lines.values()]
            medians = [100 * statistics.median(values[k] for values in block) for block in zip(*several)]
            pixels, *blocks = medians
            curves[method] = list(enumerate(blocks, 1))
            curves[PIXELS] = [(1, pixels), (len(blocks), pixels)]
        panels.append(Panel(f"accuracy in %, t = {timestep}", curves, axis="block", first=1, linear=True))
    for theme in ("light", "dark"):
        title = "Accuracy of linear probes of each block of U-ViTs"
        (FIGURES / f"probe-{theme}.svg").write_text(figure(panels, title, dark=theme == "dark"))


if __name__ == "__main__":
    main()
