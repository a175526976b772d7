"""Locks of folders, with real processes that hold them, end and are killed."""

import json
import os
import signal
import threading
import time

import pytest

from scalelong_diffusers import locks
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.locks import LOCK_FILE, FolderLock


@pytest.fixture
def lock(tmp_path):
    lock = FolderLock(tmp_path / "run")
    yield lock
    lock.release()


def test_leaves_nothing_behind(lock):
    lock.acquire()
    lock.acquire()
    assert json.loads(lock.file.read_text())["pid"] == os.getpid()
    lock.release()
    lock.release()
    assert not lock.folder.exists()
    lock.folder.mkdir()
    lock.acquire()
    lock.release()
    assert list(lock.folder.iterdir()) == []


def test_later_lock_of_the_same_process_replaces_the_earlier_one(lock):
    lock.acquire()
    later = FolderLock(lock.folder)
    later.acquire()
    lock.release()  # does nothing
    assert lock.file.exists()
    later.release()
    assert not lock.file.exists()


def test_names_the_folder_on_a_full_disk(lock, full_disk):
    with full_disk(0), pytest.raises(UserError, match=rf"cannot lock {lock.folder}: .*File too large"):
        lock.acquire()
    assert list(lock.folder.iterdir()) == []
    lock.acquire()


@pytest.mark.slow
def test_second_process_is_told_who_holds_the_folder(lock, lock_holder):
    with lock_holder(lock.folder) as process:
        message = rf"run is in use by process {process.pid} on .*, since .*: wait until it has ended, or use another"
        with pytest.raises(UserError, match=message):
            lock.acquire()
        assert json.loads(lock.file.read_text())["pid"] == process.pid
        process.stdin.close()
        process.wait()
        assert not lock.file.exists()
    lock.acquire()


@pytest.mark.slow
def test_killed_holder_does_not_block(lock, lock_holder):
    """Not even while a process that it forked is alive."""
    with lock_holder(lock.folder, "--worker") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        start = time.monotonic()
        lock.acquire()
        assert time.monotonic() - start < 1
        assert json.loads(lock.file.read_text())["pid"] == os.getpid()
        os.kill(int(process.first_line), signal.SIGKILL)


@pytest.mark.parametrize("can_lock", [True, False])
def test_holder_on_another_host_counts_while_it_renews_the_file(lock, monkeypatch, can_lock):
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.1)
    if not can_lock:
        monkeypatch.setattr(locks, "fcntl", None)
    lock.folder.mkdir()
    lock.file.write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": "today"}))
    ended = threading.Event()

    def renew():
        while not ended.wait(0.02):
            os.utime(lock.file)

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(UserError, match="in use by process 7 on elsewhere, since today"):
        lock.acquire()
    ended.set()
    thread.join()
    lock.acquire()
    before = lock.file.stat().st_mtime_ns
    time.sleep(0.3)
    assert lock.file.stat().st_mtime_ns > before


def test_damaged_lock_file_does_not_block(lock):
    lock.folder.mkdir()
    for content in ("", "{", "[]", '{"pid": 5}'):
        lock.file.write_text(content)
        lock.acquire()
        lock.release()


def test_follows_no_link(lock, tmp_path):
    (tmp_path / "notes").write_text("notes")
    lock.folder.mkdir()
    (lock.folder / LOCK_FILE).symlink_to(tmp_path / "notes")
    with pytest.raises(UserError, match=r"cannot lock .*run: "):
        lock.acquire()
    assert (tmp_path / "notes").read_text() == "notes"
