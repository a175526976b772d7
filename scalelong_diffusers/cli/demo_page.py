"""Build the page of `make demo`: one file that loads nothing else, for screens, phones and printers, light or dark."""

import base64
import html
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scalelong_diffusers.charts import HEIGHT, WIDTH, Curve, chart
from scalelong_diffusers.data import COLORS, SHAPES


@dataclass(frozen=True)
class Frame:
    """
    A picture of the film strip.

    Args:
        step: step of the training.
        png: one image per class, or None if the model's images were not finite.
        correct: number of images with the right color and shape.
    """

    step: int
    png: bytes | None
    correct: int

    @property
    def outcome(self) -> str:
        return f"{self.correct} of {len(COLORS) * len(SHAPES)} right" if self.png else "no finite images"


@dataclass(frozen=True)
class Run:
    """
    One of the two runs.

    Args:
        label: name on the page.
        differences: settings that the other run does not have, or has with other values.
        metrics: lines of `metrics.jsonl`.
        film: samples during the training.
        images: wanted class, PNG, and class recognized in the pixels; empty if the training stopped by itself.
    """

    label: str
    differences: dict[str, Any]
    metrics: list[dict[str, Any]]
    film: list[Frame]
    images: list[tuple[str, bytes, str]]

    @property
    def losses(self) -> Curve:
        return _curve(self, "validation_loss")

    @property
    def final_loss(self) -> float:
        """The last validation loss, or infinity if it was not finite or the training stopped by itself."""
        last = [None, *(line["validation_loss"] for line in self.metrics if "validation_loss" in line)][-1]
        return last if last is not None and self.images else math.inf

    @property
    def diverged(self) -> bool:
        """Whether the training stopped by itself, or ended with a higher validation loss than it began with."""
        return math.isinf(self.final_loss) or self.final_loss > self.losses[0][1]


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
.film { display: grid; grid-template-columns: repeat(4, 1fr); gap: .5rem .75rem; }
.film h3 { grid-column: 1 / -1; margin: .5rem 0 0; } .film figcaption { margin: .15rem 0 0; line-height: 1.3; }
.film strong { color: var(--text); display: block; }
.film img { width: 100%; height: auto; display: block; image-rendering: pixelated; }
pre { padding: .75rem; border: 1px solid var(--line); overflow-x: auto; } svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 16px; } .axis { stroke: var(--line); }
@media (max-width: 40rem) { svg text { font-size: 18px; } .film { grid-template: repeat(5, auto) / 1fr 1fr;
  grid-auto-flow: column; } .film h3 { grid-column: auto; } th, td { padding: .2rem .3rem; }
  .images th, .images td { font-size: .6rem; } }
.a { stroke: var(--a); stroke-dasharray: 7 4; } .b { stroke: var(--b); } .curve { fill: none; stroke-width: 2.5; }
.mark { stroke: var(--text); stroke-width: 1.5; } .lead { font-size: 1.25rem; color: var(--text); }
.key { display: inline-block; width: 2rem; border-top: 3px dashed var(--a); vertical-align: middle; }
.key.solid { border-top: 3px solid var(--b); }
"""


def build_page(
    runs: list[Run], settings: dict[str, Any], machine: dict[str, Any], pilot: dict[int, float], full_steps: int
) -> str:
    """
    Return the page as HTML.

    Args:
        runs: the plain run and the run with the residual start.
        settings: settings that both runs share.
        machine: hardware and versions.
        pilot: ratio of steps by seed in earlier runs.
        full_steps: number of steps of the full demo.
    """
    steps = settings["max_train_steps"]
    charts = _chart("Validation loss", runs, [run.losses for run in runs], _loss_note(runs), _mark(runs))
    charts += _chart("Gradient norm", runs, [_averaged(_curve(run, "grad_norm")) for run in runs], _NORM_NOTE)
    sections = [
        _section("During training", _FILM_NOTE, f'<div class="film">{"".join(map(_film_row, runs))}</div>'),
        _section("Loss and gradient norm", _key(runs), f'<div class="pair">{charts}</div>'),
        _section("Results", _results(runs)),
        _section("Samples at the end", _SAMPLES_NOTE, f'<div class="pair">{"".join(map(_image_table, runs))}</div>'),
        _section("The two runs", _RUNS_NOTE, _differences(runs)),
        _section("Load the models", "<p>Run this in the folder of this page:</p>", _code(_LOADING)),
        _section("Next", _NEXT),
        _section("Settings of both runs", _table(settings)),
        _section("Hardware and versions", _table(machine)),
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>ScaleLong demo</title><style>{_STYLE}</style></head><body><main>",
            "<h1>The same U-ViT, plain and with the residual start</h1>",
            f'<p class="lead">{_verdict(runs, steps)}</p>',
            _SHORT.format(steps=steps, full=full_steps) if steps < full_steps else "",
            f"<p>{_other_results(runs)}</p>",
            f"<p>{_pilot_note(pilot, settings['seed'], full_steps)}</p>",
            *sections,
            "</main></body></html>\n",
        ]
    )


_SHORT = (
    "<p><strong>This trial has only {steps:,} steps: the models have not learned to draw, and the differences may be "
    "chance.</strong> <code>make demo</code> trains {full:,} steps.</p>"
)
_FILM_NOTE = (
    "<p>One image per class: columns are colors, rows are shapes. Noise and classes are the same in all pictures.</p>"
)
_NORM_NOTE = "Each point is the mean of several steps."
_SAMPLES_NOTE = (
    "<p>Each image was sampled for a color and a shape, from the same noise in both runs. A frame marks images whose "
    "pixels show something else.</p>"
)
_RUNS_NOTE = (
    "<p>Seed, images, noise and number of steps are the same. The images have a large, upright shape near the middle, "
    "because a model of this size learns these in minutes. In the plain U-ViT, the layers that join the long "
    "skips to the residual path start at random. With the residual start, they start as the sum of hidden state and "
    "skip and learn slowly, and the residual branches start at zero. The model can then use a higher learning "
    "rate.</p>"
)
_LOADING = """\
from scalelong_diffusers import load_pipeline

pipe = load_pipeline("residual")  # or "plain"
images = pipe(["red circle", "blue star"], guidance_scale=2, num_inference_steps=25).images
images[0].save("image.png")"""


_NEXT = (
    "<p>docs/train_on_your_images.md trains on your own images. docs/which_method.md has the benchmark with eight "
    "seeds, and docs/how_it_works.md explains the residual start.</p>"
)


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>"


def _code(lines: str) -> str:
    return f'<pre tabindex="0"><code>{html.escape(lines)}</code></pre>'


def _curve(run: Run, name: str) -> Curve:
    return [(line["step"], line[name]) for line in run.metrics if line.get(name) is not None]


def _averaged(curve: Curve) -> Curve:
    """Return the means of consecutive parts of a curve, which is noisy."""
    size = max(1, len(curve) // 50)
    parts = [curve[k : k + size] for k in range(0, len(curve), size)]
    return [(part[-1][0], statistics.mean(value for _, value in part)) for part in parts]


def _verdict(runs: list[Run], steps: int) -> str:
    """Say in how many steps the second run reached the final loss of the first."""
    if diverged := [run for run in runs if run.diverged]:
        names = " and the ".join(html.escape(run.label) for run in diverged)
        return f"The {names} diverged, so there is no ratio of steps."
    start = f"With the {html.escape(runs[1].label)}, the same U-ViT"
    step = _crossing(runs)
    if step is None:
        return f"{start} did not reach the plain model's final loss in {steps:,} steps."
    if step == steps:
        return f"{start} reached the plain model's final loss only at the end, after {steps:,} steps."
    ratio = f"{steps / step:.1f} times fewer"
    return f"{start} reached the plain model's final loss in {step:,} of {steps:,} steps: {ratio}."


def _crossing(runs: list[Run]) -> int | None:
    """Return the first step at which the second run's loss is at most the final loss of the first."""
    plain, residual = runs
    if plain.diverged or residual.diverged:
        return None
    return next((step for step, loss in residual.losses if loss <= plain.final_loss), None)


def _other_results(runs: list[Run]) -> str:
    plain, residual = (html.escape(run.label) for run in runs)
    images = max(len(run.images) for run in runs)
    correct = [_count_correct(run, slice(None)) for run in runs]
    norms = " and ".join(f"{statistics.mean(_second_half(run)):.3f}" for run in runs)
    losses = " and ".join(_format_loss(run.final_loss) for run in runs)
    return (
        f"Right color and shape at the end: {correct[0]} of {images} images with the {plain}, {correct[1]} with the "
        f"{residual}. Mean gradient norm in the second half: {norms}. Final validation loss: {losses}."
    )


def _pilot_note(pilot: dict[int, float], seed: int, full_steps: int) -> str:
    """Say where the settings come from and how far the ratio varied."""
    *seeds, last = map(str, pilot)
    low, high = min(pilot.values()), max(pilot.values())
    return (
        f"Pilot runs fixed the settings beforehand; they tried three learning rates for each of the two. With "
        f"{full_steps:,} steps and the seeds {', '.join(seeds)} and {last}, they had ratios from {low:.1f} to "
        f"{high:.1f}. This page shows a new run with seed {seed}. docs/which_method.md has the benchmark with eight "
        "seeds."
    )


def _results(runs: list[Run]) -> str:
    rows = {
        "final validation loss, EMA weights": lambda run: _format_loss(run.final_loss),
        "gradient norm, mean of the second half": lambda run: f"{statistics.mean(_second_half(run)):.3f}",
        "gradient norm, maximum of the second half": lambda run: f"{max(_second_half(run)):.3f}",
        f"images with the right color (of {len(COLORS)})": lambda run: _fraction_correct(run, slice(0, 1)),
        f"images with the right shape (of {len(SHAPES)})": lambda run: _fraction_correct(run, slice(1, 2)),
        "images with both right": lambda run: _fraction_correct(run, slice(None)),
        "training images per second (depends on other load)": lambda run: (
            f"{statistics.median(v for _, v in _curve(run, _SPEED)):.0f}"
        ),
    }
    return _comparison(runs, rows)


def _comparison(runs: list[Run], rows: dict[str, Callable[[Run], str]]) -> str:
    """Return a table with a column per run. `rows` has a function for the cells of each row, by its name."""
    heads = "".join(f'<th scope="col">{html.escape(run.label)}</th>' for run in runs)
    lines = [
        f'<tr><th scope="row">{name}</th>{"".join(f"<td class=number>{cell(run)}</td>" for run in runs)}</tr>'
        for name, cell in rows.items()
    ]
    return _scrolling(f"<thead><tr><td></td>{heads}</tr></thead>{''.join(lines)}")


_SPEED = "images_per_second"


def _format_loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "not finite"


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


def _chart(name: str, runs: list[Run], curves: list[Curve], note: str, mark: Curve | None = None) -> str:
    # A run that diverged early has no values.
    drawn = {style: (run.label, curve) for style, run, curve in zip("ab", runs, curves) if curve}
    ends = "; ".join(f"{run}: {curve[0][1]:.3g} to {curve[-1][1]:.3g}" for run, curve in drawn.values())
    label = html.escape(f"{name} over training steps. {ends}.")
    thin = {"mark": [mark]} if mark else None
    drawing = chart({style: curve for style, (_, curve) in drawn.items()}, name.lower(), thin=thin)
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{drawing}</svg>'
        f"<figcaption>{label} {note} The scale is logarithmic.</figcaption></figure>"
    )


def _mark(runs: list[Run]) -> Curve | None:
    """Return a line from the plain run's end to the step at which the other run reached its loss, and down."""
    step = _crossing(runs)
    if step is None:
        return None
    (last, target), lowest = runs[0].losses[-1], min(loss for run in runs for _, loss in run.losses)
    return [(last, target), (step, target), (step, lowest)]


def _loss_note(runs: list[Run]) -> str:
    step = _crossing(runs)
    return "" if step is None else f"The thin line marks the plain model's final loss, reached after {step:,} steps."


def _film_row(run: Run) -> str:
    """Return the label of a run and its pictures: a row, or a column on phones."""
    return f"<h3>{html.escape(run.label)}</h3>{''.join(_film_picture(run, frame) for frame in run.film)}"


def _film_picture(run: Run, frame: Frame) -> str:
    text = html.escape(f"{run.label} after {frame.step:,} steps: {frame.outcome}")
    image = f'<img src="{_data_url(frame.png)}" alt="{text}" width="96" height="80">' if frame.png else ""
    return (
        f"<figure>{image}<figcaption>after {frame.step:,} steps <strong>{frame.outcome}</strong></figcaption></figure>"
    )


def _image_table(run: Run) -> str:
    """Return a table with the first image of each class: a row per shape, a column per color."""
    title = html.escape(run.label)
    if not run.images:
        return f"<div><h3>{title}</h3><p>No samples: the training diverged.</p></div>"
    images = {wanted: (png, shown) for wanted, png, shown in reversed(run.images)}
    heads = "".join(f'<th scope="col">{color}</th>' for color in COLORS)
    rows = []
    for shape in SHAPES:
        cells = "".join(f"<td>{_image(f'{color} {shape}', *images[f'{color} {shape}'])}</td>" for color in COLORS)
        rows.append(f'<tr><th scope="row">{shape}</th>{cells}</tr>')
    body = f"<thead><tr><td></td>{heads}</tr></thead>{''.join(rows)}"
    return f'<div><h3>{title}</h3><table class="images">{body}</table></div>'


def _image(wanted: str, png: bytes, shown: str) -> str:
    wrong = "" if shown == wanted else ' class="wrong"'
    return f'<img{wrong} src="{_data_url(png)}" alt="wanted {wanted}, shows {shown}" width="16" height="16">'


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _differences(runs: list[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.differences)
    return _comparison(runs, {name: lambda run, name=name: str(run.differences.get(name, "")) for name in names})


def _table(entries: dict[str, Any]) -> str:
    rows = [
        f'<tr><th scope="row">{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>'
        for name, value in entries.items()
    ]
    return _scrolling("".join(rows))


def _scrolling(table: str) -> str:
    """Wrap a table so that it scrolls on its own, also by keyboard, if it is too wide for a phone."""
    return f'<div class="scroll" tabindex="0"><table>{table}</table></div>'
