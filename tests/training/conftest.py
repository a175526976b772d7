"""Runs of the training scripts with a model that takes milliseconds per step, in this process or in forked ones."""

import contextlib
import gc
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from diffusers import UNet2DModel
from safetensors.torch import load_file

from scalelong_diffusers import UViTModel
from scalelong_diffusers.data import SHAPE_CLASSES, Batch
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.train import train_unconditional
from scalelong_diffusers.training import TrainingStopped, run_script


# A run collects garbage at its end, which need not look at the imported modules each time.
gc.freeze()

TINY = {"sample_size": 8, "patch_size": 2, "hidden_size": 16, "num_layers": 4, "num_attention_heads": 2}
# With 27 training images and 4 per step, a run of 16 steps crosses two ends of an epoch, the first one in step 7.
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


def make_flags(**settings) -> list[str]:
    """Return a command line. `True` turns a switch on, `None` leaves a flag out, and a list has several values."""
    words = []
    for name, value in settings.items():
        if value is not None:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name}", *map(str, values)]
    return words


def reset_accelerate():
    """Forget accelerate's state, which is shared by all runs in a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory) -> Path:
    """The config of an unconditional model, and in its folders `classes` and `text` the configs of other tasks."""
    folder = tmp_path_factory.mktemp("tiny")
    UViTModel(**TINY).save_config(folder)
    UViTModel(**TINY, num_class_embeds=len(SHAPE_CLASSES) + 1).save_config(folder / "classes")
    UViTModel(**TINY, cross_attention_dim=16, context_length=20).save_config(folder / "text")
    return folder


@pytest.fixture(scope="session")
def unet_with_dropout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unet")
    UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        dropout=0.5,
        add_attention=False,
    ).save_config(folder)
    return folder


@pytest.fixture
def fresh_accelerator():
    reset_accelerate()
    yield reset_accelerate
    reset_accelerate()


@pytest.fixture(scope="session")
def train_once(tiny_config):
    """`train` for fixtures that several tests share."""

    def run(output_dir: Path, script=train_unconditional, **changes) -> Path:
        reset_accelerate()
        settings = {"model_config_name_or_path": tiny_config, **SMALL, **changes}
        script.main(make_flags(output_dir=output_dir, **settings))
        reset_accelerate()
        return output_dir

    return run


@pytest.fixture
def train(train_once, fresh_accelerator):
    """`train(output_dir, flag=value)` runs the unconditional script in this process and returns the folder."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield train_once
    # pytest keeps the frames of a run that fails, and with them its signal handlers.
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def finished(train_once, tmp_path_factory) -> Path:
    """A finished run with a checkpoint of each step. Tests only read it."""
    return train_once(tmp_path_factory.mktemp("finished") / "run", checkpointing_steps=1)


@pytest.fixture
def stopped_at(finished, tmp_path):
    """`stopped_at(step)`: a copy of the finished run, as if it had been killed before the checkpoint after `step`."""

    def copy(step: int, source: Path = finished) -> Path:
        ignored = [path.name for path in source.glob("checkpoint-*") if int(path.name.split("-")[1]) > step]
        return shutil.copytree(source, tmp_path / f"stopped-at-{step}", ignore=lambda *_: ignored)

    return copy


@pytest.fixture
def refused(train, tmp_path, capsys):
    """`refused(flag=value)`: the message with which a run ends before its first step, leaving nothing behind."""

    def run(**changes) -> str:
        capsys.readouterr()
        with pytest.raises((UserError, TrainingStopped, SystemExit)) as stopped:
            train(tmp_path / "refused", **changes)
        message = str(stopped.value)
        if isinstance(stopped.value, SystemExit):
            assert stopped.value.code == 2
            message = capsys.readouterr().err.strip()
        elif isinstance(stopped.value, TrainingStopped):
            assert stopped.value.exit_code == 2
        assert "\n" not in message
        assert not (tmp_path / "refused").is_dir()
        return message

    return run


class ForkedProcesses:
    """
    Processes that run the `main` of a script as a launcher starts them, but without importing everything again.

    They have the interface of `subprocess.Popen`. `returncode` is the exit code of the first one that failed.
    """

    def __init__(
        self, main: Callable, arguments: list[str], processes: int, output: Path, prepare: Callable[[], object]
    ):
        self.output = output
        self.output.mkdir()
        self.codes: dict[int, int | None] = {}
        port = _free_port()
        for rank in range(processes):
            environment = {"ACCELERATE_USE_CPU": "1"}
            if processes > 1:
                environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            pid = os.fork()
            if pid == 0:
                _run_forked(main, arguments, environment, output / str(rank), prepare)
            self.codes[pid] = None

    @property
    def pids(self) -> list[int]:
        return list(self.codes)

    @property
    def returncode(self) -> int | None:
        codes = list(self.codes.values())
        return None if None in codes else next((code for code in codes if code), 0)

    def poll(self) -> int | None:
        for pid, code in self.codes.items():
            if code is None:
                waited, status = os.waitpid(pid, os.WNOHANG)
                self.codes[pid] = os.waitstatus_to_exitcode(status) if waited else None
        return self.returncode

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        """Wait for the end of all processes, and return what they printed to stdout and to stderr."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < deadline, f"still running: {self.read('out')}{self.read('err')}"
            time.sleep(0.005)
        return self.read("out"), self.read("err")

    def read(self, stream: str) -> str:
        files = sorted(self.output.glob(f"*.{stream}"))
        return "".join(file.read_bytes().decode(errors="replace") for file in files)

    def send_signal(self, number: int, *ranks: int):
        """Send a signal to some processes, or to all of them."""
        for rank in ranks or range(len(self.pids)):
            os.kill(self.pids[rank], number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run_forked(
    main: Callable, arguments: list[str], environment: dict[str, object], output: Path, prepare: Callable[[], object]
):
    """Run the script in a forked process. This never returns."""
    code = 1
    try:
        for descriptor, stream in ((1, "out"), (2, "err")):
            file = os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, descriptor)
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1, closefd=False) for descriptor in (1, 2))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.simplefilter("ignore")
        os.environ.update({name: str(value) for name, value in environment.items()})
        reset_accelerate()
        sys.argv = [f"{main.__module__.split('.')[-1]}.py", *arguments]
        prepare()
        run_script(main)
        code = 0
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):  # a test may have closed the terminal
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


class Launched:
    """A training script in separate processes."""

    def __init__(self, main: Callable, arguments: list, *options):
        self.process = ForkedProcesses(main, list(map(str, arguments)), *options)

    def kill(self):
        """Kill all processes and their data loader workers."""
        family = [
            child
            for pid in self.process.pids
            if self.process.codes[pid] is None
            for child in psutil.Process(pid).children(recursive=True)
        ]
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.communicate()

    def wait(self, timeout: float = 240) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout)
        return self.process.returncode, stdout, stderr

    def wait_until(self, condition: Callable[[], bool], timeout: float = 120):
        """Wait for something that happens before the script ends."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, self.process.read("err")
            time.sleep(0.001)


@pytest.fixture
def launch_main(tmp_path):
    """
    `launch_main(main, arguments)` starts the main function of a script. Its processes end with the test.

    Each process calls `prepare` first.
    """
    started = []

    def run(main: Callable, arguments: list, processes: int = 1, prepare: Callable = lambda: None) -> Launched:
        started.append(Launched(main, arguments, processes, tmp_path / f"launched-{len(started)}", prepare))
        return started[-1]

    yield run
    for launched in started:
        if launched.process.poll() is None:
            launched.kill()


@pytest.fixture
def launch_script(launch_main):
    """`launch_script([file, *arguments])` starts a script of `train/`."""

    def run(arguments: list, processes: int = 1) -> Launched:
        module = importlib.import_module(f"scalelong_diffusers.train.{Path(arguments[0]).stem}")
        return launch_main(module.main, arguments[1:], processes)

    return run


@pytest.fixture(scope="session")
def double_script():
    """The unconditional training in float64."""
    spec = importlib.util.spec_from_file_location("double_script", Path(__file__).parent / "double_script.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small_run(tiny_config):
    """`small_run(flag=value)`: the command line of a run of the unconditional script that takes a second."""
    return lambda **changes: make_flags(**{"model_config_name_or_path": tiny_config, **SMALL, **changes})


@pytest.fixture(scope="session")
def free_port():
    return _free_port


@pytest.fixture
def launch(tiny_config, launch_main):
    """`launch(output_dir, flag=value)` starts the unconditional script."""

    def run(
        output_dir: Path, processes: int = 1, script=train_unconditional, prepare: Callable = lambda: None, **changes
    ) -> Launched:
        settings = {"model_config_name_or_path": tiny_config, **SMALL, **changes}
        return launch_main(script.main, make_flags(output_dir=output_dir, **settings), processes, prepare)

    return run


@pytest.fixture
def poisoned_data(monkeypatch):
    """`poisoned_data(first, last)` puts an infinity into the noise of the steps from `first` to `last` - 1."""
    draw = Batch.normal_like

    def poison(first: int, last: float = math.inf):
        def normal_like(batch, tensor, purpose):
            noise = draw(batch, tensor, purpose)
            if batch.stream == "train" and first <= batch.positions[0] // 4 < last:
                noise[0, 0, 0, 0] = math.inf
            return noise

        monkeypatch.setattr(Batch, "normal_like", normal_like)

    return poison


@pytest.fixture(scope="session")
def metrics_of():
    return read_metrics


@pytest.fixture(scope="session")
def assert_same_run():
    """Check that the last checkpoints of two runs and their logs are bit-identical."""
    return _assert_same_run


@pytest.fixture(scope="session")
def weights_of():
    """`weights_of(folder, step, name)`: the weights in a checkpoint of a run."""
    return _weights_of


def read_metrics(folder: Path) -> list[dict]:
    """Return the lines of a run's log without timings."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("images_per_second")
    return lines


def _weights_of(folder: Path, step: int, name: str = "unet") -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoint-{step}" / name / "diffusion_pytorch_model.safetensors")


def _assert_same_run(folder: Path, expected: Path):
    last = max(expected.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    _assert_same_state(folder / last.name, last)
    assert read_metrics(folder) == read_metrics(expected)


def _assert_same_state(checkpoint: Path, expected: Path):
    """Check that weights, EMA weights, optimizer and numbers are bit-identical."""
    files, found = (sorted(p.relative_to(f) for p in f.rglob("*.safetensors")) for f in (expected, checkpoint))
    assert files == found
    assert len(files) > sum(path.is_dir() for path in expected.iterdir())
    for file in files:
        tensors, wanted = load_file(checkpoint / file), load_file(expected / file)
        assert tensors.keys() == wanted.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, wanted[name]), f"{file}: {name}"
    states = [json.loads((folder / "state.json").read_text()) for folder in (checkpoint, expected)]
    for state in states:
        state.pop("settings")  # they differ in the folder and in resume_from_checkpoint
    assert states[0] == states[1]
