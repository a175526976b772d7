"""Images to evaluate, and the reference that they are compared with: a dataset, or a file of its statistics."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import constants

from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.data.images import (
    Transform,
    fixed_permutation,
    is_gray,
    spread_indices,
    with_channels,
)
from scalelong_diffusers.data.stream import ImageRows, Source, Stream
from scalelong_diffusers.data.training_data import open_sources
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.evaluation.metrics import SUFFIXES
from scalelong_diffusers.evaluation.networks import FeatureExtractor
from scalelong_diffusers.files import checksum
from scalelong_diffusers.image_files import IMAGE_SUFFIXES, UnreadableImage, read_image
from scalelong_diffusers.pipelines.sampling import image_file, is_sample_grid, read_sample_settings, sampled_numbers


SHAPES = "shapes"
SPLITS = ("train", "validation")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


class ImageFiles:
    """Image files that must all have the size of the first one. Some of them decide whether all images are gray."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.width, self.height = read_image(files[0], str(files[0])).size
        # By storage mode: the black images of a diverged model are color images.
        is_gray = all(read_image(files[k], str(files[k])).mode in ("1", "L") for k in spread_indices(len(files)))
        self.channels = 1 if is_gray else 3

    @classmethod
    def sampled(cls, folder: Path, n: int) -> "ImageFiles":
        """Return the first n images that `scalelong sample` made in a folder."""
        return cls([image_file(folder, k) for k in range(n)])

    @classmethod
    def of_folder(cls, folder: str | os.PathLike, n: int | None) -> "ImageFiles":
        """
        Return all images of a folder that are not hidden, or n of them.

        For a folder of `scalelong sample`, these are the first n images, without the grid. Other folders may be sorted
        by class, so their images are taken in a fixed random order.
        """
        folder = Path(folder)
        is_run = (folder / "metrics.jsonl").exists()  # its sample grids are not images to evaluate
        if is_run:
            files = []
        elif read_sample_settings(folder) is not None:
            # All of them must exist: a missing one cannot be read.
            files = [image_file(folder, k) for k in range(max(sampled_numbers(folder), default=-1) + 1)[:n]]
        else:
            files = sorted(path for path in folder.rglob("*") if _is_image(path.relative_to(folder)))
            files = [path for path in files if path.is_file() and not is_sample_grid(path)]
            files = [files[k] for k in fixed_permutation(len(files))]
        if not files:
            advice = "; resume this unfinished training run with --resume_from_checkpoint latest" if is_run else ""
            raise UserError(f"{folder} is not a pipeline (no model_index.json) and has no images{advice}")
        if n is not None and n > len(files):
            raise UserError(f"--num_images {n:,} is more than the {len(files):,} images in {folder}")
        return cls(files[:n])

    def __len__(self) -> int:
        return len(self.files)

    def batches(self, batch_size: int, num_processes: int = 1, rank: int = 0) -> Iterator[torch.Tensor]:
        """Yield every `num_processes`-th batch of uint8 images (batch, 3, height, width), starting at batch `rank`."""
        for start in range(rank * batch_size, len(self), num_processes * batch_size):
            yield torch.stack([self._pixels(file) for file in self.files[start : start + batch_size]])

    def _pixels(self, file: Path) -> torch.Tensor:
        image = read_image(file, str(file))
        if image.size != (self.width, self.height):
            first = f"{self.files[0]} ({self.width} x {self.height} pixels)"
            raise UnreadableImage(f"{file} ({image.width} x {image.height} pixels) must have the size of {first}")
        return torch.from_numpy(np.array(with_channels(image, 3))).permute(2, 0, 1)


def _is_image(path: Path) -> bool:
    """Return whether a path inside a folder has the name of an image and is not hidden."""
    is_hidden = any(part.startswith(".") for part in path.parts)
    return not is_hidden and path.suffix.lower() in IMAGE_SUFFIXES


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
    reference: str, resolution: int, channels: int = 3, *, split: str = "train", needs_captions: bool = False, **data
) -> Reference:
    """
    Open a dataset as a reference.

    Args:
        reference: id of a dataset on the Hub, a folder, or `"shapes"`.
        resolution: size of the evaluated images.
        channels: number of channels of the evaluated images: 1 (gray) or 3.
        split: `"train"` or `"validation"`.
        data: fields of `DataConfig`, such as `crop_size`.
    """
    place = "train_data_dir" if os.path.isdir(reference) else "dataset_name"
    place = {} if reference == SHAPES else {place: reference}
    config = DataConfig(resolution=resolution, **place, **data)
    train, validation = open_sources(config, needs_labels=False, needs_captions=needs_captions)
    source = {"train": train, "validation": validation}[split]
    if source is None:
        raise UserError(f"{train.description} has no validation split; use its split train")
    for index in spread_indices(len(source)).tolist() if channels == 1 else ():
        if not is_gray(source.image(index)):
            raise UserError(f"the evaluated images are gray, but {source.name(index)} of the reference is in color")
    transform = Transform(
        resolution, channels, config.crop_size, center_crop=True, interpolation=config.image_interpolation_mode
    )
    return Reference(source, split, transform, config.on_bad_image == "skip", config.dataloader_num_workers)


def check_reference(reference: str):
    """Reject an invalid reference early, before a model is loaded."""
    may_be_on_hub = _HUB_ID.fullmatch(reference) and not reference.endswith(SUFFIXES)
    if reference != SHAPES and not may_be_on_hub and not os.path.exists(reference):
        accepted = f"a file of statistics, a folder, {SHAPES!r}, or the id of a dataset on the Hub"
        raise UserError(f"the reference {reference} does not exist; accepted: {accepted}")
