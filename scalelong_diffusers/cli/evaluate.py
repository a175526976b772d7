"""The command `scalelong evaluate`: its flags, and what it says."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any


def add_evaluate_command(commands: argparse._SubParsersAction):
    evaluate = commands.add_parser(
        "evaluate",
        help="how far images are from those of a data set: FID and KID",
        description=(
            "Interrupted, or called again, it makes only the images that are missing. Under accelerate launch "
            "(-m scalelong_diffusers.cli evaluate ...) or torchrun, all processes make a share of them."
        ),
    )
    evaluate.add_argument(
        "model", help="a pipeline (a local folder or the id of one on the Hub), or a folder of images"
    )
    evaluate.add_argument(
        "--reference",
        required=True,
        metavar="DATA",
        help="a data set on the Hub, a folder of images or of parquet files, 'shapes', or a file of statistics",
    )
    evaluate.add_argument("-n", "--n", type=int, metavar="N", help="images; 10000 by default, or all of a folder")
    evaluate.add_argument("--metric", default="fid,kid", metavar="NAMES", help="fid, kid or both (default fid,kid)")
    evaluate.add_argument(
        "--features",
        default="inception",
        metavar="NETWORK",
        help="inception (default), or a vision model's folder or id",
    )
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    evaluate.add_argument("--cache_dir", "--cache-dir", type=Path, metavar="DIR", help="for statistics of references")
    evaluate.add_argument("--device", help="such as cuda:1; a GPU by default, where there is one")
    _add_sampling(evaluate.add_argument_group("the images, where they are made by a pipeline"))
    _add_reference(evaluate.add_argument_group("the reference, where it is a data set"))
    evaluate.set_defaults(run=_evaluate)


def _add_sampling(group: argparse._ArgumentGroup):
    group.add_argument("--out", type=Path, metavar="DIR", help="where they go; evaluation/NAME by default")
    group.add_argument(
        "--class", nargs="+", dest="class_labels", metavar="NAME", help="all classes in turn by default"
    )
    group.add_argument("--prompts", type=Path, metavar="FILE", help="one a line; the reference's captions by default")
    group.add_argument("--scheduler", metavar="NAME", help="such as dpm++, ddim or euler; the model's own by default")
    group.add_argument("--steps", type=int, metavar="N", help="how many steps it takes (default 50)")
    group.add_argument("--guidance", type=float, metavar="W", help="guidance_scale as in diffusers; 1 is none")
    group.add_argument("--seed", type=int, metavar="N", help="another seed gives other images (default 0)")
    group.add_argument("--revision", metavar="NAME", help="a branch, tag or commit on the Hub")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default float32")
    group.add_argument("--batch_size", "--batch-size", type=int, default=64, metavar="N", help="images at a time")


def _add_reference(group: argparse._ArgumentGroup):
    group.add_argument("--split", choices=("train", "validation"), help="default train")
    group.add_argument("--dataset_config_name", metavar="NAME", help="which of its configs")
    group.add_argument("--dataset_revision", metavar="NAME", help="its branch, tag or commit")
    group.add_argument("--image_column", metavar="NAME", help="where it has an unusual name")
    group.add_argument("--caption_column", metavar="NAME", help="where it has an unusual name")
    group.add_argument("--crop_size", type=int, metavar="PIXELS", help="cut this square at the centre, then scale")
    group.add_argument("--image_interpolation_mode", metavar="MODE", help="how images are scaled; lanczos by default")
    group.add_argument("--on_bad_image", choices=("error", "skip"), help="skip takes another one in its place")
    group.add_argument("--dataloader_num_workers", type=int, metavar="N", help="processes that read images")
    group.add_argument("--num_shapes", type=int, metavar="N", help="the size of the built-in set (default 10000)")


_OF_PIPELINES = ("out", "class_labels", "prompts", "scheduler", "steps", "guidance", "seed", "revision", "dtype")
_OF_DATA_SETS = (
    *("split", "dataset_config_name", "dataset_revision", "image_column", "caption_column", "crop_size"),
    *("image_interpolation_mode", "on_bad_image", "dataloader_num_workers", "num_shapes"),
)


def _evaluate(arguments: argparse.Namespace) -> int:
    try:
        # They bring in transformers and datasets, which the other commands do without.
        from scalelong_diffusers.evaluation.packages import MissingPackage
        from scalelong_diffusers.evaluation.run import report
        from scalelong_diffusers.processes import processes

        team = processes()
        try:
            result = _run(arguments)
        except MissingPackage as error:
            raise ValueError(str(error)) from error
        if team.is_main_process:
            for warning in result["warnings"]:
                print(f"scalelong: warning: {warning}", file=sys.stderr)
            print(report(result, arguments.json))
        team.destroy_process_group()
        return 0
    except KeyboardInterrupt:
        print(
            "scalelong: interrupted; the same command goes on with the images and statistics that are there",
            file=sys.stderr,
        )
        return 130


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    from scalelong_diffusers.evaluation.metrics import parse_metrics
    from scalelong_diffusers.evaluation.run import Evaluation, evaluate_folder, evaluate_pipeline

    if arguments.n is not None and arguments.n < 2:
        raise ValueError(f"--n must be at least 2, got {arguments.n}")
    if arguments.batch_size < 1:
        raise ValueError(f"--batch_size must be at least 1, got {arguments.batch_size}")
    evaluation = Evaluation(
        reference=arguments.reference,
        data={name: value for name in _OF_DATA_SETS if (value := getattr(arguments, name)) is not None},
        features=arguments.features,
        metrics=parse_metrics(arguments.metric),
        n=arguments.n,
        batch_size=arguments.batch_size,
        cache_dir=arguments.cache_dir,
        device=arguments.device,
    )
    sampling = {name: value for name in _OF_PIPELINES if (value := getattr(arguments, name)) is not None}
    if not os.path.isdir(arguments.model) or Path(arguments.model, "model_index.json").is_file():
        return evaluate_pipeline(evaluation, arguments.model, **sampling)
    if sampling:
        name = {"class_labels": "class"}.get(next(iter(sampling)), next(iter(sampling)))
        raise ValueError(
            f"--{name} is for images that a pipeline is to make, and {arguments.model} is none: it has no "
            "model_index.json"
        )
    return evaluate_folder(evaluation, arguments.model)
