"""Shared parts of the benchmarks: intervals and bad input."""

import argparse
import importlib
import sys

import pytest


@pytest.fixture
def measure(project_root, monkeypatch):
    monkeypatch.syspath_prepend(str(project_root / "benchmarks"))
    yield importlib.import_module("measure")
    sys.modules.pop("measure", None)


def test_rejects_too_few_rounds(measure):
    for rounds in ("5", "0", "-7", "many", "6.5"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"must be at least 6 .*, got {rounds}"):
            measure.round_count(rounds)
    assert measure.round_count("6") == 6


@pytest.mark.parametrize(("rounds", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (12, 3, 10)])
def test_interval_of_the_median_matches_the_sign_test(measure, rounds, low, high):
    """Six rounds give minimum and maximum: all ratios lie on one side of the median once in 32."""
    times = [float(k) for k in range(rounds, 0, -1)]
    assert measure.paired_ratio(times, [1.0] * rounds) == {"ratio": (rounds + 1) / 2, "low": low, "high": high}
