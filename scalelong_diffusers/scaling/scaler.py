"""`SkipScaler`: the module of a model that holds the factors or gates of all its long skips."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from scalelong_diffusers.scaling.config import SkipScalingConfig
from scalelong_diffusers.scaling.factors import skip_factors
from scalelong_diffusers.scaling.gates import InstanceEnhanceGate, SkipScalar, SqueezeExciteGate


class SkipScaler(nn.Module):
    """
    Multiplies the i-th long skip by its factor k_i.

    Args:
        config: a resolved `SkipScalingConfig`.
        widths: the size of each skip along the gated dimension, from i = 1 (the outermost).
        gate_dim: the gated dimension of a skip.
        device, dtype: where the gates are created.
    """

    def __init__(self, config: SkipScalingConfig, widths: Sequence[int], gate_dim: int = 1, device=None, dtype=None):
        super().__init__()
        self.gate_names, self.gates = _build_gates(config, widths, gate_dim, {"device": device, "dtype": dtype})
        self._full_factors = (
            [] if self.gates else skip_factors(config.method, len(widths), config.kappa, config.reverse)
        )
        self.set_config(config)

    def set_config(self, config: SkipScalingConfig):
        """Replace the config with one that differs only in `strength`."""
        self.config = config
        self.strength = 1.0 if config.strength is None else config.strength
        self.factors = [k if self.strength == 1.0 else 1.0 + self.strength * (k - 1.0) for k in self._full_factors]

    def with_config(self, config: SkipScalingConfig) -> "SkipScaler":
        """Return a scaler that shares these gates. The config may differ only in `strength`."""
        other = copy.copy(self)
        other.set_config(config)
        return other

    def adopt(self, other: "SkipScaler"):
        """Take over the config and gates of another scaler. Hooks and compiled graphs keep pointing to this object."""
        self.gate_names, self.gates, self._full_factors = other.gate_names, other.gates, other._full_factors
        self.set_config(other.config)

    def is_identity(self, index: int) -> bool:
        return not self.gates and self.factors[index - 1] == 1.0

    def gate(self, index: int) -> nn.Module | None:
        """Return the module that predicts k_i, or None if k_i is constant."""
        return self.gates[self.gate_names[index - 1]] if self.gates else None

    def factor(self, skip: torch.Tensor, index: int) -> float | torch.Tensor:
        """Return k_i: a Python float, which does not promote the skip's dtype, or the gate's prediction."""
        gate = self.gate(index)
        if gate is None:
            return self.factors[index - 1]
        k = gate(skip)
        if self.strength != 1.0:
            k = 1.0 + self.strength * (k - 1.0)
        return k.to(skip)

    def forward(self, skip: torch.Tensor, index: int) -> torch.Tensor:
        """Return k_i * skip, or the skip itself if k_i is 1."""
        return skip if self.is_identity(index) else skip * self.factor(skip, index)

    def extra_repr(self) -> str:
        return repr(self.config)


def _build_gates(
    config: SkipScalingConfig, widths: Sequence[int], gate_dim: int, factory: dict[str, Any]
) -> tuple[list[str], nn.ModuleDict]:
    """Return the name of each skip's gate, and the gates by name. Shared and separate gates have different names."""
    if not config.has_gates:
        return [], nn.ModuleDict()
    if config.method == "ls" and config.shared:
        names = [f"width_{width}" for width in widths]  # one network cannot serve several widths
    else:
        kind = "scalar" if config.method == "learnable" else "skip"
        names = [f"{kind}_{i}" for i in range(1, len(widths) + 1)]
    gates = nn.ModuleDict(
        {name: _build_gate(config, width, gate_dim, factory) for name, width in dict(zip(names, widths)).items()}
    )
    _init_gates(gates, factory["device"])
    return names, gates


def _build_gate(config: SkipScalingConfig, width: int, gate_dim: int, factory: dict[str, Any]) -> nn.Module:
    identity = config.init == "identity"
    if config.method == "learnable":
        return SkipScalar(**factory)
    if config.gate == "ie":
        return InstanceEnhanceGate(width, gate_dim, identity, **factory)
    return SqueezeExciteGate(width, config.reduction, config.activation, gate_dim, identity, **factory)


@torch.no_grad()
def _init_gates(gates: nn.ModuleDict, device: torch.device | str | None):
    # While diffusers loads a checkpoint, new parameters stay on the meta device until the file fills them in. A plain
    # checkpoint has no gates, so they get memory here.
    device = torch.empty(0, device=device).device
    if device.type != "meta" and any(p.is_meta for p in gates.parameters()):
        gates.to_empty(device=device)
    for gate in gates.values():
        gate.reset_parameters()
