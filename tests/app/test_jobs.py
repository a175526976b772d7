"""Processes that the app starts and stops."""

import os
import threading
import time

import pytest

from scalelong_diffusers import UserError
from scalelong_diffusers.app.events import follow
from scalelong_diffusers.app.jobs import Job


SLEEPING = """
import signal, sys, time
print("\\rtraining:  40%|####      | 4/10", file=sys.stderr, flush=True)
if "--deaf" in sys.argv[1]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job that can run modules of the test's folder."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sleeping.py").write_text(SLEEPING)
    (tmp_path / "failing.py").write_text(
        "import sys\nprint('10%|#', file=sys.stderr)\nsys.exit('train: no <images>')\n"
    )
    job = Job("training")
    yield job
    job.close()


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "--deaf"])
def test_stop_ends_the_process(job, tmp_path, kind, monkeypatch):
    monkeypatch.setattr("scalelong_diffusers.app.jobs._SECONDS_TO_STOP", 0.5)
    assert job.state() == "Not started."
    job.start("sleeping", [f"x{kind}"], {}, tmp_path)
    wait_for(lambda: "ready" in (job.folder / "messages.txt").read_text())
    assert job.state() == "Running: 40 %."
    with pytest.raises(UserError, match="a training is already running: stop it first"):
        job.start("sleeping", [], {}, tmp_path)
    pid = job._process.pid
    job.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert job.state() == "Stopped."
    job.stop()  # does nothing


@pytest.mark.slow
def test_failures_are_errors_and_a_new_start_is_possible(job, tmp_path):
    job.start("failing", ["a"], {"left_out": None, "kappa": 0.5}, tmp_path)
    wait_for(lambda: not job.is_running)
    with pytest.raises(UserError, match="the training failed: train: no <images>"):
        job.state()
    job.start("this", [], {}, tmp_path)
    wait_for(lambda: not job.is_running)
    assert job.state() == "Finished."
    folder = job.folder
    job.close()
    assert not folder.exists()


@pytest.mark.slow
def test_follow_shows_the_end_of_a_stopped_process(job, tmp_path, monkeypatch):
    monkeypatch.setattr("scalelong_diffusers.app.events._SECONDS_BETWEEN_LOOKS", 0.05)
    assert list(follow(job, str)) == []
    job.start("sleeping", ["x"], {}, tmp_path)
    looks = follow(job, lambda folder: f"results in {folder}")
    assert next(looks) == ("Running: 0 %.", f"results in {tmp_path}")
    wait_for(lambda: next(looks)[0] == "Running: 40 %.")
    stopping = threading.Thread(target=job.stop)
    stopping.start()
    assert list(looks)[-1] == ("Stopped.", f"results in {tmp_path}")
    stopping.join()
