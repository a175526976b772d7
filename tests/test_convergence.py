"""The convergence benchmark: results, tables, figure, and runs that are stopped, interrupted and resumed."""

import gzip
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

from scalelong_diffusers.experiments import fashion_mnist, trainings


@pytest.fixture
def runs(benchmark):
    return benchmark("convergence_runs")


@pytest.fixture
def report(benchmark):
    return benchmark("convergence_report")


@pytest.fixture
def results(runs, tmp_path):
    """Return a function that writes {run: losses, or further values} to a result file and reads it."""

    def make(entries):
        found = runs.Results(tmp_path / "lines.jsonl")
        found.file.write_text("")
        for run, values in entries.items():
            values = values if isinstance(values, dict) else {"losses": values}
            losses = values.pop("losses")
            raw = values.pop("raw", losses)
            curve = [[50 * (k + 1), *pair] for k, pair in enumerate(zip(losses, raw))]
            found.add(run, {"stopped": None, "evaluations": curve, "images_per_second": 100.0, **values})
        return found

    return make


@pytest.fixture
def tuned(runs):
    """Return a function that makes the tuning runs of a method, of which the one at 1e-3 and beta1 0.9 is best."""

    def make(workload, *methods):
        return {
            run: [90.0] + [50.0 if (run.learning_rate, run.beta1) == (1e-3, 0.9) else 51.0] * 3
            for method in methods
            for run in runs.tuning_runs(workload, method)
        }

    return make


def at_best(runs, workload, method, curves):
    """Return entries of the seeds 1, 2, ... at the setting that `tuned` makes the best."""
    return {runs.Run(workload, method, 1e-3, 0.9, seed): curve for seed, curve in enumerate(curves, 1)}


def cells(table):
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_target_needs_three_consecutive_evaluations_below_it(runs, results):
    run = runs.Run("20 layers", "plain", 1e-3)
    found = results({run: [5.0, 1.0, 5.0, 2.0, 2.9, 1.0, 4.0]})
    assert found.steps_to(3.0, run) == 200
    assert found.steps_to(2.9, run) == math.inf  # below, not at
    assert found.final_loss(run) == pytest.approx((2.9 + 1.0 + 4.0) / 3)


def test_run_that_diverges_near_its_end_reaches_no_target(runs, results):
    """The EMA weights reach the target and do not show the divergence of the raw weights yet."""
    run = runs.Run("20 layers", "plain", 4e-3)
    found = results({run: {"losses": [0.5, 0.1, 0.1, 0.1, 0.2], "raw": [0.5, 0.1, 1.0, 1.0, 1.0]}})
    assert found.diverged(run)
    assert found.final_loss(run) == found.steps_to(0.4, run) == math.inf


def test_best_setting_needs_all_tuning_runs_and_ignores_stopped_and_diverged_ones(runs, results):
    tuning = runs.tuning_runs("20 layers", "cs")
    entries = {run: [1.0, 0.5, 0.5 + k / 100, 0.5] for k, run in enumerate(tuning)}
    assert len(tuning) == 10
    assert results(dict(list(entries.items())[:-1])).best_setting("20 layers", "cs") is None
    assert results(entries).best_setting("20 layers", "cs") == (4e-3, 0.9)
    entries[tuning[0]] = {"losses": [1.0, 0.1, 0.1, None], "stopped": "the loss is not finite"}
    entries[tuning[1]] = {"losses": [1.0, 0.1, 0.1], "stopped": "early"}
    entries[tuning[2]] = {"losses": [0.2, 0.3, 0.3, 0.3]}
    assert results(entries).best_setting("20 layers", "cs") == (2e-3, 0.99)


def test_tuning_runs_stop_only_at_a_quarter_and_at_half_of_the_steps(runs, results):
    run, other = runs.tuning_runs("20 layers", "plain")[:2]
    assert list(run.decisions()) == [(350, 2.0), (750, 1.25)]
    found = results({other: [1.0] * 30})
    for curve, is_hopeless in {
        ((350, 2.0), (750, 1.25)): False,  # at the limit, not above
        ((300, 9.0), (400, 9.0), (700, 9.0), (800, 9.0), (1500, 9.0)): False,
        ((350, 2.01),): True,
        ((350, 1.0), (750, 1.26)): True,
        ((350, math.inf),): True,
    }.items():
        assert found.is_hopeless(run, curve) is is_hopeless
    elsewhere = results(
        {runs.Run("12 layers", "plain", 1e-3): [1.0] * 30, runs.Run("20 layers", "cs", 1e-3): [1.0] * 30}
    )
    assert not elsewhere.is_hopeless(run, [(350, 9.0)])


def test_stopping_rule_ignores_at_half_what_it_stopped_at_a_quarter(runs, results):
    """A killed run and one that finished before it could be killed count the same."""
    run, slow, fast = runs.tuning_runs("20 layers", "plain")[:3]
    slow_then_low = [2.5] * 7 + [0.5] * 23
    for slow_curve in (slow_then_low, slow_then_low[:7]):
        found = results({slow: slow_curve, fast: [1.0] * 30})
        assert found.is_hopeless(slow, found.evaluations(slow))
        assert not found.is_hopeless(run, [(350, 1.0), (750, 1.0)])


def test_run_that_the_rule_stops_is_never_the_best_setting(runs, results):
    tuning = runs.tuning_runs("20 layers", "plain")
    entries = {run: [1.0] * 30 for run in tuning}
    entries[tuning[3]] = [1.0] * 6 + [2.5] + [0.1] * 23
    assert results(entries).best_setting("20 layers", "plain") == (4e-3, 0.9)


def test_seeds_wait_for_the_best_setting_of_their_method(runs, results, tuned):
    methods = ("plain", "residual")
    assert results({}).planned_runs("12 layers", ["residual", "cs"]) == runs.tuning_runs("12 layers", "residual")
    planned = results(tuned("12 layers", "residual")).planned_runs("12 layers", methods)
    assert planned[:20] == [run for method in methods for run in runs.tuning_runs("12 layers", method)]
    assert planned[20:] == [runs.Run("12 layers", "residual", 1e-3, 0.9, seed) for seed in range(1, 9)]


def test_plans_of_the_paper_and_of_quick(runs, results):
    paper = results({}).planned_runs("paper", ["plain", "ls (paper)", "zero"])
    assert len(paper) == 2 * 4 * 2
    assert {(run.beta1, run.seed) for run in paper} == {(0.99, 1), (0.99, 2)}
    assert [run.learning_rate for run in results({}).planned_runs("quick", runs.METHODS)] == [2e-3, 4e-3]
    assert not any(run.is_tuning for run in [*paper, *results({}).planned_runs("quick", runs.METHODS)])


def test_run_names_are_different_and_valid_file_names(runs):
    methods = [(workload, method) for workload, methods in runs.METHODS_ON.items() for method in methods]
    names = {runs.Run(*pair, rate, beta1).name for pair in methods for rate in runs.RATES for beta1 in runs.BETA1S}
    assert len(names) == len(methods) * 10
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names)


def test_comparison_with_the_plain_run_of_the_same_seed(runs, report, results, tuned):
    plain = [[9.0] * 27 + [loss] * 3 for loss in (2.5, 2.5, 2.6, 2.6, 3.0, 3.0, 4.0, 4.0)]
    fast, slow, late, never = ([9.0] * k + [2.0] * (30 - k) for k in (9, 14, 23, 30))
    early_to_4 = [9.0] * 9 + [3.5] * 14 + [2.0] * 7
    entries = {
        **tuned("20 layers", "plain", "residual", "residual, eps 1e-8"),
        **at_best(runs, "20 layers", "plain", plain),
        **at_best(runs, "20 layers", "residual", [fast] * 4 + [slow] * 2 + [late, early_to_4]),
        **at_best(runs, "20 layers", "residual, eps 1e-8", [fast] * 3 + [slow] + [never] * 4),
        **at_best(runs, "20 layers", "plain, eps 1e-10", [never] * 7),
    }
    found = results(entries)
    assert [report.plain_target(found, "20 layers", seed) for seed in (1, 8)] == [2.5, 4.0]
    # 1,500 steps / 500, 750 or 1,200 steps. Seed 8 has an easier target than seed 1.
    assert report.speed_ups(found, "20 layers", "residual") == [3.0] * 4 + [2.0] * 2 + [1.25, 3.0]
    rows = {row[1]: row[2:] for row in cells(report.comparison(found))}
    plain_range = "2.8000 (2.5000 to 4.0000)"
    assert rows["plain"] == ["0.001, 0.9", "8", plain_range, "0", "1,500", "1.00", "", ""]
    assert rows["residual"][1:] == ["8", "2.0000 (2.0000 to 2.0000)", "8", "500", "3.00", "1.25", "2.00"]
    # Halfway between a gain and a miss is no gain.
    assert rows["residual, eps 1e-8"][4:] == ["not reached"] * 4
    # No bound before all seeds have finished.
    assert rows["plain, eps 1e-10"][:2] + rows["plain, eps 1e-10"][6:7] == ["0.001, 0.9", "7", ""]


def test_control_takes_the_setting_of_the_plain_model_and_counts_for_the_target(runs, report, results, tuned):
    entries = tuned("20 layers", "plain")
    (first, *_), control = results(entries).planned_runs("20 layers", ["plain, eps 1e-10"]), "plain, eps 1e-10"
    assert first == runs.Run("20 layers", control, 1e-3, 0.9, seed=1)
    found = results({**entries, **at_best(runs, "20 layers", control, [[9.0] * 27 + [0.1] * 3])})
    assert report.plain_target(found, "20 layers") == report.plain_target(found, "20 layers", seed=1) == 0.1


def test_methods_that_are_no_finalists_are_only_tuned(runs, results, tuned):
    planned = results(tuned("20 layers", "cs")).planned_runs("20 layers", ["cs"])
    assert planned == runs.tuning_runs("20 layers", "cs")


def test_plain_runs_that_diverge_set_no_target(runs, report, results, tuned):
    entries = tuned("20 layers", "plain", "residual")
    entries |= at_best(runs, "20 layers", "plain", [[1.0, 0.5, 2.0, 2.0, 2.0]] * 2 + [[2.0, 1.0, 1.0, 1.0]])
    entries |= at_best(runs, "20 layers", "residual", [[2.0, 0.9, 0.9, 0.9]])
    found = results(entries)
    assert report.plain_target(found, "20 layers") == 1.0
    plain, residual = cells(report.comparison(found))
    assert plain[4:] == ["diverges (1.0000 to diverges)", "0", "1,500", "1.00", "", ""]
    assert residual[4:8] == ["0.9000 (0.9000 to 0.9000)", "1", "100", "15.00"]
    only_diverging = {run: [1.0, 2.0, 2.0, 2.0] for run in runs.tuning_runs("12 layers", "plain")}
    assert report.plain_target(results(only_diverging), "12 layers") == math.inf


def test_performance_profile(report):
    speeds = [(2.0, 2.0), (1.0, 1.5), (1.0, 3.0), (0.0, 1.0)]
    assert [report.profile(speeds, tau) for tau in (1, 1.5, 3, 4)] == [0.25, 0.5, 0.75, 0.75]
    assert report.profile([(0.0, 0.0)], 4) == 0  # all methods missed the target


def test_profiles_count_workloads_on_which_all_methods_have_seeds(runs, report, results, tuned):
    entries = {}
    # 1,500 / 500 steps and 1,000 / 800 steps to the target.
    for workload, before in {"20 layers": 9, "U-Net": 15}.items():
        entries |= tuned(workload, "plain", "residual")
        entries |= at_best(runs, workload, "plain", [[9.0, 2.0, 2.0, 2.0]] * 3)
        entries |= at_best(runs, workload, "residual", [[9.0] * before + [1.0] * 5] * 3)
    entries |= tuned("patch 4", "plain")
    assert cells(report.profiles(results(entries))) == [
        ["plain, 2 workloads", "0%", "50%", "50%", "50%", "100%", "100%"],
        ["residual, 2 workloads", "100%", "100%", "100%", "100%", "100%", "100%"],
    ]


def test_quality_shows_the_accuracy_of_the_features(runs, report, results, tuned):
    entries = tuned("20 layers", "plain")
    for seed in (1, 2, 3):
        fids = [[step, seed + step / 1000] for step in (375, 750, 1125, 1500)]
        run = runs.Run("20 layers", "plain", 1e-3, 0.9, seed)
        entries[run] = {"losses": [1.0, 0.5, 0.5, 0.5], "fid": fids, "accuracy": 0.912}
        assert run.measures_fid
    assert not runs.Run("20 layers", "plain", 1e-3, 0.9, 4).measures_fid
    table = report.quality(results(entries))
    assert "test accuracy of the features: 91.2%" in table
    assert cells(table)[0][:4] == ["20 layers", "plain", "3", "2.38 (1.38 to 3.38)"]


def test_papers_protocol_compares_runs_with_the_same_rate_and_seed(runs, report, results):
    plain, cs = (runs.paper_runs(method, 1e-3) for method in ("plain", "cs"))
    entries = dict(zip(plain, ([6.0] * 27 + [3.0] * 3, [6.0] * 27 + [2.0] * 3)))
    entries |= dict(zip(cs, ([6.0] * 9 + [2.5] * 21, [6.0] * 9 + [2.5] * 21)))
    entries[runs.paper_runs("cs", 2e-3)[0]] = [3.0] * 30  # its plain run is missing
    assert cells(report.paper_protocol(results(entries))) == [
        ["plain", "", "3.0000 / 2.0000", "", ""],
        ["cs", "", "2.5000 / 2.5000 (3.00 / not reached)", "", ""],
    ]


def test_tuning_table_names_stopped_and_diverged_runs(runs, report, results):
    first, second, third = runs.tuning_runs("20 layers", "plain")[:3]
    diverging = {"losses": [1.0] * 10, "stopped": "the loss is not finite"}
    found = results({first: [1.0] * 30, second: {"losses": [2.5] * 7, "stopped": "early"}, third: diverging})
    (row,) = cells(report.tuning(found))
    assert row == ["20 layers", "plain", "", "diverges", "1.0000", "", "", "", "", "stopped", "", ""]


def test_quick_table(runs, report, results):
    assert report.quick_table(results({})) == "(no finished runs)"
    plain, residual = results({}).planned_runs("quick", runs.METHODS)
    found = results({plain: [9.0] * 7 + [2.0] * 3, residual: [9.0, 1.0, 1.0, 1.0]})
    assert cells(report.quick_table(found)) == [
        ["plain", "0.002", "2.0000"],
        ["residual", "0.004", "1.0000 (5.00)"],
    ]


def test_truncated_line_is_replaced(runs, results):
    first, second = runs.tuning_runs("20 layers", "plain")[:2]
    file = results({first: [1.0, 0.5]}).file
    whole = file.read_text()
    file.write_text(whole + whole[:40])
    found = runs.Results(file)
    assert list(found.lines) == [first]
    found.add(second, {"stopped": None, "evaluations": []})
    assert file.read_text().startswith(whole)
    assert list(runs.Results(file).lines) == [first, second]


def test_keeps_lines_added_by_others(runs, results):
    first, second, third = runs.tuning_runs("20 layers", "plain")[:3]
    found = results({first: [1.0, 0.5], second: [1.0, 0.5]})
    lines = found.file.read_text().splitlines(keepends=True)
    for elsewhere in (lines[:1], [*lines, lines[0].replace('"seed": 0', '"seed": 5')]):
        found.file.write_text("".join(elsewhere))
        found.add(third, {"stopped": None, "evaluations": []})
        written = found.file.read_text().splitlines(keepends=True)
        assert written[:-1] == elsewhere
        assert runs.Run(**json.loads(written[-1])["run"]) == third


def test_only_one_process_can_add_lines(runs, results):
    first, second = runs.tuning_runs("20 layers", "plain")[:2]
    found = results({})
    again = runs.Results(found.file)
    with found.locked(), pytest.raises(SystemExit, match="another process is adding runs to"), again.locked():
        pass
    with found.locked():
        found.add(first, {"stopped": None, "evaluations": []})
    with again.locked():
        again.add(second, {"stopped": None, "evaluations": []})
    assert len(found.file.read_text().splitlines()) == 2  # the second process kept the line of the first


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--workloads", "13 layers"], "invalid choice: '13 layers'"),
        (["--quick", "--data", "/no/such/folder"], "folder /no/such/folder does not exist: run apt-get install"),
        (["--quick", "--folder", __file__], "File exists"),
    ],
)
def test_rejects_bad_flags_with_one_line(benchmark, monkeypatch, capsys, tmp_path, flags, message):
    convergence = benchmark("convergence")
    monkeypatch.setattr(convergence, "exit_on_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["convergence.py", "--folder", str(tmp_path), *flags])
    with pytest.raises(SystemExit) as refused:
        convergence.main()
    assert message in f"{refused.value.code} {capsys.readouterr().err}"


def test_figure_is_self_contained_in_light_and_dark(runs, report, results, tuned, tmp_path):
    curve = [1.0 / (k + 1) for k in range(30)]
    entries = {**tuned("20 layers", "plain", "residual"), **at_best(runs, "20 layers", "plain", [curve, curve])}
    report.draw_figure(results(entries), tmp_path / "images")
    assert not (tmp_path / "images").exists()  # one method is missing
    diverging = [0.1] + [0.5] * 29
    entries |= at_best(runs, "20 layers", "residual", [curve, curve, diverging])
    report.draw_figure(results(entries), tmp_path / "images")
    for name in ("light", "dark"):
        svg = (tmp_path / "images" / f"convergence-{name}.svg").read_text()
        assert svg.count("<polyline") == 3 + 2 + 2  # medians, target; seeds
        for label in ("plain", "residual, 2 of 3 seeds", "best plain run"):
            assert f">{label}</text>" in svg
        assert ">validation loss (EMA weights)</text>" in svg
        assert not re.search(r"(href|src|url)", svg)


def test_tables_of_the_docs_page_match_the_finished_runs(benchmark, runs, report, project_root):
    """Each table on the page that the report can make is one that it makes; the page may leave some out."""
    page = (project_root / "docs" / "which_method.md").read_text()
    table = re.compile(r"^\|.*?(?=\n\n|\n?\Z)", re.DOTALL | re.MULTILINE)
    made = table.findall(report.tables(runs.Results(project_root / "benchmarks" / "convergence.jsonl")))
    heads = {text.splitlines()[0] for text in made}
    for text in table.findall(page):
        if text.splitlines()[0] in heads:
            assert text in made


@pytest.fixture
def make_scheduler(benchmark, runs, tmp_path):
    """Return a function that builds a scheduler over a small dataset in the format of Debian's package."""
    convergence = benchmark("convergence")
    random = np.random.default_rng(0)
    (tmp_path / "idx").mkdir()
    for stem, count in (("train", 64), ("t10k", 8)):
        with gzip.open(tmp_path / "idx" / f"{stem}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + random.integers(0, 256, (count, 28, 28), np.uint8).tobytes())
        with gzip.open(tmp_path / "idx" / f"{stem}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + (np.arange(count) % 10).astype(np.uint8).tobytes())
    (tmp_path / "runs").mkdir()
    data = convergence.data_source(str(tmp_path / "idx"), tmp_path / "runs")

    def make():
        return convergence.ConvergenceScheduler(tmp_path / "runs", data, runs.Results(tmp_path / "results.jsonl"), 1)

    return make


@pytest.mark.slow
def test_interrupted_runs_are_resumed_and_finished_runs_are_not_repeated(runs, make_scheduler, monkeypatch, tmp_path):
    for name in ("validation_steps", "logging_steps"):
        monkeypatch.setitem(runs.TRAINING, name, 4)
    tiny = runs.Workload({**runs.WORKLOADS["20 layers"].model, "num_layers": 4}, batch_size=2, steps=12)
    monkeypatch.setitem(runs.WORKLOADS, "quick", tiny)
    run, folder = runs.Run("quick", "residual", 4e-3), tmp_path / "runs"
    log = folder / run.name / "metrics.jsonl"
    wait = trainings.time.sleep

    def interrupt(seconds):
        wait(0.02)
        if log.exists() and log.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(trainings.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_scheduler().run_all(lambda: [run])
    assert list((folder / run.name).glob("checkpoint-*"))
    monkeypatch.setattr(trainings.time, "sleep", lambda seconds: wait(0.1))
    make_scheduler().run_all(lambda: [run])
    (line,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert [step for step, *_ in line["evaluations"]] == [4, 8, 12]
    assert line["stopped"] is None
    assert not (folder / run.name).exists()
    assert len((folder / f"{run.name}.jsonl").read_text().splitlines()) == 3

    monkeypatch.setattr(subprocess, "Popen", None)
    make_scheduler().run_all(lambda: [run])  # starts no process


def test_all_runs_have_valid_flags(benchmark, runs, make_scheduler, monkeypatch):
    """Parse the commands, and check the settings that differ between runs."""
    from scalelong_diffusers.train import train_class_conditional, train_unconditional
    from scalelong_diffusers.training import TrainingConfig, parse_config

    classes = {
        train_unconditional.__name__: TrainingConfig,
        train_class_conditional.__name__: train_class_conditional.ClassConditionalConfig,
    }
    commands = []
    monkeypatch.setattr(benchmark("convergence"), "feature_network", lambda folder, data: 0.9)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: commands.append(command))
    scheduler = make_scheduler()
    pairs = [(workload, method) for workload, methods in runs.METHODS_ON.items() for method in methods]
    for workload, method in pairs:
        scheduler._start(runs.Run(workload, method, 2e-3, 0.99, seed=1))
    configs = [parse_config(classes[script], "", flags) for _, _, script, *flags in commands]
    for (workload, method), config in zip(pairs, configs):
        options = config.optimization
        assert (options.learning_rate, options.adam_beta1, options.seed) == (2e-3, 0.99, 1)
        assert options.max_grad_norm == (0 if workload == "paper" else 1)
        assert (config.data.train_data_dir is None) == (workload == "class-conditional shapes")
        has_fid = workload in ("20 layers", "patch 4") and method in ("plain", "residual")
        assert config.monitoring.eval_steps == (has_fid and runs.WORKLOADS[workload].steps // 4)


def write_log(scheduler, run, losses):
    log = scheduler.folder / run.name / "metrics.jsonl"
    log.parent.mkdir()
    rest = {"images_per_second": 5.0}
    lines = [{"step": step, "validation_loss": loss, "validation_loss_raw": loss, **rest} for step, loss in losses]
    # The run is writing its last line.
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step"')
    (scheduler.folder / f"{run.name}.log").write_text("")


def test_hopeless_tuning_run_is_stopped_and_counts_as_finished(runs, make_scheduler, monkeypatch, tmp_path):
    scheduler = make_scheduler()
    monkeypatch.setattr(trainings.time, "sleep", lambda seconds: None)
    good, run = tuning = runs.tuning_runs("12 layers", "plain")[:2]
    curve = [[50 * (k + 1), 1.0, 1.0] for k in range(30)]
    scheduler.results.add(good, {"stopped": None, "evaluations": curve})
    write_log(scheduler, run, [(300, 9.0), (350, 2.3)])
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    scheduler.processes[run] = process
    scheduler.run_all(lambda: tuning)
    assert process.poll() is not None
    assert scheduler.results.lines[run]["stopped"] == "early"
    assert scheduler.results.evaluations(run) == [(300, 9.0), (350, 2.3)]
    assert not scheduler.results.diverged(run)


def test_comparison_runs_are_never_stopped(runs, make_scheduler):
    scheduler = make_scheduler()
    for good in runs.tuning_runs("12 layers", "plain"):
        scheduler.results.add(good, {"stopped": None, "evaluations": [[350, 0.1, 0.1]]})
    run = runs.Run("12 layers", "plain", 4e-3, 0.9, seed=1)
    write_log(scheduler, run, [(350, 9.0)])
    assert not scheduler.is_hopeless(run, scheduler._log(run))
    tuning = runs.Run("12 layers", "plain", 4e-3, 0.9, seed=0)
    write_log(scheduler, tuning, [(350, 9.0)])
    assert scheduler.is_hopeless(tuning, scheduler._log(tuning))


def test_run_that_fails_ends_the_benchmark_with_its_message(runs, make_scheduler):
    scheduler, run = make_scheduler(), runs.Run("quick", "plain", 2e-3)
    scheduler._error_log(run).write_text("progress\nerror: no space left\n")
    with pytest.raises(SystemExit, match="exited with code 2: error: no space left"):
        scheduler._collect(run, subprocess.CompletedProcess([], returncode=2))
    assert run not in scheduler.results


def test_rejects_a_log_written_by_two_processes(runs, make_scheduler, tmp_path):
    run = runs.Run("quick", "plain", 2e-3)
    log = tmp_path / "runs" / run.name / "metrics.jsonl"
    log.parent.mkdir()
    line = {"step": 1, "loss": 0.5, "validation_loss": 0.5, "validation_loss_raw": 0.5, "images_per_second": 5.0}
    scheduler, finished = make_scheduler(), subprocess.CompletedProcess([], returncode=0)
    scheduler._error_log(run).write_text("")
    log.write_text(f"{json.dumps(line)}\n{json.dumps(line)}\n")
    with pytest.raises(SystemExit, match="was written by two processes"):
        scheduler._collect(run, finished)
    assert run not in scheduler.results
    log.write_text(json.dumps(line) + "\n")
    scheduler._collect(run, finished)
    assert run in scheduler.results


def test_feature_network_is_trained_once_and_gives_features(make_scheduler, monkeypatch, tmp_path):
    from scalelong_diffusers.evaluation import load_features

    monkeypatch.setattr(fashion_mnist, "BATCH_SIZE", 16)
    data = make_scheduler().data
    accuracy = fashion_mnist.feature_network(tmp_path / "network", data)
    assert 0 <= accuracy <= 1
    monkeypatch.setattr(fashion_mnist, "_train", None)
    assert fashion_mnist.feature_network(tmp_path / "network", data) == accuracy
    assert load_features(str(tmp_path / "network")).num_features == 128
