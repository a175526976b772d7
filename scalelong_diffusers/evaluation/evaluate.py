"""Compute the metrics of a set of images, for `scalelong evaluate` and for training."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.evaluation.images import Reference
from scalelong_diffusers.evaluation.metrics import (
    METRICS,
    FeatureStatistics,
    Moments,
    frechet_distance,
    kernel_distance,
    sample_size_warnings,
)
from scalelong_diffusers.evaluation.networks import FeatureExtractor
from scalelong_diffusers.processes import processes, run_on_all_processes
from scalelong_diffusers.terminal import print_lines


def feature_statistics(
    images: Iterable[torch.Tensor], extractor: FeatureExtractor, about: dict[str, Any] | None = None
) -> FeatureStatistics:
    """
    Return the statistics of batches of uint8 images (batch, 3, height, width).

    With several processes, each passes every `num_processes`-th batch, and all return the statistics of all images.
    """
    moments = Moments(extractor.num_features)

    def add_share():
        for batch in images:
            moments.add(extractor(batch))

    run_on_all_processes(add_share)
    n, mean, covariance, features = moments.finish()
    return FeatureStatistics(mean, covariance, features, n, extractor.name, extractor.fingerprint, about or {})


def reference_statistics(
    reference: Reference, extractor: FeatureExtractor, cache_dir: Path, batch_size: int = 64
) -> tuple[FeatureStatistics, Path]:
    """
    Return the statistics of a dataset and their file in the cache, from which they are read if it exists.

    If the file cannot be written, this prints a warning.
    """
    state = processes()
    file = cache_dir / "statistics" / f"{reference.fingerprint(extractor)}.safetensors"
    # If one of several machines lacks the file, all compute the statistics together.
    if all(gather_object([file.is_file()])):
        return FeatureStatistics.load(file), file
    transform = reference.transform
    about = {
        "reference": reference.description,
        "split": reference.split,
        "resolution": transform.resolution,
        "crop_size": transform.crop_size,
        "interpolation": transform.interpolation,
    }
    unreadable: set[str] = set()
    share = reference.batches(batch_size, state.num_processes, state.process_index, unreadable)
    share = with_progress(share, len(reference), batch_size, "features of the reference")
    statistics = feature_statistics(share, extractor, about)
    statistics.about["unreadable"] = len(set(gather_object(list(unreadable))))
    if state.is_local_main_process:
        try:
            statistics.save(file)
        except OSError as error:  # they took long, and can still be used now
            print_lines(f"warning: the statistics of the reference cannot be saved: {error}", file=sys.stderr)
    state.wait_for_everyone()
    return statistics, file


def with_progress(share: Iterable[torch.Tensor], n: int, batch_size: int, label: str) -> Iterator[torch.Tensor]:
    """Wrap the batches of one process in a progress bar, which the main process shows."""
    state = processes()
    total = math.ceil(n / (batch_size * state.num_processes))
    layout = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
    yield from tqdm(share, label, total, disable=not state.is_main_process, bar_format=layout)


def evaluate_images(
    images: Iterable[torch.Tensor],
    reference: FeatureStatistics,
    extractor: FeatureExtractor,
    metrics: Sequence[str] = METRICS,
    seed: int = 0,
) -> dict[str, Any]:
    """
    Return the metrics of batches of uint8 images (batch, 3, height, width), and warnings about their limitations.

    With several processes, each passes every `num_processes`-th batch, and all return the same.

    ```python
    extractor = load_features("facebook/dinov2-small")
    reference, _ = reference_statistics(open_reference("shapes", 32, 3), extractor, cache_dir)
    evaluate_images(batches, reference, extractor)["fid"]
    ```
    """
    check_features(reference, extractor)
    statistics = feature_statistics(images, extractor)
    values = {}
    if "fid" in metrics:
        values["fid"] = frechet_distance(reference, statistics)
    if "kid" in metrics:
        values["kid"], values["kid_std"] = kernel_distance(reference, statistics, seed)
    return {**values, "n": statistics.n, "warnings": evaluation_warnings(metrics, statistics.n, reference)}


def evaluation_warnings(metrics: Sequence[str], n: int, reference: FeatureStatistics) -> list[str]:
    """Return warnings about metrics of n images."""
    warnings = sample_size_warnings(metrics, n, reference.num_features)
    if reference.n is not None and reference.n < n:
        warnings += sample_size_warnings(metrics, reference.n, reference.num_features, "reference images")
    if unreadable := reference.about.get("unreadable"):
        warnings.append(
            f"{unreadable:,} of the {reference.n:,} reference images are unreadable: others replace them and count "
            "twice"
        )
    return warnings


def check_features(reference: FeatureStatistics, extractor: FeatureExtractor):
    """Reject statistics of another feature network."""
    expected = f"{reference.num_features:,} features of {reference.network!r} ({reference.network_fingerprint})"
    found = f"{extractor.num_features:,} features of {extractor.name!r} ({extractor.fingerprint})"
    if (reference.network_fingerprint, reference.num_features) != (extractor.fingerprint, extractor.num_features):
        raise UserError(f"the statistics of the reference have {expected}, but the feature network has {found}")


def check_size(reference: FeatureStatistics, file: str, width: int, height: int):
    """Reject statistics of images of another size."""
    resolution = reference.about.get("resolution")
    if resolution is not None and (width, height) != (resolution, resolution):
        found = f"{width} x {height}"
        raise UserError(
            f"{file} has statistics of images with {resolution} x {resolution} pixels, but these have {found}"
        )
