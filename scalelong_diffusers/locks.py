"""A lock that keeps a second process from writing into the same folder."""

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.processes import run_on_main_process


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


LOCK_FILE = ".scalelong-lock"
HEARTBEAT_SECONDS = 5.0

_held: dict[tuple[int, Path], "FolderLock"] = {}  # by process, since a forked process does not hold its parent's locks


class FolderLock:
    """
    The right to write into a folder, which other processes do not get until this one releases it or ends.

    The lock file is locked with the operating system, which unlocks it however the process ends. Some shared file
    systems do not lock for other hosts. There, a holder is alive if it keeps renewing the file's modification time.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.file = folder / LOCK_FILE

    def acquire(self):
        """Take the lock, or raise a `UserError` that names the holder. An earlier lock of this process is replaced."""
        key = (os.getpid(), self.folder.resolve())
        if _held.get(key) is self:
            return
        if key in _held:  # of a run that failed
            _held[key].release()
        self._is_new = not self.folder.exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._key, self._descriptor = key, self._open()
            self._write_holder()
        except OSError as error:
            raise UserError(f"cannot lock {self.folder}: {error}") from error
        self._ended = threading.Event()
        threading.Thread(target=self._renew, name="folder lock", daemon=True).start()
        _held[key] = self

    def release(self):
        """
        Give the lock back and remove its file, and the folder if `acquire` made it and it is still empty.

        Does nothing if this process does not hold the lock.
        """
        if _held.get((os.getpid(), self.folder.resolve())) is not self:
            return
        del _held[self._key]
        self._ended.set()
        self.file.unlink(missing_ok=True)
        os.close(self._descriptor)
        if self._is_new:
            with suppress(OSError):
                self.folder.rmdir()

    def _open(self) -> int:
        while True:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            try:
                is_locked, holder = _lock(descriptor), _read_holder(descriptor)
                is_from_here = is_locked and holder is not None and holder["host"] == socket.gethostname()
                if is_locked is False or (holder is not None and not is_from_here and self._is_renewed()):
                    raise UserError(self._in_use(holder))
                # The last holder may have removed the file after it was opened here.
                if self.file.exists() and os.path.samestat(os.fstat(descriptor), os.stat(self.file)):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _write_holder(self):
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now()}
        try:
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, json.dumps(holder).encode())
        except OSError:
            self.file.unlink(missing_ok=True)
            os.close(self._descriptor)
            raise

    def _renew(self):
        ended = self._ended
        while not ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # the folder may have been removed
                os.utime(self.file)

    def _is_renewed(self) -> bool:
        """Watch whether the holder renews the file's modification time."""
        before = self._modified()
        deadline = time.monotonic() + 3 * HEARTBEAT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(HEARTBEAT_SECONDS / 5)
            if self._modified() != before:
                return True
        return False

    def _modified(self) -> int | None:
        try:
            with open(self.file, "rb") as file:  # opening it updates what a network file system has cached
                return os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _in_use(self, holder: dict[str, Any] | None) -> str:
        who = "another process" if holder is None else "process {pid} on {host}, since {since}".format(**holder)
        return f"{self.folder} is in use by {who}: wait until it has ended, or use another folder"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in the main process. All processes enter together, and fail together."""
    lock = FolderLock(folder)
    run_on_main_process(lock.acquire)
    try:
        yield
    finally:
        lock.release()


def _lock(descriptor: int) -> bool | None:
    """Lock a file for this process. Returns False if another process holds it, and None if files cannot be locked."""
    if fcntl is None:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _read_holder(descriptor: int) -> dict[str, Any] | None:
    """Return host, process and start of the holder, or None if the file is new or damaged."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        holder = json.loads(os.read(descriptor, 1000))
        return {name: holder[name] for name in ("host", "pid", "since")}
    except (ValueError, TypeError, KeyError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@atexit.register
def _release_all():
    for lock in list(_held.values()):
        lock.release()
