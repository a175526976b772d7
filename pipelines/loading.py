"""Load pipelines from a folder, the Hub or one file without naming their class."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

import scalelong_diffusers
from scalelong_diffusers.download import (
    check_json_files,
    damaged_file_errors,
    download_options,
    load_model,
    load_pretrained,
    read_json,
)
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.pipelines.single_file import config_source, load_single_file


INDEX = DiffusionPipeline.config_name
_OURS = ("ScaleLongUnconditionalPipeline", "ScaleLongClassConditionalPipeline", "ScaleLongTextToImagePipeline")


def load_pipeline(source: str | os.PathLike, **options) -> DiffusionPipeline:
    """
    Load a pipeline from a folder or the Hub, without naming its class. Takes the options of `from_pretrained`.

    A stock pipeline (DDPM, DDIM, Stable Diffusion) is loaded as one of our pipelines. A Stable Diffusion can also be
    one file, with the configs in the same folder or on the Hub.

    ```python
    pipe = load_pipeline("some/model", dtype=torch.bfloat16)
    ```
    """
    index = pipeline_index(source, options)
    name = index["_class_name"]
    name = name[1] if isinstance(name, list) else name
    if name not in _OURS:
        configs = config_source(source, options)
        unet = read_json(configs, "unet/config.json", **download_options(options)) or {}
        has_classes = unet.get("num_class_embeds") is not None
        name = "ScaleLongClassConditionalPipeline" if has_classes else "ScaleLongUnconditionalPipeline"
        name = "ScaleLongTextToImagePipeline" if "text_encoder" in index else name
    # The classes depend on this module, so they are looked up through the package.
    return getattr(scalelong_diffusers, name).from_pretrained(source, **options)


def load_with_own_class(folder: str | os.PathLike) -> DiffusionPipeline:
    """Load a pipeline as the class that saved it, also if that is a stock class."""
    name = pipeline_index(folder, {})["_class_name"]
    if name in _OURS:
        return load_pipeline(folder)
    return load_complete_pipeline(DiffusionPipeline, DiffusionPipeline.from_pretrained, folder)


def load_complete_pipeline(
    pipeline_class: type[DiffusionPipeline],
    load: Callable[..., DiffusionPipeline],
    source: str | os.PathLike,
    **options,
) -> DiffusionPipeline:
    """
    Load a pipeline. Raise a `UserError` if a component lacks weights. Code in the source is never run.

    `load` is the `from_pretrained` of diffusers for this class. `DiffusionPipeline` means the class in the source.
    """
    index = pipeline_index(source, options)
    if os.path.isfile(source):
        pipe = load_single_file(source, config_source(source, options), index["_class_name"], **options)
        if isinstance(pipe, pipeline_class):
            return pipe
        accepted = inspect.signature(pipeline_class).parameters
        return pipeline_class(**{name: part for name, part in pipe.components.items() if name in accepted})
    with damaged_file_errors(source):
        is_local = os.path.isdir(source)
        folder = source if is_local else pipeline_class.download(source, trust_remote_code=False, **options)
    check_json_files(Path(folder))
    for name in (name for name, entry in index.items() if isinstance(entry, list)):
        check_json_files(Path(folder, name))
    pipe = load_pretrained(load, source, trust_remote_code=False, **options)
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module) and name not in options:
            _check_weights(type(component), source, Path(folder), name, options)
    return pipe


def _check_weights(model_class: type, source: str | os.PathLike, folder: Path, name: str, options: dict[str, Any]):
    """Raise a `UserError` if a component lacks weights. Pipelines do not pass on which weights were missing."""
    path = folder / name if (folder / name).is_dir() else folder
    variant = options.get("variant")
    if not any(f".{variant}" in file.name for file in path.iterdir()):  # then diffusers loads the usual weights
        variant = None
    # On the meta device, the names of the weights are read but not the weights.
    choices = {"variant": variant, "use_safetensors": options.get("use_safetensors"), "device_map": "meta"}
    load_model(model_class, path, f"the {name} of {source}", **choices)


def pipeline_index(source: str | os.PathLike, options: dict[str, Any]) -> dict[str, Any]:
    """Return the `model_index.json` of a folder or repository. `options` are the keywords of `from_pretrained`."""
    index = read_json(config_source(source, options), INDEX, **download_options(options))
    class_name = None if index is None else index.get("_class_name")
    if isinstance(class_name, list) and len(class_name) == 2:  # a pipeline with its own code names its module first
        class_name = class_name[1]
    if isinstance(class_name, str):
        return index
    steps = [path.name.removeprefix("checkpoint-") for path in Path(source).glob("checkpoint-*") if path.is_dir()]
    finished = max((int(step) for step in steps if step.isdecimal()), default=None)
    if finished is not None:
        advice = (
            f"the training run is unfinished (last checkpoint: checkpoint-{finished}); run the same training command "
            "with --resume_from_checkpoint latest, or see its progress with scalelong sample"
        )
    else:
        advice = "a pipeline is a folder written by save_pretrained"
    raise UserError(f"{source} is not a pipeline: it has no {INDEX} with a _class_name; {advice}")
