"""What a run learns from: images by number, with the labels and captions that they have."""

from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.orders import Groups
from scalelong_diffusers.data.shapes import Shapes


class Source(Protocol):
    """
    Images by number.

    `num_classes` is None where they have no labels, `class_names` where the classes are plain numbers too.
    `image(index)` raises `UnreadableImage`; `identity()` is a text that changes when the images, labels or captions do.
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


def open_sources(settings: DataConfig, needs_labels: bool, needs_captions: bool) -> tuple[Source, Source | None]:
    """The source of training, and that of validation where the data set has one of its own."""
    if settings.dataset_name is None and settings.train_data_dir is None:
        return Shapes(settings.num_shapes, settings.resolution), None
    # datasets takes a while to import
    if settings.streaming:
        from scalelong_diffusers.data.shards import open_shards

        return open_shards(settings, needs_labels, needs_captions)
    from scalelong_diffusers.data.tables import open_tables

    return open_tables(settings, needs_labels, needs_captions)


class Shares(NamedTuple):
    """The numbers of images; those for validation are of the set for it, where there is one."""

    train: np.ndarray | Groups
    validation: np.ndarray


def share_out(source: Source, validation: Source | None, settings: DataConfig) -> Shares:
    """A share of the images is held out where there are no others for validation. The run's seed has no part in it."""
    if settings.streaming:
        return _share_out_groups(source, validation, settings)
    order = fixed_permutation(len(source))
    if validation is None:
        count = _validation_count(len(source), settings)
        held_out, order = order[:count], order[count:]
    else:
        held_out = fixed_permutation(len(validation))[: settings.validation_size]
    return Shares(np.sort(order[: settings.max_train_samples]), np.sort(held_out))


def _share_out_groups(source: Source, validation: Source | None, settings: DataConfig) -> Shares:
    """Where rows are dear to read those held out are neighbours: the first of the last file."""
    starts, ends = source.group_starts[:-1], source.group_starts[1:]
    if validation is not None:
        held_out = np.arange(min(settings.validation_size, len(validation)))
    else:
        first = source.first_row_of_last_file()
        count = min(_validation_count(len(source), settings), len(source) - first)
        held_out = np.arange(first, first + count)
        starts = np.where(starts >= first, np.clip(first + count, starts, ends), starts)
    counts = ends - starts
    if settings.max_train_samples is not None:
        before = np.cumsum(counts) - counts
        counts = np.clip(settings.max_train_samples - before, 0, counts)
    return Shares(Groups(starts[counts > 0], counts[counts > 0]), held_out)


def _validation_count(count: int, settings: DataConfig) -> int:
    """How many images are held out of those for training."""
    return min(settings.validation_size, max(1, count // 10))


def fixed_permutation(count: int) -> np.ndarray:
    """A random one, so that the first of a set that is sorted may stand for all."""
    return np.random.default_rng(0).permutation(count)
