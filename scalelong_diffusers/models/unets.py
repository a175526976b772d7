"""diffusers' models with scaled long skips."""

import functools

from diffusers import (
    DreamLiteUNetModel,
    HunyuanDiT2DModel,
    I2VGenXLUNet,
    Kandinsky3UNet,
    StableCascadeUNet,
    UNet1DModel,
    UNet2DConditionModel,
    UNet2DModel,
    UNet3DConditionModel,
    UNetControlNetXSModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
)
from diffusers.models.resnet import ResidualTemporalBlock1D
from diffusers.models.unets.unet_stable_cascade import SDCascadeResBlock

# Not from diffusers itself, which would import whole pipelines.
from diffusers.pipelines.audioldm2.modeling_audioldm2 import AudioLDM2UNet2DConditionModel
from diffusers.pipelines.deprecated.unidiffuser.modeling_uvit import UniDiffuserModel, UTransformer2DModel
from torch import nn

from scalelong_diffusers.models.mixin import (
    SkipScalingMixin,
    check_plain_class_suffices,
    plan_skip_scaling,
    scaled_class,
    unscale,
)
from scalelong_diffusers.models.self_conditioning import condition_time_embedding
from scalelong_diffusers.models.skips import BlockSkips, SkipLayout, UpBlockSkips
from scalelong_diffusers.scaling import SkipScalingConfig


# `_no_split_modules` names the blocks that add or concatenate features: accelerate keeps them on one device, and FSDP2
# gathers them one after the other. diffusers has no such list for most of these classes.

_BLOCKS_3D = ["BasicTransformerBlock", "ResnetBlock2D", "TemporalConvLayer", "CrossAttnUpBlock3D", "UpBlock3D"]

_BY_KEYWORD = UpBlockSkips(argument="res_hidden_states_tuple")


class _ControlledUpBlockSkips(UpBlockSkips):
    """The layout of a U-Net whose blocks run together with a ControlNet-XS, which a cache cannot skip."""

    inner_layers = SkipLayout.inner_layers


class ScaleLongUNet2DModel(SkipScalingMixin, UNet2DModel):
    """[`~diffusers.UNet2DModel`] with `skip_scaling`: the DDPM U-Net, unconditional or class-conditional."""

    _no_split_modules = ["ResnetBlock2D", "Attention", "AttnUpBlock2D", "UpBlock2D"]
    skip_layout = UpBlockSkips(argument=1)
    added_parts = {"self_conditioning": functools.partial(condition_time_embedding, argument=2)}


class ScaleLongUNet2DConditionModel(SkipScalingMixin, UNet2DConditionModel):
    """[`~diffusers.UNet2DConditionModel`] with `skip_scaling`: the U-Net of Stable Diffusion, 1.x to XL."""

    skip_layout = _BY_KEYWORD
    added_parts = {"self_conditioning": functools.partial(condition_time_embedding, argument="temb")}


class ScaleLongUNet3DConditionModel(SkipScalingMixin, UNet3DConditionModel):
    """[`~diffusers.UNet3DConditionModel`] with `skip_scaling`."""

    _no_split_modules = _BLOCKS_3D
    skip_layout = _BY_KEYWORD


class ScaleLongI2VGenXLUNet(SkipScalingMixin, I2VGenXLUNet):
    """[`~diffusers.I2VGenXLUNet`] with `skip_scaling`."""

    _no_split_modules = _BLOCKS_3D
    skip_layout = _BY_KEYWORD


class ScaleLongUNetSpatioTemporalConditionModel(SkipScalingMixin, UNetSpatioTemporalConditionModel):
    """[`~diffusers.UNetSpatioTemporalConditionModel`] with `skip_scaling`: the U-Net of Stable Video Diffusion."""

    _no_split_modules = [
        "BasicTransformerBlock",
        "TemporalBasicTransformerBlock",
        "SpatioTemporalResBlock",
        "CrossAttnUpBlockSpatioTemporal",
        "UpBlockSpatioTemporal",
    ]
    skip_layout = _BY_KEYWORD


class ScaleLongUNetMotionModel(SkipScalingMixin, UNetMotionModel):
    """[`~diffusers.UNetMotionModel`] with `skip_scaling`: the U-Net of AnimateDiff."""

    _no_split_modules = ["BasicTransformerBlock", "ResnetBlock2D", "CrossAttnUpBlockMotion", "UpBlockMotion"]
    skip_layout = _BY_KEYWORD

    @classmethod
    def from_unet2d(cls, unet, motion_adapter=None, load_weights=True):
        """Build the model from a 2D U-Net, as in diffusers. It keeps the skip scaling of `unet` and its gates."""
        return _scaled_like(unet, super().from_unet2d(unet, motion_adapter, load_weights), load_weights)


class ScaleLongDreamLiteUNetModel(SkipScalingMixin, DreamLiteUNetModel):
    """[`~diffusers.DreamLiteUNetModel`] with `skip_scaling`."""

    skip_layout = _BY_KEYWORD


class ScaleLongAudioLDM2UNet2DConditionModel(SkipScalingMixin, AudioLDM2UNet2DConditionModel):
    """[`~diffusers.AudioLDM2UNet2DConditionModel`] with `skip_scaling`."""

    _no_split_modules = ["BasicTransformerBlock", "ResnetBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"]
    skip_layout = _BY_KEYWORD


class ScaleLongUNetControlNetXSModel(SkipScalingMixin, UNetControlNetXSModel):
    """[`~diffusers.UNetControlNetXSModel`] with `skip_scaling`. The skips of its control branch stay as they are."""

    _no_split_modules = [
        "BasicTransformerBlock",
        "ResnetBlock2D",
        "ControlNetXSCrossAttnDownBlock2D",
        "ControlNetXSCrossAttnUpBlock2D",
    ]
    skip_layout = _ControlledUpBlockSkips(argument="res_hidden_states_tuple_base")

    @classmethod
    def from_unet(cls, unet, *args, **kwargs):
        """Build the model from a U-Net, as in diffusers. It keeps the skip scaling of `unet` and its gates."""
        return _scaled_like(unet, super().from_unet(unet, *args, **kwargs))


def _first_convs(block: nn.Module) -> list[nn.Module]:
    """Return the layers of the first resnet that read its input."""
    resnet = block.resnets[0]
    if isinstance(resnet, ResidualTemporalBlock1D):
        return [resnet.conv_in.conv1d, resnet.residual_conv]
    return [resnet.conv_1, resnet.conv_skip]


def _halves_of_first_conv(block: nn.Module) -> tuple[int, int]:
    width = _first_convs(block)[0].in_channels // 2
    return width, width


class ScaleLongUNet1DModel(SkipScalingMixin, UNet1DModel):
    """[`~diffusers.UNet1DModel`] with `skip_scaling`. Each up-block reads one skip."""

    _no_split_modules = [
        "ResConvBlock",
        "SelfAttention1d",
        "AttnUpBlock1D",
        "UpBlock1D",
        "UpBlock1DNoSkip",
        "ResidualTemporalBlock1D",
        "UpResnetBlock1D",
    ]
    skip_layout = BlockSkips(
        "up_blocks", _halves_of_first_conv, argument=None, layer="resnets.0", linear_layers=_first_convs
    )


def _kandinsky3_widths(block: nn.Module) -> tuple[int, int] | None:
    both = block.resnets_in[0].resnet_blocks[0].projection.in_channels
    hidden = block.resnets_out[0].resnet_blocks[-1].projection.out_channels
    return (hidden, both - hidden) if both > hidden else None


class ScaleLongKandinsky3UNet(SkipScalingMixin, Kandinsky3UNet):
    """[`~diffusers.Kandinsky3UNet`] with `skip_scaling`. Each level has one skip."""

    _no_split_modules = ["Kandinsky3ResNetBlock", "Kandinsky3AttentionBlock"]
    skip_layout = BlockSkips("up_blocks", _kandinsky3_widths, argument=None, layer="resnets_in.0")


def _cascade_widths(layers: nn.ModuleList) -> tuple[int, int] | None:
    if not isinstance(layers[0], SDCascadeResBlock):
        return None
    (hidden,), both = layers[0].norm.normalized_shape, layers[0].channelwise[0].in_features
    return (hidden, both - hidden) if both > hidden else None


class ScaleLongStableCascadeUNet(SkipScalingMixin, StableCascadeUNet):
    """
    [`~diffusers.StableCascadeUNet`] with `skip_scaling`. Each level has one skip, which joins behind the norm of the
    level's first block.
    """

    _no_split_modules = ["SDCascadeResBlock", "SDCascadeAttnBlock"]
    skip_layout = BlockSkips(
        "up_blocks",
        _cascade_widths,
        argument=None,
        layer="0.channelwise",
        channel_dim=3,
        linear_layers=lambda layers: [layers[0].channelwise[0]],
    )


def _hunyuan_widths(block: nn.Module) -> tuple[int, int] | None:
    return None if block.skip_linear is None else (block.skip_linear.out_features,) * 2


class ScaleLongHunyuanDiT2DModel(SkipScalingMixin, HunyuanDiT2DModel):
    """
    [`~diffusers.HunyuanDiT2DModel`] with `skip_scaling`. What a ControlNet adds to a skip is scaled together with it.
    """

    _no_split_modules = ["HunyuanDiTBlock"]
    skip_layout = BlockSkips("blocks", _hunyuan_widths, argument="skip", channel_dim=2)


def _unidiffuser_widths(block: nn.ModuleDict) -> tuple[int, int]:
    return (block["skip"].skip_linear.out_features,) * 2


def _unidiffuser_layers(block: nn.ModuleDict) -> list[nn.Linear]:
    return [block["skip"].skip_linear]


class ScaleLongUTransformer2DModel(SkipScalingMixin, UTransformer2DModel):
    """diffusers' `UTransformer2DModel`, the U-ViT inside of UniDiffuser, with `skip_scaling`."""

    _no_split_modules = ["UniDiffuserBlock"]
    skip_layout = BlockSkips(
        "transformer_out_blocks", _unidiffuser_widths, layer="skip", channel_dim=2, linear_layers=_unidiffuser_layers
    )


class ScaleLongUniDiffuserModel(SkipScalingMixin, UniDiffuserModel):
    """[`~diffusers.UniDiffuserModel`] with `skip_scaling`."""

    _no_split_modules = ["UniDiffuserBlock"]
    skip_layout = BlockSkips(
        "transformer.transformer_out_blocks",
        _unidiffuser_widths,
        layer="skip",
        channel_dim=2,
        linear_layers=_unidiffuser_layers,
    )


def _scaled_like(unet: nn.Module, model: SkipScalingMixin, with_gates: bool = True) -> SkipScalingMixin:
    """Give a model that was converted from `unet` its skip scaling, and its trained gates."""
    check_plain_class_suffices(unet)
    unscale(model)  # the conversion may have replaced the blocks that had the hooks
    # A plain U-Net that was loaded from a scaled folder has an entry in its config, but runs unscaled.
    config = unet.skip_scaler.config if isinstance(unet, SkipScalingMixin) else SkipScalingConfig("none")
    plan_skip_scaling(model, config).apply()
    if isinstance(unet, SkipScalingMixin) and with_gates:
        model.skip_scaler.load_state_dict(unet.skip_scaler.state_dict())
    return model


def _keep_scaling(plain: type, converter: str):
    """
    Make a conversion of diffusers keep the scaling of the U-Net that it converts.

    Pipelines such as AnimateDiff's call it on the plain class, which would drop the scaling without a word.
    """
    stock = getattr(plain, converter).__func__

    @functools.wraps(stock)
    def convert(cls, unet, *args, **kwargs):
        if cls is plain and isinstance(unet, SkipScalingMixin):
            return getattr(scaled_class(plain), converter)(unet, *args, **kwargs)
        return stock(cls, unet, *args, **kwargs)

    setattr(plain, converter, classmethod(convert))


_keep_scaling(UNetMotionModel, "from_unet2d")
_keep_scaling(UNetControlNetXSModel, "from_unet")
