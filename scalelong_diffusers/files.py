"""Write files atomically, read JSON, and compute checksums."""

import hashlib
import json
import math
import os
import reprlib
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from scalelong_diffusers.errors import UserError


# Folders with this prefix are being written or removed. A killed process may leave them.
PARTIAL = ".scalelong-partial-"


class UnwritableFile(UserError, OSError):
    """A file cannot be written, for example because the disk is full. The message names it."""


def atomic_write(file: Path, write: Callable[[Path], None], durable: bool = True):
    """
    Write a file so that a reader sees either the old or the new content, even if the process is killed.

    Raises [`UnwritableFile`] if that fails.

    Args:
        write: function that writes the content to the temporary path that it receives.
        durable: sync to disk before and after the rename. Turn it off for many small files that can be made again.
    """
    # A new folder, because some writers make temporary files next to the path. Its name cannot be guessed.
    folder = file.with_name(f"{PARTIAL}{secrets.token_hex(8)}")
    try:
        folder.mkdir(mode=0o700)
        try:
            partial = folder / file.name
            write(partial)
            if durable:
                sync(partial)
            os.replace(partial, file)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if durable:
            sync(file.parent)
    except (OSError, SafetensorError) as error:
        raise UnwritableFile(f"{file} cannot be written: {' '.join(str(error).split())}") from error


def remove_leftovers(folder: Path):
    """Remove what killed processes left half-written or half-removed. Call this while holding the folder's lock."""
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path)


def write_json(file: Path, content: object):
    """Write indented JSON atomically."""
    text = json.dumps(content, indent=2) + "\n"
    atomic_write(file, lambda partial: partial.write_text(text, encoding="utf-8"))


def read_json_file(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raise a `UserError` that names the file if the file holds anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object, got {reprlib.repr(content)}")
    return content


def parse_log_line(text: bytes) -> dict[str, Any] | None:
    """Return a line of a training's log, or None if it is incomplete or broken."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def without_infinities(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {name: without_infinities(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_infinities(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync(path: Path):
    """Flush a file or folder from the system's cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(*parts: Path | bytes | str | torch.Tensor) -> str:
    """Return the SHA-256 of the parts in order: the content of files, bytes, text, or tensors with their dtype."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with open(part, "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
        elif isinstance(part, torch.Tensor):
            digest.update(f"{part.dtype} {tuple(part.shape)} ".encode())
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        else:
            content = part.encode() if isinstance(part, str) else part
            digest.update(f"{len(content)} ".encode())
            digest.update(content)
    return digest.hexdigest()
