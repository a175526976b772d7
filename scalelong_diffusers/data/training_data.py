"""From settings to the streams of a run, with all that can be wrong with the data said before it starts."""

import dataclasses
import hashlib
import itertools
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.images import Transform, UnreadableImage, is_gray, spread_indices
from scalelong_diffusers.data.orders import Groups
from scalelong_diffusers.data.precomputed import FeatureRows, Features
from scalelong_diffusers.data.sources import Shares, Source, open_sources, share_out
from scalelong_diffusers.data.stream import ImageRows, Rows, ShardStream, Stream


CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class TrainingData:
    """
    What a run reads.

    Args:
        train: the endless stream of training samples.
        validation: the samples of the validation loss, each of which comes once.
        channels: of the images: 1, 3, or 4 (RGBA).
        num_classes: None where labels were not asked for.
        class_names: None where the classes are plain numbers too.
        first_image_size: width and height of an image before anything is cut from it.
        description: for people.
        fingerprint: changes when the images, their labels or captions, or what is done to them do; not with what is
            done about those that can not be read.
        features: where they are precomputed: what they were made of.
    """

    train: Stream
    validation: Stream
    channels: int
    num_classes: int | None
    class_names: list[str] | None
    first_image_size: tuple[int, int]
    description: str
    fingerprint: str = field(repr=False)
    features: Features | None = None


def load_training_data(
    settings: DataConfig, *, channels: int | None, needs_labels: bool, needs_captions: bool, seed: int
) -> TrainingData:
    """
    Open the data that the settings name.

    Args:
        channels: what the model takes: 1, 3 or 4 (RGBA). None: 1 for grey images, 3 for others.
        needs_labels, needs_captions: what a batch has beside `pixel_values`. Where features are precomputed it has
            `moments` in their place, and `text_features` beside `captions`.
        seed: of the run; the share held out for validation does not depend on it.

    ```python
    data = load_training_data(DataConfig(), channels=3, needs_labels=True, needs_captions=False, seed=0)
    for batch in data.train.batches(batch_size=64, num_steps=1000):
        batch["pixel_values"], batch["labels"]
    ```
    """
    if channels not in (None, *CHANNELS):
        raise ValueError(f"images have 1, 3 or 4 channels (grey, RGB, RGBA), but channels is {channels}")
    if settings.precomputed_dir is not None:
        return _load_features(settings, needs_labels, needs_captions, seed)
    source, validation_source = open_sources(settings, needs_labels, needs_captions)
    if validation_source is None and len(source) < 2:
        raise ValueError(f"{source.description}: there must be two at least, one to train on and one to validate with")
    shares = share_out(source, validation_source, settings)
    skip_bad = settings.on_bad_image == "skip"
    samples = _look_at_some(source, shares.train.first() if settings.streaming else shares.train, skip_bad)
    transform = _transform(settings, _choose_channels(channels, samples, source))
    plain = dataclasses.replace(transform, center_crop=True, random_flip=False)
    train, validation = _streams(
        ImageRows(source, transform, needs_labels, needs_captions),
        ImageRows(validation_source or source, plain, needs_labels, needs_captions),
        *(shares, seed, skip_bad),
    )
    if not settings.streaming:
        _read_all(validation)
    return TrainingData(
        train=train,
        validation=validation,
        channels=transform.channels,
        num_classes=source.num_classes if needs_labels else None,
        class_names=source.class_names if needs_labels else None,
        first_image_size=samples[0][1].size,
        description=source.description,
        fingerprint=_fingerprint(train, validation, settings),
    )


def _load_features(settings: DataConfig, needs_labels: bool, needs_captions: bool, seed: int) -> TrainingData:
    features = Features(settings.precomputed_dir)
    features.check(settings, needs_labels, needs_captions)
    source, validation_source = features.splits["train"], features.splits.get("validation")
    shares = share_out(source, validation_source, settings)
    train, validation = _streams(
        FeatureRows(source, settings.random_flip, needs_labels, needs_captions),
        FeatureRows(validation_source or source, False, needs_labels, needs_captions),
        *(shares, seed, settings.on_bad_image == "skip"),
    )
    asked = (settings.random_flip, settings.max_train_samples, settings.validation_size)
    parts = (features.made_of, needs_labels, needs_captions, asked)
    return TrainingData(
        train=train,
        validation=validation,
        channels=features.images["channels"],
        num_classes=features.images["num_classes"] if needs_labels else None,
        class_names=features.images["class_names"] if needs_labels else None,
        first_image_size=tuple(features.images["first_image_size"]),
        description=features.images["description"],
        fingerprint=hashlib.sha256(repr(parts).encode()).hexdigest()[:16],
        features=features,
    )


def _streams(rows: Rows, plain: Rows, shares: Shares, seed: int, skip_bad: bool) -> tuple[Stream, Stream]:
    if isinstance(shares.train, Groups):
        train = ShardStream("train", rows, shares.train, seed, skip_bad)
    else:
        train = Stream("train", rows, shares.train, seed, endless=True, skip_bad=skip_bad)
    validation = Stream("validation", plain, shares.validation, seed, endless=False, skip_bad=skip_bad)
    train[0], validation[0]  # what does not go should not go at once
    return train, validation


def _read_all(validation: Stream):
    """They are few, and none should end a run when it validates for the first time."""
    for position in range(validation.num_samples):
        validation[position]


def _look_at_some(source: Source, indices: np.ndarray, skip_bad: bool) -> list[tuple[int, Image.Image]]:
    """Some images from all over the set, with their numbers; any that can be read where those can not."""
    some = indices[spread_indices(len(indices))]
    images = []
    for tried, index in enumerate(itertools.chain(some, indices)):
        if tried >= len(some) and images:
            break
        try:
            images.append((int(index), source.image(int(index))))
        except UnreadableImage as error:
            if not skip_bad:
                raise error.with_skip_advice() from error
    if not images:
        raise ValueError(f"{source.description}: none of those for training can be read")
    return images


def _choose_channels(channels: int | None, images: list[tuple[int, Image.Image]], source: Source) -> int:
    coloured = next((index for index, image in images if not is_gray(image)), None)
    if channels is None:
        return 1 if coloured is None else 3
    if channels == 1 and coloured is not None:
        raise ValueError(
            f"the model takes images of 1 channel, but {source.name(coloured)} is coloured; build the model with "
            "in_channels=3, or make the images grey"
        )
    return channels


def _transform(settings: DataConfig, channels: int) -> Transform:
    return Transform(
        resolution=settings.resolution,
        channels=channels,
        crop_size=settings.crop_size,
        center_crop=settings.center_crop,
        random_flip=settings.random_flip,
        interpolation=settings.image_interpolation_mode,
    )


def _fingerprint(train: Stream, validation: Stream, settings: DataConfig) -> str:
    rows = train.rows
    sources = dict.fromkeys((rows.source, validation.rows.source))  # which may be the same one
    parts = (
        *(source.identity() for source in sources),
        *(rows.transform, rows.needs_labels, rows.needs_captions),
        *(settings.max_train_samples, settings.validation_size),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
