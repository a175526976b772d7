"""What a run learns from: images by number, with the labels and captions that they have."""

from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from scalelong_diffusers.data.arguments import DataSettings
from scalelong_diffusers.data.shapes import Shapes


class Source(Protocol):
    """
    Images by number.

    `labels` and `num_classes` are None where they have none, `class_names` where the classes are plain numbers too.
    `image(index)` raises `BadImage`; `identity()` is a text that changes when the images, labels or captions do.
    """

    labels: np.ndarray | None
    class_names: list[str] | None
    num_classes: int | None
    description: str

    def __len__(self) -> int: ...
    def image(self, index: int) -> Image.Image: ...
    def captions(self, index: int) -> list[str]: ...
    def name(self, index: int) -> str: ...
    def identity(self) -> str: ...


def open_sources(settings: DataSettings, needs_labels: bool, needs_captions: bool) -> tuple[Source, Source | None]:
    """The source of training, and that of validation where the data set has one of its own."""
    if settings.dataset_name is None and settings.train_data_dir is None:
        return Shapes(settings.num_shapes, settings.resolution), None
    from scalelong_diffusers.data.tables import open_tables  # datasets takes a while to import

    return open_tables(settings, needs_labels, needs_captions)


class Shares(NamedTuple):
    """The numbers of images; those for validation are of the set for it, where there is one."""

    train: np.ndarray
    validation: np.ndarray


def share_out(source: Source, validation: Source | None, settings: DataSettings) -> Shares:
    """A share of the images is held out where there are no others for validation. The run's seed has no part in it."""
    order = _fixed_order(len(source))
    if validation is None:
        count = min(settings.validation_size, max(1, len(source) // 10))
        held_out, order = order[:count], order[count:]
    else:
        held_out = _fixed_order(len(validation))[: settings.validation_size]
    return Shares(np.sort(order[: settings.max_train_samples]), np.sort(held_out))


def _fixed_order(count: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(count)
