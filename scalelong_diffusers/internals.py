"""
All private parts of torch, diffusers and transformers that the package uses.

Each function has a test that fails if a new version of the library changes the part that the function uses.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import FrozenDict


def register_library(name: str):
    """Let diffusers load pipeline components whose classes live in the package `name`."""
    # A pipeline on the Hub names the library of each component, and diffusers loads only from libraries on its list.
    from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES

    LOADABLE_CLASSES.setdefault(name, {"ModelMixin": ["save_pretrained", "from_pretrained"]})


@contextmanager
def code_questions_refused() -> Iterator[None]:
    """
    Make transformers raise a ValueError where it would ask whether to run the code of a folder.

    A processor passes no `trust_remote_code` to the tokenizer that it loads, so the argument is not enough.
    """
    from transformers import dynamic_module_utils

    timeout = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = timeout


def write_config_entry(model: ModelMixin, name: str, value: Any | None):
    """Set an entry of a model's config, or delete it if `value` is None. `register_to_config` can only add entries."""
    config = {**model.config, name: value}
    if value is None:
        del config[name]
    if "_use_default_values" in config:  # `from_config` drops these entries
        config["_use_default_values"] = [other for other in config["_use_default_values"] if other != name]
    if "_class_name" in config:
        config["_class_name"] = type(model).__name__
    old, new = model.config, FrozenDict(config)
    # `load_ip_adapter` sets an attribute of the config, but not the entry.
    attributes = {key: value for key, value in vars(old).items() if key in old and value is not old[key]}
    vars(new).update({key: value for key, value in attributes.items() if key != name})
    model._internal_dict = new


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether `model.compile()` was called."""
    return model._compiled_call_impl is not None


def are_plain_linear(*modules: torch.nn.Module) -> bool:
    """Return whether the weights of all modules say what the modules do: not with a LoRA, a hook or quantization."""
    return all(
        type(module) is torch.nn.Linear
        and type(module.weight) is torch.nn.Parameter
        and not module._forward_pre_hooks
        and not module._forward_hooks
        and "forward" not in vars(module)
        for module in modules
    )


def has_functorch_transform() -> bool:
    """Return whether a transform of torch.func, such as `grad` or `vmap`, is active."""
    return torch._C._are_functorch_transforms_active()


def has_saved_tensors_hooks() -> bool:
    """Return whether hooks on saved tensors are active, as in activation checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def adapter_names(model) -> list[str]:
    """Return the names of the LoRAs that a diffusers model has."""
    return list(model.peft_config) if getattr(model, "_hf_peft_config_loaded", False) else []


def single_file_repository(file: str | os.PathLike) -> str | None:
    """
    Return the repository on the Hub from which diffusers takes the configs of a model in one file.

    Return None if the file does not have the original layout of Stable Diffusion.
    """
    from diffusers.loaders.single_file_utils import fetch_diffusers_config, load_single_file_checkpoint

    checkpoint = load_single_file_checkpoint(str(file))
    if not any(name.startswith("model.diffusion_model.") for name in checkpoint):
        return None
    return fetch_diffusers_config(checkpoint)["pretrained_model_name_or_path"]
