"""
Everything private in torch and diffusers that the package uses, in one place.

Each function has a test that fails if a new version of the library changes what it relies on.
"""


def register_library(name: str):
    """Let diffusers load pipeline components whose classes live in the package `name`."""
    # A pipeline on the Hub names the library of each component, and diffusers loads only from libraries on its list.
    # Without this entry a local pipeline still loads; one from the Hub fails with a message that names the library.
    try:
        from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES
    except ImportError:
        return
    LOADABLE_CLASSES.setdefault(name, {"ModelMixin": ["save_pretrained", "from_pretrained"]})


def adapter_names(model) -> list[str]:
    """Return the names of the LoRAs that a diffusers model has."""
    return list(model.peft_config) if getattr(model, "_hf_peft_config_loaded", False) else []
