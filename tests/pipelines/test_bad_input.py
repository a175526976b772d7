"""Errors that users can cause: each is one line that names the value and what is accepted."""

import math

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from safetensors.torch import load_file

from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline,
    ScaleLongTextToImagePipeline,
    ScaleLongUnconditionalPipeline,
    UserError,
    load_pipeline,
)


NAMES = ["cat", "dog", "bird", "horse"]


@pytest.fixture
def pipes(build, quiet, tiny_clip):
    """A pipeline of each kind, one for classes without names and null class, and one without a text encoder."""
    classes, text = build("UNet2DModel", "classes"), build("UViTModel", "text")
    return {
        "nothing": quiet(ScaleLongUnconditionalPipeline, build("UNet2DModel", "nothing"), DDIMScheduler()),
        "classes": quiet(ScaleLongClassConditionalPipeline, classes, DDIMScheduler(), class_names=NAMES, null_class=4),
        "plain classes": quiet(ScaleLongClassConditionalPipeline, classes, DDIMScheduler()),
        "text": quiet(ScaleLongTextToImagePipeline, text, DDIMScheduler(), *tiny_clip),
        "embeds": quiet(ScaleLongTextToImagePipeline, text, DDIMScheduler()),
    }


GENERATOR = torch.Generator()
CALLS = [
    ("classes", ["hrse"], {}, "class 'hrse' is unknown (did you mean 'horse'?); accepted: 0..3 (or 4, no class), or"),
    ("plain classes", ["cat"], {}, "class 'cat' is unknown; accepted: 0..4"),
    ("classes", [7], {}, "class 7 is unknown; accepted: 0..3 (or 4, no class), or the names cat, dog, bird, horse"),
    ("plain classes", [-1], {}, "class -1 is unknown; accepted: 0..4"),
    ("classes", [1.5], {}, "class 1.5 is unknown; accepted: 0..3"),
    ("text", [], {}, "pass either prompt or prompt_embeds"),
    ("text", [[]], {}, "prompt must be a text or a list of texts, got []"),
    ("text", ["a"], {"negative_prompt": ["b", "c"]}, "one for each of the 1 prompts, got 2"),
    ("text", ["a"], {"prompt_embeds": torch.zeros(1, 12, 16)}, "pass either prompt or prompt_embeds, not both"),
    ("embeds", ["a"], {}, "has no text_encoder and tokenizer to encode prompt; pass prompt_embeds"),
    ("text", ["a"], {"guidance_scale": -1}, "guidance_scale must be a number, at least 0 and at most 1,000, got -1"),
    ("classes", [0], {"guidance_scale": float("nan")}, "guidance_scale must be a number, at least 0 and at most 1,0"),
    ("classes", [0], {"guidance_rescale": 1.5}, "guidance_rescale must be a number, at least 0 and at"),
    ("plain classes", [0], {"guidance_scale": 4}, "guidance_scale=4 needs a null class, but this pipeline has none"),
    ("nothing", [], {"height": 15}, "height must be a multiple of 2 (the nearest: 14 or 16), got 15"),
    ("nothing", [], {"width": 1}, "width must be a multiple of 2 (the nearest: 2), got 1"),
    ("text", ["a"], {"width": 9}, "width must be a multiple of 2 (the nearest: 8 or 10), got 9"),
    ("classes", [[0, 1]], {"generator": [GENERATOR]}, "one generator, or a list with one for each of the 2 images"),
    ("text", ["a"], {"generator": [GENERATOR] * 3, "num_images_per_prompt": 2}, "one for each of the 2 images"),
    ("nothing", [2], {"latents": torch.zeros(1, 3, 8, 8)}, "latents must have shape (2, 3, 8, 8), got (1"),
    ("nothing", [], {"latents": torch.zeros(3, 8, 8)}, "latents must have shape (1,"),
    ("nothing", [0], {}, "batch_size must be an integer, at least 1 and at most 1,000,000, got 0"),
    ("classes", [[]], {}, "batch_size must be at least 1, got 0"),
    ("text", ["a"], {"num_images_per_prompt": 0}, "num_images_per_prompt must be an integer, at least 1 and at most"),
    ("embeds", [], {"prompt_embeds": torch.zeros(1, 12, 16)}, "pass negative_prompt_embeds, or guidance_scale=1"),
    ("nothing", [], {"num_inference_steps": 0}, "num_inference_steps must be an integer, at least 1 and"),
    ("nothing", [], {"eta": -1}, "eta must be a number, at least 0 and at most 1, got -1"),
    ("nothing", [], {"timesteps": [1, 5]}, "timesteps must be numbers in descending order, got [1, 5]"),
    ("nothing", [], {"timesteps": [5, 5]}, "timesteps must be numbers in descending order, got [5, 5]"),
    ("nothing", [], {"timesteps": [1000]}, "timesteps must be below 1000, the scheduler's num_train_timesteps, got"),
    ("nothing", [], {"timesteps": []}, "timesteps must be numbers in descending order, got []"),
    ("classes", [0], {"timesteps": [5, -1]}, "timesteps must be a list of numbers, at least 0 and at"),
    ("nothing", [], {"sigmas": [0.1, 0.2]}, "sigmas must be numbers in descending order, got [0.1, 0.2]"),
    ("text", ["a"], {"sigmas": [math.inf]}, "sigmas must be a list of numbers, at least 0 and at most"),
    ("nothing", [], {"height": 0}, "height must be an integer, at least 1 and at most 65,536, got 0"),
    ("text", ["a"], {"width": 8.0}, "width must be an integer, at least 1 and at most 65,536, got 8.0"),
    ("nothing", [999], {"height": 65_536, "width": 65_536}, "999 images of 65536 x 65536 pixels would take at least "),
    ("nothing", [], {"sigmas": [1.0]}, "DDIMScheduler takes no sigmas: use another scheduler"),
    ("nothing", [], {"output_type": "jpg"}, "output_type must be one of ('pil', 'np', 'pt', 'latent'), got 'jpg'"),
    ("text", ["a"], {"callback_on_step_end_tensor_inputs": ["noise"]}, "must be among ['latents', 'prompt_embeds']"),
]  # fmt: skip


def test_rejects_wrong_arguments_of_a_call(pipes):
    for kind, args, kwargs, message in CALLS:
        with pytest.raises(UserError) as error:
            pipes[kind](*args, **kwargs)
        assert message in str(error.value)
        assert "\n" not in str(error.value)


class TestSchedulers:
    def test_rejects_a_variance_that_the_model_does_not_predict(self, pipes):
        scheduler = DDPMScheduler(variance_type="learned")
        with pytest.raises(UserError, match="variance_type='learned', but this model predicts no variance"):
            ScaleLongUnconditionalPipeline(pipes["nothing"].unet, scheduler)
        pipes["nothing"].scheduler = scheduler
        with pytest.raises(UserError, match="variance_type='learned', but this model predicts no variance"):
            pipes["nothing"]()

    def test_fails_with_schedulers_for_other_models(self, pipes):
        for name, config, message in (
            ("RePaintScheduler", {}, "missing 2 required positional arguments: 'original_image' and 'mask'"),
            ("VQDiffusionScheduler", {"num_vec_classes": 4}, "no attribute 'init_noise_sigma'"),
        ):
            pipes["nothing"].scheduler = getattr(diffusers, name)(**config)
            with pytest.raises((AttributeError, TypeError), match=message):
                pipes["nothing"]()

    @pytest.mark.parametrize(
        ("name", "limit"),
        [
            *(("DDPM", 20), ("DDIM", 20), ("EulerDiscrete", 20), ("HeunDiscrete", 20)),
            *(("DPMSolverMultistep", 19), ("UniPCMultistep", 19), ("DEISMultistep", 19)),
        ],
    )
    def test_limit_the_number_of_steps(self, pipes, name, limit):
        """DPM-Solver and UniPC returned NaN for as many steps as in training, and an IndexError for more."""
        pipe = pipes["nothing"]
        pipe.scheduler = getattr(diffusers, f"{name}Scheduler")(num_train_timesteps=20)
        assert np.isfinite(pipe(num_inference_steps=limit, output_type="np").images).all()
        for steps in (limit + 1, 21, 99):
            message = f"^num_inference_steps must be at most .* for this {name}Scheduler, got {steps}$"
            with pytest.raises(UserError, match=message):
                pipe(num_inference_steps=steps)

    def test_explain_other_limits(self, pipes):
        pipes["nothing"].scheduler = diffusers.LCMScheduler()
        with pytest.raises(UserError, match=r"^LCMScheduler cannot take num_inference_steps=60: .* 50 x 1\.0 is"):
            pipes["nothing"](num_inference_steps=60)

    def test_rejects_one_that_would_cut_latents_to_three_channels(self, build):
        unet = build("UNet2DModel", "nothing", in_channels=4, out_channels=8)
        scheduler = diffusers.DPMSolverMultistepScheduler(variance_type="learned_range")
        with pytest.raises(UserError, match=r"drops all but 3 channels, but this model has 4"):
            ScaleLongUnconditionalPipeline(unet, scheduler)


class TestComponents:
    def test_names_the_pipeline_for_a_model_with_another_condition(self, build):
        unets = {c: build("UViTModel", c) for c in ("nothing", "classes", "text")}
        for pipeline_class, unet, right in (
            (ScaleLongUnconditionalPipeline, unets["classes"], "ScaleLongClassConditionalPipeline"),
            (ScaleLongUnconditionalPipeline, unets["text"], "ScaleLongTextToImagePipeline"),
            (ScaleLongClassConditionalPipeline, unets["nothing"], "ScaleLongUnconditionalPipeline"),
            (ScaleLongTextToImagePipeline, unets["classes"], "ScaleLongClassConditionalPipeline"),
        ):
            with pytest.raises(UserError, match=rf"but this UViTModel takes .*; use {right}"):
                pipeline_class(unet, DDIMScheduler())

    def test_rejects_a_unet_of_sdxl(self, build):
        addition = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 64,
        }
        unet = build("UNet2DConditionModel", "text", **addition)
        with pytest.raises(
            UserError, match=r"takes added_cond_kwargs \(addition_embed_type='text_time'\), encoder_hid"
        ):
            ScaleLongTextToImagePipeline(unet, DDIMScheduler())

    def test_rejects_a_text_encoder_of_another_width(self, build, tiny_clip):
        unet = build("UViTModel", "text", cross_attention_dim=24)
        with pytest.raises(UserError, match=r"hidden states have width 16, but this UViTModel takes 24"):
            ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *tiny_clip)

    def test_rejects_channels_that_do_not_match(self, build, tiny_vae):
        unet = build("UNet2DModel", "nothing", in_channels=4, out_channels=3)
        with pytest.raises(UserError, match=r"in_channels=4 and out_channels=3; out_channels must be 4, or 8 with a"):
            ScaleLongUnconditionalPipeline(unet, DDIMScheduler())
        unet = build("UNet2DModel", "nothing")
        with pytest.raises(UserError, match=r"the vae's latents must have 3 channels, got 4"):
            ScaleLongUnconditionalPipeline(unet, DDIMScheduler(), vae=tiny_vae)

    def test_rejects_a_latent_scale_out_of_bounds(self, build, tiny_vae):
        unet = build("UViTModel", "nothing", in_channels=4)
        for scale in (1e-300, 0, math.inf):
            with pytest.raises(
                UserError, match=r"latent_scale must be a number, at least 0\.0001 and at most 10,000, got"
            ):
                ScaleLongUnconditionalPipeline(unet, DDIMScheduler(), vae=tiny_vae, latent_scale=scale)

    @pytest.mark.parametrize("size", ["8", [10**6, 8], 65_536, -8, 8.5])
    def test_rejects_an_absurd_size_in_a_config(self, build, quiet, size):
        unet = build("UNet2DModel", "nothing", sample_size=size)
        with pytest.raises(UserError, match=r"height must be an integer|65536 x 65536 pixels would take at least"):
            quiet(ScaleLongUnconditionalPipeline, unet, DDIMScheduler())(999, num_inference_steps=1)

    def test_needs_a_size_if_the_model_has_none(self, build, quiet):
        pipe = quiet(
            ScaleLongUnconditionalPipeline, build("UNet2DModel", "nothing", sample_size=None), DDIMScheduler()
        )
        with pytest.raises(UserError, match=r"pass height and width: this UNet2DModel has no sample_size"):
            pipe(num_inference_steps=1)
        assert pipe(num_inference_steps=1, height=8, width=10).images[0].size == (10, 8)

    def test_rejects_a_null_class_that_is_not_the_last(self, build):
        unet = build("UViTModel", "classes")
        for null_class in (0, 5, "none"):
            with pytest.raises(UserError, match=r"must be None or the last class \(4, as num_class_embeds=5\), got"):
                ScaleLongClassConditionalPipeline(unet, DDIMScheduler(), null_class=null_class)

    def test_rejects_class_names_that_do_not_match(self, build):
        unet = build("UViTModel", "classes")
        for names in (["a", "b"], {"0": "a", "7": "b"}, list("abcdef"), "abcde", {"a"}):
            with pytest.raises(UserError, match=r"class_names must be texts for the classes 0\.\.4 of the model"):
                ScaleLongClassConditionalPipeline(unet, DDIMScheduler(), class_names=names)


class TestFolders:
    @pytest.fixture
    def folder(self, build, tmp_path):
        pipe = ScaleLongUnconditionalPipeline(build("UViTModel", "nothing"), DDPMScheduler())
        pipe.save_pretrained(tmp_path / "pipe")
        return tmp_path / "pipe"

    @pytest.fixture
    def text_folder(self, build, tiny_clip, tmp_path):
        pipe = ScaleLongTextToImagePipeline(build("UViTModel", "text"), DDIMScheduler(), *tiny_clip)
        pipe.save_pretrained(tmp_path / "text")
        return tmp_path / "text"

    def check(self, folder, message):
        """Check the message of both ways to load a pipeline."""
        for load in (ScaleLongUnconditionalPipeline.from_pretrained, load_pipeline):
            with pytest.raises(UserError, match=message):
                load(folder)

    def test_rejects_a_folder_without_an_index(self, folder):
        self.check(
            folder / "unet",
            r"unet is not a pipeline: it has no model_index.json with a _class_name; a pipeline is a f",
        )

    def test_says_how_to_finish_an_unfinished_run(self, tmp_path):
        for step in (8, 78, 9):
            (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
        message = r"the training run is unfinished \(last checkpoint: checkpoint-78\); .* --resume_from_checkpoint lat"
        self.check(tmp_path / "run", message)

    def test_rejects_a_damaged_index(self, folder):
        (folder / "model_index.json").write_text("{")
        self.check(folder, r"model_index.json is not valid JSON")
        (folder / "model_index.json").write_text("[]")
        self.check(folder, r"model_index.json must hold a JSON object, got \[\]")
        (folder / "model_index.json").write_text("{}")
        self.check(folder, r"is not a pipeline: it has no model_index.json with a _class_name")

    def test_names_a_missing_component(self, folder):
        index = folder / "model_index.json"
        index.write_text(index.read_text().replace('"unet"', '"transformer"'))
        with pytest.raises(ValueError, match=r"expected .*'unet'.* but only"):
            load_pipeline(folder)

    def test_names_a_missing_folder(self, folder):
        (folder / "scheduler").rename(folder / "elsewhere")
        with pytest.raises(UserError, match=r"no file named scheduler_config.json found in directory"):
            load_pipeline(folder)

    @pytest.mark.parametrize("kept", [0, 7, 5000])
    def test_rejects_a_truncated_file(self, folder, kept):
        weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:kept])
        self.check(folder, r"are damaged or incompletely downloaded .*: save or copy it again")

    def test_rejects_a_truncated_pytorch_file(self, folder):
        safetensors = folder / "unet" / "diffusion_pytorch_model.safetensors"
        weights = safetensors.with_suffix(".bin")
        torch.save({**load_file(safetensors), "unused": torch.zeros(100_000)}, weights)
        safetensors.unlink()
        weights.write_bytes(weights.read_bytes()[:-300])
        self.check(folder, r"the weights in .* are damaged or incompletely downloaded \(not a complete PyTorch file\)")

    def test_rejects_a_truncated_text_encoder(self, text_folder):
        weights = text_folder / "text_encoder" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        with pytest.raises(UserError, match=r"the weights in .* are damaged or incompletely downloaded"):
            load_pipeline(text_folder)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_rejects_a_truncated_tokenizer(self, text_folder, name):
        file = text_folder / "tokenizer" / name
        file.write_bytes(file.read_bytes()[:50])
        with pytest.raises(UserError, match=rf"{name} is not valid JSON: "):
            load_pipeline(text_folder)

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            ('"<|startoftext|>"', '"<|startofdext|>"', "they do not belong together"),
            ('"model_max_length": 12', '"model_max_length": "1"', "integer model_max_length of at least 2, got '1'"),
        ],
    )
    def test_rejects_a_tokenizer_that_was_changed(self, text_folder, before, after, message):
        """The tokenizer would give token numbers that the text encoder does not have, or no tokens."""
        file = text_folder / "tokenizer" / "tokenizer_config.json"
        file.write_text(file.read_text().replace(before, after))
        with pytest.raises(UserError, match=message):
            load_pipeline(text_folder)

    def test_rejects_an_unknown_source(self):
        self.check("/no/such/folder", r"/no/such/folder is neither a local folder nor a Hub repository, whose ids")
        self.check("someone/model", r"someone/model is not a local folder, and the Hub cannot be reached")
