"""What `scalelong evaluate` does: from a pipeline or a folder of images to figures and all that they depend on."""

import json
import platform
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from scalelong_diffusers.data.sources import fixed_permutation
from scalelong_diffusers.download import read_json
from scalelong_diffusers.evaluation.evaluate import (
    check_features,
    check_size,
    evaluate_images,
    reference_statistics,
    with_progress,
)
from scalelong_diffusers.evaluation.image_files import ImageFiles
from scalelong_diffusers.evaluation.metrics import check_features_kept, check_metrics
from scalelong_diffusers.evaluation.networks import FeatureExtractor, load_features
from scalelong_diffusers.evaluation.reference import (
    SHAPES,
    Reference,
    check_reference,
    default_cache_dir,
    is_statistics,
    open_reference,
)
from scalelong_diffusers.evaluation.statistics import FeatureStatistics
from scalelong_diffusers.pipelines import ScaleLongTextToImagePipeline, load_pipeline
from scalelong_diffusers.pipelines.base import SamplingPipeline
from scalelong_diffusers.pipelines.sampling import SampleSettings, Sampling, choose_device, read_sample_settings
from scalelong_diffusers.processes import processes


RESULT_FILE = "evaluation.jsonl"
DEFAULT_N = 10_000
VERSIONS_OF = ("scalelong-diffusers", "torch", "diffusers", "transformers", "torchmetrics", "torch-fidelity")


@dataclass(frozen=True)
class Evaluation:
    """
    What is measured, and by what.

    Args:
        reference: a data set, or a file of statistics.
        features: `"inception"`, or a vision model's folder or id.
        metrics: of `METRICS`.
        n: how many images.
        cache_dir: where statistics of references are kept.
        data: the split of the reference, and fields of `DataConfig`.
    """

    reference: str
    features: str
    metrics: tuple[str, ...]
    n: int | None = None
    batch_size: int = 64
    cache_dir: Path | None = None
    device: str | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        check_metrics(self.metrics)
        check_reference(self.reference)
        if is_statistics(self.reference):
            if self.data:
                name = next(iter(self.data))
                raise ValueError(f"--{name} is for a data set, and {self.reference} is a file of statistics")
            check_features_kept(self.metrics, self.statistics_of_file)
        if "num_shapes" in self.data and self.reference != SHAPES:
            raise ValueError(
                f"--num_shapes is for the built-in set, {SHAPES!r}, and the reference is {self.reference}"
            )

    @cached_property
    def statistics_of_file(self) -> FeatureStatistics:
        return FeatureStatistics.load(self.reference)

    @cached_property
    def torch_device(self) -> torch.device:
        return choose_device(self.device)

    @cached_property
    def feature_extractor(self) -> FeatureExtractor:
        features = load_features(self.features, self.torch_device)
        if is_statistics(self.reference):
            check_features(self.statistics_of_file, features)
        return features

    def open_reference(self, width: int, height: int, channels: int, needs_captions: bool = False) -> Reference | None:
        """The data set, brought to the size of the images; None where the reference is a file of statistics."""
        if is_statistics(self.reference):
            check_size(self.statistics_of_file, self.reference, width, height)
            return None
        if width != height:
            raise ValueError(
                f"the images have {width} x {height} pixels, and those of a data set are cut to squares: only a file "
                "of statistics can be the reference"
            )
        data = dict(self.data)
        if self.cache_dir is not None and self.reference != SHAPES:
            data["cache_dir"] = str(self.cache_dir / "datasets")
        return open_reference(self.reference, width, channels, needs_captions=needs_captions, **data)

    def statistics(self, reference: Reference | None) -> tuple[FeatureStatistics, Path]:
        """Those of the reference, and their file."""
        if reference is None:
            return self.statistics_of_file, Path(self.reference)
        cache_dir = self.cache_dir or default_cache_dir()
        return reference_statistics(reference, self.feature_extractor, cache_dir, self.batch_size)

    def measure(
        self,
        images: ImageFiles,
        statistics: tuple[FeatureStatistics, Path],
        about_images: dict[str, Any],
        folder: Path,
    ) -> dict[str, Any]:
        """The figures and all that is known of what they depend on, which is also a new line beside the images."""
        reference, statistics_file = statistics
        team = processes()
        share = images.batches(self.batch_size, team.num_processes, team.process_index)
        share = with_progress(share, len(images), self.batch_size, "features of the images")
        seed = about_images.get("seed") or 0
        result = {
            **evaluate_images(share, reference, self.feature_extractor, self.metrics, seed),
            "images": str(folder),
            "resolution": [images.width, images.height],
            **about_images,
            **_about_reference(reference, self.reference, statistics_file),
            "features": self.feature_extractor.name,
            "features_fingerprint": self.feature_extractor.fingerprint,
            "num_features": self.feature_extractor.num_features,
            "versions": _versions(),
        }
        if team.is_main_process:
            try:
                with open(folder / RESULT_FILE, "a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
            except OSError as error:  # hours of work are in the figures, which can still be printed
                result["warnings"].append(f"the result could not be written: {error}")
        return result


def evaluate_folder(evaluation: Evaluation, folder: str) -> dict[str, Any]:
    """Of images that are there; where `scalelong sample` made them, what it noted is told."""
    images = ImageFiles.of_folder(folder, evaluation.n)
    reference = evaluation.open_reference(images.width, images.height, images.channels)
    about = _about_samples(read_sample_settings(Path(folder)))
    return evaluation.measure(images, evaluation.statistics(reference), about, Path(folder))


def evaluate_pipeline(
    evaluation: Evaluation, model: str, out: Path | None = None, prompts: Path | None = None, **sampling
) -> dict[str, Any]:
    """Of images that a pipeline makes now; `sampling` are fields of `SampleSettings`."""
    n = evaluation.n or DEFAULT_N
    out = out or Path("evaluation", Path(model).resolve().name)
    settings = SampleSettings(model, **sampling)
    _ = evaluation.feature_extractor  # what can not be had should be known before images are made
    pipe = load_pipeline(model, revision=settings.revision, dtype=getattr(torch, settings.dtype))
    pipe.to(evaluation.torch_device)
    height, width = pipe.image_size()
    of_text = isinstance(pipe, ScaleLongTextToImagePipeline)
    needs_captions = of_text and prompts is None
    reference = evaluation.open_reference(width, height, _channels(pipe), needs_captions)
    if needs_captions:
        sampling["prompt"] = _captions(reference, n, model)
    elif prompts is not None:
        if not of_text:
            raise ValueError(f"--prompts is for models of text, and {model} is none: {type(pipe).__name__}")
        sampling["prompt"] = _lines(prompts)
    settings = SampleSettings(model, **sampling)
    # What can not be made is refused before the statistics, which may take hours.
    images = Sampling(pipe, settings, out, n, evaluation.batch_size)
    statistics = evaluation.statistics(reference)
    images.make()
    return evaluation.measure(ImageFiles.sampled(out, n), statistics, _about_samples(read_sample_settings(out)), out)


def _about_samples(noted: dict[str, Any] | None) -> dict[str, Any]:
    """What `scalelong sample` noted of its images."""
    if noted is None:
        return {}
    about = {name: noted[name] for name in ("model", "revision", "sampler", "steps", "seed", "dtype")}
    return {**about, "guidance": noted["guidance_scale"], "ema": _ema(noted["model"])}


def _channels(pipe: SamplingPipeline) -> int:
    """Of the images that are judged: grey, or else three."""
    channels = pipe.unet.config.in_channels if pipe.vae is None else pipe.vae.config.out_channels
    return 1 if channels == 1 else 3


def _captions(reference: Reference | None, n: int, model: str) -> list[str]:
    """
    One of each image, in a fixed random order, since they may be sorted by what they show; where there are fewer than
    n, they are taken in turn.
    """
    if reference is None:
        raise ValueError(f"{model} is a model of text, and a file of statistics has no captions: give --prompts FILE")
    return [reference.source.captions(k)[0] for k in fixed_permutation(len(reference))[:n].tolist()]


def _lines(file: Path) -> list[str]:
    if not file.is_file():
        raise FileNotFoundError(f"--prompts: there is no file {file}")
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts {file} is empty")
    return lines


def _ema(model: str) -> bool | None:
    """Whether the weights are averaged, which a training run notes beside its pipeline; None where it is not known."""
    try:
        settings = read_json(model, "settings.json") if Path(model).is_dir() else None
    except ValueError:  # somebody else's file of that name
        return None
    return settings and settings.get("use_ema")


def _about_reference(statistics: FeatureStatistics, reference: str, file: Path) -> dict[str, Any]:
    about = {"split": None, "crop_size": None, "interpolation": None, **statistics.about}
    for name in ("resolution", "unreadable"):  # the result has that of the images, and a warning
        about.pop(name, None)
    description = about.pop("reference", None) or file.name
    return {
        "reference": reference,
        "reference_description": description,
        "reference_n": statistics.n,
        **about,
        "statistics": str(file) if file.is_file() else None,  # None where it could not be written
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in VERSIONS_OF:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # of those that are not needed for all
            continue
    return versions


def report(result: dict[str, Any], as_json: bool) -> str:
    """The result as JSON, which has its warnings, or as a line without them."""
    if as_json:
        return json.dumps(result)
    figures = [f"{name.upper()} {_figure(result, name)}" for name in ("fid", "kid") if name in result]
    known = {
        "split": result["split"],
        "sampler": result.get("sampler"),
        "steps": result.get("steps"),
        "guidance": result.get("guidance"),
        "seed": result.get("seed"),
        "EMA": {True: "yes", False: "no"}.get(result.get("ema"), "not known"),
    }
    details = [f"n {result['n']:,}", *(f"{name} {value}" for name, value in known.items() if value is not None)]
    features = f"features {result['features']} ({result['num_features']:,}, {result['features_fingerprint']})"
    return f"{', '.join(figures)} to {result['reference_description']}: {', '.join(details)}, {features}"


def _figure(result: dict[str, Any], name: str) -> str:
    deviation = f" +- {result['kid_std']:.3g}" if name == "kid" else ""
    return f"{result[name]:.4g}{deviation}"
