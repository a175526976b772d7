"""
Linear probes: how well can a linear classifier read the class of an image from the features of each block?

After "Denoising Diffusion Autoencoders are Unified Self-supervised Learners" (DDAE, arXiv 2303.09769): images get a
little noise, the model runs once, and the features of a block are averaged, here over the cells of a grid.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ModelMixin
from torch import nn
from tqdm import tqdm

from scalelong_diffusers.diagnosis.diagnose import evaluating
from scalelong_diffusers.diagnosis.measure import Advance, ignore_progress
from scalelong_diffusers.models.mixin import skip_layout
from scalelong_diffusers.models.skips import SkipObserver
from scalelong_diffusers.noise import NoiseProcess


PIXELS, MIDDLE = "pixels", "middle"
# The model's input is averaged down to this size before the baseline classifies its pixels.
MAX_PIXELS = 32
# Weights of the squared norm in the loss of a probe. The best one is chosen on a tenth of the training images.
_PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)
_HELD_OUT = 10
TIMES = 1000  # of the training schedule; timesteps are numbers below it
BAR = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"


@dataclass(frozen=True)
class LabeledImages:
    """Clean images or latents with their noise and labels, and the model's other inputs."""

    clean: torch.Tensor
    noise: torch.Tensor
    labels: torch.Tensor
    conditions: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def first(self, count: int) -> "LabeledImages":
        """Return the first images."""
        conditions = {name: value[:count] for name, value in self.conditions.items()}
        return LabeledImages(self.clean[:count], self.noise[:count], self.labels[:count], conditions)


@dataclass(frozen=True)
class Features:
    """The features of all images by block and timestep, each (images, channels), and the labels of the images."""

    values: dict[tuple[str, int], torch.Tensor]
    labels: torch.Tensor


@dataclass(frozen=True)
class BlockAccuracy:
    """
    How well the features of a block tell the classes.

    Args:
        block: "pixels", "encoder i", "middle" or "decoder i", with the number i of the skip that the block makes or
            reads.
        where: name of the layer that reads the skip, for a block of the decoder.
        width: number of features.
        accuracies: fraction of the test images that the probe of each timestep classifies correctly.
    """

    block: str
    where: str
    width: int
    accuracies: list[float]


@dataclass(frozen=True)
class ProbeResult:
    """
    The accuracies of all probes of a model.

    Args:
        model: class and size of the model.
        num_images, num_test_images: number of images for training and for testing the probes.
        chance: accuracy of always guessing the most frequent class.
        grid: features are averaged over grid x grid cells of the image.
        timesteps: the timesteps of the noise, in thousandths of the training schedule.
        blocks: the blocks in the order of the forward pass. The first one is the noisy input itself, the baseline.
    """

    model: str
    num_images: int
    num_test_images: int
    num_classes: int
    chance: float
    grid: int
    timesteps: list[int]
    blocks: list[BlockAccuracy]

    @property
    def summary(self) -> str:
        """A sentence about the best block and the baseline."""
        pixels, *blocks = self.blocks
        best = max(blocks, key=lambda block: max(block.accuracies))
        accuracy = max(best.accuracies)
        timestep = self.timesteps[best.accuracies.index(accuracy)]
        return (
            f"A linear probe of {best.block} at timestep {timestep} classifies {percent(accuracy)} of the test "
            f"images, a probe of the pixels at most {percent(max(pixels.accuracies))}, and chance "
            f"{percent(self.chance)}."
        )

    @property
    def size(self) -> str:
        """The numbers of images, classes and cells in words."""
        error = percent(math.sqrt(0.25 / self.num_test_images))
        return (
            f"{self.num_images:,} images to train the probes and {self.num_test_images:,} to test them, "
            f"{self.num_classes} classes, features averaged over {self.grid} x {self.grid} cells; the standard error "
            f"of an accuracy is at most {error}"
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, with a heading."""
        rows = [("block", "where it reads a skip", "width", *(f"t = {t}" for t in self.timesteps))]
        for block in self.blocks:
            rows.append((block.block, block.where, str(block.width), *map(percent, block.accuracies)))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON can store it."""
        return dataclasses.asdict(self)


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def probe(
    model: ModelMixin,
    train: Iterable[LabeledImages],
    test: Iterable[LabeledImages],
    noising: NoiseProcess,
    timesteps: Sequence[int],
    grid: int = 1,
    advance: Advance = ignore_progress,
    show_progress: bool = False,
) -> ProbeResult:
    """
    Train a linear probe for each block and timestep of a model, and return their accuracies on the test images.

    Args:
        grid: average the features over grid x grid cells of the image, or over all positions if it is 1.
        advance: is called with the number of images that have run, once for each timestep.
        show_progress: show a progress bar while the probes are trained.
    """
    skips = skip_layout(model).find(model)
    with evaluating(model):
        features = collect_features(model, train, noising, timesteps, grid, advance)
        tested = collect_features(model, test, noising, timesteps, grid, advance)
    names = [name for name in block_names(len(skips)) if (name, timesteps[0]) in features.values]
    readers = {f"decoder {skip.index}": skip.where for skip in skips}
    blocks = []
    for block in tqdm(names, "probes", disable=not show_progress, bar_format=BAR):
        width = features.values[block, timesteps[0]].shape[1]
        accuracies = [accuracy_on_test(features, tested, block, t) for t in timesteps]
        blocks.append(BlockAccuracy(block, readers.get(block, ""), width, accuracies))
    most_frequent = features.labels.bincount().argmax()
    return ProbeResult(
        model=f"{type(model).__name__}, {model.num_parameters():,} parameters",
        num_images=len(features.labels),
        num_test_images=len(tested.labels),
        num_classes=count_classes(features, tested),
        chance=_accuracy(most_frequent, tested.labels),
        grid=grid,
        timesteps=list(timesteps),
        blocks=blocks,
    )


def accuracy_on_test(features: Features, tested: Features, block: str, timestep: int) -> float:
    """Train the probe of a block and timestep, and return its accuracy on the test images."""
    classify = fit_probe(features.values[block, timestep], features.labels, count_classes(features, tested))
    return _accuracy(classify(tested.values[block, timestep]), tested.labels)


def count_classes(*sets: Features) -> int:
    """Return the number of classes, which are numbered from 0."""
    return 1 + max(int(features.labels.max()) for features in sets)


def block_names(num_skips: int) -> list[str]:
    """Return the names of the baseline and of all blocks in the order of the forward pass."""
    outermost_first = range(1, num_skips + 1)
    encoder = [f"encoder {i}" for i in outermost_first]
    return [PIXELS, *encoder, MIDDLE, *(f"decoder {i}" for i in reversed(outermost_first))]


@torch.no_grad()
def collect_features(
    model: ModelMixin,
    batches: Iterable[LabeledImages],
    noising: NoiseProcess,
    timesteps: Sequence[int],
    grid: int = 1,
    advance: Advance = ignore_progress,
) -> Features:
    """Run the model on all images with the noise of each timestep, and return the features of its blocks."""
    observer = FeatureObserver(model, grid)
    parts: dict[tuple[str, int], list[torch.Tensor]] = {}
    labels = []
    with observer.attached():
        for batch in batches:
            for t in timesteps:
                steps = noising.timesteps(
                    torch.full((len(batch.clean),), (t + 0.5) / TIMES, device=batch.clean.device)
                )
                noisy = noising.add_noise(batch.clean, batch.noise, steps)
                model(noisy, steps, **batch.conditions)
                found = {PIXELS: _pixels(noisy), **observer.features}
                for block, values in found.items():
                    parts.setdefault((block, t), []).append(values.float().cpu())
                advance(len(noisy))
            labels.append(batch.labels.cpu())
    return Features({key: torch.cat(values) for key, values in parts.items()}, torch.cat(labels))


def _pixels(images: torch.Tensor) -> torch.Tensor:
    if max(images.shape[2:]) > MAX_PIXELS:
        images = F.adaptive_avg_pool2d(images, MAX_PIXELS)
    return images.flatten(1)


class FeatureObserver(SkipObserver):
    """
    Averages the output of each block over the cells of a grid, in each forward pass.

    The skips are the outputs of the encoder's blocks. A hidden state that meets a skip is the output of the middle or
    of a decoder block. Only the output of the last block meets nothing. It is left out if that block is not a single
    module, as in Stable Cascade.
    """

    def __init__(self, model: ModelMixin, grid: int):
        self.model = model
        self.layout = skip_layout(model)
        self.grid = grid
        self.skips = {skip.index: skip for skip in self.layout.find(model)}
        self.features: dict[str, torch.Tensor] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        outermost = self.skips[1]
        last = self.model.get_submodule(outermost.block)
        handles = self.layout.observe(self.model, self, list(self.skips.values()))
        handles.append(last.register_forward_hook(self._last_output))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def skip(self, index: int, skip: torch.Tensor) -> torch.Tensor:
        self._keep(f"encoder {index}", skip, index)
        return skip

    def hidden(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        block = MIDDLE if index == len(self.skips) else f"decoder {index + 1}"
        skip = self.skips[index]
        self._keep(block, hidden.narrow(skip.channel_dim, 0, skip.hidden_width), index)
        return hidden

    def _last_output(self, block: nn.Module, args: tuple, output: torch.Tensor | tuple):
        self._keep("decoder 1", output[0] if isinstance(output, tuple) else output, 1)

    def _keep(self, block: str, values: torch.Tensor, index: int):
        image = self.layout.image_of(self.model, values) if self.grid > 1 else None
        if image is None:
            positions = [dim for dim in range(1, values.ndim) if dim != self.skips[index].channel_dim]
            self.features[block] = values.mean(positions, dtype=torch.float32)
        else:
            cells = [min(self.grid, size) for size in image.shape[2:]]
            self.features[block] = F.adaptive_avg_pool2d(image.float(), cells).flatten(1)


Classify = Callable[[torch.Tensor], torch.Tensor]


def fit_probe(features: torch.Tensor, labels: torch.Tensor, num_classes: int) -> Classify:
    """
    Train a linear classifier on standardized features by multinomial logistic regression.

    Returns a function from features to classes.
    """
    mean, std = features.mean(0), features.std(0)
    std = torch.where(std > 1e-5 * mean.abs(), std, 1)  # of features that vary more than rounding errors
    scaled = (features - mean) / std
    held_out = math.ceil(len(labels) / _HELD_OUT)
    linear = nn.Linear(features.shape[1], num_classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    best, weights = -1.0, {}
    for penalty in _PENALTIES:  # from strong to weak: each fit starts from the previous one
        _minimize(linear, scaled[held_out:], labels[held_out:], penalty)
        accuracy = _accuracy(linear(scaled[:held_out]).argmax(1), labels[:held_out])
        if accuracy > best:
            best, weights = accuracy, {name: value.clone() for name, value in linear.state_dict().items()}
    linear.load_state_dict(weights)

    def classify(features: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return linear((features - mean) / std).argmax(1)

    return classify


def _minimize(linear: nn.Linear, features: torch.Tensor, labels: torch.Tensor, penalty: float):
    optimizer = torch.optim.LBFGS(
        linear.parameters(), max_iter=100, tolerance_change=1e-5, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(linear(features), labels) + penalty / 2 * linear.weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)


def _accuracy(predicted: torch.Tensor, labels: torch.Tensor) -> float:
    return (predicted == labels).float().mean().item()
