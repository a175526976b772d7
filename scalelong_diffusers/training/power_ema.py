"""
Averages of the weights with power-function profiles, and their snapshots during training.

The equations are from Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models" (2023).
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from scalelong_diffusers.files import atomic_write, checksum


# The lengths of the two averages.
KEPT_SIGMA_RELS = (0.05, 0.10)
SNAPSHOTS_FOLDER = "ema_snapshots"
_PREFIX, _SUFFIX = "step-", ".safetensors"


class PowerEMA:
    """
    Averages of parameters with power-function profiles, one for each length in `KEPT_SIGMA_RELS`.

    In the average after step t, the weights of step tau have a share that grows as tau^gamma (eq. 1 of the paper).
    """

    def __init__(self, named_parameters: Mapping[str, nn.Parameter]):
        self.parameters = dict(named_parameters)
        self.averages = {
            sigma_rel: {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
            for sigma_rel in KEPT_SIGMA_RELS
        }
        self.step = 0

    @torch.no_grad()
    def update(self):
        """Add the weights of the next step."""
        self.step += 1
        for sigma_rel, averages in self.averages.items():
            # 1 - beta_t, eq. 2.
            share = 1 - (1 - 1 / self.step) ** (gamma_of(sigma_rel) + 1)
            torch._foreach_lerp_(list(averages.values()), list(self.parameters.values()), share)

    def state(self) -> dict[str, torch.Tensor]:
        return {
            tensor_name(sigma_rel, name): average.contiguous()
            for sigma_rel, averages in self.averages.items()
            for name, average in averages.items()
        }

    def load(self, state: Mapping[str, torch.Tensor], step: int):
        """Continue the averages after `step`."""
        for sigma_rel, averages in self.averages.items():
            for name, average in averages.items():
                average.copy_(state[tensor_name(sigma_rel, name)])
        self.step = step


def tensor_name(sigma_rel: float, parameter_name: str) -> str:
    """Return the name of an average in a file."""
    return f"{sigma_rel:g}/{parameter_name}"


def gamma_of(sigma_rel: float) -> float:
    """
    Return the exponent of the profile with a relative width.

    Solves sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) for the largest gamma.
    """
    inverse = sigma_rel**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def snapshot_files(run_folder: Path) -> dict[int, Path]:
    """Return the snapshots of a run by step, in order."""
    files = (run_folder / SNAPSHOTS_FOLDER).glob(f"{_PREFIX}*{_SUFFIX}")
    by_name = {file.name.removeprefix(_PREFIX).removesuffix(_SUFFIX): file for file in files}
    return dict(sorted((int(step), file) for step, file in by_name.items() if step.isdecimal()))


def write_snapshot(run_folder: Path, step: int, tensors: Mapping[str, torch.Tensor]):
    """Write averages with a checksum of each tensor."""
    file = run_folder / SNAPSHOTS_FOLDER / f"{_PREFIX}{step}{_SUFFIX}"
    file.parent.mkdir(exist_ok=True)
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    atomic_write(file, lambda partial: save_file(tensors, partial, checksums))


def remove_later_snapshots(run_folder: Path, step: int):
    """Remove snapshots of steps that a resumed run repeats."""
    for later, file in snapshot_files(run_folder).items():
        if later > step:
            file.unlink()
