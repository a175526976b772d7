"""What the finished runs of the convergence benchmark say: tables in Markdown, and the figure of the README."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path

from chart import HEIGHT, WIDTH, Curve, chart
from convergence_runs import (
    METHODS,
    QUICK_METHODS,
    SETTLED,
    Results,
    Run,
    quick_run,
    rates_of,
    seeds_of,
    variations_of,
    without_factors_of,
)


# In the figure, by what it calls them: as many as can be told apart. The last one was taken in once it was known to be
# best.
SHOWN = {
    "none": "plain",
    "cs 0.9": "CS, kappa 0.9",
    "ls per skip": "LS, gates from near 0.5",
    "ls per skip, identity": "LS, gates from 1",
}

STANDS_FOR_FACTORS = {
    "init": "initialised times k",
    "rate": "trained at a rate times k",
    "both": "both, and weight decay and epsilon divided by k",
}


def tables(results: Results) -> str:
    compared = {
        "At equal rates, as the paper compares": {method: _by_rate(method) for method in METHODS},
        "With the optimizer of U-ViT, at equal rates": {method: _by_rate(method, as_uvit=True) for method in METHODS},
        "Other depths and batches, at the best rates": _variations(results),
        "A small U-Net, at equal rates": {method: _by_rate(method, "unet") for method in METHODS},
    }
    sections = {
        "How many times as fast": overview(results),
        "At tuned rates, which is the claim that counts": tuned_rates(results),
        "With the optimizer of U-ViT, at tuned rates": tuned_rates(results, as_uvit=True),
        "Batches of 64, at the best rates of batches of 32": tuned_rates(results, batch_size=64),
        "A small U-Net, at tuned rates": tuned_rates(results, model="unet"),
    }
    for title, runs in compared.items():
        sections[title] = _against_plain(results, runs)
        sections[f"{title}, raw weights"] = _against_plain(results, runs, raw=True)
    sections["What of CS it is: a plain model with what stands for the factors"] = without_factors(results)
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in sections.items())


def tables_of_quick(results: Results) -> str:
    runs = {method: quick_run(method) for method in QUICK_METHODS}
    return _against_plain(results, {method: {f"{run.learning_rate:g}": run} for method, run in runs.items()})


def overview(results: Results) -> str:
    """Each method against the plain model, both at their best rates, in all that was tried: averaged weights only."""
    tried = {
        "20 layers, batch 32": {},
        "U-ViT's optimizer": {"as_uvit": True},
        "12 layers": {"model": "uvit-12"},
        "28 layers": {"model": "uvit-28"},
        "batch 16": {"batch_size": 16},
        "batch 64": {"batch_size": 64},
        "small U-Net": {"model": "unet"},
    }
    rows = []
    for method in METHODS:
        pairs = [_pairs(results, method, **others) for others in tried.values()]
        if method != "none" and any(pairs):
            rows.append([method, *(_times_as_fast(results, several) for several in pairs)])
    return _table(("method", *tried), rows)


def tuned_rates(results: Results, **others) -> str:
    """Each method at its best rate, against the plain model at its own with the same seed."""
    rows = []
    for method in METHODS:
        runs = _finished_seeds(results, method, **others)
        if not runs:
            continue
        pairs = _pairs(results, method, **others)
        row = [method, f"{runs[0].learning_rate:g}", str(len(runs))]
        for raw in (False, True):
            row.append(_spread([results.final_loss(run, raw) for run in runs], statistics.median, _loss))
            row.append("1" if method == "none" else _times_as_fast(results, pairs, raw))
        rows.append([*row, _gradients(results, runs)])
    heads = ("method", "best rate", "seeds", "final loss, averaged weights", "times as fast")
    raw_heads = ("final loss, raw weights", "times as fast, raw weights")
    return _table((*heads, *raw_heads, f"gradient norm after step {SETTLED}, mean / max"), rows)


def without_factors(results: Results) -> str:
    """Part D: what stands for the factors, between the plain model and CS at the same rate."""
    rate = results.best_rate("cs 0.9") or 0
    runs = {STANDS_FOR_FACTORS[of_cs]: run for of_cs, run in without_factors_of(rate).items()}
    if any(run in results for run in runs.values()):
        runs = {"nothing: the plain model": Run("none", rate), **runs, "they themselves: CS": Run("cs 0.9", rate)}
    rows = [
        [name, *(_loss(results.final_loss(run, raw)) for raw in (False, True))]
        for name, run in runs.items()
        if run in results
    ]
    return _table(("instead of the factors", "final loss, averaged weights", "raw weights"), rows)


def _by_rate(method: str, model: str = "uvit-20", as_uvit: bool = False) -> dict[str, Run]:
    return {f"{run.learning_rate:g}": run for run in rates_of(method, model, as_uvit)}


def _variations(results: Results) -> dict[str, dict[str, Run]]:
    best = {method: results.best_rate(method) for method in METHODS}
    if best["none"] is None:
        return {}
    return {f"{method}, {rate:g}": variations_of(method, rate) for method, rate in best.items() if rate is not None}


def _against_plain(results: Results, runs: dict[str, dict[str, Run]], raw: bool = False) -> str:
    """
    A row for each method, the plain one first: its final losses, and how many times as fast it gets to the plain
    model's final loss in the same column.
    """
    plain = next(iter(runs.values()), {})
    rows = []
    for method, columns in runs.items():
        row = [method]
        for name, run in columns.items():
            loss = results.final_loss(run, raw) if run in results else None
            figure = "" if loss is None else _loss(loss)
            if run != plain[name] and plain[name] in results and loss is not None and math.isfinite(loss):
                figure += f" ({_times_as_fast(results, [(run, plain[name])], raw)})"
            row.append(figure)
        if any(row[1:]):
            rows.append(row)
    return _table(("method", *plain), rows)


def draw_figure(results: Results, folder: Path):
    """Of the methods that the figure shows, as far as their best rates are known, and once there are two of them."""
    curves = {}
    for method, name in SHOWN.items():
        runs = _finished_seeds(results, method)
        whole = [run for run in runs if not results.diverged(run)]
        if whole:
            seeds = "" if len(whole) == len(runs) else f", {len(whole)} of {len(runs)} seeds"
            curves[name + seeds] = [results.evaluations(run) for run in whole]
    if len(curves) > 1:
        folder.mkdir(exist_ok=True)
        for name, dark in {"light": False, "dark": True}.items():
            (folder / f"convergence-{name}.svg").write_text(figure(curves, dark))


def figure(curves: dict[str, list[Curve]], dark: bool) -> str:
    """Validation loss over the steps as an image of its own: each seed thin, the median of a method's seeds thick."""
    curves = {name: [_shown_part(curve) for curve in seeds] for name, seeds in curves.items()}
    styles = {name: f"c{k}" for k, name in enumerate(curves)}
    text, line, colours = _DARK if dark else _LIGHT
    strokes = "".join(
        f".curve.{style} {{ stroke: {colour}; stroke-dasharray: {dashes}; }} text.{style} {{ fill: {colour}; }} "
        for style, colour, dashes in zip(styles.values(), colours, _DASHES)
    )
    style = (
        f"text {{ fill: {text}; font: 12px system-ui, sans-serif; }} .axis {{ stroke: {line}; }} "
        f".curve {{ fill: none; stroke-width: 2; }} {strokes}"
        ".curve.thin { stroke-width: 1; stroke-dasharray: none; opacity: 0.35; }"
    )
    drawing = chart(
        {styles[name]: _median(seeds) for name, seeds in curves.items()},
        "validation loss of the averaged weights",
        first=_SHOWN_FROM,
        right=165,
        labels={styles[name]: name for name in curves},
        thin={styles[name]: seeds for name, seeds in curves.items() if len(seeds) > 1},
    )
    title = "Validation loss over training steps"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title><style>{style}</style>{drawing}</svg>\n"
    )


# In the place of a gain, and below all of them.
_NOT_REACHED, _DIVERGES = 0.0, -1.0

_LIGHT = ("#59636e", "#d1d9e0", ("#9a3412", "#1d4ed8", "#15803d", "#7e22ce"))
_DARK = ("#9198a1", "#3d444d", ("#fdba74", "#93c5fd", "#86efac", "#d8b4fe"))
_DASHES = ("7 4", "none", "2 3", "10 3 2 3")
# The first steps are alike for all, and would take the room of what is to be seen.
_SHOWN_FROM = 400


def _shown_part(curve: Curve) -> Curve:
    return [(step, loss) for step, loss in curve if step >= _SHOWN_FROM]


def _median(seeds: list[Curve]) -> Curve:
    return [(together[0][0], statistics.median(loss for _, loss in together)) for together in zip(*seeds)]


def _finished_seeds(
    results: Results, method: str, model: str = "uvit-20", batch_size: int = 32, as_uvit: bool = False
) -> list[Run]:
    """At the best rate of the method; other depths and batches are run at that of 20 layers and 32."""
    rate = results.best_rate(method, model if model == "unet" else "uvit-20", as_uvit)
    others = {"model": model, "batch_size": batch_size, "as_uvit": as_uvit}
    return [] if rate is None else [run for run in seeds_of(method, rate, **others) if run in results]


def _pairs(results: Results, method: str, **others) -> list[tuple[Run, Run]]:
    """Each seed's run with that of the plain model, both at their best rates."""
    plain = {run.seed: run for run in _finished_seeds(results, "none", **others)}
    return [(run, plain[run.seed]) for run in _finished_seeds(results, method, **others) if run.seed in plain]


def _times_as_fast(results: Results, pairs: list[tuple[Run, Run]], raw: bool = False) -> str:
    """How soon runs get to the final loss of plain ones: the median, and the range where there are several."""
    if not pairs:
        return ""
    gains = []
    for run, plain in pairs:
        target = results.final_loss(plain, raw)
        if math.isfinite(target):
            steps = results.steps_to(target, run, raw)
            gains.append(_DIVERGES if results.diverged(run) else plain.steps / steps if steps else _NOT_REACHED)
    if not gains:
        return "plain diverges"
    diverged = len(pairs) - len(gains)
    # Of an even number the lower one: between a gain and none is no gain.
    spread = _spread(gains, statistics.median_low, _gain)
    return spread if not diverged else f"{spread}; plain diverges for {diverged} of {len(pairs)} seeds"


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverges"


def _gain(gain: float) -> str:
    return {_NOT_REACHED: "not reached", _DIVERGES: "diverges"}.get(gain, f"{gain:.2f}")


def _spread(values: list[float], middle: Callable[[list[float]], float], words: Callable[[float], str]) -> str:
    """The one in the middle, and the range where there are several."""
    low, high = words(min(values)), words(max(values))
    return low if low == high else f"{words(middle(values))} ({low} to {high})"


def _gradients(results: Results, runs: list[Run]) -> str:
    norms = [norm for run in runs if (norm := results.lines[run]["grad_norm"]) is not None]
    if not norms:
        return ""
    return f"{statistics.median(norm['mean'] for norm in norms):.2f} / {max(norm['max'] for norm in norms):.2f}"


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(lines) if rows else "(no finished runs)"
