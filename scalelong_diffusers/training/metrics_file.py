"""`metrics.jsonl`: one line of JSON for each logged step."""

import json
import math
from pathlib import Path
from typing import Any

from scalelong_diffusers.files import atomic_write


class MetricsFile:
    """A file in which every step has one line, also if the run is resumed."""

    def __init__(self, file: Path):
        self.file = file

    def resume_at(self, step: int):
        """Remove the lines of later steps, which will be done again, and a line that was cut off."""
        lines = [line for line in self._lines() if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        atomic_write(self.file, lambda partial: partial.write_text(text))

    def write(self, line: dict[str, Any]):
        # JSON has no infinities: they are written as null.
        text = json.dumps(_without_infinities(line), allow_nan=False)
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def last(self, name: str) -> Any:
        """Return the latest value of a figure, or None."""
        return next((line[name] for line in reversed(self._lines()) if name in line), None)

    def _lines(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        lines = []
        for text in self.file.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break  # the process was killed while it wrote this line
        return lines


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinities(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_infinities(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
