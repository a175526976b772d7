"""What a run does around a batch: learning rate, EMA, warm-up of the scaling, clipping, dropout and logging."""

import math

import pytest
import torch
from diffusers import UNet2DModel
from safetensors.torch import load_file

from scalelong_diffusers import UViTModel
from scalelong_diffusers.internals import is_compiled
from scalelong_diffusers.training import TrainingRun, TrainingStopped
from scalelong_diffusers.training.run import compile_model


pytestmark = pytest.mark.slow

WEIGHTS = "diffusion_pytorch_model.safetensors"


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_learning_rate_counts_optimizer_steps(train, metrics_of, tmp_path):
    warmup = [0.01 * step / 4 for step in range(1, 5)]
    decay = [0.01 * (10 - step) / 6 for step in range(5, 11)]
    for accumulation in (1, 2):
        folder = train(
            tmp_path / str(accumulation),
            gradient_accumulation_steps=accumulation,
            lr_scheduler="linear",
            lr_warmup_steps=4,
            max_train_steps=10,
        )
        assert [line["lr"] for line in metrics_of(folder)] == pytest.approx(warmup + decay)


def test_ema_averages_the_weights(train, weights_of, tmp_path):
    folder = train(tmp_path / "run", max_train_steps=6, checkpointing_steps=1, ema_decay=0.3)
    # After the first step the average is the weights. Then the decay ramps up to its maximum.
    average = weights_of(folder, 1, "unet_ema")
    torch.testing.assert_close(average, weights_of(folder, 1))
    for step in range(2, 7):
        decay = min(0.3, (1 + step - 1) / (10 + step - 1))
        weights = weights_of(folder, step)
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in average}
        torch.testing.assert_close(weights_of(folder, step, "unet_ema"), average)
    assert any(not torch.equal(average[name], weights[name]) for name in average)


def test_monitoring_does_not_change_training(train, finished, weights_of, tmp_path):
    often = {"validation_steps": 1, "sample_steps": 1, "num_samples": 1, "num_inference_steps": 1}
    folder = train(tmp_path / "often", max_train_steps=6, **often)
    for name in ("unet", "unet_ema"):
        assert are_equal(weights_of(folder, 6, name), weights_of(finished, 6, name))


def test_without_ema_the_weights_are_saved(train, metrics_of, weights_of, tmp_path):
    folder = train(tmp_path / "run", **{"no-use_ema": True}, max_train_steps=5)
    assert not (folder / "checkpoint-5" / "unet_ema").exists()
    assert are_equal(weights_of(folder, 5), load_file(folder / "unet" / WEIGHTS))
    assert "validation_loss" in metrics_of(folder)[-1]
    assert "validation_loss_raw" not in metrics_of(folder)[-1]


def test_strength_rises_and_is_saved(train, tmp_path):
    options = {"skip_scaling_warmup_steps": 4, "skip_scaling_strength": 0.8}
    folder = train(tmp_path / "run", max_train_steps=6, checkpointing_steps=1, **options)

    def strength(folder):
        return UViTModel.from_pretrained(folder).skip_scaler.config.strength

    for step in (1, 2, 5, 6):
        for name in ("unet", "unet_ema"):
            # A checkpoint has the strength with which its last step was made.
            expected = 0.8 * min(1, (step - 1) / 4)
            assert strength(folder / f"checkpoint-{step}" / name) == pytest.approx(expected)
    assert strength(folder / "unet") == pytest.approx(0.8)


def test_gradients_are_clipped_and_logged_before(train, metrics_of, weights_of, tmp_path):
    # With an epsilon this large, Adam's step is proportional to the gradient.
    changes = {"adam_epsilon": 100, "adam_weight_decay": 0, "learning_rate": 1, "adam_beta1": 0.0}
    changes |= {"max_train_steps": 1, "lr_warmup_steps": 0, "lr_scheduler": "constant", "no-use_ema": True}
    free = train(tmp_path / "free", max_grad_norm=0, **changes)
    clipped = train(tmp_path / "clipped", max_grad_norm=0.01, **changes)
    warming_up = {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 1}  # the first step has the rate 0
    start = weights_of(train(tmp_path / "still", **{**changes, **warming_up}), 1)
    norm = metrics_of(free)[0]["grad_norm"]
    assert metrics_of(clipped)[0]["grad_norm"] == pytest.approx(norm)
    assert norm > 0.1
    ratio = distance(weights_of(free, 1), start) / distance(weights_of(clipped, 1), start)
    assert ratio == pytest.approx(norm / 0.01, rel=1e-2)


def distance(one, other):
    return math.sqrt(sum(float(((one[name] - other[name]).double() ** 2).sum()) for name in one))


def test_dropout_depends_only_on_seed_and_step(train, unet_with_dropout, weights_of, tmp_path):
    changes = {"model_config_name_or_path": unet_with_dropout, "max_train_steps": 4}
    first = train(tmp_path / "first", **changes)
    torch.randn(5)
    second = train(tmp_path / "second", validation_steps=1, **changes)
    assert are_equal(weights_of(first, 4), weights_of(second, 4))


def test_validation_repeats_its_noise(train, metrics_of, tmp_path):
    folder = train(tmp_path / "run", learning_rate=1e-12, validation_steps=1, max_train_steps=4, num_shapes=100)
    lines = metrics_of(folder)
    assert len({line["validation_loss"] for line in lines}) == 1
    assert len({line["loss"] for line in lines}) == 4
    bins = lines[0]["validation_loss_bins"]
    assert len(bins) == 10
    assert any(bins)


def test_log_has_the_mean_losses_between_its_lines(train, finished, metrics_of, tmp_path):
    folder = train(tmp_path / "run", logging_steps=3, max_train_steps=10, validation_steps=4)
    lines, all_losses = metrics_of(folder), [line["loss"] for line in metrics_of(finished)]
    assert [line["step"] for line in lines] == [3, 4, 6, 8, 9, 10]
    assert lines[0]["loss"] == pytest.approx(sum(all_losses[:3]) / 3)
    assert lines[2]["loss"] == pytest.approx(sum(all_losses[4:6]) / 2)


@pytest.mark.parametrize(
    ("logging_steps", "message"),
    [
        (1, "step 9: 3 steps in a row had a non-finite loss or gradient; try a lower --learning_rate"),
        (5, "step 10: 4 steps in a row"),  # the checkpoint of step 8 has seen two of them
    ],
)
def test_diverged_run_stops(train, weights_of, tmp_path, poisoned_data, logging_steps, message):
    poisoned_data(first=6)
    with pytest.raises(TrainingStopped) as stopped:
        train(tmp_path / "run", max_nonfinite_losses=3, logging_steps=logging_steps)
    assert str(stopped.value).startswith(message)
    assert stopped.value.exit_code == 1
    assert stopped.value.on_all_processes
    for step in (4, 8):
        assert all(tensor.isfinite().all() for tensor in weights_of(tmp_path / "run", step).values())


def optimizer_state(folder, step):
    return load_file(folder / f"checkpoint-{step}" / "optimizer.safetensors")


def check_skipped(folder, weights_of, before, after):
    """Check that steps changed neither the weights nor the optimizer, and that the next step did."""
    assert are_equal(weights_of(folder, before), weights_of(folder, after))
    assert are_equal(optimizer_state(folder, before), optimizer_state(folder, after))
    assert not are_equal(weights_of(folder, after), weights_of(folder, after + 1))
    assert not are_equal(optimizer_state(folder, after), optimizer_state(folder, after + 1))


def test_nonfinite_steps_are_skipped(train, metrics_of, weights_of, tmp_path, poisoned_data, capsys):
    poisoned_data(first=2, last=4)
    options = {"checkpointing_steps": 1, "max_nonfinite_losses": 3, "max_train_steps": 6}
    folder = train(tmp_path / "run", lr_scheduler="linear", lr_warmup_steps=0, **options)
    check_skipped(folder, weights_of, 2, 4)
    lines = metrics_of(folder)
    assert [line["loss"] is None for line in lines] == [False, False, True, True, False, False]
    assert lines[2]["grad_norm"] is None
    # The learning rate and the average advance.
    assert len({line["lr"] for line in lines}) == 6
    assert not are_equal(weights_of(folder, 2, "unet_ema"), weights_of(folder, 4, "unet_ema"))
    printed = capsys.readouterr().out
    assert "warning: step 3: skipped updates with a non-finite loss or gradient (at most 1 in a row)" in printed
    assert "warning: step 4: skipped updates with a non-finite loss or gradient (at most 2 in a row)" in printed
    assert "warning: step 5" not in printed


def test_step_with_a_nonfinite_loss_and_finite_gradients_is_skipped(train, weights_of, tmp_path, monkeypatch):
    step = TrainingRun.step

    def add_constant(run, losses):
        step(run, losses + (math.inf if run.global_step == 2 else 0))

    monkeypatch.setattr(TrainingRun, "step", add_constant)
    for accumulation in (1, 2):
        options = {"gradient_accumulation_steps": accumulation, "checkpointing_steps": 1, "max_train_steps": 4}
        folder = train(tmp_path / str(accumulation), **options)
        check_skipped(folder, weights_of, 2, 3)


def test_nonfinite_weights_are_not_saved(train, tmp_path, monkeypatch):
    step = TrainingRun.step

    def step_to_infinity(run, losses):
        step(run, losses)
        if run.global_step == 7:
            run.modules["unet"].norm.bias.data[0] = math.inf

    monkeypatch.setattr(TrainingRun, "step", step_to_infinity)
    message = r"step 8: the weights of unet\.norm\.bias are not finite and were not saved"
    with pytest.raises(TrainingStopped, match=message):
        train(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]


def test_repeated_blocks_are_compiled_if_a_model_has_any(unet_with_dropout):
    uvit = UViTModel(sample_size=8, hidden_size=16, num_layers=4, num_attention_heads=2)
    unet = UNet2DModel.from_config(UNet2DModel.load_config(unet_with_dropout))
    for model in (uvit, unet):
        compile_model(model, only_repeated_blocks=True)
    assert [is_compiled(module) for module in (uvit, uvit.mid_block, *uvit.out_blocks, unet)] == [
        False,
        True,
        True,
        True,
        True,
    ]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at the inputs
@pytest.mark.parametrize(
    "changes",
    [
        {"mixed_precision": "bf16", "snr_gamma": 5, "prediction_type": "v_prediction"},
        {"mixed_precision": "fp16", "ddpm_beta_schedule": "squaredcos_cap_v2"},
        {"compile": True},
        {"compile": True, "compile_repeated_blocks": True},
        {"continuous_time": True, "prediction_type": "sample", "skip_scaling": "ls"},
    ],
    ids=str,
)
def test_loss_falls(train, metrics_of, weights_of, tmp_path, changes, monkeypatch):
    if "compile" in changes:
        compile_module = torch.nn.Module.compile
        monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend="aot_eager"))
    options = {"num_shapes": 200, "validation_size": 20, "train_batch_size": 16, "validation_steps": 5}
    folder = train(tmp_path / "run", max_train_steps=30, checkpointing_steps=30, **options, **changes)
    weights = weights_of(folder, 30)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert not any(name.startswith(("_orig_mod.", "module.")) for name in weights)
    losses = [line["validation_loss_raw"] for line in metrics_of(folder) if "validation_loss_raw" in line]
    assert losses[-1] < 0.9 * losses[0]


def test_gradient_checkpointing_changes_nothing(train, finished, weights_of, tmp_path):
    folder = train(tmp_path / "run", max_train_steps=4, gradient_checkpointing=True)
    expected = weights_of(finished, 4)
    for name, tensor in weights_of(folder, 4).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
