"""Scale the long skip connections of diffusers' U-Nets and of U-ViT, as in the paper ScaleLong (NeurIPS 2023)."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

# diffusers looks up this name in the library of a pipeline's component to learn how to load the component.
from diffusers import ModelMixin

from scalelong_diffusers import internals
from scalelong_diffusers.scaling import (
    ConstantFactor,
    ConstantWeights,
    LongSkip,
    SkipFactor,
    SkipMix,
    SkipScalingConfig,
    register_skip_method,
)


if TYPE_CHECKING:
    from scalelong_diffusers.errors import UserError
    from scalelong_diffusers.hub.adapters import load_adapter, save_adapter
    from scalelong_diffusers.hub.model_card import CardFacts
    from scalelong_diffusers.hub.sharing import push_adapter, push_to_hub, write_model_card
    from scalelong_diffusers.models.mixin import SkipScalingMixin
    from scalelong_diffusers.models.mup import mup_param_groups
    from scalelong_diffusers.models.skips import BlockSkips, UpBlockSkips
    from scalelong_diffusers.models.unets import (
        ScaleLongAudioLDM2UNet2DConditionModel,
        ScaleLongDreamLiteUNetModel,
        ScaleLongHunyuanDiT2DModel,
        ScaleLongI2VGenXLUNet,
        ScaleLongKandinsky3UNet,
        ScaleLongStableCascadeUNet,
        ScaleLongUNet1DModel,
        ScaleLongUNet2DConditionModel,
        ScaleLongUNet2DModel,
        ScaleLongUNet3DConditionModel,
        ScaleLongUNetControlNetXSModel,
        ScaleLongUNetMotionModel,
        ScaleLongUNetSpatioTemporalConditionModel,
        ScaleLongUniDiffuserModel,
        ScaleLongUTransformer2DModel,
    )
    from scalelong_diffusers.models.uvit import UViTModel
    from scalelong_diffusers.patching import (
        apply_skip_init,
        apply_skip_scaling,
        fuse_skip_scaling,
        remove_skip_scaling,
        set_skip_scaling_strength,
        skip_connections,
    )
    from scalelong_diffusers.pipelines.class_conditional import ScaleLongClassConditionalPipeline
    from scalelong_diffusers.pipelines.loading import load_pipeline
    from scalelong_diffusers.pipelines.text_to_image import ScaleLongTextToImagePipeline
    from scalelong_diffusers.pipelines.unconditional import ScaleLongUnconditionalPipeline
    from scalelong_diffusers.presets import get_preset, model_from_preset
    from scalelong_diffusers.skip_cache import apply_skip_cache, remove_skip_cache

__version__ = importlib.metadata.version("scalelong-diffusers")

# Imported on first use, so that a user of one U-Net does not wait for all other models, transformers and datasets.
_NAMES = {
    "errors": ("UserError",),
    "hub.adapters": ("load_adapter", "save_adapter"),
    "hub.model_card": ("CardFacts",),
    "hub.sharing": ("push_adapter", "push_to_hub", "write_model_card"),
    "models.mixin": ("SkipScalingMixin",),
    "models.mup": ("mup_param_groups",),
    "models.skips": ("BlockSkips", "UpBlockSkips"),
    "models.unets": (
        "ScaleLongAudioLDM2UNet2DConditionModel",
        "ScaleLongDreamLiteUNetModel",
        "ScaleLongHunyuanDiT2DModel",
        "ScaleLongI2VGenXLUNet",
        "ScaleLongKandinsky3UNet",
        "ScaleLongStableCascadeUNet",
        "ScaleLongUNet1DModel",
        "ScaleLongUNet2DConditionModel",
        "ScaleLongUNet2DModel",
        "ScaleLongUNet3DConditionModel",
        "ScaleLongUNetControlNetXSModel",
        "ScaleLongUNetMotionModel",
        "ScaleLongUNetSpatioTemporalConditionModel",
        "ScaleLongUniDiffuserModel",
        "ScaleLongUTransformer2DModel",
    ),
    "models.uvit": ("UViTModel",),
    "patching": (
        "apply_skip_init",
        "apply_skip_scaling",
        "fuse_skip_scaling",
        "remove_skip_scaling",
        "set_skip_scaling_strength",
        "skip_connections",
    ),
    "pipelines.class_conditional": ("ScaleLongClassConditionalPipeline",),
    "pipelines.loading": ("load_pipeline",),
    "pipelines.text_to_image": ("ScaleLongTextToImagePipeline",),
    "pipelines.unconditional": ("ScaleLongUnconditionalPipeline",),
    "presets": ("get_preset", "model_from_preset"),
    "skip_cache": ("apply_skip_cache", "remove_skip_cache"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "ConstantFactor",
    "ConstantWeights",
    "LongSkip",
    "SkipFactor",
    "SkipMix",
    "SkipScalingConfig",
    "__version__",
    "register_skip_method",
    *_MODULES,
]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


internals.register_library(__name__)
