"""Text-to-image sampling: encoding, truncation and guidance, and images equal to Stable Diffusion's."""

import logging

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler

from scalelong_diffusers import ScaleLongTextToImagePipeline, apply_skip_scaling


@pytest.fixture
def text(tiny_clip):
    return dict(zip(("text_encoder", "tokenizer"), tiny_clip))


@pytest.fixture
def pipe(build, quiet, text):
    return quiet(ScaleLongTextToImagePipeline, build("UViTModel", "text"), DDIMScheduler(), **text)


def draw(pipe, prompt, generators, **kwargs):
    return pipe(prompt, num_inference_steps=2, generator=generators, output_type="pt", **kwargs).images


@pytest.mark.parametrize("scheduler", [DDIMScheduler, DPMSolverMultistepScheduler])
@pytest.mark.parametrize("guidance", [1.0, 7.5])
@pytest.mark.parametrize("skip_scaling", [None, "cs"])
def test_equals_stable_diffusion(tiny_stable_diffusion, quiet, generators, scheduler, guidance, skip_scaling):
    stock = tiny_stable_diffusion
    stock.set_progress_bar_config(disable=True)
    stock.scheduler = scheduler()
    if skip_scaling:
        apply_skip_scaling(stock, skip_scaling)
    components = {k: v for k, v in stock.components.items() if k in ("vae", "text_encoder", "tokenizer", "unet")}
    ours = quiet(ScaleLongTextToImagePipeline, scheduler=scheduler(), **components)
    arguments = {
        "prompt": ["a red circle", "a circle"],
        "negative_prompt": ["red", "a"],
        "guidance_scale": guidance,
        "guidance_rescale": 0.3,
        "num_images_per_prompt": 2,
        "num_inference_steps": 3,
        "output_type": "np",
    }
    expected = stock(**arguments, generator=generators(0)[0]).images
    drawn = ours(**arguments, generator=generators(0)[0]).images
    assert drawn.shape == (4, 16, 16, 3)
    np.testing.assert_allclose(drawn, expected, rtol=0, atol=1e-5)


def test_different_prompts_give_different_images(model_of_text, quiet, text, generators):
    pipe = quiet(ScaleLongTextToImagePipeline, model_of_text, DDIMScheduler(), **text)
    one, other = draw(pipe, ["a red circle", "xyz"], generators(0, 0))
    assert not torch.allclose(one, other, atol=1e-4)


def test_pads_text_to_the_full_length(pipe, generators, count_calls):
    calls = count_calls(pipe.unet)
    draw(pipe, "a", generators(0), guidance_scale=1)
    given = calls.inputs[0][1]["encoder_hidden_states"]
    ids = pipe.tokenizer("a", padding="max_length", max_length=12, return_tensors="pt").input_ids
    assert ids.shape == (1, 12)
    with torch.no_grad():
        torch.testing.assert_close(given, pipe.text_encoder(ids)[0])


def test_guides_away_from_the_empty_text(pipe, generators, count_calls):
    calls = count_calls(pipe.unet)
    expected = draw(pipe, "a red circle", generators(0), guidance_scale=3)
    assert len(calls) == 2, "each step needs one call"
    assert torch.equal(draw(pipe, "a red circle", generators(0), guidance_scale=3, negative_prompt=""), expected)
    guided, unguided = (draw(pipe, "", generators(0), guidance_scale=scale) for scale in (3, 1))
    torch.testing.assert_close(guided, unguided)


class TestLongText:
    def test_warns_about_truncated_text(self, pipe, generators, caplog):
        long = "a red circle " + "a red circle " * 2 + "red red a circle"
        with caplog.at_level(logging.WARNING, logger="scalelong_diffusers"):
            cut = draw(pipe, [long, "a red circle", long], generators(0, 1, 2))
        (record,) = [record for record in caplog.records if record.name.startswith("scalelong_diffusers")]
        assert "a prompt of 15 tokens is cut to 12" in record.getMessage()
        assert record.getMessage().endswith("this part is lost: 'red a circle'")
        kept = "a red circle a red circle a red circle red"
        assert torch.equal(cut[0], draw(pipe, kept, generators(0))[0])

    def test_the_limit_is_the_minimum_of_tokenizer_encoder_and_model(self, build, quiet, text, caplog):
        unet = build("UViTModel", "text", context_length=5)
        text["tokenizer"].model_max_length = 10**9  # the default of a tokenizer without a limit
        pipe = quiet(ScaleLongTextToImagePipeline, unet, DDIMScheduler(), **text)
        with caplog.at_level(logging.WARNING, logger="scalelong_diffusers"):
            embeds, _ = pipe.encode_prompt("a red circle red")
        assert embeds.shape == (1, 5, 16)
        assert "cut to 5" in caplog.text
        assert "'red'" in caplog.text

    def test_does_not_warn_about_text_that_fits(self, pipe, generators, caplog):
        draw(pipe, "a red circle a red circle a red", generators(0))
        assert not [record for record in caplog.records if record.name.startswith("scalelong_diffusers")]


class TestEmbeds:
    def test_replace_prompts(self, pipe, build, quiet, generators):
        embeds, negative = pipe.encode_prompt(["a red circle"], "red")
        expected = draw(pipe, "a red circle", generators(0), negative_prompt="red")
        without_encoder = quiet(ScaleLongTextToImagePipeline, pipe.unet, DDIMScheduler())
        drawn = draw(without_encoder, None, generators(0), prompt_embeds=embeds, negative_prompt_embeds=negative)
        assert torch.equal(drawn, expected)

    def test_saves_and_loads_a_pipeline_without_a_text_encoder(self, pipe, generators, tmp_path):
        embeds, negative = pipe.encode_prompt("a red circle")
        expected = draw(pipe, "a red circle", generators(0))
        ScaleLongTextToImagePipeline(pipe.unet, DDIMScheduler()).save_pretrained(tmp_path)
        again = ScaleLongTextToImagePipeline.from_pretrained(tmp_path)
        drawn = draw(again, None, generators(0), prompt_embeds=embeds, negative_prompt_embeds=negative)
        torch.testing.assert_close(drawn, expected)

    def test_can_be_changed_by_a_callback(self, pipe, generators, count_calls):
        calls = count_calls(pipe.unet)
        draw(
            pipe,
            "a",
            generators(0),
            callback_on_step_end=lambda pipe, step, t, tensors: {"prompt_embeds": tensors["prompt_embeds"] * 0},
            callback_on_step_end_tensor_inputs=["prompt_embeds"],
        )
        assert calls.inputs[0][1]["encoder_hidden_states"].abs().max() > 0
        assert calls.inputs[1][1]["encoder_hidden_states"].abs().max() == 0
