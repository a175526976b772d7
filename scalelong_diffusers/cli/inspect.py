"""A model without its weights, from its config alone, so that it can be looked at in seconds."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import nn

import scalelong_diffusers.models.unets
import scalelong_diffusers.models.uvit  # noqa: F401  these define the classes that are looked up by name
from scalelong_diffusers.download import HubUnreachable, read_json
from scalelong_diffusers.models.mixin import SkipScalingMixin, not_scalable_message, plain_class


def model_skeleton(source: str, skip_scaling: Mapping[str, Any] | None = None) -> nn.Module:
    """
    The model of a folder or Hub id on the meta device; of a pipeline the one whose long skips can be scaled.

    `skip_scaling` replaces the one in the model's config.
    """
    config = _load_model_config(source)
    if "_class_name" not in config:
        raise ValueError(f"{source}: its {ModelMixin.config_name} has no '_class_name' and is not that of a model")
    model_class = _scalable_class(config["_class_name"])
    if model_class is None:
        raise ValueError(f"{source}: {not_scalable_message(config['_class_name'])}")
    replaced = {} if skip_scaling is None else {"skip_scaling": skip_scaling}
    with torch.device("meta"):
        return model_class.from_config(config, **replaced)


def _load_model_config(source: str) -> dict[str, Any]:
    """`config.json` of a model, or of the component of a pipeline that can be scaled."""
    config = _read_json(source, ModelMixin.config_name)
    if config is not None:
        return config
    index = _read_json(source, DiffusionPipeline.config_name)
    if index is None:
        # As in a checkpoint of a training run.
        within = Path(source, "unet")
        hint = f"; {within} is a model" if (within / ModelMixin.config_name).is_file() else ""
        raise ValueError(
            f"{source} is neither a model nor a pipeline: it has no {ModelMixin.config_name} and no "
            f"{DiffusionPipeline.config_name}{'' if os.path.isdir(source) else ' that can be reached'}{hint}"
        )
    components = {name: entry[1] for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    for name, class_name in components.items():
        if _scalable_class(class_name):
            config = _read_json(source, f"{name}/{ModelMixin.config_name}")
            if config is None:
                raise ValueError(f"{source} lacks {name}/{ModelMixin.config_name}, which its pipeline names")
            return config
    held = ", ".join(class_name for class_name in components.values() if class_name)
    raise ValueError(f"{source}: none of its components ({held}) has long skips to scale")


def _read_json(source: str, name: str) -> dict[str, Any] | None:
    """As `read_json`, but None also where the Hub can not be reached: the cache may have the other file."""
    try:
        return read_json(source, name)
    except HubUnreachable:
        return None


def _scalable_class(name: str) -> type | None:
    """A scaled class by its own name or by that of the diffusers class it stands on."""
    return next((c for c in SkipScalingMixin.__subclasses__() if name in (c.__name__, plain_class(c).__name__)), None)
