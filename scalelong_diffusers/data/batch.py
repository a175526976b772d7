"""Batches, and the random draws that belong to their samples."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scalelong_diffusers.randomness import generator_for, normal, seed_for, uniform


class Batch:
    """
    Samples of a stream: `batch["pixel_values"]`, `batch["labels"]`, `batch["captions"]`.

    Random numbers of a sample depend only on the seed, the stream, the position of the sample and the purpose. They do
    not depend on the batch size, the number of processes, or the step at which a run was resumed.

    Args:
        columns: tensors or lists with one entry per sample.
        positions: positions of the samples in their stream.
        stream: name of the stream, such as "train". Streams draw independently of each other.
        seed: seed of the run.
        unreadable: names of the images that were skipped for these samples.
    """

    def __init__(
        self,
        columns: dict[str, torch.Tensor | list],
        positions: Sequence[int],
        stream: str,
        seed: int,
        unreadable: Sequence[str] = (),
    ):
        self.columns = columns
        self.positions = list(positions)
        self.stream = stream
        self.unreadable = list(unreadable)
        self.keys = torch.tensor([seed_for(seed, stream, position) for position in positions], dtype=torch.int64)

    def __getitem__(self, column: str) -> Any:
        return self.columns[column]

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    def __len__(self) -> int:
        return len(self.positions)

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with its tensors on a device. Pinned tensors are copied without blocking."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Return the batch in pinned memory. The data loader calls this."""
        return self.map(torch.Tensor.pin_memory)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Return the batch with a function applied to each of its tensors."""
        mapped = copy.copy(self)
        mapped.keys = function(self.keys)
        mapped.columns = {
            name: function(column) if isinstance(column, torch.Tensor) else column
            for name, column in self.columns.items()
        }
        return mapped

    def normal_like(self, tensor: torch.Tensor, purpose: str) -> torch.Tensor:
        """Return standard normal noise in the shape and dtype of a tensor with one entry per sample."""
        return normal(self.keys, purpose, tensor.shape[1:]).to(tensor.dtype)

    def uniform(self, purpose: str) -> torch.Tensor:
        """Return one number in [0, 1) per sample, on the device of the batch."""
        return uniform(self.keys, purpose)


@dataclass(frozen=True)
class Draws:
    """Random draws for one sample on the host, before it is part of a batch: crop, flip, choice of a caption."""

    seed: int
    stream: str
    position: int

    def below(self, end: int, purpose: str) -> int:
        """Return an integer from 0 to `end` - 1."""
        generator = generator_for(self.seed, self.stream, purpose, self.position)
        return int(torch.randint(end, (), generator=generator))
