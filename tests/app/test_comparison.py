"""What the sliders of the app do to a model."""

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMPipeline, FlowMatchEulerDiscreteScheduler, UNet2DModel
from PIL import Image

from scalelong_diffusers import ScaleLongUnconditionalPipeline, UserError, UViTModel, skip_connections
from scalelong_diffusers.app.comparison import Comparison
from scalelong_diffusers.pipelines.loading import load_pipeline
from scalelong_diffusers.pipelines.sampling import SampleConfig, Sampling, image_file
from scalelong_diffusers.scaling import SkipScalingConfig


TINY = {"sample_size": 8, "patch_size": 2, "hidden_size": 16, "num_layers": 4, "num_attention_heads": 2}


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves a pipeline of a tiny U-ViT, whose gates are not at their start."""

    def run(skip_scaling):
        torch.manual_seed(0)
        unet = UViTModel(**TINY, skip_scaling=skip_scaling)
        for gate in unet.skip_scaler.parameters():
            torch.nn.init.normal_(gate)
        ScaleLongUnconditionalPipeline(unet, DDIMScheduler()).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return run


@pytest.fixture
def draw():
    """Return a function that samples two images and returns the pixels without and with scaling."""

    def run(comparison, scaling, **changes):
        config = SampleConfig(comparison.source, num_inference_steps=2, **changes)
        pair = comparison.sample(config, 2, scaling)
        return np.stack(pair.plain), np.stack(pair.scaled)

    return run


def test_makes_the_images_of_scalelong_sample(saved, draw, tmp_path):
    folder = saved({"method": "cs", "kappa": 0.5})
    comparison = Comparison(folder)
    _, scaled = draw(comparison, comparison.own, seed=3, scheduler="dpm++")
    config = SampleConfig(str(folder), num_inference_steps=2, seed=3, scheduler="dpm++")
    Sampling(load_pipeline(folder), config, tmp_path / "out", 2, 2).make()
    files = [image_file(tmp_path / "out", k) for k in range(2)]
    assert np.array_equal(scaled, np.stack([Image.open(file) for file in files]))


def test_sliders_change_only_the_scaled_images(saved, draw):
    comparison = Comparison(saved({"method": "cs", "kappa": 0.5}))
    first, own = draw(comparison, comparison.scaling("cs", 0.5, 1.0))
    for method, kappa, strength in (("cs", 0.3, 1.0), ("cs", 0.5, 0.5), ("constant", 0.5, 1.0)):
        plain, scaled = draw(comparison, comparison.scaling(method, kappa, strength))
        assert np.array_equal(plain, first)
        assert not np.array_equal(scaled, own)
        assert not np.array_equal(scaled, plain)
    plain, scaled = draw(comparison, comparison.scaling("cs", 0.5, 0.0))
    assert np.array_equal(plain, scaled)
    assert np.array_equal(draw(comparison, comparison.own)[1], own)


def test_keeps_plain_images_until_the_settings_change(saved, draw):
    comparison = Comparison(saved("cs"))
    steps = []
    config = SampleConfig(comparison.source, num_inference_steps=2)
    comparison.sample(config, 2, comparison.own, steps.append)
    assert steps == [0.25, 0.5, 0.75, 1.0]
    comparison.sample(config, 2, comparison.scaling("cs", 0.2, 1.0), steps.append)
    assert steps[4:] == [0.5, 1.0]
    plain, _ = draw(comparison, comparison.own)
    other, _ = draw(comparison, comparison.own, seed=1)
    assert not np.array_equal(plain, other)


def test_gates_survive_other_methods(saved, draw):
    comparison = Comparison(saved("ls"))
    assert comparison.methods == ["ls", "cs", "linear", "constant"]
    plain, gated = draw(comparison, comparison.scaling("ls", 0.9, 1.0))
    assert not np.array_equal(plain, gated)
    draw(comparison, comparison.scaling("cs", 0.9, 1.0))
    assert np.array_equal(draw(comparison, comparison.scaling("ls", 0.9, 1.0))[1], gated)


def test_the_own_scheduler_comes_back(saved, draw):
    comparison = Comparison(saved("cs"))
    own = draw(comparison, comparison.own)
    assert not np.array_equal(draw(comparison, comparison.own, scheduler="ddpm")[1], own[1])
    assert np.array_equal(draw(comparison, comparison.own), own)


def test_offers_the_schedulers_that_fit_the_model(saved, draw, tmp_path):
    assert "ddim" in Comparison(saved("cs")).schedulers
    ScaleLongUnconditionalPipeline(UViTModel(**TINY), FlowMatchEulerDiscreteScheduler()).save_pretrained(tmp_path)
    comparison = Comparison(tmp_path)
    assert comparison.schedulers == ["euler", "heun"]
    own = draw(comparison, comparison.scaling("cs", 0.5, 1.0))
    assert not np.array_equal(own, draw(comparison, comparison.scaling("cs", 0.5, 1.0), scheduler="heun"))


def test_stock_models_are_compared_with_cs(tmp_path, draw):
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    unet = UNet2DModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, **blocks)
    DDPMPipeline(unet, DDIMScheduler()).save_pretrained(tmp_path)
    comparison = Comparison(tmp_path)
    assert comparison.methods == ["cs", "linear", "constant"]
    plain, scaled = draw(comparison, comparison.scaling("cs", 0.5, 1.0))
    assert not np.array_equal(plain, scaled)
    skips = comparison.skips(comparison.scaling("cs", 0.5, 1.0))
    assert [skip.factor for skip in skips] == [0.5**k for k in range(4)]


def test_models_with_one_skip_have_no_cs(tmp_path):
    pipe = ScaleLongUnconditionalPipeline(UViTModel(**{**TINY, "num_layers": 2}), DDIMScheduler())
    pipe.save_pretrained(tmp_path)
    assert Comparison(tmp_path).methods == ["constant"]


def test_errors_leave_the_comparison_usable(saved, draw):
    comparison = Comparison(saved("cs"))
    before = draw(comparison, comparison.own)
    with pytest.raises(UserError, match="num_inference_steps must be"):
        comparison.sample(SampleConfig(comparison.source, num_inference_steps=5000), 2, comparison.own)
    with pytest.raises(UserError, match="seed must be an integer"):
        draw(comparison, comparison.own, seed=None)
    assert np.array_equal(draw(comparison, comparison.own), before)
    assert skip_connections(comparison.pipe).config == comparison.own
    assert comparison.scaling("cs", 0.4, 0.5) == SkipScalingConfig("cs", kappa=0.4, strength=0.5)
