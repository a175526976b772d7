"""Say in text and tables what a diagnosis found, for the terminal and the page."""

from collections.abc import Sequence

from scalelong_diffusers.diagnosis.figures import LARGEST, NOISE_LEVELS, Diagnosis, Headroom, SkipFigures, Spread
from scalelong_diffusers.scaling.factors import UPPER_NOISE_RATIO


SKIP_COLUMNS = (
    *("i", "where", "factor", "hidden", "skip", "share"),
    *("main gradient", "variation", "skip gradient", "variation"),
)


def report_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the figures and the verdict as lines of text."""
    levels = ", ".join(f"{level:g}" for level in NOISE_LEVELS)
    changes = "; ".join(f"{name} {', '.join(f'{c:.3g}' for c in cs)}" for name, cs in diagnosis.sensitivity.items())
    return [
        summary(diagnosis),
        *aligned(skip_rows(diagnosis)),
        *data_notes(diagnosis),
        f"Input noise s = {levels} changes the output by: {changes}.",
        headroom_note(diagnosis.headroom),
        *_depth_notes(diagnosis.headroom),
        "verdict:",
        *diagnosis.verdict,
    ]


def summary(diagnosis: Diagnosis) -> str:
    """Return the model's class, size and scaling, and how it was measured."""
    untrained = "" if diagnosis.is_trained else ", untrained"
    return (
        f"{diagnosis.model}{untrained}, N = {len(diagnosis.skips)}, {diagnosis.scaling}; {diagnosis.num_images} "
        f"samples, loss {diagnosis.loss:.4g}"
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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. All columns except the second one are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if k == 1 else cell.rjust(width) for k, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


def data_notes(diagnosis: Diagnosis) -> list[str]:
    """Return sentences about S and kappa, and about the energy of the noisy inputs."""
    data = diagnosis.data
    targets = {data.noise_ratio: data.kappa, UPPER_NOISE_RATIO: data.upper_kappa}
    known = [f"S = {target:.3g} with kappa = {kappa:.4g}" for target, kappa in targets.items() if kappa is not None]
    unknown = [f"S = {target:.3g}" for target in targets]
    advice = f"CS has {' and '.join(known)}" if known else f"no kappa below 1 gives {' or '.join(unknown)}"
    energy = "" if data.skip_energy is None else f"The factors of this model give S = {data.skip_energy:.4g}. "
    return [
        f"The paper estimates S from |eps|^2 / |x_t|^2: here {data.noise_ratio:.3g} on average and at most "
        f"{data.highest_noise_ratio:.3g}. {energy}With N = {len(diagnosis.skips)} skips, {advice}.",
        f"The mean of |x_t|^2 / m is {data.power:.4g}. With the mean square of this data, {data.mean_square:.3g}, "
        f"{data.expected_power:.4g} is expected, and {data.lemma_power:.4g} for data uniform in [-1, 1] (Lemma 3.2).",
    ]


def headroom_note(headroom: Headroom) -> str:
    ranges = " and ".join(f"{name} ends at {limit:.5g}" for name, limit in LARGEST.items())
    return f"The largest activation is {headroom.largest:.4g}, in {headroom.largest_block}; {ranges}."


def _depth_notes(headroom: Headroom) -> list[str]:
    listed = ", ".join(f"{largest:.3g} with {layers} layers" for layers, largest in headroom.depths.items())
    return [f"The largest activation of untrained models like this one is {listed}."] if listed else []
