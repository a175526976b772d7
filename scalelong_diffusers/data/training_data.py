"""`load_training_data` opens the dataset of a `DataConfig` and checks it before a run starts."""

import dataclasses
import itertools
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from scalelong_diffusers.data.config import DataConfig
from scalelong_diffusers.data.images import Transform, fixed_permutation, is_gray, spread_indices
from scalelong_diffusers.data.precomputed import PrecomputedDataset, PrecomputedRows
from scalelong_diffusers.data.shapes import Shapes
from scalelong_diffusers.data.stream import ImageRows, RowGroups, Rows, ShardStream, Source, Stream, Tokenizer
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import checksum
from scalelong_diffusers.image_files import UnreadableImage


# Numbers of the training and validation images. The latter belong to the validation source, if there is one.
Split = tuple[np.ndarray | RowGroups, np.ndarray]


@dataclass(frozen=True)
class TrainingData:
    """
    The data of a run.

    Args:
        train: endless stream of training samples.
        validation: samples for the validation loss, each of them once.
        channels: number of image channels: 1, 3 or 4 (RGBA).
        num_classes: number of classes, or None if labels are not needed.
        class_names: names of the classes, or None if the classes are plain numbers.
        first_image_size: width and height of an image before cropping.
        description: name and size of the dataset.
        fingerprint: checksum of images, labels, captions and preprocessing, but not of `on_bad_image`.
        precomputed: the precomputed latents, if the run uses them.
    """

    train: Stream
    validation: Stream
    channels: int
    num_classes: int | None
    class_names: list[str] | None
    first_image_size: tuple[int, int]
    description: str
    fingerprint: str = field(repr=False)
    precomputed: PrecomputedDataset | None = None

    def add_tokenizers(self, tokenizers: dict[str, Tokenizer]):
        """
        Add columns of token ids to the batches of both streams.

        Args:
            tokenizers: by column, picklable functions from a list of captions to a LongTensor. They run in the
                workers, and their output is pinned with the other columns.
        """
        for stream in (self.train, self.validation):
            stream.tokenizers.update(tokenizers)

    def class_titles(self, count: int) -> list[str]:
        """Return the names of the classes in turn, or their numbers if they have no names."""
        names = self.class_names or list(map(str, range(self.num_classes)))
        return [names[k % len(names)] for k in range(count)]


def load_training_data(
    config: DataConfig, *, channels: int | None, needs_labels: bool, needs_captions: bool, seed: int
) -> TrainingData:
    """
    Open the dataset of a config.

    Args:
        channels: number of channels that the model takes: 1, 3 or 4 (RGBA); None: 1 for gray images, otherwise 3.
        needs_labels, needs_captions: whether batches have the columns `labels` and `captions` in addition to
            `pixel_values`. Precomputed data has `moments` instead of `pixel_values`, and also `text_states`.
        seed: seed of the run. The held-out images do not depend on it.

    ```python
    data = load_training_data(DataConfig(), channels=3, needs_labels=True, needs_captions=False, seed=0)
    for batch in data.train.batches(batch_size=64, num_steps=1000):
        batch["pixel_values"], batch["labels"]
    ```
    """
    if channels not in (None, 1, 3, 4):
        raise UserError(f"channels must be 1 (gray), 3 (RGB) or 4 (RGBA), got {channels}")
    if config.precomputed_dir is not None:
        return _load_precomputed(config, needs_labels, needs_captions, seed)
    source, validation_source = open_sources(config, needs_labels, needs_captions)
    if validation_source is None and len(source) < 2:
        raise UserError(
            f"{source.description}: at least two images are needed, one for training and one for validation"
        )
    split = split_rows(source, validation_source, config)
    samples = _look_at_some(source, split[0], skip_bad=config.on_bad_image == "skip")
    transform = Transform.from_config(config, _choose_channels(channels, samples, source))
    plain = dataclasses.replace(transform, center_crop=True, random_flip=False)
    train, validation = _open_streams(
        ImageRows(source, transform, needs_labels, needs_captions),
        ImageRows(validation_source or source, plain, needs_labels, needs_captions),
        *(split, seed, config),
    )
    if not config.streaming:
        # Validation must not fail in the middle of a run.
        for position in range(validation.num_samples):
            validation[position]
    sources = dict.fromkeys((source, validation_source or source))
    return TrainingData(
        train=train,
        validation=validation,
        channels=transform.channels,
        num_classes=source.num_classes if needs_labels else None,
        class_names=source.class_names if needs_labels else None,
        first_image_size=samples[0][1].size,
        description=source.description,
        fingerprint=_fingerprint(config, needs_labels, needs_captions, transform, [s.identity() for s in sources]),
    )


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
    return np.sort(order[: config.max_train_samples]), np.sort(held_out)


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
    return RowGroups(starts[counts > 0], counts[counts > 0]), held_out


def _validation_count(count: int, config: DataConfig) -> int:
    return min(config.validation_size, max(1, count // 10))


def _load_precomputed(config: DataConfig, needs_labels: bool, needs_captions: bool, seed: int) -> TrainingData:
    precomputed = PrecomputedDataset(config.precomputed_dir)
    precomputed.check(config, needs_labels, needs_captions)
    source, validation_source = precomputed.splits["train"], precomputed.splits.get("validation")
    train, validation = _open_streams(
        PrecomputedRows(source, config.random_flip, needs_labels, needs_captions),
        PrecomputedRows(validation_source or source, False, needs_labels, needs_captions),
        *(split_rows(source, validation_source, config), seed, config),
    )
    images = precomputed.images
    return TrainingData(
        train=train,
        validation=validation,
        channels=images["channels"],
        num_classes=images["num_classes"] if needs_labels else None,
        class_names=images["class_names"] if needs_labels else None,
        first_image_size=tuple(images["first_image_size"]),
        description=images["description"],
        fingerprint=_fingerprint(config, needs_labels, needs_captions, config.random_flip, precomputed.made_of),
        precomputed=precomputed,
    )


def _open_streams(train: Rows, validation: Rows, split: Split, seed: int, config: DataConfig) -> tuple[Stream, Stream]:
    skip_bad = config.on_bad_image == "skip"
    train_rows, validation_rows = split
    if isinstance(train_rows, RowGroups):
        train_stream = ShardStream("train", train, train_rows, seed, skip_bad)
    else:
        train_stream = Stream("train", train, train_rows, seed, endless=True, skip_bad=skip_bad)
    validation_stream = Stream("validation", validation, validation_rows, seed, endless=False, skip_bad=skip_bad)
    train_stream[0], validation_stream[0]  # fail early
    return train_stream, validation_stream


def _look_at_some(source: Source, rows: np.ndarray | RowGroups, skip_bad: bool) -> list[tuple[int, Image.Image]]:
    """Read images from all over the training set, or from its first row group. Return them with their numbers."""
    if isinstance(rows, RowGroups):
        rows = np.arange(rows.starts[0], rows.starts[0] + rows.counts[0])
    some = rows[spread_indices(len(rows))]
    images = []
    for tried, index in enumerate(itertools.chain(some, rows)):
        if tried >= len(some) and images:
            break
        try:
            images.append((int(index), source.image(int(index))))
        except UnreadableImage as error:
            if not skip_bad:
                raise error.with_skip_advice() from error
    if not images:
        raise UserError(
            f"{source.description}: none of the {len(rows):,} images that were tried can be read, starting with "
            f"{source.name(int(some[0]))}"
        )
    return images


def _choose_channels(channels: int | None, images: list[tuple[int, Image.Image]], source: Source) -> int:
    colored = next((index for index, image in images if not is_gray(image)), None)
    if channels is None:
        return 1 if colored is None else 3
    if channels == 1 and colored is not None:
        raise UserError(f"the model takes gray images, but {source.name(colored)} has colors; use in_channels=3")
    return channels


def _fingerprint(config: DataConfig, *parts: object) -> str:
    return checksum(repr((config.max_train_samples, config.validation_size, *parts)))[:16]
