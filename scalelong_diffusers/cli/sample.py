"""`scalelong sample` makes images with a pipeline."""

import argparse
from pathlib import Path

import torch

from scalelong_diffusers.options import add_options, build_config
from scalelong_diffusers.pipelines.loading import load_pipeline
from scalelong_diffusers.pipelines.sampling import SampleConfig, Sampling, choose_device
from scalelong_diffusers.terminal import print_lines


# Short names of flags.
ALIASES = {
    "--class_labels": ["--class"],
    "--guidance_scale": ["--guidance"],
    "--num_images": ["-n"],
    "--num_inference_steps": ["--steps"],
    "--output_dir": ["--out"],
    "--prompt_file": ["--prompts"],
}


class AliasedGroup:
    """A group of flags in which each flag also gets its short names."""

    def __init__(self, parser: argparse.ArgumentParser, title: str):
        self._group = parser.add_argument_group(title)

    def add_argument(self, flag: str, **settings):
        self._group.add_argument(flag, *ALIASES.get(flag, []), **settings)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "sample",
        help="make images with a pipeline",
        description=(
            "Make images with a pipeline. Each image depends only on the seed and its number. If interrupted, or "
            "called again for more images, the command makes only the missing ones."
        ),
    )
    parser.add_argument("model", help="a pipeline: a local folder or an id on the Hub")
    group = AliasedGroup(parser, "images")
    group.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="folder for the images")
    group.add_argument("--num_images", type=_positive, default=16, metavar="N", help="number of images (default: 16)")
    group.add_argument("--batch_size", type=_positive, default=16, metavar="N", help="images per batch (default: 16)")
    group.add_argument("--device", help="device, such as cuda:1 (default: a GPU if one is available)")
    add_options(group, SampleConfig)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = build_config(SampleConfig, vars(arguments))
    pipe = load_pipeline(config.model, revision=config.revision, dtype=getattr(torch, config.dtype))
    pipe.to(choose_device(arguments.device))
    folder, n = arguments.output_dir, arguments.num_images
    made = Sampling(pipe, config, folder, n, arguments.batch_size).make()
    print_lines(f"{folder}: {n} images, {made} of them new, and a grid")
    return 0
