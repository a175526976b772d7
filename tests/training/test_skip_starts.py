"""The scripts start skip layers as their flags say, and train them at their own learning rate."""

import json

import pytest
import torch

from scalelong_diffusers import ScaleLongUNet2DModel, UserError, UViTModel
from scalelong_diffusers.train import train_unconditional
from scalelong_diffusers.training import OptimizationConfig, TrainingConfig, make_config
from scalelong_diffusers.training.step import optimizer_groups


UVIT = {"sample_size": 8, "patch_size": 2, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 2}
# The first step of a warm-up has the learning rate 0.
UNTRAINED = ("--max_train_steps", "1", "--lr_scheduler", "constant_with_warmup")


@pytest.fixture(params=["uvit", "unet"])
def model(request, ddpm):
    return UViTModel(**UVIT) if request.param == "uvit" else ddpm.build_scaled("none")


def names(model, parameters):
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {known[id(parameter)] for parameter in parameters}


def test_skip_layers_have_their_own_learning_rate(model):
    config = OptimizationConfig(learning_rate=1e-3)
    others, layers = optimizer_groups(config, [model], model.parameters(), skip_lr_scale=0.1)
    assert (others["lr"], layers["lr"]) == (1e-3, 1e-4)
    expected = {
        name for name in names(model, model.parameters())
        if "hidden_proj" in name or "skip_proj" in name or ("up_blocks" in name and "conv_shortcut" in name)
    }  # fmt: skip
    assert names(model, layers["params"]) == expected
    assert len(others["params"]) + len(layers["params"]) == len(list(model.parameters()))
    (group,) = optimizer_groups(config, [model], model.parameters())
    assert len(group["params"]) == len(list(model.parameters()))


def test_methods_have_their_own_learning_rate_and_decay():
    config = OptimizationConfig(learning_rate=1e-3, adam_weight_decay=0.1)
    model = UViTModel(**UVIT, skip_scaling="token_gates")
    others, gates = optimizer_groups(config, [model], model.parameters())
    assert (gates["lr"], gates["weight_decay"], others["weight_decay"]) == (5e-5, 0.0, 0.1)
    assert names(model, gates["params"]) == {n for n in names(model, model.parameters()) if "skip_scaler" in n}


def run(folder, *flags):
    train_unconditional.main(
        [
            *("--output_dir", str(folder), "--resolution", "8", "--num_shapes", "64", "--train_batch_size", "2"),
            *("--max_train_steps", "2", "--validation_steps", "0", "--sample_steps", "0", "--no-use_ema"),
            *("--lr_scheduler", "constant", "--adam_weight_decay", "0", *flags),
        ]
    )
    return json.loads((folder / "settings.json").read_text())


def test_flags_reach_the_model_and_its_optimizer(model, tmp_path):
    config = tmp_path / "config.json"
    model.to_json_file(config)
    flags = ("--model_config_name_or_path", str(config), "--skip_init", "zero", "--zero_init_residual")
    settings = run(tmp_path / "out", *flags, "--skip_lr_scale", "0", "--learning_rate", "1e-3", "--skip_scaling", "cs")
    assert (settings["skip_init"], settings["zero_init_residual"], settings["skip_lr_scale"]) == ("zero", True, 0)
    trained = type(model).from_pretrained(tmp_path / "out" / "unet")
    for skip in trained.skip_layout.find(trained):
        layer = trained.skip_layout.skip_layer(trained, skip)  # it did not learn
        assert torch.equal(layer.hidden_weight, torch.eye(*layer.hidden_weight.shape))
        assert not layer.skip_weight.any()
    ends = trained.skip_layout.branch_ends(trained)
    assert [end.weight.abs().max().item() for end in ends] == pytest.approx([2e-3] * len(ends), rel=1e-3)


def test_start_of_a_stored_config_is_kept_or_replaced(tmp_path):
    config = tmp_path / "config.json"
    UViTModel(**UVIT, skip_init="sum").to_json_file(config)
    flags = ("--model_config_name_or_path", str(config), *UNTRAINED)
    run(tmp_path / "kept", *flags)
    run(tmp_path / "replaced", *flags, "--skip_init", "reference")
    kept, replaced = (UViTModel.from_pretrained(tmp_path / name / "unet") for name in ("kept", "replaced"))
    assert (kept.config.skip_init, replaced.config.skip_init) == ("sum", "reference")
    assert torch.equal(kept.out_blocks[0].hidden_proj.weight, torch.eye(32))
    assert replaced.out_blocks[0].hidden_proj.weight.std() < 0.03


def test_rejects_an_unknown_start_with_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "out", "--skip_init", "summ")
    assert stopped.value.code == 2
    assert "skip_init must be one of reference, zero, sum, balanced, got 'summ' (did you mean 'sum'?)" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_built_in_models_start_as_recommended_and_presets_as_in_the_paper(tmp_path):
    settings = run(tmp_path / "uvit", *UNTRAINED)
    assert [settings[name] for name in ("skip_init", "zero_init_residual", "skip_lr_scale")] == ["sum", False, 0.1]
    unet = UViTModel.from_pretrained(tmp_path / "uvit" / "unet")
    assert (unet.config.skip_init, unet.config.block_scale) == ("sum", "rezero")
    assert torch.equal(unet.out_blocks[0].skip_proj.weight, torch.eye(256))
    settings = run(tmp_path / "unet", "--model_type", "unet", *UNTRAINED)
    assert [settings[name] for name in ("skip_init", "zero_init_residual", "skip_lr_scale")] == ["zero", True, 1.0]
    unet = ScaleLongUNet2DModel.from_pretrained(tmp_path / "unet" / "unet")
    assert not any(end.weight.any() for end in unet.skip_layout.branch_ends(unet))
    preset = make_config(TrainingConfig, preset="cifar10-uvit-s-2")
    assert set(preset.skip_start.values()) == {None}
    chosen = make_config(TrainingConfig, skip_init="balanced", model_type="unet")
    assert chosen.skip_start == {"skip_init": "balanced", "zero_init_residual": True, "skip_lr_scale": 1.0}


def test_two_zeros_are_refused(tmp_path):
    """A branch whose factor and last layer are both zero would never learn."""
    with pytest.raises(UserError, match="zero_init_residual=True and block_scale='rezero' both start the branches"):
        run(tmp_path / "out", "--zero_init_residual")
    assert not (tmp_path / "out").exists()
