"""What is asked wrongly is met with one sentence that names what was given and what is accepted."""

import diffusers
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from safetensors.torch import load_file

from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline,
    ScaleLongTextToImagePipeline,
    ScaleLongUnconditionalPipeline,
    load_pipeline,
)


@pytest.fixture
def pipes(build, quiet, tiny_clip):
    """A pipeline of each kind, and one of classes without names and null class."""
    text_encoder, tokenizer = tiny_clip
    unet_of_classes = build("UNet2DModel", "classes")
    names = ["cat", "dog", "bird", "horse"]
    return {
        "nothing": quiet(ScaleLongUnconditionalPipeline, build("UNet2DModel", "nothing"), DDIMScheduler()),
        "classes": quiet(
            ScaleLongClassConditionalPipeline, unet_of_classes, DDIMScheduler(), class_names=names, null_class=4
        ),
        "plain classes": quiet(ScaleLongClassConditionalPipeline, unet_of_classes, DDIMScheduler()),
        "text": quiet(
            ScaleLongTextToImagePipeline, build("UViTModel", "text"), DDIMScheduler(), text_encoder, tokenizer
        ),
        "embeds": quiet(ScaleLongTextToImagePipeline, build("UViTModel", "text"), DDIMScheduler()),
    }


GENERATOR = torch.Generator()
CALLS = {
    "an unknown class": ("classes", ["hrse"], {}, "unknown class 'hrse' (did you mean 'horse'?); accepted: cat, dog,"),
    "a name where there are none": ("plain classes", ["cat"], {}, "class 'cat' was given by name, but this pipeline"),
    "an id out of range": ("classes", [7], {}, "class 7 is out of range; accepted: 0..3 (or 4, no class)"),
    "an id out of range without null": ("plain classes", [-1], {}, "class -1 is out of range; accepted: 0..4"),
    "a class that is none": ("classes", [1.5], {}, "a class is given by its number or its name, got 1.5"),
    "a bool": ("classes", [True], {}, "a class is given by its number or its name, got True"),
    "no class": ("classes", [[]], {}, "class_labels is empty; give at least one class"),
    "no text": ("text", [3], {}, "prompt must be text or a list of texts, got 3"),
    "a list with no text": ("text", [["a", None]], {}, "prompt must be text or a list of texts, got ['a', None]"),
    "an empty list": ("text", [[]], {}, "prompt is an empty list; give at least one text"),
    "nothing at all": ("text", [], {}, "give either prompt or prompt_embeds; neither was given"),
    "both": ("text", ["a"], {"prompt_embeds": torch.zeros(1, 12, 16)}, "prompt or prompt_embeds; both were given"),
    "no encoder": ("embeds", ["a"], {}, "a prompt needs the component text_encoder, which this pipeline lacks"),
    "embeds of another width": (
        "text", [], {"prompt_embeds": torch.zeros(1, 12, 8)}, "(prompts, tokens, 16), got (1, 12, 8)",
    ),
    "negative prompts that do not match": (
        "text", [["a", "b", "c"]], {"negative_prompt": ["a", "b"]}, "got (2, 12, 16) for prompts of (3, 12, 16)",
    ),
    "guidance below 0": (
        "text", ["a"], {"guidance_scale": -1}, "guidance_scale must be a number of at least 0 (1 is no guidance), got",
    ),
    "guidance that is no number": ("classes", [0], {"guidance_scale": "4"}, "guidance_scale must be a number of at l"),
    "guidance of nan": ("classes", [0], {"guidance_scale": float("nan")}, "guidance_scale must be a number of at lea"),
    "rescaling": ("classes", [0], {"guidance_rescale": 1.5}, "guidance_rescale must be a number in [0, 1], got 1.5"),
    "guidance without a null class": (
        "plain classes", [0], {"guidance_scale": 4}, "guidance_scale=4 needs a null class, and this pipeline has none",
    ),
    "a size": ("nothing", [], {"height": 15}, "whose images are multiples of 2 pixels; the nearest: 14 or 16"),
    "a small size": ("nothing", [], {"width": 1}, "width=1 does not fit this model, whose images are multiples of 2"),
    "a size of a U-ViT": ("text", ["a"], {"width": 9}, "width=9 does not fit this model, whose images are multiples"),
    "a size that is none": ("nothing", [], {"height": 8.0}, "height must be a whole number of at least 1, got 8.0"),
    "too few generators": (
        "classes", [[0, 1]], {"generator": [GENERATOR]}, "has one for each image: 2 are needed, got 1",
    ),
    "too many generators": (
        "text", ["a"], {"generator": [GENERATOR] * 3, "num_images_per_prompt": 2}, "2 are needed, got 3",
    ),
    "a seed for a generator": ("nothing", [], {"generator": 0}, "generator must be a torch.Generator or a list of th"),
    "no generator in a list": ("nothing", [], {"generator": [None]}, "generator must be a torch.Generator or a list"),
    "latents": ("nothing", [2], {"latents": torch.zeros(1, 3, 8, 8)}, "latents must be of shape (2, 3, 8, 8), got (1"),
    "latents of other dimensions": ("nothing", [], {"latents": torch.zeros(3, 8, 8)}, "latents must be of shape (1,"),
    "no images": ("nothing", [0], {}, "batch_size must be a whole number of at least 1, got 0"),
    "images of a prompt": ("text", ["a"], {"num_images_per_prompt": 0}, "num_images_per_prompt must be a whole numbe"),
    "latents that are no tensor": ("nothing", [], {"latents": [[0.0]]}, "latents must be a tensor, got a list"),
    "embeds that are no tensor": (
        "text", [], {"prompt_embeds": [[0.0]]}, "prompt_embeds must be a tensor, got a list",
    ),
    "guidance without an encoder": (
        "embeds", [], {"prompt_embeds": torch.zeros(1, 12, 16)}, "give negative_prompt_embeds, or guidance_scale=1",
    ),
    "steps": ("nothing", [], {"num_inference_steps": 0}, "num_inference_steps must be a whole number of at least 1,"),
    "timesteps and sigmas": (
        "nothing", [], {"timesteps": [1], "sigmas": [1.0]}, "timesteps and sigmas were both given; the scheduler take",
    ),
    "timesteps": ("nothing", [], {"timesteps": [1]}, "DDIMScheduler takes no timesteps of one's own; give num_infere"),
    "an output type": ("nothing", [], {"output_type": "jpg"}, "output_type must be one of pil, np, pt, latent, got '"),
    "a tensor for the callback": (
        "text", ["a"], {"callback_on_step_end_tensor_inputs": ["noise"]}, "may be of latents, prompt_embeds; got 'noi",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call(pipes, name):
    kind, args, kwargs, message = CALLS[name]
    with pytest.raises((ValueError, TypeError)) as error:
        pipes[kind](*args, **kwargs)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


class TestSchedulers:
    REFUSED = {
        "RePaintScheduler": ({}, "RePaintScheduler does not fit: each step of it also needs original_image, mask"),
        "VQDiffusionScheduler": (
            {"num_vec_classes": 4},
            "VQDiffusionScheduler does not fit: it has no scale_model_input",
        ),
        "ScoreSdeVeScheduler": ({}, "ScoreSdeVeScheduler does not fit: it has no step; DDIMScheduler, for one, fits"),
        "FlowMatchEulerDiscreteScheduler": (
            {},
            "FlowMatchEulerDiscreteScheduler does not fit: it has no scale_model_inp",
        ),
        "DDPMScheduler": (
            {"variance_type": "learned"},
            "variance_type='learned', but this model predicts no variance",
        ),
    }

    @pytest.mark.parametrize("name", REFUSED)
    def test_one_that_does_not_fit_is_named(self, pipes, name):
        config, message = self.REFUSED[name]
        scheduler = getattr(diffusers, name)(**config)
        with pytest.raises(ValueError, match=r"does not fit|predicts no variance") as error:
            ScaleLongUnconditionalPipeline(pipes["nothing"].unet, scheduler)
        assert message in str(error.value)
        pipes["nothing"].scheduler = scheduler
        with pytest.raises(ValueError, match=r"does not fit|predicts no variance"):
            pipes["nothing"]()

    def test_one_that_would_cut_latents_to_three_channels(self, build):
        unet = build("UNet2DModel", "nothing", in_channels=4, out_channels=8)
        scheduler = diffusers.DPMSolverMultistepScheduler(variance_type="learned_range")
        with pytest.raises(ValueError, match=r"drops all but 3 channels, and this model has 4"):
            ScaleLongUnconditionalPipeline(unet, scheduler)

    def test_what_is_no_scheduler(self, pipes):
        with pytest.raises(TypeError, match=r"scheduler must be a scheduler of diffusers, got 'ddim'"):
            ScaleLongUnconditionalPipeline(pipes["nothing"].unet, "ddim")


class TestComponents:
    def test_a_model_of_another_condition_is_met_with_the_pipeline_for_it(self, build):
        unets = {c: build("UViTModel", c) for c in ("nothing", "classes", "text")}
        for pipeline_class, unet, right in (
            (ScaleLongUnconditionalPipeline, unets["classes"], "ScaleLongClassConditionalPipeline"),
            (ScaleLongUnconditionalPipeline, unets["text"], "ScaleLongTextToImagePipeline"),
            (ScaleLongClassConditionalPipeline, unets["nothing"], "ScaleLongUnconditionalPipeline"),
            (ScaleLongTextToImagePipeline, unets["classes"], "ScaleLongClassConditionalPipeline"),
        ):
            with pytest.raises(ValueError, match=rf"and this UViTModel takes .*; take {right}"):
                pipeline_class(unet, DDIMScheduler())

    def test_a_unet_of_sdxl_is_met_with_what_it_needs_beside_text(self, build):
        addition = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 64,
        }
        unet = build("UNet2DConditionModel", "text", **addition)
        with pytest.raises(
            ValueError, match=r"takes added_cond_kwargs \(addition_embed_type='text_time'\), encoder_hid"
        ):
            ScaleLongTextToImagePipeline(unet, DDIMScheduler())

    def test_what_is_no_unet(self):
        with pytest.raises(TypeError, match=r"needs a U-Net of diffusers or a model of scalelong_diffusers as unet"):
            ScaleLongUnconditionalPipeline(torch.nn.Linear(1, 1), DDIMScheduler())
        with pytest.raises(TypeError, match=r"as unet, got None"):
            ScaleLongUnconditionalPipeline(None, DDIMScheduler())

    def test_a_text_encoder_of_another_width(self, build, tiny_clip):
        unet = build("UViTModel", "text", cross_attention_dim=24)
        with pytest.raises(ValueError, match=r"hidden states are 16 wide, but this UViTModel takes 24"):
            ScaleLongTextToImagePipeline(unet, DDIMScheduler(), *tiny_clip)

    def test_a_model_whose_output_is_of_another_kind(self, build):
        unet = build("UNet2DModel", "nothing", in_channels=4, out_channels=3)
        with pytest.raises(ValueError, match=r"in_channels=4 and out_channels=3; accepted: 4, or 8 with a variance"):
            ScaleLongUnconditionalPipeline(unet, DDIMScheduler())

    def test_a_vae_of_other_latents(self, build, tiny_vae):
        unet = build("UNet2DModel", "nothing")
        with pytest.raises(ValueError, match=r"the vae's latents have 4 channels, but this UNet2DModel takes 3"):
            ScaleLongUnconditionalPipeline(unet, DDIMScheduler(), vae=tiny_vae)

    @pytest.mark.parametrize("scale", [0, -1.0, "0.18"])
    def test_a_scale_of_latents(self, build, scale):
        with pytest.raises(ValueError, match=r"latent_scale must be a number above 0, or None"):
            ScaleLongUnconditionalPipeline(build("UViTModel", "nothing"), DDIMScheduler(), latent_scale=scale)

    def test_a_model_without_a_size_of_its_own(self, build, quiet):
        pipe = quiet(
            ScaleLongUnconditionalPipeline, build("UNet2DModel", "nothing", sample_size=None), DDIMScheduler()
        )
        with pytest.raises(ValueError, match=r"height and width must be given: the UNet2DModel has no sample_size"):
            pipe(num_inference_steps=1)
        assert pipe(num_inference_steps=1, height=8, width=10).images[0].size == (10, 8)

    @pytest.mark.parametrize("null_class", [0, 5, True, "none"])
    def test_a_null_class_that_is_not_the_last(self, build, null_class):
        with pytest.raises(
            ValueError, match=r"null_class must be the last class, 4 for num_class_embeds=5, or None; got"
        ):
            ScaleLongClassConditionalPipeline(build("UViTModel", "classes"), DDIMScheduler(), null_class=null_class)

    @pytest.mark.parametrize("names", [["a", "b"], {"0": "a", "7": "b"}, list("abcdef")])
    def test_names_that_are_not_those_of_the_classes(self, build, names):
        with pytest.raises(ValueError, match=r"class_names must name the classes 0\.\.4 of the model"):
            ScaleLongClassConditionalPipeline(build("UViTModel", "classes"), DDIMScheduler(), class_names=names)

    @pytest.mark.parametrize("names", ["abcde", [1, 2, 3, 4, 5], 5, {"a"}])
    def test_names_that_are_no_texts(self, build, names):
        with pytest.raises(TypeError, match=r"class_names must be "):
            ScaleLongClassConditionalPipeline(build("UViTModel", "classes"), DDIMScheduler(), class_names=names)


class TestFolders:
    @pytest.fixture
    def folder(self, build, tmp_path):
        ScaleLongUnconditionalPipeline(build("UViTModel", "nothing"), DDPMScheduler()).save_pretrained(
            tmp_path / "pipe"
        )
        return tmp_path / "pipe"

    LOADERS = [ScaleLongUnconditionalPipeline.from_pretrained, load_pipeline]

    @pytest.mark.parametrize("load", LOADERS, ids=["class", "load_pipeline"])
    def test_a_folder_that_is_no_pipeline(self, load, folder):
        with pytest.raises(
            ValueError, match=r"unet is no pipeline: it has no model_index.json; a pipeline is what its"
        ):
            load(folder / "unet")

    @pytest.mark.parametrize("load", LOADERS, ids=["class", "load_pipeline"])
    def test_a_damaged_index(self, load, folder):
        (folder / "model_index.json").write_text("{")
        with pytest.raises(ValueError, match=r"model_index.json is not valid JSON"):
            load(folder)

    @pytest.mark.parametrize("load", LOADERS, ids=["class", "load_pipeline"])
    def test_an_index_that_names_no_class(self, load, folder):
        (folder / "model_index.json").write_text("{}")
        with pytest.raises(ValueError, match=r"is no pipeline: its model_index.json has no _class_name"):
            load(folder)

    def test_a_pipeline_without_the_component(self, folder):
        index = folder / "model_index.json"
        index.write_text(index.read_text().replace('"unet"', '"transformer"'))
        message = "has no component unet, which ScaleLongUnconditionalPipeline needs; it has scheduler, transformer"
        with pytest.raises(ValueError, match=message):
            ScaleLongUnconditionalPipeline.from_pretrained(folder)

    def test_a_component_that_was_not_copied(self, folder):
        (folder / "scheduler" / "scheduler_config.json").unlink()
        (folder / "scheduler").rmdir()
        with pytest.raises(
            ValueError, match=r"is not whole: its model_index.json names scheduler, and there is no such"
        ):
            load_pipeline(folder)

    @pytest.mark.parametrize("load", LOADERS, ids=["class", "load_pipeline"])
    @pytest.mark.parametrize("kept", [0, 7, 5000])
    def test_a_half_downloaded_file(self, load, folder, kept):
        weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:kept])
        with pytest.raises(
            OSError, match=r"are damaged, or were not downloaded to their end .*: save or copy it again"
        ):
            load(folder)

    @pytest.mark.parametrize("load", LOADERS, ids=["class", "load_pipeline"])
    def test_half_of_a_file_of_torch(self, load, folder):
        safetensors = folder / "unet" / "diffusion_pytorch_model.safetensors"
        weights = safetensors.with_suffix(".bin")
        torch.save({**load_file(safetensors), "unused": torch.zeros(100_000)}, weights)
        safetensors.unlink()
        weights.write_bytes(weights.read_bytes()[:-300])
        with pytest.raises(OSError, match=r"the weights in .* are damaged, or were not downloaded to their end"):
            load(folder)

    def test_a_half_downloaded_text_encoder(self, build, tiny_clip, tmp_path):
        ScaleLongTextToImagePipeline(build("UViTModel", "text"), DDIMScheduler(), *tiny_clip).save_pretrained(tmp_path)
        weights = tmp_path / "text_encoder" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        with pytest.raises(OSError, match=r"are damaged, or were not downloaded to their end"):
            load_pipeline(tmp_path)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_a_half_downloaded_tokenizer(self, build, tiny_clip, tmp_path, name):
        ScaleLongTextToImagePipeline(build("UViTModel", "text"), DDIMScheduler(), *tiny_clip).save_pretrained(tmp_path)
        file = tmp_path / "tokenizer" / name
        file.write_bytes(file.read_bytes()[:50])
        with pytest.raises(OSError, match=r"^the JSON files in .* are damaged, or were not downloaded to their end"):
            load_pipeline(tmp_path)

    def test_what_is_neither_a_folder_nor_an_id(self):
        with pytest.raises(ValueError, match=r"/no/such/folder is neither a local folder nor a repository on the Hub"):
            load_pipeline("/no/such/folder")

    def test_a_hub_that_can_not_be_reached(self):
        with pytest.raises(
            OSError, match=r"someone/model is no local folder, and the Hub can not be reached to look for"
        ):
            load_pipeline("someone/model")
