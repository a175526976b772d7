"""FID and KID of what a run's averaged weights make, every so many steps."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image

from scalelong_diffusers.data import TrainingData
from scalelong_diffusers.data.images import with_channels
from scalelong_diffusers.evaluation.evaluate import (
    check_features,
    check_size,
    evaluate_images,
    evaluation_warnings,
    reference_statistics,
    with_progress,
)
from scalelong_diffusers.evaluation.metrics import check_features_kept, parse_metrics
from scalelong_diffusers.evaluation.networks import FeatureExtractor, load_features
from scalelong_diffusers.evaluation.packages import MissingPackage
from scalelong_diffusers.evaluation.reference import (
    Reference,
    check_reference,
    default_cache_dir,
    is_statistics,
    open_reference,
)
from scalelong_diffusers.evaluation.statistics import FeatureStatistics
from scalelong_diffusers.pipelines.base import NonFiniteImages
from scalelong_diffusers.processes import WorkSkipped
from scalelong_diffusers.training.loop import TrainingLoop


MakeImages = Callable[[Sequence[int]], list[Image.Image]]


@dataclasses.dataclass(frozen=True)
class SampleEvaluation:
    """How far the first `num_images` samples are from the reference. Sample k depends on the seed and on k alone."""

    reference: FeatureStatistics
    features: FeatureExtractor
    metrics: tuple[str, ...]
    num_images: int
    batch_size: int
    seed: int

    @classmethod
    def from_arguments(
        cls, args: argparse.Namespace, accelerator: Accelerator, data: TrainingData
    ) -> "SampleEvaluation | None":
        """None without `--eval_steps`. What it needs is had before the first step, and what can not be had is said."""
        if not args.eval_steps:
            return None
        try:
            metrics = parse_metrics(args.eval_metric)
            features = load_features(args.eval_features, accelerator.device)
        except MissingPackage as error:
            raise ValueError(str(error)) from error
        reference = _reference_statistics(args, data, features)
        check_features(reference, features)
        check_features_kept(metrics, reference)
        for warning in evaluation_warnings(metrics, args.num_eval_images, reference):
            accelerator.print(f"warning: --eval_steps: {warning}")
        return cls(reference, features, metrics, args.num_eval_images, args.train_batch_size, args.seed)

    def figures(self, loop: TrainingLoop, make_images: MakeImages) -> dict[str, float]:
        """
        `make_images` is given numbers of samples. All processes call this, and each makes a share.

        There are no figures, and that is said, of images that are not finite, and where the run is told to stop: it
        would be too late for a checkpoint before all images are made.
        """
        with loop.evaluating():
            batches = self._batches(make_images, loop)
            batches = with_progress(batches, self.num_images, self.batch_size, "FID of the samples")
            try:
                result = evaluate_images(batches, self.reference, self.features, self.metrics, self.seed)
            except WorkSkipped as reason:
                loop.say(f"warning: step {loop.global_step}: no {' and '.join(self.metrics)}: {reason}")
                return {}
        figures = {name: result[name] for name in ("fid", "kid", "kid_std") if name in result}
        loop.say(f"step {loop.global_step}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        return figures

    def _batches(self, make_images: MakeImages, loop: TrainingLoop) -> Iterator[torch.Tensor]:
        step = loop.accelerator.num_processes * self.batch_size
        for start in range(loop.accelerator.process_index * self.batch_size, self.num_images, step):
            if loop.is_stopping:
                raise WorkSkipped("the run is stopped")
            try:
                images = make_images(range(start, min(start + self.batch_size, self.num_images)))
            except NonFiniteImages as error:
                raise WorkSkipped(str(error)) from error
            pixels = np.stack([np.asarray(with_channels(image, 3)) for image in images])
            yield torch.from_numpy(pixels).permute(0, 3, 1, 2)


def _reference_statistics(
    args: argparse.Namespace, data: TrainingData, features: FeatureExtractor
) -> FeatureStatistics:
    """Of `--eval_reference`, or of all training images."""
    if args.eval_reference is None:
        return reference_statistics(_training_images(args, data), features, default_cache_dir())[0]
    check_reference(args.eval_reference)
    if is_statistics(args.eval_reference):
        statistics = FeatureStatistics.load(args.eval_reference)
        check_size(statistics, args.eval_reference, args.resolution, args.resolution)
        return statistics
    # Cut and scaled as the training images are.
    how = {name: getattr(args, name) for name in ("crop_size", "image_interpolation_mode", "on_bad_image")}
    reference = open_reference(args.eval_reference, args.resolution, min(data.channels, 3), **how)
    return reference_statistics(reference, features, default_cache_dir())[0]


def _training_images(args: argparse.Namespace, data: TrainingData) -> Reference:
    for flag in ("precomputed_dir", "streaming"):
        if getattr(args, flag):
            raise ValueError(
                f"--eval_steps compares with all images, which --{flag} does not have: give --eval_reference"
            )
    rows = data.train.rows
    transform = dataclasses.replace(
        rows.transform, channels=min(data.channels, 3), center_crop=True, random_flip=False
    )
    return Reference(rows.source, "train", transform, args.on_bad_image == "skip", args.dataloader_num_workers)
