"""Checkpoints on disk: complete or absent, also if the process is killed while it writes, and verified when read."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import PARTIAL, atomic_write, remove_leftovers, write_json
from scalelong_diffusers.training.checkpoints import Checkpoints, damage


def write_files(folder: Path):
    (folder / "unet").mkdir()
    (folder / "unet" / "weights").write_bytes(b"weights")
    (folder / "state.json").write_text("{}")


def die_while_writing(folder: Path):
    (folder / "unet").mkdir()
    (folder / "unet" / "weights").write_bytes(b"weig")
    os.kill(os.getpid(), signal.SIGKILL)


def die_between_renames(folder: Path):
    """Replace a checkpoint, and die when the old one is moved away and the new one is not in place."""
    rename = os.rename
    calls = []

    def count(*paths):
        calls.append(paths)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*paths)

    os.rename = count
    Checkpoints(folder).save(2, write_files)


def exit_code_of(function, *arguments) -> int:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_killed_while_writing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(1, write_files)
    assert exit_code_of(checkpoints.save, 2, die_while_writing) == -signal.SIGKILL
    assert names_in(tmp_path) == [".scalelong-partial-2", "checkpoint-1"]
    assert checkpoints.find("latest") == (first, [])
    remove_leftovers(tmp_path)
    assert names_in(tmp_path) == ["checkpoint-1"]


@pytest.mark.slow
def test_killed_while_replacing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(1, write_files)
    checkpoints.save(2, write_files)
    assert exit_code_of(die_between_renames, tmp_path) == -signal.SIGKILL
    assert checkpoints.find("latest") == (first, [])
    remove_leftovers(tmp_path)
    assert names_in(tmp_path) == ["checkpoint-1"]
    assert damage(checkpoints.save(2, write_files)) is None


def test_failed_write_leaves_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path, limit=1)
    first = checkpoints.save(1, write_files)

    def fail(folder):
        write_files(folder)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        checkpoints.save(2, fail)
    assert list(tmp_path.iterdir()) == [first]


def test_finds_damage(tmp_path):
    path = Checkpoints(tmp_path).save(1, write_files)
    assert damage(path) is None
    (path / "unet" / "weights").write_bytes(b"weightz")
    assert damage(path) == "unet/weights has changed since it was written"
    (path / "unet" / "weights").unlink()
    assert damage(path) == "unet/weights is missing"
    (path / "checksums.json").unlink()
    assert "checksums.json cannot be read: [Errno 2] No such file" in damage(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "checksums.json is not valid JSON: Expecting"),
        ("[]", r"checksums.json must hold a JSON object, got \[\]"),
        ("null", "checksums.json must hold a JSON object, got None"),
        ("[" * 10_000 + "]" * 10_000, "checksums.json is not valid JSON: maximum recursion depth"),
        ("{}", "checksums.json does not list state.json"),
        ('{"state.json": 5}', "state.json has changed since it was written"),
    ],
    ids=("cut", "list", "null", "nested", "empty", "number"),
)
def test_rejects_checksums_that_it_did_not_write(tmp_path, content, message):
    checkpoints = Checkpoints(tmp_path)
    (checkpoints.save(1, write_files) / "checksums.json").write_text(content)
    with pytest.raises(UserError, match=message):
        checkpoints.find("latest")


def test_latest_skips_damaged_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (900, 1000, 1100):
        checkpoints.save(step, write_files)
    assert checkpoints.find("latest") == (tmp_path / "checkpoint-1100", [])  # the number counts, not the name
    (tmp_path / "checkpoint-1100" / "state.json").write_text("[]")
    found, skipped = checkpoints.find("latest")
    assert found.name == "checkpoint-1000"
    assert skipped == [f"skipped {tmp_path}/checkpoint-1100: state.json has changed since it was written"]
    for step in (900, 1000):
        (tmp_path / f"checkpoint-{step}" / "state.json").unlink()
    with pytest.raises(UserError, match=r"has no complete checkpoint: .*1100.*1000.*900.*; remove them to start"):
        checkpoints.find("latest")


def test_named_checkpoint_must_be_complete_and_the_latest(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(UserError, match="has no checkpoint to resume from; omit the flag to start a new run"):
        checkpoints.find("latest")
    with pytest.raises(UserError, match=r"there is no checkpoint checkpoint-3; .* has no checkpoints"):
        checkpoints.find("checkpoint-3")
    first, second = checkpoints.save(1, write_files), checkpoints.save(2, write_files)
    assert checkpoints.find("checkpoint-2") == checkpoints.find(str(second)) == (second, [])
    with pytest.raises(UserError, match="has later checkpoints than checkpoint-1: move checkpoint-2 away first"):
        checkpoints.find("checkpoint-1")
    (second / "state.json").write_text("[]")
    with pytest.raises(UserError, match=r"cannot resume from .*checkpoint-2: state.json has changed.*has checkpoint"):
        checkpoints.find("checkpoint-2")
    assert checkpoints.find("checkpoint-1") == (first, [])


def test_keeps_the_latest_checkpoints_and_other_files(tmp_path):
    for name in ("checkpoint-best", "checkpoint-7.bak", "samples"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-9").write_text("a file")
    checkpoints = Checkpoints(tmp_path, limit=2)
    for step in (1, 2, 10):
        checkpoints.save(step, write_files)
    assert checkpoints.steps() == [2, 10]
    # The checkpoint that was just written stays, even if there is a damaged one of a later step.
    Checkpoints(tmp_path, limit=1).save(5, write_files)
    assert names_in(tmp_path) == ["checkpoint-5", "checkpoint-7.bak", "checkpoint-9", "checkpoint-best", "samples"]


def test_a_link_to_another_file_is_not_followed(tmp_path, monkeypatch):
    other, file = tmp_path / "other", tmp_path / "settings.json"
    other.mkdir()
    write_json(file, {"a": 1})
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / f"{PARTIAL}guessed").symlink_to(other)
    with pytest.raises(UserError, match=r"settings\.json cannot be written: .*File exists"):
        write_json(file, {"a": 2})
    assert (list(other.iterdir()), json.loads(file.read_text())) == ([], {"a": 1})


@pytest.mark.slow
def test_only_own_leftovers_of_a_killed_write_are_removed(tmp_path):
    """Writers such as safetensors make another temporary file next to the path that they receive."""

    def die(partial: Path):
        (partial.parent / ".tmpAbC123").write_bytes(b"weig")
        os.kill(os.getpid(), signal.SIGKILL)

    users = [".part", ".settings.json.0123456789abcdef.part", ".tmp-notes", ".tmpAbC123", "settings.json"]
    for name in users:
        (tmp_path / name).write_text("mine")
    assert exit_code_of(atomic_write, tmp_path / "settings.json", die) == -signal.SIGKILL
    assert len(names_in(tmp_path)) == len(users) + 1
    remove_leftovers(tmp_path)
    assert names_in(tmp_path) == users
    assert (tmp_path / "settings.json").read_text() == "mine"


def test_written_files_have_the_usual_permissions(tmp_path):
    write_json(tmp_path / "written.json", {})
    (tmp_path / "touched").touch()
    assert (tmp_path / "written.json").stat().st_mode == (tmp_path / "touched").stat().st_mode


def test_json_is_written_atomically(tmp_path):
    file = tmp_path / "settings.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert file.read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [file]


def test_names_the_file_on_a_full_disk(tmp_path, full_disk):
    with (
        full_disk(100),
        pytest.raises(UserError, match=rf"{tmp_path}/settings\.json cannot be written: .*File too large"),
    ):
        write_json(tmp_path / "settings.json", ["many words"] * 100)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", range(1, 8))
def test_keeps_as_many_checkpoints_as_the_limit(tmp_path, limit):
    checkpoints = Checkpoints(tmp_path, limit)
    for step in range(1, 11):
        checkpoints.save(step, write_files)
        assert checkpoints.steps() == list(range(max(1, step - limit + 1), step + 1))
