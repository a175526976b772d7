"""Build the page of `make demo`: one file that loads nothing else, for screens, phones and printers, light or dark."""

import base64
import html
import statistics
from dataclasses import dataclass
from typing import Any

from chart import HEIGHT, WIDTH, Curve, chart

from scalelong_diffusers.data import COLORS, SHAPES
from scalelong_diffusers.patching import SkipConnections


@dataclass(frozen=True)
class Run:
    """
    One of the two runs.

    Args:
        label: name on the page.
        metrics: lines of `metrics.jsonl`.
        skips: long skips with their factors.
        images: wanted class, PNG, and class recognized in the pixels.
    """

    label: str
    metrics: list[dict[str, Any]]
    skips: SkipConnections
    images: list[tuple[str, bytes, str]]


_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --paper: #ffffff; --soft: #5b6570; --line: #d5dae0;
  --a: #9a3412; --b: #1d4ed8; --wrong: #b42318; }
@media (prefers-color-scheme: dark) { :root { --text: #e8eaed; --paper: #15181c; --soft: #a9b2bc; --line: #3a424b;
  --a: #fdba74; --b: #93c5fd; --wrong: #fca5a5; } }
@media print { :root { --text: #000; --paper: #fff; --soft: #444; --line: #bbb; --a: #9a3412; --b: #1d4ed8;
  --wrong: #b42318; } section { break-inside: avoid; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--paper); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; } h3 { font-size: 1rem; }
p, figcaption { color: var(--soft); margin: .25rem 0 .75rem; } figure { margin: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: left; font-weight: normal; }
thead th { color: var(--soft); } td.number { text-align: right; }
.images { width: 100%; table-layout: fixed; } .images th, .images td { padding: .15rem; border: 0; font-size: .75rem;
  text-align: center; overflow-wrap: anywhere; color: var(--soft); }
.images img { width: 100%; height: auto; display: block; image-rendering: pixelated; border: 2px solid transparent; }
.images img.wrong { border-color: var(--wrong); }
pre { padding: .75rem; border: 1px solid var(--line); overflow-x: auto; } svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; } .axis { stroke: var(--line); }
@media (max-width: 40rem) { svg text { font-size: 18px; } th, td { padding: .2rem .3rem; }
  .images th, .images td { font-size: .6rem; } }
.a { stroke: var(--a); stroke-dasharray: 7 4; } .b { stroke: var(--b); } .curve { fill: none; stroke-width: 2; }
.key { display: inline-block; width: 2rem; border-top: 3px dashed var(--a); vertical-align: middle; }
.key.solid { border-top: 3px solid var(--b); }
"""


def build_page(runs: list[Run], settings: dict[str, Any], machine: dict[str, Any], full_steps: int) -> str:
    """Return the page as HTML."""
    steps = settings["max_train_steps"]
    losses = [_curve(run, "validation_loss") for run in runs]
    norms = [_curve(run, "grad_norm") for run in runs]
    kappa = runs[1].skips.config.kappa
    sections = [
        _section("Results", f"<p>{_verdict(runs)}</p>", _results(runs)),
        _section("Validation loss", _key(runs), _chart("Validation loss", runs, losses)),
        _section("Gradient norm", _key(runs), _chart("Gradient norm", runs, norms)),
        _section("Samples", _SAMPLES_NOTE, f'<div class="pair">{"".join(map(_image_table, runs))}</div>'),
        _section("The long skips", f'<div class="pair">{"".join(map(_skip_table, runs))}</div>'),
        _section("Load the models", "<p>Run this in the folder of this page:</p>", _code(_LOADING)),
        _section("Next", _NEXT),
        _section("Settings", "<p>Fixed before the first run, and the same for both runs.</p>", _table(settings)),
        _section("Hardware and versions", _table(machine)),
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>ScaleLong demo</title><style>{_STYLE}</style></head><body><main>",
            "<h1>The same U-ViT, trained with and without scaled skips</h1>",
            "<p>A small, deep model learns to draw colored shapes. Both runs see the same images, noise and steps; "
            f"they differ only in whether the i-th long skip is multiplied by {kappa:g}^(i-1). This is one seed at "
            "one learning rate; with others the difference can be larger, smaller or reversed.</p>",
            _SHORT.format(steps=steps, full=full_steps) if steps < full_steps else "",
            *sections,
            "</main></body></html>\n",
        ]
    )


_SHORT = (
    "<p><strong>This trial has only {steps:,} steps: the models have not learned to draw, and the differences may be "
    "chance.</strong> <code>make demo</code> trains {full:,} steps.</p>"
)
_SAMPLES_NOTE = (
    "<p>Each image was sampled for a color and a shape, from the same noise in both runs. A frame marks images whose "
    "pixels show something else.</p>"
)
_LOADING = """\
from scalelong_diffusers import load_pipeline

pipe = load_pipeline("cs")  # or "none"
images = pipe(["red circle", "blue star"], guidance_scale=2, num_inference_steps=25).images
images[0].save("image.png")"""


_NEXT = (
    "<p>docs/train_on_your_images.md trains on your own images. docs/which_method.md compares seven methods over "
    "142 runs; gates that start at 1 (<code>--skip_scaling ls</code>) did best there.</p>"
)


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>"


def _code(lines: str) -> str:
    return f'<pre tabindex="0"><code>{html.escape(lines)}</code></pre>'


def _curve(run: Run, name: str) -> Curve:
    return [(line["step"], line[name]) for line in run.metrics if line.get(name) is not None]


def _verdict(runs: list[Run]) -> str:
    """Say which run ended with the lower loss and which made more correct images."""
    losses = [_final(run, "validation_loss") for run in runs]
    correct = [_count_correct(run, slice(None)) for run in runs]
    labels = [html.escape(run.label) for run in runs]
    if None in losses:
        return f"The model {labels[losses.index(None)]} diverged."
    lower = losses.index(min(losses))
    shown = [f"{loss:.4f}" for loss in losses]
    outcome = (
        f"Both models ended with a validation loss of {shown[0]}."
        if shown[0] == shown[1]
        else f"The model {labels[lower]} ended with the lower validation loss: {shown[lower]}, not {shown[1 - lower]}."
    )
    counts = f"{correct[0]} {labels[0]}, {correct[1]} {labels[1]}"
    return f"{outcome} Images with the right color and shape, of {len(runs[0].images)}: {counts}."


def _results(runs: list[Run]) -> str:
    rows = {
        "final validation loss, EMA weights": lambda run: _format_loss(_final(run, "validation_loss")),
        "final validation loss, raw weights": lambda run: _format_loss(_final(run, "validation_loss_raw")),
        "gradient norm, mean of the second half": lambda run: f"{statistics.mean(_second_half(run)):.3f}",
        "gradient norm, maximum of the second half": lambda run: f"{max(_second_half(run)):.3f}",
        f"images with the right color (of {len(COLORS)})": lambda run: _fraction_correct(run, slice(0, 1)),
        f"images with the right shape (of {len(SHAPES)})": lambda run: _fraction_correct(run, slice(1, 2)),
        "images with both right": lambda run: _fraction_correct(run, slice(None)),
        "training images per second (depends on other load)": lambda run: (
            f"{statistics.median(v for _, v in _curve(run, _SPEED)):.0f}"
        ),
    }
    heads = "".join(f'<th scope="col">{html.escape(run.label)}</th>' for run in runs)
    lines = [
        f'<tr><th scope="row">{name}</th>{"".join(f"<td class=number>{cell(run)}</td>" for run in runs)}</tr>'
        for name, cell in rows.items()
    ]
    return _scrolling(f"<thead><tr><td></td>{heads}</tr></thead>{''.join(lines)}")


_SPEED = "images_per_second"


def _final(run: Run, name: str) -> float | None:
    return [line[name] for line in run.metrics if name in line][-1]


def _format_loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _second_half(run: Run) -> list[float]:
    curve = _curve(run, "grad_norm")
    return [norm for _, norm in curve[len(curve) // 2 :]]


def _count_correct(run: Run, words: slice) -> int:
    """Count images whose color (first word of the class), shape (second word) or both are as wanted."""
    return sum(wanted.split()[words] == shown.split()[words] for wanted, _, shown in run.images)


def _fraction_correct(run: Run, words: slice) -> str:
    return f"{_count_correct(run, words)} of {len(run.images)}"


def _key(runs: list[Run]) -> str:
    plain, scaled = (html.escape(run.label) for run in runs)
    return f'<p><span class="key"></span> {plain} &nbsp; <span class="key solid"></span> {scaled}</p>'


def _chart(name: str, runs: list[Run], curves: list[Curve]) -> str:
    ends = "; ".join(f"{run.label}: {curve[0][1]:.3g} to {curve[-1][1]:.3g}" for run, curve in zip(runs, curves))
    label = html.escape(f"{name} over training steps. {ends}.")
    drawing = chart(dict(zip("ab", curves)), name.lower())
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{drawing}</svg>'
        f"<figcaption>{label} The scale is logarithmic.</figcaption></figure>"
    )


def _image_table(run: Run) -> str:
    """Return a table with the first image of each class: a row per shape, a column per color."""
    images = {wanted: (png, shown) for wanted, png, shown in reversed(run.images)}
    heads = "".join(f'<th scope="col">{color}</th>' for color in COLORS)
    rows = []
    for shape in SHAPES:
        cells = "".join(f"<td>{_image(f'{color} {shape}', *images[f'{color} {shape}'])}</td>" for color in COLORS)
        rows.append(f'<tr><th scope="row">{shape}</th>{cells}</tr>')
    title = html.escape(run.label)
    body = f"<thead><tr><td></td>{heads}</tr></thead>{''.join(rows)}"
    return f'<div><h3>{title}</h3><table class="images">{body}</table></div>'


def _image(wanted: str, png: bytes, shown: str) -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    wrong = "" if shown == wanted else ' class="wrong"'
    return f'<img{wrong} src="{source}" alt="wanted {wanted}, shows {shown}" width="16" height="16">'


def _skip_table(run: Run) -> str:
    lines = [
        f'<tr><td class="number">{skip.i}</td><td>{skip.where}</td><td class="number">{skip.width}</td>'
        f'<td class="number">{skip.factor:.4g}</td></tr>'
        for skip in run.skips
    ]
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("i", "where", "width", "factor"))
    caption = f"<caption>{html.escape(run.label)}</caption>"
    return _scrolling(f"{caption}<thead><tr>{heads}</tr></thead>{''.join(lines)}")


def _table(entries: dict[str, Any]) -> str:
    rows = [
        f'<tr><th scope="row">{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>'
        for name, value in entries.items()
    ]
    return _scrolling("".join(rows))


def _scrolling(table: str) -> str:
    """Wrap a table so that it scrolls on its own, also by keyboard, if it is too wide for a phone."""
    return f'<div class="scroll" tabindex="0"><table>{table}</table></div>'
