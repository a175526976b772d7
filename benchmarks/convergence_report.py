"""Turn the finished runs of the convergence benchmark into Markdown tables and the figure of the README."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from convergence_runs import (
    BASE,
    BETA1S,
    CONTROLS,
    EVERYWHERE,
    FID_PARTS,
    METHODS_ON,
    PAPER,
    PAPER_RATES,
    PLAIN,
    QUICK,
    QUICK_RATES,
    RATES,
    SEEDS,
    TUNED,
    Results,
    Run,
    paper_runs,
    tuning_runs,
)

from scalelong_diffusers.charts import HEIGHT, WIDTH, Curve, chart
from scalelong_diffusers.experiments.tables import markdown_table


_TUNED_PAIRS = [(workload, method) for workload in TUNED for method in METHODS_ON[workload]]
TAUS = (1, 1.25, 1.5, 2, 3, 4)


def tables(results: Results) -> str:
    """Return all tables as Markdown sections."""
    sections = {
        "Tuned settings": comparison(results),
        "Performance profiles": profiles(results),
        "FID": quality(results),
        "The paper's protocol": paper_protocol(results),
        "Final losses of the tuning runs": tuning(results),
    }
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in sections.items())


def quick_table(results: Results) -> str:
    """Return the table of `--quick`."""
    runs = [Run(QUICK, method, rate) for method, rate in QUICK_RATES.items()]
    rows = [[run.method, f"{run.learning_rate:g}", _against(results, [(run, runs[0])])] for run in runs]
    return markdown_table(("method", "learning rate", "final loss (speed-up)"), rows if runs[0] in results else [])


def plain_target(results: Results, workload: str, seed: int | None = None) -> float:
    """
    Return the lowest final loss of the plain runs with a seed, or of all plain runs.

    It is infinite if no plain run has finished well.
    """
    methods = [PLAIN, *(name for name, tuned in CONTROLS.items() if tuned == PLAIN)]
    runs = [run for method in methods for run in _finished_seeds(results, workload, method)]
    runs = [*tuning_runs(workload, PLAIN), *runs] if seed is None else [run for run in runs if run.seed == seed]
    return min((results.final_loss(run) for run in runs if run in results), default=math.inf)


def targets(results: Results, workload: str, runs: Sequence[Run], is_same_for_all: bool = False) -> list[float]:
    """Return the target of each run: the loss of the plain run with its seed, or of the best plain run."""
    lowest = plain_target(results, workload)
    own = [lowest if is_same_for_all else plain_target(results, workload, run.seed) for run in runs]
    return [target if math.isfinite(target) else lowest for target in own]


def speed_ups(results: Results, workload: str, method: str, is_same_for_all: bool = False) -> list[float]:
    """
    Return all steps / steps to the target of each finished seed. 0 means that the run missed the target.

    The plain model sets the target, so it has a speed-up of 1.
    """
    runs = _finished_seeds(results, workload, method)
    pairs = list(zip(runs, targets(results, workload, runs, is_same_for_all)))
    if not all(math.isfinite(target) for _, target in pairs):
        return []
    return [1.0 if method == PLAIN else run.steps / results.steps_to(target, run) for run, target in pairs]


def comparison(results: Results) -> str:
    """Compare all methods at their best settings with the plain model, on each workload."""
    rows = [
        _comparison_row(results, workload, method)
        for workload, method in _TUNED_PAIRS
        if _finished_seeds(results, workload, method)
    ]
    heads = ("workload", "method", "rate, beta1", "seeds", "final loss", "better seeds", "steps to the plain loss")
    return markdown_table((*heads, "speed-up", "at least", "to the best plain run"), rows)


def _comparison_row(results: Results, workload: str, method: str) -> list[str]:
    runs = _finished_seeds(results, workload, method)
    losses = [results.final_loss(run) for run in runs]
    better = sum(loss < target for loss, target in zip(losses, targets(results, workload, runs)))
    gains = speed_ups(results, workload, method)
    # The lower median: halfway between a gain and a miss is no gain.
    gain, strict = (
        statistics.median_low(each) if each else 0.0
        for each in (gains, speed_ups(results, workload, method, is_same_for_all=True))
    )
    return [
        workload,
        method,
        f"{runs[0].learning_rate:g}, {runs[0].beta1:g}",
        str(len(runs)),
        f"{_format_loss(statistics.median(losses))} ({_format_loss(min(losses))} to {_format_loss(max(losses))})",
        str(better),
        f"{runs[0].steps / gain:,.0f}" if gain else "not reached",
        _format_gain(gain),
        _format_gain(min(gains)) if len(gains) == len(SEEDS) and method != PLAIN else "",
        _format_gain(strict) if method != PLAIN else "",
    ]


def profiles(results: Results) -> str:
    """Return the fractions of workloads on which each method is within a factor tau of the best, as in AlgoPerf."""
    methods = [method for method in METHODS_ON[BASE] if all(method in METHODS_ON[name] for name in TUNED)]
    gains = {name: [speed_ups(results, name, method) for method in methods] for name in TUNED}
    medians = {name: [statistics.median_low(each) for each in some] for name, some in gains.items() if all(some)}
    rows = []
    for k, method in enumerate(methods):
        fractions = [profile([(row[k], max(row)) for row in medians.values()], tau) for tau in TAUS if medians]
        rows.append([f"{method}, {len(medians)} workloads", *(f"{fraction:.0%}" for fraction in fractions)])
    return markdown_table(("method", *(f"tau = {tau:g}" for tau in TAUS)), rows if len(medians) > 1 else [])


def profile(speeds: list[tuple[float, float]], tau: float) -> float:
    """Return the fraction of (speed-up, best speed-up) pairs within the factor tau. A miss is never within."""
    return sum(speed > 0 and best <= tau * speed for speed, best in speeds) / len(speeds)


def quality(results: Results) -> str:
    """Return the median FID of each method after each part of the training."""
    rows = []
    accuracies = set()
    for workload, method in _TUNED_PAIRS:
        lines = [results.lines[run] for run in _finished_seeds(results, workload, method)]
        lines = [line for line in lines if len(line.get("fid", [])) == FID_PARTS]
        if lines:
            accuracies |= {f"{line['accuracy']:.1%}" for line in lines}
            columns = zip(*([fid for _, fid in line["fid"]] for line in lines))
            cells = [f"{statistics.median(fids):.2f} ({min(fids):.2f} to {max(fids):.2f})" for fids in columns]
            rows.append([workload, method, str(len(lines)), *cells])
    seeds = f"seeds (test accuracy of the features: {' and '.join(sorted(accuracies))})"
    return markdown_table(("workload", "method", seeds, "1/4 of the steps", "1/2", "3/4", "all"), rows)


def paper_protocol(results: Results) -> str:
    """Compare methods with the plain model at equal learning rates and the same seeds, with U-ViT's optimizer."""
    rows = []
    for method in METHODS_ON[PAPER]:
        pairs = [list(zip(paper_runs(method, rate), paper_runs(PLAIN, rate))) for rate in PAPER_RATES]
        rows.append([method, *(_against(results, column) for column in pairs)])
    return markdown_table(("method", *(f"{rate:g}" for rate in PAPER_RATES)), [row for row in rows if any(row[1:])])


def tuning(results: Results) -> str:
    """Return the final loss of each tuning run."""
    settings = [(rate, beta1) for beta1 in BETA1S for rate in sorted(RATES)]
    rows = []
    for workload, method in _TUNED_PAIRS:
        runs = [Run(workload, method, *setting) for setting in settings]
        rows.append([workload, method, *(_tuning_loss(results, run) for run in runs)])
    heads = (f"{rate:g}, {beta1:g}" for rate, beta1 in settings)
    return markdown_table(("workload", "method", *heads), [row for row in rows if any(row[2:])])


def _tuning_loss(results: Results, run: Run) -> str:
    if run not in results:
        return ""
    return "stopped" if results.is_hopeless(run, results.evaluations(run)) else _final_loss(results, run)


def _against(results: Results, pairs: list[tuple[Run, Run]]) -> str:
    """Format the final losses of runs and, in brackets, their speed-ups to the final loss of the plain runs."""
    finished = [(run, plain) for run, plain in pairs if run in results and plain in results]
    losses = " / ".join(_final_loss(results, run) for run, _ in finished)
    gains = [_gain(results, run, plain) for run, plain in finished if run != plain]
    return f"{losses} ({' / '.join(gains)})" if gains else losses


def _gain(results: Results, run: Run, plain: Run) -> str:
    target = results.final_loss(plain)
    return "plain diverges" if math.isinf(target) else _format_gain(run.steps / results.steps_to(target, run))


def _finished_seeds(results: Results, workload: str, method: str) -> list[Run]:
    return [run for run in results.seed_runs(workload, method) if run in results]


def _final_loss(results: Results, run: Run) -> str:
    return _format_loss(results.final_loss(run))


def _format_loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverges"


def _format_gain(gain: float) -> str:
    return f"{gain:.2f}" if gain else "not reached"


def draw_figure(results: Results, folder: Path):
    """Write the figure for light and dark pages once the methods in it have finished seeds."""
    curves = {}
    for method in EVERYWHERE:
        runs = _finished_seeds(results, BASE, method)
        if not runs:
            return
        stable = [run for run in runs if not results.diverged(run)]
        seeds = "" if len(stable) == len(runs) else f", {len(stable)} of {len(runs)} seeds"
        curves[method + seeds] = [_shown_part(results.evaluations(run)) for run in stable]
    target, last = plain_target(results, BASE), runs[0].steps
    if all(curves.values()) and math.isfinite(target):
        curves["best plain run"] = [[(_SHOWN_FROM, target), (last, target)]]
        folder.mkdir(exist_ok=True)
        for name, dark in {"light": False, "dark": True}.items():
            (folder / f"convergence-{name}.svg").write_text(figure(curves, dark))


def figure(curves: dict[str, list[Curve]], dark: bool) -> str:
    """Draw validation loss over steps as an SVG file: a thin line per seed, a thick one for their median."""
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
        right=135,
        labels={styles[name]: name for name in curves},
        thin={styles[name]: seeds for name, seeds in curves.items() if len(seeds) > 1},
    )
    title = "Validation loss over training steps"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title><style>{style}</style>{drawing}</svg>\n"
    )


_LIGHT = ("#59636e", "#d1d9e0", ("#9a3412", "#1d4ed8", "#59636e"))
_DARK = ("#9198a1", "#3d444d", ("#fdba74", "#93c5fd", "#9198a1"))
_DASHES = ("7 4", "none", "2 3")
# The first steps look alike for all methods and would dominate the scale.
_SHOWN_FROM = 300


def _shown_part(curve: Curve) -> Curve:
    return [(step, loss) for step, loss in curve if step >= _SHOWN_FROM]


def _median(seeds: list[Curve]) -> Curve:
    return [(points[0][0], statistics.median(loss for _, loss in points)) for points in zip(*seeds)]
