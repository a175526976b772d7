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


@pytest.mark.parametrize("rounds", ["5", "0", "-7", "many", "6.5"])
def test_too_few_rounds_are_refused(measure, rounds):
    with pytest.raises(argparse.ArgumentTypeError, match=f"needs at least 6 rounds, got {rounds}"):
        measure.enough_rounds(rounds)
    assert measure.enough_rounds("6") == 6


@pytest.mark.parametrize(
    ("handler", "number", "code"),
    [("SIG_DFL", signal.SIGHUP, 129), ("SIG_DFL", signal.SIGTERM, 143), ("SIG_IGN", signal.SIGHUP, 0)],
)
def test_the_end_of_the_terminal_ends_a_benchmark_but_under_nohup(project_root, handler, number, code):
    benchmark = (
        f"import os, signal; signal.signal(signal.SIGHUP, signal.{handler})\n"
        "import measure; measure.exit_when_told()\n"
        f"os.kill(os.getpid(), {number.value}); print('goes on')"
    )
    ended = subprocess.run([sys.executable, "-c", benchmark], cwd=project_root / "benchmarks", capture_output=True)
    assert (ended.returncode, ended.stdout) == (code, b"goes on\n" if code == 0 else b"")


@pytest.mark.parametrize(("rounds", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (12, 3, 10)])
def test_the_interval_of_a_median_is_that_of_the_sign_test(measure, rounds, low, high):
    """Its tables: with six rounds the ends, since all lie on one side of the median by chance once in 32."""
    times = [float(k) for k in range(rounds, 0, -1)]
    assert measure.paired_ratio(times, [1.0] * rounds) == {"ratio": (rounds + 1) / 2, "low": low, "high": high}
