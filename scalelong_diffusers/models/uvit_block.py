"""The transformer block of U-ViT, written to keep little for the backward pass."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


class UViTBlock(nn.Module):
    """A transformer block; in the decoder, one that first takes in a skip."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        mlp_size: int,
        block_scale: float | Literal["rezero"],
        has_skip: bool,
    ):
        super().__init__()
        # A linear layer on two concatenated tensors is the sum of one on each, which needs no concatenated copy.
        self.hidden_proj = nn.Linear(hidden_size, hidden_size) if has_skip else None
        self.skip_proj = nn.Linear(hidden_size, hidden_size, bias=False) if has_skip else None
        self.norm1 = nn.LayerNorm(hidden_size)
        self.attn = UViTAttention(hidden_size, num_attention_heads)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.mlp = UViTMLP(hidden_size, mlp_size)
        self.attn_residual = Residual(block_scale)
        self.mlp_residual = Residual(block_scale)
        self.gradient_checkpointing = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
        factor: torch.Tensor | float = 1.0,
    ) -> torch.Tensor:
        if skip is not None:
            hidden_states = self._take_in(hidden_states, skip, factor)
        hidden_states = self.attn_residual(hidden_states, self.attn(self.norm1(hidden_states), attention_mask))
        return self.mlp_residual(hidden_states, self.mlp(self.norm2(hidden_states)))

    def _take_in(self, hidden_states: torch.Tensor, skip: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
        hidden_states = self.hidden_proj(hidden_states)
        if isinstance(factor, torch.Tensor):
            skip = in_compute_dtype(skip)
            scaled = linear_of(
                self.skip_proj, torch.mul, skip, factor.to(skip.dtype), keep=self.gradient_checkpointing
            )
            return hidden_states + scaled
        # A constant is left to the addition, where it costs nothing.
        return torch.add(hidden_states, self.skip_proj(skip), alpha=factor)


class UViTAttention(nn.Module):
    """Self-attention. diffusers' names of its layers are what LoRA looks for."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.to_q = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_k = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_v = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(hidden_size, hidden_size)])

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        hidden_states = in_compute_dtype(hidden_states)  # once, and not by each of the three
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
        self.gradient_checkpointing = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.fc2(F.gelu(self.fc1(hidden_states)))  # each result goes as soon as the next is there
        return linear_of(self.fc2, F.gelu, self.fc1(hidden_states), keep=self.gradient_checkpointing)


class Residual(nn.Module):
    """x + t f(x), with t = 1 in the paper's models and its other values in Table 3."""

    def __init__(self, scale: float | Literal["rezero"]):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1)) if scale == "rezero" else scale

    def forward(self, hidden_states: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        if isinstance(self.scale, torch.Tensor):
            return hidden_states + self.scale.to(branch.dtype) * branch
        return torch.add(hidden_states, branch, alpha=self.scale)


def linear_of(
    linear: nn.Module, function: Callable[..., torch.Tensor], *inputs: torch.Tensor, keep: bool
) -> torch.Tensor:
    """
    `linear(function(*inputs))` for an elementwise function: the backward pass computes its result again instead of
    keeping it. For the MLP that is a quarter of all that a block keeps.

    With `keep` it does not, which is for gradient checkpointing: that computes the whole block again anyway.
    """
    value = function(*inputs)
    if keep or not value.requires_grad or _is_traced(value):
        return linear(value)
    place = value.data_ptr(), value.numel()

    def pack(saved: torch.Tensor):
        is_value = (saved.data_ptr(), saved.numel()) == place
        return (saved.shape, saved.stride()) if is_value else saved

    def unpack(packed):
        return function(*inputs).as_strided(*packed) if isinstance(packed, tuple) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return linear(value)


def _is_traced(tensor: torch.Tensor) -> bool:
    """
    Compilers choose themselves what to compute again, torch.func allows no hooks on what is saved, and the subclasses
    of tensor parallelism and the like have no memory to be recognised by.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or type(tensor) is not torch.Tensor
    )


def in_compute_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as autocast hands it to a linear layer."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
