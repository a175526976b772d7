"""
Self-conditioning: what the middle block knows about an image conditions the decoder, in the same forward pass.

An experiment after the idea of DDAE++ (arXiv 2505.10999); the definition is ours. The features of the middle
block are averaged over all positions, normalized, and projected by a linear layer that starts at zero.
"""

from typing import Any

import torch
from diffusers import ModelMixin
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.models.skips import argument_at, replaced


class SelfConditioning(nn.Module):
    """The projection of pooled features. Its output is zero in a new model."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.norm = nn.LayerNorm(in_features)
        # Without random numbers, so that the other weights start as in a model without self-conditioning.
        self.proj = nn.utils.skip_init(nn.Linear, in_features, out_features, device=torch.get_default_device())
        for parameter in self.proj.parameters():
            nn.init.zeros_(parameter)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project features of the shape `(batch, positions, channels)` to `(batch, out_features)`."""
        return self.proj(self.norm(features.mean(1)))


def condition_time_embedding(model: ModelMixin, argument: str | int):
    """
    Make a new U-Net add the projection to the time embedding that its up-blocks receive.

    Args:
        argument: name or position of the time embedding among the arguments of an up-block.
    """
    if model.mid_block is None:
        raise UserError(f"self_conditioning needs a middle block, and this {type(model).__name__} has none")
    width = model.time_embedding.linear_2.out_features
    model.self_conditioner = SelfConditioning(model.config.block_out_channels[-1], width)
    hooks = _Hooks(model.self_conditioner, argument)
    model.mid_block.register_forward_hook(hooks.after_middle)
    for block in model.up_blocks:
        block.register_forward_pre_hook(hooks.before_up_block, with_kwargs=True)
    model.up_blocks[-1].register_forward_hook(hooks.after_last)


class _Hooks:
    """Hooks that carry the projection from the middle block to the up-blocks, and then forget it."""

    def __init__(self, project: SelfConditioning, argument: str | int):
        self.project = project
        self.argument = argument
        self.shift: torch.Tensor | None = None

    def after_middle(self, block: nn.Module, args: tuple, output: torch.Tensor):
        self.shift = self.project(output.flatten(2).transpose(1, 2))

    def before_up_block(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        if self.shift is None:  # a checkpoint of a whole block runs it again
            raise UserError(
                f"a {type(block).__name__} with self_conditioning runs only in the forward pass of its model: turn "
                "off activation checkpointing of whole blocks, or use enable_gradient_checkpointing"
            )
        embedding = argument_at(args, kwargs, self.argument) + self.shift
        return replaced(args, kwargs, {self.argument: embedding})

    def after_last(self, block: nn.Module, args: tuple, output: torch.Tensor):
        self.shift = None
