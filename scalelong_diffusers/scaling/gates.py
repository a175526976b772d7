"""The small networks of learnable scaling (LS): each predicts the factors of a skip from the skip itself."""

import math

import torch
from torch import nn


ACTIVATIONS = {"relu": nn.ReLU, "elu": nn.ELU, "mish": nn.Mish}


class SkipGate(nn.Module):
    """
    k = sigmoid(z(GAP(skip))), equation 9: one factor for each index of the skip's axis `dim`, from its mean over the
    others. With `identity`, k = 2 sigmoid(z) and z starts at 0: k is exactly 1, with a gradient.
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
    """z = W2 act(W1 x): the calibration network of the paper, and its default."""

    def __init__(self, width: int, reduction: int, activation: str, dim: int, identity: bool):
        super().__init__(dim, identity)
        if reduction > width:
            raise ValueError(
                f"reduction={reduction} leaves a skip of width {width} no hidden unit; take one of at most {width}"
            )
        self.squeeze = GateLinear(width, width // reduction)
        self.activation = ACTIVATIONS[activation]()
        self.excite = GateLinear(width // reduction, width)

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
    A linear layer in the dtype of its own weights. It is no `nn.Linear`, so that what is done to all linear layers of
    a model (LoRA, quantisation) leaves the gates alone.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def reset_parameters(self):
        fan_in = self.weight.shape[1]
        _init_uniform(self.weight, fan_in)
        _init_uniform(self.bias, fan_in)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(features.to(self.weight.dtype), self.weight, self.bias)


class InstanceEnhanceGate(SkipGate):
    """z = w x + b for each channel on its own (Table 2, IE)."""

    def __init__(self, width: int, dim: int, identity: bool):
        super().__init__(dim, identity)
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def reset_parameters(self):
        for parameter in (self.weight, self.bias):
            if self.identity:
                parameter.zero_()
            else:
                _init_uniform(parameter, 1)

    def predict(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled.to(self.weight.dtype) * self.weight + self.bias


class SkipScalar(nn.Module):
    """One plain learnable factor (Table 2), starting at 1."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.empty(1))

    def reset_parameters(self):
        self.value.fill_(1.0)

    def forward(self, skip: torch.Tensor) -> torch.Tensor:
        return self.value.clone()  # an offloaded parameter is only here during this forward


def _init_uniform(parameter: torch.Tensor, fan_in: int):
    # torch's Linear init, but not through torch.nn.init, which diffusers switches off while it loads a checkpoint.
    bound = 1 / math.sqrt(fan_in)
    parameter.uniform_(-bound, bound)
