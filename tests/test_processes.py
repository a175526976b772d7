"""Functions that run in all processes or only in the main one."""

import json
import subprocess
import sys

import pytest

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.processes import OtherProcessFailed, WorkSkipped, run_on_all_processes, run_on_main_process


def fail(error):
    raise error


@pytest.mark.parametrize("run", [run_on_all_processes, run_on_main_process])
def test_single_process_returns_and_raises(run):
    assert run(lambda: 3) == 3
    for error in (KeyError("a"), UserError("b"), WorkSkipped("c")):
        with pytest.raises(type(error)) as caught:
            run(lambda error=error: fail(error))
        assert caught.value is error


TWO_PROCESSES = """
import json

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.processes import WorkSkipped, processes, run_on_all_processes, run_on_main_process

rank = processes().process_index


def fail_in(number, error):
    if rank == number:
        raise error
    return rank


def outcome(run, function):
    try:
        return run(function)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


outcomes = [
    outcome(run_on_main_process, lambda: ["result", rank]),
    outcome(run_on_main_process, lambda: fail_in(0, KeyError("two\\nlines"))),
    outcome(run_on_main_process, lambda: fail_in(1, KeyError("not called"))),
    outcome(run_on_all_processes, lambda: rank),
    outcome(run_on_all_processes, lambda: fail_in(1, UserError("bad value"))),
    outcome(run_on_all_processes, lambda: fail_in(0, WorkSkipped("stopping"))),
    outcome(run_on_all_processes, lambda: (fail_in(0, WorkSkipped("stopping")), fail_in(1, UserError("bad value")))),
]
print(json.dumps([rank, outcomes]) + "\\n", end="", flush=True)
processes().destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_share_results_and_failures(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ended = subprocess.run([*launcher, script], capture_output=True, text=True, timeout=120, check=True)
    outcomes = dict(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("["))
    assert outcomes[0] == [
        ["result", 0],
        "KeyError: 'two\\nlines'",
        0,
        0,
        "OtherProcessFailed: bad value",
        "WorkSkipped: stopping",
        "OtherProcessFailed: bad value",
    ]
    assert outcomes[1] == [
        ["result", 0],
        "OtherProcessFailed: 'two\\nlines'",
        0,
        1,
        "UserError: bad value",
        "WorkSkipped: stopping",
        "UserError: bad value",
    ]


def test_failure_of_another_process_is_a_user_error():
    assert issubclass(OtherProcessFailed, UserError)
