"""Training does not depend on how the images of a step are divided between processes and accumulations."""

import pytest
import torch

from scalelong_diffusers.data import DataConfig, load_training_data


EIGHT = {"train_batch_size": 8, "max_train_steps": 20, "checkpointing_steps": 20, "skip_scaling": "ls"}
MUP = {"hidden_size": 32, "mup_base_width": 16, "mup_base_depth": 2}
TWO_BY_FOUR = {**EIGHT, "train_batch_size": 4}


@pytest.mark.slow
def test_weights_agree_in_float64(train, launch, double_script, weights_of, tmp_path):
    """The model trains with muP, so its parameters have several learning rates."""
    two = launch(tmp_path / "processes", processes=2, script=double_script, **TWO_BY_FOUR, **MUP)
    expected = weights_of(train(tmp_path / "whole", script=double_script, **EIGHT, **MUP), 20)
    assert expected["norm.weight"].dtype == torch.float64
    train(tmp_path / "parts", script=double_script, gradient_accumulation_steps=2, **TWO_BY_FOUR, **MUP)
    code, _, errors = two.wait()
    assert code == 0, errors
    for name in ("parts", "processes"):
        weights = weights_of(tmp_path / name, 20)
        for key, tensor in expected.items():
            torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-9, msg=f"{name}: {key}")


@pytest.mark.slow
def test_losses_agree_in_float32(train, launch, metrics_of, tmp_path):
    two = launch(tmp_path / "processes", processes=2, **TWO_BY_FOUR)
    expected = metrics_of(train(tmp_path / "whole", **EIGHT))
    train(tmp_path / "parts", gradient_accumulation_steps=2, **TWO_BY_FOUR)
    code, _, errors = two.wait()
    assert code == 0, errors
    assert [line["step"] for line in expected] == list(range(1, 21))
    for name in ("parts", "processes"):
        for line, wanted in zip(metrics_of(tmp_path / name), expected, strict=True):
            for figure in ("loss", "validation_loss", "validation_loss_raw"):
                assert line.get(figure) == pytest.approx(wanted.get(figure), abs=1e-5)
            assert line["lr"] == wanted["lr"]


@pytest.mark.slow
def test_rejects_unconnected_processes(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused()
    assert "2 processes were started, but accelerate finds no GPU for them: set ACCELERATE_USE_CPU=1" in message


def test_data_is_split_and_never_repeated():
    """All processes, accumulations and workers together read every image of an epoch once, in any epoch."""
    config = DataConfig(resolution=8, num_shapes=30, validation_size=3)
    data = load_training_data(config, channels=3, needs_labels=False, needs_captions=False, seed=0)
    seen = []
    for rank in range(2):
        batches = data.train.batches(
            batch_size=3, num_steps=9, accumulation=2, num_processes=2, rank=rank, num_workers=rank
        )
        seen += [position for batch in batches for position in batch.positions]
    assert sorted(seen) == list(range(9 * 12))
