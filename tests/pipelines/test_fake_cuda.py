"""Sampling on a device whose values cannot be read: no device mismatches, and no synchronization between the steps."""

import copy

import diffusers
import pytest
import torch
from diffusers import DDIMScheduler
from fake_cuda import DEVICE, fake_cuda
from torch._subclasses.fake_tensor import DataDependentOutputException

from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline,
    ScaleLongTextToImagePipeline,
    ScaleLongUnconditionalPipeline,
)
from scalelong_diffusers.pipelines import base


SCHEDULERS = [
    "DDIMScheduler", "DDPMScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler",
    "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "UniPCMultistepScheduler", "HeunDiscreteScheduler",
    "LCMScheduler", "TCDScheduler", "PNDMScheduler", "DEISMultistepScheduler",
]  # fmt: skip


@pytest.fixture
def unchecked(monkeypatch):
    """Skip the check of the generated images, the only code that reads values on the device during sampling."""
    monkeypatch.setattr(base, "check_finite", lambda tensor: None)


def sample(pipe, *args, output_type="pt", **kwargs):
    """Return the images of two steps of a copy of the pipeline on the fake device."""
    pipe = copy.deepcopy(pipe)
    with fake_cuda():
        pipe.to(DEVICE)
        kwargs = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(0), **kwargs}
        return pipe(*args, output_type=output_type, **kwargs).images


def check_images(images, *shape):
    assert images.shape == shape
    assert images.device == DEVICE


@pytest.mark.usefixtures("unchecked")
class TestPipelines:
    def test_unconditional(self, model_of_nothing, quiet):
        pipe = quiet(ScaleLongUnconditionalPipeline, model_of_nothing, DDIMScheduler())
        check_images(sample(pipe, 2, eta=0.5), 2, 3, 8, 8)

    def test_class_conditional_with_guidance(self, model_of_classes, quiet):
        pipe = quiet(ScaleLongClassConditionalPipeline, model_of_classes, DDIMScheduler(), null_class=4)
        check_images(sample(pipe, [0, 3], guidance_scale=3, guidance_rescale=0.5), 2, 3, 8, 8)

    def test_text_to_image_with_guidance_and_vae(self, build, quiet, tiny_clip, tiny_vae):
        unet = build("UViTModel", "text", in_channels=4)
        pipe = quiet(ScaleLongTextToImagePipeline, unet, DDIMScheduler(), *tiny_clip, vae=tiny_vae)
        check_images(sample(pipe, ["a red circle", "a"], guidance_scale=3, negative_prompt="red"), 2, 3, 16, 16)
        check_images(sample(pipe, "a", guidance_scale=3, output_type="latent"), 1, 4, 8, 8)

    def test_all_schedulers(self, build, quiet):
        unet = build("UViTModel", "nothing")
        for name in SCHEDULERS:
            pipe = quiet(ScaleLongUnconditionalPipeline, unet, getattr(diffusers, name)())
            check_images(sample(pipe, num_inference_steps=4), 1, 3, 8, 8)

    def test_learned_variance(self, build, quiet):
        unet = build("UNet2DModel", "nothing", out_channels=6)
        scheduler = diffusers.DDPMScheduler(variance_type="learned_range")
        check_images(sample(quiet(ScaleLongUnconditionalPipeline, unet, scheduler)), 1, 3, 8, 8)


def test_reading_a_value_on_the_device_is_noticed(build, quiet):
    pipe = quiet(ScaleLongUnconditionalPipeline, build("UNet2DModel", "nothing"), DDIMScheduler())
    with pytest.raises(DataDependentOutputException):
        sample(pipe)


def test_a_tensor_on_the_wrong_device_is_noticed(build, quiet, unchecked):
    pipe = quiet(ScaleLongUnconditionalPipeline, build("UNet2DModel", "nothing"), DDIMScheduler())
    pipe.unet.register_forward_pre_hook(lambda module, args: (args[0] + torch.ones(8, 8), *args[1:]))
    with pytest.raises(RuntimeError, match=r"same device|different devices"):
        sample(pipe)
