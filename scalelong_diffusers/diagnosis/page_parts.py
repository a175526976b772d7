"""The parts of pages: one file that loads nothing else, for screens, phones and printers, light or dark."""

import html
import math
from collections.abc import Iterable, Sequence

from scalelong_diffusers.charts import HEIGHT, WIDTH, Curve, chart


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

IN_ORDER = "block, in the order of the forward pass"  # name of an axis


def document(title: str, lead: Iterable[str], about: str, sections: Iterable[str]) -> str:
    """
    Return a page as HTML.

    Args:
        title, lead, about: texts: the heading, the sentences to read first, and how it was measured.
        sections: HTML from [`section`].
    """
    title = html.escape(title)
    lead = "".join(f'<p class="lead">{html.escape(sentence)}</p>' for sentence in lead)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body><main>",
            f"<h1>{title}</h1>{lead}{paragraph(about)}",
            *sections,
            "</main></body></html>\n",
        ]
    )


def section(title: str, *parts: str) -> str:
    """Return a section of a page. The parts are HTML."""
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def key(first: str, second: str) -> str:
    """Return the key of charts with two curves."""
    first, second = html.escape(first), html.escape(second)
    return f'<p class="keys"><span class="key"></span> {first} &nbsp; <span class="key solid"></span> {second}</p>'


def curves_figure(
    name: str, curves: dict[str, Curve], axis: str, first: int | None = None, linear: bool = False
) -> str:
    """
    Return a figure of at most two curves. Values that are not finite are left out.

    Args:
        first: first value of the horizontal axis, by default of the curves.
        linear: draw a linear value axis. On the logarithmic one, values that are not positive are left out.
    """
    drawn = {
        style: (label, [(x, y) for x, y in curve if math.isfinite(y) and (linear or y > 0)])
        for style, (label, curve) in zip("ab"[-len(curves) :], curves.items())
    }
    drawn = {style: (label, curve) for style, (label, curve) in drawn.items() if len({x for x, _ in curve}) > 1}
    title = html.escape(name)
    if not drawn:
        return f"<figure><figcaption>{title}: too few finite values for a chart.</figcaption></figure>"
    ends = "; ".join(f"{label}: {curve[0][1]:.3g} to {curve[-1][1]:.3g}" for label, curve in drawn.values())
    text = html.escape(f"{name} by {axis}. {ends}.")
    first = min(curve[0][0] for _, curve in drawn.values()) if first is None else first
    content = chart(
        {style: curve for style, (_, curve) in drawn.items()}, name, first=first, right=24, axis=axis, linear=linear
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text}">{content}</svg>'
        f"<figcaption>{text}</figcaption></figure>"
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls on its own, also by keyboard, if it is too wide for a phone."""
    heading, *others = rows
    heads = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in heading)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in others)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead>{body}</table></div>'


def _cell(text: str) -> str:
    return f"<td{' class=number' if text[:1].isdigit() else ''}>{html.escape(text)}</td>"
