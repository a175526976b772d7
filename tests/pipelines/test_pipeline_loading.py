"""Pipelines of diffusers with a scaled U-Net inside: patched, saved, and loaded where nothing but the package is."""

import diffusers
import pytest
import torch

from scalelong_diffusers import (
    ScaleLongUNet2DConditionModel,
    apply_skip_scaling,
    remove_skip_scaling,
    set_skip_scaling_strength,
    skip_connections,
)


LS = {"method": "ls", "reduction": 4}


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def stable_diffusion(tiny_stable_diffusion):
    return quiet(tiny_stable_diffusion)


def draw(pipe, **kwargs):
    generator = torch.Generator().manual_seed(0)
    kwargs = {"prompt": "a red circle", "num_inference_steps": 2, "height": 16, "width": 16, **kwargs}
    return torch.from_numpy(pipe(**kwargs, generator=generator, output_type="np").images)


RELOAD = """
import sys
import torch
import scalelong_diffusers
import diffusers

pipe = getattr(diffusers, sys.argv[1]).from_pretrained(sys.argv[2])
pipe.set_progress_bar_config(disable=True)
kwargs = {"prompt": "a red circle", "height": 16, "width": 16} if "vae" in pipe.components else {}
images = pipe(**kwargs, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images
torch.save(torch.from_numpy(images), sys.argv[3])
print(type(pipe).__name__, type(pipe.unet).__name__, pipe.unet.config.skip_scaling["method"])
print(scalelong_diffusers.skip_connections(pipe))
"""


@pytest.mark.parametrize("loader", ["StableDiffusionPipeline", "DiffusionPipeline"])
@pytest.mark.parametrize("entry", ["cs", {**LS, "shared": False}], ids=str)
def test_a_patched_pipeline_comes_back_scaled_in_a_fresh_process(
    stable_diffusion, entry, loader, in_fresh_process, tmp_path
):
    pipe = stable_diffusion
    plain = draw(pipe)
    assert apply_skip_scaling(pipe, entry) is pipe
    expected = draw(pipe)
    assert not torch.allclose(expected, plain, atol=1e-4)
    pipe.save_pretrained(tmp_path / "out")
    printed = in_fresh_process(RELOAD, loader, tmp_path / "out", tmp_path / "images.pt").stdout
    method = "cs" if entry == "cs" else "ls"
    assert printed.startswith(f"StableDiffusionPipeline ScaleLongUNet2DConditionModel {method}\n")
    assert str(skip_connections(pipe)) in printed
    torch.testing.assert_close(torch.load(tmp_path / "images.pt"), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("loader", ["DDPMPipeline", "DiffusionPipeline"])
def test_an_unconditional_pipeline_comes_back_scaled(ddpm, loader, in_fresh_process, tmp_path):
    pipe = quiet(diffusers.DDPMPipeline(unet=ddpm.build_scaled("cs"), scheduler=diffusers.DDPMScheduler()))
    pipe.save_pretrained(tmp_path / "out")
    in_fresh_process(RELOAD, loader, tmp_path / "out", tmp_path / "images.pt")
    images = pipe(num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images
    torch.testing.assert_close(torch.load(tmp_path / "images.pt"), torch.from_numpy(images), rtol=0, atol=1e-5)


def test_without_the_package_the_error_says_what_to_import(stable_diffusion, in_fresh_process, tmp_path):
    apply_skip_scaling(stable_diffusion, "cs").save_pretrained(tmp_path / "out")
    code = "import sys, diffusers\ndiffusers.StableDiffusionPipeline.from_pretrained(sys.argv[1])"
    failed = in_fresh_process(code, tmp_path / "out", check=False)
    assert failed.returncode == 1
    assert "import scalelong_diffusers before calling `from_pretrained`" in failed.stderr


def test_the_pipeline_notes_the_class_of_its_unet(stable_diffusion):
    pipe = apply_skip_scaling(stable_diffusion, "cs")
    assert pipe.config["unet"] == ("scalelong_diffusers", "ScaleLongUNet2DConditionModel")
    remove_skip_scaling(pipe)
    assert pipe.config["unet"] == ("diffusers", "UNet2DConditionModel")


def test_removal_gives_back_the_images(stable_diffusion):
    pipe = stable_diffusion
    plain = draw(pipe)
    apply_skip_scaling(pipe, "cs")
    set_skip_scaling_strength(pipe, 0.5)
    assert not torch.allclose(draw(pipe), plain, atol=1e-4)
    assert remove_skip_scaling(pipe) is pipe
    assert torch.equal(draw(pipe), plain)


def test_identity_gates_leave_the_images_bit_identical(stable_diffusion):
    plain = draw(stable_diffusion)
    assert torch.equal(draw(apply_skip_scaling(stable_diffusion, {**LS, "init": "identity"})), plain)


def test_a_scaled_unet_may_be_passed_to_a_plain_pipeline(stable_diffusion, tmp_path):
    stable_diffusion.save_pretrained(tmp_path)
    unet = ScaleLongUNet2DConditionModel.from_pretrained(tmp_path, subfolder="unet", skip_scaling="cs")
    pipe = quiet(diffusers.StableDiffusionPipeline.from_pretrained(tmp_path, unet=unet))
    assert torch.equal(draw(pipe), draw(apply_skip_scaling(stable_diffusion, "cs")))


def test_a_pipeline_without_a_model_that_fits_lists_what_it_has():
    from diffusers import DiTTransformer2DModel

    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, norm_num_groups=4
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    pipe = diffusers.DiTPipeline(transformer=transformer, vae=vae, scheduler=diffusers.DDIMScheduler())
    message = r"DiTPipeline has no component .* transformer \(DiTTransformer2DModel\), vae \(AutoencoderKL\)"
    with pytest.raises(ValueError, match=message):
        apply_skip_scaling(pipe, "cs")


def test_a_pipeline_with_a_compiled_unet_is_refused(stable_diffusion):
    stable_diffusion.unet = torch.compile(stable_diffusion.unet)
    with pytest.raises(ValueError, match="OptimizedModule wraps a UNet2DConditionModel: patch before wrapping"):
        apply_skip_scaling(stable_diffusion, "cs")
