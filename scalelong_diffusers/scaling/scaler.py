"""`SkipScaler`, the module with the methods of all long skips of a model."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from scalelong_diffusers.scaling.config import SkipScalingConfig
from scalelong_diffusers.scaling.constants import ConstantFactor, ConstantWeights
from scalelong_diffusers.scaling.gates import gated_axis
from scalelong_diffusers.scaling.methods import METHODS, LongSkip, SkipMethod, SkipMix


class SkipScaler(nn.Module):
    """
    Module that applies a method to the long skips of a model.

    Args:
        config: a config without `"auto"` values.
        skips: the long skips, from i = 1.
    """

    def __init__(self, config: SkipScalingConfig, skips: Sequence[LongSkip], device=None, dtype=None):
        super().__init__()
        self.gate_names = [_gate_name(config, skip) for skip in skips]
        self.gates = nn.ModuleDict()
        self._build(config, skips, torch.empty(0, device=device).device, dtype)
        self.set_config(config)

    @torch.no_grad()
    def _build(self, config: SkipScalingConfig, skips: Sequence[LongSkip], device: torch.device, dtype):
        fields = config.method_fields()
        with device:
            for name, skip in zip(self.gate_names, skips):
                if name not in self.gates:
                    self.gates[name] = METHODS[config.method].build(skip, **fields).to(dtype=dtype)
        # While diffusers loads a checkpoint, new parameters stay on the meta device until the file fills them in. A
        # plain checkpoint has no gates, so they get memory here.
        if device.type != "meta" and any(p.is_meta for p in self.gates.parameters()):
            buffers = dict(self.gates.named_buffers())
            self.gates.to_empty(device=device)
            for name, buffer in buffers.items():
                self.gates.get_buffer(name).copy_(buffer)
        for method in self.gates.values():
            method.reset_parameters()

    def set_config(self, config: SkipScalingConfig):
        """Replace the config with one that differs only in `strength`."""
        self.config = config
        self.strength = 1.0 if config.strength is None else config.strength

    def with_config(self, config: SkipScalingConfig) -> "SkipScaler":
        """Return a scaler that shares these gates. The config may differ only in `strength`."""
        other = copy.copy(self)
        other.set_config(config)
        return other

    def adopt(self, other: "SkipScaler"):
        """Take over the config and gates of another scaler. Hooks and compiled graphs keep pointing to this object."""
        self.gate_names, self.gates = other.gate_names, other.gates
        self.set_config(other.config)

    def method(self, index: int) -> SkipMethod:
        """Return the module of the i-th skip."""
        return self.gates[self.gate_names[index - 1]]

    def constant_weights(self, index: int) -> tuple[float, float] | None:
        """Return the factors of the hidden state and of the skip if they are constant, else None."""
        is_constant = isinstance(self.method(index), ConstantFactor | ConstantWeights)
        return self.initial_weights(index) if is_constant else None

    def changes_hidden(self, index: int) -> bool:
        """Return whether the method needs the hidden state, so that it must be applied where both meet."""
        return isinstance(self.method(index), SkipMix)

    def is_identity(self, index: int) -> bool:
        """Return whether the skip and the hidden state stay as they are."""
        return self.constant_weights(index) == (1.0, 1.0)

    def initial_weights(self, index: int) -> tuple[float, float]:
        """Return the factors of the hidden state and of the skip at the start of training."""
        hidden_weight, skip_weight = self.method(index).initial_weights()
        return self._weakened(hidden_weight), self._weakened(skip_weight)

    def factor(self, skip: torch.Tensor, index: int) -> float | torch.Tensor:
        """Return k_i of a method that only multiplies the skip, in the skip's dtype."""
        k = self._weakened(self.method(index)(skip))
        return k.to(skip) if isinstance(k, torch.Tensor) else k

    def scale(self, skip: torch.Tensor, index: int) -> torch.Tensor:
        """Return k_i * skip, or the skip itself if k_i is 1, for a method that only multiplies the skip."""
        return skip if self.is_identity(index) else skip * self.factor(skip, index)

    def forward(
        self, hidden: torch.Tensor, skip: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, torch.Tensor, float | torch.Tensor]:
        """Return the hidden state, the skip, and the factor by which the caller multiplies the skip."""
        if not self.changes_hidden(index):
            return hidden, skip, self.factor(skip, index)
        return *self.combine(hidden, skip, index), 1.0

    def combine(self, hidden: torch.Tensor, skip: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden state and the skip that the layer reads."""
        if not self.changes_hidden(index):
            return hidden, self.scale(skip, index)
        new_hidden, new_skip = self.method(index)(hidden, skip)
        new_hidden, new_skip = new_hidden.to(hidden), new_skip.to(skip)
        if self.strength == 1.0:
            return new_hidden, new_skip
        return torch.lerp(hidden, new_hidden, self.strength), torch.lerp(skip, new_skip, self.strength)

    def _weakened(self, factor: float | torch.Tensor) -> float | torch.Tensor:
        return factor if self.strength == 1.0 else 1.0 + self.strength * (factor - 1.0)

    def extra_repr(self) -> str:
        return repr(self.config)


def _gate_name(config: SkipScalingConfig, skip: LongSkip) -> str:
    # Different names for each kind of gate, so that one cannot load the weights of another.
    if config.method == "ls" and config.shared:  # one network cannot serve several widths
        return f"width_{gated_axis(skip, config.gate_axis)[1]}"
    return f"{METHODS[config.method].key}_{skip.index}"
