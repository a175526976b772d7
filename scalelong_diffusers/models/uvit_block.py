"""The transformer block of U-ViT, which saves few tensors for the backward pass."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from scalelong_diffusers.internals import has_functorch_transform, has_saved_tensors_hooks


class UViTBlock(nn.Module):
    """A transformer block. Blocks of the decoder also take a skip."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        mlp_size: int,
        block_scale: float | Literal["rezero"],
        has_skip: bool,
    ):
        super().__init__()
        # A linear layer on two concatenated tensors equals the sum of two linear layers, which need no copy.
        self.hidden_proj = nn.Linear(hidden_size, hidden_size) if has_skip else None
        self.skip_proj = nn.Linear(hidden_size, hidden_size, bias=False) if has_skip else None
        self.norm1 = nn.LayerNorm(hidden_size)
        self.attn = UViTAttention(hidden_size, num_attention_heads)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.mlp = UViTMLP(hidden_size, mlp_size)
        self.attn_residual = Residual(block_scale)
        self.mlp_residual = Residual(block_scale)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
        factor: torch.Tensor | float = 1.0,
    ) -> torch.Tensor:
        if skip is not None:
            hidden_states = self._add_skip(hidden_states, skip, factor)
        hidden_states = self.attn_residual(hidden_states, self.attn(self.norm1(hidden_states), attention_mask))
        return self.mlp_residual(hidden_states, self.mlp(self.norm2(hidden_states)))

    def _add_skip(self, hidden_states: torch.Tensor, skip: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
        hidden_states = self.hidden_proj(hidden_states)
        if isinstance(factor, torch.Tensor):
            skip = in_compute_dtype(skip)
            return hidden_states + linear_of(self.skip_proj, torch.mul, skip, factor.to(skip.dtype))
        # The addition applies a constant factor at no cost.
        return torch.add(hidden_states, self.skip_proj(skip), alpha=factor)


class UViTAttention(nn.Module):
    """Self-attention. The names of the layers are diffusers' own, which LoRA looks for."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.to_q = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_k = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_v = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(hidden_size, hidden_size)])

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        hidden_states = in_compute_dtype(hidden_states)  # one cast instead of three
        query, key, value = (
            project(hidden_states).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return self.to_out[0](attended.transpose(1, 2).flatten(2))


class UViTMLP(nn.Module):
    def __init__(self, hidden_size: int, mlp_size: int):
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, mlp_size)
        self.fc2 = nn.Linear(mlp_size, hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.fc2(F.gelu(self.fc1(hidden_states)))  # frees each intermediate result early
        return linear_of(self.fc2, F.gelu, self.fc1(hidden_states))


class Residual(nn.Module):
    """x + t f(x). The paper's models have t = 1; Table 3 compares other values."""

    def __init__(self, scale: float | Literal["rezero"]):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1)) if scale == "rezero" else scale

    def forward(self, hidden_states: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        if isinstance(self.scale, torch.Tensor):
            return hidden_states + self.scale.to(branch.dtype) * branch
        return torch.add(hidden_states, branch, alpha=self.scale)


def linear_of(linear: nn.Module, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """
    Return `linear(function(*inputs))` for an elementwise function, which the backward pass computes again.

    In the MLP this saves a quarter of a block's activations. It does nothing if activation checkpointing is on, which
    recomputes the block anyway.
    """
    value = function(*inputs)
    if not value.requires_grad or is_traced(value) or has_saved_tensors_hooks():
        return linear(value)
    place = value.data_ptr(), value.numel()

    def pack(saved: torch.Tensor):
        is_value = (saved.data_ptr(), saved.numel()) == place
        return (saved.shape, saved.stride()) if is_value else saved

    def unpack(packed):
        return function(*inputs).as_strided(*packed) if isinstance(packed, tuple) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return linear(value)


def is_traced(tensor: torch.Tensor) -> bool:
    """
    Return whether Python cannot look at the tensor's memory or hook into autograd.

    This is the case in compilers, in transforms of torch.func, and for tensor subclasses such as fake tensors.
    """
    return torch.compiler.is_compiling() or has_functorch_transform() or type(tensor) is not torch.Tensor


def in_compute_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor as autocast does for a linear layer."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensor
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
