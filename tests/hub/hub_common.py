"""The tiny pipelines that the scripts in this folder push to a Hub and load from it."""

import json

import diffusers
import torch
from diffusers import DDIMPipeline, DDIMScheduler

from scalelong_diffusers import ScaleLongClassConditionalPipeline, ScaleLongUNet2DModel, UViTModel


diffusers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
RESULTS = {}


def unet(seed=0):
    torch.manual_seed(seed)
    return ScaleLongUNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        skip_scaling="cs",
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()


def classes(seed=0):
    torch.manual_seed(seed)
    model = UViTModel(
        sample_size=8,
        hidden_size=32,
        num_layers=4,
        num_attention_heads=2,
        num_class_embeds=4,
        skip_scaling={"method": "ls", "shared": True, "init": "paper"},
    )
    names = ["cat", "dog", "bird"]
    return ScaleLongClassConditionalPipeline(model.eval(), DDIMScheduler(), class_names=names, null_class=3)


def stock():
    return DDIMPipeline(unet(), DDIMScheduler())


def draw(pipe, *args, **kwargs):
    """Return a number that tells images apart."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    images = pipe(*args, **kwargs, num_inference_steps=2, generator=generator, output_type="np").images
    return round(float(abs(images - 0.5).sum()), 2)


def error_of(function):
    """Return the message of the error that a function raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def report():
    print(json.dumps(RESULTS))
