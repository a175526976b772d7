"""The convergence benchmark: results, tables, figure, and runs that are interrupted and resumed."""

import gzip
import importlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest


@pytest.fixture
def benchmark(project_root, monkeypatch):
    """Return a function that imports a module of the folder benchmarks/."""
    monkeypatch.syspath_prepend(str(project_root / "benchmarks"))
    names = ("convergence", "convergence_runs", "convergence_report", "chart", "measure")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def line(run, losses, raw=None, stopped=None):
    evaluations = [[50 * (k + 1), loss, (raw or losses)[k]] for k, loss in enumerate(losses)]
    return {"run": run, "stopped": stopped, "evaluations": evaluations, "grad_norm": {"mean": 0.5, "max": 1.0}}


@pytest.fixture
def results(benchmark, tmp_path):
    """Return a function that writes (run, losses) pairs to a result file and reads it."""
    runs = benchmark("convergence_runs")

    def make(entries):
        file = tmp_path / "lines.jsonl"
        lines = [line({"method": "none", "learning_rate": 1e-3, **run}, *rest) for run, *rest in entries]
        file.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
        return runs.Results(file)

    return make


def test_target_needs_three_consecutive_evaluations_below_it(benchmark, results):
    run = benchmark("convergence_runs").Run("none", 1e-3)
    found = results([({}, [5.0, 1.0, 5.0, 2.0, 2.9, 1.0, 4.0])])
    assert found.steps_to(3.0, run) == 200
    assert found.steps_to(2.9, run) is None  # below, not at
    assert found.final_loss(run) == pytest.approx((2.9 + 1.0 + 4.0) / 3)


def test_best_learning_rate_needs_all_runs_and_did_not_diverge(benchmark, results):
    runs = benchmark("convergence_runs")
    entries = [({"learning_rate": rate}, [1.0, 0.5, 0.5 + rate]) for rate in runs.UVIT_RATES]
    assert results(entries[:-1]).best_rate("none") is None
    assert results(entries).best_rate("none") == runs.UVIT_RATES[0]
    diverged = [(entries[0][0], [0.1, 0.1, 0.1], None, "the loss is not finite"), *entries[1:]]
    assert results(diverged).best_rate("none") == runs.UVIT_RATES[1]


def test_runs_wait_for_the_best_learning_rates(benchmark, results):
    runs = benchmark("convergence_runs")
    nothing = results([])
    assert len(list(runs.runs_of("A", nothing))) == len(runs.METHODS) * len(runs.UVIT_RATES)
    assert list(runs.runs_of("D", nothing)) == []
    rates = [({"method": "cs 0.9", "learning_rate": rate}, [1.0, 1.0, rate]) for rate in runs.UVIT_RATES]
    known = results(rates)
    seeds = [run for run in runs.runs_of("A", known) if run.seed]
    assert seeds == [runs.Run("cs 0.9", runs.UVIT_RATES[0], seed) for seed in (1, 2)]
    assert [run.of_cs for run in runs.runs_of("D", known)] == ["init", "rate", "both"]
    assert list(runs.runs_of("E", known)) == []
    plain = results([({"learning_rate": rate}, [1.0, 1.0, rate]) for rate in runs.UVIT_RATES])
    assert [(run.seed, run.batch_size) for run in runs.runs_of("E", plain)] == [(0, 64), (1, 64), (2, 64)]


def test_table_compares_runs_with_the_same_seed(benchmark, results):
    runs, report = benchmark("convergence_runs"), benchmark("convergence_report")
    worse = [
        ({"method": m, "learning_rate": rate}, [9.0] * 6) for m in ("none", "cs 0.9") for rate in runs.UVIT_RATES[1:]
    ]
    best = {"learning_rate": runs.UVIT_RATES[0]}
    scaled = {**best, "method": "cs 0.9"}
    entries = [
        (best, [6.0, 5.0, 4.0, 2.0, 2.0, 2.0]),
        ({**best, "seed": 1}, [6.0, 5.0, 4.0, 3.0, 3.0, 3.0]),
        ({**best, "seed": 2}, [6.0, 5.0, 4.0, 1.0, 1.0, 1.0]),
        (scaled, [6.0, 1.5, 1.5, 1.5, 1.5, 1.5]),
        ({**scaled, "seed": 1}, [2.5, 2.5, 2.5, 2.5, 2.5, 2.5]),
        ({**scaled, "seed": 2}, [6.0, 5.0, 4.0, 2.0, 2.0, 2.0]),
    ]
    table = report.tuned_rates(results(worse + entries))
    plain, cs = (row.split(" | ") for row in table.splitlines()[2:])
    assert plain[:5] == ["| none", "0.00025", "3", "2.0000 (1.0000 to 3.0000)", "1"]
    # 2,000 / 100 steps, 2,000 / 50, and never.
    assert cs[:5] == ["| cs 0.9", "0.00025", "3", "2.0000 (1.5000 to 2.5000)", "20.00 (not reached to 40.00)"]


def test_diverged_plain_model_sets_no_target(benchmark, results):
    runs, report = benchmark("convergence_runs"), benchmark("convergence_report")
    diverged = ({"learning_rate": 4e-3}, [9.0, None, None], None, "the loss is not finite")
    found = results([diverged, ({"method": "cs 0.9", "learning_rate": 4e-3}, [1.0, 1.0, 1.0])])
    assert found.steps_to(9.5, runs.Run("none", 4e-3)) is None
    assert "1.0000 (plain diverges)" in report.tables(found)
    assert "| none |  |  |  |  | diverges |" in report.tables(found)


def test_plain_model_with_a_high_final_loss_sets_no_target(benchmark, results):
    runs, report = benchmark("convergence_runs"), benchmark("convergence_report")
    rate = {"learning_rate": 4e-3}
    diverging = (rate, [0.5, 0.2, 1.0, 1.0, 1.0])
    found = results([diverging, ({**rate, "method": "cs 0.9"}, [0.5, 0.4, 0.3, 0.3, 0.3])])
    assert found.diverged(runs.Run("none", 4e-3))
    assert "| cs 0.9 |  |  |  |  | 0.3000 (plain diverges) |" in report.tables(found)


def test_run_that_diverges_near_its_end_gains_nothing(benchmark, results):
    """The EMA weights reach the target and do not show the divergence of the raw weights yet."""
    runs, report = benchmark("convergence_runs"), benchmark("convergence_report")
    rate = {"learning_rate": 4e-3}
    diverging = ({**rate, "method": "cs 0.9"}, [0.5, 0.1, 0.1, 0.1, 0.2], [0.5, 0.1, 1.0, 1.0, 1.0])
    found = results([(rate, [0.5, 0.4, 0.3, 0.3, 0.3]), diverging])
    assert found.diverged(runs.Run("cs 0.9", 4e-3))
    assert "| cs 0.9 |  |  |  |  | diverges |" in report.tables(found)
    worse = [({"method": m, "learning_rate": r}, [9.0] * 3) for m in ("none", "cs 0.9") for r in runs.UVIT_RATES[:-1]]
    calm = ({**rate, "method": "cs 0.9"}, [0.5, 0.2, 0.2, 0.2, 0.2])
    seeds = [({**diverging[0], "seed": seed}, *diverging[1:]) for seed in (1, 2)]
    plain = [({**rate, "seed": seed}, [0.5, 0.4, 0.3, 0.3, 0.3]) for seed in (0, 1, 2)]
    table = report.tuned_rates(results([*worse, *plain, calm, *seeds]))
    assert table.splitlines()[-1].split(" | ")[4] == "diverges (diverges to 20.00)"


def test_diverged_plain_seed_is_counted_and_left_out(benchmark, results):
    runs, report = benchmark("convergence_runs"), benchmark("convergence_report")
    diverging, calm, fast = [0.5, 0.2, 1.0, 1.0, 1.0], [0.5, 0.4, 0.3, 0.3, 0.3], [0.25] * 5
    entries = [
        ({"method": method, "learning_rate": rate}, calm if rate == runs.UVIT_RATES[0] else diverging)
        for method in ("none", "cs 0.9")
        for rate in runs.UVIT_RATES
    ]
    seeds = [("none", 1, diverging), ("none", 2, calm), ("cs 0.9", 1, calm), ("cs 0.9", 2, fast)]
    entries += [({"method": m, "learning_rate": runs.UVIT_RATES[0], "seed": seed}, curve) for m, seed, curve in seeds]
    plain, cs = (row.split(" | ") for row in report.tuned_rates(results(entries)).splitlines()[2:])
    assert plain[3] == "0.3000 (0.3000 to diverges)"
    assert cs[4] == "not reached (not reached to 40.00); plain diverges for 1 of 3 seeds"


def test_overview_shows_each_method_at_its_best_learning_rate_in_all_settings(benchmark, results):
    runs, report = benchmark("convergence_runs"), benchmark("convergence_report")
    calm, fast, diverging = [0.5, 0.4, 0.3, 0.3, 0.3], [0.5, 0.2, 0.2, 0.2, 0.2], [0.5, 0.2, 1.0, 1.0, 1.0]
    entries = [({"learning_rate": rate}, calm) for rate in runs.UVIT_RATES]
    entries += [({"method": "cs 0.9", "learning_rate": rate}, fast) for rate in runs.UVIT_RATES]
    best = {"learning_rate": runs.UVIT_RATES[0]}
    for others, curve in (({"model": "uvit-12"}, calm), ({"batch_size": 64}, diverging)):
        entries += [({**best, **others}, calm), ({**best, **others, "method": "cs 0.9"}, curve)]
    assert report.overview(results(entries)).splitlines()[2:] == [
        "| cs 0.9 | 20.00 |  | not reached |  |  | diverges |  |"
    ]


def test_two_seeds_show_their_mean_and_range(benchmark, results):
    runs, report = benchmark("convergence_runs"), benchmark("convergence_report")
    entries = [({"learning_rate": rate}, [0.9, 0.4, 0.4, 0.4]) for rate in runs.UVIT_RATES]
    entries.append(({"learning_rate": runs.UVIT_RATES[0], "seed": 1}, [0.9, 0.2, 0.2, 0.2]))
    (plain,) = (row.split(" | ") for row in report.tuned_rates(results(entries)).splitlines()[2:])
    assert plain[2:4] == ["2", "0.3000 (0.2000 to 0.4000)"]


def test_parts_of_cs_are_shown_between_the_plain_model_and_cs(benchmark, results):
    runs, report = benchmark("convergence_runs"), benchmark("convergence_report")
    cs = [({"method": "cs 0.9", "learning_rate": rate}, [0.9, rate, rate, rate]) for rate in runs.UVIT_RATES]
    best = {"learning_rate": runs.UVIT_RATES[0]}
    assert "no finished runs" in report.cs_equivalents(results(cs))
    part = ({**best, "method": "cs 0.9", "of_cs": "init"}, [0.9, 0.3, 0.3, 0.3])
    assert [row.split(" | ")[0] for row in report.cs_equivalents(results([*cs, part])).splitlines()[2:]] == [
        "| initial weights times k",
        "| the factors themselves (CS)",
    ]
    plain = (best, [0.9, 0.5, 0.5, 0.5])
    table = report.cs_equivalents(results([*cs, part, plain]))
    assert "| nothing (plain model) | 0.5000 | 0.5000 |\n| initial weights times k | 0.3000" in table


def test_truncated_line_is_replaced(benchmark, results):
    runs = benchmark("convergence_runs")
    file = results([({}, [1.0, 0.5])]).file
    whole = file.read_text()
    file.write_text(whole + whole[:40])
    found = runs.Results(file)
    assert list(found.lines) == [runs.Run("none", 1e-3)]
    found.add(runs.Run("cs 0.9", 1e-3), {"stopped": None, "evaluations": []})
    assert file.read_text().startswith(whole)
    assert list(runs.Results(file).lines) == [runs.Run("none", 1e-3), runs.Run("cs 0.9", 1e-3)]


def test_keeps_lines_added_by_others(benchmark, results):
    runs = benchmark("convergence_runs")
    found = results([({}, [1.0, 0.5]), ({"seed": 1}, [1.0, 0.5])])
    lines = found.file.read_text().splitlines(keepends=True)
    for elsewhere in (lines[:1], [*lines, lines[0].replace('"seed": 0', '"seed": 5')]):
        found.file.write_text("".join(elsewhere))
        found.add(runs.Run("cs 0.9", 1e-3, seed=len(elsewhere)), {"stopped": None, "evaluations": []})
        written = found.file.read_text().splitlines(keepends=True)
        assert written[:-1] == elsewhere
        assert json.loads(written[-1])["run"]["seed"] == len(elsewhere)


def test_only_one_process_can_add_lines(benchmark, results):
    found = results([])
    again = benchmark("convergence_runs").Results(found.file)
    with found.locked(), pytest.raises(SystemExit, match="another process is adding runs to"), again.locked():
        pass
    with found.locked():
        found.add(benchmark("convergence_runs").Run("none", 1e-3), {"stopped": None, "evaluations": []})
    with again.locked():
        again.add(benchmark("convergence_runs").Run("cs 0.9", 1e-3), {"stopped": None, "evaluations": []})
    assert len(found.file.read_text().splitlines()) == 2  # the second process kept the line of the first


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
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


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (0.0717, 0.118, [0.08, 0.09, 0.1]),
        (0.013, 0.6, [0.02, 0.05, 0.1, 0.2, 0.5]),
        (0.9, 1200, [1, 10, 100, 1000]),
        (0.0721, 0.0722, [0.0721, 0.0722]),
    ],
)
def test_chart_lines_have_round_values(benchmark, low, high, values):
    assert benchmark("chart").round_values(low, high) == values


def test_figure_is_self_contained_in_light_and_dark(benchmark, results, tmp_path):
    runs, report = benchmark("convergence_runs"), benchmark("convergence_report")
    curve = [1.0 / (k + 1) for k in range(40)]
    entries = [({"method": m, "learning_rate": rate}, curve) for m in ("none", "cs 0.9") for rate in runs.UVIT_RATES]
    report.draw_figure(results(entries), tmp_path)
    for name in ("light", "dark"):
        svg = (tmp_path / f"convergence-{name}.svg").read_text()
        assert svg.count("<polyline") == 2
        assert ">CS, kappa 0.9</text>" in svg
        assert ">validation loss (EMA weights)</text>" in svg
        assert not re.search(r"(href|src|url)", svg)


def test_tables_of_the_docs_page_match_the_runs_it_names(benchmark, project_root, tmp_path):
    """The result file may have more runs than the page."""
    runs, report = benchmark("convergence_runs"), benchmark("convergence_report")
    page = (project_root / "docs" / "which_method.md").read_text()
    finished = int(re.search(r"\*\*(\d+) runs\*\* are finished", page)[1])
    lines = (project_root / "benchmarks" / "convergence.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "lines.jsonl").write_text("".join(lines[:finished]))
    results = runs.Results(tmp_path / "lines.jsonl")
    assert len(results.lines) == finished
    table = re.compile(r"^\|.*?(?=\n\n|\n?\Z)", re.DOTALL | re.MULTILINE)
    tables = table.findall(report.tables(results))
    assert len(tables) >= 2
    assert table.findall(page) == tables


@pytest.fixture
def make_scheduler(benchmark, tmp_path):
    """Return a function that builds a scheduler over a small dataset in the format of Debian's package."""
    convergence, runs = benchmark("convergence"), benchmark("convergence_runs")
    random = np.random.default_rng(0)
    (tmp_path / "idx").mkdir()
    for stem, count in (("train", 64), ("t10k", 8)):
        with gzip.open(tmp_path / "idx" / f"{stem}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + random.integers(0, 256, (count, 28, 28), np.uint8).tobytes())
    (tmp_path / "runs").mkdir()
    data = convergence.data_flag(str(tmp_path / "idx"), tmp_path / "runs")

    def make():
        return convergence.Scheduler(tmp_path / "runs", data, runs.Results(tmp_path / "results.jsonl"), jobs=1)

    return make


@pytest.mark.slow
def test_interrupted_runs_are_resumed_and_finished_runs_are_not_repeated(
    benchmark, make_scheduler, monkeypatch, tmp_path
):
    convergence, runs = benchmark("convergence"), benchmark("convergence_runs")
    monkeypatch.setitem(runs.TRAINING, "validation_steps", 4)
    monkeypatch.setitem(runs.TRAINING, "logging_steps", 4)
    tiny = {"model": "uvit-12", "batch_size": 2, "steps": 12}
    interrupted, uninterrupted = runs.Run("cs 0.9", 1e-3, **tiny, of_cs="both"), runs.Run("none", 1e-3, **tiny)
    log = tmp_path / "runs" / interrupted.name / "metrics.jsonl"
    wait = convergence.time.sleep

    def interrupt(seconds):
        wait(0.02)
        if log.exists() and log.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(convergence.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_scheduler().run_all([interrupted])
    monkeypatch.setattr(convergence.time, "sleep", lambda seconds: wait(0.1))
    make_scheduler().run_all([interrupted, uninterrupted])
    for line in map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines()):
        assert [step for step, *_ in line["evaluations"]] == [4, 8, 12]
    settings = {run: tmp_path / "runs" / run.name / "settings.json" for run in (interrupted, uninterrupted)}
    resumed = {run: json.loads(file.read_text())["resume_from_checkpoint"] for run, file in settings.items()}
    assert resumed == {interrupted: "latest", uninterrupted: None}

    scheduler = make_scheduler()
    scheduler.run_all([interrupted, uninterrupted])
    assert scheduler.durations == []
    assert interrupted in scheduler.results
    assert uninterrupted in scheduler.results


def test_rejects_a_log_written_by_two_processes(benchmark, make_scheduler, tmp_path):
    run = benchmark("convergence_runs").Run("none", 1e-3)
    log = tmp_path / "runs" / run.name / "metrics.jsonl"
    log.parent.mkdir()
    line = {"step": 1, "loss": 0.5, "validation_loss": 0.5, "validation_loss_raw": 0.5, "grad_norm": 1.0}
    line["images_per_second"] = 5.0
    scheduler, finished = make_scheduler(), subprocess.CompletedProcess([], returncode=0)
    scheduler._error_log(run).write_text("")
    log.write_text(f"{json.dumps(line)}\n{json.dumps(line)}\n")
    with pytest.raises(SystemExit, match="was written by two processes"):
        scheduler._collect(run, finished)
    assert run not in scheduler.results
    log.write_text(json.dumps(line))
    scheduler._collect(run, finished)
    assert run in scheduler.results
