"""Kill the commands at random moments, start them again, and check that nothing is lost."""

import json
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from attack_commands import COMMANDS, Attacked, FinishedRun, finished_run
from attack_sandbox import WATCH, Case, Command, Failure, time_limit
from safetensors.torch import load_file


SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_KILLS = 4
# Files of the user in the output folder, whose names look like the names that the package uses.
USER_FILES = (
    *("notes.txt", ".writable", ".old-photos/a.txt", ".partial-1/a.txt", ".tmp-notes", ".draft.part"),
    *("checkpoint-best/a.txt", "checkpoint-3.bak/a.txt", "samples/mine.txt", "logs/mine.txt"),
)
# torchrun gives the other processes 30 seconds after one has failed.
SECONDS_FOR_OTHERS = 3


def attack(case: Case):
    """Kill a command several times, let it finish, and compare the result with an uninterrupted run."""
    name, processes = case.random.choice(list(COMMANDS)), case.random.choice((1, 1, 2))
    changes = {"dataloader_num_workers": case.random.choice((0, 2))} if COMMANDS[name].has_workers else {}
    case.note(f"{name} in {processes} processes {changes}")
    with time_limit(240):
        expected = finished_run(case.parts, name, processes)
        Victim(case, COMMANDS[name], expected, processes, changes).attack()


class Victim:
    """A command that is killed and started again in the same output folder."""

    def __init__(self, case: Case, attacked: Attacked, expected: FinishedRun, processes: int, changes: dict):
        self.case, self.attacked, self.expected = case, attacked, expected
        self.processes, self.changes = processes, changes
        self.folder = case.folder / expected.folder.name
        self._user_files: list[Path] = []
        self._starts = 0

    def attack(self):
        often, seldom = (self.kill_at_change, self.kill_at_time), (self.fill_disk, self.limit_files, self.start_twice)
        self.case.count = self.case.random.randint(1, MAX_KILLS)
        for _ in range(self.case.count):
            self.case.random.choice((*often, *often, *seldom))()
            self.check_user_files()
        self.case.note("finish")
        command = self.start()
        if command.finish():
            raise Failure(f"it cannot be started again: {command.text[-600:]!r}")
        self.check_user_files()
        check_files(self.folder, self.expected.folder, self._user_files)
        check_metrics(self.folder, self.expected.folder)
        check_tensors(self.folder, self.expected.folder)

    def start(self, prepare: Callable[[int], object] = lambda rank: None) -> Command:
        """Start the command, or resume it if it has a checkpoint."""
        self._write_user_files()
        has_checkpoint = any(path.name[11:].isdecimal() for path in self.folder.glob("checkpoint-*"))
        resume = {"resume_from_checkpoint": "latest"} if self.attacked.resumes and has_checkpoint else {}
        words = self.attacked.words(self.case.parts, self.folder, self.processes, **self.changes, **resume)
        self._starts += 1
        return Command(self.attacked.main, words, self.case.folder / f"start-{self._starts}", self.processes, prepare)

    # What happens to the command

    def kill_at_change(self):
        """Let a process end itself just before it changes a file in the output folder."""
        rank, number = self.case.random.randrange(self.processes), self.case.random.choice(SIGNALS)
        change = self.case.random.randint(1, max(1, self.expected.changes[rank]))
        self.case.note(f"{number.name} to process {rank} at change {change}")

        def prepare(own_rank: int):
            WATCH.counted = os.path.realpath(self.folder)
            WATCH.kill_at = (change, number) if own_rank == rank else None

        self.end(self.start(prepare), number)

    def kill_at_time(self):
        number, seconds = self.case.random.choice(SIGNALS), self.case.random.uniform(0, 1.2 * self.expected.seconds)
        with_workers = number == signal.SIGKILL or self.case.random.random() < 0.5
        self.case.note(f"{number.name} after {seconds:.3f} s{' also to workers' * with_workers}")
        command = self.start()
        if command.wait(seconds) is None:
            command.send(number, with_workers)
        self.end(command, number)

    def fill_disk(self):
        """Let a process create no more files and folders after some changes."""
        rank = self.case.random.randrange(self.processes)
        change = self.case.random.randint(1, max(1, self.expected.changes[rank]))
        self.case.note(f"full disk for process {rank} from change {change}")

        def prepare(own_rank: int):
            WATCH.counted = os.path.realpath(self.folder)
            WATCH.full_at = change if own_rank == rank else None

        self.end_with_message(self.start(prepare))

    def limit_files(self):
        """Let writing fail in the middle of a file."""
        limit = self.case.random.randint(8_000, 120_000)
        self.case.note(f"no file may have more than {limit} bytes")
        self.end_with_message(self.start(lambda rank: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))))

    def start_twice(self):
        """Start the command a second time while it runs. One of the two must refuse to write into the folder."""
        seconds = self.case.random.uniform(0, self.expected.seconds)
        self.case.note(f"a second start after {seconds:.3f} s")
        commands = [self.start()]
        commands[0].wait(seconds)
        commands.append(self.start())
        for command in commands:
            self.end_with_message(command)
            if self.processes == 1 and command.code not in (0, 2):
                raise Failure(f"of two starts, one has exit code {command.code}: {command.text[-600:]!r}")

    def end_with_message(self, command: Command):
        self.end(command)
        if self.processes == 1 and command.code:
            command.message()

    def end(self, command: Command, number: int | None = None):
        """Wait for the end of a command that was stopped by a signal, and check how it ended."""
        if self.processes == 1:
            code = command.finish()
            if number not in (None, signal.SIGKILL):
                if code not in (0, -number, 128 + number):
                    raise Failure(f"exit code {code} after {signal.Signals(number).name}: {command.text[-600:]!r}")
                if code > 0:
                    command.message()
            return
        while not any(code is not None for code in command.codes.values()):
            command.wait(0.05)
        if command.wait(SECONDS_FOR_OTHERS) is None:
            command.kill()

    # What must be true afterwards

    def _write_user_files(self):
        index = self.attacked.index
        if not self._user_files and (index is None or (self.folder / index).exists()):
            self._user_files = [self.folder / name for name in USER_FILES]
            for file in self._user_files:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(str(file))

    def check_user_files(self):
        for file in self._user_files:
            if not file.is_file() or file.read_text() != str(file):
                raise Failure(f"the user's file {file.relative_to(self.folder)} is lost")


def check_files(folder: Path, expected: Path, user_files: list[Path]):
    """Check that the finished run has the same files as an uninterrupted one, apart from earlier checkpoints."""
    own = _files(folder) - {str(file.relative_to(folder)) for file in user_files}
    if different := own ^ _files(expected):
        missing, added = sorted(different - own), sorted(different & own)
        raise Failure(f"files are missing: {missing}, left over: {added}")


def _files(folder: Path) -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    last = last_checkpoint(folder)
    return {name for name in names if not re.match(r"checkpoint-\d+/", name) or name.startswith(f"{last}/")}


def last_checkpoint(folder: Path) -> str:
    steps = [path.name[11:] for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()]
    return f"checkpoint-{max(map(int, steps), default=0)}"


def check_metrics(folder: Path, expected: Path):
    """Check that the log has the same lines, and the evaluation the same result."""
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        if (expected / name).exists():
            lines, wanted = _read_lines(folder / name), _read_lines(expected / name)
            if name == "evaluation.jsonl":  # each start adds a line
                lines, wanted = lines[-1:], wanted[-1:]
            if lines != wanted:
                raise Failure(f"{name} differs: {lines} instead of {wanted}")


def _read_lines(file: Path) -> list[dict]:
    """Return the lines of a log without what is different in each run: times and paths."""
    different = ("images_per_second", "images", "statistics", "warnings")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in different} for line in lines]


def check_tensors(folder: Path, expected: Path):
    """Check that all weights, latents, images and pages are bit-identical."""
    for name in sorted(_files(expected)):
        if name.endswith(".safetensors"):
            tensors, wanted = load_file(folder / name), load_file(expected / name)
            if tensors.keys() != wanted.keys() or any(not torch.equal(tensors[key], wanted[key]) for key in wanted):
                raise Failure(f"{name} differs from an uninterrupted run")
        elif name.endswith((".png", ".html")) and (folder / name).read_bytes() != (expected / name).read_bytes():
            raise Failure(f"{name} differs from an uninterrupted run")
