"""What a model has learned so far: its loss on images held out, and a grid of samples."""

import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object

from scalelong_diffusers.data import Batch
from scalelong_diffusers.pipelines.base import NonFiniteImages
from scalelong_diffusers.pipelines.sampling import grid, save_image
from scalelong_diffusers.training.loop import TrainingLoop


BINS = 10


def validation_losses(
    loop: TrainingLoop, losses_of: Callable[[Any, Batch], torch.Tensor], models: Any = None
) -> dict[str, Any]:
    """
    The mean loss on the images that are held out, whose noise and timesteps are the same each time.

    `validation_loss` is of the weights that the run will save, `validation_loss_raw` of those that are being trained,
    where both are there, and `validation_loss_bins` that of each tenth of the timesteps, the clean images first.

    `models` is what `losses_of` is given: the module "unet", or, where a script trains several, `loop.modules`.
    """
    models = loop.modules["unet"] if models is None else models
    with loop.evaluating():
        mean, bins = _mean_losses(loop, losses_of, models)
    figures = {"validation_loss": mean, "validation_loss_bins": bins}
    if loop.ema is not None:
        with loop.evaluating(averaged=False):
            figures["validation_loss_raw"] = _mean_losses(loop, losses_of, models)[0]
    for name in ("validation_loss", "validation_loss_raw"):
        if name in figures and not math.isfinite(figures[name]):
            loop.say(f"warning: step {loop.global_step}: {name} is {figures[name]}")
    return figures


@torch.no_grad()
def _mean_losses(loop: TrainingLoop, losses_of, models: Any) -> tuple[float, list[float | None]]:
    sums = torch.zeros(2, BINS, dtype=torch.float64)
    for batch in loop.validation_batches():
        bins = (batch.uniform("timestep") * BINS).long()
        losses = losses_of(models, batch).cpu().double()
        sums[0].index_add_(0, bins, losses)
        sums[1].index_add_(0, bins, torch.ones_like(losses))
    # As numbers, since not every device has tensors of float64.
    totals, counts = torch.tensor(gather_object([sums.tolist()]), dtype=torch.float64).sum(0).tolist()
    per_bin = [total / count if count else None for total, count in zip(totals, counts)]
    return sum(totals) / sum(counts), per_bin


def save_samples(loop: TrainingLoop, make_images: Callable[[], list], columns: int | None = None):
    """A grid of what the averaged weights make, as `samples/step-<step>.png`; images that are not finite are none."""

    def save():
        try:
            images = make_images()
        except NonFiniteImages as error:
            loop.say(f"warning: step {loop.global_step}: no samples: {error}")
            return
        folder = loop.folder / "samples"
        folder.mkdir(exist_ok=True)
        save_image(grid(images, columns), folder / f"step-{loop.global_step:06d}.png")

    with loop.evaluating():
        loop.write("the samples", save)
