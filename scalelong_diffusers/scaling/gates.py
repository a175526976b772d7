"""The learned methods: the paper's gates (LS) and their relatives."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.scaling.methods import LongSkip, SkipFactor, SkipMix, register_skip_method


ACTIVATIONS = {"relu": nn.ReLU, "elu": nn.ELU, "mish": nn.Mish}


@register_skip_method("ls", key="skip")
def learned_scaling(
    skip: LongSkip,
    shared: bool = False,
    reduction: int = 16,
    activation: str = "relu",
    gate: str = "se",
    gate_axis: str = "auto",
    init: str = "identity",
) -> SkipFactor:
    """Return the gate of a skip (equation 9). The scaler shares one gate among skips of a width if `shared` is set."""
    is_identity = init == "identity"
    if gate == "ie":
        return InstanceEnhanceGate(skip, gate_axis, is_identity)
    return SqueezeExciteGate(skip, gate_axis, is_identity, reduction, activation)


def gated_axis(skip: LongSkip, gate_axis: str) -> tuple[int, int]:
    """Return the dimension of a skip along which each index gets its own factor, and its size."""
    return (1, skip.tokens) if gate_axis == "tokens" else (skip.channel_dim, skip.width)


class SkipGate(SkipFactor):
    """
    Base class of the gates: k = sigmoid(z(GAP(skip))), equation 9.

    Args:
        gate_axis: "channels" or "tokens". Each of them gets its own factor, and other dimensions are averaged.
        is_identity: k = 2 sigmoid(z), where z starts at 0, so that k starts at exactly 1 and has a gradient.
    """

    def __init__(self, skip: LongSkip, gate_axis: str, is_identity: bool):
        super().__init__(skip)
        self.dim, self.width = gated_axis(skip, gate_axis)
        self.is_identity = is_identity

    def forward(self, skip: torch.Tensor) -> torch.Tensor:
        pooled_dims = [d for d in range(1, skip.ndim) if d != self.dim]
        k = torch.sigmoid(self.predict(skip.mean(dim=pooled_dims)))
        if self.is_identity:
            k = 2 * k
        for d in pooled_dims:
            k = k.unsqueeze(d)
        return k

    def predict(self, pooled: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def initial_weights(self) -> tuple[float, float]:
        return 1.0, 1.0 if self.is_identity else 0.5


class SqueezeExciteGate(SkipGate):
    """z = W2 act(W1 x), the paper's gate."""

    def __init__(self, skip: LongSkip, gate_axis: str, is_identity: bool, reduction: int, activation: str):
        super().__init__(skip, gate_axis, is_identity)
        if reduction > self.width:
            raise UserError(
                f"reduction must be at most {self.width}, the width of the narrowest skip, got {reduction}"
            )
        self.squeeze = GateLinear(self.width, self.width // reduction)
        self.activation = ACTIVATIONS[activation]()
        self.excite = GateLinear(self.width // reduction, self.width)

    def reset_parameters(self):
        self.squeeze.reset_parameters()
        self.excite.reset_parameters()
        if self.is_identity:
            self.excite.weight.zero_()
            self.excite.bias.zero_()

    def predict(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.excite(self.activation(self.squeeze(pooled)))


class GateLinear(nn.Module):
    """
    A linear layer that computes in the dtype of its weights.

    It does not subclass `nn.Linear`, so that LoRA and quantization leave the gates alone.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def reset_parameters(self):
        for parameter in (self.weight, self.bias):
            _init_uniform(parameter, fan_in=self.weight.shape[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class InstanceEnhanceGate(SkipGate):
    """z = w x + b for each channel (Table 2, IE)."""

    def __init__(self, skip: LongSkip, gate_axis: str, is_identity: bool):
        super().__init__(skip, gate_axis, is_identity)
        self.weight = nn.Parameter(torch.empty(self.width))
        self.bias = nn.Parameter(torch.empty(self.width))

    def reset_parameters(self):
        for parameter in (self.weight, self.bias):
            if self.is_identity:
                parameter.zero_()
            else:
                _init_uniform(parameter, fan_in=1)

    def predict(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled.to(self.weight.dtype) * self.weight + self.bias


@register_skip_method("learnable", key="scalar")
class SkipScalar(SkipFactor):
    """Each long skip is multiplied by a learned number, which starts at 1 (Table 2)."""

    def __init__(self, skip: LongSkip):
        super().__init__(skip)
        self.value = nn.Parameter(torch.empty(1))

    def reset_parameters(self):
        self.value.fill_(1.0)

    def forward(self, skip: torch.Tensor) -> torch.Tensor:
        return self.value.clone()  # an offloaded parameter leaves the device after this forward


@register_skip_method("token_gates")
class TokenGate(SkipFactor):
    """
    Each position of a long skip is multiplied by 2 sigmoid(w s + b), a gate that starts at 1.

    As in modded-nanogpt, the gates learn 20 times more slowly than the model, without weight decay.
    """

    learning_rate_scale = 0.05
    has_weight_decay = False

    def __init__(self, skip: LongSkip):
        super().__init__(skip)
        self.linear = GateLinear(skip.width, 1)

    def reset_parameters(self):
        self.linear.weight.zero_()
        self.linear.bias.zero_()

    def forward(self, skip: torch.Tensor) -> torch.Tensor:
        dim = self.skip.channel_dim
        return 2 * torch.sigmoid(self.linear(skip.movedim(dim, -1))).movedim(-1, dim)


@register_skip_method("lerp")
class Lerp(SkipMix):
    """The hidden state is multiplied by a learned number f and the long skip by 1 - f, as in HDiT. f starts at 0.5."""

    has_weight_decay = False

    def __init__(self, skip: LongSkip):
        super().__init__(skip)
        self.value = nn.Parameter(torch.empty(1))

    def reset_parameters(self):
        self.value.fill_(0.5)

    def initial_weights(self) -> tuple[float, float]:
        return 0.5, 0.5

    def forward(self, hidden: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden * self.value.to(hidden), skip * (1 - self.value).to(skip)


@register_skip_method("normalized")
class NormalizedSkip(SkipMix):
    """A LayerNorm over the channels of the hidden state and the long skip together, as in HunyuanDiT and Skip-DiT."""

    def __init__(self, skip: LongSkip):
        super().__init__(skip)
        width = skip.hidden_width + skip.width
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def reset_parameters(self):
        self.weight.fill_(1)
        self.bias.zero_()

    def forward(self, hidden: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dim, dtype = self.skip.channel_dim, self.weight.dtype
        both = torch.cat([hidden.to(dtype), skip.to(dtype)], dim=dim).movedim(dim, -1)
        both = F.layer_norm(both, both.shape[-1:], self.weight, self.bias).movedim(-1, dim)
        return both.split([self.skip.hidden_width, self.skip.width], dim=dim)


def _init_uniform(parameter: torch.Tensor, fan_in: int):
    # Equals torch's Linear init. Numbers drawn on the CPU do not depend on the device.
    bound = 1 / math.sqrt(fan_in)
    parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32, device="cpu").uniform_(-bound, bound))
