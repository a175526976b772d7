"""`diagnose` runs all measurements of a model and judges it."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from diffusers import ModelMixin
from torch import nn
from tqdm import tqdm

from scalelong_diffusers.diagnosis.figures import DEPTHS, NOISE_LEVELS, Diagnosis, Headroom
from scalelong_diffusers.diagnosis.measure import (
    Samples,
    data_figures,
    largest_by_depth,
    measure_skips,
    noise_sensitivity,
    skip_figures,
    with_skip_scaling,
)
from scalelong_diffusers.diagnosis.rules import judge, verdict
from scalelong_diffusers.models.uvit import UViTModel
from scalelong_diffusers.noise import NoiseProcess
from scalelong_diffusers.scaling import SkipScalingConfig


# One of this many samples is used where the model runs many times.
_FEWER = 8
_SAMPLES_BY_DEPTH = 2
PLAIN = "plain"


def diagnose(
    model: ModelMixin,
    batches: Sequence[Samples],
    noising: NoiseProcess,
    is_trained: bool = True,
    show_progress: bool = True,
) -> Diagnosis:
    """
    Measure a scaled model on samples, and judge it. The model is unchanged afterwards.

    The model runs in eval mode. Its output under input noise is compared with its plain version or, if it is not
    scaled, with the default scaling.
    """
    few = batches[0].first(max(1, sum(map(len, batches)) // _FEWER))
    with evaluating(model), _progress(model, batches, few, show_progress) as bar:
        measured = measure_skips(model, batches, noising, lambda count: bar.update(2 * count))
        skips = skip_figures(model, measured)
        data, schedule = data_figures(batches, noising, measured, skips)
        sensitivity = {}
        for name, config in _compared(model.skip_scaler.config, len(skips)).items():
            with with_skip_scaling(model, config):
                sensitivity[name] = noise_sensitivity(model, few, noising, bar.update)
        depths = largest_by_depth(model, few.first(_SAMPLES_BY_DEPTH), noising, bar.update)
    diagnosis = Diagnosis(
        model=f"{type(model).__name__}, {model.num_parameters():,} parameters",
        is_trained=is_trained,
        scaling=model.skip_scaler.config,
        num_images=len(measured.losses),
        nonfinite=measured.count_nonfinite(),
        loss=measured.losses.mean().item(),
        skips=skips,
        data=data,
        schedule=schedule,
        sensitivity=sensitivity,
        headroom=Headroom(dict(zip(measured.blocks, measured.largest.amax(1).tolist())), depths),
    )
    findings = judge(diagnosis)
    return dataclasses.replace(diagnosis, findings=findings, verdict=verdict(findings, is_trained))


def _compared(config: SkipScalingConfig, num_skips: int) -> dict[str, SkipScalingConfig | None]:
    """Return the scalings whose sensitivity is compared: plain, and the model's own (None) or the default."""
    if config.method == "none":
        other = SkipScalingConfig("cs" if num_skips > 1 else "constant")  # CS does not change the outermost skip
        return {PLAIN: None, f"{other.method}, kappa {other.kappa}": other}
    return {PLAIN: SkipScalingConfig("none"), config.method: None}


@contextmanager
def _progress(model: ModelMixin, batches: Sequence[Samples], few: Samples, show: bool) -> Iterator[tqdm]:
    """Show a progress bar that counts forward passes of samples."""
    total = 2 * sum(map(len, batches)) + 2 * (1 + len(NOISE_LEVELS)) * len(few)
    if isinstance(model, UViTModel):
        samples = min(_SAMPLES_BY_DEPTH, len(few))
        total += sum(samples * layers // model.config.num_layers for layers in DEPTHS)
    layout = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
    with tqdm(total=total, desc="diagnosis", disable=not show, bar_format=layout) as bar:
        yield bar


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to eval mode, and restore the mode of each of its modules afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
