"""Statistics of image features: mean and covariance for FID, and some of the features for KID."""

import json
import os
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save_file

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import atomic_write


FORMAT_VERSION = 2
SUFFIXES = (".safetensors", ".npz")
# KID compares 100 samples of 1,000 features. The features of all ImageNet images would fill 10 GB.
KEPT_FEATURES = 10_000

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
        n: number of images; None if a file does not tell.
        network: name of the feature network, and `network_fingerprint` a checksum of its weights.
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
        facts = {
            "version": FORMAT_VERSION,
            "n": self.n,
            "network": self.network,
            "network_fingerprint": self.network_fingerprint,
            "about": self.about,
        }
        atomic_write(file, lambda partial: save_file(tensors, partial, {"scalelong": json.dumps(facts)}))

    @classmethod
    def load(cls, file: str | os.PathLike) -> "FeatureStatistics":
        """Read a file that `save` wrote, or an `.npz` with `mu` and `sigma` as published for Inception."""
        suffix = Path(file).suffix
        if suffix not in SUFFIXES:
            raise UserError(f"a file of statistics must end in {' or '.join(SUFFIXES)}, got {file}")
        if not os.path.isfile(file):
            raise UserError(f"the file of statistics {file} does not exist")
        try:
            statistics = cls._load_npz(file) if suffix == ".npz" else cls._load_safetensors(file)
            statistics._check()
            return statistics
        except Exception as error:  # numpy, zipfile and zlib raise many kinds of errors for damaged files
            raise UserError(f"{file} is damaged or not a file of statistics: {error}") from error

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
        if mean.shape != (INCEPTION_FEATURES,):
            raise UserError(f"'mu' must have the {INCEPTION_FEATURES:,} features of Inception, got {mean.numel():,}")
        return cls(mean, covariance, None, None, INCEPTION, INCEPTION_FINGERPRINT)

    def _check(self):
        if self.mean.ndim != 1 or self.covariance.shape != (self.num_features, self.num_features):
            raise UserError(
                f"its mean has shape {tuple(self.mean.shape)}, its covariance {tuple(self.covariance.shape)}"
            )
        if not (self.mean.isfinite().all() and self.covariance.isfinite().all()):
            raise UserError("it has numbers that are not finite")


class Moments:
    """
    Collects features batch by batch, in float64.

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
