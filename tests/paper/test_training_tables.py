"""Plans, tables and charts of the trainings of figures, from result lines that are made up."""

import dataclasses
import json
import math

import pytest

from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.paper import training_tables as tables
from scalelong_diffusers.paper.figures import FIGURES, TRAININGS, write_figure
from scalelong_diffusers.paper.figures import tables as tables_of
from scalelong_diffusers.paper.trainings import CS, LS, METHODS, PLAIN, UNET, Training, shortened


NAMES = [name for name, figure in FIGURES.items() if figure.experiment is TRAININGS]


def line_of(run, fids=(100.0, 80.0, 60.0, 50.0), **values):
    steps = run.steps
    fid = [[steps * (k + 1) // len(fids), value] for k, value in enumerate(fids)]
    features = [[10 * k, 1.0 + k % 2, 2.0, 3.0] for k in range(1, 40)]
    losses = [[steps * (k + 1) // 20, 1 / (k + 1), 1.0] for k in range(20)]
    gates = {"gates": [[0.5**i, 0.0, 1.0] for i in range(6)]} if METHODS[run.method]["skip_scaling"] == "ls" else {}
    line = {"stopped": None, "fid": fid, "features": features, "evaluations": losses, "accuracy": 0.9, **gates}
    return {**line, **values}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with the lines of all runs."""
    folder = tmp_path_factory.mktemp("finished")
    runs = dict.fromkeys(run for name in NAMES for run in FIGURES[name].planned(quick=False))
    lines = [json.dumps({"run": dataclasses.asdict(run), **line_of(run)}) + "\n" for run in runs]
    (folder / "trainings.jsonl").write_text("".join(lines))
    return folder


def test_runs_of_several_figures_are_shared():
    runs = [run for name in NAMES for run in FIGURES[name].planned(quick=False, seeds=1)]
    assert len(set(runs)) < 0.8 * len(runs)
    names = {run.name for run in runs}
    assert len(names) == len(set(runs))


def test_quick_runs_keep_what_a_figure_compares():
    for name in NAMES:
        assert len(FIGURES[name].planned(quick=True)) == len(FIGURES[name].planned(quick=False, seeds=1))
    assert {shortened(run).layers for run in tables.size_runs()} == {4, 6, 8}


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_table_and_its_charts(name, finished):
    table = tables_of(name, finished, quick=False)
    assert len(table.splitlines()) >= 2 + len(FIGURES[name].planned(quick=False, seeds=1))
    files = write_figure(name, finished, quick=False)
    assert len(files) == (0 if FIGURES[name].panels is None else 2)


def test_charts_wait_for_all_runs(tmp_path):
    results = ResultFile(tmp_path / "trainings.jsonl", Training)
    results.add(Training(PLAIN), line_of(Training(PLAIN)))
    assert write_figure("fig5", tmp_path, quick=False) == []
    assert "plain" in tables_of("fig5", tmp_path, quick=False)


@pytest.mark.parametrize(
    ("fids", "expected"),
    [
        ((100, 50, 40, 30), 2.0),
        ((40, 30, 20, 10), 4.0),
        ((100, 80, 60, 51), 0.0),
        ((100, 100, 25, 20), 4 / 2.5),  # halfway between 100 and 25 on a logarithmic scale
    ],
)
def test_speed_up_to_the_plain_fid(fids, expected):
    plain, run = Training(PLAIN, steps=400), Training(CS, steps=400)
    lines = [{"run": vars(each), **line_of(each, values)} for each, values in ((run, fids), (plain, (90, 80, 70, 50)))]
    assert tables.speed_up(*lines) == pytest.approx(expected)
    assert tables.speed_up(lines[1], lines[1]) == 1


def test_diverged_runs_are_counted_and_reach_nothing(tmp_path):
    results = ResultFile(tmp_path / "trainings.jsonl", Training)
    for seed in (0, 1):
        results.add(Training(PLAIN, seed=seed), line_of(Training(PLAIN)))
        reason = None if seed else "the loss is not finite"
        stopped = {"stopped": reason, "fid": [], "evaluations": [[100, None, None]], "features": []}
        results.add(Training(CS, seed=seed), line_of(Training(CS), **({} if seed else stopped)))
    rows = [row.split(" | ") for row in tables_of("table4", tmp_path, quick=False).splitlines()[2:]]
    assert [row[1:4] for row in rows] == [[PLAIN, "2", "0"], [CS, "2", "1"]]
    assert rows[1][5:] == ["50.0", "0.50 (0.00 to 1.00) |"]
    assert tables_of("fig1", tmp_path, quick=False) == "(no finished runs)"


def test_oscillation_is_relative():
    assert tables.oscillation([(k, 5.0) for k in range(30)]) == 0
    doubling = [(k, 2.0 ** (k % 2)) for k in range(30)]
    assert tables.oscillation(doubling) == pytest.approx(100 * math.log(2))
    assert tables.oscillation([(k, 7 * size) for k, size in doubling]) == pytest.approx(100 * math.log(2))


def test_places_of_features():
    line = {"features": [[10, 1.0, 2.0, 3.0, 4.0, 5.0]]}
    assert [tables.feature_curve(line, place)[0][1] for place in ("first", "middle", "last")] == [1, 3, 5]


def test_descriptions_tell_runs_apart():
    runs = dict.fromkeys(run for name in NAMES for run in FIGURES[name].runs())
    assert len({(tables.described(run), run.method) for run in runs}) == len(runs)
    assert tables.described(Training(LS, UNET)) == "U-Net, batch 64"
