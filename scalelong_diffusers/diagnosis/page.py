"""Build the page of a diagnosis."""

import html
from operator import attrgetter

from scalelong_diffusers.charts import Curve
from scalelong_diffusers.diagnosis.figures import BINS, NOISE_LEVELS, Diagnosis
from scalelong_diffusers.diagnosis.page_parts import (
    IN_ORDER,
    curves_figure,
    document,
    html_table,
    key,
    paragraph,
    section,
)
from scalelong_diffusers.diagnosis.report import data_notes, headroom_note, skip_rows, summary
from scalelong_diffusers.diagnosis.rules import RULES


_SKIP_NOTE = (
    "i = 1 is the outermost skip. Hidden and skip: root mean squares where both meet. Share: share of the skip in the "
    "mean square of the layer that joins it to the main path. Gradients: mean norm over images and timesteps of the "
    "gradient of an image's loss, its coefficient of variation, and largest / median in parentheses."
)
_NOISE_NOTE = (
    "Root mean square of the change of the output when noise N(0, s^2) is added to the input, which Theorem 3.4 "
    "bounds. The weights are the same with both scalings."
)
_RULES_NOTE = (
    "The verdict follows from these rules. They are not validated yet: trust the figures above more than the verdict "
    "(docs/diagnose.md)."
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
        section("The long skips", paragraph(_SKIP_NOTE), html_table(skip_rows(diagnosis))),
        section("Data and S", *map(paragraph, data_notes(diagnosis)), _data_charts(diagnosis)),
        section("Sensitivity to input noise", paragraph(_NOISE_NOTE), _sensitivity_chart(diagnosis)),
        section("Numerical headroom", paragraph(headroom_note(diagnosis.headroom)), _headroom_charts(diagnosis)),
        section("The rules", paragraph(_RULES_NOTE), _rules(diagnosis)),
    ]
    about = f"{summary(diagnosis)}; {data}."
    return document(f"Diagnosis of {source}", diagnosis.verdict, about, sections)


def _skip_charts(diagnosis: Diagnosis) -> str:
    pairs = {"Root mean square": [(skip.hidden_rms, skip.skip_rms) for skip in diagnosis.skips]}
    for title, value in _OF_GRADIENTS.items():
        pairs[title] = [(value(skip.hidden_gradient), value(skip.skip_gradient)) for skip in diagnosis.skips]
    names = "hidden state or main path", "skip"
    charts = [
        curves_figure(
            title, {name: [*enumerate(row, 1)] for name, row in zip(names, zip(*values))}, "skip i (1: outermost)"
        )
        for title, values in pairs.items()
    ]
    return f'{key(*names)}<div class="pair">{"".join(charts)}</div>'


_OF_GRADIENTS = {
    "Gradient norm": attrgetter("mean"),
    "Variation of the gradient norm": attrgetter("variation"),
    "Largest / median gradient norm": attrgetter("peak"),
}


def _data_charts(diagnosis: Diagnosis) -> str:
    power, expected, ratio = (_over_schedule(diagnosis, name) for name in ("power", "expected_power", "noise_ratio"))
    charts = curves_figure("|x_t|^2 / m", {"expected": expected, "measured": power}, _SCHEDULE)
    charts += curves_figure("|eps|^2 / |x_t|^2", {"measured": ratio}, _SCHEDULE)
    return f'{key("expected", "measured")}<div class="pair">{charts}</div>'


_SCHEDULE = "% of the training schedule (100: only noise)"


def _over_schedule(diagnosis: Diagnosis, figure: str) -> Curve:
    """Return a figure over the training schedule, where it is known. Timesteps need not be integers."""
    values = map(attrgetter(figure), diagnosis.schedule)
    return [(round(100 * (k + 0.5) / BINS), value) for k, value in enumerate(values) if value is not None]


def _sensitivity_chart(diagnosis: Diagnosis) -> str:
    percent = [round(100 * level) for level in NOISE_LEVELS]
    curves = {name: list(zip(percent, changes)) for name, changes in diagnosis.sensitivity.items()}
    drawn = curves_figure("Change of the output", curves, "s, % of the standard deviation of eps", first=0)
    return f'{key(*curves)}<div class="pair">{drawn}</div>'


def _headroom_charts(diagnosis: Diagnosis) -> str:
    blocks: Curve = [*enumerate(diagnosis.headroom.blocks.values(), 1)]
    charts = curves_figure("Largest |activation|", {"model": blocks}, IN_ORDER)
    charts += curves_figure(
        "Largest |activation| over time", {"model": _over_schedule(diagnosis, "largest")}, _SCHEDULE
    )
    if diagnosis.headroom.depths:
        depths = list(diagnosis.headroom.depths.items())
        charts += curves_figure("Largest |activation|, untrained", {"models": depths}, "number of layers")
    return f'<div class="pair">{charts}</div>'


def _rules(diagnosis: Diagnosis) -> str:
    """Return a list of all rules, with their figures."""
    entries = []
    for rule, finding in zip(RULES, diagnosis.findings):
        value = "not measured" if finding.value is None else f"{finding.value:.3g}"
        term = f"{rule.name}: {value}, {'applies' if finding.applies else 'does not apply'}"
        entries.append(f"<dt>{html.escape(term)}</dt><dd>{html.escape(rule.statement)}</dd>")
    return f"<dl>{''.join(entries)}</dl>"
