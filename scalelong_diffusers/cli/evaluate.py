"""`scalelong evaluate` computes FID and KID of a pipeline or a folder of images."""

import argparse
import dataclasses
import json
import os
import platform
import sys
from dataclasses import dataclass, field
from functools import cached_property
from importlib import util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from scalelong_diffusers.cli.sample import AliasedGroup
from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.data.folders import check_outside
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
from scalelong_diffusers.evaluation.images import (
    SHAPES,
    SPLITS,
    ImageFiles,
    Reference,
    check_reference,
    default_cache_dir,
    is_statistics,
    open_reference,
)
from scalelong_diffusers.evaluation.metrics import INCEPTION, FeatureStatistics, check_features_kept, parse_metrics
from scalelong_diffusers.evaluation.networks import FeatureExtractor, load_features
from scalelong_diffusers.options import add_options, build_config, check_options, option, options_of
from scalelong_diffusers.pipelines.loading import load_pipeline
from scalelong_diffusers.pipelines.sampling import (
    MAX_IMAGES,
    SampleConfig,
    Sampling,
    choose_device,
    read_sample_settings,
)
from scalelong_diffusers.pipelines.text_to_image import ScaleLongTextToImagePipeline
from scalelong_diffusers.processes import processes
from scalelong_diffusers.terminal import print_lines


RESULT_FILE = "evaluation.jsonl"
DEFAULT_NUM_IMAGES = 10_000
VERSIONS_OF = ("scalelong-diffusers", "torch", "diffusers", "transformers", "torchmetrics", "torch-fidelity")
# `scalelong sample` has these options; evaluation uses the pipeline's own size and no negative prompt.
_NOT_EVALUATED = ("negative_prompt", "height", "width")


@dataclass(frozen=True)
class EvaluateConfig:
    """The images or model to evaluate, the reference, and the metrics."""

    model: str
    reference: str = option(
        dataclasses.MISSING,
        "a dataset on the Hub, a folder of images or of parquet files, 'shapes', or a file of statistics",
        metavar="DATA",
    )
    num_images: int | None = option(
        None,
        f"number of images (default: {DEFAULT_NUM_IMAGES}, or all images of a folder)",
        at_least=2,
        at_most=MAX_IMAGES,
        metavar="N",
    )
    metric: str = option("fid,kid", "fid, kid or both, separated by a comma", metavar="NAMES")
    features: str = option(
        INCEPTION, f"feature network: {INCEPTION}, or the folder or id of a vision model", metavar="NETWORK"
    )
    batch_size: int = option(64, "images per batch", at_least=1, at_most=MAX_IMAGES, metavar="N")
    cache_dir: str | None = option(None, "folder for cached reference statistics", metavar="DIR")
    device: str | None = option(None, "device, such as cuda:1 (default: a GPU if one is available)")
    output_dir: str | None = option(
        None, "folder for the images of a pipeline (default: evaluation/NAME)", metavar="DIR"
    )

    def __post_init__(self):
        check_options(self)


# The options of `DataConfig` that a reference can have.
REFERENCE_OPTIONS = (
    "dataset_config_name",
    "dataset_revision",
    "image_column",
    "caption_column",
    "crop_size",
    "image_interpolation_mode",
    "on_bad_image",
    "dataloader_num_workers",
    "num_shapes",
)


def add_command(commands: argparse._SubParsersAction):
    parser = commands.add_parser(
        "evaluate",
        help="compute FID and KID of a pipeline or a folder of images",
        description=(
            "Compute FID and KID of a pipeline or a folder of images. If interrupted or called again, the command "
            "makes only the missing images. With accelerate launch (-m scalelong_diffusers.cli evaluate ...) or "
            "torchrun, all processes share the work."
        ),
    )
    parser.add_argument("model", help="a pipeline (a local folder or an id on the Hub), or a folder of images")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_options(AliasedGroup(parser, "evaluation"), EvaluateConfig)
    images = AliasedGroup(parser, "sampling, for a pipeline")
    images.add_argument(
        "--prompt_file",
        type=_read_prompts,
        metavar="FILE",
        help="file with one prompt per line (default: the captions of the reference)",
    )
    add_options(images, SampleConfig, without=_NOT_EVALUATED)
    data = parser.add_argument_group("reference dataset")
    data.add_argument("--split", choices=SPLITS, help="split of the dataset (default: train)")
    others = {flag for flag, _, _ in options_of(DataConfig)}.difference(REFERENCE_OPTIONS)
    add_options(data, DataConfig, without=others)
    parser.set_defaults(run=run)


def _read_prompts(file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines() if os.path.isfile(file) else []
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{file} is not UTF-8 text") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise argparse.ArgumentTypeError(f"{file} does not exist or is empty")
    return prompts


def run(arguments: argparse.Namespace) -> int:
    state = processes()
    result = _evaluate(arguments)
    if state.is_main_process:
        for warning in result["warnings"]:
            print_lines(f"scalelong: warning: {warning}", file=sys.stderr)
        print_lines(json.dumps(result) if arguments.json else _report(result))
    state.destroy_process_group()
    return 0


def _evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    config = build_config(EvaluateConfig, given)
    evaluation = Evaluation(config, {flag: given[flag] for flag in ("split", *REFERENCE_OPTIONS) if flag in given})
    folder = Path(config.model)
    if not os.path.isdir(folder) or (folder / "model_index.json").is_file():
        return _evaluate_pipeline(evaluation, given)
    flags = ["output_dir", "prompt_file", *(flag for flag, _, _ in options_of(SampleConfig))]
    if unused := [flag for flag in flags if flag in given]:
        raise UserError(f"--{unused[0]} needs a pipeline, and {config.model} is not one: it has no model_index.json")
    images = ImageFiles.of_folder(folder, config.num_images)
    reference = evaluation.open_reference(images.width, images.height, images.channels)
    return evaluation.measure(images, evaluation.statistics(reference), _settings(folder), folder)


@dataclass(frozen=True)
class Evaluation:
    """A checked config, with its feature network and statistics, which are loaded when they are first needed."""

    config: EvaluateConfig
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        reference = self.config.reference
        check_reference(reference)
        is_file, is_shapes = is_statistics(reference), reference == SHAPES
        if unused := [flag for flag in self.data if is_file or (flag == "num_shapes" and not is_shapes)]:
            needed = "a dataset" if is_file else f"the built-in dataset {SHAPES!r}"
            raise UserError(f"--{unused[0]} needs {needed}, and the reference is {reference}")
        metrics = self.metrics  # rejects unknown ones early
        if is_file:
            check_features_kept(metrics, self.stored_statistics)

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
            size = f"{width} x {height} pixels"
            raise UserError(f"the images have {size}, but a dataset is cropped to squares: use a file of statistics")
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
        """Return the metrics and the settings that they depend on, and append them to a file next to the images."""
        reference, file = statistics
        state = processes()
        share = images.batches(self.config.batch_size, state.num_processes, state.process_index)
        share = with_progress(share, len(images), self.config.batch_size, "features of the images")
        installed = [name for name in VERSIONS_OF if util.find_spec(name.replace("-", "_"))]
        result = {
            **evaluate_images(share, reference, self.extractor, self.metrics, settings.get("seed") or 0),
            "images": str(folder),
            "resolution": [images.width, images.height],
            **settings,
            **_about_reference(reference, self.config.reference, file),
            "features": self.extractor.name,
            "features_fingerprint": self.extractor.fingerprint,
            "num_features": self.extractor.num_features,
            "versions": {"python": platform.python_version(), **{name: version(name) for name in installed}},
        }
        if state.is_main_process:
            try:
                with open(folder / RESULT_FILE, "a", encoding="utf-8") as opened:
                    opened.write(json.dumps(result) + "\n")
            except OSError as error:  # the result took long and can still be printed
                result["warnings"].append(f"the result cannot be written: {error}")
        return result


def _evaluate_pipeline(evaluation: Evaluation, given: dict[str, Any]) -> dict[str, Any]:
    """Make the missing images and evaluate them. `given` holds the flags."""
    if "prompt_file" in given:
        if "prompt" in given:
            raise UserError("--prompt and --prompt_file are both given; choose one of them")
        given = {**given, "prompt": given["prompt_file"]}
    config = build_config(SampleConfig, given)
    n = evaluation.config.num_images or DEFAULT_NUM_IMAGES
    folder = Path(evaluation.config.output_dir or Path("evaluation", Path(config.model).resolve().name))
    if evaluation.config.reference != SHAPES:
        check_outside(folder, evaluation.config.reference)
    _ = evaluation.extractor  # fail before images are made, not after
    pipe = load_pipeline(config.model, revision=config.revision, dtype=getattr(torch, config.dtype))
    pipe.to(evaluation.device)
    needs_captions = isinstance(pipe, ScaleLongTextToImagePipeline) and config.prompt is None
    height, width = pipe.image_size()
    channels = pipe.unet.config.in_channels if pipe.vae is None else pipe.vae.config.out_channels
    reference = evaluation.open_reference(width, height, 1 if channels == 1 else 3, needs_captions)
    if needs_captions and reference is not None:
        # In a fixed random order, because the dataset may be sorted.
        order = fixed_permutation(len(reference))[:n].tolist()
        config = dataclasses.replace(config, prompt=tuple(reference.source.captions(k)[0] for k in order))
    # Rejects invalid sampling options before the statistics are computed, which may take hours.
    sampling = Sampling(pipe, config, folder, n, evaluation.config.batch_size)
    statistics = evaluation.statistics(reference)
    sampling.make()
    return evaluation.measure(ImageFiles.sampled(folder, n), statistics, _settings(folder), folder)


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings with which `scalelong sample` made the images, or {} for images of another origin."""
    settings = read_sample_settings(folder)
    if settings is None:
        return {}
    names = ("model", "revision", "sampler", "num_inference_steps", "guidance_scale", "seed", "dtype")
    model = Path(settings["model"])
    try:
        run_settings = read_json(model, "settings.json") if os.path.isdir(model) else None
    except UserError:  # a file with this name that no training run wrote
        run_settings = None
    return {**{name: settings[name] for name in names}, "ema": run_settings and run_settings.get("use_ema")}


def _about_reference(statistics: FeatureStatistics, reference: str, file: Path) -> dict[str, Any]:
    about = {"split": None, "crop_size": None, "interpolation": None, **statistics.about}
    for name in ("resolution", "unreadable"):  # the result already has the size of the images and a warning
        about.pop(name, None)
    description = about.pop("reference", None) or file.name
    return {
        "reference": reference,
        "reference_description": description,
        "reference_n": statistics.n,
        **about,
        "statistics": str(file) if file.is_file() else None,  # None if it cannot be written
    }


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
