"""Scale the long skip connections of diffusers' U-Nets and of U-ViT, as in the paper ScaleLong (NeurIPS 2023)."""

import importlib

# diffusers looks for this name in the library of a pipeline's component to learn how the component is loaded.
from diffusers import ModelMixin

from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.version import __version__


_UNETS = (
    "ScaleLongI2VGenXLUNet",
    "ScaleLongUNet2DConditionModel",
    "ScaleLongUNet2DModel",
    "ScaleLongUNet3DConditionModel",
    "ScaleLongUNetMotionModel",
    "ScaleLongUNetSpatioTemporalConditionModel",
)
_PATCHING = ("apply_skip_scaling", "remove_skip_scaling", "set_skip_scaling_strength", "skip_connections")
_MODULE_OF = {
    **dict.fromkeys(_UNETS, "scalelong_diffusers.models.unets"),
    "UViTModel": "scalelong_diffusers.models.uvit",
    "SkipScalingMixin": "scalelong_diffusers.models.mixin",
    **dict.fromkeys(_PATCHING, "scalelong_diffusers.patching"),
    "model_from_preset": "scalelong_diffusers.presets",
}

__all__ = ["ModelMixin", "SkipScalingConfig", "__version__", *_MODULE_OF]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_MODULE_OF])


def _let_diffusers_load_our_models():
    # A pipeline on the Hub names the library of each component, and diffusers loads from the libraries it lists. The
    # list is not public; without it a local pipeline still loads, and one from the Hub says what is missing.
    try:
        from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES
    except ImportError:
        return
    LOADABLE_CLASSES.setdefault(__name__, {"ModelMixin": ["save_pretrained", "from_pretrained"]})


_let_diffusers_load_our_models()
