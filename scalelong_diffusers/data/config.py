"""What is said of the data: as settings, and as flags of the training scripts."""

import argparse
import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from scalelong_diffusers.data.images import INTERPOLATION_MODES
from scalelong_diffusers.errors import did_you_mean


BAD_IMAGE_CHOICES = ("error", "skip")
_SOURCES = ("dataset_name", "train_data_dir", "precomputed_dir")
_DATASET_COLUMNS = ("image_column", "label_column", "caption_column", "cache_dir")
_SMALLEST = {
    "resolution": 1,
    "crop_size": 1,
    "validation_size": 1,
    "max_train_samples": 1,
    "num_shapes": 2,
    "dataloader_num_workers": 0,
}


@dataclass(frozen=True)
class DataConfig:
    """
    Where images come from and what is done to them. Without `dataset_name` and `train_data_dir` it is the built-in
    set of coloured shapes.

    Args:
        dataset_name: the id of a data set on the Hub, with `dataset_config_name` and `dataset_revision`.
        train_data_dir: a folder of images, of parquet files, or one that `datasets` saved.
        cache_dir: where `datasets` keeps what it downloads and prepares.
        image_column, label_column, caption_column: where they have unusual names.
        max_train_samples: train on so many of the images.
        validation_size: how many images the validation loss is computed on, at most: of the split for it, or where
            there is none held out of the training images, no more than a tenth of them.
        resolution: the side of the square that an image is scaled and cut to.
        crop_size: the side of the square at the centre that is cut out before scaling.
        center_crop: cut at the centre, or at a random place.
        random_flip: mirror half of the images.
        image_interpolation_mode: how an image is scaled: lanczos, bicubic, bilinear, hamming or box.
        on_bad_image: what an image that can not be read does: "error" ends the run, "skip" leaves it out
            (training takes another one in its place).
        dataloader_num_workers: processes that read images; none reads them in the process that trains.
        num_shapes: the size of the built-in set.
        precomputed_dir: a folder of features that `precompute_latents.py` wrote, in place of a data set.
        streaming: read the parquet files of the data set as they are needed, and store none of them.
    """

    dataset_name: str | None = None
    dataset_config_name: str | None = None
    dataset_revision: str | None = None
    train_data_dir: str | None = None
    cache_dir: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    caption_column: str | None = None
    max_train_samples: int | None = None
    validation_size: int = 256
    resolution: int = 32
    crop_size: int | None = None
    center_crop: bool = False
    random_flip: bool = False
    image_interpolation_mode: str = "lanczos"
    on_bad_image: str = "error"
    dataloader_num_workers: int = 0
    num_shapes: int = 10_000
    precomputed_dir: str | None = None
    streaming: bool = False

    def __post_init__(self):
        self._check_source()
        for name, smallest in _SMALLEST.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{name} must be at least {smallest}, got {value}")
        _check_choice("image_interpolation_mode", self.image_interpolation_mode, INTERPOLATION_MODES)
        _check_choice("on_bad_image", self.on_bad_image, BAD_IMAGE_CHOICES)

    def _check_source(self):
        given = [f"{name}={str(value)!r}" for name in _SOURCES if (value := getattr(self, name)) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given[:2])} are both given; train on one of them")
        if self.streaming and self.dataset_name is None and self.train_data_dir is None:
            raise ValueError("streaming needs a data set to read: dataset_name or train_data_dir")
        for name in ("dataset_config_name", "dataset_revision"):
            if getattr(self, name) is not None and self.dataset_name is None:
                raise ValueError(f"{name}={getattr(self, name)!r} needs dataset_name")
        for name in _DATASET_COLUMNS:
            if getattr(self, name) is not None and self.dataset_name is None and self.train_data_dir is None:
                raise ValueError(f"{name}={getattr(self, name)!r} needs dataset_name or train_data_dir")

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> "DataConfig":
        return cls(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(cls)})


def _check_choice(name: str, value: str, accepted):
    if value not in accepted:
        raise ValueError(f"{name} is {value!r}{did_you_mean(value, accepted)}; accepted: {', '.join(accepted)}")


def add_data_arguments(parser: argparse.ArgumentParser, without: Collection[str] = ()):
    """A flag for each of the `DataConfig`, of the same name; those of `without` keep their defaults."""
    group = parser.add_argument_group("data", "Without a data set, the built-in one of coloured shapes.")

    def add(name: str, explanation: str, **options):
        if name in without:
            parser.set_defaults(**{name: getattr(DataConfig, name)})
            return
        group.add_argument(f"--{name}", default=getattr(DataConfig, name), help=explanation, **options)

    add("dataset_name", "a data set on the Hub")
    add("dataset_config_name", "which of its configs")
    add("dataset_revision", "its branch, tag or commit")
    add("train_data_dir", "a folder of images, of parquet files, or one that datasets saved")
    add("precomputed_dir", "features that precompute_latents.py wrote, in place of a data set")
    add("streaming", "read parquet files as they are needed", action=argparse.BooleanOptionalAction)
    add("cache_dir", "where datasets keeps what it downloads and prepares")
    add("image_column", "where it has an unusual name")
    add("label_column", "where it has an unusual name")
    add("caption_column", "where it has an unusual name; of a list of captions one is drawn each time")
    add("max_train_samples", "train on so many of the images", type=int)
    add("validation_size", "images for the validation loss; held out where there is no split for it", type=int)
    add("resolution", "images are scaled and cut to this side", type=int)
    add("crop_size", "cut out this square at the centre before scaling", type=int)
    add("center_crop", "cut at the centre, not at a random place", action=argparse.BooleanOptionalAction)
    add("random_flip", "mirror half of the images", action=argparse.BooleanOptionalAction)
    add("image_interpolation_mode", "how images are scaled", choices=list(INTERPOLATION_MODES))
    add("on_bad_image", "end at an image that can not be read, or leave it out", choices=BAD_IMAGE_CHOICES)
    add("dataloader_num_workers", "processes that read images", type=int)
    add("num_shapes", "the size of the built-in set", type=int)
