"""Between two log lines nothing waits for the device, and everything is on the same one."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from fake_cuda import DEVICE, fake_cuda
from torch._subclasses.fake_tensor import DataDependentOutputException

from scalelong_diffusers.training import TrainingConfig, TrainingRun, make_config
from scalelong_diffusers.training.checkpoints import _load_optimizer_state


def backward(accelerator, loss):
    """Replace autograd's engine, which does not run on a fake device."""
    assert loss.device.type == "cuda"
    for parameter in accelerator.trained:
        parameter.grad = torch.empty_like(parameter)


@pytest.fixture
def gpu_run(tmp_path, fresh_accelerator, monkeypatch):
    """`gpu_run(model_type=..., skip_scaling=...)`: a run on a fake GPU, its batches and its loss."""
    monkeypatch.setattr(Accelerator, "backward", backward)

    def make(**options):
        config = make_config(
            TrainingConfig,
            output_dir=str(tmp_path / "run"),
            resolution=16,
            num_shapes=40,
            train_batch_size=2,
            max_train_steps=8,
            gradient_accumulation_steps=2,
            logging_steps=100,
            validation_steps=0,
            sample_steps=0,
            checkpointing_steps=100,
            lr_warmup_steps=2,
            **options,
        )
        run = TrainingRun(config)
        run.load_data()
        batches = list(run.data.train.batches(batch_size=2, num_steps=2, accumulation=2))
        return run, batches

    return make


def losses_of(run, noising, batch, models):
    clean = run.encode_images(batch)
    noise = batch.normal_like(clean, "noise")
    timesteps = noising.timesteps(batch.uniform("timestep"))
    prediction = models["unet"](noising.add_noise(clean, noise, timesteps), timesteps).sample
    losses = F.mse_loss(prediction, noising.target(clean, noise, timesteps), reduction="none").mean(dim=(1, 2, 3))
    return noising.weights(timesteps) * losses


def start(run):
    run.device = DEVICE
    with DEVICE:
        unet = run.build_model()
    run.accelerator.prepare = lambda module: module
    run.start({"unet": unet})
    run.accelerator.trained = run.optimizer_step.parameters
    run._bar = type("Bar", (), {"update": lambda self: None})()
    return run.noise_process()


@pytest.mark.parametrize("model_type", ["uvit", "unet"])
@pytest.mark.parametrize("skip_scaling", ["cs", "ls"])
def test_step_does_not_wait_for_device(gpu_run, model_type, skip_scaling):
    run, batches = gpu_run(model_type=model_type, skip_scaling=skip_scaling, snr_gamma=5.0, continuous_time=True)
    with fake_cuda():
        noising = start(run)
        assert {p.device.type for p in run.optimizer_step.parameters} == {"cuda"}
        for count, batch in enumerate(batches):
            run._begin(count % 2)
            run._started = 0.0
            run.accelerator.gradient_state._set_sync_gradients(count % 2 == 1)
            run.step(losses_of(run, noising, batch.to(run.device), run.models))
            if run.accelerator.sync_gradients:
                run._end_step()
        assert run.global_step == 2
        with pytest.raises(DataDependentOutputException):
            run.optimizer_step.read_statistics()


@pytest.mark.parametrize("model_type", ["uvit", "unet"])
def test_validation_runs_on_device(gpu_run, model_type):
    run, _ = gpu_run(model_type=model_type, skip_scaling="ls")
    batches = list(run.data.validation.batches(batch_size=2))
    with fake_cuda():
        noising = start(run)
        with run.evaluating(), torch.no_grad():
            losses = [losses_of(run, noising, batch.to(run.device), run.modules) for batch in batches]
    assert {loss.device for loss in losses} == {DEVICE}


@pytest.mark.parametrize("fused", [False, True])
def test_resumed_optimizer_state_is_on_device(fused):
    """torch's AdamW counts steps on the CPU unless it is fused. All other state is on the device of its parameter."""
    tensors = {"scale/step": torch.tensor(3.0), "scale/exp_avg": torch.tensor(0.5)}
    with fake_cuda():
        scale = torch.nn.Parameter(torch.ones((), device=DEVICE))
        optimizer = torch.optim.AdamW([scale], fused=fused)
        step = SimpleNamespace(optimizer=optimizer, named_parameters={"scale": scale})
        _load_optimizer_state(SimpleNamespace(optimizer_step=step), tensors, {})
        devices = {name: tensor.device.type for name, tensor in optimizer.state[scale].items()}
    assert devices == {"step": "cuda" if fused else "cpu", "exp_avg": "cuda"}
