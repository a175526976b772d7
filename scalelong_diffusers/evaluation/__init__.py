"""FID and KID: how far images are from the images of a dataset."""

from scalelong_diffusers.evaluation.evaluate import evaluate_images, feature_statistics, reference_statistics
from scalelong_diffusers.evaluation.images import ImageFiles, Reference, open_reference
from scalelong_diffusers.evaluation.metrics import (
    METRICS,
    FeatureStatistics,
    MissingPackage,
    frechet_distance,
    kernel_distance,
    sample_size_warnings,
)
from scalelong_diffusers.evaluation.networks import FeatureExtractor, load_features


__all__ = [
    "METRICS",
    "FeatureExtractor",
    "FeatureStatistics",
    "ImageFiles",
    "MissingPackage",
    "Reference",
    "evaluate_images",
    "feature_statistics",
    "frechet_distance",
    "kernel_distance",
    "load_features",
    "open_reference",
    "reference_statistics",
    "sample_size_warnings",
]
