"""The draws of random networks behind Theorems 3.1, 3.3 and 3.4, and their tables."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scalelong_diffusers.charts import Panel
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.tables import markdown_table, with_range
from scalelong_diffusers.paper.experiment import Simplify
from scalelong_diffusers.paper.network import expected_energies
from scalelong_diffusers.paper.theory import RADII, Draws


# Variance of the last matrix of a block, times its width.
GAINS = {"as in the paper": 2.0, "norm kept": 1.0}
DEPTHS, DEPTH = (2, 4, 8, 16), 8
SCALINGS: dict[str, dict[str, Any]] = {
    "k = 0.5": {"method": "constant", "kappa": 0.5},
    "k = 1/sqrt(2)": {"method": "inv_sqrt2"},
    "CS, 0.7": {"method": "cs", "kappa": 0.7},
    "CS, 0.9": {"method": "cs", "kappa": 0.9},
    "reversed CS, 0.7": {"method": "cs", "kappa": 0.7, "reverse": True},
    "k = 1": {},
}
WIDTHS = (32, 64, 128, 256)
BOUND_WIDTH, BOUND_SCALINGS = 64, ("k = 1", "k = 1/sqrt(2)", "CS, 0.7", "reversed CS, 0.7")
# Large enough that the output hardly matters for the loss.
FAR_TARGET = 1000.0
VARIANTS: dict[str, dict[str, str]] = {
    "sum": {},
    "concatenation": {"join": "concatenation"},
    "sum, LayerNorm": {"norm": "LayerNorm"},
    "sum, GroupNorm": {"norm": "GroupNorm"},
    "concatenation, LayerNorm": {"join": "concatenation", "norm": "LayerNorm"},
    "concatenation, GroupNorm": {"join": "concatenation", "norm": "GroupNorm"},
}
VARIANT_CASES: dict[str, dict[str, Any]] = {
    "N = 4, k = 1": {"skips": 4},
    "N = 16, k = 1": {"skips": 16},
    "N = 16, CS, 0.7": {"skips": 16, **SCALINGS["CS, 0.7"]},
}

Results = ResultFile[Draws]


def shortened(draws: Draws) -> Draws:
    """Return draws for the quick mode."""
    return dataclasses.replace(draws, count=40, width=min(draws.width, 64))


def _grid(last_gain: float, **fields) -> dict[str, Draws]:
    """Return the draws over depth with k = 1, and those over scalings at one depth, by name."""
    depths = {f"N = {n}": Draws(n, last_gain=last_gain, **fields) for n in DEPTHS}
    scalings = {name: Draws(DEPTH, last_gain=last_gain, **scaling, **fields) for name, scaling in SCALINGS.items()}
    return {**depths, **{f"N = {DEPTH}, {name}": draws for name, draws in scalings.items() if name != "k = 1"}}


# Theorem 3.1


def _width_draws() -> list[Draws]:
    return [Draws(n, last_gain=1.0, width=width) for width in WIDTHS for n in (2, DEPTH)]


def feature_draws() -> list[Draws]:
    return [draws for gain in GAINS.values() for draws in _grid(gain).values()] + _width_draws()


def feature_tables(results: Results, simplify: Simplify) -> str:
    return "\n\n".join(
        (_feature_table(results, simplify), _constant_table(results, simplify), _width_table(results, simplify))
    )


def _feature_table(results: Results, simplify: Simplify) -> str:
    """Compare the energy of the output with its expectation."""
    rows = []
    for name in _grid(1.0):
        cells = []
        for gain in GAINS.values():
            draws = simplify(_grid(gain)[name])
            if draws in results:
                mean, low, _, high, _ = results.lines[draws]["features"][0]
                cells += [with_range(mean, low, high), f"{expected_energies(draws.factors, gain)[0]:.4g}"]
        if len(cells) == 2 * len(GAINS):
            rows.append([name, f"{draws.energies[0]:.3g}", *cells])
    heads = [f"{title}, {name}" for name in GAINS for title in ("mean (5 % to 95 %)", "expected")]
    return markdown_table(("networks", "S_1", *heads), rows)


def fitted_constants(results: Results, draws: Sequence[Draws]) -> tuple[float, float]:
    """Return c_1, and c_2 / |x_t|^2, that fit the mean energies of all features best (least squares)."""
    pairs = [
        (energy, feature[0])
        for each in draws
        for energy, feature in zip(each.energies, results.lines[each]["features"])
    ]
    energies, features = torch.tensor(pairs, dtype=torch.float64).T
    columns = torch.stack((energies, torch.ones_like(energies)), dim=1)
    slope, intercept = torch.linalg.lstsq(columns, features[:, None]).solution.flatten().tolist()
    return slope, intercept


def feature_panels(results: Results, simplify: Simplify) -> list[Panel]:
    """Draw the mean energy of the output over the number of skips."""
    cases = {name: {"last_gain": gain} for name, gain in GAINS.items()}
    return [_panel(results, simplify, "features", "|h_1|\u00b2 / |x_t|\u00b2", cases)]


def _panel(
    results: Results, simplify: Simplify, quantity: str, name: str, cases: Mapping[str, Mapping[str, Any]]
) -> Panel:
    """Draw the mean of a quantity at block 1 over the number of skips, and S_1 + 1."""
    curves = {
        label: [(n, results.lines[simplify(Draws(n, **fields))][quantity][0][0]) for n in DEPTHS]
        for label, fields in cases.items()
    }
    return Panel(name, {**curves, "S_1 + 1": [(n, n + 1) for n in DEPTHS]}, axis="number of skips", first=DEPTHS[0])


def _constant_table(results: Results, simplify: Simplify) -> str:
    rows = []
    for n in DEPTHS:
        draws = [simplify(Draws(n, last_gain=gain)) for gain in GAINS.values()]
        if all(each in results for each in draws):
            fits = [fitted_constants(results, [each]) for each in draws]
            rows.append([str(n), *(f"{number:.3g}" for fit in fits for number in fit)])
    heads = [f"{constant}, {name}" for name in GAINS for constant in ("c_1", "c_2 / abs(x_t)^2")]
    return markdown_table(("N", *heads), rows)


def _width_table(results: Results, simplify: Simplify) -> str:
    rows = []
    for draws in dict.fromkeys(map(simplify, _width_draws())):
        if draws in results:
            within = results.lines[draws]["within"]
            rows.append([str(draws.width), str(draws.skips), *(f"{1 - within[str(r)]:.1%}" for r in RADII)])
    return markdown_table(("width m", "N", *(f"outside, r = {r:g}" for r in RADII)), rows)


# Theorem 3.3


GRADIENT_CASES: dict[str, dict[str, float]] = {
    **{name: {"last_gain": gain} for name, gain in GAINS.items()},
    "norm kept, far target": {"last_gain": 1.0, "target_scale": FAR_TARGET},
}


def gradient_draws() -> list[Draws]:
    return [draws for fields in GRADIENT_CASES.values() for draws in _grid(**fields).values()]


def gradient_table(results: Results, simplify: Simplify) -> str:
    """Show the largest gradient of the outermost block, and relative to S_1 + 1."""
    grids = [_grid(**fields) for fields in GRADIENT_CASES.values()]
    rows = []
    for name in grids[0]:
        draws = [simplify(grid[name]) for grid in grids]
        if all(each in results for each in draws):
            cells = []
            for each in draws:
                mean, low, _, high, _ = results.lines[each]["gradients"][0]
                cells += [with_range(mean, low, high), f"{mean / (each.energies[0] + 1):.3g}"]
            rows.append([name, f"{draws[0].energies[0]:.3g}", *cells])
    heads = [f"{title}, {name}" for name in GRADIENT_CASES for title in ("mean", "/ (S_1 + 1)")]
    return markdown_table(("networks", "S_1", *heads), rows)


def gradient_panels(results: Results, simplify: Simplify) -> list[Panel]:
    """Draw the mean gradient of block 1 over the number of skips."""
    return [_panel(results, simplify, "gradients", "gradient\u00b2 / (loss |x_t|\u00b2)", GRADIENT_CASES)]


# Theorem 3.4


def bound_draws() -> list[Draws]:
    cases = [(n, 1.0) for n in DEPTHS[:3]] + [(DEPTH, 2.0)]
    return [
        Draws(n, last_gain=gain, width=BOUND_WIDTH, bounds=True, **SCALINGS[name])
        for n, gain in cases
        for name in BOUND_SCALINGS
    ]


def bound_table(results: Results, simplify: Simplify) -> str:
    names = {tuple(sorted(scaling.items())): name for name, scaling in SCALINGS.items()}
    gains = {gain: name for name, gain in GAINS.items()}
    rows = []
    for planned in bound_draws():
        draws = simplify(planned)
        if draws in results:
            line = results.lines[draws]
            given = {name: getattr(draws, name) for name in ("method", "kappa", "reverse")}
            scaling = {name: value for name, value in given.items() if value not in (None, False, "none")}
            rows.append([
                f"{gains[draws.last_gain]}, N = {draws.skips}, {names[tuple(sorted(scaling.items()))]}",
                with_range(*(line["change"][k] for k in (0, 1, 3))),
                f"{line['worst'][0]:.3g} ({line['worst'][4]:.3g})",
                f"{line['bound'][2]:.2g}",
                f"{line['share of c0'][2]:.1%}",
                f"{1 - line['within']['bound']:.1%}",
            ])  # fmt: skip
    heads = ("networks", "random direction (5 % to 95 %)", "worst direction (largest)", "bound, median")
    return markdown_table((*heads, "share of c_0 in it", "draws above the bound"), rows)


# Concatenation and norms


def variant_draws() -> list[Draws]:
    return [
        Draws(last_gain=1.0, **case, **variant) for variant in VARIANTS.values() for case in VARIANT_CASES.values()
    ]


def variant_table(results: Results, simplify: Simplify) -> str:
    """Show features, gradients and changes of the output for each join and norm."""
    rows = []
    for name, variant in VARIANTS.items():
        for case, fields in VARIANT_CASES.items():
            draws = simplify(Draws(last_gain=1.0, **fields, **variant))
            if draws in results:
                line = results.lines[draws]
                quantities = (line["features"][0], line["gradients"][0], line["change"])
                rows.append([name, case, *(with_range(q[0], q[1], q[3]) for q in quantities)])
    heads = ("features: abs(h_1)^2 / abs(x_t)^2", "gradients / (loss abs(x_t)^2)", "change of the output")
    return markdown_table(("join, norm", "networks", *heads), rows)
