"""Measure features, gradients and sensitivity of random networks, for Theorems 3.1, 3.3 and 3.4."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from scalelong_diffusers.noise import BetaProcess
from scalelong_diffusers.paper.network import Join, Norm, PaperNetworks, expected_energies
from scalelong_diffusers.randomness import generator_for
from scalelong_diffusers.scaling.factors import skip_factors


RADII = (0.25, 0.5, 1.0)  # the r of Theorem 3.1
_ENTRIES_AT_A_TIME = 50 * 128**2  # of one matrix in all networks that are drawn together
_PERTURBATION = 1e-3  # relative to the noise
_POWER_STEPS = 10


@dataclass(frozen=True)
class Draws:
    """
    Networks of equation 3 that are drawn at random, each with its own noisy input.

    Args:
        last_gain: see `PaperNetworks`.
        target_scale: the loss compares the output with this number times the noise. Large values make it independent
            of the output.
        bounds: also find the worst direction of the input and the bound of Theorem 3.4, which takes longer.
    """

    skips: int
    method: str = "none"
    kappa: float | None = None
    reverse: bool = False
    last_gain: float = 2.0
    join: Join = "sum"
    norm: Norm = "none"
    width: int = 128
    layers: int = 2
    target_scale: float = 1.0
    bounds: bool = False
    count: int = 1_000
    seed: int = 0

    @property
    def name(self) -> str:
        method = self.method if self.kappa is None else f"{self.method} {self.kappa:g}"
        method = f"reversed {method}" if self.reverse else method
        network = f"{self.join}, norm {self.norm}, width {self.width}, gain {self.last_gain:g}"
        return f"{self.skips} skips, {method}, {network}, target {self.target_scale:g}"

    @property
    def factors(self) -> list[float]:
        return skip_factors(self.method, self.skips, self.kappa, self.reverse)

    @property
    def energies(self) -> list[float]:
        """S_1 ... S_N, where S_i is the sum of k_j^2 from j = i."""
        squares = [factor**2 for factor in self.factors]
        return [math.fsum(squares[i:]) for i in range(self.skips)]

    @property
    def is_papers_network(self) -> bool:
        return self.join == "sum" and self.norm == "none"


def measure(draws: Draws) -> dict[str, Any]:
    """
    Return statistics over all draws, as mean, 5 % quantile, median, 95 % quantile and maximum.

    `features` has one entry for each |h_i|^2 / |x_t|^2. `gradients` has one for each block i: the largest squared norm
    of the gradient with respect to one of its matrices / (loss |x_t|^2). `change` is the change of the output relative
    to a small random change of the input. `within` is the fraction of draws in which all features are within
    (1 - r)^2 and (1 + r)^2 times their expectation.
    """
    batches = [_measure_batch(*batch, draws) for batch in _batches(draws)]
    values = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    within = {}
    if draws.is_papers_network:
        ratio = values["features"] / torch.tensor(expected_energies(draws.factors, draws.last_gain))
        within = {str(r): _fraction((ratio >= (1 - r) ** 2) & (ratio <= (1 + r) ** 2)) for r in RADII}
    if draws.bounds:
        within["bound"] = _fraction((values["worst"] <= values["bound"])[:, None])
    return {"within": within, **{name: statistics_of(each) for name, each in values.items()}}


def _fraction(is_inside: torch.Tensor) -> float:
    """Return the fraction of draws for which all columns are true."""
    return is_inside.all(dim=1).double().mean().item()


def statistics_of(values: torch.Tensor) -> list[Any]:
    """Return the statistics of draws, or one list for each column."""
    if values.dim() == 2:
        return [statistics_of(column) for column in values.T]
    quantiles = values.double().quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
    return [float(f"{number:.5g}") for number in (values.double().mean(), *quantiles, values.max())]


def _batches(draws: Draws) -> Iterator[tuple[PaperNetworks, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """
    Yield networks, their noisy inputs x_t, the noise in them, and a small change of the input.

    x_0 is uniform in [-1, 1], as in Lemma 3.2.
    """
    noising = BetaProcess()
    together = max(_ENTRIES_AT_A_TIME // draws.width**2, 1)
    for first in range(0, draws.count, together):
        count = min(together, draws.count - first)
        generator = generator_for(draws.seed, "paper's theory", first)
        networks = PaperNetworks(
            draws.factors, count, draws.width, draws.layers, generator, draws.last_gain, draws.join, draws.norm
        )
        clean = 2 * torch.rand(count, draws.width, generator=generator) - 1
        noise = torch.randn(count, draws.width, generator=generator)
        timesteps = noising.timesteps(torch.rand(count, generator=generator))
        change = _PERTURBATION * torch.randn(count, draws.width, generator=generator)
        yield networks, noising.add_noise(clean, noise, timesteps), noise, change


def _measure_batch(
    networks: PaperNetworks, x: torch.Tensor, noise: torch.Tensor, change: torch.Tensor, draws: Draws
) -> dict[str, torch.Tensor]:
    energy = _energy(x)
    features, gradients = _features_and_gradients(networks, x, draws.target_scale * noise)
    with torch.no_grad():
        moved = (networks(x + change) - features[0]).norm(dim=1) / change.norm(dim=1)
        values = {
            "features": torch.stack([_energy(feature) for feature in features], 1) / energy[:, None],
            "gradients": gradients / energy[:, None],
            "change": moved,
        }
        if draws.bounds:
            values |= {"worst": _largest_change(networks, x), **_lipschitz_bounds(networks)}
    return values


def _energy(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.square().sum(dim=1)


def _features_and_gradients(
    networks: PaperNetworks, x: torch.Tensor, target: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the features, and the largest squared gradient of each block / the loss of its draw (equation 2)."""
    blocks = [encoder + decoder for encoder, decoder in zip(networks.encoders, networks.decoders)]
    matrices = [matrix.requires_grad_() for block in blocks for matrix in block]
    features = networks.features(x)
    losses = _energy(features[0] - target)
    squares = [g.square().sum(dim=(1, 2)) for g in torch.autograd.grad(losses.sum(), matrices)]
    for matrix in matrices:
        matrix.requires_grad_(False)
    size = len(blocks[0])
    largest = [torch.stack(squares[k : k + size]).amax(dim=0) for k in range(0, len(squares), size)]
    return [feature.detach() for feature in features], torch.stack(largest, 1) / losses.detach()[:, None]


def _largest_change(networks: PaperNetworks, x: torch.Tensor) -> torch.Tensor:
    """Return the largest singular value of the Jacobian at the input, by power iteration."""
    direction = torch.ones_like(x)
    for _ in range(_POWER_STEPS):
        _, pushed = torch.func.jvp(networks, (x,), (direction / direction.norm(dim=1, keepdim=True),))
        direction = torch.func.vjp(networks, x)[1](pushed)[0]
    return pushed.norm(dim=1)


def _lipschitz_bounds(networks: PaperNetworks) -> dict[str, torch.Tensor]:
    """
    Return M_0, the bound sum_i k_i M_0^i + c_0 of Theorem 3.4, and the part of it that is c_0.

    The norm of a block is at most the product of the spectral norms of its matrices. Unrolling equation 3 gives
    c_0 = L_0 M_0^N with the norm L_0 of f_N.
    """
    norms = [
        [_lipschitz(block) for block in blocks] for blocks in (networks.encoders, networks.decoders, [networks.middle])
    ]
    encoders, decoders, (middle,) = norms
    largest = torch.stack([a * b for a, b in zip(encoders, decoders)]).amax(dim=0)
    skips = sum(factor * largest**i for i, factor in enumerate(networks.factors, start=1))
    constant = middle * largest ** len(networks.factors)
    return {"M0": largest, "bound": skips + constant, "share of c0": constant / (skips + constant)}


def _lipschitz(block: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.linalg.matrix_norm(matrix, ord=2) for matrix in block]).prod(dim=0)
