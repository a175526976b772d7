"""The folder of features while it is written: by several processes, and by another start where one was killed."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from scalelong_diffusers.data import TrainingData, UnreadableImage
from scalelong_diffusers.data.draws import Draws
from scalelong_diffusers.data.images import Transform
from scalelong_diffusers.data.precomputed import (
    EMPTY_CAPTION_FILE,
    FORMAT_VERSION,
    INDEX_FILE,
    read_index,
    save_empty_caption,
    save_shard,
    shard_is_complete,
    shard_path,
)
from scalelong_diffusers.data.sources import Source
from scalelong_diffusers.data.stream import ImageRows, Stream
from scalelong_diffusers.files import atomic_write, write_json


@dataclass(frozen=True)
class RowsToEncode:
    """All that the data set has of a row, neither mirrored nor drawn; an image that can not be read leaves a gap."""

    source: Source
    transform: Transform
    has_labels: bool
    has_captions: bool
    skip_bad: bool

    def read(self, index: int, draws: Draws) -> dict[str, Any]:
        columns = {"unreadable": None}
        try:
            columns |= ImageRows(self.source, self.transform, self.has_labels, False).read(index, draws)
        except UnreadableImage as error:
            if not self.skip_bad:
                raise
            size, channels = self.transform.resolution, self.transform.channels
            columns |= {"pixel_values": np.zeros((size, size, channels), np.uint8), "unreadable": str(error)}
            columns |= {"labels": self.source.label(index)} if self.has_labels else {}
        return columns | ({"all_captions": self.source.captions(index)} if self.has_captions else {})

    def name(self, index: int) -> str:
        return self.source.name(index)


@dataclass(frozen=True)
class ShardToWrite:
    file: Path
    rows: RowsToEncode
    indices: np.ndarray

    def is_complete(self) -> bool:
        return shard_is_complete(self.file)

    def batches(self, batch_size: int, num_workers: int) -> DataLoader:
        stream = Stream("precompute", self.rows, self.indices, seed=0, endless=False, skip_bad=False)
        return stream.batches(batch_size, num_workers=num_workers)

    def write(self, batches: list[dict[str, torch.Tensor | list]]):
        """Columns of the shard's batches in their order, with `all_captions` and `unreadable` among them."""
        joined = {name: [entry for batch in batches for entry in batch[name]] for name in batches[0]}
        reasons = joined.pop("unreadable")
        captions = joined.pop("all_captions", [])
        columns = {name: torch.stack(entries).contiguous() for name, entries in joined.items()}
        unreadable = {row: reason for row, reason in enumerate(reasons) if reason is not None}
        atomic_write(self.file, lambda partial: save_shard(partial, columns, captions, unreadable))


class FeatureWriter:
    """
    Shards that are there are kept, once they are read and found whole; the index says at last that all are there.

    Args:
        made_of: encoders, transform, data and format: what has to be the same where another start goes on.
    """

    def __init__(self, folder: Path, data: TrainingData, made_of: dict[str, Any], on_bad_image: str):
        self.folder = folder
        self.made_of = made_of
        self.images = {
            "description": data.description,
            "channels": data.channels,
            "num_classes": data.num_classes,
            "class_names": data.class_names,
            "first_image_size": list(data.first_image_size),
        }
        rows = data.train.rows
        sources = {"train": rows.source}
        if data.validation.rows.source is not rows.source:
            sources["validation"] = data.validation.rows.source
        plain = dataclasses.replace(rows.transform, random_flip=False)
        self._rows = {
            name: RowsToEncode(source, plain, rows.needs_labels, rows.needs_captions, on_bad_image == "skip")
            for name, source in sources.items()
        }

    def begin(self):
        """Refuse a folder of other features; call it in one process."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"--output_dir {self.folder} can not be written: {error}") from error
        before = read_index(self.folder)
        if before is None and any(self.folder.iterdir()):
            raise ValueError(f"--output_dir {self.folder} is not empty and holds no features: give another folder")
        changed = [] if before is None else _differences(before["made_of"], self.made_of)
        if changed:
            raise ValueError(
                f"--output_dir {self.folder} holds other features: {'; '.join(changed)}; give the same, or another "
                "folder"
            )
        for partial in self.folder.glob(".*.part"):
            partial.unlink()
        self._write_index(finished=False)

    def shards(self, rank: int = 0, num_processes: int = 1) -> Iterator[ShardToWrite]:
        """Those of one process."""
        per_shard = self.made_of["rows_per_shard"]
        for name, rows in self._rows.items():
            starts = range(0, len(rows.source), per_shard)
            for number, start in list(enumerate(starts))[rank::num_processes]:
                indices = np.arange(start, min(start + per_shard, len(rows.source)))
                yield ShardToWrite(shard_path(self.folder, name, number), rows, indices)

    def turns(self, rank: int, num_processes: int) -> list[ShardToWrite | None]:
        """The shards of one process, and None where only others have one left: all have as many turns."""
        most = self.shards(0, num_processes)
        return [shard for _, shard in zip_longest(most, self.shards(rank, num_processes))]

    def write_empty_caption(self, states: torch.Tensor):
        atomic_write(self.folder / EMPTY_CAPTION_FILE, lambda file: save_empty_caption(file, states))

    def finish(self) -> int:
        """Say that all is there, and return how many bytes that is; call it in one process."""
        self._write_index(finished=True)
        return sum(shard.file.stat().st_size for shard in self.shards())

    def _write_index(self, finished: bool):
        splits = {name: {"rows": len(rows.source)} for name, rows in self._rows.items()}
        if finished:
            for name in splits:
                files = [shard.file for shard in self.shards() if shard.file.name.startswith(f"{name}-")]
                splits[name]["bytes"] = [file.stat().st_size for file in files]
        index = {"format_version": FORMAT_VERSION, "finished": finished, "made_of": self.made_of}
        write_json(self.folder / INDEX_FILE, {**index, "images": self.images, "splits": splits})


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = [name for name in now if _nameless(before.get(name)) != _nameless(now[name])]
    return [f"{name} was {before.get(name)!r} and is {now[name]!r}" for name in names]


def _nameless(made_of: Any) -> Any:
    """An encoder is known by its weights, wherever it was loaded from."""
    return {k: v for k, v in made_of.items() if k != "name"} if isinstance(made_of, dict) else made_of
