"""Where models keep their long skips, and the hooks that scale the skips in front of the layers that read them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from diffusers.models.resnet import SpatioTemporalResBlock
from torch import nn
from torch.utils.hooks import RemovableHandle

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.scaling import LongSkip, SkipScaler, SkipScalingConfig


_NO_SKIP_LAYERS = (
    "the layout of {} does not define skip_layer and branch_ends, which skip_init, zero_init_residual and "
    "skip_lr_scale need"
)


class SkipLayer(NamedTuple):
    """
    A layer that reads a hidden state and a skip.

    Args:
        hidden_weight, skip_weight: the weights `(out, in)` of both, which can be views.
        bias: the bias, if there is one.
        parameters: the parameters of the layer.
    """

    hidden_weight: torch.Tensor
    skip_weight: torch.Tensor
    bias: torch.Tensor | None
    parameters: list[nn.Parameter]


class SkipObserver:
    """Base class of objects that see each hidden state and skip where they meet. See [`SkipLayout.observe`]."""

    def skip(self, index: int, skip: torch.Tensor) -> torch.Tensor:
        """Return the skip, before it is scaled, or a view of it."""
        return skip

    def hidden(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden state, before it is scaled, or a view of it. More channels, of the skip, may follow."""
        return hidden

    def meeting(self, index: int, hidden: torch.Tensor, skip: torch.Tensor):
        """Receive both as the consuming layer reads them."""


class SkipLayout:
    """
    Base class of the layouts, which know where a model keeps its long skips.

    A subclass implements `find`. It also implements `add_hooks`, unless the model's own forward calls its
    `skip_scaler`, and the methods of the features that its models can use:

    - `skip_layer`: `apply_skip_init` and `skip_lr_scale`;
    - `branch_ends`: `zero_init_residual`;
    - `linear_weights`: `fuse_skip_scaling` and `preserve_output`;
    - `observe`: diagnoses and probes;
    - `image_of`: the grids of probes, if hidden states of an image do not have four dimensions;
    - `inner_layers`: `apply_skip_cache`.
    """

    def find(self, model: nn.Module) -> list[LongSkip]:
        """Return the long skips from i = 1, the outermost."""
        raise NotImplementedError

    def add_hooks(self, model: nn.Module, scaler: SkipScaler, skips: list[LongSkip]) -> list[RemovableHandle]:
        """Register the hooks that scale the skips, and return their handles."""
        return []

    def skip_layer(self, model: nn.Module, skip: LongSkip) -> SkipLayer | None:
        """Return the layer through which a skip joins the residual path, or None if there is no layer."""
        raise UserError(_NO_SKIP_LAYERS.format(type(model).__name__))

    def branch_ends(self, model: nn.Module) -> list[nn.Module]:
        """Return the last layers of the residual branches."""
        raise UserError(_NO_SKIP_LAYERS.format(type(model).__name__))

    def linear_weights(self, model: nn.Module, skip: LongSkip) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the weights by which each layer multiplies the hidden state and the skip, as views."""
        raise UserError(
            f"factors cannot move into the weights of this {type(model).__name__}: the layers that read its "
            "long skips are not linear; a norm may come first"
        )

    def observe(self, model: nn.Module, observer: SkipObserver, skips: list[LongSkip]) -> list[RemovableHandle]:
        """Register the hooks that call an observer in each forward pass, and return their handles."""
        raise UserError(f"the layout of {type(model).__name__} does not define observe, which a diagnosis needs")

    def image_of(self, model: nn.Module, states: torch.Tensor) -> torch.Tensor | None:
        """Return hidden states as `(batch, channels, height, width)`, or None if they do not belong to an image."""
        return states if states.ndim == 4 else None

    def inner_layers(self, model: nn.Module, depth: int) -> list[str]:
        """
        Return the names of the modules that affect the output only through the hidden state that meets skip `depth`.

        They are in the order of the forward pass, in which each of them runs once.
        """
        raise UserError(f"the layout of {type(model).__name__} does not define inner_layers, which a skip cache needs")

    def resolve(self, config: SkipScalingConfig, skips: list[LongSkip]) -> SkipScalingConfig:
        """Return the config for a model with these skips, with every `"auto"` replaced by its value."""
        if not skips:
            raise UserError("this model has no long skips")
        axes = ["channels"] if skips[0].tokens is None else ["tokens", "channels"]  # the paper's choice comes first
        config = config.resolve(len(skips), gate_axis=axes[0])
        if config.gate_axis is not None and config.gate_axis not in axes:
            raise UserError(f"gate_axis must be {' or '.join(axes)} for this model, got {config.gate_axis!r}")
        return config

    def build_scaler(self, config: SkipScalingConfig, skips: list[LongSkip], device=None, dtype=None) -> SkipScaler:
        return SkipScaler(self.resolve(config, skips), skips, device, dtype)


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
            if not any(name.startswith("res_hidden_states_tuple") for name in signature(block.forward).parameters):
                raise UserError(
                    f"up_blocks.{b} of this {type(model).__name__} is a {type(block).__name__}, which takes no long "
                    "skips: the model cannot be scaled"
                )
            for r, resnet in enumerate(block.resnets):
                resnet = _spatial(resnet)
                # Input channels beyond the hidden state belong to a skip. In K-blocks, only the first resnet has one.
                if resnet.in_channels > hidden_width:
                    width = resnet.in_channels - hidden_width
                    deepest_first.append((f"up_blocks.{b}", f"up_blocks.{b}.resnets.{r}", width, hidden_width))
                # The shortcut is added to the output, so it has the same width.
                shortcut = resnet.conv_shortcut
                hidden_width = resnet.in_channels if shortcut is None else shortcut.weight.shape[0]
        count = len(deepest_first)
        return [LongSkip(i, count, *skip) for i, skip in enumerate(reversed(deepest_first), start=1)]

    def add_hooks(self, model: nn.Module, scaler: SkipScaler, skips: list[LongSkip]) -> list[RemovableHandle]:
        hooks = {}
        for name in dict.fromkeys(skip.block for skip in skips):
            indices = tuple(skip.index for skip in skips if skip.block == name)
            hooks[name] = SkipTupleHook(scaler, indices, self.argument)
        for skip in skips:
            hooks[skip.where] = ConcatenationHook(scaler, skip, only_mixes=True)
        return [
            model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True) for name, hook in hooks.items()
        ]

    def skip_layer(self, model: nn.Module, skip: LongSkip) -> SkipLayer | None:
        shortcut = _spatial(model.get_submodule(skip.where)).conv_shortcut
        if shortcut is None:
            return None
        hidden, skipped = shortcut.weight[:, :, 0, 0].tensor_split([skip.hidden_width], dim=1)
        return SkipLayer(hidden, skipped, shortcut.bias, list(shortcut.parameters()))

    def observe(self, model: nn.Module, observer: SkipObserver, skips: list[LongSkip]) -> list[RemovableHandle]:
        handles = []
        for name in dict.fromkeys(skip.block for skip in skips):
            indices = tuple(skip.index for skip in skips if skip.block == name)
            hook = SkipTupleObserver(observer, indices, self.argument)
            # First, so that it sees the skips that are not scaled yet.
            handles.append(model.get_submodule(name).register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        for skip in skips:
            layer, hook = model.get_submodule(skip.where), ConcatenationObserver(observer, skip)
            handles.append(layer.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True))
            handles.append(layer.register_forward_pre_hook(hook.after, with_kwargs=True))
        return handles

    def branch_ends(self, model: nn.Module) -> list[nn.Module]:
        # Imported late, because a third of a second is long for those who do not call this.
        from diffusers.models import Transformer2DModel, TransformerTemporalModel
        from diffusers.models.attention_processor import Attention
        from diffusers.models.resnet import ResnetBlock2D, ResnetBlockCondNorm2D, TemporalResnetBlock
        from diffusers.models.transformers.transformer_temporal import TransformerSpatioTemporalModel
        from diffusers.models.unets.unet_2d_blocks import KAttentionBlock
        from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D

        transformers = (
            Transformer2DModel | TransformerTemporalModel | TransformerSpatioTemporalModel | AnimateDiffTransformer3D
        )
        resnets = ResnetBlock2D | ResnetBlockCondNorm2D | TemporalResnetBlock
        if not all(isinstance(_spatial(resnet), resnets) for block in model.up_blocks for resnet in block.resnets):
            return super().branch_ends(model)
        ends = []
        for module in model.modules():
            if isinstance(module, resnets):
                ends.append(module.conv2)
            elif isinstance(module, transformers):
                ends.append(module.proj_out)
            elif isinstance(module, KAttentionBlock):
                ends.append(module.attn2.to_out[0])
                if module.add_self_attention:
                    ends.append(module.attn1.to_out[0])
            elif isinstance(module, Attention) and module.residual_connection:
                ends.append(module.to_out[0])
        return ends

    def inner_layers(self, model: nn.Module, depth: int) -> list[str]:
        skips, makers = self.find(model), _makers(model)
        if len(makers) != len(skips):
            raise UserError(
                f"a skip cache needs blocks that read every skip that is made, but this {type(model).__name__} makes "
                f"{len(makers)} and reads {len(skips)}"
            )
        maker, last_layer = makers[depth - 1]
        down = [f"down_blocks.{b}" for b in range(len(model.down_blocks))]
        names = []
        if last_layer is not None:
            names += _layers_after(model.get_submodule(maker), maker, last_layer)
        names += down[down.index(maker) + 1 if maker in down else 0 :]
        names += ["mid_block"] if model.mid_block is not None else []
        reader, first_layer = skips[depth - 1].block, int(skips[depth - 1].where.rpartition(".")[2])
        up = [f"up_blocks.{b}" for b in range(len(model.up_blocks))]
        names += up[: up.index(reader)]
        return names + _layers_before(model.get_submodule(reader), reader, first_layer)


# Lists in a block of a U-Net whose entries do not belong to its resnets.
_SAMPLERS = ("downsamplers", "upsamplers")


def _makers(model: nn.Module) -> list[tuple[str, int | None]]:
    """Return the block and the number of the layer that make each skip. Samplers, which come last, have no number."""
    makers: list[tuple[str, int | None]] = [("conv_in", None)]
    for b, block in enumerate(model.down_blocks):
        makers += [(f"down_blocks.{b}", r) for r in range(len(block.resnets))]
        if block.downsamplers is not None:
            makers.append((f"down_blocks.{b}", None))
    return makers


def _layers_before(block: nn.Module, name: str, first: int) -> list[str]:
    """Return the layers of a block that run before the resnet with a number."""
    return [f"{name}.{child}.{k}" for k in range(first) for child in _layer_lists(block)]


def _layers_after(block: nn.Module, name: str, last: int) -> list[str]:
    """Return the layers of a block that run after the resnet with a number and the layers that belong to it."""
    layers = _layer_lists(block)
    names = [f"{name}.{child}.{k}" for k in range(last + 1, len(block.resnets)) for child in layers]
    for child, module in block.named_children():
        if isinstance(module, nn.ModuleList) and child not in layers:
            names += [f"{name}.{child}.{k}" for k in range(len(module))]
        elif child not in layers:
            names.append(f"{name}.{child}")
    return names


def _layer_lists(block: nn.Module) -> list[str]:
    """Return the names of the lists that have an entry for each resnet, such as attentions."""
    lists = {name: child for name, child in block.named_children() if isinstance(child, nn.ModuleList)}
    return [name for name, child in lists.items() if name not in _SAMPLERS and len(child) == len(block.resnets)]


def _spatial(resnet: nn.Module) -> nn.Module:
    return resnet.spatial_res_block if isinstance(resnet, SpatioTemporalResBlock) else resnet


@dataclass(frozen=True)
class BlockSkips(SkipLayout):
    """
    The layout of models whose decoder blocks read one skip each.

    Args:
        blocks: name of the list of decoder blocks. The deepest block comes first.
        widths: function that returns the number of channels of a block's hidden state and of its skip, or None for a
            block without a skip.
        argument: name or position of the skip among the arguments of the layer that reads it, or None if this layer
            receives the concatenation of hidden state and skip.
        hidden: name or position of the hidden state.
        layer: name of this layer inside the block. By default it is the block itself.
        channel_dim: dimension of the channels.
        linear_layers: function that returns the layers of a block that read the concatenation, if all are linear.
    """

    blocks: str
    widths: Callable[[nn.Module], tuple[int, int] | None]
    argument: str | int | None = 1
    hidden: str | int = 0
    layer: str = ""
    channel_dim: int = 1
    linear_layers: Callable[[nn.Module], list[nn.Module]] | None = None

    def find(self, model: nn.Module) -> list[LongSkip]:
        widths = {f"{self.blocks}.{b}": self.widths(block) for b, block in enumerate(model.get_submodule(self.blocks))}
        outermost_first = [name for name in reversed(widths) if widths[name] is not None]
        return [
            LongSkip(
                i,
                len(outermost_first),
                name,
                f"{name}.{self.layer}".rstrip("."),
                *widths[name][::-1],
                self.channel_dim,
            )
            for i, name in enumerate(outermost_first, start=1)
        ]

    def add_hooks(self, model: nn.Module, scaler: SkipScaler, skips: list[LongSkip]) -> list[RemovableHandle]:
        return [
            model.get_submodule(skip.where).register_forward_pre_hook(
                ConcatenationHook(scaler, skip)
                if self.argument is None
                else SkipTensorHook(scaler, skip.index, self.hidden, self.argument),
                with_kwargs=True,
            )
            for skip in skips
        ]

    def linear_weights(self, model: nn.Module, skip: LongSkip) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self.linear_layers is None:
            return super().linear_weights(model, skip)
        layers = self.linear_layers(model.get_submodule(skip.block))
        if not all(isinstance(layer, nn.Linear | nn.Conv1d) for layer in layers):
            return super().linear_weights(model, skip)
        return [layer.weight.tensor_split([skip.hidden_width], dim=1) for layer in layers]

    def observe(self, model: nn.Module, observer: SkipObserver, skips: list[LongSkip]) -> list[RemovableHandle]:
        handles = []
        for skip in skips:
            layer = model.get_submodule(skip.where)
            hook = (
                ConcatenationObserver(observer, skip, sees_skip=True)
                if self.argument is None
                else SkipTensorObserver(observer, skip, self)
            )
            handles.append(layer.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True))
            handles.append(layer.register_forward_pre_hook(hook.after, with_kwargs=True))
        return handles


class OutBlockSkips(SkipLayout):
    """The layout of a U-ViT: each decoder block takes one skip, and the model's forward calls its `skip_scaler`."""

    def find(self, model: nn.Module) -> list[LongSkip]:
        tokens, width = model.pos_embed.shape[1:]
        names = [f"out_blocks.{b}" for b in reversed(range(len(model.out_blocks)))]
        return [
            LongSkip(i, len(names), name, f"{name}.skip_proj", width, width, channel_dim=2, tokens=tokens)
            for i, name in enumerate(names, start=1)
        ]

    def skip_layer(self, model: nn.Module, skip: LongSkip) -> SkipLayer:
        block = model.get_submodule(skip.block)
        hidden, skipped = block.hidden_proj, block.skip_proj
        parameters = [*hidden.parameters(), *skipped.parameters()]
        return SkipLayer(hidden.weight, skipped.weight, hidden.bias, parameters)

    def linear_weights(self, model: nn.Module, skip: LongSkip) -> list[tuple[torch.Tensor, torch.Tensor]]:
        block = model.get_submodule(skip.block)
        return [(block.hidden_proj.weight, block.skip_proj.weight)]

    def observe(self, model: nn.Module, observer: SkipObserver, skips: list[LongSkip]) -> list[RemovableHandle]:
        hook = ScalerObserver(observer)
        scaler = model.skip_scaler
        return [scaler.register_forward_pre_hook(hook.before), scaler.register_forward_hook(hook.after)]

    def image_of(self, model: nn.Module, states: torch.Tensor) -> torch.Tensor | None:
        patches = states[:, model.num_extra_tokens :]
        is_of_sample_size = patches.shape[1] == model.grid[0] * model.grid[1]
        return patches.transpose(1, 2).unflatten(2, model.grid) if is_of_sample_size else None

    def inner_layers(self, model: nn.Module, depth: int) -> list[str]:
        count = len(model.in_blocks)
        encoder = [f"in_blocks.{b}" for b in range(depth, count)]
        return [*encoder, "mid_block", *(f"out_blocks.{b}" for b in range(count - depth))]

    def branch_ends(self, model: nn.Module) -> list[nn.Module]:
        if model.config.block_scale == "rezero":
            raise UserError(
                "zero_init_residual=True and block_scale='rezero' both start the branches at zero, so that they would "
                "never learn: use one of them"
            )
        blocks = [*model.in_blocks, model.mid_block, *model.out_blocks]
        return [end for block in blocks for end in (block.attn.to_out[0], block.mlp.fc2)]


# The hooks are classes and not closures, so that models with hooks can be copied and pickled.


class SkipTupleHook:
    """
    Forward pre-hook of an up-block that multiplies the skips the block will consume.

    Methods that also change the hidden state act later, in a [`ConcatenationHook`].
    """

    def __init__(self, scaler: SkipScaler, indices: tuple[int, ...], argument: str | int):
        self.scaler = scaler
        self.indices = indices
        self.argument = argument

    def __call__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if all(self.scaler.changes_hidden(i) or self.scaler.is_identity(i) for i in self.indices):
            return None
        return replaced(args, kwargs, {self.argument: self._scaled(argument_at(args, kwargs, self.argument))})

    def _scaled(self, skips: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
        unused = len(skips) - len(self.indices)  # K-blocks receive several skips and consume only the last one
        indices = tuple(None if self.scaler.changes_hidden(i) else i for i in self.indices)
        scaled = LazilyScaledSkips(skips, self.scaler, (None,) * unused + indices)
        # A compiler plans memory itself and needs plain tensors.
        return tuple(scaled) if torch.compiler.is_compiling() else scaled


class ConcatenationHook:
    """
    Forward pre-hook of the layer that reads the concatenation of hidden state and skip.

    With `only_mixes`, it does nothing for methods that only multiply the skip, which another hook has done.
    """

    def __init__(self, scaler: SkipScaler, skip: LongSkip, only_mixes: bool = False):
        self.scaler = scaler
        self.skip = skip
        self.only_mixes = only_mixes

    def __call__(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        index, dim = self.skip.index, self.skip.channel_dim
        if self.scaler.is_identity(index) or (self.only_mixes and not self.scaler.changes_hidden(index)):
            return None
        place = _first_place(args, kwargs)
        hidden, skip = argument_at(args, kwargs, place).tensor_split([self.skip.hidden_width], dim)
        return replaced(args, kwargs, {place: torch.cat(self.scaler.combine(hidden, skip, index), dim)})


class SkipTensorHook:
    """Forward pre-hook of a layer that receives one skip."""

    def __init__(self, scaler: SkipScaler, index: int, hidden: str | int, argument: str | int):
        self.scaler = scaler
        self.index = index
        self.hidden = hidden
        self.argument = argument

    def __call__(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        skip = argument_at(args, kwargs, self.argument)
        if not self.scaler.changes_hidden(self.index):
            return replaced(args, kwargs, {self.argument: self.scaler.scale(skip, self.index)})
        hidden, skip = self.scaler.combine(argument_at(args, kwargs, self.hidden), skip, self.index)
        return replaced(args, kwargs, {self.hidden: hidden, self.argument: skip})


class SkipTupleObserver:
    """Forward pre-hook of an up-block that shows an observer the skips the block will consume."""

    def __init__(self, observer: SkipObserver, indices: tuple[int, ...], argument: str | int):
        self.observer = observer
        self.indices = indices
        self.argument = argument

    def __call__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        skips = argument_at(args, kwargs, self.argument)
        unused = len(skips) - len(self.indices)
        seen = tuple(self.observer.skip(i, skip) for i, skip in zip(self.indices, skips[unused:]))
        return replaced(args, kwargs, {self.argument: (*skips[:unused], *seen)})


class ConcatenationObserver:
    """
    Forward pre-hooks of the layer that reads the concatenation.

    With `sees_skip`, they also show the skip that is not scaled yet, which nothing else receives.
    """

    def __init__(self, observer: SkipObserver, skip: LongSkip, sees_skip: bool = False):
        self.observer = observer
        self.skip = skip
        self.sees_skip = sees_skip

    def before(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        place, index, dim = _first_place(args, kwargs), self.skip.index, self.skip.channel_dim
        both = argument_at(args, kwargs, place)
        if self.sees_skip:
            hidden, skip = both.tensor_split([self.skip.hidden_width], dim=dim)
            both = torch.cat([self.observer.hidden(index, hidden), self.observer.skip(index, skip)], dim=dim)
        else:
            both = self.observer.hidden(index, both)
        return replaced(args, kwargs, {place: both})

    def after(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]):
        both = argument_at(args, kwargs, _first_place(args, kwargs))
        hidden, skip = both.tensor_split([self.skip.hidden_width], dim=self.skip.channel_dim)
        self.observer.meeting(self.skip.index, hidden, skip)


class SkipTensorObserver:
    """Forward pre-hooks of a block that receives one skip."""

    def __init__(self, observer: SkipObserver, skip: LongSkip, layout: BlockSkips):
        self.observer = observer
        self.index = skip.index
        self.places = layout.hidden, layout.argument

    def before(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        hidden, skip = (argument_at(args, kwargs, place) for place in self.places)
        seen = self.observer.hidden(self.index, hidden), self.observer.skip(self.index, skip)
        return replaced(args, kwargs, dict(zip(self.places, seen)))

    def after(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        self.observer.meeting(self.index, *(argument_at(args, kwargs, place) for place in self.places))


class ScalerObserver:
    """Hooks of the `skip_scaler` that the forward of a U-ViT calls."""

    def __init__(self, observer: SkipObserver):
        self.observer = observer

    def before(self, scaler: SkipScaler, args: tuple) -> tuple:
        hidden, skip, index = args
        return self.observer.hidden(index, hidden), self.observer.skip(index, skip), index

    @torch.no_grad()
    def after(self, scaler: SkipScaler, args: tuple, output: tuple):
        hidden, skip, factor = output
        self.observer.meeting(args[2], hidden, skip * factor)


def _first_place(args: tuple, kwargs: dict[str, Any]) -> str | int:
    """Return the place of the first argument, which is a name in UNetMotionModel."""
    return 0 if args else next(iter(kwargs))


def argument_at(args: tuple, kwargs: dict[str, Any], place: str | int) -> Any:
    return kwargs[place] if isinstance(place, str) else args[place]


def replaced(args: tuple, kwargs: dict[str, Any], new: dict[str | int, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a call with some of them replaced, by position or name."""
    args = tuple(new.get(position, value) for position, value in enumerate(args))
    return args, {**kwargs, **{name: value for name, value in new.items() if isinstance(name, str)}}


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
        return skip if index is None else self._scaler.scale(skip, index)

    def to(self, *args, **kwargs) -> tuple[torch.Tensor, ...]:
        """Move all skips, as code that moves the inputs of a block to another device expects."""
        return tuple(skip.to(*args, **kwargs) for skip in self)
