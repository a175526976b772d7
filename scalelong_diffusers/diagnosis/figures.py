"""The figures of a diagnosis: what has been measured, and what the rules say about it."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from scalelong_diffusers.files import without_infinities
from scalelong_diffusers.scaling import SkipScalingConfig


# Standard deviations of the noise that is added to the input (Fig 3c).
NOISE_LEVELS = (0.05, 0.1, 0.25, 0.5, 1.0)
# Numbers of layers of the untrained U-ViTs whose activations are compared.
DEPTHS = (12, 28, 48)
BINS = 10  # of the training schedule
LARGEST = {"fp16": torch.finfo(torch.float16).max, "bf16": torch.finfo(torch.bfloat16).max}


@dataclass(frozen=True)
class Spread:
    """Mean of the samples, coefficient of variation (standard deviation / mean), and largest / median."""

    mean: float
    variation: float
    peak: float

    @classmethod
    def of(cls, values: torch.Tensor) -> "Spread":
        mean, median = values.mean(), values.median()
        return cls(mean.item(), (values.std(correction=0) / mean).item(), (values.max() / median).item())


@dataclass(frozen=True)
class SkipFigures:
    """
    The figures of one long skip, over all samples.

    `skip_share` is None if no single layer joins the skip to the residual path. The factors are None if the method has
    none.
    """

    i: int
    where: str
    width: int
    hidden_rms: float
    skip_rms: float
    skip_share: float | None
    factor: float | None
    factor_std: float | None
    factor_square: float | None
    hidden_gradient: Spread
    skip_gradient: Spread


@dataclass(frozen=True)
class Bin:
    """
    Figures of a tenth of the training schedule.

    Args:
        timestep: mean timestep.
        power, expected_power: |x_t|^2 / m, measured and expected.
        noise_ratio: |eps|^2 / |x_t|^2.
        largest: largest |activation|, None if no sample has such a timestep.
    """

    timestep: float
    power: float
    expected_power: float
    noise_ratio: float
    largest: float | None


@dataclass(frozen=True)
class DataFigures:
    """
    What the data says about S (section 4.1 of the paper). m is the number of values of a sample.

    Args:
        mean_square: mean square of the clean values.
        power: mean of |x_t|^2 / m over the schedule.
        expected_power: alpha_t^2 mean_square + sigma_t^2 on average, as in Lemma 3.2.
        lemma_power: the same for the data of the lemma, uniform in [-1, 1].
        noise_ratio: mean of |eps|^2 / |x_t|^2 over the schedule, the lower estimate of S.
        highest_noise_ratio: the largest |eps|^2 / |x_t|^2.
        skip_energy: S of the present factors, None if the method has no factors.
        kappa, upper_kappa: kappa for which S is the lower estimate, and the paper's upper estimate of 5. None if no
            kappa below 1 gives it.
    """

    mean_square: float
    power: float
    expected_power: float
    lemma_power: float
    noise_ratio: float
    highest_noise_ratio: float
    skip_energy: float | None
    kappa: float | None
    upper_kappa: float | None


@dataclass(frozen=True)
class Headroom:
    """Largest |activation| of each block in the order in which they run, and of untrained models by depth."""

    blocks: dict[str, float]
    depths: dict[int, float]

    @property
    def largest_block(self) -> str:
        return max(self.blocks, key=self.blocks.get)

    @property
    def largest(self) -> float:
        return self.blocks[self.largest_block]


@dataclass(frozen=True)
class Finding:
    """What a rule says about a model. `value` is None if the figure has not been measured."""

    rule: str
    value: float | None
    threshold: float
    applies: bool
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """
    The figures of a model and the verdict.

    Args:
        model: class and size of the model.
        is_trained: the model has trained weights.
        scaling: the skip scaling of the model.
        num_images: number of samples.
        nonfinite: number of samples whose loss or gradients are not finite.
        loss: mean loss of the samples.
        sensitivity: change of the output for each of NOISE_LEVELS, plain and scaled.
        findings: what the rules say.
        verdict: the same in sentences.
    """

    model: str
    is_trained: bool
    scaling: SkipScalingConfig
    num_images: int
    nonfinite: int
    loss: float
    skips: list[SkipFigures]
    data: DataFigures
    schedule: list[Bin]
    sensitivity: dict[str, list[float]]
    headroom: Headroom
    findings: list[Finding] = field(default_factory=list)
    verdict: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON can store it. Infinities and NaN are None."""
        content = dataclasses.asdict(self)
        content |= {"scaling": self.scaling.to_dict(), "noise_levels": NOISE_LEVELS}
        return without_infinities(content)
