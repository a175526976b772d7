"""`scalelong sample` makes images with a pipeline."""

import argparse
import dataclasses
from dataclasses import MISSING, dataclass
from pathlib import Path

import torch

from scalelong_diffusers.options import add_options, build_config, check_options, option
from scalelong_diffusers.pipelines.loading import load_pipeline
from scalelong_diffusers.pipelines.sampling import MAX_IMAGES, SAMPLE_GRID, SampleConfig, Sampling, choose_device
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


@dataclass(frozen=True)
class SampleOutputConfig:
    """Where the images go, their number, and how they are computed. Image k does not depend on this."""

    output_dir: str = option(MISSING, "folder for the images", metavar="DIR")
    num_images: int = option(16, "number of images", at_least=1, at_most=MAX_IMAGES, metavar="N")
    batch_size: int = option(16, "images per batch", at_least=1, at_most=MAX_IMAGES, metavar="N")
    device: str | None = option(None, "device, such as cuda:1 (default: a GPU if one is available)")

    def __post_init__(self):
        check_options(self)


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "sample",
        help="make images with a pipeline",
        description=(
            "Make images with a pipeline. Each image depends only on the seed and its number. If interrupted, or "
            "called again for more images, the command makes only the missing ones."
        ),
    )
    parser.add_argument("model", help="a pipeline (a folder, a file or a Hub id), or a training run or checkpoint")
    group = AliasedGroup(parser, "images")
    add_options(group, SampleOutputConfig)
    add_options(group, SampleConfig)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from scalelong_diffusers.training.unfinished import find_checkpoint, load_checkpoint  # slow

    config, output = (build_config(config, vars(arguments)) for config in (SampleConfig, SampleOutputConfig))
    dtype = getattr(torch, config.dtype)
    if checkpoint := find_checkpoint(config.model):
        if checkpoint != Path(config.model):
            print_lines(f"{config.model} is not finished: sampling {checkpoint.name}")
        config = dataclasses.replace(config, model=str(checkpoint))
        pipe = load_checkpoint(checkpoint, dtype=dtype)
    else:
        pipe = load_pipeline(config.model, revision=config.revision, dtype=dtype)
    pipe.to(choose_device(output.device))
    folder, n = Path(output.output_dir), output.num_images
    made = Sampling(pipe, config, folder, n, output.batch_size).make()
    print_lines(f"{folder}: {n} images, {made} of them new, and a grid: {folder / SAMPLE_GRID}")
    return 0
