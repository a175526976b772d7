"""
Data sets that are larger than the disk, of whose files one row group is read at a time.

It is known how many rows each group has. So the order of an epoch is known before anything is read, and any sample can
be read by its position, whoever reads it and wherever a run was resumed.
"""

import hashlib
import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from huggingface_hub.errors import HTTPError
from PIL import Image

from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.orders import MOST_LANES, Groups
from scalelong_diffusers.data.shard_files import ShardFile, open_shard_file
from scalelong_diffusers.data.tables import (
    VALIDATION_SPLITS,
    ImageTable,
    MissingLabel,
    dataset_errors,
    files_by_split,
    find_column,
    one_line,
)


# Of row groups, which each lane has one of in memory: where they are large there are fewer lanes.
_MEMORY = 2**30
_ENDS_OF_LANES = 2  # row groups in memory beside those of the lanes, where a batch goes from one to the next
_OPENED_AT_A_TIME = 16
_UNREADABLE = (ValueError, OSError, HTTPError, pa.ArrowException, tarfile.TarError)


class BadShard(OSError):
    """A file that can not be read, in a sentence that names it."""


class ShardTable:
    """One split of a data set, as a `Source` whose rows are best asked for group by group."""

    def __init__(
        self,
        files: Sequence[str],
        where: str,
        settings: DataConfig,
        needs_labels: bool,
        needs_captions: bool,
        features: datasets.Features | None = None,
        classes_of: "ShardTable | None" = None,
    ):
        self._settings = settings
        with ThreadPoolExecutor(_OPENED_AT_A_TIME) as threads:
            self._files = list(threads.map(_open, files))
        # The file and the number in it of each row group that has rows.
        self._groups = [(file, number) for file in self._files for number, (rows, _) in enumerate(file.groups) if rows]
        if not self._groups:
            raise ValueError(f"{where} has no images")
        self.group_starts = np.concatenate([[0], np.cumsum([file.groups[number][0] for file, number in self._groups])])
        self._in_memory: OrderedDict[int, ImageTable] = OrderedDict()  # the one used last at the end
        self._schema = self._one_schema(where)
        kinds = ["image"] + ["label"] * needs_labels + ["caption"] * needs_captions
        given = {kind: getattr(settings, f"{kind}_column") for kind in kinds}
        self._columns = {kind: find_column(self._schema.names, kind, given[kind], where) for kind in kinds}
        self.class_names = self.num_classes = None
        if needs_labels:
            self._count_classes(where, features or datasets.Features.from_arrow_schema(self._schema), classes_of)
        self.description = f"{where}, {len(self):,} images in {len(self._files):,} files"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_in_memory": OrderedDict()}  # a worker process reads what it needs

    def __len__(self) -> int:
        return int(self.group_starts[-1])

    def image(self, index: int) -> Image.Image:
        table, row = self._locate(index)
        return table.image(row)

    def label(self, index: int) -> int:
        table, row = self._locate(index)
        return table.label(row)

    def captions(self, index: int) -> list[str]:
        table, row = self._locate(index)
        return table.captions(row)

    def captions_alone(self, groups: Groups) -> Iterator[str]:
        """All captions of all rows, without their images, which are most of what there is to read."""
        for start, count in zip(groups.starts, groups.counts):
            group = self._group_of(start)
            table = self._table_of(group, ["caption"])
            first = start - self.group_starts[group]
            for row in range(first, first + count):
                yield from table.captions(row)

    def name(self, index: int) -> str:
        table, row = self._locate(index)
        return table.name(row)

    def identity(self) -> str:
        """By the names of all files and what they say of their row groups; not by what is in these."""
        digest = hashlib.sha256(repr((self._columns, self.class_names)).encode())
        for file in self._files:
            digest.update(file.identity().encode())
        return digest.hexdigest()

    def first_row_of_last_file(self) -> int:
        last = self._groups[-1][0]
        return int(self.group_starts[next(i for i, (file, _) in enumerate(self._groups) if file is last)])

    def lanes(self) -> int:
        """From how many places at once it is read."""
        largest = max(file.groups[number][1] for file, number in self._groups)
        return min(MOST_LANES, max(1, _MEMORY // max(1, largest)))

    def read_group(self, group: int) -> ImageTable:
        return self._table_of(group, list(self._columns))

    def _table_of(self, group: int, kinds: list[str]) -> ImageTable:
        """The row group with some of the columns of `self._columns`; without that of images it has empty ones."""
        file, number = self._groups[group]
        where = f"row group {number} of {os.path.basename(file.path)}"
        with _errors_of(where, "used"):
            table = file.read(number, [self._columns[kind] for kind in kinds])
            if "image" not in kinds:
                image = self._schema.field(self._columns["image"])
                table = table.append_column(image, pa.nulls(len(table), image.type))
            rows = datasets.Dataset(datasets.table.InMemoryTable(table))
            needs = ("label" in kinds, "caption" in kinds)
            return ImageTable(rows, where, self._settings, *needs, classes_of=self)

    def _group_of(self, index: int) -> int:
        return int(np.searchsorted(self.group_starts, index, side="right")) - 1

    def _locate(self, index: int) -> tuple[ImageTable, int]:
        group = self._group_of(index)
        if group not in self._in_memory:
            if len(self._in_memory) == self.lanes() + _ENDS_OF_LANES:
                self._in_memory.popitem(last=False)  # before the next is read, which takes as much
            self._in_memory[group] = self.read_group(group)
        self._in_memory.move_to_end(group)
        return self._in_memory[group], index - int(self.group_starts[group])

    def _one_schema(self, where: str) -> pa.Schema:
        first = self._files[0]
        for file in self._files:
            if not file.schema.equals(first.schema):
                raise ValueError(
                    f"{where}: {os.path.basename(file.path)} has the columns {_described(file.schema)}, and "
                    f"{os.path.basename(first.path)} has {_described(first.schema)}"
                )
        return first.schema

    def _count_classes(self, where: str, features: datasets.Features, classes_of: "ShardTable | None"):
        column = self._columns["label"]
        self.class_names = getattr(features[column], "names", None)
        if classes_of is not None:
            self.class_names, self.num_classes = classes_of.class_names, classes_of.num_classes
        elif self.class_names is not None:
            self.num_classes = len(self.class_names)
        elif pat.is_integer(self._schema.field(column).type):
            self.num_classes = self._largest_label(where, column) + 1
        else:
            raise ValueError(
                f"column {column!r} of {where} is of type {self._schema.field(column).type}: to stream it, which "
                "classes there are has to be known before all is read; store it as datasets' ClassLabel"
            )

    def _largest_label(self, where: str, column: str) -> int:
        largest = []
        for file in self._files:
            with _errors_of(os.path.basename(file.path), "read"):
                largest.append(file.largest(column))
        if None in largest:
            raise ValueError(
                f"the files of {where} do not say how many classes column {column!r} has, which streaming has to know "
                "before all is read; store it as datasets' ClassLabel"
            )
        return max(largest)


def _open(path: str) -> ShardFile:
    with _errors_of(os.path.basename(path), "read"):
        return open_shard_file(path)


@contextmanager
def _errors_of(where: str, done: str):
    """What can be wrong with a file, in a sentence that names it."""
    try:
        yield
    except _UNREADABLE as error:
        raise BadShard(f"{where} can not be {done}: {one_line(error)}") from error


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def open_shards(
    settings: DataConfig, needs_labels: bool, needs_captions: bool
) -> tuple[ShardTable, ShardTable | None]:
    files, where, features = _hub_files(settings) if settings.train_data_dir is None else _folder_files(settings)
    if "train" not in files:
        raise ValueError(f"{where} has no split 'train'; its splits: {', '.join(files)}")
    needs = (needs_labels, needs_captions)
    train = ShardTable(files["train"], where, settings, *needs, features)
    for name in (name for name in VALIDATION_SPLITS if files.get(name)):
        try:
            split = ShardTable(files[name], f"{where}, split {name}", settings, *needs, features, classes_of=train)
            split.read_group(0)
            return train, split
        except (BadShard, ValueError) as error:
            if isinstance(error.__cause__, MissingLabel):
                continue
            raise
    return train, None


def _folder_files(settings: DataConfig) -> tuple[dict[str, list[str]], str, None]:
    folder = Path(settings.train_data_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"train_data_dir: there is no folder {str(folder)!r}")
    files = files_by_split(folder.resolve(), ".parquet") or files_by_split(folder.resolve(), ".tar")
    if not files:
        raise ValueError(
            f"streaming reads parquet and tar files, and the folder {folder.resolve().name} holds none; without it a "
            "folder of images and one that datasets saved are read from the disk as they are needed, too"
        )
    return files, f"the folder {folder.resolve().name}", None


def _hub_files(settings: DataConfig) -> tuple[dict[str, list[str]], str, datasets.Features | None]:
    name = settings.dataset_name
    with dataset_errors(settings):
        builder = datasets.load_dataset_builder(
            name, settings.dataset_config_name, revision=settings.dataset_revision, cache_dir=settings.cache_dir
        )
    files = {str(split): list(urls) for split, urls in builder.config.data_files.items()}
    others = [url for urls in files.values() for url in urls if not url.endswith(".parquet")]
    if others:
        raise ValueError(
            f"from the Hub streaming reads parquet files, and the data set {name} has {os.path.basename(others[0])}; "
            "of many data sets the Hub keeps a copy that is: dataset_revision='refs/convert/parquet'"
        )
    return files, name, builder.info.features
