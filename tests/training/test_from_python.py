"""Training without a command line: in notebooks, in threads, and with a custom optimizer."""

import shutil
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from scalelong_diffusers import ScaleLongUnconditionalPipeline
from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.train import train_unconditional
from scalelong_diffusers.training import (
    ModelConfig,
    MonitoringConfig,
    OptimizationConfig,
    OutputConfig,
    TrainingConfig,
    TrainingRun,
    make_config,
)


pytestmark = pytest.mark.slow


@pytest.fixture
def nested_config(tiny_config, fresh_accelerator):
    """`nested_config(folder)`: the config of a short run, built from nested dataclasses."""

    def make(folder, **optimization):
        return TrainingConfig(
            model=ModelConfig(model_config_name_or_path=str(tiny_config)),
            data=DataConfig(resolution=8, num_shapes=30),
            skip_scaling=SkipScalingConfig("ls", reduction=4),
            optimization=OptimizationConfig(
                **{"train_batch_size": 4, "max_train_steps": 3, "lr_warmup_steps": 0, **optimization}
            ),
            monitoring=MonitoringConfig(logging_steps=1, sample_steps=0),
            output=OutputConfig(output_dir=str(folder), checkpointing_steps=1),
        )

    return make


def weights(folder):
    return ScaleLongUnconditionalPipeline.from_pretrained(folder).unet.state_dict()


def test_two_configs_in_the_same_process(nested_config, tiny_config, tmp_path):
    train_unconditional.train(nested_config(tmp_path / "nested"))
    by_flag = make_config(
        TrainingConfig,
        model_config_name_or_path=str(tiny_config),
        resolution=8,
        num_shapes=30,
        skip_scaling="ls",
        skip_scaling_reduction=4,
        train_batch_size=4,
        max_train_steps=3,
        lr_warmup_steps=0,
        logging_steps=1,
        sample_steps=0,
        checkpointing_steps=1,
        output_dir=str(tmp_path / "by_flag"),
    )
    train_unconditional.train(by_flag)
    one, other = weights(tmp_path / "nested"), weights(tmp_path / "by_flag")
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    # Accumulation is a setting that accelerate keeps between runs.
    train_unconditional.train(
        nested_config(tmp_path / "accumulated", train_batch_size=2, gradient_accumulation_steps=2)
    )
    accumulated = weights(tmp_path / "accumulated")
    torch.testing.assert_close(accumulated, one, rtol=0, atol=1e-4)


def test_invalid_config_raises_and_a_corrected_one_trains(nested_config, tmp_path):
    with pytest.raises(UserError, match="there are only 27 to train on"):
        train_unconditional.train(nested_config(tmp_path / "run", train_batch_size=50))
    train_unconditional.train(nested_config(tmp_path / "run"))
    weights(tmp_path / "run")


def test_trains_in_a_thread(nested_config, tmp_path):
    """Python handles signals only in the main thread."""
    thread = threading.Thread(target=train_unconditional.train, args=[nested_config(tmp_path / "run")])
    thread.start()
    thread.join()
    weights(tmp_path / "run")


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_custom_optimizer_skips_nonfinite_steps_and_resumes(nested_config, weights_of, tmp_path, momentum):
    """torch's SGD is not fused by default, so it cannot skip a step on the device."""

    def train(config):
        run = TrainingRun(config)
        run.load_data()
        unet = run.build_model()
        noising = run.noise_process()
        run.start({"unet": unet}, torch.optim.SGD(unet.parameters(), lr=0.1, momentum=momentum))
        for batch in run:
            clean = batch["pixel_values"]
            noise = batch.normal_like(clean, "noise")
            timesteps = noising.timesteps(batch.uniform("timestep"))
            prediction = run.models["unet"](noising.add_noise(clean, noise, timesteps), timesteps).sample
            losses = F.mse_loss(prediction, noise, reduction="none").mean(dim=(1, 2, 3))
            run.step(losses * (torch.nan if run.global_step == 1 else 1))
        run.finish()

    train(nested_config(tmp_path / "run", max_train_steps=4))
    states = [weights_of(tmp_path / "run", step) for step in (1, 2, 3, 4)]
    are_equal = [all(torch.equal(one[name], other[name]) for name in one) for one, other in pairwise(states)]
    assert are_equal == [True, False, False]

    train(nested_config(tmp_path / "resumed", max_train_steps=3))
    longer = nested_config(tmp_path / "resumed", max_train_steps=4)
    train(replace(longer, output=replace(longer.output, resume_from_checkpoint="latest")))
    expected = weights_of(tmp_path / "run", 4)
    for name, tensor in weights_of(tmp_path / "resumed", 4).items():
        assert torch.equal(tensor, expected[name])


@pytest.fixture
def tiny_run(nested_config, fresh_accelerator, tmp_path):
    """A run that is set up but not started, and its model."""
    run = TrainingRun(nested_config(tmp_path / "run"))
    run.load_data()
    return run, run.build_model()


def test_every_batch_must_be_passed_to_step(tiny_run):
    run, unet = tiny_run
    run.start({"unet": unet})
    with pytest.raises(RuntimeError, match=r"must be passed to run\.step"):
        list(run)


def test_channels_last_weights_are_saved_and_resumed(nested_config, metrics_of, tmp_path):
    losses = []
    for resume in (None, "checkpoint-2"):
        config = nested_config(tmp_path / "run", max_train_steps=3)
        config = replace(config, output=replace(config.output, resume_from_checkpoint=resume))
        if resume is not None:
            shutil.rmtree(tmp_path / "run" / "checkpoint-3")
        run = TrainingRun(config)
        run.load_data()
        unet = run.build_model()
        run.start({"unet": unet.to(memory_format=torch.channels_last)})
        for batch in run:
            images = batch["pixel_values"]
            run.step(run.models["unet"](images, 10).sample.square().mean(dim=(1, 2, 3)))
        state = run.optimizer_step.optimizer.state[unet.patch_embed.weight]["exp_avg"]
        assert state.is_contiguous(memory_format=torch.channels_last)
        losses.append(metrics_of(run.folder)[-1]["loss"])
    assert losses[0] == losses[1]


def test_another_architecture_is_not_resumed(nested_config, tiny_config, tmp_path):
    config = nested_config(tmp_path / "run")
    train_unconditional.train(config)
    file = tiny_config / "config.json"
    before = file.read_text()
    try:
        file.write_text(before.replace('"num_attention_heads": 2', '"num_attention_heads": 4'))
        resumed = replace(config.output, resume_from_checkpoint="checkpoint-3")
        with pytest.raises(UserError, match="holds the weights of another model: architecture was"):
            train_unconditional.train(replace(config, output=resumed))
    finally:
        file.write_text(before)


def test_fields_of_a_users_method_cannot_change_on_resume(nested_config, channel_factors, tmp_path):
    config = nested_config(tmp_path / "run")
    runs = [replace(config, skip_scaling={"method": "channel_factors", "start": start}) for start in (1.0, 0.5)]
    train_unconditional.train(runs[0])
    resumed = replace(runs[1], output=replace(config.output, resume_from_checkpoint="latest"))
    message = r"skip_scaling_options was \{'start': 1.0\} and is \{'start': 0.5\}; start a new run"
    with pytest.raises(UserError, match=message):
        train_unconditional.train(resumed)
