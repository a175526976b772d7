"""The order in which a data set is read whose row groups are dear to read: random, and yet group by group."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from scalelong_diffusers.randomness import generator_for


# From so many places of the data set a batch is put together, at most.
MOST_LANES = 16


@dataclass(frozen=True, eq=False)  # known by itself alone: it is what orders are kept for
class Groups:
    """The rows that a stream has of each row group, as spans of row numbers."""

    starts: np.ndarray
    counts: np.ndarray

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    def rows(self) -> np.ndarray:
        return np.concatenate([np.arange(start, start + count) for start, count in zip(self.starts, self.counts)])

    def first(self) -> np.ndarray:
        return np.arange(self.starts[0], self.starts[0] + self.counts[0])


@dataclass(frozen=True)
class GroupOrder:
    """
    Which row has which place in an epoch: row groups come in a new order, and so do the rows of each.

    The sequence of them is cut into lanes. A batch has neighbouring places of each lane, and the same part of a batch
    is of the same lanes in each step: so who reads a part of every batch reads a part of the data set, unless it is
    less than a lane's.

    Args:
        lanes: from how many places of the sequence a batch is put together, at most.
        batch_size: of a step, over all processes and accumulations.
    """

    groups: Groups
    seed: int
    lanes: int
    batch_size: int

    def row(self, epoch: int, place: int, passed_over: int) -> int:
        """`passed_over` counts the rows that could not be read there; the next of the same lane takes their place."""
        number = (self._in_sequence(place) + passed_over) % self.groups.num_rows
        order, starts = _order_of_groups(self.seed, epoch, self.groups)
        turn = int(np.searchsorted(starts, number, side="right")) - 1
        group = int(order[turn])
        rows = _order_of_rows(self.seed, epoch, group, int(self.groups.counts[group]))
        return int(self.groups.starts[group]) + int(rows[number - int(starts[turn])])

    def num_lanes(self) -> int:
        return -(-self.batch_size // self._width)

    @property
    def _width(self) -> int:
        """How many places of a batch are of one lane."""
        return -(-self.batch_size // self.lanes)

    def _in_sequence(self, place: int) -> int:
        steps, rest = divmod(self.groups.num_rows, self.batch_size)
        step, slot = divmod(place, self.batch_size)
        lane_start = slot // self._width * self._width
        width = min(self._width, self.batch_size - lane_start)
        return lane_start * steps + min(lane_start, rest) + step * width + slot - lane_start


@lru_cache(maxsize=2)  # a batch may reach into the next epoch
def _order_of_groups(seed: int, epoch: int, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
    """The groups by turn, and where in the sequence each turn starts."""
    order = torch.randperm(len(groups.counts), generator=generator_for(seed, "groups", epoch)).numpy()
    counts = groups.counts[order]
    return order, np.cumsum(counts) - counts


@lru_cache(maxsize=4 * MOST_LANES)
def _order_of_rows(seed: int, epoch: int, group: int, count: int) -> np.ndarray:
    return torch.randperm(count, generator=generator_for(seed, "rows", epoch, group)).numpy()
