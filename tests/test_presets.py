import json

import pytest
import torch

from scalelong_diffusers import (
    ScaleLongUNet2DConditionModel,
    ScaleLongUNet2DModel,
    UViTModel,
    model_from_preset,
    skip_connections,
)
from scalelong_diffusers.cli import main
from scalelong_diffusers.presets import PRESETS


# name: (parameters, long skips, optimizer steps, images per step, learning rate, guidance), as published.
PUBLISHED = {
    "cifar10-uvit-s-2": (44_255_328, 6, 500_000, 128, 2e-4, None),
    "celeba64-uvit-s-4": (44_292_228, 6, 500_000, 128, 2e-4, None),
    "imagenet64-uvit-m-4": (130_940_292, 8, 300_000, 1024, 3e-4, None),
    "imagenet64-uvit-l-4": (286_827_652, 10, 300_000, 1024, 3e-4, None),
    "imagenet256-uvit-l-2": (286_763_172, 10, 300_000, 1024, 2e-4, 1.4),
    "imagenet256-uvit-h-2": (500_832_016, 14, 500_000, 1024, 2e-4, 1.4),
    "imagenet512-uvit-l-4": (286_861_524, 10, 500_000, 1024, 2e-4, 1.7),
    "imagenet512-uvit-h-4": (500_942_656, 14, 500_000, 1024, 2e-4, 1.7),
    "mscoco-uvit-s-2": (44_692_644, 6, 1_000_000, 256, 2e-4, 2.0),
    "mscoco-uvit-s-2-deep": (58_345_636, 8, 1_000_000, 256, 2e-4, 2.0),
    "cifar10-unet": (35_746_307, 12, 800_000, 128, 2e-4, None),
    "imagenet64-unet": (144_395_363, 12, None, None, None, None),
    "mscoco-unet": (52_708_356, 9, None, None, None, None),
}


def test_lists_every_published_experiment():
    table = {
        name: (
            preset.parameters,
            preset.num_skips,
            *map(preset.training.get, ("max_train_steps", "total_batch_size", "learning_rate", "guidance_scale")),
        )
        for name, preset in PRESETS.items()
    }
    assert table == PUBLISHED


@pytest.mark.parametrize("name", PRESETS)
def test_models_have_the_published_sizes(name):
    with torch.device("meta"):
        model = model_from_preset(name)
    assert type(model) is PRESETS[name].model_class
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].parameters
    assert len(skip_connections(model)) == PRESETS[name].num_skips


def test_timestep_conventions():
    conventions = {
        name: (preset.config["timestep_scale"], preset.scheduler["beta_schedule"])
        for name, preset in PRESETS.items()
        if preset.model_class is UViTModel
    }
    discrete = {name for name, convention in conventions.items() if convention == (1.0, "scaled_linear")}
    continuous = {name for name, convention in conventions.items() if convention == (0.999, "linear")}
    assert discrete == {
        "imagenet256-uvit-h-2", "imagenet512-uvit-h-4", "mscoco-uvit-s-2", "mscoco-uvit-s-2-deep"
    }  # fmt: skip
    assert discrete | continuous == set(conventions)


def test_overrides_replace_entries_of_the_preset():
    with torch.device("meta"):
        model = UViTModel.from_preset("imagenet64-uvit-l-4", skip_scaling="ls", num_layers=4)
        unet = ScaleLongUNet2DModel.from_preset("cifar10-unet", skip_scaling={"method": "cs", "kappa": 0.8})
    assert model.config.skip_scaling["method"] == "ls"
    assert (model.config.num_layers, model.config.hidden_size) == (4, 1024)
    assert skip_connections(model).parameters == 2 * 8_530
    assert unet.config.skip_scaling["kappa"] == 0.8
    assert PRESETS["imagenet64-uvit-l-4"].config["num_layers"] == 20


@pytest.mark.parametrize(
    ("model_class", "name", "message"),
    [
        (UViTModel, "cifar10-uvit-s2", r"unknown preset 'cifar10-uvit-s2' \(did you mean 'cifar10-uvit-s-2'\?\)"),
        (UViTModel, {"a": 1}, r"unknown preset \{'a': 1\}"),
        (UViTModel, "something else", "unknown preset 'something else'; accepted: cifar10-uvit-s-2, .*mscoco-unet"),
        (UViTModel, "cifar10-unet", r"is not for UViTModel; use ScaleLongUNet2DModel.from_preset\('cifar10-unet'\)"),
        (ScaleLongUNet2DModel, "mscoco-unet", "use ScaleLongUNet2DConditionModel.from_preset"),
        (ScaleLongUNet2DConditionModel, "mscoco-uvit-s-2", "use UViTModel.from_preset"),
    ],
)
def test_rejects_unknown_and_unsuitable_presets(model_class, name, message):
    with pytest.raises(ValueError, match=message):
        model_class.from_preset(name)


def test_rejects_misspelled_overrides():
    with pytest.raises(ValueError, match=r"'skip_scalling' \(did you mean 'skip_scaling'\?\)"):
        UViTModel.from_preset("cifar10-uvit-s-2", skip_scalling="ls")


def test_command_lists_presets(capsys):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(PUBLISHED)
    assert all(f"{PUBLISHED[line.split()[0]][0]:,}" in line for line in lines[1:])

    assert main(["presets", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["parameters"] for row in listing} == {n: row[0] for n, row in PUBLISHED.items()}


def test_command_shows_one_preset(capsys):
    assert main(["presets", "imagenet256-uvit-h-2"]) == 0
    text = capsys.readouterr().out
    assert "  num_class_embeds: 1001\n" in text
    assert "parameters: 500,832,016\n" in text
    assert "text_encoder: -\n" in text
    assert "  max_grad_norm: 0.0\n" in text
    assert main(["presets", "imagenet256-uvit-h-2", "--json"]) == 0
    preset = json.loads(capsys.readouterr().out)
    assert preset["config"]["final_conv"] is False
    training = preset["training"]
    assert (training["adam_beta1"], training["adam_beta2"], training["class_dropout"]) == (0.99, 0.99, 0.1)
    assert preset["null_class"] == 1000


def test_command_suggests_the_nearest_name(capsys):
    assert main(["presets", "cifar-unet"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'cifar10-unet'?" in error
    assert error.count("\n") == 1
