"""All figures, tables and theorems of the paper that `scalelong paper` reruns, by name."""

from collections.abc import Callable
from pathlib import Path

from scalelong_diffusers import charts
from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.files import atomic_write
from scalelong_diffusers.paper import input_tables, inputs, theorems, theory, training_tables, trainings
from scalelong_diffusers.paper.experiment import Experiment, Figure, Workspace, measure_each
from scalelong_diffusers.paper.trainings import Training


THEORY = Experiment(
    "theory", theory.Draws, theorems.shortened, measure_each(lambda draws, workspace: theory.measure(draws))
)
INPUTS = Experiment("inputs", inputs.NoisyInputs, input_tables.shortened, measure_each(inputs.measure), seeds=3)
TRAININGS = Experiment("trainings", trainings.Training, trainings.shortened, trainings.run_all, seeds=3)


def _quality(title: str, planned: Callable[[], list[Training]], has_chart: bool = False) -> Figure:
    """Return a figure of loss and FID."""
    panels = training_tables.fid_panels(planned) if has_chart else None
    return Figure(title, TRAININGS, planned, training_tables.quality_table(planned), panels)


FIGURES = {
    "theorem3.1": Figure(
        "features of random networks, and how far they oscillate", THEORY,
        theorems.feature_draws, theorems.feature_tables, theorems.feature_panels,
    ),
    "lemma3.2": Figure(
        "energy of noisy images that are uniform", INPUTS, input_tables.uniform_inputs, input_tables.lemma_table
    ),
    "theorem3.3": Figure(
        "gradients of random networks", THEORY,
        theorems.gradient_draws, theorems.gradient_table, theorems.gradient_panels,
    ),
    "theorem3.4": Figure(
        "sensitivity of random networks to their input", THEORY, theorems.bound_draws, theorems.bound_table
    ),
    "variants": Figure(
        "the same with concatenated skips, GroupNorm and LayerNorm", THEORY,
        theorems.variant_draws, theorems.variant_table,
    ),
    "fig3a": Figure(
        "energy of noisy images", INPUTS,
        input_tables.all_inputs, input_tables.energy_table, input_tables.energy_panels,
    ),
    "fig3b": Figure(
        "energy of the noise relative to noisy images", INPUTS,
        input_tables.all_inputs, input_tables.ratio_table, input_tables.ratio_panels,
    ),
    "fig1": Figure(
        "hidden features during training", TRAININGS,
        training_tables.feature_runs, training_tables.feature_table, training_tables.feature_panels,
    ),
    "fig3c": _quality("quality after training with extra noise", training_tables.extra_noise_runs),
    "fig5": _quality("quality over training steps", training_tables.speed_runs, has_chart=True),
    "fig6": _quality("the same for several batch sizes and depths", training_tables.size_runs, has_chart=True),
    "fig7": Figure(
        "gates of trained LS models", TRAININGS,
        training_tables.gate_runs, training_tables.gate_table, training_tables.gate_panels,
    ),
    "table2": _quality("variants of the gates", training_tables.gate_variant_runs),
    "table3": _quality("scaling the output of blocks", training_tables.block_scaling_runs),
    "table4": _quality("CS in the reverse direction", training_tables.reversed_runs),
}  # fmt: skip


def get_figure(name: str) -> Figure:
    """Return the figure with this name."""
    if name not in FIGURES:
        raise UserError(f"unknown figure {name!r}{did_you_mean(name, FIGURES)}; accepted: all, {', '.join(FIGURES)}")
    return FIGURES[name]


def run_figure(name: str, workspace: Workspace, quick: bool, seeds: int | None = None):
    """Execute the runs of a figure that have no results yet."""
    figure = get_figure(name)
    results = figure.experiment.results(workspace.runs.parent)
    with results.locked():
        figure.experiment.run_all(results, figure.planned(quick, seeds), workspace)


def write_figure(name: str, folder: Path, quick: bool) -> list[Path]:
    """Draw a figure for light and dark pages, if all of its runs have finished. Return its files."""
    figure = get_figure(name)
    results = figure.experiment.results(folder)
    runs = figure.planned(quick, seeds=1)
    if figure.panels is None or not all(run in results for run in runs):
        return []
    panels = figure.panels(results, figure.simplify(quick))
    files = {folder / f"{name}-{page}.svg": page == "dark" for page in ("light", "dark")}
    for file, dark in files.items():
        drawing = charts.figure(panels, f"{name}: {figure.title}", dark)
        atomic_write(file, lambda partial, drawing=drawing: partial.write_text(drawing, encoding="utf-8"))
    return list(files)


def tables(name: str, folder: Path, quick: bool) -> str:
    """Return the Markdown tables of a figure's finished runs."""
    figure = get_figure(name)
    return figure.tables(figure.experiment.results(folder), figure.simplify(quick))
