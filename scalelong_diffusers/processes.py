"""The processes of `accelerate launch` or torchrun, or the only one where there is no launch."""

from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env


Result = TypeVar("Result")


class OtherProcessFailed(ValueError):
    """What another process could not do, by its own words."""


class WorkSkipped(Exception):
    """Why work is given up that can be done without. It is no failure: what was begun goes on."""


def processes() -> PartialState:
    """This one's place among all."""
    # Left to itself, accelerate does not join processes on CPUs: each would take itself for the main one.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    return PartialState(cpu=on_cpu)


def run_on_all_processes(function: Callable[[], Result]) -> Result:
    """
    Run a function in all processes, each with work of its own. Where it fails in one it fails in all, with the same
    reason: none waits for ever for what will not come. Where one leaves it out all do, unless another fails.
    """
    processes()  # which joins them, where nothing did before
    result = error = None
    try:
        result = function()
    except Exception as raised:
        error = raised
    reason = None if error is None else " ".join(str(error).split()) or type(error).__name__
    outcomes = gather_object([(reason, isinstance(error, WorkSkipped))])
    failures = [reason for reason, is_left_out in outcomes if reason and not is_left_out]
    if error is not None and (not failures or not isinstance(error, WorkSkipped)):
        raise error
    if failures:
        raise OtherProcessFailed(failures[0])
    for reason, _ in filter(all, outcomes):
        raise WorkSkipped(reason)
    return result


def run_on_main_process(function: Callable[[], Result]) -> Result:
    """Run a function in one process while the others wait. All return its result, or fail if it fails."""
    team = processes()
    result = error = None
    if team.is_main_process:
        try:
            result = function()
        except Exception as raised:
            error = raised
    outcome = [result, None if error is None else " ".join(str(error).split()) or type(error).__name__]
    if team.num_processes > 1:
        broadcast_object_list(outcome)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise OtherProcessFailed(outcome[1])
    return outcome[0]
