"""Where the figures of a run go: `metrics.jsonl`, the trackers of accelerate, and the progress bar."""

import json
import math
import os
from pathlib import Path
from typing import Any


class MetricsFile:
    """One line of JSON for each logged step, each step once, also when a run is resumed."""

    def __init__(self, file: Path):
        self.file = file

    def resume_at(self, step: int):
        """Forget the lines of later steps, which are about to be done again, and a line that was cut off."""
        lines = [line for line in self._lines() if line["step"] <= step]
        partial = self.file.with_suffix(".part")
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.replace(partial, self.file)

    def write(self, line: dict[str, Any]):
        # JSON has no infinity, and what is not finite is no figure.
        text = json.dumps(_without_infinities(line), allow_nan=False)
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def last(self, name: str) -> Any:
        """The latest value of a figure, or None."""
        return next((line[name] for line in reversed(self._lines()) if name in line), None)

    def _lines(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        lines = []
        for text in self.file.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break  # the process ended while it wrote this one
        return lines


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinities(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_infinities(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
