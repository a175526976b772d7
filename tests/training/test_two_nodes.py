"""Two nodes on the loopback: one dies, both start again, and the run continues exactly."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRAIN = Path(__file__).parents[2] / "train"
SECONDS = 200  # on a busy machine
SCRIPT = TRAIN / "train_unconditional.py"
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
# Two tasks, one per node. Slurm's signals reach the tasks, not this process.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: None)
command = sys.argv[2:]
tasks = [
    subprocess.Popen(command, env=os.environ | {{"SLURM_PROCID": str(n), "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}})
    for n in range(2)
]
sys.exit(max([task.wait() for task in tasks]))
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; echo 127.0.0.2; else echo "$@" >> "$(dirname "$0")/requeued"; fi
"""


@pytest.fixture
def environment():
    return os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def processes():
    """Processes that end with the test, with their children."""
    started = []
    yield started
    for process in started:
        end(process)


def end(process: subprocess.Popen):
    if process.poll() is None:
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
    process.wait()


def wait_until(condition, process):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def assert_same_shards(folder: Path, expected: Path):
    files = sorted((expected / "shards").iterdir())
    assert len(files) == 2
    for file in files:
        tensors, wanted = load_file(folder / "shards" / file.name), load_file(file)
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_a_node_dies_and_both_start_again(launch, processes, environment, small_run, free_port, metrics_of, tmp_path):
    """Each node has a launcher and a process. They shard the weights."""
    expected, folder = tmp_path / "expected", tmp_path / "run"
    # Without OMP_NUM_THREADS, accelerate would choose a number of threads, which changes the order of sums.
    alike = FSDP | {"OMP_NUM_THREADS": "1"}
    undisturbed = launch(expected, 2, train_batch_size=2, prepare=lambda: os.environ.update(alike))

    def start(**changes) -> list[subprocess.Popen]:
        rendezvous = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{free_port()}"
        launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous.split()]
        command = [*launcher, SCRIPT, *small_run(output_dir=folder, train_batch_size=2, **changes)]
        nodes = [subprocess.Popen(command, env=environment | FSDP) for _ in range(2)]
        processes.extend(nodes)
        return nodes

    first, second = start(max_train_steps=4000)
    wait_until(lambda: steps_in(folder), first)
    end(second)
    assert first.wait(SECONDS) != 0
    for step in steps_in(folder)[1:]:
        (folder / f"checkpoint-{step}").rename(tmp_path / f"later-{step}")
    assert steps_in(folder) == [4]
    assert [node.wait(SECONDS) for node in start(resume_from_checkpoint="latest")] == [0, 0]
    assert undisturbed.wait()[0] == 0
    assert_same_shards(folder / "checkpoint-16", expected / "checkpoint-16")
    assert metrics_of(folder) == metrics_of(expected)


def test_slurm_job_is_queued_again_and_resumes(processes, environment, small_run, free_port, tmp_path):
    commands = {"srun": SRUN, "scontrol": SCONTROL, "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n'}
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}"}
    environment |= {"SLURM_JOB_ID": str(free_port() % 10_000), "SLURM_JOB_NODELIST": "node[1-2]"}
    folder = tmp_path / "run"

    def start(**changes) -> subprocess.Popen:
        flags = small_run(train_batch_size=2, checkpointing_steps=1000, **changes)
        command = ["bash", TRAIN / "slurm.sbatch", folder, SCRIPT, *flags]
        processes.append(subprocess.Popen(command, env=environment))
        return processes[-1]

    job = start(max_train_steps=4000)
    wait_until(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text(), job)
    for child in psutil.Process(job.pid).children(recursive=True):
        child.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS) == 143
    assert (tmp_path / "requeued").read_text() == f"requeue {environment['SLURM_JOB_ID']}\n"
    (step,) = steps_in(folder)
    job = start(max_train_steps=step + 2)
    assert job.wait(SECONDS) == 0
    assert steps_in(folder) == [step, step + 2]
    assert (folder / "model_index.json").exists()


def test_kubernetes_file_starts_two_nodes():
    service, job = yaml.safe_load_all((TRAIN / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert service["metadata"]["name"] == pod["subdomain"]
    (script,) = pod["containers"][0]["args"]
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0
    assert "--nnodes 2" in script
    assert f"--master_addr {job['metadata']['name']}-0.{pod['subdomain']}" in script
    (timeout,) = re.findall(r"--shutdown_timeout (\d+)", script)
    assert int(timeout) < pod["terminationGracePeriodSeconds"]
