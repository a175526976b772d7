"""What images are held to: a data set, whose statistics are computed once, or a file of statistics."""

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants

from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.data.images import Transform, is_gray, spread_indices
from scalelong_diffusers.data.sources import Source, fixed_permutation, open_sources
from scalelong_diffusers.data.stream import ImageRows, Stream
from scalelong_diffusers.errors import did_you_mean
from scalelong_diffusers.evaluation.networks import FeatureExtractor
from scalelong_diffusers.evaluation.statistics import SUFFIXES


SHAPES = "shapes"
SPLITS = ("train", "validation")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def default_cache_dir() -> Path:
    """Beside what the other libraries of the Hub keep: where `HF_HOME` says."""
    return Path(constants.HF_HOME, "scalelong")


@dataclass(frozen=True)
class Reference:
    """The images of one split of a data set, brought to the size and the channels of those that are judged."""

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
        (batch, 3, height, width), uint8: every `num_processes`-th batch, from that of the rank on.

        They come in a fixed random order, so that the first ones may stand for all. The names of those that others
        took the place of, where bad images are skipped, are added to `unreadable`.
        """
        order = fixed_permutation(len(self.source))
        rows = ImageRows(self.source, self.transform, needs_labels=False, needs_captions=False)
        stream = Stream("reference", rows, order, seed=0, endless=False, skip_bad=self.skip_bad)
        for batch in stream.batches(batch_size, num_processes=num_processes, rank=rank, num_workers=self.num_workers):
            if unreadable is not None:
                unreadable.update(batch.unreadable)
            pixels = batch["pixel_values"].add(1).mul(127.5).round().to(torch.uint8)
            yield pixels.expand(-1, 3, -1, -1)  # grey is the same in all three

    def fingerprint(self, features: FeatureExtractor) -> str:
        parts = (self.source.identity(), self.split, self.transform, self.skip_bad, features.fingerprint)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def is_statistics(reference: str) -> bool:
    """Whether that is a file, not a data set."""
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
    Args:
        reference: the id of a data set on the Hub, a folder, or `"shapes"`.
        resolution, channels: of the images that are judged; channels are 1 (grey) or 3.
        split: `"train"`, or `"validation"` for the set's own split for it.
        data: fields of `DataConfig`, such as `crop_size`, where the data have to be told.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 (grey) or 3, got {channels}")
    if split not in SPLITS:
        raise ValueError(f"split must be {' or '.join(SPLITS)}, got {split!r}")
    settings = DataConfig(resolution=resolution, **_where(reference), **data)
    train, validation = _open(reference, settings, needs_captions)
    sources = {"train": train, "validation": validation}
    if sources[split] is None:
        raise ValueError(f"{train.description}, has no split for validation: its split is train")
    if len(sources[split]) < 2:
        raise ValueError(f"{sources[split].description}: there must be two at least")
    if channels == 1:
        _refuse_colour(sources[split])
    transform = Transform(
        resolution, channels, settings.crop_size, center_crop=True, interpolation=settings.image_interpolation_mode
    )
    return Reference(
        sources[split], split, transform, settings.on_bad_image == "skip", settings.dataloader_num_workers
    )


def check_reference(reference: str):
    """Refuse what can be none, before a model is loaded."""
    may_be_on_hub = _HUB_ID.fullmatch(reference) and not reference.endswith(SUFFIXES)
    if reference == SHAPES or may_be_on_hub or os.path.exists(reference):
        return
    raise FileNotFoundError(
        f"the reference {reference}: there is no such file or folder, and it is neither {SHAPES!r} nor the id of a "
        "data set on the Hub"
    )


def _where(reference: str) -> dict[str, str]:
    if reference == SHAPES:
        return {}
    return {"train_data_dir" if os.path.isdir(reference) else "dataset_name": reference}


def _open(reference: str, settings: DataConfig, needs_captions: bool) -> tuple[Source, Source | None]:
    try:
        return open_sources(settings, needs_labels=False, needs_captions=needs_captions)
    except OSError as error:
        if reference == SHAPES or os.path.isdir(reference):
            raise
        raise OSError(
            f"the reference {reference}{did_you_mean(reference, [SHAPES])} is no local folder, and as a data set on the "
            f"Hub it can not be had: {error}"
        ) from error


def _refuse_colour(source: Source):
    for index in spread_indices(len(source)).tolist():
        if not is_gray(source.image(index)):
            raise ValueError(f"the images that are judged are grey, and {source.name(index)} of the reference is not")
