"""Files that are read piece by piece: parquet files, here or on the Hub, and tar files of WebDataset."""

import os
import tarfile
from pathlib import PurePosixPath
from typing import BinaryIO, Protocol

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


_SAMPLES_IN_A_GROUP = 64  # of a tar file, which has none of its own


class ShardFile(Protocol):
    """`groups` are the rows and bytes of each row group, `schema` the columns."""

    path: str
    schema: pa.Schema
    groups: list[tuple[int, int]]

    def read(self, group: int, columns: list[str]) -> pa.Table: ...

    def largest(self, column: str) -> int | None:
        """The largest number of a column, -1 where it has none; None where that is not known without reading it."""

    def identity(self) -> str: ...


class ParquetFile:
    """Of what is on the Hub only the bytes that are asked for are fetched."""

    def __init__(self, path: str):
        self.path = path
        with self._open() as file:
            self._footer = pq.ParquetFile(file).metadata
        self.schema = self._footer.schema.to_arrow_schema()
        groups = map(self._footer.row_group, range(self._footer.num_row_groups))
        self.groups = [(group.num_rows, group.total_byte_size) for group in groups]

    def _open(self) -> BinaryIO:
        options = {"cache_type": "none"} if "://" in self.path else {}
        return fsspec.open(self.path, "rb", **options).open()

    def read(self, group: int, columns: list[str]) -> pa.Table:
        with self._open() as file:
            return pq.ParquetFile(file, metadata=self._footer, pre_buffer=True).read_row_group(group, columns=columns)

    def largest(self, column: str) -> int | None:
        found = []
        for group in map(self._footer.row_group, range(self._footer.num_row_groups)):
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
    Neighbouring members of one name are a sample, and what follows the name's first dot is the column: `0001.jpg`,
    `0001.cls`, `0001.txt`. Only the headers are read at first, which takes a while for millions of members.
    """

    def __init__(self, path: str):
        self.path = path
        self._samples: list[dict[str, tuple[int, int]]] = []
        self._names: list[str] = []
        name = None
        with tarfile.open(path, "r:") as tar:
            for member in filter(tarfile.TarInfo.isfile, tar):
                stem, _, column = PurePosixPath(member.name).name.partition(".")
                sample = (PurePosixPath(member.name).parent, stem)
                if sample != name:
                    self._samples.append({})
                    self._names.append(stem)
                    name = sample
                self._samples[-1][column.lower()] = (member.offset_data, member.size)
            _check_end(tar)
        if not self._samples:
            raise ValueError("it has no files in it")
        self.schema = pa.schema([(column, _type_of(column)) for column in sorted(self._samples[0])])
        self.groups = []
        for start in range(0, len(self._samples), _SAMPLES_IN_A_GROUP):
            samples = self._samples[start : start + _SAMPLES_IN_A_GROUP]
            self.groups.append((len(samples), sum(size for sample in samples for _, size in sample.values())))

    def read(self, group: int, columns: list[str]) -> pa.Table:
        start = group * _SAMPLES_IN_A_GROUP
        return self._table(range(start, start + self.groups[group][0]), columns)

    def largest(self, column: str) -> int:
        labels = self._table(range(len(self._samples)), [column])[column].to_pylist()
        return max((label for label in labels if label is not None), default=-1)

    def identity(self) -> str:
        return f"{os.path.basename(self.path)} {self._samples}"

    def _table(self, samples: range, columns: list[str]) -> pa.Table:
        with open(self.path, "rb") as file:
            read = {column: [self._read(file, sample, column) for sample in samples] for column in columns}
        return pa.table(read, schema=pa.schema([self.schema.field(column) for column in columns]))

    def _read(self, file: BinaryIO, sample: int, column: str) -> bytes | int | str | None:
        if column not in self._samples[sample]:
            return None
        offset, size = self._samples[sample][column]
        file.seek(offset)
        content = file.read(size)
        if len(content) != size:
            raise ValueError(f"it breaks off after {file.tell():,} bytes")
        kind = _type_of(column)
        if kind == pa.binary():
            return content
        try:
            return int(content) if kind == pa.int64() else content.decode()
        except ValueError as error:
            wanted = "a whole number" if kind == pa.int64() else "text in UTF-8"
            raise ValueError(
                f"{self._names[sample]}.{column} in it starts with {content[:20]!r}, and has to be {wanted}"
            ) from error


def _check_end(tar: tarfile.TarFile):
    """Python takes a header that is cut off, or is none, for the end of the file."""
    with open(tar.name, "rb") as file:
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ValueError(f"it breaks off after {tar.offset:,} bytes")


def _type_of(column: str) -> pa.DataType:
    if f".{column}" in Image.registered_extensions():
        return pa.binary()
    return pa.int64() if column == "cls" else pa.string()


def open_shard_file(path: str) -> ShardFile:
    return TarFile(path) if path.endswith(".tar") else ParquetFile(path)
