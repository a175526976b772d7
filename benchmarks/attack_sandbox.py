"""What a case of the attack needs: its own folder, commands in forked processes, and a watch on what they do."""

import errno
import os
import random
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


# Seconds after which a case or a command counts as hanging.
TIME_LIMIT = 60
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_FILE_CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
_PROGRAMS = ("os.exec", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen")
# As commands of scalelong and, started by `Command`, the scripts begin their error messages.
_PROGRAM_NAME = re.compile(r"(command|scalelong)[\w ]*: ")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Failure(Exception):
    """The package broke a promise. The message says which one."""


class TimeLimit(BaseException):
    """A case hangs. No `except Exception` of the package catches this."""


@dataclass
class Case:
    """
    One case, which its kind, its seed and its number determine.

    Args:
        parts: folder of the models and datasets that all cases read.
        folder: folder of this case, in which it may write.
        count: how many attacks the case made.
    """

    kind: str
    seed: int
    number: int
    parts: Path
    folder: Path
    count: int = 1

    def __post_init__(self):
        self.random = random.Random(f"{self.seed} {self.kind} {self.number}")

    def note(self, text: str):
        """Note what the case does, for the report, in a file that remains if it ends the process."""
        with open(self.folder.with_suffix(".notes"), "a") as file:
            file.write(f"{text}\n")

    def notes(self) -> str:
        """Return and forget all notes."""
        file = self.folder.with_suffix(".notes")
        text = ", ".join(file.read_text().splitlines()) if file.exists() else ""
        file.unlink(missing_ok=True)
        return text


class Watch:
    """
    An audit hook that refuses and notes writes outside of the allowed folders, and programs, connections and code.

    Python calls it for its own functions only; it does not see what C++ and Rust do.
    """

    def __init__(self):
        self.allowed: tuple[str, ...] = ()
        self.found: Path | None = None  # what was found, in a file that forked processes share
        self.counted: str | None = None  # changes in this folder are counted
        self.changes = 0
        self.kill_at: tuple[int, int] | None = None  # number of a change, and signal
        self.full_at: int | None = None  # number of the change at which the disk is full
        self._is_busy = False

    def install(self):
        sys.addaudithook(self._note)

    @contextmanager
    def on(self, case: Case, *also_allowed: Path):
        """Watch the block, and raise a `Failure` for what it did outside of the case's folder."""
        self.found = case.folder.with_suffix(".found")
        self.allowed = tuple(map(os.path.realpath, (case.folder, *also_allowed, "/dev")))
        try:
            yield
        finally:
            self.allowed = ()
            if self.found.exists():
                found = self.found.read_text()
                self.found.unlink()
                raise Failure(found.splitlines()[0])

    def _note(self, event: str, arguments: tuple):
        if self._is_busy or not (self.allowed or self.counted):
            return
        is_connection = event == "socket.connect" and isinstance(arguments[1], tuple)
        is_code = event == "exec" and arguments[0].co_filename.startswith(self.allowed)
        if self.allowed and (event in _PROGRAMS or is_connection or is_code):
            self._refuse(f"{event} {arguments!r:.200}")
        elif event in _FILE_CHANGES:
            for path in _changed_paths(event, arguments):
                self._note_change(event, os.path.realpath(os.fsdecode(path)))

    def _note_change(self, event: str, path: str):
        if self.counted is not None and path.startswith(self.counted):
            self.changes += 1
            if self.kill_at is not None and self.changes == self.kill_at[0]:
                os.kill(os.getpid(), self.kill_at[1])
            if self.full_at is not None and self.changes >= self.full_at and event in ("open", "os.mkdir"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if self.allowed and not path.startswith(self.allowed):
            self._refuse(f"{event} {path}, which is outside of the named folders")

    def _refuse(self, what: str):
        self._is_busy = True
        with open(self.found, "a") as file:
            file.write(f"{what}\n")
        self._is_busy = False
        raise PermissionError(errno.EPERM, f"refused by the attack: {what}")


WATCH = Watch()


def _changed_paths(event: str, arguments: tuple) -> list:
    if event == "open":
        paths = [arguments[0]] if arguments[2] & _WRITE_FLAGS else []
    elif event == "os.rename":
        paths = [] if arguments[2:] != (-1, -1) else arguments[:2]
    elif event in ("os.link", "os.symlink"):
        paths = [arguments[1]]
    else:
        paths = [] if event in ("os.remove", "os.rmdir") and arguments[1] != -1 else [arguments[0]]
    return [path for path in paths if isinstance(path, str | bytes | os.PathLike)]


@contextmanager
def time_limit(seconds: float):
    """Raise `TimeLimit` in the block after some seconds."""

    def stop(number, frame):
        raise TimeLimit(f"it took more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_message(text: str):
    """Raise a `Failure` unless a message of an error is one printable line."""
    line = " ".join(text.split())  # as commands print it
    if not line:
        raise Failure("the message of the error is empty")
    if found := _CONTROL_CHARACTERS.search(line):
        raise Failure(f"the message has the control character {found[0]!r}: {line!r:.300}")


Main = Callable[[list[str]], int | None]


class Command:
    """
    A command in forked processes, as a launcher starts them but without importing everything again.

    Args:
        main: function of the command line that returns an exit code or None.
        processes: number of processes that share the work.
        prepare: called in each process with its rank before `main`.
    """

    def __init__(
        self,
        main: Main,
        arguments: Sequence[object],
        output: Path,
        processes: int = 1,
        prepare: Callable[[int], object] = lambda rank: None,
    ):
        self.output = output
        self.output.mkdir()
        self.codes: dict[int, int | None] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(processes):
            environment = {}
            if processes > 1:
                environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            pid = os.fork()
            if pid == 0:
                _run_forked(main, [str(word) for word in arguments], environment, output / str(rank), prepare, rank)
            self.codes[pid] = None

    @property
    def code(self) -> int | None:
        """The exit code of the first process that failed, 0 if all succeeded, None if one is running."""
        codes = list(self.codes.values())
        return None if None in codes else next(filter(None, codes), 0)

    @property
    def text(self) -> str:
        """Everything that the processes have printed."""
        return "".join(file.read_text(errors="replace") for file in sorted(self.output.iterdir()))

    def wait(self, seconds: float = TIME_LIMIT) -> int | None:
        """Wait for the end, at most some seconds, and return `code`."""
        deadline = time.monotonic() + seconds
        while self._poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.code

    def finish(self, seconds: float = TIME_LIMIT) -> int:
        """Wait for the end of all processes, and return `code`. If they take too long, they hang."""
        self.wait(seconds)
        if self.code is None:
            self.kill()
            raise Failure(f"the command hangs: {self.text[-500:]!r}")
        return self.code

    def send(self, number: int, with_workers: bool = False):
        """Send a signal to all processes, and to their data workers as a terminal does."""
        for process in self._family() if with_workers else map(psutil.Process, self._running()):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self):
        """Kill all processes and their data workers."""
        self.send(signal.SIGKILL, with_workers=True)
        self.wait()

    def message(self) -> str:
        """Return the message with which the command ended, and check that it is one line and no traceback."""
        text = self.text
        if "Traceback" in text:
            raise Failure("traceback: " + text[text.rindex("Traceback") :][-600:].strip().replace("\n", " | "))
        lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
        if not lines or not _PROGRAM_NAME.match(lines[-1]):
            raise Failure(f"exit code {self.code} without a message of one line: {text[-600:]!r}")
        check_message(lines[-1])
        return lines[-1]

    def _running(self) -> list[int]:
        return [pid for pid, code in self.codes.items() if code is None]

    def _family(self) -> list[psutil.Process]:
        """Return all running processes with their children."""
        processes = []
        for pid in self._running():
            with suppress(psutil.NoSuchProcess):
                processes += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return processes

    def _poll(self) -> int | None:
        for pid in self._running():
            waited, status = os.waitpid(pid, os.WNOHANG)
            self.codes[pid] = os.waitstatus_to_exitcode(status) if waited else None
        return self.code


def _run_forked(
    main: Main, arguments: list[str], environment: dict, output: Path, prepare: Callable[[int], object], rank: int
):
    """Run a command in a forked process. This never returns."""
    code = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1), os.dup2(descriptor, 2)
        sys.stdout = os.fdopen(1, "w", 1, closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update({name: str(value) for name, value in environment.items()})
        sys.argv = ["command", *arguments]
        prepare(rank)
        code = main(arguments) or 0
    except SystemExit as stopped:
        code = stopped.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
