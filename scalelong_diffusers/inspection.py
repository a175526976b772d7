"""A model without its weights, from its config alone, so that it can be looked at in seconds."""

import os
from typing import Any

import torch
from diffusers import ConfigMixin, DiffusionPipeline, ModelMixin
from torch import nn

import scalelong_diffusers.models.unets
import scalelong_diffusers.models.uvit  # noqa: F401  these define the classes that are looked up by name
from scalelong_diffusers.models.mixin import SkipScalingMixin, not_scalable, plain_class
from scalelong_diffusers.scaling import SkipScalingConfig


class _ModelConfig(ConfigMixin):
    config_name = ModelMixin.config_name


def model_skeleton(source: str, skip_scaling: SkipScalingConfig | None = None) -> nn.Module:
    """
    The model of a folder or Hub id on the meta device; of a pipeline the one whose long skips can be scaled.

    `skip_scaling` replaces the one in the model's config.
    """
    config = _load_model_config(source)
    model_class = _scalable_class(config["_class_name"])
    if model_class is None:
        raise ValueError(f"{source}: {not_scalable(config['_class_name'])}")
    replaced = {} if skip_scaling is None else {"skip_scaling": skip_scaling}
    with torch.device("meta"):
        return model_class.from_config(config, **replaced)


def _load_model_config(source: str) -> dict[str, Any]:
    """`config.json` of a model, or of the component of a pipeline that can be scaled."""
    is_folder = os.path.isdir(source)
    if is_folder and os.path.isfile(os.path.join(source, _ModelConfig.config_name)):
        return _ModelConfig.load_config(source)
    try:
        index = DiffusionPipeline.load_config(source)
    except OSError as error:
        if is_folder:
            raise ValueError(
                f"{source} is neither a model nor a pipeline: it has no {_ModelConfig.config_name} and no "
                f"{DiffusionPipeline.config_name} that can be read"
            ) from error
        return _ModelConfig.load_config(source)
    components = {name: entry[1] for name, entry in index.items() if isinstance(entry, list) and entry[1]}
    for name, class_name in components.items():
        if _scalable_class(class_name):
            return _ModelConfig.load_config(source, subfolder=name)
    raise ValueError(f"{source}: none of its components ({', '.join(components.values())}) has long skips to scale")


def _scalable_class(name: str) -> type | None:
    """A scaled class by its own name or by that of the diffusers class it stands on."""
    return next((c for c in SkipScalingMixin.__subclasses__() if name in (c.__name__, plain_class(c).__name__)), None)
