"""`scalelong inspect` lists the long skips of a model, or its muP settings, without loading its weights."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from torch import nn

import scalelong_diffusers.models.unets  # noqa: F401  this module defines the classes that are found by name
from scalelong_diffusers.download import HubUnreachable, build_skeleton, read_json
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.models.mixin import scaled_class_by_name, scaled_class_of
from scalelong_diffusers.models.mup import mup_scales
from scalelong_diffusers.models.uvit import UViTModel
from scalelong_diffusers.options import add_options
from scalelong_diffusers.patching import skip_connections
from scalelong_diffusers.pipelines.single_file import config_source
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.terminal import print_lines


_MUP_FACTORS = ("init_std", "learning_rate", "weight_decay", "eps")


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser("inspect", help="list the long skip connections of a model and their factors")
    parser.add_argument("model", help="a model or pipeline: a local folder or file, or an id on the Hub")
    add_options(parser, SkipScalingConfig, "skip scaling", optional=True)
    parser.add_argument(
        "--mup",
        action="store_true",
        help="instead list how muP changes the init and Adam's settings of each parameter, relative to the base width",
    )
    parser.add_argument("--mup_base_width", type=int, metavar="N", help="base width (default: the model's own)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = SkipScalingConfig.from_flags(vars(arguments))
    if arguments.mup:
        return _run_mup(arguments, config)
    if arguments.mup_base_width is not None:
        raise UserError(f"--mup_base_width {arguments.mup_base_width} needs --mup")
    skips = skip_connections(model_skeleton(arguments.model, config))
    if arguments.json:
        rows = [dataclasses.asdict(skip) for skip in skips]
        print_lines(
            json.dumps({"skip_scaling": skips.config.to_dict(), "parameters": skips.parameters, "skips": rows})
        )
    else:
        print_lines(*str(skips).splitlines())
    return 0


def _run_mup(arguments: argparse.Namespace, config: SkipScalingConfig | None) -> int:
    width = {} if arguments.mup_base_width is None else {"mup_base_width": arguments.mup_base_width}
    model = model_skeleton(arguments.model, config, **width)
    scales = mup_scales(model)
    if not scales and not isinstance(model, UViTModel):
        raise UserError(f"{arguments.model} is a {type(model).__name__}, and muP is for UViTModel")
    if not scales:
        raise UserError(f"{arguments.model} is a {type(model).__name__} without mup_base_width: pass --mup_base_width")
    rows = [
        {"parameter": name, "role": s.role, "ratio": s.ratio, **{key: getattr(s, key) for key in _MUP_FACTORS}}
        for name, s in scales.items()
    ]
    lines = [json.dumps(rows)] if arguments.json else _mup_table(rows)
    print_lines(*lines)
    return 0


def _mup_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table. Numbers of blocks are replaced by asterisks, so that equal blocks share a row."""
    lines = [["parameter", "role", *_MUP_FACTORS]]
    for row in rows:
        name = ".".join("*" if part.isdecimal() else part for part in row["parameter"].split("."))
        line = [name, row["role"], *(f"x {row[key]:g}" for key in _MUP_FACTORS)]
        if line not in lines:
            lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def model_skeleton(source: str, skip_scaling: SkipScalingConfig | None = None, **changes) -> nn.Module:
    """
    Build the scalable model of a folder or Hub id on the meta device.

    Args:
        source: a model, or a pipeline with one.
        skip_scaling: replaces the skip scaling in the model's config.
        changes: more entries that replace those in the model's config.
    """
    config = _load_model_config(source)
    model_class = scaled_class_of(config, source)
    replaced = changes if skip_scaling is None else {**changes, "skip_scaling": skip_scaling}
    return build_skeleton(model_class, config, source, **replaced)


def _load_model_config(source: str) -> dict[str, Any]:
    """Return the config of a model, or of the component of a pipeline that can be scaled."""
    source = config_source(source)
    try:
        config = read_json(source, ModelMixin.config_name)
    except HubUnreachable:  # a pipeline in the cache, of which nobody has tried to read this file
        config = None
    if config is not None:
        return config
    index = read_json(source, DiffusionPipeline.config_name)
    if index is None:
        names = f"{ModelMixin.config_name} and no {DiffusionPipeline.config_name}"
        model = Path(source, "unet")
        advice = f"; inspect {model} instead" if (model / ModelMixin.config_name).is_file() else ""  # a checkpoint
        raise UserError(f"{source} is not a model or a pipeline: it has no {names}{advice}")
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    components = {name: class_name for name, (_, class_name) in entries.items() if isinstance(class_name, str)}
    for name, class_name in components.items():
        if scaled_class_by_name(class_name):
            config = read_json(source, f"{name}/{ModelMixin.config_name}")
            if config is not None:
                return config
    names = ", ".join(components.values())
    raise UserError(f"{source}: no component ({names}) has a config and long skip connections that can be scaled")
