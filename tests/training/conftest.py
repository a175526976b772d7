"""Runs of the training scripts, in this process or in others, with a model that takes milliseconds for a step."""

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from scalelong_diffusers import UViTModel
from scalelong_diffusers.data import Batch
from scalelong_diffusers.train import train_unconditional
from scalelong_diffusers.training import TrainingStopped


SCRIPTS = Path(__file__).parents[2] / "train"
TINY = {"sample_size": 8, "patch_size": 2, "hidden_size": 16, "num_layers": 4, "num_attention_heads": 2}
# Few enough images for a run of a dozen steps to pass the ends of several epochs.
SMALL = {
    "resolution": 8,
    "num_shapes": 30,
    "validation_size": 3,
    "train_batch_size": 4,
    "max_train_steps": 16,
    "checkpointing_steps": 4,
    "logging_steps": 1,
    "validation_steps": 5,
    "sample_steps": 0,
    "lr_warmup_steps": 3,
    "learning_rate": 0.01,
}


def flags(**settings) -> list[str]:
    """`name=True` is a bare flag, `name=None` none at all, and a list several words."""
    words = []
    for name, value in settings.items():
        if value is not None:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name}", *map(str, values)]
    return words


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    UViTModel(**TINY).save_config(folder)
    UViTModel(**TINY, num_class_embeds=5).save_config(folder / "five_classes")
    return folder


@pytest.fixture
def fresh_accelerator():
    """accelerate keeps its state in classes, one state for each process."""

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield reset
    reset()


@pytest.fixture
def train(tiny_config, fresh_accelerator, capsys):
    """`train(output_dir, flag=value)` runs the unconditional script in this process, and returns its folder."""

    def run(output_dir: Path, script=train_unconditional, **changes) -> Path:
        fresh_accelerator()
        settings = {"model_config_name_or_path": tiny_config, **SMALL, **changes}
        script.main(flags(output_dir=output_dir, **settings))
        return output_dir

    return run


@pytest.fixture
def refused(train, tmp_path, capsys):
    """`refused(flag=value)` is the sentence that a run ends with before it begins."""

    def run(**changes) -> str:
        capsys.readouterr()
        with pytest.raises((TrainingStopped, SystemExit)) as stopped:
            train(tmp_path / "refused", **changes)
        if isinstance(stopped.value, SystemExit):  # by the parser of the flags
            assert stopped.value.code == 2
            sentence = capsys.readouterr().err.strip()
        else:
            assert stopped.value.exit_code == 2
            sentence = str(stopped.value)
        assert "\n" not in sentence
        assert not (tmp_path / "refused").is_dir()  # nothing stays of it
        return sentence

    return run


class Launched:
    """A training script in processes of its own."""

    def __init__(self, arguments: list[str], processes: int = 1):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "ACCELERATE_USE_CPU": "1",
        }
        start = [sys.executable]
        if processes > 1:
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        self.process = subprocess.Popen(
            [*start, *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def kill(self):
        """All of its processes at once; a launcher starts them outside of its own group."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        for process in [*family, self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family)
        self.process.communicate()

    def wait(self, timeout: float = 240) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=timeout)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def launch_script():
    """`launch_script([file, *arguments])` starts a script in processes of its own, which end with the test."""
    started = []

    def run(arguments: list, processes: int = 1) -> Launched:
        started.append(Launched(arguments, processes))
        return started[-1]

    yield run
    for launched in started:
        if launched.process.poll() is None:
            launched.kill()


@pytest.fixture
def launch(tiny_config, launch_script):
    """`launch(output_dir, flag=value)` starts the unconditional script."""

    def run(
        output_dir: Path,
        processes: int = 1,
        python_code: str | None = None,
        script: Path = SCRIPTS / "train_unconditional.py",
        **changes,
    ) -> Launched:
        settings = {"model_config_name_or_path": tiny_config, **SMALL, **changes}
        arguments = [script, *flags(output_dir=output_dir, **settings)]
        return launch_script(arguments if python_code is None else ["-c", python_code, *arguments], processes)

    return run


@pytest.fixture
def poisoned_data(monkeypatch):
    """Noise with an infinity in it, from some step on."""
    draw = Batch.normal_like

    def poison(first, last=math.inf):
        def normal_like(batch, tensor, purpose):
            noise = draw(batch, tensor, purpose)
            if batch.stream == "train" and first <= batch.positions[0] // 4 < last:
                noise[0, 0, 0, 0] = math.inf
            return noise

        monkeypatch.setattr(Batch, "normal_like", normal_like)

    return poison


@pytest.fixture(scope="session")
def metrics_of():
    return _metrics_of


@pytest.fixture(scope="session")
def assert_same_run():
    return _assert_same_run


def _metrics_of(folder: Path) -> list[dict]:
    """The lines of a run's log without timings."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("images_per_second")
    return lines


def _assert_same_state(checkpoint: Path, expected: Path):
    """Weights, average, optimizer and numbers are equal bit for bit."""
    files = sorted(path.relative_to(expected) for path in expected.rglob("*.safetensors"))
    assert len(files) == 1 + sum(path.is_dir() for path in expected.iterdir())
    for file in files:
        tensors, wanted = load_file(checkpoint / file), load_file(expected / file)
        assert tensors.keys() == wanted.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, wanted[name]), f"{file}: {name}"
    states = [json.loads((folder / "state.json").read_text()) for folder in (checkpoint, expected)]
    for state in states:
        state.pop("settings")  # which say where the run is, and that it was resumed
    assert states[0] == states[1]


def _assert_same_run(folder: Path, expected: Path):
    last = max(expected.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    _assert_same_state(folder / last.name, last)
    assert _metrics_of(folder) == _metrics_of(expected)
