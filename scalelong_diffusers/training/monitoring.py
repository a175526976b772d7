"""Monitor a run: the loss on held-out images, sample grids, and FID and KID of samples."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from diffusers import ModelMixin
from PIL import Image

from scalelong_diffusers.data.images import with_channels
from scalelong_diffusers.diagnosis.observer import QUANTITIES, SkipStatistics
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.evaluation.evaluate import (
    check_features,
    check_size,
    evaluate_images,
    evaluation_warnings,
    reference_statistics,
    with_progress,
)
from scalelong_diffusers.evaluation.images import (
    Reference,
    check_reference,
    default_cache_dir,
    is_statistics,
    open_reference,
)
from scalelong_diffusers.evaluation.metrics import FeatureStatistics, check_features_kept, parse_metrics
from scalelong_diffusers.evaluation.networks import FeatureExtractor, load_features
from scalelong_diffusers.files import atomic_write, parse_log_line, without_infinities
from scalelong_diffusers.pipelines.base import NonFiniteImages
from scalelong_diffusers.pipelines.grids import draw_grid
from scalelong_diffusers.pipelines.sampling import save_image
from scalelong_diffusers.processes import WorkSkipped


if TYPE_CHECKING:
    from scalelong_diffusers.training.run import LossesOf, MakeImages, TrainingRun

BINS = 10
# The trackers of accelerate that take images, with the options that they need for it.
_IMAGE_TRACKERS = {"tensorboard": {"dataformats": "NHWC"}, "wandb": {}, "swanlab": {}}
SAMPLES_FOLDER, METRICS_FILE = "samples", "metrics.jsonl"


def validation_losses(run: "TrainingRun", losses_of: "LossesOf") -> dict[str, Any]:
    """
    Return the mean losses on the held-out images.

    `validation_loss` uses the weights that the run will save, `validation_loss_raw` the trained ones if they differ,
    and `validation_loss_bins` has one entry for each tenth of the timesteps, from the least noise.
    """
    with run.evaluating():
        mean, bins = _mean_losses(run, losses_of)
    values = {"validation_loss": mean, "validation_loss_bins": bins}
    if run.ema is not None:
        with run.evaluating(with_ema=False):
            values["validation_loss_raw"] = _mean_losses(run, losses_of)[0]
    for name in ("validation_loss", "validation_loss_raw"):
        if name in values and not math.isfinite(values[name]):
            run.print(f"warning: step {run.global_step}: {name} is {values[name]}")
    return values


@torch.no_grad()
def _mean_losses(run: "TrainingRun", losses_of: "LossesOf") -> tuple[float, list[float | None]]:
    sums = torch.zeros(2, BINS, dtype=torch.float64)
    for batch in run.validation_batches():
        bins = (batch.uniform("timestep") * BINS).long().cpu()
        losses = losses_of(run.modules, batch).cpu().double()
        sums[0].index_add_(0, bins, losses)
        sums[1].index_add_(0, bins, torch.ones_like(losses))
    # As numbers, since not every device has float64.
    totals, counts = torch.tensor(gather_object([sums.tolist()]), dtype=torch.float64).sum(0).tolist()
    per_bin = [total / count if count else None for total, count in zip(totals, counts)]
    return sum(totals) / sum(counts), per_bin


def save_sample_grid(run: "TrainingRun", make_images: "MakeImages", count: int, titles: Sequence[str] | None):
    """Save a grid of images made with EMA weights as `samples/step-<step>.png`, unless they are not finite."""

    def save(images: list[Image.Image]):
        folder = run.folder / SAMPLES_FOLDER
        folder.mkdir(exist_ok=True)
        picture = draw_grid(images, titles)
        save_image(picture, folder / f"step-{run.global_step:06d}.png")
        for tracker in run.accelerator.trackers:
            if tracker.name in _IMAGE_TRACKERS:
                pixels = np.asarray(picture)[None]
                tracker.log_images({"samples": pixels}, step=run.global_step, **_IMAGE_TRACKERS[tracker.name])

    with run.evaluating():
        try:
            images = make_images(range(count)) if run.accelerator.is_main_process else []
        except NonFiniteImages as error:
            run.print(f"warning: step {run.global_step}: no samples: {error}")
            images = []
        run.write("the samples", lambda: save(images) if images else None)


@dataclasses.dataclass(frozen=True)
class SampleEvaluation:
    """FID and KID of the first `num_images` samples. Sample k depends only on the seed and k."""

    reference: FeatureStatistics
    features: FeatureExtractor
    metrics: tuple[str, ...]
    num_images: int
    batch_size: int
    seed: int

    @classmethod
    def from_run(cls, run: "TrainingRun") -> "SampleEvaluation":
        """Load the feature network and the reference before the first step, so that mistakes are reported early."""
        options = run.config.monitoring
        metrics = parse_metrics(options.eval_metric)
        features = load_features(options.eval_features, run.device)
        reference = _reference_statistics(run, features)
        check_features(reference, features)
        check_features_kept(metrics, reference)
        for warning in evaluation_warnings(metrics, options.num_eval_images, reference):
            run.print(f"warning: --eval_steps: {warning}")
        seed = run.config.optimization.seed
        return cls(reference, features, metrics, options.num_eval_images, run.size.train_batch_size, seed)

    def compute(self, run: "TrainingRun", make_images: "MakeImages") -> dict[str, float]:
        """
        Return FID and KID.

        The result is empty if images are not finite, or if the run has received a signal to stop, since making all
        images would delay its checkpoint.
        """
        with run.evaluating():
            batches = with_progress(
                self._batches(run, make_images), self.num_images, self.batch_size, "FID of the samples"
            )
            try:
                result = evaluate_images(batches, self.reference, self.features, self.metrics, self.seed)
            except WorkSkipped as reason:
                run.print(f"warning: step {run.global_step}: no {' and '.join(self.metrics)}: {reason}")
                return {}
        values = {name: result[name] for name in ("fid", "kid", "kid_std") if name in result}
        run.print(f"step {run.global_step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
        return values

    def _batches(
        self, run: "TrainingRun", make_images: Callable[[Sequence[int]], list[Image.Image]]
    ) -> Iterator[torch.Tensor]:
        step = run.accelerator.num_processes * self.batch_size
        for start in range(run.accelerator.process_index * self.batch_size, self.num_images, step):
            if run.is_stopping:
                raise WorkSkipped("the run is stopping")
            try:
                images = make_images(range(start, min(start + self.batch_size, self.num_images)))
            except NonFiniteImages as error:
                raise WorkSkipped(str(error)) from error
            pixels = np.stack([np.asarray(with_channels(image, 3)) for image in images])
            yield torch.from_numpy(pixels).permute(0, 3, 1, 2)


def _reference_statistics(run: "TrainingRun", features: FeatureExtractor) -> FeatureStatistics:
    """Return the statistics of `--eval_reference`, or of all training images."""
    source, data = run.config.monitoring.eval_reference, run.config.data
    if source is None:
        return reference_statistics(_training_images(run), features, default_cache_dir())[0]
    check_reference(source)
    if is_statistics(source):
        statistics = FeatureStatistics.load(source)
        check_size(statistics, source, run.resolution, run.resolution)
        return statistics
    # Cropped and resized like the training images.
    how = {name: getattr(data, name) for name in ("crop_size", "image_interpolation_mode", "on_bad_image")}
    reference = open_reference(source, run.resolution, min(run.data.channels, 3), **how)
    return reference_statistics(reference, features, default_cache_dir())[0]


def _training_images(run: "TrainingRun") -> Reference:
    data = run.config.data
    for flag in ("precomputed_dir", "streaming"):
        if getattr(data, flag):
            raise UserError(f"--eval_steps cannot read all training images with --{flag}: pass --eval_reference")
    rows = run.data.train.rows
    transform = dataclasses.replace(
        rows.transform, channels=min(run.data.channels, 3), center_crop=True, random_flip=False
    )
    return Reference(rows.source, "train", transform, data.on_bad_image == "skip", data.dataloader_num_workers)


class SkipMonitor:
    """
    Features and gradients of the long skips, measured in the first batch of every `diagnose_steps`-th step.

    Other steps run without hooks.
    """

    def __init__(self, run: "TrainingRun", model: ModelMixin):
        self.run = run
        self.every = run.config.monitoring.diagnose_steps
        self._statistics = SkipStatistics(model) if self.every else None
        self._hooks = ExitStack()
        self._is_measuring = False
        self._table: torch.Tensor | None = None

    def begin(self):
        """Measure the next forward and backward pass if the step is due."""
        step = self.run.global_step + 1
        if self.every and (step % self.every == 0 or step == self.run.size.max_train_steps):
            scaler = self.run.accelerator.scaler
            self._loss_scale = 1.0 if scaler is None else scaler.get_scale()
            self._hooks.enter_context(self._statistics.attached())
            self._is_measuring = True

    def end(self):
        """End the measurement after the backward pass, so that validations run without hooks."""
        if self._is_measuring:
            self._table = self._statistics.table()
        self.close()

    def close(self):
        """Remove the hooks."""
        self._is_measuring = False
        self._hooks.close()

    def take(self) -> dict[str, Any]:
        """Return the values for the log line of this step, by quantity and skip, from all processes."""
        if self._table is None:
            return {}
        table = self.run.accelerator.gather(self._table.permute(2, 0, 1).contiguous()).permute(1, 2, 0)
        self._table = None
        measured = dict(zip(QUANTITIES, table.cpu()))
        # Backward has seen the mean of the losses, divided by the number of accumulations.
        scale = self.run.size.train_batch_size * self.run.accelerator.gradient_accumulation_steps / self._loss_scale
        gradients = {name: measured[name] * scale for name in ("hidden_gradient", "skip_gradient")}
        names = ("hidden_rms", "skip_rms", "skip_share", "factor")
        values = {name: measured[name].mean(1) for name in names}
        values |= {name: gradient.mean(1) for name, gradient in gradients.items()}
        values |= {f"{name}_variation": g.std(1, correction=0) / g.mean(1) for name, g in gradients.items()}
        return {"skips": {name: value.tolist() for name, value in values.items()}}


def skip_scalars(line: dict[str, Any]) -> dict[str, float]:
    """Return the figures of the skips in a log line as trackers take them: one number per name."""
    return {
        f"skips/{name}/{i}": value
        for name, values in line.get("skips", {}).items()
        for i, value in enumerate(values, start=1)
        if math.isfinite(value)
    }


class MetricsFile:
    """A file with one line per logged step. Resuming a run does not repeat lines."""

    def __init__(self, file: Path):
        self.file = file
        self.broken_file = file.with_name(f"{file.name}.broken")

    def resume_at(self, step: int) -> int:
        """
        Remove the lines of later steps, which the run will repeat, and an incomplete last line.

        Other lines that cannot be read are moved to another file. Returns their number.
        """
        kept, later, broken = [], [], []
        for text in self._texts():
            line = parse_log_line(text)
            if line is not None and line["step"] <= step:
                # Steps increase, so a later step before this line is an error.
                broken, later = broken + later, []
                kept.append(text)
            elif line is None and text.endswith(b"\n"):
                broken.append(text)
            else:
                later.append(text)
        if broken:
            with open(self.broken_file, "ab") as file:
                file.writelines(broken)
        atomic_write(self.file, lambda partial: partial.write_bytes(b"".join(kept)))
        return len(broken)

    def write(self, line: dict[str, Any]):
        # JSON has no infinities: they are written as null.
        text = json.dumps(without_infinities(line), allow_nan=False)
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def last(self, name: str) -> Any:
        """Return the latest value of a metric, or None."""
        lines = filter(None, map(parse_log_line, reversed(self._texts())))
        return next((line[name] for line in lines if name in line), None)

    def _texts(self) -> list[bytes]:
        return self.file.read_bytes().splitlines(keepends=True) if self.file.exists() else []
