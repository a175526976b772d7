"""
Draw random networks of the paper's theory (equation 3): stacks of matrices and ReLU, with long skips that are added.

Many networks are drawn together. Tensors have the draw as their first dimension.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F


Join = Literal["sum", "concatenation"]
Norm = Literal["none", "GroupNorm", "LayerNorm"]
NUM_GROUPS = 8


class PaperNetworks:
    """
    Networks f_0 with f_i(x) = b_{i+1}(k_{i+1} a_{i+1}(x) + f_{i+1}(a_{i+1}(x))), drawn independently.

    Each block is W_l relu(W_{l-1} ... relu(W_1 x)), and f_N is such a block, too.

    Args:
        factors: k_1 ... k_N.
        last_gain: variance of the last matrix of a block, times its fan-in. The paper draws all matrices with 2, as
            Kaiming's init for ReLU. No ReLU follows the last matrix, so 1 keeps the norm of the features there.
        join: how a decoder block receives hidden state and skip.
        norm: norm in front of each block.
    """

    def __init__(
        self, factors: Sequence[float], draws: int, width: int, layers: int, generator: torch.Generator,
        last_gain: float = 2.0, join: Join = "sum", norm: Norm = "none",
    ):  # fmt: skip
        self.factors, self.join, self.norm = list(factors), join, norm

        def block(fan_in: int = width) -> list[torch.Tensor]:
            gains = [2.0] * (layers - 1) + [last_gain]
            sizes = [fan_in] + [width] * (layers - 1)
            return [
                torch.randn(draws, width, size, generator=generator) * math.sqrt(gain / size)
                for size, gain in zip(sizes, gains)
            ]

        skips = range(len(self.factors))
        self.encoders = [block() for _ in skips]
        self.middle = block()
        self.decoders = [block(2 * width if join == "concatenation" else width) for _ in skips]

    def features(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs of the decoder blocks b_1 ... b_N. The first one is the output of the network."""
        skips = []
        for encoder in self.encoders:
            x = self._apply(encoder, x)
            skips.append(x)
        hidden, outputs = self._apply(self.middle, x), []
        for factor, skip, decoder in reversed(list(zip(self.factors, skips, self.decoders))):
            hidden = self._apply(decoder, self._joined(hidden, factor * skip))
            outputs.append(hidden)
        return outputs[::-1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x)[0]

    def _joined(self, hidden: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return hidden + skip if self.join == "sum" else torch.cat((hidden, skip), dim=1)

    def _apply(self, block: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        x = self._normalized(x)
        for matrix in block[:-1]:
            x = _product(matrix, x).relu()
        return _product(block[-1], x)

    def _normalized(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm == "LayerNorm":
            return F.layer_norm(x, x.shape[1:])
        return F.group_norm(x, NUM_GROUPS) if self.norm == "GroupNorm" else x


def _product(matrices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    return torch.bmm(matrices, vectors[..., None])[..., 0]


def expected_energies(factors: Sequence[float], last_gain: float) -> list[float]:
    """
    Return the expectation of |h_i|^2 / |x|^2 for the outputs h_i of the decoder blocks b_1 ... b_N.

    The last matrix of a block is drawn independently with mean 0, so a skip and the hidden state that it joins are
    uncorrelated, and their energies add up. A block multiplies the energy by `last_gain`:
    E|h_i|^2 = g (k_i^2 g^i |x|^2 + E|h_{i+1}|^2), starting from f_N with g^(N+1) |x|^2.
    """
    energy, energies = last_gain ** (len(factors) + 1), []
    for i, factor in reversed(list(enumerate(factors, start=1))):
        energy = last_gain * (factor**2 * last_gain**i + energy)
        energies.append(energy)
    return energies[::-1]
