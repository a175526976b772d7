"""`SkipScaler`, the module with the factors or gates of all long skips of a model, and the gate modules."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.scaling.config import SkipScalingConfig
from scalelong_diffusers.scaling.factors import skip_factors


ACTIVATIONS = {"relu": nn.ReLU, "elu": nn.ELU, "mish": nn.Mish}


class SkipScaler(nn.Module):
    """
    Module that multiplies the i-th long skip by its factor k_i.

    Args:
        config: a config without `"auto"` values.
        widths: sizes of the skips along the dimension `gate_dim`, from i = 1.
        gate_dim: dimension of a skip along which each index gets its own factor.
    """

    def __init__(self, config: SkipScalingConfig, widths: Sequence[int], gate_dim: int = 1, device=None, dtype=None):
        super().__init__()
        self.gate_names, self.gates, self._full_factors = [], nn.ModuleDict(), []
        if config.has_gates:
            self._build_gates(config, widths, gate_dim, {"device": device, "dtype": dtype})
        else:
            self._full_factors = skip_factors(config.method, len(widths), config.kappa, config.reverse)
        self.set_config(config)

    @torch.no_grad()
    def _build_gates(self, config: SkipScalingConfig, widths: Sequence[int], gate_dim: int, factory: dict[str, Any]):
        if config.shared:  # one network cannot serve several widths
            self.gate_names = [f"width_{width}" for width in widths]
        else:
            kind = "scalar" if config.method == "learnable" else "skip"
            self.gate_names = [f"{kind}_{i}" for i in range(1, len(widths) + 1)]
        for name, width in dict(zip(self.gate_names, widths)).items():
            if config.method == "learnable":
                self.gates[name] = SkipScalar(**factory)
            elif config.gate == "ie":
                self.gates[name] = InstanceEnhanceGate(width, gate_dim, config.init == "identity", **factory)
            else:
                self.gates[name] = SqueezeExciteGate(
                    width, config.reduction, config.activation, gate_dim, config.init == "identity", **factory
                )
        # While diffusers loads a checkpoint, new parameters stay on the meta device until the file fills them in. A
        # plain checkpoint has no gates, so they get memory here.
        device = torch.empty(0, device=factory["device"]).device
        if device.type != "meta" and any(p.is_meta for p in self.gates.parameters()):
            self.gates.to_empty(device=device)
        for gate in self.gates.values():
            gate.reset_parameters()

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

    def initial_factor(self, index: int) -> float:
        """Return k_i at the start of training, where gates with `init="paper"` are near 0.5."""
        if not self.gates:
            return self.factors[index - 1]
        return 1.0 - 0.5 * self.strength if self.config.init == "paper" else 1.0

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


class SkipGate(nn.Module):
    """
    Base class of the gates: k = sigmoid(z(GAP(skip))), equation 9.

    Args:
        dim: dimension of a skip along which each index gets its own factor. Other dimensions are averaged.
        identity: k = 2 sigmoid(z), where z starts at 0, so that k starts at exactly 1 and has a gradient.
    """

    def __init__(self, dim: int, identity: bool):
        super().__init__()
        self.dim = dim
        self.identity = identity

    def forward(self, skip: torch.Tensor) -> torch.Tensor:
        pooled_dims = [d for d in range(1, skip.ndim) if d != self.dim]
        k = torch.sigmoid(self.predict(skip.mean(dim=pooled_dims)))
        if self.identity:
            k = 2 * k
        for d in pooled_dims:
            k = k.unsqueeze(d)
        return k


class SqueezeExciteGate(SkipGate):
    """z = W2 act(W1 x), the paper's gate."""

    def __init__(self, width: int, reduction: int, activation: str, dim: int, identity: bool, device=None, dtype=None):
        super().__init__(dim, identity)
        if reduction > width:
            raise UserError(f"reduction must be at most {width}, the width of the narrowest skip, got {reduction}")
        self.squeeze = GateLinear(width, width // reduction, device, dtype)
        self.activation = ACTIVATIONS[activation]()
        self.excite = GateLinear(width // reduction, width, device, dtype)

    def reset_parameters(self):
        self.squeeze.reset_parameters()
        self.excite.reset_parameters()
        if self.identity:
            self.excite.weight.zero_()
            self.excite.bias.zero_()

    def predict(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.excite(self.activation(self.squeeze(pooled)))


class GateLinear(nn.Module):
    """
    A linear layer that computes in the dtype of its weights.

    It does not subclass `nn.Linear`, so that LoRA and quantization leave the gates alone.
    """

    def __init__(self, in_features: int, out_features: int, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))

    def reset_parameters(self):
        for parameter in (self.weight, self.bias):
            _init_uniform(parameter, fan_in=self.weight.shape[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


class InstanceEnhanceGate(SkipGate):
    """z = w x + b for each channel (Table 2, IE)."""

    def __init__(self, width: int, dim: int, identity: bool, device=None, dtype=None):
        super().__init__(dim, identity)
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype))

    def reset_parameters(self):
        for parameter in (self.weight, self.bias):
            if self.identity:
                parameter.zero_()
            else:
                _init_uniform(parameter, fan_in=1)

    def predict(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled.to(self.weight.dtype) * self.weight + self.bias


class SkipScalar(nn.Module):
    """One learned factor (Table 2), which starts at 1."""

    def __init__(self, device=None, dtype=None):
        super().__init__()
        self.value = nn.Parameter(torch.empty(1, device=device, dtype=dtype))

    def reset_parameters(self):
        self.value.fill_(1.0)

    def forward(self, skip: torch.Tensor) -> torch.Tensor:
        return self.value.clone()  # an offloaded parameter leaves the device after this forward


def _init_uniform(parameter: torch.Tensor, fan_in: int):
    # Equals torch's Linear init without torch.nn.init, which diffusers disables while it loads a checkpoint. Numbers
    # drawn on the CPU do not depend on the device.
    bound = 1 / math.sqrt(fan_in)
    parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32, device="cpu").uniform_(-bound, bound))
