"""The benchmark of muP: the coordinate check, the plan of the learning rates, and the tables of the docs page."""

import json
import math
import re

import pytest

from scalelong_diffusers.experiments.results import ResultFile


@pytest.fixture
def mup(benchmark):
    return benchmark("mup")


@pytest.fixture
def rates(mup, tmp_path):
    """Return a function that writes {exponent: final loss} of one model, and reads the results."""
    model = mup.RateSweep("residual", True, 64, 12)

    def make(losses):
        results = ResultFile(tmp_path / "rates.jsonl", mup.RateRun)
        for k, loss in losses.items():
            stopped = None if math.isfinite(loss) else "not finite"
            curve = [[50 * (step + 1), 1.0 if step == 0 else loss, 1.0] for step in range(10)]
            results.add(model.run(k), {"stopped": stopped, "evaluations": curve if stopped is None else []})
        return results, model

    return make


@pytest.mark.parametrize(
    ("losses", "waiting"),
    [
        ({}, [-8]),
        ({-8: 0.1}, [-9, -7]),
        ({-8: 0.1, -9: 0.2, -7: 0.12}, [-10, -6]),
        ({-8: 0.1, -9: 0.2, -10: 0.2, -7: 0.09}, [-6]),  # two in a row are too high
        ({-8: 0.1, -9: 0.2, -10: 0.11, -7: math.inf, -6: math.inf}, [-11]),
        ({-8: 0.1, -9: 0.2, -10: 0.2, -7: 0.9, -6: 0.3}, []),
    ],
)
def test_learning_rates_are_tried_from_the_middle_outwards(mup, rates, losses, waiting):
    assert sorted(mup.next_exponents(*rates(losses))) == sorted(waiting)


def finished(loss):
    return {"stopped": None, "evaluations": [[50, 0.7, 1.0]] + [[100, loss, 1.0]] * 3}


def test_other_seeds_follow_after_the_learning_rates(mup, rates):
    """They repeat the best rates, and the largest model at the rate of the base model."""
    results, _ = rates({})
    comparison = mup.compared_widths("residual", True)
    for width, model in comparison.models.items():
        for k in mup.EXPONENTS:
            results.add(model.run(k), finished(0.1 * (1 + abs(k - (-9 if width == 256 else -8)) / 5)))
    expected = {(width, -8, seed) for width in comparison.models for seed in (1, 2)}
    expected |= {(256, -9, seed) for seed in (1, 2)}
    runs = mup.next_runs(results, comparison)
    assert {(run.width, run.exponent, run.seed) for run in runs} == expected
    for run in runs:
        results.add(run, finished(0.1 + run.seed / 100 if run.width < 256 else 0.3 if run.seed == 1 else 0.9))
    assert mup.next_runs(results, comparison) == []
    row = mup.transfer_table(results).splitlines()[-1]
    assert "| width 32, 64, 128, 256 | 2^-8, 2^-8, 2^-8, 2^-9 | 0.1100 ± 0.0100, " in row
    assert row.endswith(" 1 of 3 diverge | 1 of 3 diverge |")


def test_final_loss_is_infinite_for_diverged_runs(mup, rates):
    results, model = rates({-8: 0.25, -7: 1.5, -6: math.inf})
    assert [mup.final_loss(results, model.run(k)) for k in (-8, -7, -6)] == [0.25, math.inf, math.inf]


def test_settings_of_the_runs_are_valid(benchmark, mup, rates, tmp_path):
    from scalelong_diffusers import UViTModel
    from scalelong_diffusers.training import TrainingConfig, parse_config

    scheduler = mup.RateScheduler(tmp_path, {}, rates({})[0], jobs=1)
    sweeps = [sweep for comparison in mup.comparisons() for sweep in comparison.models.values()]
    for sweep in sweeps:
        run = sweep.run(-8)
        settings = {**scheduler.settings(run), "output_dir": tmp_path}
        config = parse_config(TrainingConfig, "", [f"--{name}={value}" for name, value in settings.items()])
        assert config.optimization.learning_rate == 2**-8
        if run.method == mup.UNET:
            continue
        model = UViTModel.from_config(run.model)
        assert model.config.hidden_size // model.config.num_attention_heads == mup.HEAD_WIDTH
        assert model.config.mup_base_width == (64 if run.has_mup else None)
    runs = {sweep.run(k, seed) for sweep in sweeps for k in mup.EXPONENTS for seed in mup.SEEDS}
    assert len({run.name for run in runs}) == len(runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "rules_off"), [("plain", ("init", "learning rate", "output")), ("residual", ("eps",))]
)
def test_coordinate_check_needs_every_rule(mup, method, rules_off):
    """Three widths, one seed and two layers; the page shows the full check."""
    widths, largest = (32, 128, 512), {}
    for rule in (mup.MUP, mup.STANDARD, *rules_off):
        changes = [
            mup.feature_changes(mup.Check(method, rule, width, seed=0, layers=2))["changes"] for width in widths
        ]
        slopes = [mup.slope(widths, [each[name] for each in changes]) for name in changes[0]]
        largest[rule] = max(map(abs, slopes))
    assert largest.pop(mup.MUP) < 0.22
    assert min(largest.values()) > 0.25


def test_slope(mup):
    assert mup.slope((32, 64, 128), (1, 2, 4)) == pytest.approx(1)


def test_tables_of_the_docs_page_match_the_finished_runs(mup, project_root):
    page = (project_root / "docs" / "mup.md").read_text()
    read = ResultFile
    checks = read(project_root / "benchmarks" / "mup_coordinates.jsonl", mup.Check)
    assert mup.width_table(checks) in page
    assert mup.depth_table(checks) in page
    results = read(project_root / "benchmarks" / "mup_rates.jsonl", mup.RateRun)
    assert mup.rate_table(results) in page
    assert mup.transfer_table(results) in page


def test_figure_shows_the_finished_runs(mup, monkeypatch, project_root, tmp_path):
    monkeypatch.setattr(mup, "FIGURES", tmp_path)
    mup.draw_figure(ResultFile(project_root / "benchmarks" / "mup_rates.jsonl", mup.RateRun))
    for name in ("mup-light.svg", "mup-dark.svg"):
        assert (tmp_path / name).read_text() == (project_root / "docs" / "images" / name).read_text()


def test_figure_waits_for_all_runs(mup, rates, monkeypatch, tmp_path):
    monkeypatch.setattr(mup, "FIGURES", tmp_path)
    results, _ = rates({-8: 0.1})
    mup.draw_figure(results)
    assert not list(tmp_path.glob("*.svg"))
    for has_mup in (True, False):
        for model in mup.compared_widths("residual", has_mup).models.values():
            for k in mup.EXPONENTS:
                run = model.run(k)
                if run not in results:
                    curve = [[50, 1.0, 1.0]] + [[100, 0.1 + abs(k + 8) / 50, 1.0]] * 9
                    results.add(run, {"stopped": None, "evaluations": curve})
    mup.draw_figure(results)
    for name in ("light", "dark"):
        svg = (tmp_path / f"mup-{name}.svg").read_text()
        assert svg.count("<polyline") == svg.count("<circle") == 2 * len(mup.WIDTHS)
        assert not re.search(r"(href|src|url)", svg)


@pytest.mark.slow
def test_unets_train_with_the_settings_of_mup(mup, rates, tmp_path, monkeypatch):
    """The script runs, and writes the learning rate of the base model."""
    scheduler = mup.RateScheduler(tmp_path, {"num_shapes": 30, "resolution": 8}, rates({})[0], jobs=1)
    small = {"validation_size": 3, "train_batch_size": 2, "max_train_steps": 2, "lr_warmup_steps": 0}
    monkeypatch.setattr(mup, "TRAINING", {**mup.TRAINING, **small, "logging_steps": 1, "validation_steps": 1})
    monkeypatch.setattr(
        mup, "_UNET_CONFIG", {**mup._UNET_CONFIG, "sample_size": 8, "in_channels": 3, "out_channels": 3}
    )
    run = mup.RateSweep(mup.UNET, True, 32, 3).run(-7)
    scheduler.run_all(lambda: [run])
    log = [json.loads(line) for line in (tmp_path / f"{run.name}.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in log] == [2**-7] * 2
