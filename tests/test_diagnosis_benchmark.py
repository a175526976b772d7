"""The benchmark that validates the rules of a diagnosis."""

import argparse

import pytest


@pytest.fixture
def diagnosis(benchmark):
    return benchmark("diagnosis")


@pytest.fixture
def history(diagnosis):
    return diagnosis.Results(diagnosis.HERE / "convergence.jsonl")


def test_fisher_is_the_tail_of_the_hypergeometric_distribution(diagnosis):
    assert diagnosis.fisher(0, 0, 3, 4) == 1  # a rule that never applies
    assert diagnosis.fisher(3, 0, 0, 3) == pytest.approx(1 / 20)
    assert diagnosis.fisher(2, 1, 1, 2) == pytest.approx(10 / 20)


def test_outcomes_come_from_the_committed_runs(diagnosis, history):
    runs = diagnosis.known_runs(history, list(diagnosis.METHODS_ON))
    assert {history.lines[run]["stopped"] == diagnosis.STOPPED_EARLY for run in runs} == {False}
    diverged = [run for run in runs if history.diverged(run)]
    assert diverged
    assert all(diagnosis.could_gain(history, run) for run in diverged)
    plain = [run for run in runs if (run.workload, run.method) == ("20 layers", "plain") and run.seed]
    residual = [run for run in runs if (run.workload, run.method) == ("20 layers", "residual, eps 1e-8") and run.seed]
    assert all(diagnosis.could_gain(history, run) for run in plain)  # the residual start is faster there
    assert sum(diagnosis.could_gain(history, run) for run in residual) < len(residual) / 2


def test_counts_what_happened(diagnosis, history, tmp_path):
    results = diagnosis.ResultFile(tmp_path / "diagnosis.jsonl", diagnosis.Run)
    assert diagnosis.tables(history, results) == "no finished runs"
    for run in diagnosis.known_runs(history, ["20 layers"]):
        gains = diagnosis.could_gain(history, run)
        results.add(run, {"stopped": None, "figures": {"finite": 0, "fading": 1e3 if gains else 2, "noise": None}})
    printed = diagnosis.tables(history, results)
    row = next(line for line in printed.splitlines() if line.startswith("| fading"))
    _, both, first, second, neither, p = row.strip("| ").split(" | ")
    assert int(both) + int(neither) == len(results.lines)
    assert (first, second) == ("0", "0")
    assert float(p) < 0.01
    never = next(line for line in printed.splitlines() if line.startswith("| noise"))
    assert never.split("|")[2:4] == [" 0 ", " 0 "]


@pytest.mark.slow
def test_trains_and_diagnoses_a_run(diagnosis, history, tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "WARM_UP", 2)
    monkeypatch.setattr(diagnosis, "NUM_IMAGES", 8)
    results = diagnosis.ResultFile(tmp_path / "diagnosis.jsonl", diagnosis.Run)
    (run,) = diagnosis.known_runs(history, ["class-conditional shapes"])[:1]
    monkeypatch.setattr(diagnosis, "data_source", lambda data, folder: {})
    arguments = argparse.Namespace(
        folder=tmp_path / "runs", data="", workloads=["class-conditional shapes"], limit=1, jobs=1
    )
    diagnosis.validate(arguments, history, results)
    assert list(results.lines) == [run]
    figures = results.lines[run]["figures"]
    assert list(figures) == [rule.name for rule in diagnosis.RULES]
    assert figures["finite"] == 0
    assert not (tmp_path / "runs" / run.name).exists()
