"""What is learned does not depend on how the images of a step are shared out."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scalelong_diffusers.data import DataConfig, load_training_data


DOUBLE = Path(__file__).parent / "double_script.py"
EIGHT = {"train_batch_size": 8, "max_train_steps": 20, "checkpointing_steps": 20, "skip_scaling": "ls"}
TWO_BY_FOUR = {**EIGHT, "train_batch_size": 4}


@pytest.fixture(scope="module")
def double_script():
    spec = importlib.util.spec_from_file_location("double_script", DOUBLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights_of(folder):
    return load_file(folder / "checkpoint-20" / "unet" / "diffusion_pytorch_model.safetensors")


def assert_close(folder, expected, tolerance):
    weights = weights_of(folder)
    for name, wanted in weights_of(expected).items():
        torch.testing.assert_close(weights[name], wanted, rtol=0, atol=tolerance, msg=name)


@pytest.mark.slow
def test_in_float64_the_weights_agree(train, launch, double_script, tmp_path):
    whole = train(tmp_path / "whole", script=double_script, **EIGHT)
    assert weights_of(whole)["norm.weight"].dtype == torch.float64
    parts = train(tmp_path / "parts", script=double_script, gradient_accumulation_steps=2, **TWO_BY_FOUR)
    assert_close(parts, whole, 1e-9)
    code, _, errors = launch(tmp_path / "processes", processes=2, script=DOUBLE, **TWO_BY_FOUR).wait()
    assert code == 0, errors
    assert_close(tmp_path / "processes", whole, 1e-9)


@pytest.mark.slow
def test_in_float32_the_losses_agree(train, launch, metrics_of, tmp_path):
    others = launch(tmp_path / "processes", processes=2, **TWO_BY_FOUR)
    runs = [
        train(tmp_path / "whole", **EIGHT),
        train(tmp_path / "parts", gradient_accumulation_steps=2, **TWO_BY_FOUR),
        tmp_path / "processes",
    ]
    code, _, errors = others.wait()
    assert code == 0, errors
    whole, *rest = map(metrics_of, runs)
    assert [line["step"] for line in whole] == list(range(1, 21))
    for lines in rest:
        for line, expected in zip(lines, whole, strict=True):
            for name in ("loss", "validation_loss", "validation_loss_raw"):
                assert line.get(name) == pytest.approx(expected.get(name), abs=1e-5)
            assert line["lr"] == expected["lr"]


def test_processes_started_on_cpus_that_do_not_work_together_are_refused(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "2 processes were started" in refused()


def test_data_is_split_and_never_repeated():
    """All processes, accumulations and workers together read every image of an epoch once, in any epoch."""
    settings = DataConfig(resolution=8, num_shapes=30, validation_size=3)
    data = load_training_data(settings, channels=3, needs_labels=False, needs_captions=False, seed=0)
    seen = []
    for rank in range(2):
        batches = data.train.batches(
            batch_size=3, num_steps=9, accumulation=2, num_processes=2, rank=rank, num_workers=rank
        )
        seen += [position for batch in batches for position in batch.positions]
    assert sorted(seen) == list(range(9 * 12))
