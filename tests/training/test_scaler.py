"""fp16's scaler of gradients: what it skips, what a resumed run knows of it, and when it can not help."""

import json
import math
import shutil

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from scalelong_diffusers.train import train_unconditional
from scalelong_diffusers.training import TrainingLoop, TrainingStopped, run


def weights_of(folder, step, name):
    return load_file(folder / f"checkpoint-{step}" / name / "diffusion_pytorch_model.safetensors")


@pytest.fixture
def scaler(monkeypatch):
    """The scaler of gradients that a GPU has with fp16, on the CPU, where accelerate leaves it out."""
    begin = run.start

    def with_scaler(args):
        accelerator = begin(args)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        accelerator.unscale_gradients = lambda: accelerator.scaler.unscale_(accelerator._optimizers[0].optimizer)
        return accelerator

    monkeypatch.setattr(train_unconditional, "start", with_scaler)


def test_what_the_scaler_skips_moves_neither_rate_nor_average(train, metrics_of, tmp_path, scaler, poisoned_data):
    poisoned_data(first=6, last=8)
    folder = train(tmp_path / "run", checkpointing_steps=1, lr_scheduler="linear", lr_warmup_steps=0)
    for name in ("unet", "unet_ema"):
        before, after = weights_of(folder, 6, name), weights_of(folder, 8, name)
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    rates = [line["lr"] for line in metrics_of(folder)]
    assert rates[5] == rates[6] == rates[7] > rates[8]
    state = json.loads((folder / "checkpoint-16" / "state.json").read_text())
    assert state["lr_scheduler_steps"] == state["ema_steps"] == 14
    assert state["scaler"]["scale"] != 2.0**10


def test_of_a_loss_that_alone_is_not_finite_nothing_is_learned(train, tmp_path, scaler, monkeypatch, capsys):
    """Its gradients are, so that the scaler has nothing to skip."""
    take = TrainingLoop.step

    def step(loop, losses):
        take(loop, losses + math.nan if loop.global_step in (3, 4) else losses)

    monkeypatch.setattr(TrainingLoop, "step", step)
    folder = train(tmp_path / "run", checkpointing_steps=1)
    before, after, later = (weights_of(folder, step, "unet") for step in (3, 5, 6))
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert not all(torch.equal(tensor, later[key]) for key, tensor in before.items())
    assert "warning: step 4: the loss is nan" in capsys.readouterr().out


def test_with_a_scaler_resumed_is_unbroken(train, assert_same_run, tmp_path, scaler, poisoned_data):
    poisoned_data(first=3, last=5)
    expected = train(tmp_path / "unbroken", checkpointing_steps=1)
    broken = shutil.copytree(expected, tmp_path / "broken")
    for checkpoint in broken.glob("checkpoint-*"):
        if int(checkpoint.name.split("-")[1]) > 4:
            shutil.rmtree(checkpoint)
    train(broken, checkpointing_steps=1, resume_from_checkpoint="latest")
    assert_same_run(broken, expected)


def test_gradients_that_a_scaler_can_not_mend_end_the_run(train, tmp_path, scaler, monkeypatch):
    backward = Accelerator.backward

    def overflow(accelerator, loss):
        backward(accelerator, loss)
        next(iter(accelerator._models[0].parameters())).grad[0] = math.nan

    monkeypatch.setattr(Accelerator, "backward", overflow)
    with pytest.raises(TrainingStopped, match=r"the norm of the gradients nan, not finite for 3 steps in a row"):
        train(tmp_path / "run", max_train_steps=60, max_nonfinite_losses=3)
