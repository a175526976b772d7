"""Draw curves as SVG, for the demo page and the figures of the documentation."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


WIDTH, HEIGHT = 640, 320
_LEFT, _TOP, _BOTTOM = 72, 30, 56

Curve = list[tuple[int, float]]


def chart(
    curves: dict[str, Curve],
    name: str,
    first: int = 0,
    right: int = 12,
    labels: dict[str, str] | None = None,
    thin: dict[str, list[Curve]] | None = None,
    axis: str = "training step",
    linear: bool = False,
    mark_lowest: bool = False,
) -> str:
    """
    Return the content of an `svg` element with a view box of WIDTH x HEIGHT.

    Args:
        curves: curves by the class that styles them. The style sheet also styles `text` and the class "axis".
        name: name of the values.
        first: first value of the horizontal axis.
        right: width of the right margin, which holds the labels.
        labels: text at the end of a curve, by class.
        thin: more curves by class, drawn behind the others. They also have the class "thin".
        axis: name of the horizontal axis.
        linear: draw a linear value axis. The default is logarithmic.
        mark_lowest: draw a dot at the lowest value of each curve.
    """
    on_axis = float if linear else math.log10
    lines = [(style, curve) for style, several in (thin or {}).items() for curve in several]
    lines = [(f"thin {style}", curve) for style, curve in lines] + list(curves.items())
    last = max(step for _, curve in lines for step, _ in curve)
    values = [on_axis(value) for _, curve in lines for _, value in curve]
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def x(step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - right) * (step - first) / (last - first)

    def y(value: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (high - on_axis(value)) / span

    base = HEIGHT - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - right}" y1="{base}" y2="{base}"/>']
    for level in even_values(low, high) if linear else round_values(10**low, 10**high):
        height = y(level)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - right}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{level:g}</text>')
    for step in sorted({round(first + (last - first) * k / 4) for k in range(5)}):
        anchor = "end" if step == last else "middle"
        parts.append(f'<text x="{x(step):.1f}" y="{base + 20}" text-anchor="{anchor}">{step}</text>')
    parts.append(f'<text x="0" y="{_TOP - 14}">{html.escape(name)}</text>')
    parts.append(
        f'<text x="{(_LEFT + WIDTH - right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{html.escape(axis)}</text>'
    )
    for style, curve in lines:
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
        parts.append(f'<polyline class="curve {style}" points="{points}"/>')
    if mark_lowest:
        for style, curve in curves.items():
            step, value = min(curve, key=lambda point: point[1])
            parts.append(f'<circle class="{style}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="5"/>')
    if labels:
        ends = {style: y(curves[style][-1][1]) for style in labels}
        for style, height in _apart(ends).items():
            position = f'x="{WIDTH - right + 6}" y="{height + 4:.1f}"'
            parts.append(f'<text class="{style}" {position}>{html.escape(labels[style])}</text>')
    return "".join(parts)


@dataclass(frozen=True)
class Panel:
    """
    A chart of a figure.

    Args:
        name: name of the values.
        curves: curves by label.
        axis: name of the horizontal axis, which starts at `first`.
        thin: more curves by label, drawn behind the others.
        linear: draw a linear value axis. The default is logarithmic.
        mark_lowest: draw a dot at the lowest value of each curve.
    """

    name: str
    curves: dict[str, Curve]
    axis: str = "training step"
    first: int = 0
    thin: dict[str, list[Curve]] = field(default_factory=dict)
    linear: bool = False
    mark_lowest: bool = False


# Text, lines and curves on light and dark pages. Dashes tell curves apart without color.
_LIGHT = ("#59636e", "#d1d9e0", ("#9a3412", "#1d4ed8", "#15803d", "#7e22ce", "#be185d", "#59636e"))
_DARK = ("#9198a1", "#3d444d", ("#fdba74", "#93c5fd", "#86efac", "#d8b4fe", "#f9a8d4", "#9198a1"))
_DASHES = ("none", "7 4", "2 3", "10 3 2 3", "4 2", "1 2")
_COLUMNS, _LABEL_WIDTH = 2, 150


def figure(panels: Sequence[Panel], title: str, dark: bool) -> str:
    """Return an SVG file with charts in two columns. A label has the same style in all of them."""
    text, line, colors = _DARK if dark else _LIGHT
    styles = {label: f"c{k}" for k, label in enumerate(dict.fromkeys(name for p in panels for name in p.curves))}
    strokes = "".join(
        f".curve.{style} {{ stroke: {color}; stroke-dasharray: {dashes}; }} "
        f"text.{style}, circle.{style} {{ fill: {color}; }} "
        for style, color, dashes in zip(styles.values(), colors, _DASHES, strict=False)
    )
    style = (
        f"text {{ fill: {text}; font: 13px system-ui, sans-serif; }} .axis {{ stroke: {line}; }} "
        f".curve {{ fill: none; stroke-width: 2; }} {strokes}"
        ".curve.thin { stroke-width: 1; stroke-dasharray: none; opacity: 0.35; }"
    )
    columns = min(_COLUMNS, len(panels))
    drawings = "".join(
        f'<svg x="{k % columns * WIDTH}" y="{k // columns * HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        f"{_drawing(panel, styles)}</svg>"
        for k, panel in enumerate(panels)
    )
    size = f"0 0 {columns * WIDTH} {math.ceil(len(panels) / columns) * HEIGHT}"
    title = html.escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{title}">'
        f"<title>{title}</title><style>{style}</style>{drawings}</svg>\n"
    )


def _drawing(panel: Panel, styles: dict[str, str]) -> str:
    return chart(
        {styles[label]: curve for label, curve in panel.curves.items()},
        panel.name, first=panel.first, right=_LABEL_WIDTH, axis=panel.axis,
        labels={styles[label]: label for label in panel.curves},
        thin={styles[label]: curves for label, curves in panel.thin.items()}, linear=panel.linear,
        mark_lowest=panel.mark_lowest,
    )  # fmt: skip


_DIGITS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))
_STEPS = (5, 2, 1)


def round_values(low: float, high: float) -> list[float]:
    """Return at least three round values between two positive numbers, or the number if they are equal."""
    if low == high:
        return [low]
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    choices = [[float(f"{digit}e{decade}") for decade in decades for digit in digits] for digits in _DIGITS]
    # Values of one decade are evenly spaced.
    exponent = math.floor(math.log10(high - low))
    choices += [_multiples(digit, decade, low, high) for decade in (exponent, exponent - 1) for digit in _STEPS]
    between = ([value for value in values if low <= value <= high] for values in choices)
    return next(values for values in between if len(values) >= 3)


def _multiples(digit: int, decade: int, low: float, high: float) -> list[float]:
    step = float(f"{digit}e{decade}")
    return [float(f"{digit * k}e{decade}") for k in range(math.floor(low / step), math.ceil(high / step) + 1)]


def even_values(low: float, high: float) -> list[float]:
    """Return three to seven round values between two numbers, at equal distances, or one if the numbers are equal."""
    if low == high:
        return [low]
    decade = 10.0 ** math.floor(math.log10(high - low))
    ticks = (
        [round(k * step, 12) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
        for step in (2 * decade, decade, decade / 2, decade / 5)
    )
    return next(values for values in ticks if len(values) >= 3)


_LINE_HEIGHT = 15


def _apart(heights: dict[str, float]) -> dict[str, float]:
    """Move labels up, starting with the lowest one, so that they do not overlap, and down if they leave the chart."""
    placed, limit = {}, HEIGHT
    for name, height in sorted(heights.items(), key=lambda item: -item[1]):
        placed[name] = min(height, limit)
        limit = placed[name] - _LINE_HEIGHT
    limit = _TOP
    for name in reversed(placed):
        placed[name] = max(placed[name], limit)
        limit = placed[name] + _LINE_HEIGHT
    return placed
