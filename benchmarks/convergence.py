"""
When does training with scaled skips take fewer steps, and how many fewer?

    python benchmarks/convergence.py [--parts A C D E F] [--jobs 2] [--data /usr/share/datasets/fashion-mnist]
    python benchmarks/convergence.py --quick      three methods, one seed, 1,000 steps
    python benchmarks/convergence.py --report     only the tables and the figure, from the finished runs

The protocol, fixed before the first run:

- Fashion-MNIST, 28 x 28 pixels, from Debian's package dataset-fashion-mnist, a folder or the Hub.
- `train_unconditional.py`: epsilon prediction, linear betas, a U-ViT with 20 layers, width 64, 4 heads and patch size
  4, batch size 32, AdamW with weight decay 0.03, 100 warm-up steps and then a constant learning rate, gradients
  clipped at 1.0, 2,000 steps.
- Every 50 steps: the loss of 512 test images with fixed noise and timesteps, for the EMA weights (maximum decay 0.995,
  which ramps up as in the scripts) and for the raw weights. The headline numbers use the EMA weights; the tables also
  show the raw weights. The final loss is the mean of the last three evaluations.
- A run diverges if it stops early or if its final loss, in EMA or raw weights, is above its first evaluation. A plain
  run that diverges sets no target. (Added after the first twelve runs, of which one had diverged to a loss of 1; "in
  EMA or raw weights" after a run diverged so late that its EMA weights did not show it yet.)
- A target is reached at the first of three consecutive evaluations below it. The target is the final loss of the plain
  model after all 2,000 steps. The speed-up is 2,000 / the steps of the method.

Parts:

- A, tuned learning rates, the claim that counts: five learning rates with one seed for each method; then each method
  at its best learning rate (lowest final loss) with seeds 0 to 2. The target is the plain model at its own best
  learning rate with the same seed. Reported are median and range over the seeds.
- B, equal settings, the paper's protocol: the runs of A at equal learning rates. The target is the plain model at the
  same learning rate.
- C, one change at a time, at the best learning rates of A: 12 and 28 layers, batch sizes 16 and 64; and a small U-Net
  (UNet2DModel, three levels with 16, 32 and 32 channels, attention in the last: 9 skips) at its own four learning
  rates, one seed. (The widths and learning rates of the U-Net were chosen after A, before its first run.)
- D, the parts of CS: a plain model whose `skip_proj`, which reads the skips, starts with weights times k, or trains
  with a learning rate times k, or has both and everything else that makes it equal to CS, except for clipping
  (benchmarks/without_factors.py).
- E, batch size 64 with seeds 0 to 2, for the plain model and the method that differed most from it there. (Added after
  C, to see whether the seed was the reason.)
- F, the optimizer of U-ViT's CIFAR-10 model, as in the paper: betas 0.99 and 0.999 and no clipping, everything else as
  in A, at four learning rates; then each method at its best learning rate with seeds 0 to 2. (Added after A, where no
  run was unstable, and after two runs at 2e-3, plain and CS, which showed that the plain model is unstable with this
  optimizer.)

Each run is a process with one thread. To resume after an interruption, run the same command again. Finished runs are
lines of benchmarks/convergence.jsonl and are not repeated.
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

from convergence_report import draw_figure, quick_table, tables
from convergence_runs import AS_UVIT, METHODS, MODELS, SETTLED, SIZE, TRAINING, Results, Run, runs_of
from measure import exit_on_signals

from scalelong_diffusers.files import atomic_write


PARTS = ("A", "C", "D", "E", "F")
DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
FIGURES = Path(__file__).parents[1] / "docs" / "images"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART",
        help=f"parts to run, of {', '.join(PARTS)} (default: all; B reuses the runs of A)",
    )  # fmt: skip
    names = ", ".join(f'"{name}"' for name in METHODS)
    add(
        "--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS), metavar="NAME",
        help=f"methods to run, of {names} (default: all)",
    )  # fmt: skip
    add("--quick", action="store_true", help="only a few short runs, stored separately")
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
    except OSError as error:
        parser.error(str(error))


def compare(arguments: argparse.Namespace):
    arguments.folder.mkdir(parents=True, exist_ok=True)
    quick = arguments.quick
    results = Results(arguments.folder / "quick.jsonl" if quick else Path(__file__).with_suffix(".jsonl"))
    if not arguments.report:
        with results.locked():
            scheduler = Scheduler(
                arguments.folder, data_flag(arguments.data, arguments.folder), results, arguments.jobs
            )
            for part in ["quick"] if quick else arguments.parts:
                # Twice: the best learning rates are known only after the first pass.
                for _ in range(2):
                    scheduler.run_all([run for run in runs_of(part, results) if run.method in arguments.methods])
    print(quick_table(results) if quick else tables(results))
    if not quick:
        draw_figure(results, FIGURES)


def data_flag(data: str, folder: Path) -> str:
    """Return the data flag of the training script. Debian's idx files are converted to parquet first."""
    if not Path(data).is_dir():
        if Path(data).is_absolute():
            sys.exit(
                f"folder {data} does not exist: run apt-get install dataset-fashion-mnist, or pass a folder with "
                "Fashion-MNIST or its Hub id as --data"
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
        atomic_write(file, table.to_parquet, durable=False)
    return f"--train_data_dir={out}"


class Scheduler:
    """Runs several trainings at a time, each in its own process."""

    def __init__(self, folder: Path, data: str, results: Results, jobs: int):
        self.folder = folder
        self.data = data
        self.results = results
        self.jobs = jobs
        self.processes: dict[Run, subprocess.Popen] = {}
        self.durations: list[float] = []
        for name, config in MODELS.items():
            self._config(name).write_text(json.dumps(config))

    def run_all(self, runs: list[Run]):
        """Train all runs without results and add their results."""
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
                    self._report(run, len(waiting))
        except BaseException:
            # Each run saves a checkpoint, and the same command resumes it.
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
        with open(self._error_log(run), "w") as errors:
            return subprocess.Popen(
                [sys.executable, *script, *words],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches only the benchmark, which stops its runs
            )

    def _config(self, model: str) -> Path:
        return self.folder / f"{model}.json"

    def _error_log(self, run: Run) -> Path:
        return self.folder / f"{run.name}.log"

    def _collect(self, run: Run, process: subprocess.Popen):
        messages = self._error_log(run).read_text().strip().splitlines() or ["no error message"]
        stopped = messages[-1] if process.returncode else None
        if stopped is not None and "finite" not in stopped:
            sys.exit(f"{run.name} exited with code {process.returncode}: {stopped}")
        lines = [json.loads(line) for line in (self.folder / run.name / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines]
        if steps != sorted(set(steps)):
            sys.exit(f"{self.folder / run.name} was written by two processes: delete it and run the benchmark again")
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

    def _report(self, run: Run, waiting: int):
        seconds = statistics.median(self.durations) * (waiting / self.jobs + 1) if waiting else 0
        print(
            f"{run.name}: loss {self.results.final_loss(run):.4f}; {waiting} runs left, {seconds / 60:.0f} minutes",
            flush=True,
        )


def _rounded(loss: float | None) -> float | None:
    """Round a loss. None means that it was not finite."""
    return None if loss is None else round(loss, 5)


if __name__ == "__main__":
    main()
