"""Run many trainings with the package's scripts, several at a time, and collect their results."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic

from scalelong_diffusers.experiments.results import ResultFile, Run
from scalelong_diffusers.files import parse_log_line
from scalelong_diffusers.terminal import print_lines


STOPPED_EARLY = "early"


class Scheduler(Generic[Run]):
    """
    Runs several trainings at a time, each in its own process with one thread.

    A run has a `name`, which is the name of its folder, and a `model`, the config of its model. If the scheduler is
    interrupted, its runs save a checkpoint and are resumed by the next one. The folder of a finished run is deleted,
    except for its log.
    """

    def __init__(self, folder: Path, results: ResultFile[Run], jobs: int):
        self.folder = folder
        self.results = results
        self.jobs = jobs
        self.processes: dict[Run, subprocess.Popen] = {}

    def script(self, run: Run) -> list[str]:
        """Return the script that trains a run, as Python's arguments."""
        return ["-m", "scalelong_diffusers.train.train_unconditional"]

    def settings(self, run: Run) -> dict[str, Any]:
        """Return the flags of a run."""
        raise NotImplementedError

    def is_hopeless(self, run: Run, log: list[dict[str, Any]]) -> bool:
        """Return whether to stop a run that has written this log."""
        return False

    def measurements(self, log: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what the result of a run holds."""
        return {
            "evaluations": evaluations(log),
            "images_per_second": statistics.median(line["images_per_second"] for line in log) if log else None,
        }

    def inspect(self, run: Run, output: Path) -> dict[str, Any]:
        """Return what the result of a completed run also holds, from its output folder before it is deleted."""
        return {}

    def outcome(self, run: Run) -> str:
        """Describe the result of a run in a few words."""
        raise NotImplementedError

    def run_all(self, planned: Callable[[], Iterable[Run]]):
        """Run all planned runs that have no results, and add their results. The plan may depend on the results."""

        def waiting() -> list[Run]:
            return [run for run in planned() if run not in self.results and run not in self.processes]

        try:
            while (queue := waiting()) or self.processes:
                for run in queue[: self.jobs - len(self.processes)]:
                    self.processes[run] = self._start(run)
                time.sleep(1)
                for run, process in list(self.processes.items()):
                    early = process.poll() is None and self.is_hopeless(run, self._log(run))
                    if early:
                        process.terminate()
                        process.wait()
                    if process.poll() is not None:
                        self._collect(run, process, early)
                        del self.processes[run]
                        outcome = f"{run.name}: {self.outcome(run)}; {len(waiting())} runs are waiting"
                        print_lines(f"{time.strftime('%H:%M')} {outcome}")
                        sys.stdout.flush()  # also into a file
        except BaseException:
            for process in self.processes.values():
                process.terminate()
            for process in self.processes.values():
                process.wait()
            raise

    def _start(self, run: Run) -> subprocess.Popen:
        config = self.folder / f"{run.name}.json"
        config.write_text(json.dumps(run.model))
        settings = {
            **self.settings(run),
            "output_dir": self._output(run),
            "model_config_name_or_path": config,
            "checkpoints_total_limit": 1,
        }
        words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items()]
        if any(self._output(run).glob("checkpoint-*")):
            words.append("--resume_from_checkpoint=latest")
        with open(self._error_log(run), "w") as errors:
            return subprocess.Popen(
                [sys.executable, *self.script(run), *words],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches only the benchmark, which stops its runs
            )

    def _output(self, run: Run) -> Path:
        return self.folder / run.name

    def _error_log(self, run: Run) -> Path:
        return self.folder / f"{run.name}.log"

    def _log(self, run: Run) -> list[dict[str, Any]]:
        return read_log(self._output(run))

    def _collect(self, run: Run, process: subprocess.Popen, early: bool = False):
        messages = self._error_log(run).read_text().strip().splitlines() or ["no error message"]
        stopped = STOPPED_EARLY if early else messages[-1] if process.returncode else None
        if stopped is not None and not early and "finite" not in stopped:
            sys.exit(f"{run.name} exited with code {process.returncode}: {stopped}")
        log = self._log(run)
        steps = [line["step"] for line in log]
        if steps != sorted(set(steps)):
            sys.exit(f"{self._output(run)} was written by two processes: delete it and run the benchmark again")
        found = self.inspect(run, self._output(run)) if stopped is None else {}
        self.results.add(run, {"stopped": stopped, **self.measurements(log), **found})
        self._delete(run)

    def _delete(self, run: Run):
        """Delete the folder of a finished run, and keep its log."""
        log = self._output(run) / "metrics.jsonl"
        if log.exists():
            log.replace(self.folder / f"{run.name}.jsonl")
        shutil.rmtree(self._output(run), ignore_errors=True)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's log."""
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines() if file.exists() else []
    return list(filter(None, map(parse_log_line, lines)))


def evaluations(log: list[dict[str, Any]]) -> list[list[float | None]]:
    """Return step, loss in EMA weights and in raw weights of each validation. None means that it was not finite."""
    names = ("validation_loss", "validation_loss_raw")
    return [
        [line["step"], *(None if line[name] is None else round(line[name], 5) for name in names)]
        for line in log
        if names[0] in line
    ]


def exit_on_signals():
    """Exit on SIGTERM and SIGHUP as on Ctrl-C, so that child processes are stopped too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
