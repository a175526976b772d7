"""`DataConfig`: the source of the images and their preprocessing."""

from dataclasses import dataclass

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.options import check_options, option


INTERPOLATION_MODES = ("lanczos", "bicubic", "bilinear", "hamming", "box")
# Larger values are mistakes, with which a run would take all memory.
MAX_RESOLUTION = 4096
MAX_SHAPES = 10_000_000
_SOURCES = ("dataset_name", "train_data_dir", "precomputed_dir")
_DATASETS = ("dataset_name", "train_data_dir")
# Fields that have an effect only with one of these sources.
_NEEDS = {
    "dataset_config_name": ("dataset_name",),
    "dataset_revision": ("dataset_name",),
    **dict.fromkeys(("streaming", "image_column", "label_column", "caption_column", "cache_dir"), _DATASETS),
}


@dataclass(frozen=True)
class DataConfig:
    """
    The source of the images and their preprocessing. The help text of each field documents it.

    `DataConfig()` is the built-in dataset of colored shapes.
    """

    dataset_name: str | None = option(
        None, "dataset on the Hub; without any dataset, the built-in colored shapes", common=True
    )
    dataset_config_name: str | None = option(None, "config of the dataset on the Hub, if it has several")
    dataset_revision: str | None = option(None, "branch, tag or commit of the dataset on the Hub")
    train_data_dir: str | None = option(
        None,
        "local folder of images or parquet files, or a folder saved by datasets.save_to_disk",
        on_resume="free",
        common=True,
    )
    cache_dir: str | None = option(
        None, "folder for downloaded and prepared datasets (default: the cache of datasets)", on_resume="free"
    )
    image_column: str | None = option(None, "image column, if not detected")
    label_column: str | None = option(None, "class column, if not detected")
    caption_column: str | None = option(
        None, "caption column, if not detected; one of several captions is chosen at random each time"
    )
    max_train_samples: int | None = option(None, "train on at most N images", at_least=1, at_most=10**12, metavar="N")
    validation_size: int = option(
        256,
        "compute the validation loss on at most N images; without a validation split, up to a tenth of the training "
        "images are held out",
        at_least=1,
        at_most=1_000_000,
        metavar="N",
    )
    resolution: int = option(
        32,
        "scale and crop images to this width and height in pixels",
        at_least=1,
        at_most=MAX_RESOLUTION,
        common=True,
    )
    crop_size: int | None = option(
        None,
        "crop a centered square of this size in pixels from each image before scaling",
        at_least=1,
        at_most=10_000,
    )
    center_crop: bool = option(False, "crop at the center instead of at a random position")
    random_flip: bool = option(False, "mirror each image with probability 0.5", common=True)
    image_interpolation_mode: str = option("lanczos", "filter used to scale images", choices=INTERPOLATION_MODES)
    on_bad_image: str = option(
        "error",
        "if an image cannot be read or has no caption, stop (error) or use another one (skip)",
        choices=("error", "skip"),
        on_resume="free",
    )
    dataloader_num_workers: int = option(
        0,
        "worker processes that load data; 0 loads in the training process",
        at_least=0,
        at_most=512,
        on_resume="free",
    )
    num_shapes: int = option(10_000, "number of images in the built-in dataset", at_least=2, at_most=MAX_SHAPES)
    precomputed_dir: str | None = option(
        None, "train on the output of precompute_latents.py instead of images", on_resume="free"
    )
    streaming: bool = option(
        False, "read parquet or tar files piece by piece during training instead of preparing the dataset first"
    )

    def __post_init__(self):
        check_options(self)
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"{given[0]} and {given[1]} are both given; choose one of them")
        for name, needed in _NEEDS.items():
            if getattr(self, name) and not set(needed) & set(given):
                raise UserError(f"{name} needs {' or '.join(needed)}")
