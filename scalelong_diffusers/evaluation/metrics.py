"""Statistics of image features, and two distances between sets of images that are computed from them: FID and KID."""

import json
import os
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.files import atomic_write
from scalelong_diffusers.randomness import seed_for


METRICS = ("fid", "kid")
FID_NEEDS = 10_000
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1_000
# KID compares 100 samples of 1,000 features. The features of all ImageNet images would fill 10 GB.
KEPT_FEATURES = 10_000
FORMAT_VERSION = 2
SUFFIXES = (".safetensors", ".npz")

INCEPTION = "inception"
# The network of the FID paper, as torch-fidelity converted it from TensorFlow. Its weights never change.
INCEPTION_FINGERPRINT = "inception-v3-compat-2048"
INCEPTION_FEATURES = 2048


@dataclass(frozen=True)
class FeatureStatistics:
    """
    Statistics of the features of a set of images.

    Args:
        mean, covariance: float64; the covariance is unbiased.
        features: features of the first images, for KID; None if only mean and covariance are known.
        n: number of images, or None if the file does not say.
        network: name of the feature network.
        network_fingerprint: checksum of the network's weights and preprocessing.
        about: facts about the images, such as their resolution.
    """

    mean: torch.Tensor = field(repr=False)
    covariance: torch.Tensor = field(repr=False)
    features: torch.Tensor | None = field(repr=False)
    n: int | None
    network: str
    network_fingerprint: str
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def num_features(self) -> int:
        return len(self.mean)

    def save(self, file: str | os.PathLike):
        """Write a `.safetensors` file atomically."""
        file = Path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"mean": self.mean, "covariance": self.covariance, "features": self.features}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        facts = {name: getattr(self, name) for name in ("n", "network", "network_fingerprint", "about")}
        metadata = {"scalelong": json.dumps({"version": FORMAT_VERSION, **facts})}
        atomic_write(file, lambda partial: save_file(tensors, partial, metadata))

    @classmethod
    def load(cls, file: str | os.PathLike) -> "FeatureStatistics":
        """Read a file that `save` wrote, or an `.npz` with `mu` and `sigma` as published for Inception."""
        try:
            statistics = cls._load_npz(file) if Path(file).suffix == ".npz" else cls._load_safetensors(file)
            mean, covariance = statistics.mean, statistics.covariance
            is_finite = mean.isfinite().all() and covariance.isfinite().all()
            if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)) or not is_finite:
                raise UserError(
                    f"mean and covariance must be finite and of matching shapes, got {mean.shape} and "
                    f"{covariance.shape}"
                )
            return statistics
        except Exception as error:  # numpy, zipfile and zlib raise many kinds of errors for damaged files
            accepted = " or ".join(SUFFIXES)
            raise UserError(f"{file} cannot be read as a file of statistics ({accepted}): {error}") from error

    @classmethod
    def _load_safetensors(cls, file: str | os.PathLike) -> "FeatureStatistics":
        with safe_open(file, "pt") as opened:
            facts = json.loads((opened.metadata() or {})["scalelong"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        if (version := facts.pop("version")) != FORMAT_VERSION:
            raise UserError(f"it has format version {version}, and this package reads version {FORMAT_VERSION}")
        return cls(tensors["mean"], tensors["covariance"], tensors.get("features"), **facts)

    @classmethod
    def _load_npz(cls, file: str | os.PathLike) -> "FeatureStatistics":
        with open(file, "rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            mean, covariance = (torch.from_numpy(arrays[name].astype(np.float64)) for name in ("mu", "sigma"))
        return cls(mean, covariance, None, None, INCEPTION, INCEPTION_FINGERPRINT)


class Moments:
    """
    Moments of features, collected batch by batch in float64.

    With several processes, each adds every `num_processes`-th batch, and `finish` returns the statistics of all
    batches in all processes.
    """

    def __init__(self, num_features: int):
        self.count = 0
        self._sum = torch.zeros(num_features, dtype=torch.float64)
        self._products = torch.zeros(num_features, num_features, dtype=torch.float64)
        self._kept: list[torch.Tensor] = []

    def add(self, features: torch.Tensor):
        """Add features of shape (batch, num_features)."""
        features = features.float().cpu()  # not every device has float64
        wide = features.double()
        self._sum += wide.sum(0)
        self._products += wide.T @ wide
        if self.count < KEPT_FEATURES:
            self._kept.append(features)
        self.count += len(features)

    def finish(self) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the number of images, the mean, the covariance, and the features of the first images."""
        counts, sums, products, kept = zip(*gather_object([(self.count, self._sum, self._products, self._kept)]))
        n = sum(counts)
        if n < 2:
            raise UserError(f"a covariance needs at least two images, got {n}")
        mean = sum(sums) / n
        covariance = (sum(products) - n * mean.outer(mean)) / (n - 1)
        in_order = [batch for batch in chain.from_iterable(zip_longest(*kept)) if batch is not None]
        return n, mean, covariance, torch.cat(in_order)[:KEPT_FEATURES]


class MissingPackage(UserError):
    """A required package is missing or does not work."""


@contextmanager
def torchmetrics_needed(purpose: str):
    """Turn failing imports of torchmetrics, and of packages that it needs, into [`MissingPackage`]."""
    try:
        with warnings.catch_warnings():
            # KID keeps all features in memory, which is wanted here.
            warnings.filterwarnings("ignore", message="Metric `Kernel Inception Distance`", category=UserWarning)
            yield
    except (ModuleNotFoundError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError):
            # torchmetrics itself raises the error for torch-fidelity, without a name.
            package = (error.name or "torch-fidelity").split(".")[0]
            name = "'scalelong-diffusers[evaluate]'" if package == "torchmetrics" else package
            advice = f"pip install {name}"
        else:
            package = "torchmetrics"
            advice = f"it cannot be imported ({error}); install the torchvision that matches torch {torch.__version__}"
        raise MissingPackage(f"{purpose} needs {package}: {advice}") from error


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


def sample_size_warnings(metrics: Sequence[str], n: int, num_features: int, kind: str = "images") -> list[str]:
    """Return warnings if there are few images for the metrics."""
    found = []
    if "fid" in metrics and n <= num_features:
        found.append(
            f"this FID means little: with {n:,} {kind} for {num_features:,} features the covariance is singular"
        )
    elif "fid" in metrics and n < FID_NEEDS:
        found.append(f"FID depends on the number of images: compare only with FIDs of {n:,} {kind}")
    if "kid" in metrics and n < KID_SUBSET_SIZE:
        found.append(f"KID uses subsets of {n:,} instead of {KID_SUBSET_SIZE:,}, because there are no more {kind}")
    return found
