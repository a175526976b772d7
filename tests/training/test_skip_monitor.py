"""`--diagnose_steps` logs the skips of some steps, and changes nothing."""

import math

import pytest
import torch

from scalelong_diffusers import UViTModel
from scalelong_diffusers.diagnosis.observer import SkipStatistics
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.train import train_class_conditional
from scalelong_diffusers.training import TrainingConfig, make_config


pytestmark = pytest.mark.slow

NAMES = {
    *("hidden_rms", "skip_rms", "skip_share", "factor", "hidden_gradient", "skip_gradient"),
    *("hidden_gradient_variation", "skip_gradient_variation"),
}


def skips_of(lines) -> dict[int, dict]:
    return {line["step"]: line["skips"] for line in lines if "skips" in line}


def test_logs_the_steps_and_changes_no_weight(train, finished, metrics_of, weights_of, tmp_path):
    folder = train(tmp_path / "run", max_train_steps=7, diagnose_steps=3, checkpointing_steps=6, logging_steps=100)
    skips = skips_of(metrics_of(folder))
    assert list(skips) == [3, 6, 7]
    for values in skips.values():
        assert set(values) == NAMES
        assert all(len(row) == 2 and all(map(math.isfinite, row)) for row in values.values())
        assert values["factor"] == pytest.approx([1, 0.9])
    expected, weights = weights_of(finished, 6), weights_of(folder, 6)
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


def test_accumulated_batches_have_the_same_gradients(train, metrics_of, tmp_path):
    """The first half of a batch is measured, and the gradients of its images are not halved."""
    rows = []
    for accumulation in (1, 2):
        folder = train(
            tmp_path / str(accumulation), max_train_steps=1, diagnose_steps=1, train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        rows.append(skips_of(metrics_of(folder))[1])
    for name in ("hidden_gradient", "skip_gradient"):
        assert rows[1][name] == pytest.approx(rows[0][name], rel=0.5)


def test_gradients_belong_to_single_images(train, metrics_of, tmp_path, tiny_config, monkeypatch):
    """A batch has the mean of the gradient norms that its images have alone."""
    norms, table_of = [], SkipStatistics.table

    def table(self):
        measured = table_of(self)
        norms.append(measured[-1] * measured.shape[-1])
        return measured

    monkeypatch.setattr(SkipStatistics, "table", table)
    folder = train(tmp_path / "run", max_train_steps=1, diagnose_steps=1)
    logged = skips_of(metrics_of(folder))[1]
    assert norms[0].shape == (2, 4)
    assert logged["skip_gradient"] == pytest.approx(norms[0].mean(1).tolist())
    spread = norms[0].std(1, correction=0) / norms[0].mean(1)
    assert logged["skip_gradient_variation"] == pytest.approx(spread.tolist())


def test_a_resumed_run_logs_the_same(train, metrics_of, tmp_path):
    flags = {"diagnose_steps": 2, "max_train_steps": 8, "skip_scaling": "ls"}
    whole = train(tmp_path / "whole", **flags)
    train(tmp_path / "part", **{**flags, "max_train_steps": 4})
    resumed = train(tmp_path / "part", **flags, resume_from_checkpoint="latest")
    assert skips_of(metrics_of(resumed)) == skips_of(metrics_of(whole))


def test_class_conditional_runs_with_gradient_checkpointing(train, metrics_of, tiny_config, tmp_path):
    folder = train(
        tmp_path / "run", train_class_conditional, model_config_name_or_path=tiny_config / "classes",
        max_train_steps=2, diagnose_steps=2, gradient_checkpointing=True,
    )  # fmt: skip
    assert set(skips_of(metrics_of(folder))[2]) == NAMES


def test_trackers_get_a_number_per_skip(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = train(tmp_path / "run", max_train_steps=2, diagnose_steps=2, report_to="tensorboard")
    (events,) = {file.parent for file in (folder / "logs").rglob("events.out.tfevents*") if "skips" in str(file)} or {
        next((folder / "logs").rglob("events.out.tfevents*")).parent
    }
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    assert {f"skips/{name}/{i}" for name in NAMES for i in (1, 2)} <= set(accumulator.Tags()["scalars"])


def test_skips_without_a_layer_are_null(train, metrics_of, tmp_path, unet_with_dropout):
    folder = train(
        tmp_path / "run", model_config_name_or_path=unet_with_dropout, skip_scaling="lerp", max_train_steps=1,
        diagnose_steps=1,
    )  # fmt: skip
    values = skips_of(metrics_of(folder))[1]
    assert set(values["factor"]) == {None}
    assert None not in values["skip_gradient"]


def test_a_compiled_model_is_refused():
    with pytest.raises(UserError, match="--diagnose_steps needs hooks, which a compiled model ignores"):
        make_config(TrainingConfig, diagnose_steps=5, compile=True)
    with pytest.raises(UserError, match="diagnose_steps must be an integer, at least 0"):
        make_config(TrainingConfig, diagnose_steps=-1)


def test_other_steps_have_no_hooks(train, tmp_path, monkeypatch):
    seen, forward = [], UViTModel.forward

    def count(self, *args, **kwargs):
        hooks = len(self.skip_scaler._forward_pre_hooks)
        assert self.training or not hooks
        seen.extend([hooks] * self.training)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(UViTModel, "forward", count)
    train(tmp_path / "run", max_train_steps=5, diagnose_steps=2)
    assert seen == [0, 1, 0, 1, 1]


def test_a_script_that_fails_before_its_forward_pass_shows_its_error(train, tmp_path, monkeypatch):
    def fail(self, *args, **kwargs):
        raise RuntimeError("no forward pass")

    monkeypatch.setattr(UViTModel, "forward", fail)
    with pytest.raises(RuntimeError, match="no forward pass"):
        train(tmp_path / "run", max_train_steps=2, diagnose_steps=1)
