"""The training scripts build and train wide models with muP."""

import shutil

import pytest
import torch

from scalelong_diffusers import mup_param_groups
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.training import TrainingConfig, TrainingRun, make_config


pytestmark = pytest.mark.slow

UNET = {"model_config_name_or_path": None, "model_type": "unet"}
WIDE = {"hidden_size": 32, "mup_base_width": 16, "mup_base_depth": 2}


@pytest.fixture
def start_run(tiny_config, fresh_accelerator, tmp_path):
    """`start_run(make_optimizer, flag=value)`: a run that has started, and its model."""

    def start(make_optimizer=None, **flags):
        settings = {"model_config_name_or_path": str(tiny_config), "resolution": 8, "num_shapes": 30, **WIDE}
        settings |= {"train_batch_size": 4, "output_dir": str(tmp_path / "started"), **flags}
        config = make_config(TrainingConfig, **settings)
        run = TrainingRun(config)
        run.load_data()
        unet = run.build_model()
        run.start({"unet": unet}, None if make_optimizer is None else make_optimizer(unet))
        run.finish()
        return run, unet

    return start


@pytest.fixture
def wide_run(train, tmp_path):
    def run(name="run", **changes):
        return train(tmp_path / name, skip_lr_scale=0.5, lr_scheduler="cosine", **{**WIDE, **changes})

    return run


def test_flags_reach_the_model_and_its_optimizer(start_run):
    run, unet = start_run(
        learning_rate=1e-2, adam_epsilon=1e-8, skip_lr_scale=0.5, lr_scheduler="cosine", lr_warmup_steps=4
    )
    assert {name: unet.config[name] for name in WIDE} == WIDE
    assert unet.config.num_attention_heads == 4  # the heads are as wide as before
    run.optimizer_step.set_learning_rate(1)  # a quarter of the warm-up
    groups = {p: (g["lr"], g["eps"]) for g in run.optimizer_step.optimizer.param_groups for p in g["params"]}
    assert groups.keys() == set(unet.parameters())
    assert groups[unet.conv_out.weight] == pytest.approx((2.5e-3, 1e-8))
    assert groups[unet.pos_embed] == pytest.approx((2.5e-3, 5e-9))
    assert groups[unet.mid_block.mlp.fc1.weight] == pytest.approx((1.25e-3, 5e-9))
    assert groups[unet.out_blocks[0].skip_proj.weight] == pytest.approx((0.3125e-3, 5e-9))  # half as deep, too
    assert groups[unet.proj_out.weight] == pytest.approx((1.25e-3, 5e-9))
    assert run.optimizer_step.learning_rate == 2.5e-3  # it is logged


def test_preset_of_another_width(start_run):
    flags = {"preset": "cifar10-uvit-s-2", "model_config_name_or_path": None, "mixed_precision": "no"}
    run, unet = start_run(**flags, hidden_size=128, mup_base_width=64, mup_base_depth=None)
    assert (unet.config.num_attention_heads, unet.config.num_layers) == (2, 12)
    rates = {p: g["initial_lr"] for g in run.optimizer_step.optimizer.param_groups for p in g["params"]}
    tuned = run.config.optimization.learning_rate
    assert rates[unet.pos_embed] == tuned
    assert rates[unet.mid_block.mlp.fc1.weight] == rates[unet.proj_out.weight] == tuned / 2


def test_resumes_exactly_and_only_with_the_same_base(wide_run, assert_same_run):
    expected = wide_run()
    folder = wide_run("other")
    for step in (12, 16):
        shutil.rmtree(folder / f"checkpoint-{step}")
    for changes in ({"mup_base_width": 8}, {"mup_base_depth": None}):
        name, value = next(iter(changes.items()))
        with pytest.raises(UserError, match=f"{name} was {WIDE[name]} and is {value}; start a new run"):
            wide_run("other", resume_from_checkpoint="latest", allow_changed_settings=True, **changes)
    wide_run("other", resume_from_checkpoint="latest")
    assert_same_run(folder, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {**UNET, "mup_base_width": 64},
            "--mup_base_width 64 is for a U-ViT, and the model is a ScaleLongUNet2DModel",
        ),
        ({"hidden_size": 20}, "--hidden_size must be a multiple of 8, the width of a head, got 20"),
        ({"mup_base_width": 12}, "mup_base_width must be a multiple of the head width 8"),
        ({"mup_base_width": 0}, "--mup_base_width must be an integer, at least 1 and at most 65,536, got 0"),
    ],
)
def test_rejects(refused, changes, message):
    assert message in refused(**changes)


@pytest.mark.parametrize("is_right", [True, False])
def test_warns_of_an_optimizer_with_equal_learning_rates(start_run, capsys, is_right):
    start_run(lambda unet: torch.optim.AdamW(mup_param_groups(unet, 1e-3) if is_right else unet.parameters()))
    assert ("build it from mup_param_groups(model, ...)" in capsys.readouterr().out) is not is_right


def test_does_not_warn_without_mup(start_run, capsys):
    """Token gates learn at another rate, too."""
    flags = {**dict.fromkeys(WIDE), "skip_scaling": "token_gates"}
    start_run(lambda unet: torch.optim.AdamW(unet.parameters()), **flags)
    assert "mup_param_groups" not in capsys.readouterr().out
