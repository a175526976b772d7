"""Turn the finished runs of the convergence benchmark into Markdown tables and the figure of the README."""

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
    cs_equivalent_runs,
    learning_rate_runs,
    quick_run,
    seed_runs,
    variation_runs,
)


# The methods in the figure with their labels: as many as a reader can tell apart. The last one was added once it was
# known to be the best.
SHOWN = {
    "none": "plain",
    "cs 0.9": "CS, kappa 0.9",
    "ls per skip": "LS, gates from near 0.5",
    "ls per skip, identity": "LS, gates from 1",
}

CS_EQUIVALENTS = {
    "init": "initial weights times k",
    "rate": "learning rate times k",
    "both": "both, and weight decay and epsilon divided by k",
}

# Stand-ins for a speed-up; they sort below every speed-up.
_NOT_REACHED, _DIVERGES = 0.0, -1.0


def tables(results: Results) -> str:
    """Return all tables as Markdown sections."""
    compared = {
        "Equal learning rates, as the paper compares": {method: _by_rate(method) for method in METHODS},
        "U-ViT's optimizer, equal learning rates": {method: _by_rate(method, as_uvit=True) for method in METHODS},
        "Other depths and batch sizes, at the best learning rates": _variations(results),
        "A small U-Net, equal learning rates": {method: _by_rate(method, "unet") for method in METHODS},
    }
    sections = {
        "Speed-up": overview(results),
        "Tuned learning rates, the claim that counts": tuned_rates(results),
        "U-ViT's optimizer, tuned learning rates": tuned_rates(results, as_uvit=True),
        "Batch size 64, at the best learning rates of batch size 32": tuned_rates(results, batch_size=64),
        "A small U-Net, tuned learning rates": tuned_rates(results, model="unet"),
    }
    for title, runs in compared.items():
        sections[title] = _against_plain(results, runs)
        sections[f"{title}, raw weights"] = _against_plain(results, runs, raw=True)
    sections["A plain model with parts of CS instead of the factors"] = cs_equivalents(results)
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in sections.items())


def quick_table(results: Results) -> str:
    """Return the table of `--quick`."""
    runs = {method: quick_run(method) for method in QUICK_METHODS}
    return _against_plain(results, {method: {f"{run.learning_rate:g}": run} for method, run in runs.items()})


def overview(results: Results) -> str:
    """Return the speed-up of each method over the plain model, both at their best learning rates, in EMA weights."""
    settings = {
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
        pairs = [_pairs(results, method, **others) for others in settings.values()]
        if method != "none" and any(pairs):
            rows.append([method, *(_speed_up(results, column) for column in pairs)])
    return _table(("method", *settings), rows)


def tuned_rates(results: Results, **others) -> str:
    """Compare each method at its best learning rate with the plain model at its own best, seed by seed."""
    rows = []
    for method in METHODS:
        runs = _finished_seeds(results, method, **others)
        if not runs:
            continue
        pairs = _pairs(results, method, **others)
        row = [method, f"{runs[0].learning_rate:g}", str(len(runs))]
        for raw in (False, True):
            row.append(_spread([results.final_loss(run, raw) for run in runs], statistics.median, _format_loss))
            row.append("1" if method == "none" else _speed_up(results, pairs, raw))
        rows.append([*row, _gradient_norms(results, runs)])
    heads = ("method", "best learning rate", "seeds", "final loss, EMA weights", "speed-up")
    raw_heads = ("final loss, raw weights", "speed-up, raw weights")
    return _table((*heads, *raw_heads, f"gradient norm after step {SETTLED}, mean / max"), rows)


def cs_equivalents(results: Results) -> str:
    """Return the table of part D: plain models with parts of CS, between the plain model and CS itself."""
    rate = results.best_rate("cs 0.9") or 0
    runs = {CS_EQUIVALENTS[of_cs]: run for of_cs, run in cs_equivalent_runs(rate).items()}
    if any(run in results for run in runs.values()):
        runs = {"nothing (plain model)": Run("none", rate), **runs, "the factors themselves (CS)": Run("cs 0.9", rate)}
    rows = [
        [name, *(_format_loss(results.final_loss(run, raw)) for raw in (False, True))]
        for name, run in runs.items()
        if run in results
    ]
    return _table(("instead of the factors", "final loss, EMA weights", "raw weights"), rows)


def _by_rate(method: str, model: str = "uvit-20", as_uvit: bool = False) -> dict[str, Run]:
    return {f"{run.learning_rate:g}": run for run in learning_rate_runs(method, model, as_uvit)}


def _variations(results: Results) -> dict[str, dict[str, Run]]:
    best = {method: results.best_rate(method) for method in METHODS}
    if best["none"] is None:
        return {}
    return {f"{method}, {rate:g}": variation_runs(method, rate) for method, rate in best.items() if rate is not None}


def _against_plain(results: Results, runs: dict[str, dict[str, Run]], raw: bool = False) -> str:
    """Return a row of final losses per method, the plain one first, with speed-ups over the plain loss in brackets."""
    plain = next(iter(runs.values()), {})
    rows = []
    for method, columns in runs.items():
        row = [method]
        for name, run in columns.items():
            loss = results.final_loss(run, raw) if run in results else None
            cell = "" if loss is None else _format_loss(loss)
            if run != plain[name] and plain[name] in results and loss is not None and math.isfinite(loss):
                cell += f" ({_speed_up(results, [(run, plain[name])], raw)})"
            row.append(cell)
        if any(row[1:]):
            rows.append(row)
    return _table(("method", *plain), rows)


def draw_figure(results: Results, folder: Path):
    """Write the figure for light and dark pages once two of its methods have finished."""
    curves = {}
    for method, name in SHOWN.items():
        runs = _finished_seeds(results, method)
        stable = [run for run in runs if not results.diverged(run)]
        if stable:
            seeds = "" if len(stable) == len(runs) else f", {len(stable)} of {len(runs)} seeds"
            curves[name + seeds] = [results.evaluations(run) for run in stable]
    if len(curves) > 1:
        folder.mkdir(exist_ok=True)
        for name, dark in {"light": False, "dark": True}.items():
            (folder / f"convergence-{name}.svg").write_text(figure(curves, dark))


def figure(curves: dict[str, list[Curve]], dark: bool) -> str:
    """Draw validation loss over steps as an SVG file: a thin line per seed, a thick one for their median."""
    curves = {name: [_shown_part(curve) for curve in seeds] for name, seeds in curves.items()}
    styles = {name: f"c{k}" for k, name in enumerate(curves)}
    text, line, colors = _DARK if dark else _LIGHT
    strokes = "".join(
        f".curve.{style} {{ stroke: {color}; stroke-dasharray: {dashes}; }} text.{style} {{ fill: {color}; }} "
        for style, color, dashes in zip(styles.values(), colors, _DASHES)
    )
    style = (
        f"text {{ fill: {text}; font: 12px system-ui, sans-serif; }} .axis {{ stroke: {line}; }} "
        f".curve {{ fill: none; stroke-width: 2; }} {strokes}"
        ".curve.thin { stroke-width: 1; stroke-dasharray: none; opacity: 0.35; }"
    )
    drawing = chart(
        {styles[name]: _median(seeds) for name, seeds in curves.items()},
        "validation loss (EMA weights)",
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


_LIGHT = ("#59636e", "#d1d9e0", ("#9a3412", "#1d4ed8", "#15803d", "#7e22ce"))
_DARK = ("#9198a1", "#3d444d", ("#fdba74", "#93c5fd", "#86efac", "#d8b4fe"))
_DASHES = ("7 4", "none", "2 3", "10 3 2 3")
# The first steps look alike for all methods and would dominate the scale.
_SHOWN_FROM = 400


def _shown_part(curve: Curve) -> Curve:
    return [(step, loss) for step, loss in curve if step >= _SHOWN_FROM]


def _median(seeds: list[Curve]) -> Curve:
    return [(points[0][0], statistics.median(loss for _, loss in points)) for points in zip(*seeds)]


def _finished_seeds(
    results: Results, method: str, model: str = "uvit-20", batch_size: int = 32, as_uvit: bool = False
) -> list[Run]:
    """Return the finished runs at the method's best learning rate, which is tuned for 20 layers and batch size 32."""
    rate = results.best_rate(method, model if model == "unet" else "uvit-20", as_uvit)
    others = {"model": model, "batch_size": batch_size, "as_uvit": as_uvit}
    return [] if rate is None else [run for run in seed_runs(method, rate, **others) if run in results]


def _pairs(results: Results, method: str, **others) -> list[tuple[Run, Run]]:
    """Pair each run of a method with the plain run of the same seed."""
    plain = {run.seed: run for run in _finished_seeds(results, "none", **others)}
    return [(run, plain[run.seed]) for run in _finished_seeds(results, method, **others) if run.seed in plain]


def _speed_up(results: Results, pairs: list[tuple[Run, Run]], raw: bool = False) -> str:
    """Format steps of the plain run / steps of the run to the same loss: the median and the range of several pairs."""
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
    # The lower median: halfway between a gain and no gain is no gain.
    spread = _spread(gains, statistics.median_low, _format_gain)
    return spread if not diverged else f"{spread}; plain diverges for {diverged} of {len(pairs)} seeds"


def _format_loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverges"


def _format_gain(gain: float) -> str:
    return {_NOT_REACHED: "not reached", _DIVERGES: "diverges"}.get(gain, f"{gain:.2f}")


def _spread(values: list[float], middle: Callable[[list[float]], float], format: Callable[[float], str]) -> str:
    low, high = format(min(values)), format(max(values))
    return low if low == high else f"{format(middle(values))} ({low} to {high})"


def _gradient_norms(results: Results, runs: list[Run]) -> str:
    norms = [norm for run in runs if (norm := results.lines[run]["grad_norm"]) is not None]
    if not norms:
        return ""
    return f"{statistics.median(norm['mean'] for norm in norms):.2f} / {max(norm['max'] for norm in norms):.2f}"


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(lines) if rows else "(no finished runs)"
