"""Streams of samples, each known by its position alone, and the batches that they are cut into."""

import copy
import dataclasses
import logging
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from scalelong_diffusers.data.batch import Batch
from scalelong_diffusers.data.draws import Draws
from scalelong_diffusers.data.images import Transform, UnreadableImage, to_pixel_values
from scalelong_diffusers.data.orders import GroupOrder, Groups
from scalelong_diffusers.data.sources import Source
from scalelong_diffusers.randomness import generator_for


logger = logging.getLogger(__name__)


class Rows(Protocol):
    """What the samples of a stream are made from: the columns of a row, by its number."""

    def read(self, index: int, draws: Draws) -> dict[str, Any]:
        """Raises `UnreadableImage` for a row that can not be used."""

    def name(self, index: int) -> str: ...


@dataclass(frozen=True)
class ImageRows:
    """Images with labels, captions, both or neither."""

    source: Source
    transform: Transform
    needs_labels: bool
    needs_captions: bool

    def read(self, index: int, draws: Draws) -> dict[str, Any]:
        row = {"pixel_values": self._pixels(index, draws)}
        if self.needs_labels:
            row["labels"] = self.source.label(index)
        if self.needs_captions:
            captions = self.source.captions(index)
            row["captions"] = captions[draws.below(len(captions), "caption")]
        return row

    def _pixels(self, index: int, draws: Draws) -> np.ndarray:
        image = self.source.image(index)
        try:
            return self.transform(image, draws)
        except ValueError as error:
            raise UnreadableImage(f"{self.name(index)} can not be used: {error}") from error

    def name(self, index: int) -> str:
        return self.source.name(index)


@dataclass(frozen=True)
class Sample:
    position: int
    columns: dict[str, Any]
    unreadable: list[str]


class Stream(Dataset):
    """
    Samples by position: `stream[position]` is the same one in every process, whatever was read before.

    Args:
        name: draws are made for it.
        rows: what samples are made from, and `indices` which of them belong to the stream.
        seed: of the run.
        endless: begin again and again, each time in another order; otherwise each row comes once, in the order given.
        skip_bad: put the next readable row in the place of one that can not be read.
    """

    def __init__(self, name: str, rows: Rows, indices: np.ndarray, seed: int, endless: bool, skip_bad: bool):
        self.name = name
        self.rows = rows
        self.indices = indices
        self.seed = seed
        self.endless = endless
        self.skip_bad = skip_bad

    @property
    def num_samples(self) -> int:
        return len(self.indices)

    def captions(self) -> Iterator[str]:
        """All of each row."""
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
        The batches of one process: `accumulation` of `batch_size` samples in each step.

        All processes and accumulations together take neighbouring positions in a step, so that what is learned in it
        does not depend on how many of them there are.
        """
        end = None if self.endless else self.num_samples
        positions = Positions(batch_size, first_step, num_steps, accumulation, num_processes, rank, end)
        return self._load(positions, num_workers)

    def _load(self, positions: Iterable[list[int]], num_workers: int) -> "_Loader":
        return _Loader(
            self,
            batch_sampler=positions,
            num_workers=num_workers,
            collate_fn=self._collate,
            worker_init_fn=_leave_signals_to_main_process,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # the loader draws from it; torch's own is left to dropout
        )

    def __getitem__(self, position: int) -> Sample:
        draws = Draws(self.seed, self.name, position)
        unreadable = []
        for passed_over in range(self.num_samples):
            index = self._row(position, passed_over)
            try:
                return Sample(position, self.rows.read(index, draws), unreadable)
            except UnreadableImage as error:
                if not self.skip_bad:
                    raise error.with_skip_advice() from error
                unreadable.append(self.rows.name(index))
        raise UnreadableImage(
            f"none of the {self.num_samples:,} images of the {self.name} stream can be used, not even {unreadable[0]}"
        )

    def _row(self, position: int, passed_over: int) -> int:
        """The row that comes so many after the one at a position, where those before it can not be read."""
        epoch, place = divmod(position, self.num_samples)
        order = _order(self.seed, epoch, self.num_samples) if self.endless else range(self.num_samples)
        return int(self.indices[order[(place + passed_over) % self.num_samples]])

    def __getitems__(self, positions: list[int]) -> "list[Sample] | UnreadableImage | OSError":
        # A worker's exception would reach the main process as a text that holds its traceback.
        try:
            return [self[position] for position in positions]
        except (UnreadableImage, OSError) as error:
            return error

    def _collate(self, samples: list[Sample] | UnreadableImage | OSError) -> Batch | UnreadableImage | OSError:
        if isinstance(samples, Exception):
            return samples
        columns = {name: _COLLATE[name]([sample.columns[name] for sample in samples]) for name in samples[0].columns}
        unreadable = [name for sample in samples for name in sample.unreadable]
        return Batch(columns, [sample.position for sample in samples], self.name, self.seed, unreadable)


class ShardStream(Stream):
    """
    The endless stream of a data set that is read row group by row group: samples by position, as ever, in an order
    that lets each process and worker read its own part of the data set, where it is of as many parts.

    Args:
        groups: what belongs to the stream, of which `rows.source` is the `ShardTable`.
    """

    def __init__(self, name: str, rows: Rows, groups: Groups, seed: int, skip_bad: bool):
        self.name = name
        self.rows = rows
        self.groups = groups
        self.seed = seed
        self.endless = True
        self.skip_bad = skip_bad
        self._order = GroupOrder(groups, seed, rows.source.lanes(), batch_size=1)

    @property
    def indices(self) -> np.ndarray:
        return self.groups.rows()

    @property
    def num_samples(self) -> int:
        return self.groups.num_rows

    def captions(self) -> Iterator[str]:
        return self.rows.source.captions_alone(self.groups)

    def batches(
        self, batch_size: int, *, accumulation: int = 1, num_processes: int = 1, rank: int = 0, **others
    ) -> DataLoader:
        """As those of any stream. Which samples they have depends on how many a step has over all processes."""
        stream = copy.copy(self)
        stream._order = dataclasses.replace(self._order, batch_size=batch_size * accumulation * num_processes)
        if rank == 0:
            readers = num_processes * _parts(batch_size, others.get("num_workers", 0))
            stream._warn_of_shared_groups(readers, accumulation)
        shared_out = {"accumulation": accumulation, "num_processes": num_processes, "rank": rank}
        return Stream.batches(stream, batch_size, **shared_out, **others)

    def _load(self, positions: Iterable[list[int]], num_workers: int) -> "_Loader":
        # The workers share out each batch, not the batches: the same part of them is of the same part of the data.
        parts = _parts(positions.batch_size, num_workers)
        loader = super()._load(_Parts(positions, parts), num_workers)
        loader.parts = parts
        return loader

    def _row(self, position: int, passed_over: int) -> int:
        epoch, place = divmod(position, self.num_samples)
        return self._order.row(epoch, place, passed_over)

    def _warn_of_shared_groups(self, readers: int, accumulation: int):
        groups, lanes = len(self.groups.counts), self._order.num_lanes()
        shares = readers * accumulation
        if groups < readers:
            why = f"the data set has {groups} row groups, and {readers} processes x workers read it"
        elif readers > 1 and lanes < shares:
            parts = f"{shares} processes x workers x accumulations"
            why = f"a step is of {lanes} places of the data set, and {parts} share it"
        else:
            return
        logger.warning("%s: each row still comes once in an epoch, but several of them read the same row groups", why)


def _parts(batch_size: int, num_workers: int) -> int:
    """Into how many a process cuts a batch, for its workers."""
    return min(max(1, num_workers), batch_size)


_COLLATE = {
    "pixel_values": to_pixel_values,
    "labels": torch.tensor,
    "captions": list,
    # Of precomputed features, and of the images that they are made of.
    "moments": torch.stack,
    "text_features": torch.stack,
    "all_captions": list,
    "unreadable": list,
}


@lru_cache(maxsize=2)  # a batch may reach into the next epoch
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return torch.randperm(count, generator=generator_for(seed, "order", epoch)).numpy()


@dataclass(frozen=True)
class Positions(Sampler):
    """The positions of one process's batches; those before `end`, where there is one."""

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


@dataclass(frozen=True)
class _Parts(Sampler):
    """Each batch cut into parts, of which the loader gives each worker the same one every time."""

    positions: Positions
    parts: int

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.positions:
            size, rest = divmod(len(batch), self.parts)
            start = 0
            for part in range(self.parts):
                end = start + size + (part < rest)
                yield batch[start:end]
                start = end


class _Loader(DataLoader):
    parts = 1  # of which a batch is put together

    def __iter__(self) -> Iterator[Batch]:
        with _signals_held_back():  # workers inherit it, until they know what to do with them
            batches = super().__iter__()
        try:
            parts = []
            for batch in batches:
                if isinstance(batch, Exception):
                    raise batch
                parts.append(batch)
                if len(parts) == self.parts:
                    yield Batch.joined(parts)
                    parts = []
        finally:
            del batches  # its workers end now, not when the error is forgotten


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CAN_HOLD_BACK = hasattr(signal, "pthread_sigmask")  # not on Windows


@contextmanager
def _signals_held_back():
    if not _CAN_HOLD_BACK:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals_to_main_process(worker: int):
    """
    Ctrl-C and a job's end reach every process at once. The main one finishes its step and saves, for which it needs
    its workers, and ends them itself: by a message, or by SIGTERM, of which it sends another one to those that stay.
    """
    requests = []

    def leave_at_the_second(number, frame):
        requests.append(number)
        if len(requests) > 1:
            os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave_at_the_second)
    if _CAN_HOLD_BACK:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
