"""diffusers' U-Nets with scaled long skips. What each needs beyond these lines is its row in `SKIP_LAYOUTS`."""

from diffusers import (
    I2VGenXLUNet,
    UNet2DConditionModel,
    UNet2DModel,
    UNet3DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
)

from scalelong_diffusers.models.mixin import SkipScalingMixin


class ScaleLongUNet2DModel(SkipScalingMixin, UNet2DModel):
    """[`~diffusers.UNet2DModel`] with `skip_scaling`: the DDPM-style U-Net, unconditional or of classes."""


class ScaleLongUNet2DConditionModel(SkipScalingMixin, UNet2DConditionModel):
    """[`~diffusers.UNet2DConditionModel`] with `skip_scaling`: the U-Net of Stable Diffusion, 1.x to XL."""


class ScaleLongUNet3DConditionModel(SkipScalingMixin, UNet3DConditionModel):
    """[`~diffusers.UNet3DConditionModel`] with `skip_scaling`."""


class ScaleLongI2VGenXLUNet(SkipScalingMixin, I2VGenXLUNet):
    """[`~diffusers.I2VGenXLUNet`] with `skip_scaling`."""


class ScaleLongUNetSpatioTemporalConditionModel(SkipScalingMixin, UNetSpatioTemporalConditionModel):
    """[`~diffusers.UNetSpatioTemporalConditionModel`] with `skip_scaling`: the U-Net of Stable Video Diffusion."""


class ScaleLongUNetMotionModel(SkipScalingMixin, UNetMotionModel):
    """[`~diffusers.UNetMotionModel`] with `skip_scaling`: the U-Net of AnimateDiff."""

    @classmethod
    def from_unet2d(cls, unet, motion_adapter=None, load_weights=True):
        """As in diffusers; the skips of a scaled `unet` stay scaled, by the gates that it has."""
        model = super().from_unet2d(unet, motion_adapter, load_weights)
        if not isinstance(unet, SkipScalingMixin):
            model._switch_skip_scaling_off()  # its config may claim what it, a plain one, does not do
        elif load_weights:
            model.skip_scaler.load_state_dict(unet.skip_scaler.state_dict())
        return model
