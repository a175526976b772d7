"""The trainings of figures: their settings, what they log, and the gates of trained models."""

import json

import pytest
import torch

from scalelong_diffusers import UViTModel, apply_skip_scaling, skip_connections
from scalelong_diffusers.paper import training_script
from scalelong_diffusers.paper.figures import FIGURES, TRAININGS
from scalelong_diffusers.paper.gates import fit_kappa, gate_values
from scalelong_diffusers.paper.training_script import FigureConfig, feature_sizes
from scalelong_diffusers.paper.trainings import METHODS, Training, shortened
from scalelong_diffusers.training import parse_config


TINY = {"sample_size": 8, "patch_size": 2, "in_channels": 1, "hidden_size": 16, "num_attention_heads": 2}


@pytest.mark.parametrize("method", METHODS)
def test_settings_are_valid(method, tmp_path):
    for run in (Training(method), shortened(Training(method, seed=3))):
        settings = {**run.flags, "output_dir": tmp_path, "eval_features": tmp_path}
        words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items()]
        config = parse_config(FigureConfig, "", words)
        assert config.optimization.max_grad_norm == 0
        assert config.optimization.adam_beta1 == 0.99
        UViTModel.from_config(run.model)


def test_all_methods_of_a_figure_train_at_equal_rates():
    trained = [run for figure in FIGURES.values() if figure.experiment is TRAININGS for run in figure.runs()]
    assert len({run.flags["learning_rate"] for run in trained}) == 1
    assert {run.method for run in trained} == set(METHODS)


def test_feature_sizes_start_with_the_outermost_block(ddpm):
    torch.manual_seed(0)
    model = UViTModel(num_layers=4, **TINY)
    noisy, timesteps = torch.randn(2, 1, 8, 8), torch.tensor([3, 5])
    outputs = []
    model.out_blocks[-1].register_forward_hook(lambda block, inputs, output: outputs.append(output))
    sizes = feature_sizes(model, noisy, timesteps)
    assert len(sizes) == 2
    assert sizes[0] == pytest.approx(outputs[0].square().mean().sqrt().item())
    unet = ddpm.build_scaled("cs")
    assert len(feature_sizes(unet, torch.randn(2, 3, 8, 8), timesteps)) == len(skip_connections(unet))
    assert not any(resnet._forward_hooks for block in unet.up_blocks for resnet in block.resnets)


@pytest.mark.parametrize("shared", [True, False])
def test_gates_are_those_of_the_skips(shared):
    model = UViTModel(num_layers=6, skip_scaling={"method": "ls", "shared": shared, "reduction": 4}, **TINY)
    for i in (1, 2, 3):
        model.skip_scaler.method(i).excite.bias.data.fill_(0.2 if shared else 0.2 * i)
    gates = gate_values(model)
    expected = [2 * torch.sigmoid(torch.tensor(0.2 if shared else 0.2 * i)).item() for i in (1, 2, 3)]
    assert [mean for mean, _, _ in gates] == pytest.approx(expected)
    assert all(low <= mean + 1e-6 and mean <= high + 1e-6 for mean, low, high in gates)
    assert "factor" not in vars(model.skip_scaler)


def test_gates_of_a_unet_have_one_row_per_skip(ddpm):
    unet = apply_skip_scaling(ddpm.build(), {"method": "ls", "shared": False, "reduction": 4})
    indices = range(1, 1 + len(skip_connections(unet)))
    for i in indices:
        unet.skip_scaler.method(i).excite.bias.data.fill_(0.2 * i)
    expected = [2 * torch.sigmoid(torch.tensor(0.2 * i)).item() for i in indices]
    assert [mean for mean, _, _ in gate_values(unet)] == pytest.approx(expected)


def test_fit_finds_kappa():
    fit = fit_kappa([0.8**i for i in range(6)])
    assert fit["kappa"] == pytest.approx(0.8, abs=1e-4)
    assert fit["residual"] < 1e-3 < fit["constant"]
    flat = fit_kappa([0.5] * 6)
    assert flat["constant"] == 0 < flat["residual"]


@pytest.mark.slow
def test_script_logs_features_and_extra_noise_changes_training_only(tmp_path):
    def train(name, extra_noise):
        config = tmp_path / "model.json"
        config.write_text(json.dumps({"_class_name": "UViTModel", "num_layers": 4, **TINY, "in_channels": 3}))
        flags = {
            "num_shapes": 20, "resolution": 8, "validation_size": 4, "train_batch_size": 4, "max_train_steps": 4,
            "logging_steps": 1, "validation_steps": 1, "sample_steps": 0, "feature_steps": 2, "learning_rate": 1e-9,
            "model_config_name_or_path": config, "output_dir": tmp_path / name, "extra_noise": extra_noise,
        }  # fmt: skip
        training_script.main([f"--{flag}={value}" for flag, value in flags.items()])
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    plain, noisy = train("plain", 0), train("noisy", 2)
    assert [len(line.get("features", [])) for line in plain] == [0, 2, 0, 2]
    assert noisy[0]["loss"] != plain[0]["loss"]
    assert noisy[0]["validation_loss"] == pytest.approx(plain[0]["validation_loss"], rel=1e-4)


@pytest.mark.slow
def test_scheduler_adds_gates_features_and_fid(monkeypatch, tmp_path):
    """One training in its own process, on the built-in shapes and with a feature network that exists."""
    from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessorPil

    from scalelong_diffusers.experiments.results import ResultFile
    from scalelong_diffusers.paper import trainings
    from scalelong_diffusers.paper.experiment import Workspace

    def network(folder, source, epochs):
        config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
        ResNetForImageClassification(config).save_pretrained(folder)
        ViTImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(folder)
        return 0.9

    monkeypatch.setattr(trainings, "feature_network", network)
    workspace = Workspace(tmp_path, "nowhere")
    workspace.fashion_mnist = {"num_shapes": 60}
    monkeypatch.setattr(trainings, "_UVIT", {**trainings._UVIT, "in_channels": 3, "out_channels": 3})
    results = ResultFile(tmp_path / "trainings.jsonl", Training)
    run = shortened(Training("LS"))
    trainings.run_all(results, [run], workspace)
    line = results.lines[run]
    assert line["stopped"] is None
    assert len(line["gates"]) == run.layers // 2
    assert [step for step, _ in line["fid"]] == [run.steps]
    assert len(line["features"][0]) == 1 + run.layers // 2
    assert not list(tmp_path.glob("runs/*/unet"))
