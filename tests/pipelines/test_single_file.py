"""Stable Diffusion in one file, with its configs in the same folder or on the Hub."""

import argparse
import json

import pytest
import torch
from original_layout import original_weights
from safetensors.torch import save_file

import scalelong_diffusers  # noqa: F401
from scalelong_diffusers import ScaleLongUNet2DConditionModel, ScaleLongUNet2DModel, UserError, load_pipeline
from scalelong_diffusers.cli import main
from scalelong_diffusers.training.stable_diffusion import load_stable_diffusion


_ARGUMENTS = {"num_inference_steps": 2, "output_type": "pt"}


def save(pipe, folder):
    """Save a pipeline in one file, next to its configs and tokenizer."""
    pipe.save_pretrained(folder)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    save_file(original_weights(pipe), folder / "model.safetensors")


@pytest.fixture
def folder(tiny_stable_diffusion, tmp_path):
    save(tiny_stable_diffusion, tmp_path / "sd")
    return tmp_path / "sd"


def images_of(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe("a red circle", **_ARGUMENTS, generator=torch.Generator().manual_seed(0)).images


class TestLoading:
    def test_gives_the_images_of_the_folder(self, folder, tiny_stable_diffusion, tmp_path):
        tiny_stable_diffusion.save_pretrained(tmp_path / "whole")
        expected = images_of(load_pipeline(tmp_path / "whole"))
        pipe = load_pipeline(folder / "model.safetensors")
        assert type(pipe).__name__ == "ScaleLongTextToImagePipeline"
        assert torch.equal(images_of(pipe), expected)

    def test_reads_a_pickle_of_tensors(self, folder, tiny_stable_diffusion):
        torch.save({"state_dict": original_weights(tiny_stable_diffusion)}, folder / "model.ckpt")
        unet = load_pipeline(str(folder / "model.ckpt"), dtype=torch.bfloat16).unet
        assert unet.dtype == torch.bfloat16
        expected = tiny_stable_diffusion.unet.to(torch.bfloat16).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in unet.state_dict().items())

    def test_for_fine_tuning(self, folder, tiny_stable_diffusion):
        pipe = load_stable_diffusion(folder / "model.safetensors")
        assert type(pipe) is type(tiny_stable_diffusion)
        assert torch.equal(images_of(pipe), images_of(tiny_stable_diffusion))

    def test_sdxl(self, build_kind, tmp_path):
        pipe = build_kind("sdxl")
        save(pipe, tmp_path)
        loaded = load_stable_diffusion(tmp_path / "model.safetensors")
        torch.testing.assert_close(images_of(loaded), images_of(pipe))

    def test_takes_components(self, folder, tiny_stable_diffusion):
        weights = original_weights(tiny_stable_diffusion)
        save_file({k: v for k, v in weights.items() if "first_stage" not in k}, folder / "no-vae.safetensors")
        vae = tiny_stable_diffusion.vae
        assert load_pipeline(folder / "no-vae.safetensors", vae=vae).vae is vae

    def test_scales_as_the_config_says(self, folder):
        config = json.loads((folder / "unet" / "config.json").read_text())
        config |= {"_class_name": "ScaleLongUNet2DConditionModel", "skip_scaling": {"method": "cs", "kappa": 0.5}}
        (folder / "unet" / "config.json").write_text(json.dumps(config))
        index = json.loads((folder / "model_index.json").read_text())
        index["unet"] = ["scalelong_diffusers", "ScaleLongUNet2DConditionModel"]
        (folder / "model_index.json").write_text(json.dumps(index))
        assert load_pipeline(folder / "model.safetensors").unet.skip_scaler.config.kappa == 0.5


class TestScaledClass:
    def test_loads_with_gates(self, folder, tiny_stable_diffusion):
        unet = ScaleLongUNet2DConditionModel.from_single_file(
            folder / "model.safetensors", config=str(folder), subfolder="unet", skip_scaling="ls"
        )
        assert unet.skip_scaler.config.has_gates
        sample, states = torch.randn(1, 4, 8, 8), torch.randn(1, 3, 16)
        with torch.no_grad():
            expected = tiny_stable_diffusion.unet(sample, 5, states).sample
            torch.testing.assert_close(unet(sample, 5, states).sample, expected)  # the gates start at 1

    def test_rejects_other_classes(self):
        with pytest.raises(UserError, match="ScaleLongUNet2DModel cannot be loaded from a single file"):
            ScaleLongUNet2DModel.from_single_file("model.safetensors")


class TestCommands:
    def test_inspect_and_sample(self, folder, tmp_path, capsys):
        file = str(folder / "model.safetensors")
        assert main(["inspect", file, "--skip_scaling", "cs"]) == 0
        assert "N = 6, SkipScalingConfig(method='cs'" in capsys.readouterr().out
        output = tmp_path / "images"
        flags = ["--prompt", "red", "--num_images", "1", "--num_inference_steps", "1", "--output_dir", str(output)]
        assert main(["sample", file, *flags]) == 0
        assert f"{output}: 1 images, 1 of them new" in capsys.readouterr().out
        assert (output / "000000.png").is_file()

    @pytest.mark.slow
    def test_diagnose(self, folder, tmp_path, capsys):
        output = tmp_path / "diagnosis"
        flags = ["--num_images", "8", "--output_dir", str(output)]
        assert main(["diagnose", str(folder / "model.safetensors"), *flags]) == 0
        assert (output / "index.html").is_file()


def remove(weights, start):
    return {name: value for name, value in weights.items() if not name.startswith(start)}


_UNET, _CLIP = "model.diffusion_model.", "cond_stage_model.transformer.text_model."
_BAD = {
    "a weight of the U-Net": (lambda w: remove(w, f"{_UNET}out.2.bias"), "lacks weights that its configs ask for"),
    "a weight of the text encoder": (
        lambda w: remove(w, f"{_CLIP}final_layer_norm.bias"),
        "the text_encoder of .* lacks 1 weights .* final_layer_norm.bias",
    ),
    "a component": (lambda w: remove(w, "first_stage_model."), "has no weights of an AutoencoderKL: pass this"),
    "the U-Net": (lambda w: remove(w, _UNET), "has no weights of an UNet2DConditionModel"),
    "a shape": (lambda w: {**w, f"{_UNET}out.2.bias": torch.zeros(7)}, "do not fit their config.json"),
}


class TestBadFiles:
    @pytest.mark.parametrize(("change", "message"), _BAD.values(), ids=_BAD)
    def test_missing(self, folder, tiny_stable_diffusion, change, message):
        save_file(change(original_weights(tiny_stable_diffusion)), folder / "bad.safetensors")
        with pytest.raises(UserError, match=message):
            load_pipeline(folder / "bad.safetensors")

    def test_damaged(self, folder):
        (folder / "cut.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
        with pytest.raises(UserError, match=r"cut.safetensors are damaged or incompletely downloaded"):
            load_pipeline(folder / "cut.safetensors")

    def test_code(self, folder):
        torch.save({"state_dict": {}, "callbacks": argparse.Namespace()}, folder / "code.ckpt")
        with pytest.raises(UserError, match=r"damaged or hold more than tensors, .* save them as safetensors"):
            load_pipeline(folder / "code.ckpt")

    def test_another_kind_of_file(self, folder):
        with pytest.raises(UserError, match=r"json is not a pipeline: pass a folder .* or one .safetensors or .ckpt"):
            load_pipeline(folder / "model_index.json")

    def test_weights_of_a_component(self, tiny_stable_diffusion, tmp_path):
        tiny_stable_diffusion.unet.save_pretrained(tmp_path)
        with pytest.raises(UserError, match=r"is not a Stable Diffusion in one file, .* the whole folder"):
            load_pipeline(tmp_path / "diffusion_pytorch_model.safetensors")

    def test_configs_of_another_model(self, folder):
        index = json.loads((folder / "model_index.json").read_text())
        (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "DDPMPipeline"}))
        with pytest.raises(UserError, match="has the configs of a DDPMPipeline"):
            load_pipeline(folder / "model.safetensors")


@pytest.mark.slow
def test_configs_from_the_hub(folder, hub, tmp_path):
    """The Hub has the configs of Stable Diffusion 1.5, and they stay in the cache."""
    repository = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    file = tmp_path / "alone.safetensors"
    (folder / "model.safetensors").rename(file)
    inspect = "import sys; from scalelong_diffusers.cli import main; sys.exit(main(['inspect', sys.argv[1]]))"
    before = hub(inspect, file, check=False, HF_ENDPOINT="http://127.0.0.1:9")
    assert before.returncode == 2
    assert f"run `hf download {repository} --include '*.json' '*.txt' --local-dir FOLDER`" in before.stderr
    assert len(before.stderr.splitlines()) == 1
    upload = (
        "import sys; from huggingface_hub import HfApi; HfApi().create_repo(sys.argv[2]);"
        "HfApi().upload_folder(repo_id=sys.argv[2], folder_path=sys.argv[3]);"
    )
    assert "N = 6" in hub(upload + inspect, file, repository, folder).stdout
    assert "N = 6" in hub(inspect, file, HF_ENDPOINT="http://127.0.0.1:9").stdout, "the configs are in the cache"
