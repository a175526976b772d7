"""`SkipScaler`: the one module of a model that knows the factors or gates of all its long skips."""

from collections.abc import Sequence

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
        widths: the size of each skip along the gated axis, from i = 1 (the outermost).
        gate_dim: that axis.
    """

    def __init__(self, config: SkipScalingConfig, widths: Sequence[int], gate_dim: int = 1):
        super().__init__()
        self.gate_names, self.gates = _build_gates(config, widths, gate_dim)
        self._full_factors = (
            [] if self.gates else skip_factors(config.method, len(widths), config.kappa, config.reverse)
        )
        self.set_config(config)

    def adopt(self, other: "SkipScaler"):
        """Become equal to another scaler. This object stays, since hooks and compiled graphs hold on to it."""
        self.gate_names, self.gates, self._full_factors = other.gate_names, other.gates, other._full_factors
        self.set_config(other.config)

    def set_config(self, config: SkipScalingConfig):
        """Take over a config that differs from the present one in `strength` alone."""
        self.config = config
        self.strength = 1.0 if config.strength is None else config.strength
        self.factors = [k if self.strength == 1.0 else 1.0 + self.strength * (k - 1.0) for k in self._full_factors]

    def is_identity(self, index: int) -> bool:
        return not self.gates and self.factors[index - 1] == 1.0

    def gate(self, index: int) -> nn.Module | None:
        """The module that predicts k_i, or None where it is constant."""
        return self.gates[self.gate_names[index - 1]] if self.gates else None

    def factor(self, skip: torch.Tensor, index: int) -> float | torch.Tensor:
        """k_i: a Python float, which leaves the skip's dtype alone, or what the gate makes of this skip."""
        gate = self.gate(index)
        if gate is None:
            return self.factors[index - 1]
        k = gate(skip)
        if self.strength != 1.0:
            k = 1.0 + self.strength * (k - 1.0)
        return k.to(skip)

    def forward(self, skip: torch.Tensor, index: int) -> torch.Tensor:
        """k_i * skip. A constant factor of 1 costs nothing."""
        return skip if self.is_identity(index) else skip * self.factor(skip, index)

    def extra_repr(self) -> str:
        return repr(self.config)


def _build_gates(config: SkipScalingConfig, widths: Sequence[int], gate_dim: int) -> tuple[list[str], nn.ModuleDict]:
    """The name of each skip's gate, and the gates. Shared and separate gates never have a name in common."""
    if config.method == "learnable":
        names = [f"scalar_{i}" for i in range(1, len(widths) + 1)]
    elif config.method == "ls" and config.shared:
        # One net can not serve several widths, so it is shared by the skips of a width.
        names = [f"width_{width}" for width in widths]
    elif config.method == "ls":
        names = [f"skip_{i}" for i in range(1, len(widths) + 1)]
    else:
        return [], nn.ModuleDict()
    width_of = dict(zip(names, widths))
    gates = nn.ModuleDict({name: _build_gate(config, width, gate_dim) for name, width in width_of.items()})
    _initialise(gates)
    return names, gates


def _build_gate(config: SkipScalingConfig, width: int, gate_dim: int) -> nn.Module:
    identity = config.init == "identity"
    if config.method == "learnable":
        return SkipScalar()
    if config.gate == "ie":
        return InstanceEnhanceGate(width, gate_dim, identity)
    return SqueezeExciteGate(width, config.reduction, config.activation, gate_dim, identity)


@torch.no_grad()
def _initialise(gates: nn.ModuleDict):
    # While a checkpoint is loaded, every new parameter is put on the meta device until the file fills it in. A plain
    # checkpoint has nothing for the gates, so they are made real at once, whatever the checkpoint will bring.
    default_device = torch.empty(0).device
    if any(p.is_meta for p in gates.parameters()) and default_device.type != "meta":
        gates.to_empty(device=default_device)
    for gate in gates.values():
        gate.reset_parameters()
