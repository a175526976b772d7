"""Run a training script. Invalid input ends it with one line, a bug with a traceback."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.processes import STOP_SIGNALS
from scalelong_diffusers.terminal import print_lines


class TrainingStopped(Exception):
    """
    The run ends before its last step. The message says why and how to resume.

    Args:
        exit_code: exit code of the script.
        on_all_processes: whether all processes raise this error, so that only one on each machine prints the message.
    """

    def __init__(self, message: str, exit_code: int = 1, on_all_processes: bool = False):
        super().__init__(message)
        self.exit_code = exit_code
        self.on_all_processes = on_all_processes


def run_script(main: Callable[[], object]):
    """Run the `main` of a script and exit: 2 for invalid input, 128 + the signal if interrupted, 1 for a bug."""
    try:
        main()
        return
    except TrainingStopped as error:
        stopped = error
    except UserError as error:
        stopped = TrainingStopped(str(error), exit_code=2, on_all_processes=True)
    except KeyboardInterrupt:
        message = "interrupted; --resume_from_checkpoint latest resumes from the last checkpoint, if one exists"
        stopped = TrainingStopped(message, exit_code=130, on_all_processes=True)
    except Exception:
        if not torch.distributed.is_initialized():
            raise
        print_lines(*traceback.format_exc().splitlines(), file=sys.stderr)
        _exit_without_waiting(1)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if is_first or not stopped.on_all_processes:
        print_lines(f"{Path(sys.argv[0]).stem}: {stopped}", file=sys.stderr)
    if torch.distributed.is_initialized():
        _exit_without_waiting(stopped.exit_code)
    sys.exit(stopped.exit_code)


def _exit_without_waiting(code: int):
    """Exit although other processes may be in a collective call, for which torch would wait forever."""
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


class StopSignal:
    """The signal that asked this process to save and stop. `number` is 0 without one."""

    number = 0

    @contextmanager
    def caught(self):
        """
        Record signals instead of ending the process. A second Ctrl-C ends the process without saving.

        Signals that are ignored stay ignored, as `nohup` wants it for SIGHUP.
        """
        if threading.current_thread() is not threading.main_thread():  # Python handles signals only there
            yield
            return

        def note(number, frame):
            if self.number == number == signal.SIGINT:
                raise KeyboardInterrupt
            self.number = number

        caught = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
