"""`scalelong diagnose` on every kind of model it takes, and on bad input."""

import json
import shutil

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler
from PIL import Image

from scalelong_diffusers import ScaleLongUNet2DConditionModel, UViTModel
from scalelong_diffusers.cli import subject


TINY = {"sample_size": 8, "patch_size": 2, "hidden_size": 16, "num_layers": 4, "num_attention_heads": 2}
FEW = ("--num_images", 8, "--batch_size", 3)


@pytest.fixture
def diagnose(scalelong):
    """Run the command with few images, and return its JSON."""

    def run(*arguments):
        code, printed, errors = scalelong("diagnose", *arguments, *FEW, "--json")
        assert code == 0, errors
        return json.loads(printed.splitlines()[-1])  # a training prints its settings before

    return run


@pytest.fixture
def config(tmp_path):
    UViTModel(**TINY).save_config(tmp_path / "config")
    return tmp_path / "config"


def test_prints_table_and_verdict(scalelong, config):
    code, printed, errors = scalelong("diagnose", config, *FEW)
    assert code == 0
    lines = printed.splitlines()
    assert lines[0] == f"{config}; the built-in shapes, 10,000 images"
    assert lines[1].startswith("UViTModel, ")
    assert lines[3].split()[:2] == ["1", "out_blocks.1.skip_proj"]
    assert "verdict:" in lines
    assert lines[-1].startswith("The model is untrained, ")
    assert "diagnosis: 100%" in errors


def test_untrained_models_depend_only_on_the_seed(diagnose, config):
    first, second, other = diagnose(config), diagnose(config / "config.json"), diagnose(config, "--seed", 1)
    assert {**first, "source": ""} == {**second, "source": ""}
    assert first["skips"] != other["skips"]
    assert first["num_images"] == 8
    assert not first["is_trained"]


def test_takes_the_weights_of_a_model(diagnose, tmp_path):
    torch.manual_seed(5)
    model = UViTModel(**TINY, skip_scaling={"method": "cs", "kappa": 0.5})
    torch.nn.init.constant_(model.mid_block.mlp.fc1.bias, 1000)
    model.save_pretrained(tmp_path)
    result = diagnose(tmp_path)
    assert result["is_trained"]
    assert result["headroom"]["blocks"]["mid_block"] > 900
    assert [skip["factor"] for skip in result["skips"]] == [1, 0.5]
    assert list(result["sensitivity"]) == ["plain", "cs"]
    flags = ("--skip_scaling", "constant", "--kappa", "0.25")
    assert [skip["factor"] for skip in diagnose(tmp_path, *flags)["skips"]] == [0.25, 0.25]


def test_takes_stock_models_and_pipelines(diagnose, ddpm, tmp_path):
    ddpm.build().save_pretrained(tmp_path / "model")
    scheduler = DDPMScheduler(prediction_type="v_prediction", beta_schedule="squaredcos_cap_v2")
    DDPMPipeline(ddpm.build(), scheduler).save_pretrained(tmp_path / "pipeline")
    model, pipeline = diagnose(tmp_path / "model"), diagnose(tmp_path / "pipeline")
    assert len(model["skips"]) == len(pipeline["skips"]) == 6
    assert pipeline["loss"] != pytest.approx(model["loss"])
    flags = ("--prediction_type", "v_prediction", "--ddpm_beta_schedule", "squaredcos_cap_v2")
    assert diagnose(tmp_path / "model", *flags)["loss"] == pytest.approx(pipeline["loss"])


def test_takes_stable_diffusion_with_its_autoencoder_and_text(diagnose, tiny_stable_diffusion, tmp_path):
    tiny_stable_diffusion.save_pretrained(tmp_path)
    result = diagnose(tmp_path)
    assert result["data_source"] == "the built-in shapes, 10,000 images"
    alone = diagnose(tmp_path / "unet")
    assert alone["data_source"] == "normal noise instead of latents with 4 channels"
    assert alone["data"]["mean_square"] == pytest.approx(1, abs=0.1)


def test_takes_sdxl_with_its_conditions(diagnose, build_kind, draw, monkeypatch, tmp_path):
    """The U-Net receives what the stock pipeline passes to it for the same captions and size."""
    pipe = build_kind("sdxl")
    pipe.save_pretrained(tmp_path)
    calls, captions = [], []
    forward = ScaleLongUNet2DConditionModel.forward
    monkeypatch.setattr(
        ScaleLongUNet2DConditionModel,
        "forward",
        lambda self, *args, **kwargs: calls.append(kwargs) or forward(self, *args, **kwargs),
    )
    conditions = subject.Inputs._conditions
    monkeypatch.setattr(
        subject.Inputs,
        "_conditions",
        lambda self, batch: captions.append(batch["captions"]) or conditions(self, batch),
    )
    result = diagnose(tmp_path)
    assert result["data_source"] == "the built-in shapes, 10,000 images"
    assert len(result["skips"]) == 6
    hook = pipe.unet.register_forward_pre_hook(lambda m, args, kwargs: calls.append(kwargs), with_kwargs=True)
    draw(pipe, captions[0][0])
    hook.remove()
    measured, sampled = calls[0], calls[-1]
    assert len(measured["encoder_hidden_states"]) == 3
    torch.testing.assert_close(measured["encoder_hidden_states"][:1], sampled["encoder_hidden_states"][1:])
    for name, value in measured["added_cond_kwargs"].items():
        torch.testing.assert_close(value[:1], sampled["added_cond_kwargs"][name][1:])
    sides = diagnose(tmp_path, "--resolution", 24), calls[-1]["added_cond_kwargs"]["time_ids"]
    assert sides[1].tolist() == [[24, 24, 0, 0, 24, 24]]


def test_takes_the_unet_of_sdxl_alone(diagnose, cases, tmp_path):
    """Without text encoders, all conditions are random. Their widths come from the config."""
    cases["sdxl"].build().save_pretrained(tmp_path / "unet")
    cases["sdxl"].build().save_config(tmp_path / "config")
    trained, untrained = diagnose(tmp_path / "unet"), diagnose(tmp_path / "config")
    assert trained["data_source"] == untrained["data_source"] == "normal noise instead of latents with 4 channels"
    assert trained["loss"] != untrained["loss"]
    assert all(skip["skip_gradient"]["mean"] > 0 for skip in trained["skips"])


@pytest.mark.parametrize("name", ["3d", "spatio-temporal", "1d", "kandinsky3", "hunyuan-dit", "controlnet-xs"])
def test_names_the_models_whose_inputs_it_makes(error_of, cases, tmp_path, name):
    cases[name].build().save_config(tmp_path)
    expected = (
        f"is a {cases[name].scaled_name}, and `scalelong diagnose` makes the inputs of UViTModel, UNet2DModel and"
    )
    assert expected in error_of("diagnose", tmp_path)


def test_takes_a_training_run_and_its_checkpoints(diagnose, config, tmp_path):
    from scalelong_diffusers.train.train_unconditional import train
    from scalelong_diffusers.training import TrainingConfig, make_config

    run = tmp_path / "run"
    train(make_config(
        TrainingConfig, model_config_name_or_path=str(config), resolution=8, num_shapes=30, train_batch_size=4,
        max_train_steps=4, checkpointing_steps=2, validation_steps=0, sample_steps=0, output_dir=str(run),
        prediction_type="v_prediction", lr_warmup_steps=1,
    ))  # fmt: skip
    finished = diagnose(run)
    assert finished["data_source"] == "the built-in shapes, 30 images"
    checkpoint = diagnose(run / "checkpoint-2")
    assert checkpoint["loss"] != finished["loss"]
    shutil.rmtree(run / "checkpoint-4")
    (run / "model_index.json").unlink()
    unfinished = diagnose(run)
    assert {**unfinished, "source": ""} == {**checkpoint, "source": ""}
    assert diagnose(run, "--prediction_type", "epsilon")["loss"] != unfinished["loss"]


def test_takes_an_unfinished_run_with_its_autoencoder(diagnose, tiny_vae, tmp_path):
    from scalelong_diffusers.train.train_unconditional import train
    from scalelong_diffusers.training import TrainingConfig, make_config
    from scalelong_diffusers.training.unfinished import PARTS_FOLDER

    run, config = tmp_path / "run", tmp_path / "config"
    UViTModel(**TINY, in_channels=4).save_config(config)
    tiny_vae.save_pretrained(tmp_path / "vae")
    train(make_config(
        TrainingConfig, model_config_name_or_path=str(config), pretrained_vae_model_name_or_path=str(tmp_path / "vae"),
        resolution=16, num_shapes=30, train_batch_size=4, max_train_steps=2, checkpointing_steps=2, validation_steps=0,
        sample_steps=0, output_dir=str(run),
    ))  # fmt: skip
    finished = diagnose(run)
    # The state before the end: no pipeline, and the parts that are not trained.
    (run / PARTS_FOLDER).mkdir()
    for name in ("model_index.json", "scheduler", "vae"):
        (run / name).rename(run / PARTS_FOLDER / name)
    shutil.rmtree(run / "unet")
    assert {**diagnose(run), "source": ""} == {**finished, "source": ""}
    assert {**diagnose(run / "checkpoint-2"), "source": ""} == {**finished, "source": ""}


def test_a_preset_of_latents_takes_noise_of_its_size(monkeypatch):
    preset = subject.get_preset("imagenet256-uvit-l-2")
    for name, value in {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 2}.items():
        monkeypatch.setitem(preset.config, name, value)
    inputs = subject.Inputs(subject.load_subject(preset.name, {}, 0), preset.name, {}, 0)
    assert (inputs.size, inputs.description) == (32, "normal noise instead of latents with 4 channels")


def test_takes_a_preset(error_of, diagnose, monkeypatch):
    preset = subject.get_preset("cifar10-uvit-s-2")
    monkeypatch.setitem(preset.config, "hidden_size", 16)
    monkeypatch.setitem(preset.config, "patch_size", 8)
    result = diagnose("cifar10-uvit-s-2")
    assert len(result["skips"]) == 6
    # Its noise is continuous, so that timesteps are not integers.
    assert any(part["timestep"] % 1 for part in result["schedule"])
    assert diagnose("cifar10-uvit-s-2", "--prediction_type", "flow")["loss"] != result["loss"]


@pytest.fixture
def pictures(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for k in range(3):
            Image.new("RGB", (9, 9), (40 * k, 80, 200)).save(tmp_path / "pictures" / label / f"{k}.png")
    return tmp_path / "pictures"


@pytest.mark.parametrize("prediction_type", ["flow", "edm"])
def test_takes_other_noise_processes(diagnose, config, tmp_path, prediction_type):
    result = diagnose(config, "--prediction_type", prediction_type, "--output_dir", tmp_path / "out")
    assert result["loss"] != diagnose(config)["loss"]
    timesteps = [part["timestep"] for part in result["schedule"]]
    assert timesteps == sorted(timesteps)
    assert "too few finite values" not in (tmp_path / "out" / "index.html").read_text()


def test_takes_the_users_images_and_labels(diagnose, error_of, config, pictures, tmp_path):
    result = diagnose(config, "--train_data_dir", pictures)
    assert "6 images" in result["data_source"]
    assert result["data"]["mean_square"] != pytest.approx(diagnose(config)["data"]["mean_square"], rel=0.01)
    UViTModel(**TINY, num_class_embeds=2).save_config(tmp_path / "classes")
    assert diagnose(tmp_path / "classes", "--train_data_dir", pictures)["num_images"] == 8
    assert diagnose(tmp_path / "classes")["num_images"] == 8  # with random labels
    UViTModel(**TINY, num_class_embeds=1).save_config(tmp_path / "few")
    assert "has 2 classes" in error_of("diagnose", tmp_path / "few", "--train_data_dir", pictures)


def test_another_dataset_replaces_the_data_of_a_run(diagnose, config, pictures, tmp_path):
    UViTModel(**TINY).save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "settings.json").write_text(json.dumps({"dataset_name": "nobody/nothing", "resolution": 12}))
    assert "6 images" in diagnose(tmp_path / "run", "--train_data_dir", pictures)["data_source"]


def test_gray_models_see_gray_shapes(diagnose, tmp_path):
    UViTModel(**TINY, in_channels=1).save_config(tmp_path)
    assert diagnose(tmp_path)["num_images"] == 8


def test_writes_page_and_figures(diagnose, config, tmp_path):
    result = diagnose(config, "--output_dir", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "diagnosis.json").read_text()) == result
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.startswith("<!doctype html>")
    assert result["verdict"][0] in page


def test_rejects_bad_input_with_one_line(error_of, config, cases, pictures, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    UViTModel(**{**TINY, "sample_size": (8, 4)}).save_config(tmp_path / "wide")
    UViTModel(**TINY, cross_attention_dim=16).save_config(tmp_path / "text")
    UViTModel(**TINY, in_channels=4).save_config(tmp_path / "latent")
    cases["sdxl"].build(
        addition_embed_type="text_image", encoder_hid_dim=8, encoder_hid_dim_type="text_image_proj"
    ).save_config(tmp_path / "kandinsky")
    (tmp_path / "dit.json").write_text('{"_class_name": "DiTTransformer2DModel"}')
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "damaged").mkdir()
    shutil.copy(config / "config.json", tmp_path / "damaged")
    (tmp_path / "damaged" / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 100)
    bad = {
        (): "the following arguments are required: model",
        ("nobody/nothing",): "nobody/nothing",
        ("me/cifar10-uvit-s2",): "me/cifar10-uvit-s2 is not a local folder, and the Hub cannot be reached",
        ("cifar10-uvit-s2",): "is neither a local folder nor a preset (did you mean 'cifar10-uvit-s-2'?)",
        (tmp_path / "file",): "file is not a pipeline: pass a folder written by save_pretrained, or one .safetensors",
        (tmp_path / "empty",): "is not a model or a pipeline",
        (tmp_path / "damaged",): "damaged",
        (tmp_path / "dit.json",): "DiTTransformer2DModel has no long skip connections that can be scaled",
        (tmp_path / "none.json",): "must hold a JSON object",
        (tmp_path / "wide",): "has sample_size=[8, 4], and `scalelong diagnose` takes square images",
        (tmp_path / "latent", "--train_data_dir", pictures): "takes 4 channels, not images",
        (tmp_path / "kandinsky",): "kandinsky takes added_cond_kwargs (addition_embed_type='text_image'), which",
        (config, "--num_images", 7): "--num_images must be an integer, at least 8 and at most 100,000, got 7",
        (config, "--batch_size", 0): "--batch_size must be an integer",
        (config, "--resolution", 7): "--resolution must be a multiple of 2 (the nearest: 6 or 8), got 7",
        (config, "--device", "nowhere"): "--device nowhere cannot be used",
        (config, "--skip_scaling", "cs", "--kappa", 2): "kappa must be",
        (config, "--train_data_dir", tmp_path / "missing"): "missing",
        (config, "--ddpm_beta_schedule", "quadratic"): "--ddpm_beta_schedule must be one of linear",
        (
            config,
            "--output_dir",
            tmp_path / "file",
        ): "--output_dir must be a folder, got the file",
        (config, "--output_dir", tmp_path / "file" / "a"): f"cannot lock {tmp_path / 'file' / 'a'}: ",
        (config, "--streaming"): "unknown argument '--streaming'",
    }
    for arguments, message in bad.items():
        line = error_of("diagnose", *arguments)
        assert message in line, (arguments, line)
