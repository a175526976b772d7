"""A run that is killed and resumed is bit-identical to an uninterrupted run."""

import fcntl
import json
import os
import pty
import resource
import shutil
import signal
import termios
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from scalelong_diffusers import ScaleLongUnconditionalPipeline, UViTModel
from scalelong_diffusers.data.shapes import Shapes
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import checksum
from scalelong_diffusers.pipelines.grids import draw_grid
from scalelong_diffusers.training import checkpoints, monitoring
from scalelong_diffusers.training.monitoring import MetricsFile


pytestmark = pytest.mark.slow

WEIGHTS = "diffusion_pytorch_model.safetensors"
RESUME = {"resume_from_checkpoint": "latest"}


def count_lines(folder) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def checkpoints_in(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("*checkpoint*"))


@pytest.mark.parametrize("step", [4, 7])  # step 7 crosses the end of an epoch
def test_resumes_exactly(train, finished, stopped_at, assert_same_run, step):
    folder = stopped_at(step)
    train(folder, checkpointing_steps=1, **RESUME)
    assert_same_run(folder, finished)


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        # Between two log lines and in the middle of an epoch.
        (8, {"gradient_accumulation_steps": 2, "train_batch_size": 2, "logging_steps": 3}),
        (6, {"skip_scaling": "ls", "skip_scaling_warmup_steps": 9, "lr_scheduler": "cosine"}),
        (9, {"no-use_ema": True, "lr_scheduler": "cosine_with_restarts", "lr_num_cycles": 3}),
        (5, {"model_config_name_or_path": "unet_with_dropout"}),
    ],
    ids=str,
)
def test_resumes_exactly_with(train, stopped_at, unet_with_dropout, assert_same_run, tmp_path, step, changes):
    changes = {"checkpointing_steps": 1, "max_train_steps": 12, **changes}
    if "model_config_name_or_path" in changes:
        changes["model_config_name_or_path"] = unet_with_dropout
    expected = train(tmp_path / "uninterrupted", **changes)
    folder = stopped_at(step, expected)
    train(folder, **changes, **RESUME)
    assert_same_run(folder, expected)


@pytest.mark.parametrize(("num_workers", "processes"), [(2, 1), (0, 2)])
def test_killed_run_resumes_exactly(launch, finished, assert_same_run, tmp_path, num_workers, processes):
    """The kill happens at any point of a step, after the checkpoint of step 8."""
    changes = {"dataloader_num_workers": num_workers, "processes": processes, "train_batch_size": 4 // processes}
    folder = tmp_path / "killed"
    running = launch(folder, max_train_steps=400, **changes)
    expected = finished
    if processes > 1:
        expected = tmp_path / "uninterrupted"
        assert launch(expected, **changes).wait()[0] == 0
    running.wait_until(lambda: count_lines(folder) > 10)
    running.kill()
    for path in folder.glob("checkpoint-*"):
        if int(path.name.split("-")[1]) > 12:
            shutil.rmtree(path)
    code, _, errors = launch(folder, **changes, **RESUME).wait()
    assert code == 0, errors
    assert_same_run(folder, expected)


def test_killed_while_writing_a_checkpoint(launch, train, finished, assert_same_run, tmp_path, monkeypatch):
    sync = checkpoints.sync
    monkeypatch.setattr(checkpoints, "sync", lambda path: (time.sleep(0.01), sync(path)))
    folder = tmp_path / "killed"
    running = launch(folder, max_train_steps=400, checkpointing_steps=1)
    running.wait_until(lambda: count_lines(folder) > 4 and list(folder.glob(".scalelong-partial-*")))
    running.kill()
    monkeypatch.undo()
    assert list(folder.glob(".scalelong-partial-*"))
    train(folder, **RESUME)
    assert not list(folder.glob(".scalelong-partial-*"))
    assert_same_run(folder, finished)


def test_second_start_in_the_folder_of_a_run_is_refused(launch, train, tmp_path):
    folder = tmp_path / "run"
    running = launch(folder, processes=2, max_train_steps=4000, checkpointing_steps=20, logging_steps=50)
    running.wait_until(lambda: (folder / "settings.json").exists())
    in_use = f"run is in use by process {running.process.pids[0]} on "
    with pytest.raises(UserError, match=in_use):
        train(folder)
    running.wait_until(lambda: (folder / "checkpoint-20").exists())
    with pytest.raises(UserError, match=in_use):
        train(folder, **RESUME)
    assert running.process.poll() is None


def test_damaged_lines_of_the_log_are_set_aside(train, stopped_at, finished, metrics_of, capsys):
    folder = stopped_at(8)
    lines = (finished / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:10]
    damaged = {1: b'{"step": 2, "lo\xff": 0.5}\n', 3: b"5\n", 5: lines[5].replace(b'"step": 6', b'"step": 600')}
    content = [damaged.get(number, line) for number, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_bytes(b"".join(content) + b'{"step": 11, "lo')
    train(folder, **RESUME)
    expected = [line for line in metrics_of(finished) if line["step"] - 1 not in damaged]
    assert metrics_of(folder) == expected
    assert (folder / "metrics.jsonl.broken").read_bytes() == b"".join(damaged.values())
    assert f"warning: moved 3 lines of {folder}/metrics.jsonl that cannot be read to" in capsys.readouterr().out


def test_removes_only_its_own_leftovers(train, stopped_at, refused):
    folder = stopped_at(8)
    users = (".old-photos", ".partial-1", ".writable", "samples/.partial")
    own = (".scalelong-partial-old-checkpoint-4", ".scalelong-partial-12", "samples/.scalelong-partial-0123")
    for name in (*users, *own):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.txt").write_text("a")
    with pytest.raises(UserError, match="belongs to a run with other settings"):
        train(folder, learning_rate=0.5, **RESUME)
    train(folder, **RESUME)
    assert all((folder / name / "a.txt").exists() for name in users)
    assert not any((folder / name).exists() for name in own)


@pytest.mark.parametrize(
    ("number", "processes"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGHUP, 1), (signal.SIGTERM, 2)]
)
def test_signal_saves_and_explains_how_to_resume(launch, train, finished, weights_of, tmp_path, number, processes):
    folder = tmp_path / "stopped"
    # With a validation after each step, most signals arrive during one.
    changes = {"checkpointing_steps": 1000, "dataloader_num_workers": 2, "validation_steps": 1}
    running = launch(folder, processes, max_train_steps=400, train_batch_size=4 // processes, **changes)
    running.wait_until(lambda: count_lines(folder) > 2)
    # A terminal sends Ctrl-C to the data loader workers too.
    family = [(psutil.Process(pid), *psutil.Process(pid).children()) for pid in running.process.pids]
    for process in [process for processes in family for process in processes]:
        process.send_signal(number)
        time.sleep(0.01)
    code, _, errors = running.wait()
    assert code == 128 + number
    (checkpoint,) = checkpoints_in(folder)
    step = int(checkpoint.removeprefix("checkpoint-"))
    (line,) = [line for line in errors.splitlines() if "stopped by" in line]
    assert f"train_unconditional: stopped by {number.name} after step {step} of 400" in line
    assert line.endswith("add --resume_from_checkpoint latest to the same command to resume")
    assert "Traceback" not in errors
    assert step < 16
    train(folder, **RESUME)
    expected = weights_of(finished, 16)
    for name, tensor in weights_of(folder, 16).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0 if processes == 1 else 1e-3)


@pytest.fixture
def sampling(monkeypatch, tmp_path):
    """Two files: the first one appears while samples are made, which lasts until the second one appears."""
    begun, may_end = tmp_path / "begun", tmp_path / "may_end"

    def wait(images, titles):
        begun.touch()
        while not may_end.exists():
            time.sleep(0.001)
        return draw_grid(images, titles)

    monkeypatch.setattr(monitoring, "draw_grid", wait)
    return begun, may_end


SAMPLES = {"num_samples": 1, "num_inference_steps": 1, "validation_steps": 0, "checkpointing_steps": 1000}


def test_signal_to_one_process_stops_all(launch, sampling, tmp_path):
    """The signal arrives while the main process makes samples in step 3. It takes effect at the next log line."""
    begun, may_end = sampling
    folder = tmp_path / "run"
    running = launch(folder, processes=2, max_train_steps=400, logging_steps=2, sample_steps=3, **SAMPLES)
    running.wait_until(begun.exists)
    running.process.send_signal(signal.SIGTERM, 1)
    may_end.touch()
    code, _, errors = running.wait()
    assert code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step 4 of 400" in errors
    assert checkpoints_in(folder) == ["checkpoint-4"]


def test_ignored_signals_stay_ignored(launch, tmp_path):
    """`nohup` ignores SIGHUP."""

    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    folder = tmp_path / "run"
    running = launch(folder, prepare=ignore)
    running.wait_until(lambda: count_lines(folder) > 2)
    running.process.send_signal(signal.SIGHUP)
    assert running.wait()[0] == 0
    assert "checkpoint-16" in checkpoints_in(folder)


def test_dropped_connection_saves_although_the_terminal_is_gone(launch, tmp_path):
    def open_terminal():
        """Start a session with a terminal, which is closed in step 2."""
        os.setsid()
        controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        for stream in (1, 2):
            os.dup2(terminal, stream)
        os.close(terminal)
        write = MetricsFile.write

        def close_at_step_2(file, line):
            write(file, line)
            if line["step"] == 2:
                os.close(controller)

        MetricsFile.write = close_at_step_2

    folder = tmp_path / "run"
    changes = {"checkpointing_steps": 1000, "validation_steps": 1, "max_train_steps": 400}
    code, _, _ = launch(folder, prepare=open_terminal, **changes).wait()
    assert code == 128 + signal.SIGHUP
    assert checkpoints_in(folder) in (["checkpoint-2"], ["checkpoint-3"])


def test_second_interrupt_stops_without_saving(launch, sampling, tmp_path):
    folder = tmp_path / "run"
    running = launch(folder, sample_steps=2, **SAMPLES)
    running.wait_until(sampling[0].exists)
    for _ in range(2):
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    code, _, errors = running.wait()
    assert code == 130
    message = "interrupted; --resume_from_checkpoint latest resumes from the last checkpoint, if one exists"
    assert errors.splitlines()[-1] == f"train_unconditional: {message}"
    assert "Traceback" not in errors
    assert checkpoints_in(folder) == []


def test_latest_skips_a_damaged_checkpoint(train, finished, stopped_at, assert_same_run, capsys):
    folder = stopped_at(8)
    weights = folder / "checkpoint-8" / "unet" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    train(folder, checkpointing_steps=1, **RESUME)
    printed = capsys.readouterr().out
    assert f"warning: skipped {folder}/checkpoint-8: unet/{WEIGHTS} has changed since it was written" in printed
    assert f"resumed from {folder}/checkpoint-7, after step 7" in printed
    assert_same_run(folder, finished)


def rewrite(checkpoint, name, change):
    """Change a JSON file of a checkpoint, and its checksum."""
    file, checksums_file = checkpoint / name, checkpoint / "checksums.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    checksums_file.write_text(json.dumps(json.loads(checksums_file.read_text()) | {name: checksum(file)}))


def test_resumes_a_run_from_before_newer_settings(train, stopped_at, finished, assert_same_run):
    new = (
        *("skip_init", "zero_init_residual", "skip_lr_scale", "skip_scaling_options"),
        *("hidden_size", "mup_base_width", "mup_base_depth"),
    )
    folder = stopped_at(8)

    def forget_settings(state):
        assert [state["settings"].pop(name) for name in new] == [None] * len(new)
        assert state["settings"].pop("flow_shift") == 1.0

    rewrite(folder / "checkpoint-8", "state.json", forget_settings)
    entries = ("skip_init", "zero_init_residual", "mup_base_width", "mup_base_depth")
    rewrite(folder / "checkpoint-8", "unet/config.json", lambda config: [config.pop(name) for name in entries])
    train(folder, **RESUME)
    assert_same_run(folder, finished)


def test_rejects_checkpoints_of_older_versions(train, stopped_at):
    folder = stopped_at(3)
    rewrite(folder / "checkpoint-3", "state.json", lambda state: state.pop("format_version"))
    with pytest.raises(UserError, match=r"checkpoint-3 was written by another version .* \(format 1, this version"):
        train(folder, **RESUME)


def test_rejects_resuming_without_a_checkpoint(refused):
    assert "refused has no checkpoint to resume from; omit the flag to start a new run" in refused(**RESUME)


def test_changed_settings_need_permission(train, stopped_at, metrics_of):
    folder = stopped_at(8)
    before = (folder / "settings.json").read_text()
    changes = {"learning_rate": 0.02, "adam_beta1": 0.8, **RESUME}
    with pytest.raises(UserError, match=r"learning_rate was 0.01 and is 0.02.*pass the same settings, or --allow"):
        train(folder, **changes)
    with pytest.raises(UserError, match="checkpoint-8 is beyond the run's 7 steps: increase --max_train_steps or"):
        train(folder, max_train_steps=7, **RESUME)
    assert (folder / "settings.json").read_text() == before
    changes["allow_changed_settings"] = True
    train(folder, **changes, **{"no-use_ema": True})
    assert metrics_of(folder)[-1]["lr"] == 0.02
    train(folder, max_train_steps=20, **changes)  # with EMA weights again
    assert (folder / "checkpoint-20" / "unet_ema").is_dir()
    with pytest.raises(UserError, match="holds the weights of another model: skip_scaling was 'cs' and is 'ls'"):
        train(folder, max_train_steps=24, skip_scaling="ls", **changes)


def test_a_default_can_be_named(train, tmp_path):
    settings = {"model_config_name_or_path": None, "resolution": 8, "num_shapes": 20, "checkpointing_steps": 1}
    folder = train(tmp_path / "run", max_train_steps=1, **settings)
    train(folder, max_train_steps=2, model_type="uvit", hidden_size=256, **settings, **RESUME)
    with pytest.raises(UserError, match=r"weights of another model: .*; model was .UViTModel, .* is .ScaleLongUNet2D"):
        train(folder, max_train_steps=2, model_type="unet", **settings, **RESUME)


def test_batch_can_be_divided_differently(train, finished, stopped_at, metrics_of):
    folder = stopped_at(8)
    train(folder, train_batch_size=2, gradient_accumulation_steps=2, dataloader_num_workers=1, **RESUME)
    losses, expected = ([line["loss"] for line in metrics_of(run)] for run in (folder, finished))
    assert losses == pytest.approx(expected, abs=1e-5)


def test_data_can_be_moved_but_not_changed(train, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    shapes = Shapes(count=12, size=8)
    for k in range(len(shapes)):
        shapes.image(k).save(images / f"{k:02}.png")
    settings = {"num_shapes": None, "max_train_steps": 4}
    folder = train(tmp_path / "run", train_data_dir=images, **settings)
    moved = images.rename(tmp_path / "moved")
    settings |= {"max_train_steps": 8, "train_data_dir": moved, **RESUME}
    train(folder, **settings)
    (moved / "11.png").unlink()
    with pytest.raises(UserError, match=r"data was '.*12 images.*' and is '.*11 images.*'; data_fingerprint was"):
        train(folder, **settings)


def test_finished_run_can_be_resumed(train, finished, stopped_at, metrics_of):
    folder = stopped_at(16)
    shutil.rmtree(folder / "unet")  # as if it had been killed before it saved the pipeline
    train(folder, checkpointing_steps=1, **RESUME)
    weights, expected = (load_file(run / "unet" / WEIGHTS) for run in (folder, finished))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    assert metrics_of(folder) == metrics_of(finished)


def test_keeps_the_latest_checkpoints(train, tmp_path):
    folder = train(tmp_path / "run", max_train_steps=6, checkpointing_steps=2, checkpoints_total_limit=2)
    assert checkpoints_in(folder) == ["checkpoint-4", "checkpoint-6"]


def test_checkpoint_holds_models_and_no_code(finished):
    checkpoint = finished / "checkpoint-16"
    assert {path.suffix for path in checkpoint.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    for name in ("unet", "unet_ema"):
        assert UViTModel.from_pretrained(checkpoint, subfolder=name).skip_scaler.config.method == "cs"
    average = load_file(checkpoint / "unet_ema" / WEIGHTS)
    pipeline = ScaleLongUnconditionalPipeline.from_pretrained(finished)
    assert all(torch.equal(tensor, average[name]) for name, tensor in pipeline.unet.state_dict().items())


def limit_file_sizes():
    """Make writing fail as on a full disk: checkpoints do not fit into this, and logs do."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def test_full_disk_ends_the_run_and_keeps_the_last_checkpoint(launch, train, stopped_at):
    folder = stopped_at(4)
    for step in (1, 2, 3):
        shutil.rmtree(folder / f"checkpoint-{step}")
    code, _, errors = launch(folder, prepare=limit_file_sizes, **RESUME).wait()
    assert code == 1
    last = errors.splitlines()[-1]
    assert f"cannot write the checkpoint of step 8 in {folder}: " in last
    assert "File too large" in last
    assert last.endswith(f"the last checkpoint is {folder / 'checkpoint-4'}")
    assert checkpoints_in(folder) == ["checkpoint-4"]
    assert not list(folder.glob(".scalelong-partial-*"))
    train(folder, **RESUME)


@pytest.mark.parametrize("tracker", ["none", "tensorboard"])
def test_full_disk_without_a_checkpoint(launch, tmp_path, tracker):
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))  # noqa: E731
    options = {"max_train_steps": 400, "checkpointing_steps": 1000, "report_to": tracker}
    running = launch(tmp_path / "run", prepare=limit, **options)
    code, _, errors = running.wait()
    assert code == 1
    message = f"cannot write the log in {tmp_path / 'run'}: [Errno 27] File too large; there is no checkpoint"
    assert message in errors.splitlines()[-1]
    assert "Traceback" not in errors
