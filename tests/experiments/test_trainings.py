"""Trainings in separate processes."""

import signal
import subprocess
import sys

import pytest

from scalelong_diffusers.experiments.trainings import read_log


def test_a_damaged_log_is_read_without_its_broken_lines(tmp_path):
    assert read_log(tmp_path) == []
    lines = b'{"step": 1, "loss": 2.5}\nbroken\n[1]\n\xff\n{"step": 2}\n{"step": 3, "lo'
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    assert read_log(tmp_path) == [{"step": 1, "loss": 2.5}, {"step": 2}]


@pytest.mark.slow
def test_signals_end_a_command_except_under_nohup():
    cases = {
        ("SIG_DFL", signal.SIGHUP): (129, b""),
        ("SIG_DFL", signal.SIGTERM): (143, b""),
        ("SIG_IGN", signal.SIGHUP): (0, b"continues\n"),
    }
    for (handler, number), expected in cases.items():
        benchmark = (
            f"import os, signal; signal.signal(signal.SIGHUP, signal.{handler})\n"
            "from scalelong_diffusers.experiments.trainings import exit_on_signals; exit_on_signals()\n"
            f"os.kill(os.getpid(), {number.value}); print('continues')"
        )
        command = [sys.executable, "-c", benchmark]
        ended = subprocess.run(command, capture_output=True)
        assert (ended.returncode, ended.stdout) == expected
