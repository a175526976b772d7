"""Writing checkpoints: a process that dies in the midst of it, what is thrown away, and what is left alone."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from scalelong_diffusers.files import write_json
from scalelong_diffusers.training.checkpoints import Checkpoints, damage


def write_two_files(folder: Path):
    (folder / "unet").mkdir()
    (folder / "unet" / "weights").write_bytes(b"weights")
    (folder / "state.json").write_text("{}")


def die_while_writing(folder: Path):
    (folder / "unet").mkdir()
    (folder / "unet" / "weights").write_bytes(b"weig")
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_process_of_its_own(function, *arguments) -> int:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def die_between(moment: str, folder: Path):
    """Save where there is a checkpoint of the step already, and die at a system call of it."""
    call = getattr(os, moment)
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        if moment == "rename" and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    setattr(os, moment, counted)
    Checkpoints(folder).save(2, write_two_files)


def test_a_process_that_dies_while_it_writes(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(1, write_two_files)
    assert in_a_process_of_its_own(checkpoints.save, 2, die_while_writing) == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob(".*")] == [".partial-2"]
    assert checkpoints.find("latest") == (first, [])
    checkpoints.remove_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_process_that_dies_while_it_replaces_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(1, write_two_files)
    checkpoints.save(2, write_two_files)
    assert in_a_process_of_its_own(die_between, "rename", tmp_path) == -signal.SIGKILL
    assert checkpoints.find("latest") == (first, [])
    checkpoints.remove_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert damage(checkpoints.save(2, write_two_files)) is None


def test_a_write_that_fails_leaves_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path, limit=1)
    first = checkpoints.save(1, write_two_files)

    def fail(folder):
        write_two_files(folder)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        checkpoints.save(2, fail)
    assert list(tmp_path.iterdir()) == [first]


def test_a_file_of_another_content_is_noticed(tmp_path):
    path = Checkpoints(tmp_path).save(1, write_two_files)
    assert damage(path) is None
    (path / "unet" / "weights").write_bytes(b"weightz")
    assert damage(path) == "unet/weights is not what was written"


def test_what_is_no_checkpoint_is_left_alone(tmp_path):
    for name in ("checkpoint-best", "checkpoint-7.bak", "samples"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-9").write_text("a file")
    checkpoints = Checkpoints(tmp_path, limit=1)
    for step in (1, 2, 10):
        checkpoints.save(step, write_two_files)
    assert checkpoints.steps() == [10]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoint-best", "checkpoint-7.bak", "samples", "checkpoint-9", "checkpoint-10"}


def test_steps_are_numbers(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (900, 1000):
        checkpoints.save(step, write_two_files)
    assert checkpoints.find("latest")[0].name == "checkpoint-1000"


def test_json_is_written_whole(tmp_path):
    file = tmp_path / "settings.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert file.read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [file]
