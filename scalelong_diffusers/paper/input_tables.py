"""Tables and charts of the noisy inputs: Lemma 3.2 and Figures 3a and 3b."""

from collections.abc import Callable
from typing import Any

from scalelong_diffusers.charts import Panel
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.tables import markdown_table, over_seeds
from scalelong_diffusers.paper.experiment import Simplify, lines_of_seeds
from scalelong_diffusers.paper.inputs import DATASETS, PERCENTS, UNIFORM, NoisyInputs, expected_energy


def uniform_inputs() -> list[NoisyInputs]:
    return [NoisyInputs(UNIFORM)]


def all_inputs() -> list[NoisyInputs]:
    return [NoisyInputs(dataset) for dataset in DATASETS]


def shortened(inputs: NoisyInputs) -> NoisyInputs:
    return NoisyInputs(inputs.dataset, 1_000, inputs.seed)


def lemma_table(results: ResultFile[NoisyInputs], simplify: Simplify) -> str:
    """Compare the mean of |x_t|^2 / m with equation 5."""
    columns = {
        "abs(x_t)^2 / m": lambda line: line["energy"],
        "its standard error": lambda line: line["error"],
        "difference / standard error": lambda line: (line["energy"] - expected_energy()) / line["error"],
    }
    return _table(
        results, simplify, uniform_inputs(), columns, {"1 - 2 E[abar_t] / 3": lambda line: expected_energy()}
    )


def energy_table(results: ResultFile[NoisyInputs], simplify: Simplify) -> str:
    columns = {
        "abs(x_0)^2 / m": lambda line: line["clean"],
        "abs(x_t)^2 / m": lambda line: line["energy"],
        "its 1 %": lambda line: _quantile(line, 1, 1),
        "its 99 %": lambda line: _quantile(line, 99, 1),
        "expected from abs(x_0)^2": lambda line: expected_energy(line["clean"]),
    }
    return _table(results, simplify, all_inputs(), columns, {"Lemma 3.2": lambda line: expected_energy()})


def ratio_table(results: ResultFile[NoisyInputs], simplify: Simplify) -> str:
    columns = {
        "mean": lambda line: line["noise_ratio"],
        "ratio of the means": lambda line: 1 / line["energy"],
        "median": lambda line: _quantile(line, 50, 2),
        "99 %": lambda line: _quantile(line, 99, 2),
        "below 5": lambda line: line["below_5"],
    }
    return _table(results, simplify, all_inputs(), columns, {})


def _table(
    results: ResultFile[NoisyInputs],
    simplify: Simplify,
    planned: list[NoisyInputs],
    columns: dict[str, Callable[[dict[str, Any]], float]],
    constants: dict[str, Callable[[dict[str, Any]], float]],
) -> str:
    """Return one row for each dataset. `constants` do not depend on the seed."""
    rows = []
    for inputs in map(simplify, planned):
        if lines := lines_of_seeds(results, inputs):
            cells = [over_seeds([column(line) for line in lines], ".4f") for column in columns.values()]
            cells += [f"{constant(lines[0]):.4f}" for constant in constants.values()]
            rows.append([inputs.dataset, f"{inputs.num_pixels:,}", str(len(lines)), *cells])
    return markdown_table(("images", "m", "seeds", *columns, *constants), rows)


def _quantile(line: dict[str, Any], percent: int, column: int) -> float:
    return next(row[column] for row in line["quantiles"] if row[0] == percent)


def energy_panels(results: ResultFile[NoisyInputs], simplify: Simplify) -> list[Panel]:
    return [_panel(results, simplify, 1, "|x_t|\u00b2 / m")]


def ratio_panels(results: ResultFile[NoisyInputs], simplify: Simplify) -> list[Panel]:
    return [_panel(results, simplify, 2, "|eps|\u00b2 / |x_t|\u00b2")]


def _panel(results: ResultFile[NoisyInputs], simplify: Simplify, column: int, name: str) -> Panel:
    """Draw the quantiles of seed 0 for each dataset."""
    curves = {
        inputs.dataset: [(row[0], row[column]) for row in results.lines[inputs]["quantiles"]]
        for inputs in map(simplify, all_inputs())
    }
    return Panel(name, curves, axis="percent of the inputs", first=PERCENTS[0])
