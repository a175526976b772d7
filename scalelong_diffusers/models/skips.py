"""Where models keep their long skips: one table, and the hook that scales those of diffusers' on their way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from diffusers.models.resnet import SpatioTemporalResBlock
from torch import nn

from scalelong_diffusers.scaling import SkipScaler, SkipScalingConfig


@dataclass(frozen=True)
class LongSkip:
    """One long skip that the decoder consumes; `index` is the paper's i, 1 for the outermost."""

    index: int
    block: str  # the module that is handed the skip
    where: str  # the layer in front of which it is concatenated
    width: int
    tokens: int | None = None  # of a transformer


@dataclass(frozen=True)
class SkipLayout:
    """
    What has to be known of a model class to scale its long skips.

    Args:
        find: lists the skips of a model, from i = 1.
        argument: how the model hands its skips to a block: the name of the keyword, or the place among the positional
            arguments. None if its own forward goes through its `skip_scaler`.
        gate_dims: what a gate can work on, and which dimension of a skip that is; the paper's choice comes first.
    """

    find: Callable[[nn.Module], list[LongSkip]]
    argument: str | int | None = None
    gate_dims: Mapping[str, int] = field(default_factory=lambda: {"channels": 1})

    def resolve(self, config: SkipScalingConfig, skips: list[LongSkip]) -> SkipScalingConfig:
        """The config for a model with these skips."""
        config = config.resolve(len(skips), gate_axis=next(iter(self.gate_dims)))
        if config.gate_axis is not None and config.gate_axis not in self.gate_dims:
            raise ValueError("gate_axis='tokens' is for a U-ViT; the gates of a U-Net work on 'channels'")
        return config

    def gate_shape(self, config: SkipScalingConfig, skips: list[LongSkip]) -> tuple[list[int], int]:
        """The size of each skip along the axis that gates work on, and that axis; any will do without gates."""
        axis = config.gate_axis or next(iter(self.gate_dims))
        return [skip.tokens if axis == "tokens" else skip.width for skip in skips], self.gate_dims[axis]


def up_block_skips(model: nn.Module) -> list[LongSkip]:
    """The skips of a U-Net whose up-blocks concatenate them to the input of their resnets, the deepest first."""
    deepest_first = []
    hidden_width = model.config.block_out_channels[-1]
    for b, block in enumerate(model.up_blocks):
        if "res_hidden_states_tuple" not in signature(block.forward).parameters:
            raise ValueError(
                f"up_blocks.{b} of this {type(model).__name__} is of type {type(block).__name__}, which takes no long "
                "skip: it can not be scaled"
            )
        for r, resnet in enumerate(block.resnets):
            conv = resnet.spatial_res_block if isinstance(resnet, SpatioTemporalResBlock) else resnet
            # What a resnet takes beyond the hidden state is its skip. K-blocks have one for their first resnet alone.
            if conv.in_channels > hidden_width:
                deepest_first.append((f"up_blocks.{b}", f"up_blocks.{b}.resnets.{r}", conv.in_channels - hidden_width))
            hidden_width = conv.conv2.weight.shape[0]
    return [LongSkip(i, *skip) for i, skip in enumerate(reversed(deepest_first), start=1)]


def out_block_skips(model: nn.Module) -> list[LongSkip]:
    """The skips of a U-ViT, one for each block of its decoder."""
    tokens, width = model.pos_embed.shape[1:]
    outermost_first = reversed(range(len(model.out_blocks)))
    return [
        LongSkip(i, f"out_blocks.{b}", f"out_blocks.{b}.skip_proj", width, tokens)
        for i, b in enumerate(outermost_first, start=1)
    ]


# One row for each model that can be scaled. To support another one of diffusers', add its row here and a class of two
# lines beside the others in unets.py.
SKIP_LAYOUTS = {
    "UNet2DModel": SkipLayout(up_block_skips, argument=1),
    "UNet2DConditionModel": SkipLayout(up_block_skips, argument="res_hidden_states_tuple"),
    "UNet3DConditionModel": SkipLayout(up_block_skips, argument="res_hidden_states_tuple"),
    "I2VGenXLUNet": SkipLayout(up_block_skips, argument="res_hidden_states_tuple"),
    "UNetMotionModel": SkipLayout(up_block_skips, argument="res_hidden_states_tuple"),
    "UNetSpatioTemporalConditionModel": SkipLayout(up_block_skips, argument="res_hidden_states_tuple"),
    "UViTModel": SkipLayout(out_block_skips, gate_dims={"tokens": 1, "channels": 2}),
}


class SkipHook:
    """
    Forward pre-hook of a decoder block that scales the skips the block is about to consume.

    An instance of a module-level class, and not a closure, so that a model with it can be copied and pickled.
    """

    def __init__(self, scaler: SkipScaler, indices: tuple[int, ...], argument: str | int):
        self.scaler = scaler
        self.indices = indices
        self.argument = argument

    def __call__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if all(self.scaler.is_identity(i) for i in self.indices):
            return None
        if isinstance(self.argument, str):
            return args, {**kwargs, self.argument: self._scaled(kwargs[self.argument])}
        return (*args[: self.argument], self._scaled(args[self.argument]), *args[self.argument + 1 :]), kwargs

    def _scaled(self, skips: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
        unused = len(skips) - len(self.indices)  # K-blocks are handed more skips than they take: the last
        scaled = LazilyScaledSkips(skips, self.scaler, (None,) * unused + self.indices)
        # A compiler plans memory itself, and does best with plain tensors.
        return tuple(scaled) if torch.compiler.is_compiling() else scaled


class LazilyScaledSkips(Sequence):
    """
    The skips of one block, each scaled when the block takes it: one scaled copy is alive at a time, not all of them.

    It stands in for the tuple of skips but is none, so that nothing can get at them unscaled.
    """

    def __init__(self, skips: tuple[torch.Tensor, ...], scaler: SkipScaler, indices: tuple[int | None, ...]):
        self._skips = skips
        self._scaler = scaler
        self._indices = indices

    def __len__(self) -> int:
        return len(self._skips)

    def __getitem__(self, key):
        skip, index = self._skips[key], self._indices[key]
        if isinstance(key, slice):
            return LazilyScaledSkips(skip, self._scaler, index)
        return skip if index is None else self._scaler(skip, index)

    def to(self, *args, **kwargs) -> tuple[torch.Tensor, ...]:
        """What moves the inputs of a block to another device asks each of them for this."""
        return tuple(skip.to(*args, **kwargs) for skip in self)


def add_skip_hooks(model: nn.Module, scaler: SkipScaler, skips: list[LongSkip], argument: str | int):
    for name in dict.fromkeys(skip.block for skip in skips):
        indices = tuple(skip.index for skip in skips if skip.block == name)
        hook = SkipHook(scaler, indices, argument)
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


def remove_skip_hooks(model: nn.Module):
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, SkipHook)]:
            del module._forward_pre_hooks[key]
            del module._forward_pre_hooks_with_kwargs[key]


def running_scaler(model: nn.Module, layout: SkipLayout) -> SkipScaler | None:
    """The scaler that the model's forward really goes through, whatever its config says."""
    if layout.argument is None:
        return model.skip_scaler
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return next((hook.scaler for hook in hooks if isinstance(hook, SkipHook)), None)
