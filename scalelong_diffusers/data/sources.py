"""`Source`, the interface of all datasets, and the split into training and validation images."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.shapes import Shapes


class Source(Protocol):
    """
    Images by number, with their labels and captions.

    `num_classes` is None without labels, `class_names` also if the classes are plain numbers. `image(index)` raises
    `UnreadableImage`. `identity()` is a text that changes with the images, labels or captions.
    """

    class_names: list[str] | None
    num_classes: int | None
    description: str

    def __len__(self) -> int: ...
    def image(self, index: int) -> Image.Image: ...
    def label(self, index: int) -> int: ...
    def captions(self, index: int) -> list[str]: ...
    def name(self, index: int) -> str: ...
    def identity(self) -> str: ...


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, as it is a cache key
class RowGroups:
    """The rows that a stream takes from each row group of a streamed dataset: `starts[i]` and `counts[i]` of them."""

    starts: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return int(self.counts.sum())

    def rows(self) -> np.ndarray:
        """Return the numbers of all rows."""
        return np.concatenate([np.arange(start, start + count) for start, count in zip(self.starts, self.counts)])


class Split(NamedTuple):
    """Numbers of the training and validation images. The latter belong to the validation source, if there is one."""

    train: np.ndarray | RowGroups
    validation: np.ndarray


def open_sources(config: DataConfig, needs_labels: bool, needs_captions: bool) -> tuple[Source, Source | None]:
    """Open the training source, and the validation source if the dataset has a validation split."""
    if config.dataset_name is None and config.train_data_dir is None:
        return Shapes(config.num_shapes, config.resolution), None
    # These import datasets, which is slow.
    if config.streaming:
        from scalelong_diffusers.data.shards import open_shards

        return open_shards(config, needs_labels, needs_captions)
    from scalelong_diffusers.data.tables import open_tables

    return open_tables(config, needs_labels, needs_captions)


def split_rows(source: Source, validation: Source | None, config: DataConfig) -> Split:
    """Hold out validation images, unless there is a validation source. The split does not depend on the seed."""
    if config.streaming:
        return _split_row_groups(source, validation, config)
    order = fixed_permutation(len(source))
    if validation is None:
        count = _validation_count(len(source), config)
        held_out, order = order[:count], order[count:]
    else:
        held_out = fixed_permutation(len(validation))[: config.validation_size]
    return Split(np.sort(order[: config.max_train_samples]), np.sort(held_out))


def _split_row_groups(source: Source, validation: Source | None, config: DataConfig) -> Split:
    # Hold out consecutive rows, the first ones of the last file: scattered rows would be slow to read.
    starts, ends = source.group_starts[:-1], source.group_starts[1:]
    if validation is not None:
        held_out = np.arange(min(config.validation_size, len(validation)))
    else:
        first = source.first_row_of_last_file()
        count = min(_validation_count(len(source), config), len(source) - first)
        held_out = np.arange(first, first + count)
        starts = np.where(starts >= first, np.clip(first + count, starts, ends), starts)
    counts = ends - starts
    if config.max_train_samples is not None:
        before = np.cumsum(counts) - counts
        counts = np.clip(config.max_train_samples - before, 0, counts)
    return Split(RowGroups(starts[counts > 0], counts[counts > 0]), held_out)


def _validation_count(count: int, config: DataConfig) -> int:
    return min(config.validation_size, max(1, count // 10))


def fixed_permutation(count: int) -> np.ndarray:
    """Return the same random permutation each time, so that the first images represent a sorted dataset."""
    return np.random.default_rng(0).permutation(count)
