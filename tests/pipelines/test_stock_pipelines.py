"""Stock diffusers pipelines with our U-Nets: sampling, saving and loading, and `from_pipe`."""

import diffusers
import pytest
import torch
from PIL import Image

from scalelong_diffusers import apply_skip_scaling, remove_skip_scaling, skip_connections


@pytest.fixture
def components(tiny_stable_diffusion):
    """The components of a Stable Diffusion whose U-Net is scaled."""
    apply_skip_scaling(tiny_stable_diffusion, {"method": "ls", "reduction": 4, "init": "paper"})
    return tiny_stable_diffusion.components | {"requires_safety_checker": False}


@pytest.fixture
def sdxl(tiny_clip, tiny_vae):
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(0)
    text_encoder, tokenizer = tiny_clip
    config = CLIPTextConfig(**{**text_encoder.config.to_dict(), "projection_dim": 16})
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), cross_attention_dim=32, use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=64,
    ).eval()  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(
        vae=tiny_vae, text_encoder=text_encoder, text_encoder_2=CLIPTextModelWithProjection(config).eval(),
        tokenizer=tokenizer, tokenizer_2=tokenizer, unet=unet, scheduler=diffusers.EulerDiscreteScheduler(),
        add_watermarker=False,
    )  # fmt: skip


PICTURE = Image.new("RGB", (16, 16), (200, 40, 40))
MASK = Image.new("L", (16, 16), 255)


def draw(pipe, **inputs):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return torch.from_numpy(
        pipe("a red circle", num_inference_steps=4, generator=generator, output_type="np", **inputs).images
    )


def check_round_trip(pipe, folder, **inputs):
    """Check that the pipeline is still scaled and draws the same image after saving and loading."""
    drawn = draw(pipe, **inputs)
    pipe.save_pretrained(folder)
    again = type(pipe).from_pretrained(folder)
    assert str(skip_connections(again)) == str(skip_connections(pipe))
    torch.testing.assert_close(draw(again, **inputs), drawn, rtol=0, atol=1e-5)
    assert not torch.allclose(draw(remove_skip_scaling(again), **inputs), drawn, atol=1e-4)


def test_image_to_image(components, tmp_path):
    pipe = diffusers.StableDiffusionImg2ImgPipeline(**components)
    check_round_trip(pipe, tmp_path, image=PICTURE, strength=0.8)


def test_inpainting(components, tmp_path):
    pipe = diffusers.StableDiffusionInpaintPipeline(**components)
    check_round_trip(pipe, tmp_path, image=PICTURE, mask_image=MASK, height=16, width=16)


def test_controlnet(components, tmp_path):
    controlnet = diffusers.ControlNetModel.from_unet(components["unet"], conditioning_embedding_out_channels=(8, 8))
    with torch.no_grad():
        for block in [*controlnet.controlnet_down_blocks, controlnet.controlnet_mid_block]:
            block.weight.normal_(std=0.1)  # its initial zeros would have no effect
    pipe = diffusers.StableDiffusionControlNetPipeline(**components, controlnet=controlnet)
    check_round_trip(pipe, tmp_path, image=PICTURE)


def test_sdxl(sdxl, tmp_path):
    apply_skip_scaling(sdxl, "cs")
    check_round_trip(sdxl, tmp_path, height=16, width=16)


class TestFromPipe:
    def test_auto_pipelines_reuse_a_scaled_unet(self, components):
        pipe = diffusers.StableDiffusionPipeline(**components)
        for auto in (diffusers.AutoPipelineForImage2Image, diffusers.AutoPipelineForInpainting):
            assert auto.from_pipe(pipe).unet is pipe.unet

    def test_other_classes_accept_it_as_an_argument(self, components):
        pipe = diffusers.StableDiffusionPipeline(**components)
        again = diffusers.StableDiffusionImg2ImgPipeline.from_pipe(pipe, unet=pipe.unet)
        assert again.unet is pipe.unet
        draw(again, image=PICTURE)

    def test_other_classes_need_it_as_an_argument(self, components):
        pipe = diffusers.StableDiffusionPipeline(**components)
        with pytest.raises(ValueError, match=r"expected .*'unet'.* but only"):
            diffusers.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
