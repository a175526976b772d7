"""
Attack the package: kill its commands, damage the files that it reads, and pass it random input.

    python benchmarks/attack.py [--minutes 10] [--seed N] [--only kills|flips|inputs] [--repeat KIND:NUMBER]

- kills: training, fine-tuning, precomputing, sampling, evaluation and diagnosis are killed at random moments, run out
  of disk space, or are started twice. The finished folder must equal the folder of an uninterrupted run.
- flips: bits of a file are flipped, or the file is cut. Loading it must work, or end with a `UserError`. Where a
  checksum promises it, the damage must be noticed.
- inputs: random configs, flags and arguments. They must work, or end with a `UserError`.

All messages must be one printable line. Nothing may be written outside of a case's folder, and no program started. A
case depends only on the seed and its number, except for the moments of kills after a time.
"""

import argparse
import gc
import importlib
import itertools
import multiprocessing
import os
import resource
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil
import torch
from attack_sandbox import TIME_LIMIT, WATCH, Case, Failure, TimeLimit

from scalelong_diffusers.experiments.trainings import exit_on_signals


# Parts of the time.
KINDS = {"kills": 0.45, "flips": 0.35, "inputs": 0.2}
WORKERS = 2
MEMORY = 4 * 2**30  # bytes that a case may use
HANGING = 5 * TIME_LIMIT  # seconds after which a case is killed that its own time limit did not stop
_FORK = multiprocessing.get_context("fork")

Attack = Callable[[Case], None]
MakeCase = Callable[[int], Case]


@dataclass
class Tally:
    """The attacks of one kind: how many were made, and the cases that failed, with the reason."""

    tried: int = 0
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, number: int, count: int, problem: str | None):
        self.tried += count
        if problem is not None:
            self.failed[number] = problem[:2000]


def run_case(attack: Attack, case: Case) -> str | None:
    """Run a case in a new folder, and return why it failed, or None."""
    case.folder.mkdir()
    (case.folder / "current").mkdir()
    os.chdir(case.folder / "current")  # so that relative paths such as `..` stay in the folder
    try:
        with WATCH.on(case, case.parts.parent):
            attack(case)
        case.notes()
        return None
    except (Failure, TimeLimit) as error:
        problem = str(error)
    except Exception:
        problem = " | ".join(map(str.strip, traceback.format_exc().strip().splitlines()[-5:]))
    finally:
        os.chdir(case.parts)
        shutil.rmtree(case.folder, ignore_errors=True)
    end_children()
    return f"{case.notes()}: {problem}"


def end_children():
    """Kill all processes that this process has started, and the ones that they have started."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()


class Worker:
    """A process that runs cases until the deadline. If a case ends or hangs it, the case is a failure."""

    def __init__(self, attack: Attack, make_case: MakeCase, numbers: Iterable[int], deadline: float):
        self.make_case, self.numbers = make_case, numbers
        self.number: int | None = None  # of the case that is running
        self.results, sender = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(target=_work, args=(attack, make_case, numbers, deadline, sender))
        self.process.start()
        sender.close()

    def receive(self, tally: Tally) -> bool:
        """Add a result to the tally. Returns False if the process has ended."""
        try:
            number, count, problem = self.results.recv()
        except EOFError:
            self.process.join()
            if self.number is not None:
                notes = self.make_case(self.number).notes()
                tally.add(self.number, 1, f"{notes}: the process ended with exit code {self.process.exitcode}")
            return False
        self.number, self.started = (number, time.monotonic()) if count is None else (None, 0)
        if count is not None:
            tally.add(number, count, problem)
        return True

    def kill_if_hanging(self):
        if self.number is not None and time.monotonic() - self.started > HANGING:
            os.killpg(self.process.pid, signal.SIGKILL)


def _work(attack: Attack, make_case: MakeCase, numbers: Iterable[int], deadline: float, results: Connection):
    """Run cases. Each sends its number when it begins, and its result when it ends."""
    os.setpgid(0, 0)
    limit = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1), os.dup2(nowhere.fileno(), 2)
    WATCH.install()
    for number in itertools.takewhile(lambda _: time.monotonic() < deadline, numbers):
        results.send((number, None, None))
        case = make_case(number)
        problem = run_case(attack, case)
        results.send((number, case.count, problem))


def attack_for(seconds: float, attack: Attack, make_case: MakeCase, numbers: Sequence[Iterable[int]]) -> Tally:
    """Run the cases with some numbers for some seconds. Each entry of `numbers` has its own process."""
    deadline, tally = time.monotonic() + seconds, Tally()
    workers = [Worker(attack, make_case, own, deadline) for own in numbers]
    while workers:
        ready = wait([worker.results for worker in workers], timeout=1)
        for worker in list(workers):
            if worker.results in ready and not worker.receive(tally):
                workers.remove(worker)
                if worker.number is not None:
                    rest = itertools.dropwhile(lambda number, last=worker.number: number <= last, worker.numbers)
                    workers.append(Worker(attack, make_case, rest, deadline))
            else:
                worker.kill_if_hanging()
    return tally


@contextmanager
def work_folder() -> Iterator[Path]:
    """Make a temporary folder with a home for all libraries, and end all processes that are left at the end."""
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    (folder / "tmp").mkdir()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    os.environ |= {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    tempfile.tempdir = None  # read TMPDIR again
    sys.dont_write_bytecode = True
    try:
        yield folder
    finally:
        end_children()
        shutil.rmtree(folder, ignore_errors=True)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="duration (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="seed of all cases (default: a new one, which is printed)")
    parser.add_argument("--only", choices=KINDS, help="make only attacks of this kind")
    parser.add_argument("--repeat", metavar="KIND:NUMBER", help="run one case")
    arguments = parser.parse_args()
    if arguments.repeat is not None:
        kind, _, number = arguments.repeat.partition(":")
        if kind not in KINDS or not number.isdecimal() or arguments.seed is None:
            parser.error("--repeat needs a case such as kills:7, and --seed")
        arguments.repeat = kind, int(number)
    return arguments


def main() -> int:
    started, arguments = time.monotonic(), parse()
    exit_on_signals()
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with work_folder() as folder:
        # Only now: the libraries read the environment when they are imported.
        attacks = {kind: importlib.import_module(f"attack_{kind}").attack for kind in KINDS}
        torch.set_num_threads(1)
        parts = make_parts(folder / "parts")
        gc.freeze()  # forked processes share this memory

        def make_case(kind: str, number: int) -> Case:
            return Case(kind, seed, number, parts, folder / f"{kind}-{number}")

        only, numbers = arguments.only, [itertools.count(first, WORKERS) for first in range(WORKERS)]
        if arguments.repeat is not None:
            only, numbers = arguments.repeat[0], [[arguments.repeat[1]]]
        shares = {kind: share for kind, share in KINDS.items() if only in (None, kind)}
        minutes = arguments.minutes - (time.monotonic() - started) / 60
        failed = 0
        for kind, share in shares.items():
            seconds = 60 * minutes * share / sum(shares.values())
            failed += report(kind, seed, attack_for(seconds, attacks[kind], partial(make_case, kind), numbers))
    return int(failed > 0)


def make_parts(folder: Path) -> Path:
    """Make the models, datasets and runs that all cases read, in another process, and return their folder."""
    folder.mkdir()
    commands = importlib.import_module("attack_commands")
    made = commands.Command(lambda words: commands.make_parts(folder), [], folder / "output")
    if made.finish(seconds=600):
        sys.exit(f"attack: cannot make the models and datasets: {made.text}")
    return folder


def report(kind: str, seed: int, tally: Tally) -> int:
    """Print the result of a kind and how to repeat its failures. Returns the number of failures."""
    failed = len(tally.failed)
    print(f"{kind}: {tally.tried:,} tried, {tally.tried - failed:,} clean, {failed:,} failed", flush=True)
    for number, problem in sorted(tally.failed.items()):
        print(f"  python benchmarks/attack.py --seed {seed} --repeat {kind}:{number}\n    {problem}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
