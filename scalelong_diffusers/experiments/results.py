"""Result files of resumable benchmarks: one JSON line per finished run, which may be committed at any time."""

import fcntl
import json
import os
import platform
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch


Run = TypeVar("Run")


class ResultFile(Generic[Run]):
    """
    The results of finished runs.

    Args:
        run_class: frozen dataclass that describes a run.
    """

    def __init__(self, file: Path, run_class: type[Run]):
        self.file = file
        self.run_class = run_class
        self._read()

    def _read(self) -> int:
        """Read all complete lines and return their size in bytes; a truncated line may follow."""
        content = self.file.read_bytes() if self.file.exists() else b""
        size = content.rfind(b"\n") + 1
        lines = map(json.loads, content[:size].splitlines())
        self.lines: dict[Run, dict[str, Any]] = {self.run_class(**line["run"]): line for line in lines}
        return size

    @contextmanager
    def locked(self):
        """Lock the file against other processes, or exit if one holds it."""
        with open(self.file, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.exit(f"another process is adding runs to {self.file}: wait until it has finished")
            self._read()  # lines that the other process added before it ended
            yield

    def add(self, run: Run, measurements: dict[str, Any]):
        """Append the line of a run."""
        line = {"run": asdict(run), **measurements, "machine": {**machine(), "threads": 1}}
        size = self._read()  # again, since git may have changed the file during the run
        with open(self.file, "ab") as file:
            file.truncate(size)
            file.write(json.dumps(line).encode() + b"\n")
        self.lines[run] = line

    def __contains__(self, run: Run) -> bool:
        return run in self.lines


def machine() -> dict[str, str | int]:
    """Return versions and hardware, for result files."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    if not os.path.exists("/proc/cpuinfo"):
        return platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
