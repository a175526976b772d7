"""A run that is killed and resumed is the run that was never killed, bit for bit."""

import json
import os
import shutil
import signal
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from scalelong_diffusers import ScaleLongUnconditionalPipeline
from scalelong_diffusers.data.shapes import Shapes
from scalelong_diffusers.training import TrainingStopped


WEIGHTS = "diffusion_pytorch_model.safetensors"


def wait_for(condition, launched, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert launched.process.poll() is None, launched.process.communicate()
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def lines_of(folder) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.fixture
def unbroken(train, tmp_path):
    def run(**changes):
        return train(tmp_path / "unbroken", **changes)

    return run


def cut_off_after(folder, step):
    """As if the run had been killed later on, but before its next checkpoint."""
    for checkpoint in folder.glob("checkpoint-*"):
        if int(checkpoint.name.split("-")[1]) > step:
            shutil.rmtree(checkpoint)


# 27 images to train on and 4 in each step, so that step 7 (28 images) is the first across the end of an epoch.
@pytest.mark.parametrize(
    ("at", "changes"),
    [
        (4, {}),
        (7, {}),
        (8, {"logging_steps": 3}),
        (11, {"gradient_accumulation_steps": 2, "train_batch_size": 2}),
        (6, {"skip_scaling": "ls", "skip_scaling_warmup_steps": 9, "lr_scheduler": "cosine"}),
        (13, {"no-use_ema": True, "lr_scheduler": "cosine_with_restarts", "lr_num_cycles": 3}),
        (2, {"model_config_name_or_path": None, "model_type": "unet", "max_train_steps": 4}),
    ],
    ids=str,
)
def test_resumed_at_any_step(train, unbroken, assert_same_run, tmp_path, at, changes):
    changes = {"checkpointing_steps": 1, **changes}
    expected = unbroken(**changes)
    broken = shutil.copytree(expected, tmp_path / "broken")
    cut_off_after(broken, at)
    train(broken, resume_from_checkpoint="latest", **changes)
    assert_same_run(broken, expected)


@pytest.mark.parametrize(("workers", "processes"), [(0, 1), (2, 1), (2, 2)])
@pytest.mark.slow
def test_killed_while_it_trains(launch, assert_same_run, tmp_path, workers, processes):
    """Between two steps or within one, as it comes, and after a checkpoint."""
    changes = {"dataloader_num_workers": workers, "processes": processes, "train_batch_size": 4 // processes}
    expected = tmp_path / "unbroken"
    other = launch(expected, **changes)
    broken = tmp_path / "broken"
    running = launch(broken, max_train_steps=400, **changes)
    wait_for(lambda: lines_of(broken) > 10, running)
    running.kill()
    code, _, errors = launch(broken, resume_from_checkpoint="latest", **changes).wait()
    assert code == 0, errors
    assert other.wait()[0] == 0
    steps = [line["step"] for line in map(json.loads, (broken / "metrics.jsonl").read_text().splitlines())]
    assert steps == list(range(1, 17))
    assert_same_run(broken, expected)


def test_killed_while_it_writes_a_checkpoint(launch, train, unbroken, assert_same_run, tmp_path):
    expected = unbroken()
    broken = tmp_path / "broken"
    running = launch(broken, max_train_steps=400, checkpointing_steps=1)
    wait_for(lambda: lines_of(broken) > 4 and list(broken.glob(".partial-*")), running)
    running.kill()
    assert list(broken.glob(".partial-*")), "it was killed between two checkpoints after all"
    train(broken, resume_from_checkpoint="latest")
    assert not list(broken.glob(".partial-*"))
    assert_same_run(broken, expected)


# With validation in every step it is there that most signals arrive.
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_signal_saves_and_says_how_to_go_on(launch, train, unbroken, tmp_path, number, processes):
    expected = unbroken()
    broken = tmp_path / "broken"
    changes = {"checkpointing_steps": 1000, "dataloader_num_workers": 2, "validation_steps": 1}
    changes |= {"train_batch_size": 4 // processes, "processes": processes}
    running = launch(broken, max_train_steps=400, **changes)
    wait_for(lambda: lines_of(broken) > 2, running)
    # As a terminal and a scheduler do: to all processes of the job, one after the other.
    family = [running.process.pid, *(child.pid for child in psutil.Process(running.process.pid).children())]
    for pid in family if processes == 1 else family[1:]:
        os.kill(pid, number)
        time.sleep(0.01)
    code, _, errors = running.wait()
    if processes > 1:
        errors = "\n".join(line for line in errors.splitlines() if "stopped by" in line)
        assert len(errors.splitlines()) == 1
    else:
        assert code == 128 + number
    (checkpoint,) = broken.glob("checkpoint-*")
    assert f"stopped by {number.name} after step {checkpoint.name.split('-')[1]} of 400" in errors.splitlines()[-1]
    assert "--resume_from_checkpoint latest goes on" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    if int(checkpoint.name.split("-")[1]) < 16:
        train(broken, resume_from_checkpoint="latest")
        weights, wanted = (load_file(path / "checkpoint-16" / "unet" / WEIGHTS) for path in (broken, expected))
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0 if processes == 1 else 1e-3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_a_signal_to_one_process_while_it_samples_stops_all(launch, tmp_path, rank):
    """The others can not know of it until the next step, after which all of them stop."""
    settings = {"sample_steps": 2, "num_samples": 4, "num_inference_steps": 200, "checkpointing_steps": 1000}
    running = launch(tmp_path / "run", processes=2, max_train_steps=400, **settings)
    wait_for(lambda: lines_of(tmp_path / "run") == 1, running)
    time.sleep(0.2)
    os.kill(psutil.Process(running.process.pid).children()[rank].pid, signal.SIGTERM)
    _, _, errors = running.wait(timeout=90)
    assert "stopped by SIGTERM after step" in errors
    assert list((tmp_path / "run").glob("checkpoint-*"))


def test_a_second_interrupt_ends_at_once(launch, tmp_path):
    settings = {"sample_steps": 2, "num_samples": 4, "num_inference_steps": 100_000 // 100}
    running = launch(tmp_path / "run", **settings)
    wait_for(lambda: lines_of(tmp_path / "run") == 1, running)
    time.sleep(0.3)
    os.kill(running.process.pid, signal.SIGINT)
    time.sleep(0.1)
    os.kill(running.process.pid, signal.SIGINT)
    code, _, errors = running.wait(timeout=60)
    assert code == 130
    assert (
        errors.strip()
        .splitlines()[-1]
        .endswith("--resume_from_checkpoint latest goes on from the last checkpoint, if there is one")
    )
    assert "Traceback" not in errors


@pytest.fixture
def two_checkpoints(train, tmp_path):
    return train(tmp_path / "run", max_train_steps=8)


def test_latest_passes_over_a_broken_checkpoint_and_says_so(train, two_checkpoints, unbroken, assert_same_run, capsys):
    weights = two_checkpoints / "checkpoint-8" / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    train(two_checkpoints, resume_from_checkpoint="latest")
    said = capsys.readouterr().out
    assert "checkpoint-8 is passed over: unet/diffusion_pytorch_model.safetensors is not what was written" in said
    assert "checkpoint-4: going on after step 4" in said
    assert_same_run(two_checkpoints, unbroken())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
        (lambda folder: (folder / "checksums.json").write_text("{"), "its checksums.json can not be read"),
    ],
)
def test_a_broken_checkpoint_is_not_resumed_from(train, two_checkpoints, damage, reason):
    damage(two_checkpoints / "checkpoint-8")
    with pytest.raises(TrainingStopped, match=reason):
        train(two_checkpoints, resume_from_checkpoint="checkpoint-8")


@pytest.mark.parametrize("which", ["latest", "checkpoint-3"])
def test_resuming_where_there_is_nothing_is_an_error(refused, which):
    assert "to resume from" in refused(resume_from_checkpoint=which)


def test_other_settings_are_named_and_refused(train, two_checkpoints, metrics_of):
    kept = (two_checkpoints / "settings.json").read_text()
    changes = {"learning_rate": 0.02, "adam_beta1": 0.8, "resume_from_checkpoint": "latest"}
    with pytest.raises(TrainingStopped) as stopped:
        train(two_checkpoints, **changes)
    assert "learning_rate was 0.01 and is 0.02" in str(stopped.value)
    assert "adam_beta1 was 0.9 and is 0.8" in str(stopped.value)
    assert (two_checkpoints / "settings.json").read_text() == kept
    train(two_checkpoints, allow_changed_settings=True, **changes, **{"no-use_ema": True})
    assert metrics_of(two_checkpoints)[-1]["lr"] == 0.02
    train(two_checkpoints, allow_changed_settings=True, max_train_steps=20, **changes)  # averages again
    with pytest.raises(TrainingStopped, match="holds the weights of another model: skip_scaling was 'cs' and is 'ls'"):
        train(two_checkpoints, allow_changed_settings=True, skip_scaling="ls", **changes)
    with pytest.raises(TrainingStopped, match=r"data was 'the built-in shapes, 30 images.* and is "):
        train(two_checkpoints, num_shapes=40, resume_from_checkpoint="latest")


def test_what_may_change_is_not_refused(train, two_checkpoints, unbroken, metrics_of):
    changes = {"train_batch_size": 2, "gradient_accumulation_steps": 2, "dataloader_num_workers": 1}
    train(two_checkpoints, resume_from_checkpoint="latest", **changes)
    losses, expected = ([line["loss"] for line in metrics_of(folder)] for folder in (two_checkpoints, unbroken()))
    assert losses == pytest.approx(expected, abs=1e-5)


def test_the_pictures_may_have_moved_but_not_changed(train, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    shapes = Shapes(count=12, size=8)
    for k in range(len(shapes)):
        shapes.image(k).save(pictures / f"{k:02}.png")
    settings = {"num_shapes": None, "max_train_steps": 4}
    folder = train(tmp_path / "run", train_data_dir=pictures, **settings)
    moved = pictures.rename(tmp_path / "moved")
    settings |= {"max_train_steps": 8, "resume_from_checkpoint": "latest", "train_data_dir": moved}
    train(folder, **settings)
    (moved / "11.png").unlink()
    with pytest.raises(TrainingStopped, match=r"data was '.*12 images.*' and is '.*11 images.*'; data_finger"):
        train(folder, **settings)


def test_an_earlier_checkpoint_is_not_resumed_from_while_there_are_later_ones(train, two_checkpoints):
    with pytest.raises(TrainingStopped, match="later checkpoints than checkpoint-4: move checkpoint-8 away first"):
        train(two_checkpoints, resume_from_checkpoint="checkpoint-4")
    shutil.rmtree(two_checkpoints / "checkpoint-8")
    train(two_checkpoints, resume_from_checkpoint="checkpoint-4")


def test_with_a_schedule_that_ends_its_length_is_a_setting(train, tmp_path):
    folder = train(tmp_path / "run", lr_scheduler="cosine", max_train_steps=8)
    with pytest.raises(TrainingStopped, match="max_train_steps was 8 and is 16"):
        train(folder, lr_scheduler="cosine", resume_from_checkpoint="latest")


def test_a_finished_run_resumed_is_the_same(train, two_checkpoints, metrics_of):
    weights = two_checkpoints / "unet" / "diffusion_pytorch_model.safetensors"
    before, log = load_file(weights), metrics_of(two_checkpoints)
    shutil.rmtree(two_checkpoints / "unet")  # as if it had been killed before it saved the pipeline
    train(two_checkpoints, max_train_steps=8, resume_from_checkpoint="latest")
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_file(weights).items())
    assert metrics_of(two_checkpoints) == log


def test_the_limit_keeps_the_last_ones(train, tmp_path):
    folder = train(tmp_path / "run", checkpointing_steps=2, checkpoints_total_limit=2)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-14", "checkpoint-16"]
    # A broken one that is newer does not push out the one that is written.
    file = folder / "checkpoint-16" / "state.json"
    file.write_text(file.read_text() + " ")
    train(folder, max_train_steps=15, checkpoints_total_limit=1, resume_from_checkpoint="latest")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-15"]


def test_a_checkpoint_runs_no_code_when_it_is_loaded(two_checkpoints):
    kinds = {path.suffix for path in (two_checkpoints / "checkpoint-8").rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json"}


def test_a_checkpoint_holds_models_that_load(two_checkpoints):
    from scalelong_diffusers import UViTModel

    for name in ("unet", "unet_ema"):
        model = UViTModel.from_pretrained(two_checkpoints / "checkpoint-8", subfolder=name)
        assert model.skip_scaler.config.method == "cs"
    averaged = load_file(two_checkpoints / "checkpoint-8" / "unet_ema" / "diffusion_pytorch_model.safetensors")
    pipeline = ScaleLongUnconditionalPipeline.from_pretrained(two_checkpoints)
    assert all(torch.equal(tensor, averaged[name]) for name, tensor in pipeline.unet.state_dict().items())


def test_a_disk_that_is_full_ends_the_run_and_keeps_the_last_checkpoint(launch, train, tmp_path, tiny_config):
    """Files are limited to less than an optimizer's state has; the checkpoint before was written without the limit."""
    folder = train(tmp_path / "run", max_train_steps=4)
    script = (
        "import resource, runpy, sys; limit = 40_000; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    running = launch(folder, resume_from_checkpoint="latest", python_code=script)
    code, _, errors = running.wait()
    assert code == 1
    last = errors.strip().splitlines()[-1]
    assert "the checkpoint of step 8 could not be written" in last
    assert "File too large" in last
    assert last.endswith(f"the last checkpoint is {folder / 'checkpoint-4'}")
    assert [path.name for path in folder.glob("*checkpoint*")] == ["checkpoint-4"]
    assert not list(folder.glob(".partial-*"))
    train(folder, resume_from_checkpoint="latest")
