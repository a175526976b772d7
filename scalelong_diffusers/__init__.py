"""Scale the long skip connections of diffusers' U-Nets and of U-ViT, as in the paper ScaleLong (NeurIPS 2023)."""

import importlib
from typing import TYPE_CHECKING

# diffusers looks for this name in the library of a pipeline's component to learn how the component is loaded.
from diffusers import ModelMixin  # noqa: F401

from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.version import __version__


if TYPE_CHECKING:
    from scalelong_diffusers.adapters import load_adapter, save_adapter
    from scalelong_diffusers.model_card import CardFacts
    from scalelong_diffusers.models.mixin import SkipScalingMixin
    from scalelong_diffusers.models.unets import (
        ScaleLongI2VGenXLUNet,
        ScaleLongUNet2DConditionModel,
        ScaleLongUNet2DModel,
        ScaleLongUNet3DConditionModel,
        ScaleLongUNetMotionModel,
        ScaleLongUNetSpatioTemporalConditionModel,
    )
    from scalelong_diffusers.models.uvit import UViTModel
    from scalelong_diffusers.patching import (
        apply_skip_scaling,
        remove_skip_scaling,
        set_skip_scaling_strength,
        skip_connections,
    )
    from scalelong_diffusers.pipelines import (
        ScaleLongClassConditionalPipeline,
        ScaleLongTextToImagePipeline,
        ScaleLongUnconditionalPipeline,
        load_pipeline,
    )
    from scalelong_diffusers.presets import model_from_preset
    from scalelong_diffusers.sharing import push_adapter, push_to_hub

__all__ = [
    "CardFacts",
    "ScaleLongClassConditionalPipeline",
    "ScaleLongI2VGenXLUNet",
    "ScaleLongTextToImagePipeline",
    "ScaleLongUNet2DConditionModel",
    "ScaleLongUNet2DModel",
    "ScaleLongUNet3DConditionModel",
    "ScaleLongUNetMotionModel",
    "ScaleLongUNetSpatioTemporalConditionModel",
    "ScaleLongUnconditionalPipeline",
    "SkipScalingConfig",
    "SkipScalingMixin",
    "UViTModel",
    "__version__",
    "apply_skip_scaling",
    "load_adapter",
    "load_pipeline",
    "model_from_preset",
    "push_adapter",
    "push_to_hub",
    "remove_skip_scaling",
    "save_adapter",
    "set_skip_scaling_strength",
    "skip_connections",
]

# Imported when they are first asked for: not every user of a U-Net is to pay for all of diffusers' others.
_LAZY_MODULES = (
    "scalelong_diffusers.models.unets",
    "scalelong_diffusers.models.uvit",
    "scalelong_diffusers.patching",
    "scalelong_diffusers.presets",
    "scalelong_diffusers.model_card",
    "scalelong_diffusers.sharing",
    "scalelong_diffusers.pipelines",
    "scalelong_diffusers.adapters",
)


def __getattr__(name: str):
    if name in __all__:
        for module in map(importlib.import_module, _LAZY_MODULES):
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})


def _let_diffusers_load_our_models():
    # A pipeline on the Hub names the library of each component, and diffusers loads from the libraries it lists. The
    # list is not public; without it a local pipeline still loads, and one from the Hub says what is missing.
    try:
        from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES
    except ImportError:
        return
    LOADABLE_CLASSES.setdefault(__name__, {"ModelMixin": ["save_pretrained", "from_pretrained"]})


_let_diffusers_load_our_models()
