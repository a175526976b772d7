"""fp16's gradient scaler, which accelerate creates only for a GPU: what it skips, and when it cannot help."""

import json
import math

import pytest
import torch
from accelerate import Accelerator

from scalelong_diffusers.training import TrainingRun, TrainingStopped


pytestmark = pytest.mark.slow


@pytest.fixture
def scaler(monkeypatch):
    """Train with a gradient scaler on the CPU."""
    start = TrainingRun.start

    def start_with_scaler(run, *args, **options):
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        start(run, *args, **options)

    monkeypatch.setattr(TrainingRun, "start", start_with_scaler)


def test_skips_overflows_and_resumes_exactly(
    train, stopped_at, assert_same_run, weights_of, tmp_path, scaler, poisoned_data
):
    poisoned_data(first=3, last=5)
    options = {"checkpointing_steps": 1, "max_train_steps": 8}
    folder = train(tmp_path / "run", **options)
    before, after, later = (weights_of(folder, step) for step in (3, 5, 6))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not all(torch.equal(tensor, later[name]) for name, tensor in before.items())
    # Doubled after three steps, then halved twice.
    state = json.loads((folder / "checkpoint-5" / "state.json").read_text())
    assert state["scaler"]["scale"] == 2.0**9
    resumed = stopped_at(4, folder)
    train(resumed, **options, resume_from_checkpoint="latest")
    assert_same_run(resumed, folder)


def test_skips_a_nonfinite_loss_with_finite_gradients(train, weights_of, tmp_path, scaler, monkeypatch, capsys):
    step = TrainingRun.step

    def add_nan(run, losses):
        step(run, losses + (math.nan if run.global_step == 3 else 0))

    monkeypatch.setattr(TrainingRun, "step", add_nan)
    folder = train(tmp_path / "run", checkpointing_steps=1, max_train_steps=5)
    before, after, later = (weights_of(folder, step) for step in (3, 4, 5))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not all(torch.equal(tensor, later[name]) for name, tensor in before.items())
    assert "warning: step 4: skipped updates with a non-finite loss or gradient" in capsys.readouterr().out


def test_stops_when_a_smaller_scale_does_not_help(train, tmp_path, scaler, monkeypatch):
    backward = Accelerator.backward

    def overflow(accelerator, loss):
        backward(accelerator, loss)
        next(iter(accelerator._models[0].parameters())).grad[0] = math.nan

    monkeypatch.setattr(Accelerator, "backward", overflow)
    # Ten steps halve the scale of 1024 to 1.
    with pytest.raises(TrainingStopped, match="step 10: 10 steps in a row had a non-finite loss or gradient"):
        train(tmp_path / "run", max_nonfinite_losses=3)
