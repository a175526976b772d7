"""The plans, tables and charts of the figures that need trainings."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

from scalelong_diffusers.charts import Curve, Panel
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.tables import markdown_table, over_seeds
from scalelong_diffusers.paper.experiment import Simplify, lines_of_seeds
from scalelong_diffusers.paper.gates import fit_kappa
from scalelong_diffusers.paper.trainings import CS, LS, MAIN_METHODS, PLAIN, UNET, Training


Results = ResultFile[Training]
Line = dict[str, Any]

EXTRA_NOISES = (0.0, 0.1, 0.3, 1.0)
BATCH_SIZES, DEPTHS = (16, 32, 64), (12, 20, 28)
LS_PATCH_SIZE = 4  # more tokens than a reduction of 16 needs
GATE_METHODS = (LS, "LS, r = 8", "LS, r = 4", "LS, ELU", "LS, Mish", "LS, IE", "learnable k")
BLOCK_METHODS = (PLAIN, "t = 0.1", "t = 0.3", "ReZero", CS, LS)
REVERSED_METHODS = (PLAIN, CS, "reversed CS, 0.9")


# The runs of each figure, with seed 0


def feature_runs() -> list[Training]:
    """Return the runs of Figure 1: a deep U-ViT and a U-Net."""
    deep = [Training(method, layers=DEPTHS[-1]) for method in MAIN_METHODS]
    return deep + [Training(method, UNET) for method in MAIN_METHODS]


def extra_noise_runs() -> list[Training]:
    return [Training(method, extra_noise=noise) for noise in EXTRA_NOISES for method in MAIN_METHODS]


def speed_runs() -> list[Training]:
    """Return the runs of Figure 5."""
    return [Training(method, architecture) for architecture in ("U-ViT", UNET) for method in MAIN_METHODS]


def size_runs() -> list[Training]:
    """Return the runs of Figure 6: several batch sizes, and several depths."""
    batches = [Training(method, batch_size=size) for size in BATCH_SIZES for method in MAIN_METHODS]
    return list(dict.fromkeys(batches + [Training(method, layers=n) for n in DEPTHS for method in MAIN_METHODS]))


def gate_runs() -> list[Training]:
    """Return the runs of Figure 7."""
    return [Training(LS, patch_size=LS_PATCH_SIZE), Training(LS, layers=DEPTHS[1], patch_size=LS_PATCH_SIZE)]


def gate_variant_runs() -> list[Training]:
    """Return the runs of Table 2."""
    return [Training(method, patch_size=LS_PATCH_SIZE) for method in (PLAIN, *GATE_METHODS)]


def block_scaling_runs() -> list[Training]:
    """Return the runs of Table 3."""
    return [Training(method) for method in BLOCK_METHODS]


def reversed_runs() -> list[Training]:
    """Return the runs of Table 4."""
    return [Training(method) for method in REVERSED_METHODS]


# Tables


def described(training: Training) -> str:
    """Return what differs from a usual run, in words."""
    usual = Training(training.method)
    if training.architecture == UNET:
        words = [UNET]
    else:
        words = [training.architecture, f"{training.layers} layers"]
        words += [f"patch size {training.patch_size}"] if training.patch_size != usual.patch_size else []
    words += [f"batch {training.batch_size}"]
    words += [f"extra noise {training.extra_noise:g}"] if training.extra_noise else []
    return ", ".join(words)


def quality_table(planned: Callable[[], list[Training]]) -> Callable[[Results, Simplify], str]:
    """Return a function that makes the table of loss and FID of these runs, with the median over seeds."""

    def table(results: Results, simplify: Simplify) -> str:
        rows = []
        for training in dict.fromkeys(map(simplify, planned())):
            if lines := lines_of_seeds(results, training):
                completed = _completed(lines)
                plain = _completed(lines_of_seeds(results, dataclasses.replace(training, method=PLAIN)))
                gains = [speed_up(line, other) for line, other in _same_seeds(lines, plain)]
                rows.append([
                    described(training), training.method, str(len(lines)), str(len(lines) - len(completed)),
                    over_seeds([final_loss(line) for line in completed], ".4f"),
                    over_seeds([line["fid"][-1][1] for line in completed], ".1f"),
                    over_seeds(gains, ".2f"),
                ])  # fmt: skip
        heads = ("model", "method", "seeds", "diverged", "final loss", "FID")
        return markdown_table((*heads, "speed-up to the FID of the plain model"), rows)

    return table


def _completed(lines: list[Line]) -> list[Line]:
    """Return the lines of runs that did not stop because of non-finite losses."""
    return [line for line in lines if line["stopped"] is None]


def _same_seeds(lines: list[Line], others: list[Line]) -> list[tuple[Line, Line]]:
    by_seed = {line["run"]["seed"]: line for line in others}
    return [(line, by_seed[line["run"]["seed"]]) for line in lines if line["run"]["seed"] in by_seed]


def final_loss(line: Line) -> float:
    """Return the mean of the last three validations in EMA weights."""
    return statistics.mean(loss for _, loss, _ in line["evaluations"][-3:])


def speed_up(line: Line, plain: Line) -> float:
    """
    Return all steps / steps to the final FID of the plain run, or 0 if the run diverges or never reaches it.

    FID is known after each part of the training; in between, its logarithm is interpolated.
    """
    (_, target), steps = plain["fid"][-1], plain["run"]["steps"]
    if line["run"] == plain["run"]:
        return 1.0
    if line["stopped"] is not None:
        return 0.0
    if line["fid"][0][1] <= target:
        return steps / line["fid"][0][0]
    for (start, high), (step, fid) in itertools.pairwise(line["fid"]):
        if fid <= target:
            share = math.log(high / target) / math.log(high / fid)
            return steps / (start + share * (step - start))
    return 0.0


def feature_table(results: Results, simplify: Simplify) -> str:
    """Show size and oscillation of the features of the outermost, the middle and the innermost decoder block."""
    rows = []
    for training in map(simplify, feature_runs()):
        if lines := _completed(lines_of_seeds(results, training)):
            cells = []
            for place in ("first", "middle", "last"):
                curves = [feature_curve(line, place) for line in lines]
                cells += [
                    over_seeds([each[-1][1] for each in curves]),
                    over_seeds([oscillation(each) for each in curves]),
                ]
            rows.append([described(training), training.method, str(len(lines)), *cells])
    places = ("i = 1", "middle", "i = N")
    heads = [f"{name}, {place}" for place in places for name in ("size at the end", "oscillation")]
    return markdown_table(("model", "method", "seeds", *heads), rows)


def feature_curve(line: Line, place: str) -> Curve:
    """Return the root mean square of a decoder block's output over the steps."""
    blocks = len(line["features"][0]) - 1
    column = {"first": 1, "middle": 1 + blocks // 2, "last": blocks}[place]
    return [(row[0], row[column]) for row in line["features"]]


def oscillation(curve: Curve) -> float:
    """Return the median relative change between two measurements, in percent, after the first tenth (warm-up)."""
    sizes = [size for _, size in curve[len(curve) // 10 :]]
    return 100 * statistics.median(abs(math.log(b / a)) for a, b in itertools.pairwise(sizes))


def gate_table(results: Results, simplify: Simplify) -> str:
    """Show the gates of trained LS models, and the best kappa."""
    rows = []
    for training in map(simplify, gate_runs()):
        for line in _completed(lines_of_seeds(results, training)):
            means = [gate[0] for gate in line["gates"]]
            fit = fit_kappa(means)
            rows.append([
                described(training), str(line["run"]["seed"]), " ".join(f"{mean:.2f}" for mean in means),
                f"{fit['kappa']:.3f}", f"{fit['residual']:.3f}", f"{fit['constant']:.3f}",
            ])  # fmt: skip
    heads = ("model", "seed", "k_1 ... k_N, mean over 30 noises", "kappa", "residual of kappa^(i-1)")
    return markdown_table((*heads, "residual of a constant"), rows)


# Charts


def feature_panels(results: Results, simplify: Simplify) -> list[Panel]:
    """Draw the size of the middle decoder block's output over the steps, for seed 0."""
    panels: dict[str, dict[str, Curve]] = {}
    for training in map(simplify, feature_runs()):
        for line in _completed([results.lines[training]]):
            panels.setdefault(described(training), {})[training.method] = feature_curve(line, "middle")
    return [Panel(f"features of the middle decoder block: {name}", curves) for name, curves in panels.items()]


def fid_panels(planned: Callable[[], list[Training]]) -> Callable[[Results, Simplify], list[Panel]]:
    """Return a function that draws FID over steps, the median over seeds."""

    def panels(results: Results, simplify: Simplify) -> list[Panel]:
        found: dict[str, dict[str, Curve]] = {}
        for training in map(simplify, planned()):
            parts = [line["fid"] for line in _completed(lines_of_seeds(results, training))]
            if parts:
                medians = [(points[0][0], statistics.median(fid for _, fid in points)) for points in zip(*parts)]
                found.setdefault(described(training), {})[training.method] = medians
        return [Panel(f"FID: {name}", curves) for name, curves in found.items()]

    return panels


def gate_panels(results: Results, simplify: Simplify) -> list[Panel]:
    """Draw the gates of seed 0 over the skips, with the fit."""
    panels = []
    for training in map(simplify, gate_runs()):
        for line in _completed([results.lines[training]]):
            means = [gate[0] for gate in line["gates"]]
            kappa = fit_kappa(means)["kappa"]
            curves = {
                "gates": list(enumerate(means, start=1)),
                "fit": [(i, kappa ** (i - 1)) for i in range(1, len(means) + 1)],
            }
            panels.append(Panel(f"k_i: {described(training)}", curves, axis="i", first=1))
    return panels
