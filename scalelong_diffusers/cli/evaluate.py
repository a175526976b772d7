"""`scalelong evaluate` computes FID and KID of a pipeline or a folder of images."""

import argparse
import dataclasses
import json
import os
import platform
import sys
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from scalelong_diffusers.cli.flags import AliasedGroup, use_cache_if_offline
from scalelong_diffusers.data.images import fixed_permutation
from scalelong_diffusers.download import read_json
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.evaluation.evaluate import (
    check_features,
    check_size,
    evaluate_images,
    reference_statistics,
    with_progress,
)
from scalelong_diffusers.evaluation.image_files import ImageFiles
from scalelong_diffusers.evaluation.metrics import check_features_kept, parse_metrics
from scalelong_diffusers.evaluation.networks import FeatureExtractor, load_features
from scalelong_diffusers.evaluation.reference import (
    SHAPES,
    SPLITS,
    Reference,
    check_reference,
    default_cache_dir,
    is_statistics,
    open_reference,
)
from scalelong_diffusers.evaluation.statistics import INCEPTION, FeatureStatistics
from scalelong_diffusers.options import build_config, check_options, option, options_of
from scalelong_diffusers.pipelines.base import SamplingPipeline
from scalelong_diffusers.pipelines.loading import load_pipeline
from scalelong_diffusers.pipelines.sampling import SampleConfig, Sampling, choose_device, read_sample_settings
from scalelong_diffusers.pipelines.text_to_image import ScaleLongTextToImagePipeline
from scalelong_diffusers.processes import processes


RESULT_FILE = "evaluation.jsonl"
DEFAULT_NUM_IMAGES = 10_000
VERSIONS_OF = ("scalelong-diffusers", "torch", "diffusers", "transformers", "torchmetrics", "torch-fidelity")
# Other sizes than the pipeline's own, and prompts of which one is negative, are left to `scalelong sample`.
_NOT_EVALUATED = ("negative_prompt", "height", "width")


@dataclass(frozen=True)
class EvaluateConfig:
    """What to evaluate, and against what."""

    model: str
    reference: str = option(
        dataclasses.MISSING,
        "a dataset on the Hub, a folder of images or of parquet files, 'shapes', or a file of statistics",
        metavar="DATA",
    )
    num_images: int | None = option(
        None, f"number of images; {DEFAULT_NUM_IMAGES} by default, or all of a folder", at_least=2, metavar="N"
    )
    metric: str = option("fid,kid", "fid, kid or both, separated by a comma", metavar="NAMES")
    features: str = option(
        INCEPTION, f"feature network: {INCEPTION}, or the folder or id of a vision model", metavar="NETWORK"
    )
    batch_size: int = option(64, "images per batch", at_least=1, metavar="N")
    cache_dir: str | None = option(None, "folder for statistics of references", metavar="DIR")
    device: str | None = option(None, "such as cuda:1; a GPU by default, if there is one")

    def __post_init__(self):
        check_options(self)


@dataclass(frozen=True)
class ReferenceConfig:
    """How to read a reference that is a dataset. Fields that are None keep the defaults of `DataConfig`."""

    split: str | None = option(None, "train by default", choices=SPLITS)
    dataset_config_name: str | None = option(None, "config of the dataset", metavar="NAME")
    dataset_revision: str | None = option(None, "branch, tag or commit of the dataset", metavar="NAME")
    image_column: str | None = option(None, "image column, if not detected", metavar="NAME")
    caption_column: str | None = option(None, "caption column, if not detected", metavar="NAME")
    crop_size: int | None = option(None, "cut this square at the center before resizing", metavar="PIXELS")
    image_interpolation_mode: str | None = option(None, "how images are resized; lanczos by default", metavar="MODE")
    on_bad_image: str | None = option(None, "skip replaces an unreadable image", choices=("error", "skip"))
    dataloader_num_workers: int | None = option(None, "processes that read images", metavar="N")
    num_shapes: int | None = option(None, "size of the built-in dataset; 10000 by default", metavar="N")


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "evaluate",
        help="compute FID and KID of a pipeline or a folder of images",
        description=(
            "If interrupted or called again, the command makes only the missing images. With accelerate launch "
            "(-m scalelong_diffusers.cli evaluate ...) or torchrun, all processes share the work."
        ),
    )
    parser.add_argument("model", help="a pipeline (a local folder or an id on the Hub), or a folder of images")
    parser.add_argument("--json", action="store_true", help="print JSON")
    AliasedGroup(parser, "evaluation").add_options(EvaluateConfig)
    images = AliasedGroup(parser, "images, if a pipeline makes them")
    images.add_argument("--output_dir", type=Path, metavar="DIR", help="their folder; evaluation/NAME by default")
    images.add_argument(
        "--prompt_file",
        type=Path,
        metavar="FILE",
        help="prompts, one per line; the captions of the reference by default",
    )
    images.add_options(SampleConfig, without=_NOT_EVALUATED)
    AliasedGroup(parser, "reference, if it is a dataset").add_options(ReferenceConfig)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        team = processes()
        result = _evaluate(arguments)
    except KeyboardInterrupt:
        print("scalelong: interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    if team.is_main_process:
        for warning in result["warnings"]:
            print(f"scalelong: warning: {warning}", file=sys.stderr)
        print(json.dumps(result) if arguments.json else _report(result))
    team.destroy_process_group()
    return 0


def _evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    config = build_config(EvaluateConfig, given)
    use_cache_if_offline(*({config.model, config.reference, config.features} - {SHAPES, INCEPTION}))
    data = {flag: given[flag] for flag, _, _ in options_of(ReferenceConfig) if flag in given}
    evaluation = Evaluation(config, data)
    is_folder = os.path.isdir(config.model) and not Path(config.model, "model_index.json").is_file()
    if not is_folder:
        return _evaluate_pipeline(evaluation, given)
    flags = ["output_dir", "prompt_file", *(flag for flag, _, _ in options_of(SampleConfig))]
    if unused := [flag for flag in flags if flag in given]:
        raise UserError(f"--{unused[0]} needs a pipeline, and {config.model} is not one: it has no model_index.json")
    return _evaluate_folder(evaluation)


@dataclass(frozen=True)
class Evaluation:
    """A checked config, with its feature network and statistics, which are loaded when they are first needed."""

    config: EvaluateConfig
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        reference = self.config.reference
        check_reference(reference)
        if is_statistics(reference):
            if self.data:
                raise UserError(f"--{next(iter(self.data))} needs a dataset, and {reference} is a file of statistics")
            check_features_kept(self.metrics, self.stored_statistics)
        if "num_shapes" in self.data and reference != SHAPES:
            raise UserError(f"--num_shapes needs the built-in dataset {SHAPES!r}, and the reference is {reference}")

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        return parse_metrics(self.config.metric)

    @cached_property
    def stored_statistics(self) -> FeatureStatistics:
        return FeatureStatistics.load(self.config.reference)

    @cached_property
    def device(self) -> torch.device:
        return choose_device(self.config.device)

    @cached_property
    def extractor(self) -> FeatureExtractor:
        extractor = load_features(self.config.features, self.device)
        if is_statistics(self.config.reference):
            check_features(self.stored_statistics, extractor)
        return extractor

    def open_reference(self, width: int, height: int, channels: int, needs_captions: bool = False) -> Reference | None:
        """Open the dataset at the size of the images. Return None if the reference is a file of statistics."""
        if is_statistics(self.config.reference):
            check_size(self.stored_statistics, self.config.reference, width, height)
            return None
        if width != height:
            raise UserError(
                f"the images have {width} x {height} pixels, but a dataset is cropped to squares: use a file of "
                "statistics as the reference"
            )
        data = dict(self.data)
        if self.config.cache_dir is not None and self.config.reference != SHAPES:
            data["cache_dir"] = os.path.join(self.config.cache_dir, "datasets")
        return open_reference(self.config.reference, width, channels, needs_captions=needs_captions, **data)

    def statistics(self, reference: Reference | None) -> tuple[FeatureStatistics, Path]:
        """Return the statistics of the reference and their file."""
        if reference is None:
            return self.stored_statistics, Path(self.config.reference)
        cache_dir = default_cache_dir() if self.config.cache_dir is None else Path(self.config.cache_dir)
        return reference_statistics(reference, self.extractor, cache_dir, self.config.batch_size)

    def measure(
        self, images: ImageFiles, statistics: tuple[FeatureStatistics, Path], settings: dict[str, Any], folder: Path
    ) -> dict[str, Any]:
        """Return the metrics with everything that they depend on, and append them to a file next to the images."""
        reference, file = statistics
        team = processes()
        share = images.batches(self.config.batch_size, team.num_processes, team.process_index)
        share = with_progress(share, len(images), self.config.batch_size, "features of the images")
        result = {
            **evaluate_images(share, reference, self.extractor, self.metrics, settings.get("seed") or 0),
            "images": str(folder),
            "resolution": [images.width, images.height],
            **settings,
            **_about_reference(reference, self.config.reference, file),
            "features": self.extractor.name,
            "features_fingerprint": self.extractor.fingerprint,
            "num_features": self.extractor.num_features,
            "versions": _versions(),
        }
        if team.is_main_process:
            try:
                with open(folder / RESULT_FILE, "a", encoding="utf-8") as opened:
                    opened.write(json.dumps(result) + "\n")
            except OSError as error:  # the result took long and can still be printed
                result["warnings"].append(f"the result cannot be written: {error}")
        return result


def _evaluate_folder(evaluation: Evaluation) -> dict[str, Any]:
    folder = Path(evaluation.config.model)
    images = ImageFiles.of_folder(folder, evaluation.config.num_images)
    reference = evaluation.open_reference(images.width, images.height, images.channels)
    return evaluation.measure(images, evaluation.statistics(reference), _settings(folder), folder)


def _evaluate_pipeline(evaluation: Evaluation, given: dict[str, Any]) -> dict[str, Any]:
    """Make the missing images and evaluate them. `given` holds the flags."""
    config = build_config(SampleConfig, given)
    n = evaluation.config.num_images or DEFAULT_NUM_IMAGES
    folder = given.get("output_dir") or Path("evaluation", Path(config.model).resolve().name)
    _ = evaluation.extractor  # fails before images are made, not after
    pipe = load_pipeline(config.model, revision=config.revision, dtype=getattr(torch, config.dtype))
    pipe.to(evaluation.device)
    prompts = _read_prompts(given, config, pipe)
    needs_captions = isinstance(pipe, ScaleLongTextToImagePipeline) and prompts is None
    height, width = pipe.image_size()
    reference = evaluation.open_reference(width, height, _channels(pipe), needs_captions)
    if needs_captions:
        prompts = _captions(reference, n, config.model)
    # Rejects what cannot be sampled before the statistics are computed, which may take hours.
    config = dataclasses.replace(config, prompt=prompts)
    sampling = Sampling(pipe, config, folder, n, evaluation.config.batch_size)
    statistics = evaluation.statistics(reference)
    sampling.make()
    return evaluation.measure(ImageFiles.sampled(folder, n), statistics, _settings(folder), folder)


def _read_prompts(given: dict[str, Any], config: SampleConfig, pipe: SamplingPipeline) -> list[str] | None:
    """Return the prompts of `--prompt` or `--prompt_file`, or None if neither is given."""
    if "prompt_file" not in given:
        return given.get("prompt")
    if "prompt" in given:
        raise UserError("--prompt and --prompt_file are both given; choose one of them")
    file = given["prompt_file"]
    if not isinstance(pipe, ScaleLongTextToImagePipeline):
        kind = type(pipe).__name__
        raise UserError(f"--prompt_file needs a text-to-image pipeline, and {config.model} is a {kind}")
    if not file.is_file():
        raise UserError(f"--prompt_file {file} does not exist")
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise UserError(f"--prompt_file {file} is empty")
    return lines


def _channels(pipe: SamplingPipeline) -> int:
    """Return 1 for a pipeline of gray images and 3 for all others."""
    channels = pipe.unet.config.in_channels if pipe.vae is None else pipe.vae.config.out_channels
    return 1 if channels == 1 else 3


def _captions(reference: Reference | None, n: int, model: str) -> list[str]:
    """Return the captions of up to n images, in a fixed random order because the dataset may be sorted."""
    if reference is None:
        raise UserError(f"{model} needs prompts, and a file of statistics has no captions: give --prompt_file FILE")
    return [reference.source.captions(k)[0] for k in fixed_permutation(len(reference))[:n].tolist()]


def _settings(folder: Path) -> dict[str, Any]:
    """Return how `scalelong sample` made the images of a folder; empty for images of another origin."""
    settings = read_sample_settings(folder)
    if settings is None:
        return {}
    names = ("model", "revision", "sampler", "num_inference_steps", "guidance_scale", "seed", "dtype")
    return {**{name: settings[name] for name in names}, "ema": _uses_ema(settings["model"])}


def _uses_ema(model: str) -> bool | None:
    """Return whether a training run saved its EMA weights, or None if the folder does not tell."""
    try:
        settings = read_json(model, "settings.json") if Path(model).is_dir() else None
    except UserError:  # a file of that name that is not a run's
        return None
    return settings and settings.get("use_ema")


def _about_reference(statistics: FeatureStatistics, reference: str, file: Path) -> dict[str, Any]:
    about = {"split": None, "crop_size": None, "interpolation": None, **statistics.about}
    for name in ("resolution", "unreadable"):  # in the result as the size of the images and as a warning
        about.pop(name, None)
    description = about.pop("reference", None) or file.name
    return {
        "reference": reference,
        "reference_description": description,
        "reference_n": statistics.n,
        **about,
        "statistics": str(file) if file.is_file() else None,  # None if it cannot be written
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in VERSIONS_OF:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # an optional package
            continue
    return versions


def _report(result: dict[str, Any]) -> str:
    """Return the result as one line."""
    metrics = [f"FID {result['fid']:.4g}"] if "fid" in result else []
    metrics += [f"KID {result['kid']:.4g} +- {result['kid_std']:.3g}"] if "kid" in result else []
    facts = {
        "n": f"{result['n']:,}",
        "split": result["split"],
        "sampler": result.get("sampler"),
        "steps": result.get("num_inference_steps"),
        "guidance": result.get("guidance_scale"),
        "seed": result.get("seed"),
        "EMA": {True: "yes", False: "no"}.get(result.get("ema"), "unknown"),
        "features": f"{result['features']} ({result['num_features']:,}, {result['features_fingerprint']})",
    }
    details = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return f"{', '.join(metrics)} to {result['reference_description']}: {details}"
