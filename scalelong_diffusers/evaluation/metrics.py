"""Distances between two sets of images, from the statistics of their features."""

import warnings
from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import nn

from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.evaluation.statistics import FeatureStatistics
from scalelong_diffusers.randomness import seed_for


METRICS = ("fid", "kid")
FID_NEEDS = 10_000
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1_000


class MissingPackage(UserError):
    """A package that is missing or does not work."""


@contextmanager
def torchmetrics_needed(purpose: str):
    """Turn failing imports of torchmetrics, and of packages that it needs, into [`MissingPackage`]."""
    try:
        with warnings.catch_warnings():
            # KID keeps all features in memory, which is wanted here.
            warnings.filterwarnings("ignore", message="Metric `Kernel Inception Distance`", category=UserWarning)
            yield
    except ModuleNotFoundError as error:
        # torchmetrics itself raises the error for torch-fidelity, without a name.
        package = (error.name or "torch-fidelity").split(".")[0]
        name = "'scalelong-diffusers[evaluate]'" if package == "torchmetrics" else package
        raise MissingPackage(f"{purpose} needs {package}: pip install {name}") from error
    except RuntimeError as error:
        raise MissingPackage(
            f"{purpose} needs torchmetrics, which cannot be imported: {error}; install the torchvision that matches "
            f"torch {torch.__version__}"
        ) from error


def parse_metrics(names: str) -> tuple[str, ...]:
    """Parse a flag such as `"fid,kid"`, and check that the packages for the metrics are installed."""
    metrics = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in metrics or [names]:
        if name not in METRICS:
            raise UserError(f"unknown metric {name!r}{did_you_mean(name, METRICS)}; accepted: {', '.join(METRICS)}")
    if "kid" in metrics:
        with torchmetrics_needed("KID"):
            from torchmetrics.image.kid import KernelInceptionDistance  # noqa: F401
    return metrics


def check_features_kept(metrics: Sequence[str], statistics: FeatureStatistics):
    """Reject KID for statistics without features."""
    if "kid" in metrics and statistics.features is None:
        raise UserError("KID needs features, and these statistics have only a mean and covariance: use fid instead")


def frechet_distance(one: FeatureStatistics, other: FeatureStatistics) -> float:
    """
    Return FID: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), the squared distance of two Gaussians.

    It equals torchmetrics' value except for rounding. tr (C1 C2)^(1/2) is the sum of the singular values of
    C1^(1/2) C2^(1/2). torchmetrics takes the roots of the eigenvalues of C1 C2. With n <= num_features images, most
    of these are 0 except for rounding errors of about 1e-16, whose roots of 1e-8 add up, so that the FID of a set with
    itself is not 0.
    """
    root = _root(one.covariance) @ _root(other.covariance).T
    traces = one.covariance.trace() + other.covariance.trace() - 2 * torch.linalg.svdvals(root).sum()
    return ((one.mean - other.mean).square().sum() + traces).item()


def _root(covariance: torch.Tensor) -> torch.Tensor:
    """Return the symmetric root, up to a rotation from the left."""
    values, vectors = torch.linalg.eigh(covariance)
    return values.clamp(min=0).sqrt()[:, None] * vectors.T


def kernel_distance(one: FeatureStatistics, other: FeatureStatistics, seed: int = 0) -> tuple[float, float]:
    """Return torchmetrics' KID and its standard deviation over 100 pairs of subsets, which the seed chooses."""
    check_features_kept(("kid",), one)
    check_features_kept(("kid",), other)
    size = min(KID_SUBSET_SIZE, len(one.features), len(other.features))
    with torchmetrics_needed("KID"):
        from torchmetrics.image.kid import KernelInceptionDistance

        # Every process already has all features.
        metric = KernelInceptionDistance(nn.Identity(), subsets=KID_SUBSETS, subset_size=size, sync_on_compute=False)
    metric.update(one.features.double(), real=True)
    metric.update(other.features.double(), real=False)
    with torch.random.fork_rng(devices=[]):  # torchmetrics uses torch's global generator
        torch.default_generator.manual_seed(seed_for(seed, "kid"))  # torch.manual_seed would also seed GPUs
        mean, deviation = metric.compute()
    return mean.item(), deviation.item()


def distances(
    metrics: Sequence[str], reference: FeatureStatistics, images: FeatureStatistics, seed: int = 0
) -> dict[str, float]:
    """Return the metrics by name; KID comes with its standard deviation `kid_std`."""
    values = {}
    if "fid" in metrics:
        values["fid"] = frechet_distance(reference, images)
    if "kid" in metrics:
        values["kid"], values["kid_std"] = kernel_distance(reference, images, seed)
    return values


def sample_size_warnings(metrics: Sequence[str], n: int, num_features: int, kind: str = "images") -> list[str]:
    """Return warnings about metrics of few images."""
    found = []
    if "fid" in metrics and n <= num_features:
        found.append(
            f"this FID says little: with {n:,} {kind} for {num_features:,} features the covariance is singular"
        )
    elif "fid" in metrics and n < FID_NEEDS:
        found.append(f"FID depends on the number of images: compare only with FIDs of {n:,} {kind}")
    if "kid" in metrics and n < KID_SUBSET_SIZE:
        found.append(f"KID uses subsets of {n:,} instead of {KID_SUBSET_SIZE:,}, because there are no more {kind}")
    return found
