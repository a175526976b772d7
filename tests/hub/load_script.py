"""
Load what push_script.py pushed, in another process with an empty cache.

    python load_script.py online READER_TOKEN        also tries what users get wrong
    python load_script.py offline                    loads from the cache; then the Hub does not answer
"""

import logging
import subprocess
import sys
import time
from pathlib import Path

import diffusers
import huggingface_hub
import torch
from diffusers import DDIMPipeline, DDIMScheduler
from hub_common import RESULTS, classes, draw, error_of, report, unet
from huggingface_hub import hf_hub_download, model_info

from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline,
    ScaleLongUNet2DModel,
    load_adapter,
    load_pipeline,
)
from scalelong_diffusers.pipelines.text_encoding import load_text_encoder


ONLINE = sys.argv[1] == "online"
logging.basicConfig(level=logging.DEBUG)
diffusers.utils.logging.set_verbosity_debug()
pipes = [
    ScaleLongClassConditionalPipeline.from_pretrained("tester/classes", revision=revision)
    for revision in (None, "ema", "refs/pr/1")
]
RESULTS["images"] = [
    *(draw(pipe, "dog", guidance_scale=2) for pipe in pipes),
    draw(DDIMPipeline.from_pretrained("tester/stock")),
]
RESULTS["classes"] = [
    type(load_pipeline("tester/saved")).__name__,
    type(diffusers.DiffusionPipeline.from_pretrained("tester/stock")).__name__,
]
RESULTS["unet"] = draw(DDIMPipeline(ScaleLongUNet2DModel.from_pretrained("tester/unet"), DDIMScheduler()))
other = ScaleLongUNet2DModel.from_pretrained("tester/unet", subfolder="other")
RESULTS["subfolder"] = torch.equal(other.conv_in.weight, unet(seed=1).conv_in.weight)
RESULTS["compiled"] = draw(load_pipeline("tester/compiled", variant="ema"), "dog") == draw(classes(), "dog")
RESULTS["ids"] = load_text_encoder("tester/clip")[1]("a red circle").input_ids
RESULTS["adapters"] = []
for revision in (None, "other"):
    pipe = diffusers.StableDiffusionPipeline.from_pretrained("tester/base")
    RESULTS["adapters"].append(draw(load_adapter(pipe, "tester/adapter", revision=revision), "a red circle"))


def try_adapter(source, revision=None):
    return error_of(
        lambda: load_adapter(diffusers.DiffusionPipeline.from_pretrained("tester/base"), source, revision=revision)
    )


if ONLINE:
    RESULTS["private"] = [model_info(f"tester/{name}").private for name in ("classes", "unet")]
    reader = sys.argv[2]
    RESULTS["errors"] = {
        "missing": error_of(lambda: load_pipeline("tester/nothing")),
        "private": error_of(lambda: load_pipeline("tester/private", token=reader)),
        "private without a token": error_of(lambda: load_pipeline("tester/private", token=False)),
        "revision": error_of(lambda: load_pipeline("tester/saved", revision="v9")),
        "a model": error_of(lambda: load_pipeline("tester/unet")),
        "adapter revision": try_adapter("tester/adapter", "nowhere"),
        "missing adapter": try_adapter("tester/none"),
        "not an adapter": try_adapter("tester/base"),
    }
    weights = Path(hf_hub_download("tester/saved", "unet/diffusion_pytorch_model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:5000])
    RESULTS["errors"]["damaged"] = error_of(lambda: load_pipeline("tester/saved"))
    command = [sys.executable, "-m", "huggingface_hub.cli.hf", "cache", "rm", "--yes", "model/tester/saved"]
    subprocess.run(command, check=True, capture_output=True)
    RESULTS["errors"]["again"] = error_of(lambda: load_pipeline("tester/saved"))
else:
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    time.sleep = lambda seconds: None  # the client tries six times
    RESULTS["errors"] = {
        "load": error_of(lambda: load_pipeline("tester/x")),
        "push": error_of(lambda: classes().push_to_hub("tester/x")),
    }
report()
