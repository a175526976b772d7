"""`diagnose` runs all measurements of a model, and `report_lines` prints them as a table."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from diffusers import ModelMixin
from torch import nn
from tqdm import tqdm

from scalelong_diffusers.diagnosis.figures import (
    DEPTHS,
    NOISE_LEVELS,
    DataFigures,
    Diagnosis,
    Headroom,
    SkipFigures,
    Spread,
)
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
PLAIN = "plain"


def summary(diagnosis: Diagnosis) -> list[str]:
    """Return what the model is, and how it was measured."""
    about = f"{diagnosis.model}, N = {len(diagnosis.skips)}, {diagnosis.scaling}"
    return [about, f"{diagnosis.num_images} samples, loss {diagnosis.loss:.4g}"]


def report_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the figures and the verdict as lines of text."""
    rows = table(skip_rows(diagnosis))
    return [*summary(diagnosis), *rows, *_notes(diagnosis), "verdict:", *diagnosis.verdict]


def _notes(diagnosis: Diagnosis) -> list[str]:
    """Return a line for each of the other measurements."""
    levels = ", ".join(f"{level:g}" for level in NOISE_LEVELS)
    changes = "; ".join(f"{name} {', '.join(f'{c:.3g}' for c in cs)}" for name, cs in diagnosis.sensitivity.items())
    return [
        *_data_notes(diagnosis.data),
        f"input noise s = {levels}: the output changes by {changes}",
        *_headroom_notes(diagnosis.headroom),
    ]


SKIP_COLUMNS = (
    "i",
    "where",
    "factor",
    "hidden",
    "skip",
    "share",
    "gradient: main",
    "variation",
    "skip ",
    "variation ",
)


def skip_rows(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """Return the cells of the table of skips, with a heading."""
    rows = [SKIP_COLUMNS]
    for skip in diagnosis.skips:
        share = "-" if skip.skip_share is None else f"{100 * skip.skip_share:.0f} %"
        magnitudes = (f"{skip.hidden_rms:.3g}", f"{skip.skip_rms:.3g}", share)
        gradients = [word for spread in (skip.hidden_gradient, skip.skip_gradient) for word in _spread_words(spread)]
        rows.append((str(skip.i), skip.where, _factor_words(skip), *magnitudes, *gradients))
    return rows


def _factor_words(skip: SkipFigures) -> str:
    if skip.factor is None:
        return "-"
    return f"{skip.factor:.4g}" + (f" +- {skip.factor_std:.2g}" if skip.factor_std > 1e-3 else "")


def _spread_words(spread: Spread) -> tuple[str, str]:
    return f"{spread.mean:.3g}", f"{spread.variation:.2f} (x {spread.peak:.1f})"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. All columns except the second one are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if k == 1 else cell.rjust(width) for k, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


def _data_notes(data: DataFigures) -> list[str]:
    energy = "-" if data.skip_energy is None else f"{data.skip_energy:.4g}"
    kappas = [
        f"kappa = {kappa:.4g} gives S = {target:.3g}"
        for kappa, target in ((data.kappa, data.noise_ratio), (data.upper_kappa, 5.0))
        if kappa is not None
    ]
    return [
        f"data: mean square {data.mean_square:.3g}; |x_t|^2 / m {data.power:.3g}, expected {data.expected_power:.3g} "
        f"(Lemma 3.2 for uniform data: {data.lemma_power:.3g}); |eps|^2 / |x_t|^2 {data.noise_ratio:.3g}, at most "
        f"{data.highest_noise_ratio:.3g}",
        f"S = {energy}; {'; '.join(kappas) or 'no kappa below 1 gives the targets'}",
    ]


def _headroom_notes(headroom: Headroom) -> list[str]:
    block = max(headroom.blocks, key=headroom.blocks.get)
    notes = [f"largest activation: {headroom.largest:.4g} in {block} (fp16 ends at 65,504)"]
    if headroom.depths:
        listed = ", ".join(f"{largest:.3g} with {layers} layers" for layers, largest in headroom.depths.items())
        notes.append(f"largest activation of untrained models: {listed}")
    return notes


def diagnose(
    model: ModelMixin, batches: Sequence[Samples], noising: NoiseProcess, show_progress: bool = True
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
    blocks = dict(zip(measured.blocks, measured.largest.amax(1).tolist()))
    gradients = measured.values[-2:].flatten(0, 1)
    diagnosis = Diagnosis(
        model=f"{type(model).__name__}, {model.num_parameters():,} parameters",
        scaling=model.skip_scaler.config,
        num_images=len(measured.losses),
        nonfinite=int((~(measured.losses.isfinite() & gradients.isfinite().all(0))).sum()),
        loss=measured.losses.mean().item(),
        skips=skips,
        data=data,
        schedule=schedule,
        sensitivity=sensitivity,
        headroom=Headroom(blocks, depths),
    )
    findings = judge(diagnosis)
    return dataclasses.replace(diagnosis, findings=findings, verdict=verdict(findings))


_SAMPLES_BY_DEPTH = 2


def _compared(config: SkipScalingConfig, num_skips: int) -> dict[str, SkipScalingConfig | None]:
    """Return the scalings whose sensitivity is compared: plain, and the model's own or the default."""
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
