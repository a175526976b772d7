"""Measure the noisy inputs of training, for Lemma 3.2 and Figures 3a and 3b."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.data.training_data import load_training_data
from scalelong_diffusers.noise import BetaProcess
from scalelong_diffusers.paper.experiment import Workspace
from scalelong_diffusers.randomness import generator_for


UNIFORM, FASHION_MNIST, SHAPES = DATASETS = ("uniform", "Fashion-MNIST", "colored shapes")
PERCENTS = range(1, 100)
_BATCH_SIZE = 500
_CHANNELS = {UNIFORM: 1, FASHION_MNIST: 1, SHAPES: 3}
_RESOLUTIONS = {UNIFORM: 28, FASHION_MNIST: 28, SHAPES: 32}


@dataclass(frozen=True)
class NoisyInputs:
    """Noisy images x_t with t ~ U(1, 1000) and linear betas. `uniform` images have independent pixels in [-1, 1]."""

    dataset: str
    count: int = 10_000
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.count} images: {self.dataset}, seed {self.seed}"

    @property
    def num_pixels(self) -> int:
        """m, the number of entries of an image."""
        return _CHANNELS[self.dataset] * _RESOLUTIONS[self.dataset] ** 2


def measure(inputs: NoisyInputs, workspace: Workspace) -> dict[str, Any]:
    """
    Return statistics of the inputs.

    `clean`, `energy` and `error` are the means of |x_0|^2 / m and |x_t|^2 / m and the standard error of the latter.
    `noise_ratio` is the mean of |eps|^2 / |x_t|^2, and `below_5` the fraction below 5. `quantiles` has percent, energy
    and noise ratio.
    """
    noising = BetaProcess()
    columns = []
    for number, clean in enumerate(_images(inputs, workspace)):
        generator = generator_for(inputs.seed, "paper's inputs", number)
        timesteps = noising.timesteps(torch.rand(len(clean), generator=generator))
        noise = torch.randn(clean.shape, generator=generator)
        energies = [_energy(each) for each in (clean, noising.add_noise(clean, noise, timesteps), noise)]
        columns.append(torch.stack(energies))
    clean, noisy, noise = torch.cat(columns, dim=1).double()
    ratio = noise / noisy
    percents = torch.tensor(PERCENTS, dtype=torch.float64) / 100
    quantiles = zip(PERCENTS, noisy.quantile(percents).tolist(), ratio.quantile(percents).tolist())
    return {
        "clean": clean.mean().item(),
        "energy": noisy.mean().item(),
        "error": noisy.std().item() / len(noisy) ** 0.5,
        "noise_ratio": ratio.mean().item(),
        "below_5": (ratio < 5).double().mean().item(),
        "quantiles": [[percent, round(energy, 4), round(ratio, 4)] for percent, energy, ratio in quantiles],
    }


def expected_energy(clean: float = 1 / 3) -> float:
    """
    Return E|x_t|^2 / m for images with this E|x_0|^2 / m.

    It is 1 - E_t[abar_t] (1 - E|x_0|^2 / m), and with x_0 ~ U[-1, 1] 1 - 2 E_t[abar_t] / 3 (equation 5).
    """
    mean_alpha = BetaProcess().scheduler.alphas_cumprod.double().mean()
    return 1 - mean_alpha.item() * (1 - clean)


def _energy(images: torch.Tensor) -> torch.Tensor:
    """Return |x|^2 / m of each image."""
    return images.flatten(1).square().mean(dim=1)


def _images(inputs: NoisyInputs, workspace: Workspace) -> Iterator[torch.Tensor]:
    """Yield batches of clean images with pixels from -1 to 1."""
    channels, size = _CHANNELS[inputs.dataset], _RESOLUTIONS[inputs.dataset]
    num_batches = inputs.count // _BATCH_SIZE
    if inputs.dataset == UNIFORM:
        for number in range(num_batches):
            generator = generator_for(inputs.seed, "uniform images", number)
            yield 2 * torch.rand(_BATCH_SIZE, channels, size, size, generator=generator) - 1
        return
    source = workspace.fashion_mnist if inputs.dataset == FASHION_MNIST else {"num_shapes": inputs.count}
    data = load_training_data(
        DataConfig(**source, resolution=size, validation_size=1),
        channels=channels, needs_labels=False, needs_captions=False, seed=inputs.seed,
    )  # fmt: skip
    for batch in data.train.batches(_BATCH_SIZE, num_steps=num_batches):
        yield batch["pixel_values"]
