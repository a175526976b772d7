"""A small feature network, a small pipeline, folders of images, and the command in this process."""

import json

import datasets
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image

from scalelong_diffusers import ScaleLongUnconditionalPipeline, UViTModel
from scalelong_diffusers.evaluation import load_features


datasets.disable_progress_bars()


@pytest.fixture(scope="session")
def extractor(network):
    return load_features(str(network))


@pytest.fixture
def pipeline(tmp_path):
    """The folder of a pipeline of images with 8 x 8 pixels."""
    torch.manual_seed(0)
    unet = UViTModel(sample_size=8, patch_size=4, hidden_size=16, num_layers=2, num_attention_heads=2)
    ScaleLongUnconditionalPipeline(unet, DDIMScheduler()).save_pretrained(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.fixture
def pictures(tmp_path):
    """Write a folder of noise images."""

    def make(n, folder="pictures", size=(8, 8), seed=0, mode="RGB", low=0):
        random = np.random.default_rng(seed)
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for k in range(n):
            shape = (size[1], size[0], 3) if mode == "RGB" else size[::-1]
            Image.fromarray(random.integers(low, 256, shape, np.uint8)).save(tmp_path / folder / f"{k:03d}.png")
        return tmp_path / folder

    return make


@pytest.fixture
def evaluate(scalelong, network, tmp_path):
    """Run `scalelong evaluate` and return its exit code, stdout and stderr."""

    def call(model, *flags, reference="shapes", **options):
        named = {"reference": reference, "features": network, "cache_dir": tmp_path / "cache", **options}
        words = [word for name, value in named.items() if value is not None for word in (f"--{name}", str(value))]
        return scalelong("evaluate", model, *flags, *words)

    return call


@pytest.fixture
def measured(evaluate):
    """Run `scalelong evaluate` and return its result."""

    def call(*arguments, **options):
        code, printed, errors = evaluate(*arguments, "--json", **options)
        assert code == 0, errors
        return json.loads(printed)

    return call
