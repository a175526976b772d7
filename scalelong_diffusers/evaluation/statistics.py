"""What is kept of a set of images: the Gaussian of their features, and some of the features themselves."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save_file


FORMAT_VERSION = 1
SUFFIXES = (".safetensors", ".npz")
# KID compares a hundred draws of a thousand features; those of all of ImageNet would fill 10 GB.
KEPT_FEATURES = 10_000
_OF_INCEPTION = 2048


@dataclass(frozen=True)
class FeatureStatistics:
    """
    Args:
        mean, covariance: of the features, in float64; the covariance is the unbiased one.
        kept: the features of the first images, which KID compares; None where only the Gaussian is known.
        n: how many images there were; None where a file does not say.
        features: the name of the network that they are of, and `features_fingerprint` a checksum of its weights.
        about: what else is to be known of the images, such as their resolution.
    """

    mean: torch.Tensor = field(repr=False)
    covariance: torch.Tensor = field(repr=False)
    kept: torch.Tensor | None = field(repr=False)
    n: int | None
    features: str
    features_fingerprint: str
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def num_features(self) -> int:
        return len(self.mean)

    def save(self, file: str | os.PathLike):
        """Written aside and renamed, so that a file with that name is always whole."""
        file = Path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"mean": self.mean, "covariance": self.covariance}
        if self.kept is not None:
            tensors["features"] = self.kept
        told = {
            "version": FORMAT_VERSION,
            "n": self.n,
            "features": self.features,
            "features_fingerprint": self.features_fingerprint,
            "about": self.about,
        }
        # Several runs may write the same file at the same time.
        part = file.with_name(f".{file.name}.{os.getpid()}.part")
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, part, {"scalelong": json.dumps(told)}
        )
        os.replace(part, file)

    @classmethod
    def load(cls, file: str | os.PathLike) -> "FeatureStatistics":
        """What `save` wrote, or the `mu` and `sigma` of an `.npz` as they are published of Inception's features."""
        if not os.path.isfile(file):
            raise FileNotFoundError(f"there is no file {file} of statistics")
        if Path(file).suffix not in SUFFIXES:
            raise ValueError(f"{file} is no file of statistics, whose names end in {' or '.join(SUFFIXES)}")
        try:
            statistics = cls._load_npz(file) if Path(file).suffix == ".npz" else cls._load_safetensors(file)
            statistics._check()
            return statistics
        except Exception as error:  # numpy, zipfile and zlib raise whatever they stumble over
            raise ValueError(f"{file} holds no statistics of features, or is damaged: {error}") from error

    @classmethod
    def _load_safetensors(cls, file: str | os.PathLike) -> "FeatureStatistics":
        with safe_open(file, "pt") as opened:
            told = json.loads((opened.metadata() or {})["scalelong"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        if told.pop("version") > FORMAT_VERSION:
            raise ValueError("a newer version of scalelong-diffusers wrote it")
        return cls(tensors["mean"], tensors["covariance"], tensors.get("features"), **told)

    @classmethod
    def _load_npz(cls, file: str | os.PathLike) -> "FeatureStatistics":
        from scalelong_diffusers.evaluation.networks import INCEPTION, INCEPTION_FINGERPRINT

        with open(file, "rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            if not {"mu", "sigma"} <= set(arrays):
                raise ValueError(f"it has the arrays {', '.join(arrays)}, and statistics are 'mu' and 'sigma'")
            mean, covariance = (torch.from_numpy(arrays[name].astype(np.float64)) for name in ("mu", "sigma"))
        if mean.shape != (_OF_INCEPTION,):
            raise ValueError(
                f"an .npz is of Inception's {_OF_INCEPTION:,} features, and its 'mu' has {mean.numel():,}"
            )
        return cls(mean, covariance, None, None, INCEPTION, INCEPTION_FINGERPRINT)

    def _check(self):
        shape = (self.num_features, self.num_features)
        if self.mean.ndim != 1 or tuple(self.covariance.shape) != shape:
            raise ValueError(
                f"a mean of shape {tuple(self.mean.shape)} and a covariance of {tuple(self.covariance.shape)}"
            )
        if not (self.mean.isfinite().all() and self.covariance.isfinite().all()):
            raise ValueError("it has numbers that are not finite")


class Moments:
    """
    Gathers features batch by batch, in float64.

    Where there are several processes, each is given every `num_processes`-th batch, and `finish` gives all of them the
    statistics of the whole set, the kept features in its order.
    """

    def __init__(self, num_features: int):
        self.count = 0
        self._sum = torch.zeros(num_features, dtype=torch.float64)
        self._products = torch.zeros(num_features, num_features, dtype=torch.float64)
        self._kept: list[torch.Tensor] = []

    def add(self, features: torch.Tensor):
        """(batch, num_features)"""
        features = features.float().cpu()  # not every device has float64
        wide = features.double()
        self._sum += wide.sum(0)
        self._products += wide.T @ wide
        if self.count < KEPT_FEATURES:
            self._kept.append(features)
        self.count += len(features)

    def finish(self) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
        """How many there are, their mean, their covariance, and the first of them."""
        counts, sums, products, kept = zip(*gather_object([(self.count, self._sum, self._products, self._kept)]))
        n = sum(counts)
        if n < 2:
            raise ValueError(f"a covariance takes two images at least, and there {'is' if n == 1 else 'are'} {n}")
        mean = sum(sums) / n
        covariance = (sum(products) - n * mean.outer(mean)) / (n - 1)
        return n, mean, covariance, torch.cat(_in_turn(kept))[:KEPT_FEATURES]


def _in_turn(lists: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The batches in the order of the whole set, of which each process has every `num_processes`-th."""
    longest = max(map(len, lists))
    return [batches[turn] for turn in range(longest) for batches in lists if turn < len(batches)]
