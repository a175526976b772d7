"""The gates of learnable scaling (LS): small networks that predict the factors of a skip from the skip itself."""

import math

import torch
from torch import nn

from scalelong_diffusers.errors import UserError


ACTIVATIONS = {"relu": nn.ReLU, "elu": nn.ELU, "mish": nn.Mish}


class SkipGate(nn.Module):
    """
    Base of the gates: k = sigmoid(z(GAP(skip))), equation 9.

    Args:
        dim: dimension of the skip that gets one factor per index. The others are averaged.
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
        fan_in = self.weight.shape[1]
        _init_uniform(self.weight, fan_in)
        _init_uniform(self.bias, fan_in)

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
                _init_uniform(parameter, 1)

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
