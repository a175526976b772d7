"""The processes of `accelerate launch` or torchrun. Without a launcher there is one process."""

import signal
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env
from torch.distributed.tensor import DTensor

from scalelong_diffusers.errors import UserError


Result = TypeVar("Result")

# The signals that ask a process to stop. A dropped connection sends SIGHUP, which Windows does not have.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]


class OtherProcessFailed(UserError):
    """Another process failed. The message is the message of its error."""


class WorkSkipped(Exception):
    """Optional work was skipped, for the reason in the message. This is not a failure."""


def processes() -> PartialState:
    """Return the state of this process: its index, its device, and the number of processes."""
    # By default, accelerate does not connect processes on CPUs: each would believe that it is the main process.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    return PartialState(cpu=on_cpu)


def run_on_all_processes(function: Callable[[], Result]) -> Result:
    """
    Run a function in all processes, and return when all of them have finished.

    If it fails in one process, the others raise `OtherProcessFailed` with the same message, so that no process waits
    forever. If it raises `WorkSkipped` in one process and fails in none, all raise `WorkSkipped`.
    """
    processes()  # connects the processes
    result = error = None
    try:
        result = function()
    except Exception as raised:
        error = raised
    reason = None if error is None else " ".join(str(error).split()) or type(error).__name__
    outcomes = gather_object([(reason, isinstance(error, WorkSkipped))])
    failures = [reason for reason, is_skipped in outcomes if reason and not is_skipped]
    if error is not None and (not failures or not isinstance(error, WorkSkipped)):
        raise error
    for reason in failures or [reason for reason, _ in outcomes if reason]:
        raise (OtherProcessFailed if failures else WorkSkipped)(reason)
    return result


def run_on_main_process(function: Callable[[], Result]) -> Result:
    """
    Run a function in the main process while the others wait, and return its result in all processes.

    If it fails, the others raise `OtherProcessFailed` with the same message.
    """
    is_main = processes().is_main_process
    result = [run_on_all_processes(lambda: function() if is_main else None)]
    broadcast_object_list(result)
    return result[0]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """
    Return the whole of a tensor that may be sharded, without waiting for its device.

    All processes must call this.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
