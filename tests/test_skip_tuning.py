"""The benchmark of Skip-Tuning."""

import argparse

import diffusers
import pytest
import torch

from scalelong_diffusers import ScaleLongUnconditionalPipeline
from scalelong_diffusers.experiments.fashion_mnist import IMAGES


@pytest.fixture
def skip_tuning(benchmark):
    return benchmark("skip_tuning")


@pytest.fixture
def results(skip_tuning, tmp_path):
    return skip_tuning.ResultFile(tmp_path / "results.jsonl", skip_tuning.Sampling)


@pytest.fixture
def trained(tmp_path):
    """Save a tiny pipeline as a trained model."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    unet = diffusers.UNet2DModel(**IMAGES, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, **blocks)
    ScaleLongUnconditionalPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_samples_of_all_rho_start_from_the_same_noise(skip_tuning, trained, monkeypatch):
    monkeypatch.setattr(skip_tuning, "NUM_IMAGES", 3)
    monkeypatch.setattr(skip_tuning, "BATCH_SIZE", 2)

    def images(rho):
        return torch.cat(list(skip_tuning.sampled_images(trained, skip_tuning.Sampling("U-Net", 3, "ddim", 2, rho))))

    unscaled, scaled = images(1.0), images(0.5)
    assert unscaled.shape == (3, 3, 28, 28)
    assert unscaled.dtype == torch.uint8
    noises = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    pipe = ScaleLongUnconditionalPipeline.from_pretrained(trained)
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    expected = pipe(3, 2, latents=noises, output_type="np").images
    assert abs(unscaled[:, 0].numpy() - 255 * expected[..., 0]).max() < 1
    assert not torch.equal(scaled, unscaled)


def test_table_has_ratios_to_the_unscaled_model_of_the_same_seed(skip_tuning, results):
    fids = {(3, 1.0): 40.0, (4, 1.0): 50.0, (3, 0.8): 20.0, (4, 0.8): 60.0, (3, 0.6): 80.0}
    for (seed, rho), fid in fids.items():
        results.add(skip_tuning.Sampling("U-ViT", seed, "dpm++", 5, rho), {"fid": fid})
    row = next(line for line in skip_tuning.table(results).splitlines() if line.startswith("| U-ViT | dpm++ | 5 |"))
    cells = dict(zip(("1", *map(str, skip_tuning.RHOS[1:])), row.strip("| ").split(" | ")[3:]))
    assert cells["1"] == "45 (40 to 50)"
    assert cells["0.8"] == "0.85 (0.50 to 1.20)"
    assert cells["0.6"] == "2.00"
    assert cells["0.9"] == ""


def test_resumes_and_does_not_repeat_finished_samplings(skip_tuning, results, trained, monkeypatch, tmp_path):
    monkeypatch.setattr(skip_tuning, "SETTINGS", (("U-Net", "ddim"),))
    monkeypatch.setattr(skip_tuning, "data_source", lambda data, folder: {})
    monkeypatch.setattr(skip_tuning, "feature_network", lambda folder, source: 0.9)
    asked, trainings = [], []

    class Judge:
        def __init__(self, folder, source):
            pass

        def fid(self, model, sampling):
            asked.append(sampling)
            if len(asked) == 5:
                raise KeyboardInterrupt
            return 1.0

    monkeypatch.setattr(skip_tuning, "Judge", Judge)
    monkeypatch.setattr(skip_tuning.ModelTrainer, "run_all", lambda self, planned: trainings.append(planned()))
    arguments = argparse.Namespace(folder=tmp_path, data="", jobs=1)
    with pytest.raises(KeyboardInterrupt):
        skip_tuning.sample_all(arguments, results)
    assert len(results.lines) == 4
    skip_tuning.sample_all(arguments, results)
    planned = skip_tuning.samplings("U-Net", "ddim")
    assert sorted(map(str, results.lines)) == sorted(map(str, planned))
    assert asked == [*planned[:5], *planned[4:]]
    assert {training.seed for training in trainings[0]} == set(skip_tuning.SEEDS)
