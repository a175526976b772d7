"""Build the page of a diagnosis: one file that loads nothing else, for screens, phones and printers, light or dark."""

import html
import math
from collections.abc import Sequence
from operator import attrgetter

from scalelong_diffusers.charts import HEIGHT, WIDTH, Curve, chart
from scalelong_diffusers.diagnosis.figures import BINS, NOISE_LEVELS, Diagnosis
from scalelong_diffusers.diagnosis.report import data_notes, headroom_note, skip_rows, summary
from scalelong_diffusers.diagnosis.rules import RULES


_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --paper: #ffffff; --soft: #5b6570; --line: #d5dae0;
  --a: #9a3412; --b: #1d4ed8; }
@media (prefers-color-scheme: dark) { :root { --text: #e8eaed; --paper: #15181c; --soft: #a9b2bc; --line: #3a424b;
  --a: #fdba74; --b: #93c5fd; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--paper); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p, figcaption { color: var(--soft); margin: .25rem 0 .75rem; } figure { margin: 0; }
.lead { font-size: 1.25rem; color: var(--text); }
.pair { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); gap: 1.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: left; font-weight: normal; }
td { white-space: nowrap; } td.number { text-align: right; } thead th { color: var(--soft); }
dd { color: var(--soft); margin: 0 0 .75rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 16px; }
.axis { stroke: var(--line); } .curve { fill: none; stroke-width: 2.5; }
.a { stroke: var(--a); stroke-dasharray: 7 4; } .b { stroke: var(--b); }
.key { display: inline-block; width: 2rem; border-top: 3px dashed var(--a); vertical-align: middle; }
.key.solid { border-top: 3px solid var(--b); }
@media (max-width: 40rem) { svg text { font-size: 18px; } th, td { padding: .2rem .3rem; } }
@media print { :root { --text: #000; --paper: #fff; --soft: #444; --line: #bbb; --a: #9a3412; --b: #1d4ed8; }
  body { max-width: none; font-size: .75rem; } figure, tr { break-inside: avoid; } h2, .keys { break-after: avoid; }
  .pair { grid-template-columns: 1fr 1fr; } .scroll { overflow: visible; } th, td { padding: .1rem .25rem; }
  svg text { font-size: 20px; } }
"""
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
    title = f"Diagnosis of {html.escape(source)}"
    sections = [
        _section("Features and gradients at each long skip", _skip_charts(diagnosis)),
        _section("The long skips", _paragraph(_SKIP_NOTE), _table(skip_rows(diagnosis))),
        _section("Data and S", *map(_paragraph, data_notes(diagnosis)), _data_charts(diagnosis)),
        _section("Sensitivity to input noise", _paragraph(_NOISE_NOTE), _sensitivity_chart(diagnosis)),
        _section("Numerical headroom", _paragraph(headroom_note(diagnosis.headroom)), _headroom_charts(diagnosis)),
        _section("The rules", _paragraph(_RULES_NOTE), _rules(diagnosis)),
    ]
    verdict = "".join(f'<p class="lead">{html.escape(sentence)}</p>' for sentence in diagnosis.verdict)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body><main>",
            f"<h1>{title}</h1>{verdict}{_paragraph(f'{summary(diagnosis)}; {data}.')}",
            *sections,
            "</main></body></html>\n",
        ]
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _skip_charts(diagnosis: Diagnosis) -> str:
    pairs = {"Root mean square": [(skip.hidden_rms, skip.skip_rms) for skip in diagnosis.skips]}
    for title, value in _OF_GRADIENTS.items():
        pairs[title] = [(value(skip.hidden_gradient), value(skip.skip_gradient)) for skip in diagnosis.skips]
    names = "hidden state or main path", "skip"
    charts = [
        _chart(title, {name: [*enumerate(row, 1)] for name, row in zip(names, zip(*values))}, "skip i (1: outermost)")
        for title, values in pairs.items()
    ]
    return f'{_key(*names)}<div class="pair">{"".join(charts)}</div>'


_OF_GRADIENTS = {
    "Gradient norm": attrgetter("mean"),
    "Variation of the gradient norm": attrgetter("variation"),
    "Largest / median gradient norm": attrgetter("peak"),
}


def _data_charts(diagnosis: Diagnosis) -> str:
    power, expected, ratio = (_over_schedule(diagnosis, name) for name in ("power", "expected_power", "noise_ratio"))
    charts = _chart("|x_t|^2 / m", {"expected": expected, "measured": power}, _SCHEDULE)
    charts += _chart("|eps|^2 / |x_t|^2", {"measured": ratio}, _SCHEDULE)
    return f'{_key("expected", "measured")}<div class="pair">{charts}</div>'


_SCHEDULE = "% of the training schedule (100: only noise)"


def _over_schedule(diagnosis: Diagnosis, figure: str) -> Curve:
    """Return a figure over the training schedule, where it is known. Timesteps need not be integers."""
    values = map(attrgetter(figure), diagnosis.schedule)
    return [(round(100 * (k + 0.5) / BINS), value) for k, value in enumerate(values) if value is not None]


def _sensitivity_chart(diagnosis: Diagnosis) -> str:
    percent = [round(100 * level) for level in NOISE_LEVELS]
    curves = {name: list(zip(percent, changes)) for name, changes in diagnosis.sensitivity.items()}
    drawn = _chart("Change of the output", curves, "s, % of the standard deviation of eps", first=0)
    return f'{_key(*curves)}<div class="pair">{drawn}</div>'


def _headroom_charts(diagnosis: Diagnosis) -> str:
    blocks: Curve = [*enumerate(diagnosis.headroom.blocks.values(), 1)]
    charts = _chart("Largest |activation|", {"model": blocks}, "block, in the order of the forward pass")
    charts += _chart("Largest |activation| over time", {"model": _over_schedule(diagnosis, "largest")}, _SCHEDULE)
    if diagnosis.headroom.depths:
        depths = list(diagnosis.headroom.depths.items())
        charts += _chart("Largest |activation|, untrained", {"models": depths}, "number of layers")
    return f'<div class="pair">{charts}</div>'


def _rules(diagnosis: Diagnosis) -> str:
    """Return a list of all rules, with their figures."""
    entries = []
    for rule, finding in zip(RULES, diagnosis.findings):
        value = "not measured" if finding.value is None else f"{finding.value:.3g}"
        term = f"{rule.name}: {value}, {'applies' if finding.applies else 'does not apply'}"
        entries.append(f"<dt>{html.escape(term)}</dt><dd>{html.escape(rule.statement)}</dd>")
    return f"<dl>{''.join(entries)}</dl>"


def _key(first: str, second: str) -> str:
    first, second = html.escape(first), html.escape(second)
    return f'<p class="keys"><span class="key"></span> {first} &nbsp; <span class="key solid"></span> {second}</p>'


def _chart(name: str, curves: dict[str, Curve], axis: str, first: int | None = None) -> str:
    """
    Return a figure of one or two curves. Values that are not finite or not positive are left out.

    `first` is the first value of the axis, by default of the curves.
    """
    drawn = {
        style: (label, [(x, y) for x, y in curve if math.isfinite(y) and y > 0])
        for style, (label, curve) in zip("ab"[-len(curves) :], curves.items())
    }
    drawn = {style: (label, curve) for style, (label, curve) in drawn.items() if len({x for x, _ in curve}) > 1}
    title = html.escape(name)
    if not drawn:
        return f"<figure><figcaption>{title}: too few finite values for a chart.</figcaption></figure>"
    ends = "; ".join(f"{label}: {curve[0][1]:.3g} to {curve[-1][1]:.3g}" for label, curve in drawn.values())
    text = html.escape(f"{name} by {axis}. {ends}.")
    first = min(curve[0][0] for _, curve in drawn.values()) if first is None else first
    content = chart({style: curve for style, (_, curve) in drawn.items()}, name, first=first, right=24, axis=axis)
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text}">{content}</svg>'
        f"<figcaption>{text}</figcaption></figure>"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls on its own, also by keyboard, if it is too wide for a phone."""
    heading, *others = rows
    heads = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in heading)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in others)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead>{body}</table></div>'


def _cell(text: str) -> str:
    return f"<td{' class=number' if text[:1].isdigit() else ''}>{html.escape(text)}</td>"
