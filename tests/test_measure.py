"""Shared parts of the benchmarks: intervals, signals and bad input."""

import argparse
import importlib
import signal
import subprocess
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


@pytest.mark.slow
def test_signals_end_a_benchmark_except_under_nohup(project_root):
    cases = {
        ("SIG_DFL", signal.SIGHUP): (129, b""),
        ("SIG_DFL", signal.SIGTERM): (143, b""),
        ("SIG_IGN", signal.SIGHUP): (0, b"continues\n"),
    }
    for (handler, number), expected in cases.items():
        benchmark = (
            f"import os, signal; signal.signal(signal.SIGHUP, signal.{handler})\n"
            "import measure; measure.exit_on_signals()\n"
            f"os.kill(os.getpid(), {number.value}); print('continues')"
        )
        command = [sys.executable, "-c", benchmark]
        ended = subprocess.run(command, cwd=project_root / "benchmarks", capture_output=True)
        assert (ended.returncode, ended.stdout) == expected


@pytest.mark.parametrize(("rounds", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (12, 3, 10)])
def test_interval_of_the_median_matches_the_sign_test(measure, rounds, low, high):
    """Six rounds give minimum and maximum: all ratios lie on one side of the median once in 32."""
    times = [float(k) for k in range(rounds, 0, -1)]
    assert measure.paired_ratio(times, [1.0] * rounds) == {"ratio": (rounds + 1) / 2, "low": low, "high": high}
