"""Load pipelines from a folder or the Hub without naming their class."""

import os
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline

import scalelong_diffusers
from scalelong_diffusers.download import DOWNLOAD_OPTIONS, read_json
from scalelong_diffusers.errors import UserError


INDEX = DiffusionPipeline.config_name
_OURS = ("ScaleLongUnconditionalPipeline", "ScaleLongClassConditionalPipeline", "ScaleLongTextToImagePipeline")


def load_pipeline(source: str | os.PathLike, **options) -> DiffusionPipeline:
    """
    Load a pipeline from a folder or the Hub, without naming its class. Takes the options of `from_pretrained`.

    A stock pipeline (DDPM, DDIM, Stable Diffusion) is loaded as one of our pipelines.

    ```python
    pipe = load_pipeline("some/model", dtype=torch.bfloat16)
    ```
    """
    index = pipeline_index(source, options)
    name = index["_class_name"]
    name = name[1] if isinstance(name, list) else name  # a pipeline with its own code names its module first
    if name not in _OURS:
        unet = read_json(source, "unet/config.json", **_download_options(options)) or {}
        has_classes = unet.get("num_class_embeds") is not None
        name = "ScaleLongClassConditionalPipeline" if has_classes else "ScaleLongUnconditionalPipeline"
        name = "ScaleLongTextToImagePipeline" if "text_encoder" in index else name
    # The classes depend on this module, so they are looked up through the package.
    return getattr(scalelong_diffusers, name).from_pretrained(source, **options)


def pipeline_index(source: str | os.PathLike, options: dict[str, Any]) -> dict[str, Any]:
    """Return the `model_index.json` of a folder or repository. `options` are the keywords of `from_pretrained`."""
    is_file = os.path.isfile(source)
    index = None if is_file else read_json(source, INDEX, **_download_options(options))
    if index is not None and "_class_name" in index:
        return index
    steps = [path.name.removeprefix("checkpoint-") for path in Path(source).glob("checkpoint-*") if path.is_dir()]
    finished = max((int(step) for step in steps if step.isdecimal()), default=None)
    if is_file:
        advice = "convert a single file with StableDiffusionPipeline.from_single_file and save_pretrained"
    elif finished is not None:
        advice = (
            f"the training run is unfinished (last checkpoint: checkpoint-{finished}); run the same training command "
            "with --resume_from_checkpoint latest"
        )
    else:
        advice = "a pipeline is a folder written by save_pretrained"
    raise UserError(f"{source} is not a pipeline: it has no {INDEX} with a _class_name; {advice}")


def _download_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in DOWNLOAD_OPTIONS if name in options}
