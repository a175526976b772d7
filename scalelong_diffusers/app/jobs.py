"""Run a command in its own process, which the app can follow and stop."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalelong_diffusers.errors import UserError


_SECONDS_TO_STOP = 60  # a training saves a checkpoint


class Job:
    """One command at a time. Its output goes to a temporary file."""

    def __init__(self, name: str):
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="scalelong-")
        self._process: subprocess.Popen | None = None
        self._is_stopped = False
        self.output: Path | None = None  # where the command writes its results

    @property
    def folder(self) -> Path:
        """A folder for files of the command."""
        return Path(self._folder.name)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, module: str, words: Sequence[str], flags: Mapping[str, Any], output: Path):
        """Start `python -m module`, which writes into `output`. Flags whose value is None are left out."""
        if self.is_running:
            raise UserError(f"a {self.name} is already running: stop it first")
        given = [f"--{name}={value}" for name, value in flags.items() if value is not None]
        self._is_stopped, self.output = False, output
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *words, *given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only the app, which stops its jobs
            )

    def stop(self):
        """End the process, if it is running, and wait until it has ended."""
        if not self.is_running:
            return
        self._is_stopped = True
        self._process.terminate()
        try:
            self._process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self):
        self.stop()
        self._folder.cleanup()

    def state(self) -> str:
        """Return what the process does, or how it ended. Raise its message as a `UserError` if it failed."""
        if self._process is None:
            return "Not started."
        if self.is_running:
            percents = re.findall(r"(\d+)%\|", self._log.read_text(errors="replace"))
            return f"Running: {percents[-1] if percents else 0} %."
        if self._is_stopped:
            return "Stopped."
        if self._process.returncode:
            raise UserError(f"the {self.name} failed: {self._last_message()}")
        return "Finished."

    @property
    def _log(self) -> Path:
        return self.folder / "messages.txt"

    def _last_message(self) -> str:
        lines = [line for line in re.split("[\r\n]", self._log.read_text(errors="replace")) if line.strip()]
        return lines[-1] if lines else f"exit code {self._process.returncode}"
