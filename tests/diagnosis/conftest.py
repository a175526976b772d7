"""A tiny model and samples."""

import pytest
import torch

from scalelong_diffusers import UViTModel
from scalelong_diffusers.diagnosis.measure import Samples, spread_positions
from scalelong_diffusers.noise import BetaProcess, NoiseProcess


@pytest.fixture
def noising() -> NoiseProcess:
    return BetaProcess()


@pytest.fixture
def build():
    """Return a function that builds a tiny U-ViT."""

    def run(**changes) -> UViTModel:
        torch.manual_seed(0)
        config = {"sample_size": 8, "patch_size": 2, "hidden_size": 16, "num_layers": 4, "num_attention_heads": 2}
        return UViTModel(**{**config, **changes}).eval()

    return run


@pytest.fixture
def batches() -> list[Samples]:
    """Return batches of images whose values are uniform in [-1, 1]."""
    generator = torch.Generator().manual_seed(0)

    def batch(first: int, count: int) -> Samples:
        noise, perturbation = torch.randn(2, count, 3, 8, 8, generator=generator)
        clean = 2 * torch.rand(count, 3, 8, 8, generator=generator) - 1
        return Samples(clean, noise, spread_positions(first, count), perturbation)

    return [batch(0, 6), batch(6, 6), batch(12, 4)]
