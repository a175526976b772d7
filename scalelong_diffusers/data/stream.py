"""Streams of samples by position, and the data loaders that divide them into batches."""

import atexit
import copy
import dataclasses
import logging
import multiprocessing.util  # noqa: F401 (its exit function must be registered before the one of this module)
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

from scalelong_diffusers.data.batch import Batch, Draws
from scalelong_diffusers.data.images import Transform, to_pixel_values
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.image_files import UnreadableImage
from scalelong_diffusers.processes import STOP_SIGNALS
from scalelong_diffusers.randomness import generator_for


logger = logging.getLogger(__name__)

Tokenizer = Callable[[list[str]], torch.Tensor]


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


class Rows(Protocol):
    """A reader for the columns of a row, given its number."""

    def read(self, index: int, draws: Draws) -> dict[str, Any]:
        """Return the columns. Raises `UnreadableImage` if the row cannot be used."""

    def name(self, index: int) -> str: ...


@dataclass(frozen=True)
class ImageRows:
    """Rows with transformed images and, if needed, their labels and captions."""

    source: Source
    transform: Transform
    needs_labels: bool
    needs_captions: bool

    def read(self, index: int, draws: Draws) -> dict[str, Any]:
        row = {}
        if self.needs_captions:
            captions = self.source.captions(index)
            if not captions:
                raise UnreadableImage(f"{self.name(index)} has no caption")
            row["captions"] = captions[draws.below(len(captions), "caption")]
        if self.needs_labels:
            row["labels"] = self.source.label(index)
        return row | {"pixel_values": self._pixels(index, draws)}

    def _pixels(self, index: int, draws: Draws) -> np.ndarray:
        image = self.source.image(index)
        try:
            return self.transform(image, draws)
        except ValueError as error:
            raise UnreadableImage(f"{self.name(index)} cannot be used: {error}") from error

    def name(self, index: int) -> str:
        return self.source.name(index)


@dataclass(frozen=True)
class Sample:
    position: int
    columns: dict[str, Any]
    unreadable: list[str]


class Stream(Dataset):
    """
    Samples by position. `stream[position]` is the same sample in every process, whatever was read before.

    Args:
        name: name of the stream. Its samples draw independently of other streams.
        rows: reads the rows.
        indices: numbers of the rows in the stream.
        seed: seed of the run.
        endless: repeat the rows forever, in a new random order in each epoch. Otherwise each row comes once, in order.
        skip_bad: replace rows that cannot be read by the next readable one.
    """

    def __init__(
        self, name: str, rows: Rows, indices: np.ndarray | RowGroups, seed: int, endless: bool, skip_bad: bool
    ):
        self.name = name
        self.rows = rows
        self.indices = indices
        self.seed = seed
        self.endless = endless
        self.skip_bad = skip_bad
        self.tokenizers: dict[str, Tokenizer] = {}

    @property
    def num_samples(self) -> int:
        return len(self.indices)

    def captions(self) -> Iterator[str]:
        """Yield all captions of all rows."""
        for index in self.indices:
            yield from self.rows.source.captions(int(index))

    def batches(
        self,
        batch_size: int,
        first_step: int = 0,
        num_steps: int | None = None,
        accumulation: int = 1,
        num_processes: int = 1,
        rank: int = 0,
        num_workers: int = 0,
    ) -> DataLoader:
        """
        Return the batches of one process: `accumulation` batches of `batch_size` samples per step.

        In each step, all processes and accumulations together take consecutive positions. So the samples of a step do
        not depend on how they are divided.
        """
        end = None if self.endless else self.num_samples
        return _Loader(
            self,
            batch_sampler=Positions(batch_size, first_step, num_steps, accumulation, num_processes, rank, end),
            num_workers=num_workers,
            collate_fn=self._collate,
            worker_init_fn=_leave_signals_to_main_process,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # the loader draws from it instead of torch's global generator
        )

    def __getitem__(self, position: int) -> Sample:
        draws = Draws(self.seed, self.name, position)
        unreadable = []
        for skipped in range(self.num_samples):
            index = self._row(position, skipped)
            try:
                return Sample(position, self.rows.read(index, draws), unreadable)
            except UnreadableImage as error:
                if not self.skip_bad:
                    raise error.with_skip_advice() from error
                unreadable.append(self.rows.name(index))
        some = f"{self.num_samples:,} images of the {self.name} stream"
        raise UnreadableImage(f"none of the {some} can be read, starting with {unreadable[0]}")

    def _row(self, position: int, skipped: int) -> int:
        """Return the row at a position, or the one that replaces it after `skipped` unreadable rows."""
        epoch, place = divmod(position, self.num_samples)
        order = _order(self.seed, epoch, self.num_samples) if self.endless else range(self.num_samples)
        return int(self.indices[order[(place + skipped) % self.num_samples]])

    def __getitems__(self, positions: list[int]) -> list[Sample] | UserError:
        # Returned, because an exception of a worker would arrive with the worker's traceback in its message.
        try:
            return [self[position] for position in positions]
        except UserError as error:
            return error

    def _collate(self, samples: list[Sample] | UserError) -> Batch | UserError:
        if isinstance(samples, UserError):
            return samples
        columns = {name: _COLLATE[name]([sample.columns[name] for sample in samples]) for name in samples[0].columns}
        columns |= {name: tokenize(columns["captions"]) for name, tokenize in self.tokenizers.items()}
        unreadable = [name for sample in samples for name in sample.unreadable]
        return Batch(columns, [sample.position for sample in samples], self.name, self.seed, unreadable)


_COLLATE = {
    "pixel_values": to_pixel_values,
    "labels": torch.tensor,
    "captions": list,
    # Columns of precomputed latents, and of the images that they are computed from.
    "moments": torch.stack,
    "text_states": torch.stack,
    "all_captions": list,
    "unreadable": list,
}


@lru_cache(maxsize=2)  # a batch may reach into the next epoch
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return torch.randperm(count, generator=generator_for(seed, "order", epoch)).numpy()


class ShardStream(Stream):
    """
    The endless training stream of a [`ShardTable`], whose rows are read one row group at a time.

    Guarantees:
    - Each row comes exactly once per epoch.
    - Row groups come in a new random order in each epoch. Rows are shuffled within windows of a few row groups, which
      a reader keeps in memory.
    - Each reader (a worker of a process) reads its own consecutive part of the epoch. Only the row groups of the
      windows at both ends of a part are read by more than one reader.
    - The row at a position depends on the seed, the batch size and the number of readers, so a run that is resumed
      with the same number of processes and workers continues exactly. With other numbers, the rows of the current
      epoch are distributed anew: some of them may be used twice and others not at all.
    - Crops, flips, captions and noise depend on the seed and the position only.
    """

    def __init__(self, name: str, rows: Rows, groups: RowGroups, seed: int, skip_bad: bool):
        super().__init__(name, rows, groups, seed, endless=True, skip_bad=skip_bad)
        self.order = ShardOrder(groups, seed, rows.source.groups_in_memory)

    def captions(self) -> Iterator[str]:
        return self.rows.source.all_captions(self.indices)

    def batches(
        self, batch_size: int, *, num_processes: int = 1, rank: int = 0, num_workers: int = 0, **options
    ) -> DataLoader:
        """Return the batches of one process, see [`Stream.batches`]."""
        readers, num_groups = num_processes * max(1, num_workers), len(self.indices.counts)
        if rank == 0 and readers > num_groups:
            logger.warning(
                "the dataset has %d row groups for %d readers (processes x workers): some readers read the same row "
                "groups; use fewer workers, or write smaller row groups",
                *(num_groups, readers),
            )
        stream = copy.copy(self)
        stream.order = dataclasses.replace(self.order, batch_size=batch_size, readers=readers)
        return Stream.batches(
            stream, batch_size, num_processes=num_processes, rank=rank, num_workers=num_workers, **options
        )

    def _row(self, position: int, skipped: int) -> int:
        return self.order.row(position, skipped)


@dataclass(frozen=True)
class ShardOrder:
    """
    The map from positions to rows: batch m belongs to reader m % `readers`, and each reader has a part of each epoch.

    Args:
        window: number of row groups whose rows are shuffled together.
    """

    groups: RowGroups
    seed: int
    window: int
    batch_size: int = 1
    readers: int = 1

    def row(self, position: int, skipped: int = 0) -> int:
        """Return the row at a position, or the one that replaces it after `skipped` unreadable rows."""
        count = len(self.groups)
        epoch = position // count
        first, last = epoch * count, (epoch + 1) * count
        reader = position // self.batch_size % self.readers
        part_start = self._count(last, reader) - self._count(first, reader)
        part_end = self._count(last, reader + 1) - self._count(first, reader + 1)
        own = [self._count(end, reader + 1) - self._count(end, reader) for end in (first, position)]
        number = (own[1] - own[0] + skipped) % (part_end - part_start)
        return self._row_of_epoch(epoch, part_start + number)

    def _count(self, end: int, readers: int) -> int:
        """Return how many positions below `end` belong to the first `readers` readers."""
        rounds, rest = divmod(end, self.batch_size * self.readers)
        return rounds * self.batch_size * readers + min(rest, self.batch_size * readers)

    def _row_of_epoch(self, epoch: int, number: int) -> int:
        order, starts = _order_of_groups(self.seed, epoch, self.groups)
        first = int(np.searchsorted(starts, number, side="right") - 1) // self.window * self.window
        window = order[first : first + self.window]
        counts = self.groups.counts[window]
        shuffled = _order_of_window(self.seed, epoch, first, int(counts.sum()))
        place = int(shuffled[number - starts[first]])
        group = int(np.searchsorted(np.cumsum(counts), place, side="right"))
        return int(self.groups.starts[window[group]] + place - counts[:group].sum())


@lru_cache(maxsize=2)
def _order_of_groups(seed: int, epoch: int, groups: RowGroups) -> tuple[np.ndarray, np.ndarray]:
    """Return the row groups in the order of an epoch, and the number of rows before each of them."""
    order = torch.randperm(len(groups.counts), generator=generator_for(seed, "groups", epoch)).numpy()
    counts = groups.counts[order]
    return order, np.cumsum(counts) - counts


@lru_cache(maxsize=8)
def _order_of_window(seed: int, epoch: int, first: int, count: int) -> np.ndarray:
    return torch.randperm(count, generator=generator_for(seed, "window", epoch, first)).numpy()


@dataclass(frozen=True)
class Positions(Sampler):
    """A sampler of the positions in each batch of one process, up to `end` if it is not None."""

    batch_size: int
    first_step: int
    num_steps: int | None
    accumulation: int
    num_processes: int
    rank: int
    end: int | None

    def __iter__(self) -> Iterator[list[int]]:
        step = self.first_step
        while self.num_steps is None or step < self.first_step + self.num_steps:
            for part in range(self.accumulation):
                start = self._start(step, part)
                stop = start + self.batch_size if self.end is None else min(start + self.batch_size, self.end)
                if start < stop:
                    yield list(range(start, stop))
            step += 1
            if self.end is not None and self._start(step, 0) >= self.end:
                return

    def _start(self, step: int, part: int) -> int:
        return ((step * self.accumulation + part) * self.num_processes + self.rank) * self.batch_size


class _Loader(DataLoader):
    def __iter__(self) -> Iterator[Batch]:
        with _blocked_signals():  # workers inherit the mask until their handlers are set
            return _Batches(super().__iter__())


class _Batches(Iterator):
    """The batches of a loader. Its workers end when an error occurs, or when this iterator is closed or deleted."""

    def __init__(self, batches: Iterator[Batch | UserError]):
        self._batches = batches
        _open_batches.add(self)

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
            if isinstance(batch, UserError):
                raise batch
        except BaseException:
            self.close()  # the traceback keeps this iterator alive
            raise
        return batch

    def close(self):
        self._batches = iter(())


_open_batches: "weakref.WeakSet[_Batches]" = weakref.WeakSet()


# At the end of the process, `multiprocessing` sends the workers a signal, which they may ignore, and waits for them.
# So they end here before: exit functions run in reverse order.
@atexit.register
def _close_all():
    for batches in list(_open_batches):
        batches.close()


_CAN_BLOCK_SIGNALS = hasattr(signal, "pthread_sigmask")  # not on Windows


@contextmanager
def _blocked_signals():
    if not _CAN_BLOCK_SIGNALS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals_to_main_process(worker: int):
    """
    Ignore signals to stop, except a second SIGTERM, in a worker.

    Ctrl-C, a dropped connection and the end of a job reach all processes. The main process finishes its step and saves
    a checkpoint, for which it needs its workers. Then it ends them: by a message, or by another SIGTERM if they hang.
    """
    received = []

    def exit_at_the_second(number, frame):
        received.append(number)
        if len(received) > 1:
            os._exit(0)

    for number in STOP_SIGNALS:
        signal.signal(number, exit_at_the_second if number == signal.SIGTERM else signal.SIG_IGN)
    if _CAN_BLOCK_SIGNALS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
