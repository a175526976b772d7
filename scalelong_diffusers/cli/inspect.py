"""`scalelong inspect` lists the long skip connections of a model and their factors, without loading its weights."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import nn

import scalelong_diffusers.models.unets
import scalelong_diffusers.models.uvit  # noqa: F401  these modules define the classes that are found by name
from scalelong_diffusers.cli.flags import use_cache_if_offline
from scalelong_diffusers.download import HubUnreachable, read_json
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.models.mixin import scaled_class_by_name
from scalelong_diffusers.options import add_options
from scalelong_diffusers.patching import skip_connections
from scalelong_diffusers.scaling import SkipScalingConfig


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser("inspect", help="list the long skip connections of a model and their factors")
    parser.add_argument("model", help="a model or pipeline: a local folder or an id on the Hub")
    add_options(parser, SkipScalingConfig, "skip scaling", optional=True)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    use_cache_if_offline(arguments.model)
    config = SkipScalingConfig.from_flags(vars(arguments))
    skips = skip_connections(model_skeleton(arguments.model, config))
    if arguments.json:
        rows = [dataclasses.asdict(skip) for skip in skips]
        print(json.dumps({"skip_scaling": skips.config.to_dict(), "parameters": skips.parameters, "skips": rows}))
    else:
        print(skips)
    return 0


def model_skeleton(source: str, skip_scaling: SkipScalingConfig | None = None) -> nn.Module:
    """
    Build the scalable model of a folder or Hub id on the meta device.

    Args:
        source: a model, or a pipeline with one.
        skip_scaling: replaces the skip scaling in the model's config.
    """
    config = _load_model_config(source)
    if "_class_name" not in config:
        raise UserError(f"{source} is not a model: its {ModelMixin.config_name} has no '_class_name'")
    model_class = scaled_class_by_name(config["_class_name"])
    if model_class is None:
        raise UserError(f"{source}: {config['_class_name']} has no long skip connections that can be scaled")
    replaced = {} if skip_scaling is None else {"skip_scaling": skip_scaling}
    with torch.device("meta"):
        return model_class.from_config(config, **replaced)


def _load_model_config(source: str) -> dict[str, Any]:
    """Return the config of a model, or of the component of a pipeline that can be scaled."""
    config = _read_json(source, ModelMixin.config_name)
    if config is not None:
        return config
    index = read_json(source, DiffusionPipeline.config_name)
    if index is None:
        raise UserError(
            f"{source} is not a model or a pipeline: it has no {ModelMixin.config_name} and no "
            f"{DiffusionPipeline.config_name}{_advice(Path(source))}"
        )
    components = {name: entry[1] for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    for name, class_name in components.items():
        if class_name and scaled_class_by_name(class_name):
            config = read_json(source, f"{name}/{ModelMixin.config_name}")
            if config is None:
                raise UserError(f"{source} lacks {name}/{ModelMixin.config_name}, which its pipeline needs")
            return config
    names = ", ".join(class_name for class_name in components.values() if class_name)
    raise UserError(f"{source}: none of its components ({names}) has long skip connections that can be scaled")


def _read_json(source: str, name: str) -> dict[str, Any] | None:
    """Return a JSON file, or None if it does not exist or is not in the cache of an unreachable Hub."""
    try:
        return read_json(source, name)
    except HubUnreachable:
        return None


def _advice(folder: Path) -> str:
    """Return advice for a checkpoint, whose model is in a subfolder."""
    model = folder / "unet"
    return f"; inspect {model} instead" if (model / ModelMixin.config_name).is_file() else ""
