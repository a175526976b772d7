"""What the loop does around a batch: the rate, the average, the strength, clipping, dropout, logs, and losses that are
not finite."""

import json
import math

import pytest
import torch
from diffusers import UNet2DModel
from safetensors.torch import load_file

from scalelong_diffusers import UViTModel
from scalelong_diffusers.training import TrainingLoop, TrainingStopped


WEIGHTS = "diffusion_pytorch_model.safetensors"


def weights_of(folder, step, name="unet"):
    return load_file(folder / f"checkpoint-{step}" / name / WEIGHTS)


def rates_of(metrics_of, folder):
    return [line["lr"] for line in metrics_of(folder)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_rate_is_counted_in_optimizer_steps(train, metrics_of, tmp_path, accumulation):
    folder = train(
        tmp_path / "run",
        gradient_accumulation_steps=accumulation,
        lr_scheduler="linear",
        lr_warmup_steps=4,
        max_train_steps=10,
    )
    warm = [0.01 * step / 4 for step in range(1, 5)]
    decay = [0.01 * (10 - step) / 6 for step in range(5, 11)]
    assert rates_of(metrics_of, folder) == pytest.approx(warm + decay)


def test_the_average_is_that_of_the_weights(train, tmp_path):
    folder = train(tmp_path / "run", max_train_steps=6, checkpointing_steps=1, ema_decay=0.3)
    average = weights_of(folder, 1, "unet_ema")
    # After the first step it is the weights; then the decay grows by (1 + step) / (10 + step) up to what is asked for.
    torch.testing.assert_close(average, weights_of(folder, 1))
    for step in range(2, 7):
        decay = min(0.3, (1 + step - 1) / (10 + step - 1))
        weights = weights_of(folder, step)
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in average}
        torch.testing.assert_close(weights_of(folder, step, "unet_ema"), average)
    assert any(not torch.equal(average[name], weights[name]) for name in average)


def test_what_is_averaged_is_put_back(train, tmp_path):
    """Validating, sampling and saving with the average leaves no trace in what is trained."""
    often = {"validation_steps": 1, "checkpointing_steps": 1, "sample_steps": 1, "num_samples": 1}
    often |= {"num_inference_steps": 1, "max_train_steps": 6}
    seldom = {**often, "validation_steps": 0, "checkpointing_steps": 6, "sample_steps": 0}
    first, second = train(tmp_path / "often", **often), train(tmp_path / "seldom", **seldom)
    for name in ("unet", "unet_ema"):
        expected = weights_of(second, 6, name)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in weights_of(first, 6, name).items())


def test_without_an_average_the_weights_are_saved(train, metrics_of, tmp_path):
    folder = train(tmp_path / "run", **{"no-use_ema": True}, max_train_steps=5)
    assert not (folder / "checkpoint-5" / "unet_ema").exists()
    saved = load_file(folder / "unet" / WEIGHTS)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights_of(folder, 5).items())
    assert "validation_loss" in metrics_of(folder)[-1]
    assert "validation_loss_raw" not in metrics_of(folder)[-1]


def test_the_strength_is_warmed_up_and_saved(train, tmp_path):
    folder = train(tmp_path / "run", skip_scaling_warmup_steps=8, checkpointing_steps=1, skip_scaling_strength=0.8)

    def strength(folder):
        return UViTModel.from_pretrained(folder).skip_scaler.config.strength

    for step in (1, 4, 9, 16):
        for name in ("unet", "unet_ema"):
            # The one that the step was made with.
            expected = 0.8 * min(1, (step - 1) / 8)
            assert strength(folder / f"checkpoint-{step}" / name) == pytest.approx(expected)
    assert strength(folder / "unet") == pytest.approx(0.8)


def test_gradients_are_clipped_and_their_norm_is_logged_before(train, metrics_of, tmp_path):
    changes = {
        "max_train_steps": 1,
        "lr_warmup_steps": 0,
        "no-use_ema": True,
        "lr_scheduler": "constant",
    }
    # With an epsilon as large as that Adam's step is proportional to the gradient.
    changes |= {"adam_epsilon": 1e6, "adam_weight_decay": 0, "learning_rate": 1e4, "adam_beta1": 0.0}
    free = train(tmp_path / "free", max_grad_norm=0, **changes)
    clipped = train(tmp_path / "clipped", max_grad_norm=0.01, **changes)
    norm = metrics_of(free)[0]["grad_norm"]
    assert metrics_of(clipped)[0]["grad_norm"] == pytest.approx(norm)
    assert norm > 0.1
    start = weights_of(train(tmp_path / "still", **{**changes, "learning_rate": 0.0}), 1)
    ratio = _norm_of_difference(weights_of(free, 1), start) / _norm_of_difference(weights_of(clipped, 1), start)
    assert ratio == pytest.approx(norm / 0.01, rel=1e-2)


def _norm_of_difference(first, second):
    return math.sqrt(sum(float(((first[name] - second[name]).double() ** 2).sum()) for name in first))


def test_dropout_depends_on_seed_and_step_alone(train, tmp_path):
    UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        dropout=0.5,
        add_attention=False,
    ).save_config(tmp_path / "config")
    changes = {"model_config_name_or_path": tmp_path / "config", "max_train_steps": 4}
    first = train(tmp_path / "first", **changes)
    torch.randn(5)
    second = train(tmp_path / "second", validation_steps=1, **changes)
    expected = weights_of(first, 4)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(second, 4).items())


def test_validation_uses_the_same_noise_each_time(train, metrics_of, tmp_path):
    folder = train(tmp_path / "run", learning_rate=0.0, validation_steps=1, max_train_steps=4, num_shapes=100)
    lines = metrics_of(folder)
    assert len({line["validation_loss"] for line in lines}) == 1
    assert len({line["loss"] for line in lines}) == 4
    bins = lines[0]["validation_loss_bins"]
    assert len(bins) == 10
    assert any(bins)


def test_one_line_for_each_logged_step(train, metrics_of, tmp_path):
    folder = train(tmp_path / "run", logging_steps=3, max_train_steps=10, validation_steps=4)
    every = train(tmp_path / "every", max_train_steps=10, validation_steps=4)
    lines, all_lines = metrics_of(folder), metrics_of(every)
    assert [line["step"] for line in lines] == [3, 4, 6, 8, 9, 10]
    # A line has the mean loss since the one before.
    assert lines[0]["loss"] == pytest.approx(sum(line["loss"] for line in all_lines[:3]) / 3)
    assert lines[2]["loss"] == pytest.approx(sum(line["loss"] for line in all_lines[4:6]) / 2)


def test_losses_that_stay_infinite_end_the_run(train, tmp_path, poisoned_data):
    poisoned_data(first=6)
    with pytest.raises(TrainingStopped) as stopped:
        train(tmp_path / "run", max_nonfinite_losses=3)
    said = str(stopped.value)
    assert said.startswith("step 9: the loss is ")
    assert "not finite for 3 steps in a row" in said
    assert "the largest gradients are those of unet." in said
    assert "--learning_rate" in said
    assert stopped.value.exit_code == 1
    for step in (4, 8):
        assert all(tensor.isfinite().all() for tensor in weights_of(tmp_path / "run", step).values())


def test_single_infinite_losses_leave_the_weights_alone(train, metrics_of, tmp_path, poisoned_data, capsys):
    poisoned_data(first=6, last=8)
    folder = train(tmp_path / "run", checkpointing_steps=1, max_nonfinite_losses=3)
    before, after = weights_of(folder, 6), weights_of(folder, 8)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    # The rate, too, stands still for a step that is left out.
    assert metrics_of(folder)[7]["loss"] is None
    said = [line for line in capsys.readouterr().out.splitlines() if "its update is left out" in line]
    assert len(said) == 1, "of several in a row the first"
    assert said[0].startswith("warning: step 7: the loss is ")
    assert metrics_of(folder)[15]["step"] == 16
    json.loads((folder / "metrics.jsonl").read_text().splitlines()[7])


def test_a_loss_that_is_not_finite_leaves_the_weights_alone_where_its_gradients_are(train, tmp_path, monkeypatch):
    step = TrainingLoop.step

    def step_with_a_constant(loop, losses):
        step(loop, losses + math.nan if loop.global_step == 6 else losses)

    monkeypatch.setattr(TrainingLoop, "step", step_with_a_constant)
    folder = train(tmp_path / "run", checkpointing_steps=1)
    before, after, later = (weights_of(folder, step) for step in (6, 7, 8))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not all(torch.equal(tensor, later[name]) for name, tensor in before.items())


def test_weights_that_are_not_finite_are_not_saved(train, tmp_path, monkeypatch):
    step = TrainingLoop.step

    def step_into_infinity(loop, losses):
        step(loop, losses)
        if loop.global_step == 7:
            loop.modules["unet"].norm.bias.data[0] = math.inf

    monkeypatch.setattr(TrainingLoop, "step", step_into_infinity)
    with pytest.raises(TrainingStopped, match=r"step 8: weights are not finite, and are not saved: unet\.norm\.bias"):
        train(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"mixed_precision": "bf16"},
        {"mixed_precision": "fp16"},
        {"compile": True},
        {"snr_gamma": 5, "prediction_type": "v_prediction", "ddpm_beta_schedule": "squaredcos_cap_v2"},
        {"continuous_time": True, "prediction_type": "sample"},
    ],
    ids=str,
)
def test_ways_to_train(train, metrics_of, tmp_path, changes, monkeypatch):
    if "compile" in changes:
        compile_of = torch.nn.Module.compile
        monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_of(module, backend="aot_eager"))
    many = {"num_shapes": 500, "validation_size": 50, "train_batch_size": 16, "validation_steps": 5}
    folder = train(tmp_path / "run", max_train_steps=60, **many, **changes)
    weights = weights_of(folder, 60)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert not any(name.startswith(("_orig_mod.", "module.")) for name in weights)
    losses = [line["validation_loss_raw"] for line in metrics_of(folder) if "validation_loss_raw" in line]
    assert losses[-1] < 0.9 * losses[0]


def test_gradient_checkpointing_changes_nothing(train, assert_same_run, tmp_path):
    plain = train(tmp_path / "plain", max_train_steps=4)
    saving = train(tmp_path / "saving", max_train_steps=4, gradient_checkpointing=True)
    expected = weights_of(plain, 4)
    for name, tensor in weights_of(saving, 4).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
