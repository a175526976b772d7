"""Distances between sets of images, taken from the statistics of their features."""

from collections.abc import Sequence

import torch
from torch import nn

from scalelong_diffusers.errors import did_you_mean
from scalelong_diffusers.evaluation.packages import torchmetrics_needed
from scalelong_diffusers.evaluation.statistics import FeatureStatistics
from scalelong_diffusers.randomness import seed_for


METRICS = ("fid", "kid")
FID_NEEDS = 10_000
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1_000


def parse_metrics(names: str) -> tuple[str, ...]:
    """As a flag gives them: `"fid, kid"`."""
    metrics = tuple(name.strip() for name in names.split(",") if name.strip())
    check_metrics(metrics)
    return metrics


def check_metrics(metrics: Sequence[str]):
    """Refuse unknown ones, and those that lack a package, before hours of work are done for them."""
    if not metrics:
        raise ValueError(f"no metric is given; accepted: {', '.join(METRICS)}")
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"unknown metric {name!r}{did_you_mean(name, METRICS)}; accepted: {', '.join(METRICS)}")
    if "kid" in metrics:
        with torchmetrics_needed("KID"):
            from torchmetrics.image.kid import KernelInceptionDistance  # noqa: F401


def check_features_kept(metrics: Sequence[str], statistics: FeatureStatistics):
    """Refuse KID where there are no features to compare."""
    if "kid" in metrics and statistics.kept is None:
        raise ValueError(
            "KID compares features, and these statistics have their mean and covariance alone: take fid as the metric"
        )


def frechet_distance(one: FeatureStatistics, other: FeatureStatistics) -> float:
    """
    FID: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), the squared distance of the two Gaussians.

    It is torchmetrics' figure, with one difference. tr (C1 C2)^(1/2) is the sum of the singular values of
    C1^(1/2) C2^(1/2); torchmetrics takes the roots of the eigenvalues of C1 C2 instead. Of n <= num_features images
    most of those are 0 but for rounding, about 1e-16, whose roots of 1e-8 add up: a set is not at 0 from itself then.
    """
    root = _root(one.covariance) @ _root(other.covariance).T
    traces = one.covariance.trace() + other.covariance.trace() - 2 * torch.linalg.svdvals(root).sum()
    return ((one.mean - other.mean).square().sum() + traces).item()


def _root(covariance: torch.Tensor) -> torch.Tensor:
    """The symmetric root, up to a rotation from the left."""
    values, vectors = torch.linalg.eigh(covariance)
    return values.clamp(min=0).sqrt()[:, None] * vectors.T


def kernel_distance(one: FeatureStatistics, other: FeatureStatistics, seed: int = 0) -> tuple[float, float]:
    """KID, its mean and its standard deviation over torchmetrics' hundred pairs of subsets, which the seed draws."""
    check_features_kept(("kid",), one)
    check_features_kept(("kid",), other)
    size = min(KID_SUBSET_SIZE, len(one.kept), len(other.kept))
    with torchmetrics_needed("KID"):
        from torchmetrics.image.kid import KernelInceptionDistance

        # Every process has all features already.
        metric = KernelInceptionDistance(nn.Identity(), subsets=KID_SUBSETS, subset_size=size, sync_on_compute=False)
    metric.update(one.kept.double(), real=True)
    metric.update(other.kept.double(), real=False)
    with torch.random.fork_rng(devices=[]):  # torchmetrics draws from torch's own generator
        torch.default_generator.manual_seed(seed_for(seed, "kid"))  # and not those of GPUs
        mean, deviation = metric.compute()
    return mean.item(), deviation.item()


def distances(
    metrics: Sequence[str], reference: FeatureStatistics, images: FeatureStatistics, seed: int = 0
) -> dict[str, float]:
    figures = {}
    if "fid" in metrics:
        figures["fid"] = frechet_distance(reference, images)
    if "kid" in metrics:
        figures["kid"], figures["kid_std"] = kernel_distance(reference, images, seed)
    return figures


def sample_size_warnings(metrics: Sequence[str], n: int, num_features: int, what: str = "images") -> list[str]:
    """What is to be said of figures that rest on few images."""
    said = []
    if "fid" in metrics and n <= num_features:
        said.append(
            f"{n:,} {what} do not span {num_features:,} features, so that their covariance is singular: this FID "
            "says little"
        )
    elif "fid" in metrics and n < FID_NEEDS:
        said.append(f"FID falls with the number of images; of {n:,} {what} it compares with that of {n:,} alone")
    if "kid" in metrics and n < KID_SUBSET_SIZE:
        said.append(f"KID is taken over subsets of {n:,}, not of {KID_SUBSET_SIZE:,}, since there are no more {what}")
    return said
