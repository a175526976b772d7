"""Refuse models and images that are too large for the machine, before they take its memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil  # a dependency of accelerate
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from scalelong_diffusers.errors import UserError


MAX_WEIGHT_TENSORS = 10_000  # Stable Diffusion XL's U-Net has 1,680


@contextmanager
def limited_layers(source: str | os.PathLike) -> Iterator[None]:
    """Raise a `UserError` as soon as the block has built more weight tensors than any known model has."""
    count = 0

    def add(module: nn.Module, name: str, parameter: nn.Parameter):
        nonlocal count
        count += 1
        if count > MAX_WEIGHT_TENSORS:
            raise UserError(f"{source} has a config for more than {MAX_WEIGHT_TENSORS:,} weight tensors, the limit")

    handle = register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        handle.remove()


def check_memory(what: str, size: float):
    """Raise a `UserError` if something takes more bytes than the machine has."""
    total = psutil.virtual_memory().total
    if size > total:
        needed, present = size / 2**30, total / 2**30
        raise UserError(f"{what} would take at least {needed:,.1f} GiB of memory, and this machine has {present:,.1f}")
