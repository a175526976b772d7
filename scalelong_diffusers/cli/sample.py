"""`scalelong sample` makes images with a pipeline."""

import argparse
import sys
from pathlib import Path

import torch

from scalelong_diffusers.cli.flags import AliasedGroup, positive, use_cache_if_offline
from scalelong_diffusers.options import build_config
from scalelong_diffusers.pipelines.loading import load_pipeline
from scalelong_diffusers.pipelines.sampling import SampleConfig, Sampling, choose_device


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "sample",
        help="make images with a pipeline",
        description=(
            "Each image depends only on the seed and its number. If interrupted, or called again for more images, the "
            "command makes only the missing ones."
        ),
    )
    parser.add_argument("model", help="a pipeline: a local folder or an id on the Hub")
    group = AliasedGroup(parser, "images")
    group.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="folder for the images")
    group.add_argument("--num_images", type=positive, default=16, metavar="N", help="number of images (default: 16)")
    group.add_argument("--batch_size", type=positive, default=16, metavar="N", help="images per batch (default: 16)")
    group.add_argument("--device", help="such as cuda:1; a GPU by default, if there is one")
    group.add_options(SampleConfig)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    folder = arguments.output_dir
    try:
        use_cache_if_offline(arguments.model)
        config = build_config(SampleConfig, vars(arguments))
        pipe = load_pipeline(config.model, revision=config.revision, dtype=getattr(torch, config.dtype))
        pipe.to(choose_device(arguments.device))
        made = Sampling(pipe, config, folder, arguments.num_images, arguments.batch_size).make()
    except KeyboardInterrupt:
        print(f"scalelong: interrupted; run the same command again to make the rest of {folder}", file=sys.stderr)
        return 130
    print(f"{folder}: {arguments.num_images} images, {made} of them new, and a grid")
    return 0
