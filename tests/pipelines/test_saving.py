"""Saving and loading pipelines, and sharing, moving and compiling their components."""

import json

import accelerate
import diffusers
import pytest
import torch
from diffusers import (
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DiffusionPipeline,
    StableDiffusionPipeline,
)

from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline,
    ScaleLongTextToImagePipeline,
    ScaleLongUnconditionalPipeline,
    apply_skip_scaling,
    load_pipeline,
    skip_connections,
)


@pytest.fixture
def classes(build, quiet):
    unet = build("scaled UNet2DModel", "classes")
    names = ["cat", "dog", "bird", "horse"]
    return quiet(ScaleLongClassConditionalPipeline, unet, DDIMScheduler(), class_names=names, null_class=4)


@pytest.fixture
def text(build, quiet, tiny_clip, tiny_vae):
    unet = build("UViTModel", "text", in_channels=4)
    return quiet(ScaleLongTextToImagePipeline, unet, DDIMScheduler(), *tiny_clip, vae=tiny_vae, latent_scale=0.23)


def draw(pipe, *args, **kwargs):
    generator = torch.Generator().manual_seed(0)
    return pipe(*args, num_inference_steps=2, generator=generator, output_type="pt", **kwargs).images


RELOAD = """
import json
import sys
import diffusers
import torch

torch.set_num_threads(1)
folder = sys.argv[1]
try:
    diffusers.StableDiffusionPipeline.from_pretrained(f"{folder}/sd cs")
except Exception as error:
    print(json.dumps({"without the package": str(error)}))

import scalelong_diffusers

LOADERS = {
    "classes": [scalelong_diffusers.ScaleLongClassConditionalPipeline.from_pretrained],
    "text": [scalelong_diffusers.ScaleLongTextToImagePipeline.from_pretrained, scalelong_diffusers.load_pipeline],
    "sd cs": [diffusers.StableDiffusionPipeline.from_pretrained, diffusers.DiffusionPipeline.from_pretrained],
    "sd ls": [diffusers.StableDiffusionPipeline.from_pretrained, diffusers.DiffusionPipeline.from_pretrained],
    "ddpm": [diffusers.DDPMPipeline.from_pretrained, diffusers.DiffusionPipeline.from_pretrained],
}
ARGUMENTS = json.load(open(f"{folder}/arguments.json"))
for name, loaders in LOADERS.items():
    for load in loaders:
        pipe = load(f"{folder}/{name}")
        pipe.set_progress_bar_config(disable=True)
        images = torch.from_numpy(pipe(**ARGUMENTS[name], generator=torch.Generator().manual_seed(0)).images)
        difference = (images - torch.load(f"{folder}/{name}.pt")).abs().max().item()
        found = [type(pipe).__name__, type(pipe.unet).__name__, str(scalelong_diffusers.skip_connections(pipe))]
        print(json.dumps({name: [*found, difference < 1e-5]}))
"""


@pytest.mark.slow
def test_saved_pipelines_give_the_same_images_in_a_fresh_process(
    classes, text, tiny_stable_diffusion, ddpm, quiet, in_fresh_process, tmp_path
):
    arguments, expected = {}, []

    def save(name, pipe, loaders=2, **inputs):
        pipe.save_pretrained(tmp_path / name)
        pipe.set_progress_bar_config(disable=True)
        arguments[name] = {**inputs, "num_inference_steps": 2, "output_type": "np"}
        images = pipe(**arguments[name], generator=torch.Generator().manual_seed(0)).images
        torch.save(torch.from_numpy(images), tmp_path / f"{name}.pt")
        found = [type(pipe).__name__, type(pipe.unet).__name__, str(skip_connections(pipe)), True]
        expected.extend([{name: found}] * loaders)

    save("classes", classes, loaders=1, class_labels="dog", guidance_scale=3)
    save("text", text, prompt="a red circle", guidance_scale=3)
    save("sd cs", apply_skip_scaling(tiny_stable_diffusion, "cs"), prompt="a red circle")
    ls = {"method": "ls", "reduction": 4, "shared": False, "init": "paper"}
    save("sd ls", apply_skip_scaling(tiny_stable_diffusion, ls), prompt="a red circle")
    save("ddpm", DDPMPipeline(unet=ddpm.build_scaled("cs"), scheduler=DDPMScheduler()))
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))

    without_package, *found = map(json.loads, in_fresh_process(RELOAD, tmp_path).stdout.splitlines())
    assert "import scalelong_diffusers before calling `from_pretrained`" in without_package["without the package"]
    assert found == expected


class TestLoading:
    def test_diffusion_pipeline_cannot_load_our_classes(self, classes, tmp_path):
        classes.save_pretrained(tmp_path)
        with pytest.raises(AttributeError, match="has no attribute ScaleLongClassConditionalPipeline"):
            DiffusionPipeline.from_pretrained(tmp_path)
        assert type(load_pipeline(tmp_path)) is ScaleLongClassConditionalPipeline

    def test_accepts_components(self, classes, tmp_path):
        classes.save_pretrained(tmp_path)
        scheduler = diffusers.EulerDiscreteScheduler()
        pipe = ScaleLongClassConditionalPipeline.from_pretrained(tmp_path, unet=classes.unet, scheduler=scheduler)
        assert pipe.unet is classes.unet
        assert pipe.scheduler is scheduler
        assert pipe.config.null_class == 4

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, text, dtype, tmp_path):
        text.save_pretrained(tmp_path)
        pipe = load_pipeline(tmp_path, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {dtype}
        images = draw(pipe, "a red circle", guidance_scale=3)
        assert images.dtype == dtype
        assert torch.isfinite(images).all()

    def test_variants(self, classes, tmp_path):
        classes.save_pretrained(tmp_path, variant="ema")
        assert (tmp_path / "unet" / "diffusion_pytorch_model.ema.safetensors").is_file()
        again = ScaleLongClassConditionalPipeline.from_pretrained(tmp_path, variant="ema")
        assert torch.equal(again.unet.conv_in.weight, classes.unet.conv_in.weight)

    def test_loads_a_stock_pipeline_into_ours(self, build, tiny_stable_diffusion, quiet, tmp_path):
        DDIMPipeline(build("scaled UNet2DModel", "nothing"), DDIMScheduler()).save_pretrained(tmp_path / "ddim")
        tiny_stable_diffusion.save_pretrained(tmp_path / "sd")
        unconditional = load_pipeline(tmp_path / "ddim")
        assert type(unconditional) is ScaleLongUnconditionalPipeline
        assert skip_connections(unconditional).config.method == "cs"
        assert type(load_pipeline(tmp_path / "sd")) is ScaleLongTextToImagePipeline

    def test_loads_ours_into_a_stock_pipeline(self, build, quiet, tmp_path):
        ours = quiet(ScaleLongUnconditionalPipeline, build("UViTModel", "nothing"), DDIMScheduler())
        ours.save_pretrained(tmp_path)
        stock = DDIMPipeline.from_pretrained(tmp_path)
        stock.set_progress_bar_config(disable=True)
        drawn = stock(num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images
        torch.testing.assert_close(torch.from_numpy(drawn[0]), draw(ours)[0].permute(1, 2, 0), rtol=0, atol=1e-5)


class TestSharing:
    def test_pipelines_share_components(self, text, quiet):
        again = quiet(ScaleLongTextToImagePipeline, **text.components, latent_scale=text.config.latent_scale)
        assert again.unet is text.unet
        assert torch.equal(draw(again, "a"), draw(text, "a"))

    def test_from_pipe_of_ours_keeps_the_config(self, classes):
        again = ScaleLongClassConditionalPipeline.from_pipe(classes)
        assert again.unet is classes.unet
        assert again.config.null_class == 4
        assert again.class_ids("horse") == [3]

    @pytest.mark.parametrize("scaled", [False, True])
    def test_from_pipe_between_stable_diffusion_and_ours(self, tiny_stable_diffusion, scaled):
        if scaled:
            apply_skip_scaling(tiny_stable_diffusion, "cs")
        ours = ScaleLongTextToImagePipeline.from_pipe(tiny_stable_diffusion)
        assert ours.unet is tiny_stable_diffusion.unet
        # The signature of a stock pipeline names only the plain class, so the U-Net is an argument.
        stock = StableDiffusionPipeline.from_pipe(
            ours, unet=ours.unet, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
        assert stock.unet is ours.unet
        for pipe in (tiny_stable_diffusion, ours, stock):
            pipe.set_progress_bar_config(disable=True)
        torch.testing.assert_close(draw(ours, "a red circle"), draw(stock, "a red circle"), rtol=0, atol=1e-5)

    def test_replaces_the_scheduler(self, classes):
        ddim = draw(classes, "dog")
        classes.scheduler = DDPMScheduler.from_config(classes.scheduler.config)
        assert not torch.allclose(draw(classes, "dog"), ddim, atol=1e-3)
        assert classes.config.scheduler == ("diffusers", "DDPMScheduler")


class TestDevices:
    def test_to_moves_every_model(self, text):
        text.to("meta")
        assert {text.unet.device.type, text.vae.device.type, text.text_encoder.device.type} == {"meta"}

    def test_to_a_dtype(self, text):
        text.to(torch.bfloat16)
        assert draw(text, "a red circle", guidance_scale=3).dtype == torch.bfloat16

    def test_sequential_offloading(self, text):
        """Offload as `enable_sequential_cpu_offload` does, with the CPU as the computing device."""
        expected = draw(text, "a red circle", guidance_scale=3)
        for model in (text.unet, text.vae, text.text_encoder):
            accelerate.cpu_offload(model, torch.device("cpu"))
        assert all(parameter.is_meta for parameter in text.unet.parameters())
        assert torch.equal(draw(text, "a red circle", guidance_scale=3), expected)

    def test_model_offloading(self, text):
        assert ScaleLongTextToImagePipeline.model_cpu_offload_seq == "text_encoder->unet->vae"
        expected = draw(text, "a red circle", guidance_scale=3)
        text.enable_model_cpu_offload(device="cpu")
        assert torch.equal(draw(text, "a red circle", guidance_scale=3), expected)

    def test_group_offloading(self, text):
        expected = draw(text, "a red circle", guidance_scale=3)
        text.unet.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
        assert torch.equal(draw(text, "a red circle", guidance_scale=3), expected)


class TestCompiling:
    @pytest.mark.parametrize("in_place", [True, False])
    def test_a_compiled_unet_gives_the_same_images_and_can_be_saved(self, text, in_place, tmp_path):
        expected = draw(text, "a red circle", guidance_scale=3)
        if in_place:
            text.unet.compile(backend="aot_eager", fullgraph=True)
        else:
            text.unet = torch.compile(text.unet, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(draw(text, "a red circle", guidance_scale=3), expected, rtol=0, atol=1e-5)
        text.save_pretrained(tmp_path)
        again = load_pipeline(tmp_path)
        again.set_progress_bar_config(disable=True)
        torch.testing.assert_close(draw(again, "a red circle", guidance_scale=3), expected, rtol=0, atol=1e-5)
