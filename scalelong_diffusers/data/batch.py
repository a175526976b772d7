"""Samples put together, with randomness that belongs to each of them."""

from collections.abc import Sequence
from typing import Any

import torch

from scalelong_diffusers.randomness import generator_for


class Batch:
    """
    Columns of samples (`batch["pixel_values"]`, `batch["labels"]`, `batch["captions"]`), and what is drawn for them.

    Every draw of a sample depends on the seed, on what it is for, and on the sample's position in the stream alone:
    not on the size of the batch, nor on the number of processes, nor on where a run was resumed.

    Args:
        columns: tensors, or lists of texts, with one entry for each sample.
        positions: where the samples stand in their stream.
        stream: the name of the stream, so that training and validation draw apart.
        seed: of the run.
        unreadable: the files that had to be passed over.
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
        self.seed = seed
        self.unreadable = list(unreadable)

    def __getitem__(self, column: str) -> Any:
        return self.columns[column]

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    def __len__(self) -> int:
        return len(self.positions)

    def to(self, device: torch.device | str) -> "Batch":
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """For the data loader."""
        return self._with(torch.Tensor.pin_memory)

    def _with(self, change) -> "Batch":
        columns = {
            name: change(column) if isinstance(column, torch.Tensor) else column
            for name, column in self.columns.items()
        }
        return Batch(columns, self.positions, self.stream, self.seed, self.unreadable)

    @classmethod
    def joined(cls, parts: Sequence["Batch"]) -> "Batch":
        """One batch of the samples of several."""
        first = parts[0]
        if len(parts) == 1:
            return first
        columns = {name: _joined([part[name] for part in parts]) for name in first.columns}
        positions = [position for part in parts for position in part.positions]
        unreadable = [name for part in parts for name in part.unreadable]
        return cls(columns, positions, first.stream, first.seed, unreadable)

    def normal_like(self, tensor: torch.Tensor, purpose: str) -> torch.Tensor:
        """Standard normal noise with the shape, dtype and device of a tensor that has one entry for each sample."""
        draws = [torch.randn(tensor.shape[1:], generator=generator) for generator in self._generators(purpose)]
        return torch.stack(draws).to(tensor)

    def uniform(self, purpose: str) -> torch.Tensor:
        """A number in [0, 1) for each sample, on the CPU."""
        return torch.cat([torch.rand(1, generator=generator) for generator in self._generators(purpose)])

    def _generators(self, purpose: str) -> list[torch.Generator]:
        return [generator_for(self.seed, self.stream, purpose, position) for position in self.positions]


def _joined(columns: list[torch.Tensor] | list[list]) -> torch.Tensor | list:
    if isinstance(columns[0], torch.Tensor):
        return torch.cat(columns)
    return [entry for column in columns for entry in column]
