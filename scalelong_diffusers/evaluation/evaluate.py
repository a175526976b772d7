"""Figures of a set of images, for the command and for training alike."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from tqdm import tqdm

from scalelong_diffusers.evaluation.metrics import METRICS, check_metrics, distances, sample_size_warnings
from scalelong_diffusers.evaluation.networks import FeatureExtractor
from scalelong_diffusers.evaluation.reference import Reference
from scalelong_diffusers.evaluation.statistics import FeatureStatistics, Moments
from scalelong_diffusers.processes import processes, run_on_all_processes


def feature_statistics(
    images: Iterable[torch.Tensor], features: FeatureExtractor, about: dict[str, Any] | None = None
) -> FeatureStatistics:
    """
    Of batches of uint8 images (batch, 3, height, width). Where there are several processes, each gives those of its
    share, every `num_processes`-th, and all are returned the statistics of all images.
    """
    moments = Moments(features.num_features)

    def look_at_share():
        for batch in images:
            moments.add(features(batch))

    run_on_all_processes(look_at_share)
    n, mean, covariance, kept = moments.finish()
    return FeatureStatistics(mean, covariance, kept, n, features.name, features.fingerprint, about or {})


def reference_statistics(
    reference: Reference, features: FeatureExtractor, cache_dir: Path, batch_size: int = 64
) -> tuple[FeatureStatistics, Path]:
    """
    The statistics of a data set and the file that keeps them: read from there where they were computed before. A file
    that can not be written after all leaves a warning.
    """
    team = processes()
    file = cache_dir / "statistics" / f"{reference.fingerprint(features)}.safetensors"
    # On several machines all compute where one lacks the file: none can do it alone.
    if all(gather_object([file.is_file()])):
        return FeatureStatistics.load(file), file
    file.parent.mkdir(parents=True, exist_ok=True)  # which is refused before the long part
    transform = reference.transform
    about = {
        "reference": reference.description,
        "split": reference.split,
        "resolution": transform.resolution,
        "crop_size": transform.crop_size,
        "interpolation": transform.interpolation,
    }
    unreadable: set[str] = set()
    share = reference.batches(batch_size, team.num_processes, team.process_index, unreadable)
    share = with_progress(share, len(reference), batch_size, "features of the reference")
    statistics = feature_statistics(share, features, about)
    statistics.about["unreadable"] = len(set(gather_object(list(unreadable))))
    if team.is_local_main_process:
        try:
            statistics.save(file)
        except (OSError, SafetensorError) as error:  # hours may be in them, and they serve this time
            tqdm.write(f"warning: the statistics of the reference are not kept: {error}", file=sys.stderr)
    team.wait_for_everyone()
    return statistics, file


def with_progress(share: Iterable[torch.Tensor], n: int, batch_size: int, what: str) -> Iterator[torch.Tensor]:
    """A bar with the time left, of the main process's share of n images."""
    team = processes()
    total = math.ceil(n / (batch_size * team.num_processes))
    layout = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
    yield from tqdm(share, what, total, disable=not team.is_main_process, bar_format=layout)


def evaluate_images(
    images: Iterable[torch.Tensor],
    reference: FeatureStatistics,
    features: FeatureExtractor,
    metrics: Sequence[str] = METRICS,
    seed: int = 0,
) -> dict[str, Any]:
    """
    The figures of batches of uint8 images (batch, 3, height, width), and warnings of what they are not good for.

    Where there are several processes, each gives every `num_processes`-th batch, and all are returned the same.

    ```python
    features = load_features("facebook/dinov2-small")
    reference, _ = reference_statistics(open_reference("shapes", 32, 3), features, cache_dir)
    evaluate_images(batches, reference, features)["fid"]
    ```
    """
    check_metrics(metrics)
    check_features(reference, features)
    statistics = feature_statistics(images, features)
    figures = distances(metrics, reference, statistics, seed)
    return {**figures, "n": statistics.n, "warnings": evaluation_warnings(metrics, statistics.n, reference)}


def evaluation_warnings(metrics: Sequence[str], n: int, reference: FeatureStatistics) -> list[str]:
    """What is to be said of the figures of n images."""
    warnings = sample_size_warnings(metrics, n, reference.num_features)
    if reference.n is not None and reference.n < n:
        warnings += sample_size_warnings(metrics, reference.n, reference.num_features, "reference images")
    if unreadable := reference.about.get("unreadable"):
        warnings.append(
            f"{unreadable:,} of the {reference.n:,} reference images can not be used: others stand in their place, "
            "and count twice"
        )
    return warnings


def check_features(reference: FeatureStatistics, features: FeatureExtractor):
    """Refuse statistics of another network."""
    if reference.features_fingerprint != features.fingerprint or reference.num_features != features.num_features:
        raise ValueError(
            f"the statistics of the reference are of the features {reference.features!r} "
            f"({reference.features_fingerprint}, {reference.num_features:,} of them), and those asked for are "
            f"{features.name!r} ({features.fingerprint}, {features.num_features:,} of them)"
        )


def check_size(reference: FeatureStatistics, file: str, width: int, height: int):
    """Refuse statistics of images of another size."""
    resolution = reference.about.get("resolution")
    if resolution is not None and (width, height) != (resolution, resolution):
        raise ValueError(
            f"{file} has statistics of images of {resolution} x {resolution} pixels, and the images that are judged "
            f"have {width} x {height}"
        )
