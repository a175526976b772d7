"""The processes of `accelerate launch` or torchrun, or the only one where there is no launch."""

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


def processes() -> PartialState:
    """This one's place among all."""
    # Left to itself, accelerate does not join processes on CPUs: each would take itself for the main one.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    return PartialState(cpu=on_cpu)
