"""Where models keep their long skips, and the hook that scales the skips of diffusers' U-Nets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from diffusers.models.resnet import SpatioTemporalResBlock
from torch import nn
from torch.utils.hooks import RemovableHandle

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.scaling import SkipScaler, SkipScalingConfig


@dataclass(frozen=True)
class LongSkip:
    """A long skip that the decoder consumes."""

    index: int  # the paper's i, 1 for the outermost
    block: str  # the module that receives the skip
    where: str  # the layer in front of which the skip is concatenated
    width: int
    hidden_width: int  # of the hidden state that it is concatenated to
    tokens: int | None = None  # in a transformer


class SkipLayout:
    """
    Base class of [`UpBlockSkips`] and [`OutBlockSkips`], which know where a model keeps its long skips.

    A subclass implements `find(model)`, which returns the [`LongSkip`]s from i = 1, the outermost. It also implements
    `add_hooks`, unless the model's own forward calls its `skip_scaler`.
    """

    # The dimension of a skip for each accepted `gate_axis`. The paper's choice comes first.
    gate_dims: Mapping[str, int] = {"channels": 1}

    def add_hooks(self, model: nn.Module, scaler: SkipScaler, skips: list[LongSkip]) -> list[RemovableHandle]:
        """Register the hooks that scale the skips, and return their handles."""
        return []

    def skip_layer(self, model: nn.Module, skip: LongSkip) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights `(out, in)` with which the layer that consumes a skip reads h and s, as views."""
        raise NotImplementedError

    def resolve(self, config: SkipScalingConfig, skips: list[LongSkip]) -> SkipScalingConfig:
        """Return the config for a model with these skips, with every `"auto"` replaced by its value."""
        if not skips:
            raise UserError("this model has no long skips")
        config = config.resolve(len(skips), gate_axis=next(iter(self.gate_dims)))
        if config.gate_axis is not None and config.gate_axis not in self.gate_dims:
            accepted = " or ".join(self.gate_dims)
            raise UserError(f"gate_axis must be {accepted} for this model, got {config.gate_axis!r}")
        return config

    def build_scaler(self, config: SkipScalingConfig, skips: list[LongSkip], device=None, dtype=None) -> SkipScaler:
        config = self.resolve(config, skips)
        axis = config.gate_axis or next(iter(self.gate_dims))
        sizes = [skip.tokens if axis == "tokens" else skip.width for skip in skips]
        return SkipScaler(config, sizes, self.gate_dims[axis], device, dtype)


@dataclass(frozen=True)
class UpBlockSkips(SkipLayout):
    """
    The layout of diffusers' U-Nets: up-blocks receive a tuple of skips and concatenate them to the input of their
    resnets, the deepest first. The model passes the tuple as the keyword argument with the name `argument`, or as the
    positional argument with this index.
    """

    argument: str | int

    def find(self, model: nn.Module) -> list[LongSkip]:
        deepest_first = []
        hidden_width = model.config.block_out_channels[-1]
        for b, block in enumerate(model.up_blocks):
            if "res_hidden_states_tuple" not in signature(block.forward).parameters:
                raise UserError(
                    f"up_blocks.{b} of this {type(model).__name__} is a {type(block).__name__}, which takes no long "
                    "skips: the model cannot be scaled"
                )
            for r, resnet in enumerate(block.resnets):
                resnet = _resnet(resnet)
                # Input channels beyond the hidden state belong to a skip. In K-blocks, only the first resnet has one.
                if resnet.in_channels > hidden_width:
                    width = resnet.in_channels - hidden_width
                    deepest_first.append((f"up_blocks.{b}", f"up_blocks.{b}.resnets.{r}", width, hidden_width))
                # The shortcut is added to the output, so it has the same width.
                shortcut = resnet.conv_shortcut
                hidden_width = resnet.in_channels if shortcut is None else shortcut.weight.shape[0]
        return [LongSkip(i, *skip) for i, skip in enumerate(reversed(deepest_first), start=1)]

    def add_hooks(self, model: nn.Module, scaler: SkipScaler, skips: list[LongSkip]) -> list[RemovableHandle]:
        handles = []
        for name in dict.fromkeys(skip.block for skip in skips):
            hook = SkipHook(scaler, tuple(skip.index for skip in skips if skip.block == name), self.argument)
            handles.append(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
        return handles

    def skip_layer(self, model: nn.Module, skip: LongSkip) -> tuple[torch.Tensor, torch.Tensor]:
        resnet = _resnet(model.get_submodule(skip.where))
        return resnet.conv_shortcut.weight[:, :, 0, 0].tensor_split([skip.hidden_width], dim=1)


def _resnet(module: nn.Module) -> nn.Module:
    return module.spatial_res_block if isinstance(module, SpatioTemporalResBlock) else module


class OutBlockSkips(SkipLayout):
    """The layout of a U-ViT: each decoder block takes one skip, and the model's forward calls its `skip_scaler`."""

    gate_dims = {"tokens": 1, "channels": 2}

    def find(self, model: nn.Module) -> list[LongSkip]:
        tokens, width = model.pos_embed.shape[1:]
        outermost_first = reversed(range(len(model.out_blocks)))
        return [
            LongSkip(i, f"out_blocks.{b}", f"out_blocks.{b}.skip_proj", width, width, tokens)
            for i, b in enumerate(outermost_first, start=1)
        ]

    def skip_layer(self, model: nn.Module, skip: LongSkip) -> tuple[torch.Tensor, torch.Tensor]:
        block = model.get_submodule(skip.block)
        return block.hidden_proj.weight, block.skip_proj.weight


class SkipHook:
    """
    Forward pre-hook of an up-block that scales the skips the block will consume.

    It is a class and not a closure, so that models with hooks can be copied and pickled.
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
        unused = len(skips) - len(self.indices)  # K-blocks receive several skips and consume only the last one
        scaled = LazilyScaledSkips(skips, self.scaler, (None,) * unused + self.indices)
        # A compiler plans memory itself and needs plain tensors.
        return tuple(scaled) if torch.compiler.is_compiling() else scaled


class LazilyScaledSkips(Sequence):
    """
    The skips of one block. Each is scaled when the block reads it, so only one scaled copy is alive at a time.

    It does not subclass `tuple`, so that no code can read the skips unscaled.
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
        """Move all skips, as code that moves the inputs of a block to another device expects."""
        return tuple(skip.to(*args, **kwargs) for skip in self)
