"""
When is training with scaled skips faster, and by how much?

    python benchmarks/convergence.py [--parts A C D E F] [--jobs 2] [--data /usr/share/datasets/fashion-mnist]
    python benchmarks/convergence.py --quick      three methods, one seed, 1,000 steps: ten minutes on two cores
    python benchmarks/convergence.py --report     only the tables and the figure, from the lines that are there

The protocol, fixed before the first run:

- Fashion-MNIST, 28 x 28 pixels, from Debian's package dataset-fashion-mnist, a folder or the Hub.
- `train_unconditional.py`: epsilon, linear betas, a U-ViT of 20 layers, width 64, 4 heads, patch 4, batches of 32,
  AdamW with weight decay 0.03, warm-up of 100 steps and a constant rate, clipping at 1.0, 2,000 steps.
- Every 50 steps: the loss of 512 test images with noise and timesteps that stay the same, of the averaged weights
  (decay 0.995, reached by and by as the scripts do it) and of the raw ones. What is reported is that of the averaged
  weights, and that of the raw ones beside it. The final loss is the mean of the last three.
- A run diverges that can not go on, or whose final loss, of either weights, is above that of its first evaluation; a
  plain model that does is nobody's target. (Added after the first twelve runs, of which one had fallen apart at a loss
  of 1; "of either weights" after one fell apart so late that the averaged ones were still on their way.)
- A target is reached at the first of three evaluations in a row that are all below it. The target is the final loss of
  the plain model, which takes it all 2,000 steps. The result is 2,000 / the method's steps.

Parts:

- A, tuned rates, which is the claim that counts: five rates, one seed, for all methods; then each method at its best
  rate (of the lowest final loss) with seeds 0 to 2. The target is that of the plain model at its best rate with the
  same seed; median and range over the seeds.
- B, equal settings, the paper's protocol: the runs of A at equal rates; the target is that of the plain model there.
- C, one thing changed at a time, at the best rates of A: 12 and 28 layers, batches of 16 and 64; and a small U-Net
  (UNet2DModel, three levels of 16, 32 and 32 channels, attention in the last: 9 skips) at four rates of its own, one
  seed. (Its widths and rates were settled after A, before its own first run.)
- D, what of CS it is: a plain model whose `skip_proj`, which reads the skips, is initialised times k, is trained at a
  rate times k, or both with all that makes it equal to CS but for clipping (benchmarks/without_factors.py).
- E, batches of 64 with seeds 0 to 2, of the plain model and of the method that was furthest from it there. (Added once
  that was known from C, to see whether it was the seed.)
- F, the optimizer of U-ViT's CIFAR-10 model, as in the paper: betas of 0.99 and 0.999 and no clipping, all else as in
  A, at four rates; then each method at its best one with seeds 0 to 2. (Added after A, where nothing was unstable, and
  after a plain run and one of CS at 2e-3 that showed the plain one to swing with this optimizer.)

Each run is a process of one thread. Interrupted, the same command goes on. A finished run is a line of
benchmarks/convergence.jsonl, and is not done again.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from convergence_report import draw_figure, tables, tables_of_quick
from convergence_runs import AS_UVIT, METHODS, MODELS, SETTLED, SIZE, TRAINING, Results, Run, runs_of
from measure import exit_when_told


PARTS = ("A", "C", "D", "E", "F")
DEBIANS = "/usr/share/datasets/fashion-mnist"
FIGURES = Path(__file__).parents[1] / "docs" / "images"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    of_a = "all by default; B is taken from the runs of A"
    add("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; {of_a}")
    names = ", ".join(f'"{name}"' for name in METHODS)
    add("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS), metavar="NAME", help=f"of {names}")
    add("--quick", action="store_true", help="a few runs, kept apart from the others")
    add(
        "--report", action="store_true", help="do no run: print the tables and draw the figure of those that are there"
    )
    add("--jobs", type=int, default=os.cpu_count(), help="how many runs at a time (default: one for each core)")
    add("--data", default=DEBIANS, help="a folder with Fashion-MNIST, or its id on the Hub (default %(default)s)")
    add("--folder", type=Path, default=Path("runs/convergence"), help="of the runs (default %(default)s)")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    exit_when_told()
    try:
        compare(arguments)
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on")
    except OSError as error:
        parser.error(str(error))


def compare(arguments: argparse.Namespace):
    arguments.folder.mkdir(parents=True, exist_ok=True)
    quick = arguments.quick
    results = Results(arguments.folder / "quick.jsonl" if quick else Path(__file__).with_suffix(".jsonl"))
    if not arguments.report:
        with results.locked():
            team = Team(arguments.folder, data_flag(arguments.data, arguments.folder), results, arguments.jobs)
            for part in ["quick"] if quick else arguments.parts:
                # Twice: best rates are known only when all rates are done.
                for _ in range(2):
                    team.do([run for run in runs_of(part, results) if run.method in arguments.methods])
    print(tables_of_quick(results) if quick else tables(results))
    if not quick:
        draw_figure(results, FIGURES)


def data_flag(data: str, folder: Path) -> str:
    """Debian's files are written anew as the parquet files that a script reads."""
    if not Path(data).is_dir():
        if Path(data).is_absolute():
            sys.exit(
                f"there is no folder {data}: apt-get install dataset-fashion-mnist, or give --data another folder "
                "with Fashion-MNIST or its id on the Hub"
            )
        return f"--dataset_name={data}"
    if not list(Path(data).glob("*-images-idx3-ubyte.gz")):
        return f"--train_data_dir={data}"
    import datasets
    import numpy as np
    from PIL import Image

    datasets.disable_progress_bars()
    out = (folder / "fashion-mnist").resolve()
    out.mkdir(exist_ok=True)
    for split, stem in (("train", "train"), ("test", "t10k")):
        file = out / f"{split}.parquet"
        with gzip.open(Path(data, f"{stem}-images-idx3-ubyte.gz")) as images:
            pixels = np.frombuffer(images.read(), np.uint8, offset=16).reshape(-1, SIZE, SIZE)
        columns = {"image": [Image.fromarray(image) for image in pixels]}
        table = datasets.Dataset.from_dict(columns, features=datasets.Features({"image": datasets.Image()}))
        table.to_parquet(file.with_suffix(".partial"))
        file.with_suffix(".partial").rename(file)
    return f"--train_data_dir={out}"


class Team:
    """Some runs at a time, each in a process of its own."""

    def __init__(self, folder: Path, data: str, results: Results, jobs: int):
        self.folder = folder
        self.data = data
        self.results = results
        self.jobs = jobs
        self.processes: dict[Run, subprocess.Popen] = {}
        self.durations: list[float] = []
        for name, config in MODELS.items():
            self._config(name).write_text(json.dumps(config))

    def do(self, runs: list[Run]):
        waiting = [run for run in dict.fromkeys(runs) if run not in self.results]
        started = {}
        try:
            while waiting or self.processes:
                while waiting and len(self.processes) < self.jobs:
                    run = waiting.pop(0)
                    started[run] = time.monotonic()
                    self.processes[run] = self._start(run)
                time.sleep(1)
                for run in [run for run, process in self.processes.items() if process.poll() is not None]:
                    self._collect(run, self.processes.pop(run))
                    self.durations.append(time.monotonic() - started[run])
                    self._say(run, len(waiting))
        except BaseException:
            # Each saves a checkpoint, and is gone on with by the same command.
            for process in self.processes.values():
                process.terminate()
            for process in self.processes.values():
                process.wait()
            raise

    def _start(self, run: Run) -> subprocess.Popen:
        folder = self.folder / run.name
        settings = {
            **TRAINING,
            **(AS_UVIT if run.as_uvit else {}),
            "output_dir": folder,
            "model_config_name_or_path": self._config(run.model),
            "learning_rate": run.learning_rate,
            "seed": run.seed,
            "train_batch_size": run.batch_size,
            "max_train_steps": run.steps,
        }
        words = [self.data, *METHODS[run.method], *(f"--{name}={value}" for name, value in settings.items())]
        if any(folder.glob("checkpoint-*")):
            words.append("--resume_from_checkpoint=latest")
        script = ["-m", "scalelong_diffusers.train.train_unconditional"]
        if run.of_cs is not None:
            script = [str(Path(__file__).with_name("without_factors.py")), f"--of_cs={run.of_cs}"]
        with open(self._errors(run), "w") as errors:
            return subprocess.Popen(
                [sys.executable, *script, *words],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # an interrupt is for the benchmark, which ends it
            )

    def _config(self, model: str) -> Path:
        return self.folder / f"{model}.json"

    def _errors(self, run: Run) -> Path:
        return self.folder / f"{run.name}.log"

    def _collect(self, run: Run, process: subprocess.Popen):
        said = self._errors(run).read_text().strip().splitlines() or ["it said nothing"]
        stopped = said[-1] if process.returncode else None
        if stopped is not None and "not finite" not in stopped:
            sys.exit(f"{run.name} ended with {process.returncode}: {stopped}")
        lines = [json.loads(line) for line in (self.folder / run.name / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines]
        if steps != sorted(set(steps)):
            sys.exit(f"{self.folder / run.name} was written by two processes at once: delete it, and start again")
        evaluated = [line for line in lines if "validation_loss" in line]
        norms = [line["grad_norm"] for line in lines if line["step"] > SETTLED and line["grad_norm"] is not None]
        self.results.add(
            run,
            {
                "stopped": stopped,
                "evaluations": [
                    [line["step"], _rounded(line["validation_loss"]), _rounded(line["validation_loss_raw"])]
                    for line in evaluated
                ],
                "grad_norm": {"mean": statistics.mean(norms), "max": max(norms)} if norms else None,
                "images_per_second": statistics.median(line["images_per_second"] for line in lines) if lines else None,
            },
        )

    def _say(self, run: Run, waiting: int):
        seconds = statistics.median(self.durations) * (waiting / self.jobs + 1) if waiting else 0
        print(
            f"{run.name}: loss {self.results.final_loss(run):.4f}; {waiting} more, about {seconds / 60:.0f} minutes",
            flush=True,
        )


def _rounded(loss: float | None) -> float | None:
    """None is a loss that was not finite."""
    return None if loss is None else round(loss, 5)


if __name__ == "__main__":
    main()
