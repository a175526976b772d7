"""What the finished runs of the convergence benchmark say: tables in Markdown, and the figure of the README."""

import math
import statistics
from pathlib import Path

from chart import HEIGHT, WIDTH, Curve, chart
from convergence_runs import (
    METHODS,
    QUICK_METHODS,
    Results,
    Run,
    quick_run,
    rates_of,
    seeds_of,
    variations_of,
    without_factors_of,
)


# In the figure.
SHOWN = ("none", "inv_sqrt2", "cs 0.9", "ls per skip")


def tables(results: Results) -> str:
    sections = {
        "Tuned rates": tuned_rates(results),
        "Equal rates": _against_plain(results, {method: _by_rate(method, "uvit-20") for method in METHODS}),
        "Other sizes": _against_plain(results, _variations(results)),
        "A small U-Net": _against_plain(results, {method: _by_rate(method, "unet") for method in METHODS}),
        "Without factors": without_factors(results),
    }
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in sections.items())


def tables_of_quick(results: Results) -> str:
    runs = {method: quick_run(method) for method in QUICK_METHODS}
    return _against_plain(results, {method: {f"{run.learning_rate:g}": run} for method, run in runs.items()})


def tuned_rates(results: Results) -> str:
    """Part A: each method at its best rate, against the plain model at its own with the same seed."""
    plain = {run.seed: run for run in _finished_seeds(results, "none")}
    rows = []
    for method in METHODS:
        runs = _finished_seeds(results, method)
        if not runs:
            continue
        row = [method, f"{runs[0].learning_rate:g}", str(len(runs))]
        for raw in (False, True):
            row.append(_range([results.final_loss(run, raw) for run in runs]))
            pairs = [(run, plain[run.seed]) for run in runs if run.seed in plain]
            row.append("1" if method == "none" else _times_as_fast(results, pairs, raw))
        rows.append([*row, _gradients(results, runs)])
    heads = ("method", "best rate", "seeds", "final loss, averaged", "times as fast")
    return _table((*heads, "final loss, raw", "times as fast, raw", "gradient norm, mean / max"), rows)


def without_factors(results: Results) -> str:
    """Part D: what stands for the factors."""
    runs = without_factors_of(results.best_rate("cs 0.9") or 0)
    rows = [[name, _loss(results.final_loss(run))] for name, run in runs.items() if run in results]
    return _table(("instead of the factors", "final loss, averaged"), rows)


def _by_rate(method: str, model: str) -> dict[str, Run]:
    return {f"{run.learning_rate:g}": run for run in rates_of(method, model)}


def _variations(results: Results) -> dict[str, dict[str, Run]]:
    best = {method: results.best_rate(method) for method in METHODS}
    return {f"{method}, {rate:g}": variations_of(method, rate) for method, rate in best.items() if rate is not None}


def _against_plain(results: Results, runs: dict[str, dict[str, Run]]) -> str:
    """
    A row for each method, the plain one first: its final losses, and how many times as fast it gets to the plain
    model's final loss in the same column.
    """
    plain = next(iter(runs.values()), {})
    rows = []
    for method, columns in runs.items():
        row = [method]
        for name, run in columns.items():
            figure = _loss(results.final_loss(run)) if run in results else ""
            if run in results and plain[name] in results and run != plain[name]:
                figure += f" ({_times_as_fast(results, [(run, plain[name])])})"
            row.append(figure)
        if any(row[1:]):
            rows.append(row)
    return _table(("method", *plain), rows)


def draw_figure(results: Results, folder: Path):
    """Of the methods that the figure shows, as far as their best rates are known, and once there are two of them."""
    finished = {
        method: [results.evaluations(run) for run in _finished_seeds(results, method) if not results.stopped(run)]
        for method in SHOWN
    }
    finished = {method: curves for method, curves in finished.items() if curves}
    if len(finished) > 1:
        folder.mkdir(exist_ok=True)
        for name, dark in {"light": False, "dark": True}.items():
            (folder / f"convergence-{name}.svg").write_text(figure(finished, dark))


def figure(curves: dict[str, list[Curve]], dark: bool) -> str:
    """Validation loss over the steps, the median of the seeds for each method, as an image of its own."""
    medians = {name: _median(seeds) for name, seeds in curves.items()}
    styles = {name: f"c{k}" for k, name in enumerate(medians)}
    text, line, colours = _DARK if dark else _LIGHT
    strokes = "".join(
        f".curve.{style} {{ stroke: {colour}; stroke-dasharray: {dashes}; }} text.{style} {{ fill: {colour}; }} "
        for style, colour, dashes in zip(styles.values(), colours, _DASHES)
    )
    style = (
        f"text {{ fill: {text}; font: 12px system-ui, sans-serif; }} .axis {{ stroke: {line}; }} "
        f".curve {{ fill: none; stroke-width: 2; }} {strokes}"
    )
    drawing = chart(
        {styles[name]: curve for name, curve in medians.items()},
        right=110,
        labels={styles[name]: name for name in medians},
    )
    title = "Validation loss over training steps"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title><style>{style}</style>{drawing}</svg>\n"
    )


_LIGHT = ("#59636e", "#d1d9e0", ("#9a3412", "#1d4ed8", "#15803d", "#7e22ce"))
_DARK = ("#9198a1", "#3d444d", ("#fdba74", "#93c5fd", "#86efac", "#d8b4fe"))
_DASHES = ("7 4", "none", "2 3", "10 3 2 3")
# The first steps are alike for all, and would take the room of what is to be seen.
_SHOWN_FROM = 400


def _median(seeds: list[Curve]) -> Curve:
    steps = [step for step, _ in seeds[0]]
    losses = zip(*([loss for _, loss in curve] for curve in seeds))
    return [(step, statistics.median(all_)) for step, all_ in zip(steps, losses) if step >= _SHOWN_FROM]


def _finished_seeds(results: Results, method: str) -> list[Run]:
    rate = results.best_rate(method)
    return [] if rate is None else [run for run in seeds_of(method, rate) if run in results]


def _times_as_fast(results: Results, pairs: list[tuple[Run, Run]], raw: bool = False) -> str:
    """How soon runs get to the final loss of plain ones: the median, and the range where there are several."""
    gains = []
    for run, plain in pairs:
        target = results.final_loss(plain, raw)
        if math.isinf(target):
            return "plain diverges"
        steps = results.steps_to(target, run, raw)
        gains.append(0.0 if steps is None else plain.steps / steps)
    if not any(gains):
        return "not reached" if gains else ""
    return _range([gain or None for gain in gains], "{:.2f}")


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverges"


def _range(values: list[float | None], form: str = "{:.4f}") -> str:
    """Of an odd number of values the one in the middle; None, which is the least, is that a loss was not reached."""
    words = ["not reached" if value is None else form.format(value) for value in sorted(values, key=_least_if_none)]
    middle = words[(len(words) - 1) // 2]
    return middle if len(words) == 1 else f"{middle} ({words[0]} to {words[-1]})"


def _least_if_none(value: float | None) -> float:
    return -math.inf if value is None else value


def _gradients(results: Results, runs: list[Run]) -> str:
    norms = [norm for run in runs if (norm := results.lines[run]["grad_norm"]) is not None]
    if not norms:
        return ""
    return f"{statistics.median(norm['mean'] for norm in norms):.2f} / {max(norm['max'] for norm in norms):.2f}"


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(lines) if rows else "(no finished runs)"
