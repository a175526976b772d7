"""The `checkpoint-<step>` folders of a run: written atomically, and verified before they are trusted."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import checksum, sync, write_json


CHECKSUMS_FILE = "checksums.json"
LATEST = "latest"
_PREFIX = "checkpoint-"
# Folders with a leading dot are being written or removed. They are never taken for checkpoints.
_PARTIAL, _OLD = ".partial-", ".old-"


class Checkpoints:
    """The checkpoints of a run in `folder`. Only the latest `limit` are kept."""

    def __init__(self, folder: Path, limit: int | None = None):
        self.folder = folder
        self.limit = limit

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """
        Write a checkpoint to a temporary folder, sync and rename it, and remove the oldest ones beyond the limit.

        If the process is killed at any point, all earlier checkpoints are still complete.
        """
        partial = self.folder / f"{_PARTIAL}{step}"
        try:
            partial.mkdir(parents=True)
            write(partial)
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            checksums = {path.relative_to(partial).as_posix(): checksum(path) for path in files}
            write_json(partial / CHECKSUMS_FILE, checksums)
            for path in [*partial.rglob("*"), partial]:
                sync(path)
            final = self.path(step)
            replace_folder(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._remove_beyond_limit(final)
        return final

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in order, complete or not."""
        names = [path.name.removeprefix(_PREFIX) for path in self.folder.glob(f"{_PREFIX}*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step}"

    def find(self, which: str) -> tuple[Path, list[str]]:
        """Return the requested checkpoint ("latest", a name or a path), and why others were skipped."""
        if which != LATEST:
            path = next((path for path in (self.folder / which, Path(which)) if path.is_dir()), None)
            if path is None:
                raise UserError(f"there is no checkpoint {which}; {self._list_steps()}")
            if broken := damage(path):
                raise UserError(f"cannot resume from {path}: {broken}; {self._list_steps()}")
            self._check_is_latest(path)
            return path, []
        skipped = []
        for path in map(self.path, reversed(self.steps())):
            broken = damage(path)
            if broken is None:
                return path, skipped
            skipped.append(f"skipped {path}: {broken}")
        if skipped:
            raise UserError(
                f"{self.folder} has no complete checkpoint: {'; '.join(skipped)}; remove them to start again, or pass "
                "another folder"
            )
        raise UserError(f"{self.folder} has no checkpoint to resume from; leave the flag out to start a new run")

    def remove_leftovers(self):
        """Remove what a killed run left half-written or half-removed."""
        for prefix in (_PARTIAL, _OLD):
            for path in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(path)

    def _remove_beyond_limit(self, newest: Path):
        if self.limit is None:
            return
        others = [self.path(step) for step in self.steps() if self.path(step) != newest]
        for path in others[: len(others) - (self.limit - 1)]:
            # Renamed first, so that a half-removed checkpoint does not look like one.
            old = path.with_name(f"{_OLD}{path.name}")
            os.rename(path, old)
            shutil.rmtree(old)

    def _check_is_latest(self, path: Path):
        """Raise a `UserError` if a second continuation of the run would mix its checkpoints with later ones."""
        number = path.name.removeprefix(_PREFIX)
        later = [self.path(step) for step in self.steps() if number.isdecimal() and step > int(number)]
        if complete := [other.name for other in later if damage(other) is None]:
            raise UserError(
                f"{self.folder} has later checkpoints than {path.name}: move {', '.join(complete)} away first"
            )

    def _list_steps(self) -> str:
        names = ", ".join(self.path(step).name for step in self.steps())
        return f"{self.folder} has {names or 'no checkpoints'}"


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if every file has the content that was written."""
    try:
        checksums = json.loads((checkpoint / CHECKSUMS_FILE).read_text())
    except (OSError, ValueError) as error:
        return f"cannot read its {CHECKSUMS_FILE} ({error})"
    for name, expected in checksums.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if checksum(file) != expected:
            return f"{name} has changed since it was written"
    return None


def replace_folder(new: Path, final: Path):
    """Rename a folder. An existing one is moved aside first, since folders cannot be exchanged atomically."""
    old = final.with_name(f"{_OLD}{final.name}")
    if final.exists():
        os.rename(final, old)
    os.rename(new, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)
