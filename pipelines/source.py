"""Whether what a pipeline is loaded from is one, has the components that are needed, and is whole."""

import os
from typing import Any

from diffusers import DiffusionPipeline

from scalelong_diffusers.download import DOWNLOAD_OPTIONS, read_json


def pipeline_index(source: str | os.PathLike, options: dict[str, Any]) -> dict[str, Any]:
    """The `model_index.json` of a folder or repository; `options` are the keywords of `from_pretrained`."""
    options = {name: options[name] for name in DOWNLOAD_OPTIONS if name in options}
    index = read_json(source, DiffusionPipeline.config_name, **options)
    if index is None:
        raise ValueError(
            f"{source} is no pipeline: it has no {DiffusionPipeline.config_name}; a pipeline is what its "
            "save_pretrained wrote"
        )
    if "_class_name" not in index:
        raise ValueError(
            f"{source} is no pipeline: its {DiffusionPipeline.config_name} has no _class_name, which save_pretrained "
            "writes into it"
        )
    return index


def check_components(pipeline_class: type[DiffusionPipeline], source: str | os.PathLike, options: dict[str, Any]):
    """Refuse a source that lacks a component which the pipeline can not do without, and which is not passed."""
    index = pipeline_index(source, options)
    there = [name for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and entry[1]]
    needed = [name for name in ("unet", "scheduler") if name not in there and options.get(name) is None]
    if needed:
        raise ValueError(
            f"{source} has no component {' and no '.join(needed)}, which {pipeline_class.__name__} needs; it has "
            f"{', '.join(there)}"
        )
    folders = [name for name in there if os.path.isdir(source) and options.get(name) is None]
    if missing := [name for name in folders if not os.path.isdir(os.path.join(source, name))]:
        index_name = DiffusionPipeline.config_name
        raise ValueError(f"{source} is not whole: its {index_name} names {missing[0]}, and there is no such folder")
