"""Files that are there whole or not at all, whenever the process that writes them is killed."""

import json
import os
from collections.abc import Callable
from pathlib import Path


def write_whole(file: Path, write: Callable[[Path], None]):
    """Have a file written aside, synced and renamed."""
    partial = file.with_name(f".{file.name}.part")
    write(partial)
    sync(partial)
    os.replace(partial, file)
    sync(file.parent)


def write_json(file: Path, content: object):
    text = json.dumps(content, indent=2) + "\n"
    write_whole(file, lambda partial: partial.write_text(text, encoding="utf-8"))


def sync(path: Path):
    """Have a file or folder on the disk, not in the system's memory alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
