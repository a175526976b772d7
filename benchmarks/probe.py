"""
Do scaled long skips, or another start of the skip layers, change what the blocks of a model know?

    python benchmarks/probe.py [--limit N] [--data FOLDER_OR_HUB_ID]
    python benchmarks/probe.py --report       only the tables and the figure, from the finished runs

The protocol, fixed before the first run:

- Models, trained as in convergence.py at the best learning rates there (RATES in denoisers.py), with the seeds 1 to 3:
  the U-ViT with 20 layers on Fashion-MNIST, plain, with the residual start, with the residual start and
  self-conditioning, with CS (kappa 0.9) and with LS (gates that start at 1); the small U-Net on Fashion-MNIST and the
  U-ViT of shapes with classes, plain and with the residual start. EMA weights are measured.
- `scalelong probe` with 5,000 training and 2,500 test images at the timesteps 11 and 101, and features averaged over
  4 x 4 cells. The models of Fashion-MNIST never saw its labels; the U-ViT of shapes did, but is probed with the null
  class. At first, the features were averaged over all positions, at four timesteps. One run with the plain U-ViT
  showed that pixels, which keep their positions, are then far better, so that run was dropped.
- Reported are, for each model and part of it, the accuracies of the best timestep as the median and range over the
  seeds. "Deep" blocks are the third of the blocks around the middle. Methods are compared seed by
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
from convergence_runs import BASE, UNET, Run
from denoisers import RUNS, SHAPES, DenoiserScheduler, label

from scalelong_diffusers.charts import Panel, figure
from scalelong_diffusers.diagnosis.probe import PIXELS
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.experiments.fashion_mnist import data_source
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.tables import markdown_table, over_seeds
from scalelong_diffusers.experiments.trainings import exit_on_signals


TIMESTEPS = (11, 101)
FLAGS = {"num_images": 5_000, "num_test_images": 2_500, "grid": 4}
PLAIN = "plain"
LABELS = {BASE: "U-ViT", UNET: "U-Net", SHAPES: "U-ViT, shapes"}
HERE = Path(__file__).parent

Methods = dict[str, dict[int, dict[str, Any]]]  # method, seed, result


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
            measured = probe(scheduler.trained(run))
            results.add(run, {"loss": scheduler.final_loss(run), **measured})
            print(f"{run.name}: {results.lines[run]['summary']}", flush=True)


def probe(folder: Path) -> dict[str, Any]:
    """Return the accuracies of a trained model on the data of its run."""
    words = [f"--{name}={value}" for name, value in FLAGS.items()]
    command = [sys.executable, "-m", "scalelong_diffusers.cli", "probe", str(folder), "--json", *words]
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
    by_model: dict[str, Methods] = {}
    for run, line in results.lines.items():
        by_model.setdefault(LABELS[run.workload], {}).setdefault(label(run), {})[run.seed] = line
    if not by_model:
        print("no finished runs")
        return
    names = list(parts(next(iter(results.lines.values()))["accuracies"]))
    heads = ("model", "method", "seeds", "loss", *names, "deep third - plain")
    rows = [row(model, method, methods, names) for model, methods in by_model.items() for method in methods]
    print(markdown_table(heads, rows), flush=True)
    draw(by_model)


def row(model: str, method: str, methods: Methods, names: list[str]) -> tuple[str, ...]:
    lines, plain = methods[method], methods.get(PLAIN, {})
    cells = [over_seeds([best_of_part(line, part) for line in lines.values()], ".1f") for part in names]
    loss = over_seeds([line["loss"] for line in lines.values()], ".4f")
    deep = "deep third"
    gains = [best_of_part(lines[seed], deep) - best_of_part(plain[seed], deep) for seed in lines if seed in plain]
    return (model, method, str(len(lines)), loss, *cells, "" if method == PLAIN else over_seeds(gains, "+.1f"))


def draw(by_model: dict[str, Methods]):
    """Draw the accuracy of each block at the first timestep, the median over the seeds."""
    panels = []
    for model, methods in by_model.items():
        curves = {PIXELS: []}
        for method, lines in methods.items():
            blocks = zip(*(line["accuracies"].values() for line in lines.values()))
            pixels, *medians = [100 * statistics.median(values[0] for values in block) for block in blocks]
            curves[method] = list(enumerate(medians, 1))
            curves[PIXELS] = [(1, pixels), (len(medians), pixels)]
        panels.append(Panel(f"{model}: accuracy in %", curves, axis="block", first=1, linear=True))
    for theme in ("light", "dark"):
        title = f"Accuracy of linear probes of each block, t = {TIMESTEPS[0]}"
        (FIGURES / f"probe-{theme}.svg").write_text(figure(panels, title, dark=theme == "dark"))


if __name__ == "__main__":
    main()
