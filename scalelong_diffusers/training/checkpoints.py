"""Checkpoints that are there whole or not at all, and that are known to be whole before they are trusted."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from scalelong_diffusers.files import sync


CHECKSUMS_FILE = "checksums.json"
LATEST = "latest"
_PREFIX = "checkpoint-"
# Leading dot: what is being written, or thrown away, is nobody's checkpoint.
_PARTIAL, _OLD = ".partial-", ".old-"


class Checkpoints:
    """The folders `checkpoint-<step>` of a run; `limit` is how many of them are kept."""

    def __init__(self, folder: Path, limit: int | None = None):
        self.folder = folder
        self.limit = limit

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """
        Have the files written aside, synced and renamed; the oldest beyond the limit go only after that.

        A run that ends anywhere in between has all of its earlier checkpoints, and what is half-written is removed by
        the next.
        """
        partial = self.folder / f"{_PARTIAL}{step}"
        try:
            partial.mkdir(parents=True)
            write(partial)
            _write_text(partial / CHECKSUMS_FILE, json.dumps(_checksums(partial), indent=2) + "\n")
            _sync_tree(partial)
            final = self.folder / f"{_PREFIX}{step}"
            replace_folder(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._remove_beyond_limit(final)
        return final

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, from the first; whether they are whole, `check` tells."""
        names = [path.name.removeprefix(_PREFIX) for path in self.folder.glob(f"{_PREFIX}*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step}"

    def find(self, which: str) -> tuple[Path, list[str]]:
        """The checkpoint that is asked for, by path, name or "latest", and why others had to be passed over."""
        if which != LATEST:
            path = next((path for path in (self.folder / which, Path(which)) if path.is_dir()), None)
            if path is None:
                raise ValueError(f"there is no checkpoint {which} to resume from; {self._there_are()}")
            if broken := damage(path):
                raise ValueError(f"{path} can not be resumed from: {broken}; {self._there_are()}")
            self._check_none_is_later(path)
            return path, []
        passed_over = []
        for path in map(self.path, reversed(self.steps())):
            broken = damage(path)
            if broken is None:
                return path, passed_over
            passed_over.append(f"{path} is passed over: {broken}")
        if passed_over:
            raise ValueError(
                f"{self.folder} has no whole checkpoint to resume from: {'; '.join(passed_over)}; to start anew "
                "remove them, or give another folder"
            )
        raise ValueError(f"{self.folder} has no checkpoint to resume from; without the flag a run starts anew")

    def remove_leftovers(self):
        """Remove what a killed run left half-written, or half-removed."""
        for prefix in (_PARTIAL, _OLD):
            for path in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(path)

    def _remove_beyond_limit(self, newest: Path):
        if self.limit is None:
            return
        others = [self.path(step) for step in self.steps() if self.path(step) != newest]
        for path in others[: len(others) - (self.limit - 1)]:
            _remove(path)

    def _check_none_is_later(self, path: Path):
        """Another continuation of the same run would be mixed up with this one."""
        number = path.name.removeprefix(_PREFIX)
        later = [step for step in self.steps() if number.isdecimal() and step > int(number)]
        if whole := [self.path(step).name for step in later if damage(self.path(step)) is None]:
            raise ValueError(
                f"{self.folder} has later checkpoints than {path.name}: move {', '.join(whole)} away first"
            )

    def _there_are(self) -> str:
        there = ", ".join(self.path(step).name for step in self.steps())
        return f"{self.folder} has {there or 'none'}"


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None where every file is as it was written."""
    try:
        written = json.loads((checkpoint / CHECKSUMS_FILE).read_text())
    except (OSError, ValueError) as error:
        return f"its {CHECKSUMS_FILE} can not be read ({error})"
    for name, checksum in written.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if _checksum(file) != checksum:
            return f"{name} is not what was written"
    return None


def replace_folder(new: Path, final: Path):
    """Rename a folder to where another may be, which is moved aside first: folders can not be exchanged at once."""
    old = final.with_name(f"{_OLD}{final.name}")
    if final.exists():
        os.rename(final, old)
    os.rename(new, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_text(file: Path, text: str):
    file.write_text(text, encoding="utf-8")


def _remove(checkpoint: Path):
    """Renamed first, so that a checkpoint that is half removed does not look like one."""
    old = checkpoint.with_name(f"{_OLD}{checkpoint.name}")
    os.rename(checkpoint, old)
    shutil.rmtree(old)


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _checksum(path) for path in files}


def _checksum(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_tree(folder: Path):
    for path in [*folder.rglob("*"), folder]:
        sync(path)
