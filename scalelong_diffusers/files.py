"""Write files atomically and compute checksums."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch


def atomic_write(file: Path, write: Callable[[Path], None], durable: bool = True):
    """
    Write a file so that a reader sees either the old or the new content, even if the process is killed.

    Args:
        write: function that writes the content to the temporary path that it receives.
        durable: sync to disk before and after the rename. Turn it off for many small files that can be made again.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        write(partial)
        if durable:
            sync(partial)
        os.replace(partial, file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        sync(file.parent)


def write_json(file: Path, content: object):
    """Write indented JSON atomically."""
    text = json.dumps(content, indent=2) + "\n"
    atomic_write(file, lambda partial: partial.write_text(text, encoding="utf-8"))


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
