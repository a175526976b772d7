"""
How the layers that read the long skips start in a model that is trained from scratch.

In the paper's theory a decoder block receives the sum h + k s of the hidden state h and the skip s (equation 1). In a
U-ViT and in diffusers' U-Nets it receives the output of a layer on [h, k s], which starts at random. The starts in
this module are the theory's sum and its relatives.
"""

import torch
from diffusers import ModelMixin
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.internals import write_config_entry
from scalelong_diffusers.models.mixin import SkipScalingMixin, skip_layout


REFERENCE = "reference"
SKIP_INITS = (REFERENCE, "zero", "sum", "balanced")


@torch.no_grad()
def start_layers(model: ModelMixin, skip_init: str, zero_init_residual: bool):
    """Initialize the layers of a new model, as `apply_skip_init` describes. Other weights do not change."""
    for name, value in {"skip_init": skip_init, "zero_init_residual": zero_init_residual}.items():
        if model.config.get(name, value) != value:  # only a U-ViT stores them
            write_config_entry(model, name, value)
    layout, is_scaled = skip_layout(model), isinstance(model, SkipScalingMixin)
    for layer in layout.branch_ends(model) if zero_init_residual else ():
        for parameter in layer.parameters():
            parameter.zero_()
    for skip in layout.find(model) if skip_init != REFERENCE else ():
        layer = layout.skip_layer(model, skip)
        if layer is None:
            continue
        hidden, skipped = _identity_like(layer.hidden_weight), _identity_like(layer.skip_weight)
        if skip_init == "zero":
            skipped.zero_()
        elif skip_init == "balanced":
            # Where widths differ, channel c of the output receives channel c of h and of s if they have one.
            a, k = model.skip_scaler.initial_weights(skip.index) if is_scaled else (1.0, 1.0)
            norms = torch.hypot(a * hidden.sum(1, keepdim=True), k * skipped.sum(1, keepdim=True)).clamp(min=1e-6)
            hidden, skipped = hidden / norms, skipped / norms
        layer.hidden_weight.copy_(hidden)
        layer.skip_weight.copy_(skipped)
        if layer.bias is not None:
            layer.bias.zero_()


def skip_layer_parameters(model: ModelMixin) -> list[nn.Parameter]:
    """Return the parameters of the layers through which the long skips join the residual path."""
    layout = skip_layout(model)
    layers = [layout.skip_layer(model, skip) for skip in layout.find(model)]
    return [parameter for layer in layers if layer is not None for parameter in layer.parameters]


def _identity_like(weight: torch.Tensor) -> torch.Tensor:
    identity = torch.zeros_like(weight)
    identity.diagonal().fill_(1)
    return identity


def check_untrained(model: nn.Module):
    """Raise a `UserError` if a norm of the model is not in its initial state."""
    for name, module in model.named_modules():
        if isinstance(module, nn.GroupNorm | nn.LayerNorm) and module.weight is not None:
            bias = module.weight.new_zeros(1) if module.bias is None else module.bias
            if module.weight.ne(1).any() or bias.ne(0).any():
                raise UserError(
                    f"the weights of this {type(model).__name__} are trained ({name} is not in its initial state), "
                    "and skip_init would destroy them: use it only for a model that is trained from scratch"
                )
