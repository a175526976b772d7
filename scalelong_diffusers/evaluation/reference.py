"""The reference that images are compared with: a dataset, whose statistics are computed once, or a file of them."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants

from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.data.images import Transform, fixed_permutation, is_gray, spread_indices
from scalelong_diffusers.data.stream import ImageRows, Source, Stream
from scalelong_diffusers.data.training_data import open_sources
from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.evaluation.networks import FeatureExtractor
from scalelong_diffusers.evaluation.statistics import SUFFIXES
from scalelong_diffusers.files import checksum


SHAPES = "shapes"
SPLITS = ("train", "validation")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def default_cache_dir() -> Path:
    """Return the folder for statistics, next to the caches of the other Hub libraries (`HF_HOME`)."""
    return Path(constants.HF_HOME, "scalelong")


@dataclass(frozen=True)
class Reference:
    """The images of one split of a dataset, with the size and channels of the evaluated images."""

    source: Source
    split: str
    transform: Transform
    skip_bad: bool = False
    num_workers: int = 0

    def __len__(self) -> int:
        return len(self.source)

    @property
    def description(self) -> str:
        return self.source.description

    def batches(
        self, batch_size: int, num_processes: int = 1, rank: int = 0, unreadable: set[str] | None = None
    ) -> Iterator[torch.Tensor]:
        """
        Yield every `num_processes`-th batch of uint8 images (batch, 3, height, width), starting at batch `rank`.

        The order is random but fixed, so that the first images represent all of them. The names of images that were
        replaced by others because they are unreadable are added to `unreadable`.
        """
        order = fixed_permutation(len(self.source))
        rows = ImageRows(self.source, self.transform, needs_labels=False, needs_captions=False)
        stream = Stream("reference", rows, order, seed=0, endless=False, skip_bad=self.skip_bad)
        for batch in stream.batches(batch_size, num_processes=num_processes, rank=rank, num_workers=self.num_workers):
            if unreadable is not None:
                unreadable.update(batch.unreadable)
            pixels = batch["pixel_values"].add(1).mul(127.5).round().to(torch.uint8)
            yield pixels.expand(-1, 3, -1, -1)  # gray images repeat their channel

    def fingerprint(self, extractor: FeatureExtractor) -> str:
        """Return a checksum of everything that the statistics depend on."""
        parts = (self.source.identity(), self.split, self.transform, self.skip_bad, extractor.fingerprint)
        return checksum(repr(parts))[:16]


def is_statistics(reference: str) -> bool:
    """Return whether a reference is a file of statistics instead of a dataset."""
    return os.path.isfile(reference) or reference.endswith(SUFFIXES)


def open_reference(
    reference: str,
    resolution: int,
    channels: int = 3,
    *,
    split: str = "train",
    needs_captions: bool = False,
    **data,
) -> Reference:
    """
    Open a dataset as a reference.

    Args:
        reference: id of a dataset on the Hub, a folder, or `"shapes"`.
        resolution, channels: size and channels of the evaluated images: 1 (gray) or 3.
        split: `"train"` or `"validation"`.
        data: fields of `DataConfig`, such as `crop_size`.
    """
    place = {} if reference == SHAPES else {_place(reference): reference}
    config = DataConfig(resolution=resolution, **place, **data)
    train, validation = _open(reference, config, needs_captions)
    source = {"train": train, "validation": validation}[split]
    if source is None:
        raise UserError(f"{train.description} has no validation split; use its split train")
    if len(source) < 2:
        raise UserError(f"{source.description}: at least two images are needed")
    if channels == 1:
        _check_gray(source)
    transform = Transform(
        resolution, channels, config.crop_size, center_crop=True, interpolation=config.image_interpolation_mode
    )
    return Reference(source, split, transform, config.on_bad_image == "skip", config.dataloader_num_workers)


def check_reference(reference: str):
    """Reject an invalid reference early, before a model is loaded."""
    may_be_on_hub = _HUB_ID.fullmatch(reference) and not reference.endswith(SUFFIXES)
    if reference != SHAPES and not may_be_on_hub and not os.path.exists(reference):
        raise UserError(
            f"the reference {reference} does not exist; accepted: a file of statistics, a folder, {SHAPES!r}, or the "
            "id of a dataset on the Hub"
        )


def _place(reference: str) -> str:
    return "train_data_dir" if os.path.isdir(reference) else "dataset_name"


def _open(reference: str, config: DataConfig, needs_captions: bool) -> tuple[Source, Source | None]:
    try:
        return open_sources(config, needs_labels=False, needs_captions=needs_captions)
    except UserError as error:
        if reference == SHAPES or os.path.isdir(reference):
            raise
        suggestion = did_you_mean(reference, [SHAPES])
        raise UserError(f"the reference {reference}{suggestion} cannot be opened as a Hub dataset: {error}") from error


def _check_gray(source: Source):
    for index in spread_indices(len(source)).tolist():
        if not is_gray(source.image(index)):
            raise UserError(f"the evaluated images are gray, but {source.name(index)} of the reference is in color")
