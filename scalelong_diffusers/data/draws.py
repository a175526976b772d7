"""What is drawn for one sample: by the seed, its stream, its position in it and what for."""

from dataclasses import dataclass

import torch

from scalelong_diffusers.randomness import generator_for


@dataclass(frozen=True)
class Draws:
    """The counterpart of a `Batch`'s draws for what is decided before there is a batch."""

    seed: int
    stream: str
    position: int

    def below(self, end: int, purpose: str) -> int:
        """A whole number of 0 to `end` - 1."""
        generator = generator_for(self.seed, self.stream, purpose, self.position)
        return int(torch.randint(end, (), generator=generator))
