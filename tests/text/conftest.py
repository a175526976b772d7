"""Tiny but real pipelines of Stable Diffusion's kinds, with tokenizers made of captions."""

import diffusers
import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from scalelong_diffusers.text.small_clip import build_small_clip


CAPTIONS = ["a red circle", "a blue square on a table", "a green triangle"]
_NOTHING = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
_SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def small_clip(seed, width):
    torch.manual_seed(seed)
    return build_small_clip(CAPTIONS, width, num_layers=3, num_attention_heads=2, context_length=10)


def clip_with_projection(seed, width):
    """SDXL's second encoder."""
    plain, tokenizer = small_clip(seed, width)
    config = CLIPTextConfig(**{**plain.config.to_dict(), "projection_dim": 16})
    return CLIPTextModelWithProjection(config).eval(), tokenizer


def stable_diffusion(unet, vae, scheduler):
    text_encoder, tokenizer = small_clip(1, 16)
    return diffusers.StableDiffusionPipeline(vae, text_encoder, tokenizer, unet, scheduler, **_NOTHING)


def build_sd1(cases, vae):
    scheduler = diffusers.PNDMScheduler(**_SCHEDULE, skip_prk_steps=True)
    return stable_diffusion(cases["sd"].build(), vae, scheduler)


def build_sd2(cases, vae):
    scheduler = diffusers.DDIMScheduler(
        **_SCHEDULE, prediction_type="v_prediction", rescale_betas_zero_snr=True, clip_sample=False
    )
    return stable_diffusion(cases["sd"].build(use_linear_projection=True), vae, scheduler)


def build_sdxl(cases, vae):
    unet = cases["sdxl"].build(cross_attention_dim=24)
    (one, tokenizer), (two, tokenizer_2) = small_clip(1, 16), clip_with_projection(2, 8)
    scheduler = diffusers.EulerDiscreteScheduler(**_SCHEDULE)
    return diffusers.StableDiffusionXLPipeline(
        vae, one, two, tokenizer, tokenizer_2, unet, scheduler, add_watermarker=False
    )


KINDS = {"sd1": build_sd1, "sd2": build_sd2, "sdxl": build_sdxl}


@pytest.fixture
def build_kind(cases, tiny_vae):
    """`build_kind("sdxl")`: a pipeline with random weights, the same each time."""

    def build(kind):
        pipe = KINDS[kind](cases, tiny_vae)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return build


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def draw():
    """`draw(pipe)`: an image, from the same noise each time."""

    def run(pipe, prompt="a red circle"):
        generator = torch.Generator().manual_seed(0)
        return pipe(prompt, num_inference_steps=2, generator=generator, output_type="pt").images

    return run


@pytest.fixture
def predict():
    """`predict(pipe, arguments)`: what the U-Net says of the same latents each time."""

    def run(pipe, arguments):
        generator = torch.Generator().manual_seed(0)
        count = len(arguments["encoder_hidden_states"])
        latents = torch.randn(count, 4, 8, 8, generator=generator)
        with torch.no_grad():
            return pipe.unet(latents, torch.arange(count) * 300, **arguments).sample

    return run
