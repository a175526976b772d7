"""
Streaming: datasets that are read one row group at a time, from parquet files (also on the Hub) or WebDataset tars.

Opening a dataset reads only the footers of its parquet files or the headers of its tar files.
"""

import os
import tarfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pat
from PIL import Image

from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.folders import Kind, count_suffixes, describe_ignored, list_files
from scalelong_diffusers.data.stream import RowGroups
from scalelong_diffusers.data.tables import (
    MAX_CLASSES,
    ImageTable,
    data_folder,
    dataset_errors,
    dataset_folders,
    files_by_split,
    find_columns,
    one_line,
    open_splits,
)
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import checksum
from scalelong_diffusers.image_files import IMAGE_SUFFIXES, MAX_FILE_BYTES


_TAR_GROUP_SIZE = 64  # samples that are read together from a tar file, which has no row groups
_MAX_GROUPS_IN_MEMORY = 8
_MEMORY = 2**30  # bytes of row groups in the memory of each reader
_OPENING_THREADS = 16


class ParquetFile:
    """
    A local or remote parquet file. Only the requested row groups and columns are fetched.

    `groups` lists the number of rows and the number of bytes of each row group.
    """

    def __init__(self, path: str):
        self.path = path
        with self._open() as file:
            self._footer = pq.ParquetFile(file).metadata
        self.schema = self._footer.schema.to_arrow_schema()
        self.groups = [(group.num_rows, group.total_byte_size) for group in self._group_footers()]

    def _group_footers(self) -> list[pq.RowGroupMetaData]:
        return [self._footer.row_group(i) for i in range(self._footer.num_row_groups)]

    def _open(self) -> BinaryIO:
        options = {"cache_type": "none"} if "://" in self.path else {}
        return fsspec.open(self.path, "rb", **options).open()

    def read(self, group: int, columns: list[str]) -> pa.Table:
        with self._open() as file:
            return pq.ParquetFile(file, metadata=self._footer, pre_buffer=True).read_row_group(group, columns=columns)

    def largest(self, column: str) -> int | None:
        """Return the largest number in a column (-1 if it is empty), or None if the footer does not record it."""
        found = []
        for group in self._group_footers():
            chunks = map(group.column, range(group.num_columns))
            statistics = next(chunk.statistics for chunk in chunks if chunk.path_in_schema == column)
            if statistics is not None and statistics.has_min_max:
                found.append(statistics.max)
            elif group.num_rows and (statistics is None or statistics.null_count != group.num_rows):
                return None
        return max(found, default=-1)

    def identity(self) -> str:
        return f"{os.path.basename(self.path)} {self._footer.serialized_size} {self.groups}"


class TarFile:
    """
    A WebDataset tar file. Consecutive members with the same name form one sample. The text after the first dot names
    the column: `0001.jpg`, `0001.cls`, `0001.txt`.
    """

    def __init__(self, path: str):
        self.path = path
        self._samples: list[dict[str, tuple[int, int]]] = []
        name = None
        with tarfile.open(path, "r:") as tar:
            for member in filter(tarfile.TarInfo.isfile, tar):
                _check_size(member)
                stem, _, column = PurePosixPath(member.name).name.partition(".")
                sample = (PurePosixPath(member.name).parent, stem)
                if sample != name:
                    self._samples.append({})
                    name = sample
                self._samples[-1][column.lower()] = (member.offset_data, member.size)
            end = tar.offset
        with open(path, "rb") as file:
            file.seek(end)
            # tarfile takes a truncated or invalid header for the end of the archive, which is a block of zeros.
            if not self._samples or file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"the file is empty, or truncated at {end:,} bytes")
        self.schema = pa.schema([(column, _tar_column_type(column)) for column in sorted(self._samples[0])])
        self.groups = []
        for start in range(0, len(self._samples), _TAR_GROUP_SIZE):
            samples = self._samples[start : start + _TAR_GROUP_SIZE]
            self.groups.append((len(samples), sum(size for sample in samples for _, size in sample.values())))

    def read(self, group: int, columns: list[str]) -> pa.Table:
        start = group * _TAR_GROUP_SIZE
        return self._table(self._samples[start : start + _TAR_GROUP_SIZE], columns)

    def largest(self, column: str) -> int:
        labels = self._table(self._samples, [column])[column].to_pylist()
        return max((label for label in labels if label is not None), default=-1)

    def identity(self) -> str:
        return f"{os.path.basename(self.path)} {self._samples}"

    def _table(self, samples: list[dict[str, tuple[int, int]]], columns: list[str]) -> pa.Table:
        schema = pa.schema([self.schema.field(column) for column in columns])
        with open(self.path, "rb") as file:

            def read(place: tuple[int, int] | None, kind: pa.DataType) -> bytes | int | str | None:
                if place is None:
                    return None
                file.seek(place[0])
                content = file.read(place[1])
                return content if kind == pa.binary() else int(content) if kind == pa.int64() else content.decode()

            values = {field.name: [read(sample.get(field.name), field.type) for sample in samples] for field in schema}
        return pa.table(values, schema=schema)


def _check_size(member: tarfile.TarInfo):
    # A sparse member takes more memory than its place in the file.
    if member.issparse():
        raise tarfile.ReadError(f"{member.name} is a sparse file; store it as a normal one")
    if member.size > MAX_FILE_BYTES:
        raise tarfile.ReadError(f"{member.name} has {member.size:,} bytes; at most {MAX_FILE_BYTES:,} are accepted")


def _tar_column_type(column: str) -> pa.DataType:
    if f".{column}" in IMAGE_SUFFIXES:
        return pa.binary()
    return pa.int64() if column == "cls" else pa.string()


class ShardTable:
    """One split of a streamed dataset as a `Source`. The most recently used row groups stay in memory."""

    def __init__(
        self,
        files: Sequence[str],
        where: str,
        config: DataConfig,
        needs_labels: bool,
        needs_captions: bool,
        features: datasets.Features | None = None,
        classes_of: "ShardTable | None" = None,
    ):
        self._config = config
        with ThreadPoolExecutor(_OPENING_THREADS) as threads:
            self._files = list(threads.map(_open, files))
        # File, and number within the file, of each row group that has rows.
        self._groups = [(file, number) for file in self._files for number, (rows, _) in enumerate(file.groups) if rows]
        if not self._groups:
            raise UserError(f"{where} has no images")
        self.group_starts = np.concatenate([[0], np.cumsum([file.groups[number][0] for file, number in self._groups])])
        largest = max(file.groups[number][1] for file, number in self._groups)
        self.groups_in_memory = min(_MAX_GROUPS_IN_MEMORY, max(1, _MEMORY // max(1, largest)))
        self._in_memory: OrderedDict[int, ImageTable] = OrderedDict()  # most recently used last
        self._schema = self._common_schema(where)
        self._columns = find_columns(self._schema.names, config, needs_labels, needs_captions, where)
        self.class_names = self.num_classes = None
        if needs_labels:
            with _shard_errors(where):
                self._find_classes(where, features or datasets.Features.from_arrow_schema(self._schema), classes_of)
        self.description = f"{where}, {len(self):,} images in {len(self._files):,} files"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_in_memory": OrderedDict()}  # workers read row groups themselves

    def __len__(self) -> int:
        return int(self.group_starts[-1])

    def image(self, index: int) -> Image.Image:
        table, row = self.locate(index)
        return table.image(row)

    def label(self, index: int) -> int:
        table, row = self.locate(index)
        return table.label(row)

    def captions(self, index: int) -> list[str]:
        table, row = self.locate(index)
        return table.captions(row)

    def all_captions(self, groups: RowGroups) -> Iterator[str]:
        """Yield all captions of all rows, without reading the images."""
        for start, count in zip(groups.starts, groups.counts):
            group = self._group_of(start)
            table = self.read_group(group, ["caption"])
            first = start - self.group_starts[group]
            for row in range(first, first + count):
                yield from table.captions(row)

    def name(self, index: int) -> str:
        table, row = self.locate(index)
        return table.name(row)

    def identity(self) -> str:
        """Identify the dataset by the names and footers of its files, without reading its rows."""
        return checksum(repr((self._columns, self.class_names)), *(file.identity() for file in self._files))

    def first_row_of_last_file(self) -> int:
        last = self._groups[-1][0]
        return int(self.group_starts[next(i for i, (file, _) in enumerate(self._groups) if file is last)])

    def read_group(self, group: int, kinds: list[str]) -> ImageTable:
        file, number = self._groups[group]
        where = f"row group {number} of {os.path.basename(file.path)}"
        with _shard_errors(where):
            table = file.read(number, [self._columns[kind] for kind in kinds])
            if "image" not in kinds:
                image = self._schema.field(self._columns["image"])
                table = table.append_column(image, pa.nulls(len(table), image.type))
            rows = datasets.Dataset(datasets.table.InMemoryTable(table))
            return ImageTable(rows, where, self._config, "label" in kinds, "caption" in kinds, classes_of=self)

    def _group_of(self, index: int) -> int:
        return int(np.searchsorted(self.group_starts, index, side="right")) - 1

    def locate(self, index: int) -> tuple[ImageTable, int]:
        """Return the row group of a row, and the number of the row in it."""
        group = self._group_of(index)
        if group not in self._in_memory:
            if len(self._in_memory) == self.groups_in_memory:
                self._in_memory.popitem(last=False)  # before reading, so that the memory is free
            self._in_memory[group] = self.read_group(group, list(self._columns))
        self._in_memory.move_to_end(group)
        return self._in_memory[group], index - int(self.group_starts[group])

    def _common_schema(self, where: str) -> pa.Schema:
        first = self._files[0]
        for file in self._files:
            if not file.schema.equals(first.schema):
                found = [
                    f"{os.path.basename(path)} has {', '.join(f'{column.name} ({column.type})' for column in schema)}"
                    for path, schema in ((file.path, file.schema), (first.path, first.schema))
                ]
                raise UserError(f"all files of {where} must have the same columns: {'; '.join(found)}")
        return first.schema

    def _find_classes(self, where: str, features: datasets.Features, classes_of: "ShardTable | None"):
        column = self._columns["label"]
        kind = self._schema.field(column).type
        self.class_names = getattr(features[column], "names", None)
        if classes_of is not None:
            self.class_names, self.num_classes = classes_of.class_names, classes_of.num_classes
        elif self.class_names is not None:
            self.num_classes = len(self.class_names)
        else:
            largest = []
            for file in self._files if pat.is_integer(kind) else ():
                with _shard_errors(os.path.basename(file.path)):
                    largest.append(file.largest(column))
                if largest[-1] is not None and largest[-1] >= MAX_CLASSES:
                    found = f"got {largest[-1]} in {os.path.basename(file.path)}"
                    raise UserError(f"label in column {column!r} must be from 0 to {MAX_CLASSES - 1}, {found}")
            if not largest or None in largest:
                found = f"column {column!r} of {where} ({kind})"
                raise UserError(f"streaming needs a list of all classes: store {found} as datasets.ClassLabel")
            self.num_classes = max(1, max(largest) + 1)


def _open(path: str) -> ParquetFile | TarFile:
    with _shard_errors(os.path.basename(path)):
        return TarFile(path) if path.endswith(".tar") else ParquetFile(path)


@contextmanager
def _shard_errors(where: str):
    """Turn errors of a damaged or missing file into a `UserError` that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # `datasets` raises almost any, and files may claim to need more memory than there is
        raise UserError(f"{where} cannot be read: {one_line(error) or 'it needs too much memory'}") from error


def open_shards(config: DataConfig, needs_labels: bool, needs_captions: bool) -> tuple[ShardTable, ShardTable | None]:
    """Open the training split, and the validation split if there is one with labels."""
    found = _hub_files(config) if config.train_data_dir is None else _folder_files(config)
    files, where, features, ignored = found

    def open_split(files: list[str], where: str, train: ShardTable | None = None) -> ShardTable:
        table = ShardTable(files, where, config, needs_labels, needs_captions, features, classes_of=train)
        if train is not None:
            table.locate(0)  # raises `MissingLabel` if the split has no labels
        return table

    train, validation = open_splits(files, where, open_split)
    train.description += describe_ignored(ignored)
    return train, validation


def _folder_files(config: DataConfig) -> tuple[dict[str, list[str]], str, None, Counter[Kind]]:
    folder, where = data_folder(config)
    found, ignored = list_files(folder, dataset_folders(config))
    files = files_by_split(found, ".parquet") or files_by_split(found, ".tar")
    if not files:
        raise UserError(f"{where} has no parquet or tar files to stream; folders of images need no streaming")
    return files, where, None, ignored + count_suffixes(set(found).difference(*files.values()))


def _hub_files(config: DataConfig) -> tuple[dict[str, list[str]], str, datasets.Features | None, Counter[Kind]]:
    name = config.dataset_name
    with dataset_errors(config):
        builder = datasets.load_dataset_builder(
            name, config.dataset_config_name, revision=config.dataset_revision, cache_dir=config.cache_dir
        )
    files = {str(split): list(urls) for split, urls in builder.config.data_files.items()}
    other = next((url for urls in files.values() for url in urls if not url.endswith(".parquet")), None)
    if other is not None:
        advice = "only parquet files can be streamed from the Hub; try dataset_revision='refs/convert/parquet'"
        raise UserError(f"{name} has {os.path.basename(other)}, and {advice}")
    return files, name, builder.info.features, Counter()
