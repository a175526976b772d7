"""Load pipelines from a folder or the Hub, and check first that they are complete."""

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
    Load one of our pipelines, or the components of a stock one (DDPM, DDIM, Stable Diffusion), from a folder or the
    Hub, without naming its class. The options are those of `from_pretrained`.

    ```python
    pipe = load_pipeline("some/model", dtype=torch.bfloat16)
    ```
    """
    # The classes depend on this module, so they are looked up through the package.
    return getattr(scalelong_diffusers, _class_name(source, options)).from_pretrained(source, **options)


def _class_name(source: str | os.PathLike, options: dict[str, Any]) -> str:
    """Return the name of our class that is in the index or, for a stock pipeline, that fits its components."""
    index = pipeline_index(source, options)
    name = index["_class_name"]
    name = name[1] if isinstance(name, list) else name  # a pipeline with its own code names its module first
    if name in _OURS:
        return name
    if "text_encoder" in index:
        return "ScaleLongTextToImagePipeline"
    unet = read_json(source, "unet/config.json", **_download_options(options)) or {}
    has_classes = unet.get("num_class_embeds") is not None
    return "ScaleLongClassConditionalPipeline" if has_classes else "ScaleLongUnconditionalPipeline"


def pipeline_index(source: str | os.PathLike, options: dict[str, Any]) -> dict[str, Any]:
    """Return the `model_index.json` of a folder or repository. `options` are the keywords of `from_pretrained`."""
    if os.path.isfile(source):
        raise UserError(
            f"{source} is a single file, not a pipeline folder; load it with "
            "StableDiffusionPipeline.from_single_file, then save_pretrained, and use the folder that this writes"
        )
    index = read_json(source, INDEX, **_download_options(options))
    if index is None:
        raise UserError(_missing_index_message(source))
    if "_class_name" not in index:
        raise UserError(
            f"{source} is not a pipeline: its {INDEX} has no _class_name; a pipeline is a folder written by "
            "save_pretrained"
        )
    return index


def _missing_index_message(source: str | os.PathLike) -> str:
    steps = [path.name.removeprefix("checkpoint-") for path in Path(source).glob("checkpoint-*") if path.is_dir()]
    if finished := max((int(step) for step in steps if step.isdecimal()), default=None):
        return (
            f"{source} is an unfinished training run (last checkpoint: checkpoint-{finished}), which has no {INDEX} "
            "yet; finish it first: run the same training command with --resume_from_checkpoint latest"
        )
    return f"{source} is not a pipeline: it has no {INDEX}; a pipeline is a folder written by save_pretrained"


def check_components(pipeline_class: type[DiffusionPipeline], source: str | os.PathLike, options: dict[str, Any]):
    """Check that all needed components are in the source or passed as options."""
    index = pipeline_index(source, options)
    components = [name for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and entry[1]]
    if needed := [name for name in ("unet", "scheduler") if name not in components and options.get(name) is None]:
        raise UserError(
            f"{source} has no component {' and no '.join(needed)}, which {pipeline_class.__name__} needs; it has "
            f"{', '.join(components)}"
        )
    if os.path.isdir(source):
        for name in components:
            if options.get(name) is None and not Path(source, name).is_dir():
                raise UserError(f"{source} is incomplete: its {INDEX} names {name}, but there is no such folder")


def _download_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in DOWNLOAD_OPTIONS if name in options}
