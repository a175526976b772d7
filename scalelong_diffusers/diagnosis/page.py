"""Build the page of a diagnosis."""

import html

from scalelong_diffusers.charts import Curve
from scalelong_diffusers.diagnosis.figures import LARGEST, NOISE_LEVELS, Diagnosis, Headroom
from scalelong_diffusers.diagnosis.page_parts import IN_ORDER, curves_figure, document, html_table, key, section
from scalelong_diffusers.diagnosis.report import skip_rows, summary
from scalelong_diffusers.diagnosis.rules import RULES


_RULES_NOTE = "<p>The verdict follows from these rules. docs/diagnose.md says how far to trust them.</p>"


_NOISE_NOTE = (
    "<p>Root mean square of the change of the output when noise N(0, s^2) is added to the input, which Theorem 3.4 "
    "bounds.</p>"
)


def build_page(diagnosis: Diagnosis, source: str, data: str) -> str:
    """
    Return the page as HTML.

    Args:
        source: name of the model.
        data: description of the data.
    """
    sections = [
        section("Features and gradients at each long skip", _skip_charts(diagnosis)),
        section("The long skips", _skip_note(), html_table(skip_rows(diagnosis))),
        section("Data and S", _data_note(diagnosis), _data_charts(diagnosis)),
        section("Sensitivity to input noise", _sensitivity(diagnosis)),
        section("Numerical headroom", _headroom(diagnosis)),
        section("The rules", _RULES_NOTE, _rules(diagnosis)),
    ]
    about = f"{summary(diagnosis)[0]}. {diagnosis.num_images} samples; {data}."
    return document(f"Diagnosis of {source}", diagnosis.verdict, about, sections)


def _skip_charts(diagnosis: Diagnosis) -> str:
    skips = diagnosis.skips
    names = "hidden state or main path", "skip"
    charts = [
        ("Root mean square", [s.hidden_rms for s in skips], [s.skip_rms for s in skips]),
        ("Gradient norm", [s.hidden_gradient.mean for s in skips], [s.skip_gradient.mean for s in skips]),
        (
            "Variation of the gradient norm",
            [s.hidden_gradient.variation for s in skips],
            [s.skip_gradient.variation for s in skips],
        ),
        (
            "Largest / median gradient norm",
            [s.hidden_gradient.peak for s in skips],
            [s.skip_gradient.peak for s in skips],
        ),
    ]
    drawn = [
        curves_figure(name, dict(zip(names, ([*enumerate(values, 1)] for values in pair))), "skip i (1: outermost)")
        for name, *pair in charts
    ]
    return f'{key(*names)}<div class="pair">{"".join(drawn)}</div>'


def _skip_note() -> str:
    return (
        "<p>i = 1 is the outermost skip. Hidden and skip: root mean squares where both meet. Share: share of the skip "
        "in the mean square of the layer that joins it to the main path. Gradients: mean norm over images and "
        "timesteps of the gradient of an image's loss, its coefficient of variation, and largest / median in "
        "parentheses.</p>"
    )


def _data_note(diagnosis: Diagnosis) -> str:
    data, n = diagnosis.data, len(diagnosis.skips)
    energy = "" if data.skip_energy is None else f" The present factors give S = {data.skip_energy:.4g}."
    kappas = [
        f"S = {target:.3g} with kappa = {kappa:.4g}"
        for kappa, target in ((data.kappa, data.noise_ratio), (data.upper_kappa, 5))
        if kappa is not None
    ]
    advice = f" For N = {n} skips, CS gives {' and '.join(kappas)}." if kappas else ""
    return (
        f"<p>The paper estimates S from |eps|^2 / |x_t|^2: here {data.noise_ratio:.3g} on average and at most "
        f"{data.highest_noise_ratio:.3g}.{energy}{advice} The mean of |x_t|^2 / m is {data.power:.4g}, expected from "
        f"the mean square of the data: {data.expected_power:.4g} (Lemma 3.2, for data uniform in [-1, 1]: "
        f"{data.lemma_power:.4g}).</p>"
    )


def _data_charts(diagnosis: Diagnosis) -> str:
    power = [(round(part.timestep), part.power) for part in diagnosis.schedule]
    expected = [(round(part.timestep), part.expected_power) for part in diagnosis.schedule]
    ratio = [(round(part.timestep), part.noise_ratio) for part in diagnosis.schedule]
    charts = curves_figure("|x_t|^2 / m", {"expected": expected, "measured": power}, "timestep")
    charts += curves_figure("|eps|^2 / |x_t|^2", {"": [], "measured": ratio}, "timestep")
    return f'{key("expected", "measured")}<div class="pair">{charts}</div>'


def _sensitivity(diagnosis: Diagnosis) -> str:
    percent = [round(100 * level) for level in NOISE_LEVELS]
    curves = {name: list(zip(percent, changes)) for name, changes in diagnosis.sensitivity.items()}
    drawn = curves_figure("Change of the output", curves, "s, % of the standard deviation of eps", first=0)
    return f'{_NOISE_NOTE}{key(*curves)}<div class="pair">{drawn}</div>'


def _headroom(diagnosis: Diagnosis) -> str:
    by_time = [(round(part.timestep), part.largest) for part in diagnosis.schedule if part.largest is not None]
    blocks: Curve = [*enumerate(diagnosis.headroom.blocks.values(), 1)]
    charts = curves_figure("Largest |activation|", {"": [], "model": blocks}, IN_ORDER)
    charts += curves_figure("Largest |activation| over time", {"": [], "model": by_time}, "timestep")
    if diagnosis.headroom.depths:
        depths = list(diagnosis.headroom.depths.items())
        charts += curves_figure("Largest |activation|, untrained", {"": [], "models": depths}, "number of layers")
    return f'{_headroom_note(diagnosis.headroom)}<div class="pair">{charts}</div>'


def _headroom_note(headroom: Headroom) -> str:
    block = max(headroom.blocks, key=headroom.blocks.get)
    ranges = " and ".join(f"{name} ends at {limit:.3g}" for name, limit in LARGEST.items())
    return f"<p>The largest activation is {headroom.largest:.4g}, in {html.escape(block)}; {ranges}.</p>"


def _rules(diagnosis: Diagnosis) -> str:
    rows = [("rule", "figure", "applies", "statement")]
    for rule, finding in zip(RULES, diagnosis.findings):
        value = "-" if finding.value is None else f"{finding.value:.3g}"
        rows.append((rule.name, value, "yes" if finding.applies else "no", rule.statement))
    return html_table(rows)
