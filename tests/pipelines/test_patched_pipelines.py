"""Stock diffusers pipelines with a patched U-Net. See test_saving.py for saving and loading."""

import diffusers
import pytest
import torch

from scalelong_diffusers import (
    ScaleLongUNet2DConditionModel,
    apply_skip_scaling,
    remove_skip_scaling,
    set_skip_scaling_strength,
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


def test_updates_the_class_of_the_unet_in_the_config(stable_diffusion):
    pipe = apply_skip_scaling(stable_diffusion, "cs")
    assert pipe.config["unet"] == ("scalelong_diffusers", "ScaleLongUNet2DConditionModel")
    remove_skip_scaling(pipe)
    assert pipe.config["unet"] == ("diffusers", "UNet2DConditionModel")


def test_removal_restores_the_images(stable_diffusion):
    pipe = stable_diffusion
    plain = draw(pipe)
    apply_skip_scaling(pipe, "cs")
    set_skip_scaling_strength(pipe, 0.5)
    assert not torch.allclose(draw(pipe), plain, atol=1e-4)
    assert remove_skip_scaling(pipe) is pipe
    assert torch.equal(draw(pipe), plain)


def test_identity_gates_do_not_change_the_images(stable_diffusion):
    plain = draw(stable_diffusion)
    assert torch.equal(draw(apply_skip_scaling(stable_diffusion, {**LS, "init": "identity"})), plain)


def test_strength_can_change_from_step_to_step(stable_diffusion):
    """Skip-Tuning over time: the first step with all of the scaling, the last one without."""
    pipe = stable_diffusion
    plain, used = draw(pipe), []
    apply_skip_scaling(pipe, {"method": "linear", "kappa": 0.5})
    always = draw(pipe)
    pipe.unet.register_forward_pre_hook(lambda unet, args: used.append(unet.skip_scaler.strength))

    def fade_out(pipe, step, timestep, tensors):
        set_skip_scaling_strength(pipe, 1 - (step + 1) / pipe.num_timesteps)
        return tensors

    fading = draw(pipe, callback_on_step_end=fade_out)
    assert used == [1.0, 0.5]
    assert not any(torch.equal(fading, other) for other in (plain, always))
    assert torch.equal(draw(pipe), plain)  # the strength stays as the callback left it


def test_a_scaled_unet_can_be_passed_to_a_plain_pipeline(stable_diffusion, tmp_path):
    stable_diffusion.save_pretrained(tmp_path)
    unet = ScaleLongUNet2DConditionModel.from_pretrained(tmp_path, subfolder="unet", skip_scaling="cs")
    pipe = quiet(diffusers.StableDiffusionPipeline.from_pretrained(tmp_path, unet=unet))
    assert torch.equal(draw(pipe), draw(apply_skip_scaling(stable_diffusion, "cs")))


def test_rejects_a_pipeline_without_long_skips():
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, norm_num_groups=4
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    pipe = diffusers.DiTPipeline(transformer=transformer, vae=vae, scheduler=diffusers.DDIMScheduler())
    message = r"DiTPipeline has no model that can be scaled; it has: transformer \(DiTTransformer2DModel\), vae"
    with pytest.raises(ValueError, match=message):
        apply_skip_scaling(pipe, "cs")


def test_rejects_a_compiled_unet(stable_diffusion):
    stable_diffusion.unet = torch.compile(stable_diffusion.unet)
    with pytest.raises(ValueError, match="OptimizedModule wraps a UNet2DConditionModel: patch before wrapping"):
        apply_skip_scaling(stable_diffusion, "cs")
