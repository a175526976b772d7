"""diffusers' U-Nets with scaled long skips."""

from diffusers import (
    I2VGenXLUNet,
    UNet2DConditionModel,
    UNet2DModel,
    UNet3DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
)

from scalelong_diffusers.models.mixin import SkipScalingMixin, plan_skip_scaling
from scalelong_diffusers.models.skips import UpBlockSkips
from scalelong_diffusers.scaling import SkipScalingConfig


_BY_KEYWORD = UpBlockSkips(argument="res_hidden_states_tuple")


class ScaleLongUNet2DModel(SkipScalingMixin, UNet2DModel):
    """[`~diffusers.UNet2DModel`] with `skip_scaling`: the DDPM U-Net, unconditional or class-conditional."""

    skip_layout = UpBlockSkips(argument=1)


class ScaleLongUNet2DConditionModel(SkipScalingMixin, UNet2DConditionModel):
    """[`~diffusers.UNet2DConditionModel`] with `skip_scaling`: the U-Net of Stable Diffusion, 1.x to XL."""

    skip_layout = _BY_KEYWORD


class ScaleLongUNet3DConditionModel(SkipScalingMixin, UNet3DConditionModel):
    """[`~diffusers.UNet3DConditionModel`] with `skip_scaling`."""

    skip_layout = _BY_KEYWORD


class ScaleLongI2VGenXLUNet(SkipScalingMixin, I2VGenXLUNet):
    """[`~diffusers.I2VGenXLUNet`] with `skip_scaling`."""

    skip_layout = _BY_KEYWORD


class ScaleLongUNetSpatioTemporalConditionModel(SkipScalingMixin, UNetSpatioTemporalConditionModel):
    """[`~diffusers.UNetSpatioTemporalConditionModel`] with `skip_scaling`: the U-Net of Stable Video Diffusion."""

    skip_layout = _BY_KEYWORD


class ScaleLongUNetMotionModel(SkipScalingMixin, UNetMotionModel):
    """[`~diffusers.UNetMotionModel`] with `skip_scaling`: the U-Net of AnimateDiff."""

    skip_layout = _BY_KEYWORD

    @classmethod
    def from_unet2d(cls, unet, motion_adapter=None, load_weights=True):
        """Build the model from a 2D U-Net, as in diffusers. It keeps the skip scaling of `unet` and its gates."""
        model = super().from_unet2d(unet, motion_adapter, load_weights)
        if not isinstance(unet, SkipScalingMixin):
            # A plain U-Net that was loaded from a scaled folder has an entry in its config, but runs unscaled.
            plan_skip_scaling(model, SkipScalingConfig("none")).apply()
        elif load_weights:
            model.skip_scaler.load_state_dict(unet.skip_scaler.state_dict())
        return model
