"""The command `scalelong sample`: its flags, and what it says."""

import argparse
import sys
from pathlib import Path


def add_sample_command(commands: argparse._SubParsersAction):
    sample = commands.add_parser(
        "sample",
        help="make images with a pipeline: each depends on the seed and its number alone",
        description="Interrupted, or called again for more images, it makes only those that are missing.",
    )
    sample.add_argument("model", help="a pipeline: a local folder or the id of one on the Hub")
    sample.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the images and their grid go")
    sample.add_argument(
        "-n", "--n", type=int, default=16, metavar="N", help="how many images there are to be (default 16)"
    )
    what = sample.add_mutually_exclusive_group()
    what.add_argument("--prompt", nargs="+", metavar="TEXT", help="what to draw; the images take several in turn")
    what.add_argument(
        "--class", nargs="+", dest="class_labels", metavar="NAME", help="names or numbers of classes; all by default"
    )
    sample.add_argument("--negative_prompt", "--negative-prompt", metavar="TEXT", help="what guidance leads away from")
    sample.add_argument("--scheduler", metavar="NAME", help="such as dpm++, ddim or euler; the model's own by default")
    sample.add_argument("--steps", type=int, default=50, metavar="N", help="how many steps it takes (default 50)")
    sample.add_argument("--guidance", type=float, metavar="W", help="guidance_scale as in diffusers; 1 is none")
    sample.add_argument("--seed", type=int, default=0, metavar="N", help="another seed gives other images (default 0)")
    sample.add_argument("--batch_size", "--batch-size", type=int, default=16, metavar="N", help="images at a time")
    sample.add_argument("--height", type=int, metavar="PIXELS")
    sample.add_argument("--width", type=int, metavar="PIXELS")
    sample.add_argument("--revision", metavar="NAME", help="a branch, tag or commit on the Hub")
    sample.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    sample.add_argument("--device", help="such as cuda:1; a GPU by default, where there is one")
    sample.set_defaults(run=_sample)


def _sample(arguments: argparse.Namespace) -> int:
    try:
        made = _make_images(arguments)
    except KeyboardInterrupt:
        print(f"scalelong: interrupted; the same command makes the images that {arguments.out} lacks", file=sys.stderr)
        return 130
    print(f"{arguments.out}: {arguments.n} images, {made} of them new, and a grid of them")
    return 0


def _make_images(arguments: argparse.Namespace) -> int:
    # They bring in transformers, which the other commands do without.
    import torch

    from scalelong_diffusers.pipelines import load_pipeline
    from scalelong_diffusers.pipelines.sampling import SampleSettings, Sampling, choose_device

    names = SampleSettings.__dataclass_fields__
    settings = SampleSettings(**{name: value for name, value in vars(arguments).items() if name in names})
    dtype = getattr(torch, arguments.dtype)
    pipe = load_pipeline(arguments.model, revision=arguments.revision, dtype=dtype)
    pipe.to(choose_device(arguments.device))
    return Sampling(pipe, settings, arguments.out, arguments.n, arguments.batch_size).make()
