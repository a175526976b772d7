"""Adapters: the skip scaling of a fine-tuned U-Net and its LoRA, saved in a small folder without the base model."""

import os
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import PeftAdapterMixin, StableDiffusionLoraLoaderMixin
from diffusers.utils import is_peft_available
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from scalelong_diffusers.download import fetch_file, read_json
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import write_json
from scalelong_diffusers.internals import adapter_names
from scalelong_diffusers.models.mixin import (
    SkipScalingMixin,
    build_skip_scaler,
    not_scalable_message,
    resolve_skip_scaling,
    scaled_class,
)
from scalelong_diffusers.patching import apply_skip_scaling, remove_skip_scaling
from scalelong_diffusers.pipelines.compatibility import unwrap_model
from scalelong_diffusers.scaling import SkipScalingConfig


SCALING_FILE = "skip_scaling.json"
GATES_FILE = "skip_scaling.safetensors"
LORA_FILE = "pytorch_lora_weights.safetensors"  # the default name of `load_lora_weights`

NO_PEFT = "LoRA needs the package peft: pip install peft"

_GATE_PREFIX = "skip_scaler."
_LORA_PREFIX = "unet."
_RIGHT_BASE = "load it into the base model that it was trained on"

Weights = dict[str, torch.Tensor]


def save_adapter(
    pipe_or_unet: DiffusionPipeline | nn.Module, folder: str | os.PathLike, adapter_name: str | None = None
) -> None:
    """
    Save the skip scaling of a U-Net with its gates, and its LoRA if it has one, but not the U-Net itself.

    `pipe.load_lora_weights(folder)` of diffusers reads only the LoRA; [`load_adapter`] applies everything. If the
    U-Net has several LoRAs, `adapter_name` selects one.
    """
    unet = _unet_of(pipe_or_unet)
    if not isinstance(unet, SkipScalingMixin):
        raise UserError(
            f"this {type(unet).__name__} has no skip scaling to save; save its LoRA with pipe.save_lora_weights"
        )
    adapter_name = _adapter_to_save(unet, adapter_name)
    gates = {_GATE_PREFIX + name: weight.contiguous() for name, weight in unet.skip_scaler.state_dict().items()}
    os.makedirs(folder, exist_ok=True)
    for name in (LORA_FILE, GATES_FILE):  # of an adapter saved here before
        Path(folder, name).unlink(missing_ok=True)
    if adapter_name is not None:
        _save_lora(unet, folder, adapter_name)
    if gates:
        save_file(gates, Path(folder, GATES_FILE), metadata={"format": "pt"})
    write_json(Path(folder, SCALING_FILE), {"skip_scaling": unet.skip_scaler.config.to_dict()})


def load_adapter(
    pipe: DiffusionPipeline, source: str | os.PathLike, adapter_name: str | None = None, **hub_options
) -> DiffusionPipeline:
    """
    Apply an adapter from [`save_adapter`] to its base pipeline, in place, and return the pipeline.

    If that fails, the pipeline stays unchanged. `pipe.unload_lora_weights()` and `remove_skip_scaling(pipe)` remove
    the adapter again.

    Args:
        source: a folder, or a repository on the Hub.
        adapter_name: the name of the LoRA in diffusers.
        hub_options: `revision`, `token`, `cache_dir`, `local_files_only` and `force_download`.

    ```python
    pipe = StableDiffusionPipeline.from_pretrained("some/sd")
    load_adapter(pipe, "user/my-adapter")
    ```
    """
    unet = _unet_of(pipe)
    config = _read_config(source, hub_options)
    gates, _ = _read_weights(source, GATES_FILE, hub_options)
    lora, lora_file = _read_weights(source, LORA_FILE, hub_options)
    config = _resolve_config(unet, config, source)
    _check_gates(unet, config, gates, source)
    _check_lora(unet, lora, adapter_name, source)
    with _undone_on_error(pipe, unet):
        apply_skip_scaling(pipe, config)
        unet.skip_scaler.load_state_dict({name.removeprefix(_GATE_PREFIX): gate for name, gate in gates.items()})
        if lora:
            _load_lora(unet, lora_file, adapter_name)
    return pipe


def _unet_of(pipe_or_unet: DiffusionPipeline | nn.Module) -> nn.Module:
    is_pipeline = isinstance(pipe_or_unet, DiffusionPipeline)
    return unwrap_model(pipe_or_unet.unet if is_pipeline else pipe_or_unet)


def _adapter_to_save(unet: nn.Module, adapter_name: str | None) -> str | None:
    names = adapter_names(unet)
    if adapter_name is None and len(names) < 2:
        return names[0] if names else None
    if adapter_name not in names:
        accepted = f"one of {', '.join(names)}" if names else "None, because there is no LoRA"
        raise UserError(f"adapter_name must be {accepted}, got {adapter_name!r}")
    return adapter_name


def _save_lora(unet: nn.Module, folder: str | os.PathLike, adapter_name: str):
    from peft import get_peft_model_state_dict  # optional

    weights = get_peft_model_state_dict(unet, adapter_name=adapter_name)
    # Without the metadata the LoRA would be loaded with alpha = rank.
    metadata = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in unet.peft_config[adapter_name].to_dict().items()
    }
    StableDiffusionLoraLoaderMixin.save_lora_weights(
        folder, unet_lora_layers=weights, unet_lora_adapter_metadata=metadata
    )


def _load_lora(unet: nn.Module, file: str, adapter_name: str | None):
    folder, name = os.path.split(file)
    try:
        unet.load_lora_adapter(folder, prefix="unet", weight_name=name, adapter_name=adapter_name)
    except TypeError as error:  # an entry of the stored config is unknown
        raise UserError(
            f"{file} was written by another version of peft than the installed one: {error.__cause__ or error}"
        ) from error


def _read_config(source: str | os.PathLike, hub_options: dict[str, Any]) -> SkipScalingConfig:
    content = read_json(source, SCALING_FILE, **hub_options)
    if content is None:
        if fetch_file(source, LORA_FILE, **hub_options) is not None:
            raise UserError(f"{source} is a LoRA without skip scaling: load it with pipe.load_lora_weights")
        raise UserError(f"{source} is not an adapter: it has no {SCALING_FILE}, which save_adapter writes")
    if not isinstance(content.get("skip_scaling"), Mapping):
        raise UserError(f"the {SCALING_FILE} of {source} has no entry skip_scaling; save the adapter again")
    return SkipScalingConfig.parse(content["skip_scaling"])


def _read_weights(source: str | os.PathLike, name: str, hub_options: dict[str, Any]) -> tuple[Weights, str | None]:
    """Return the weights in a file and its path; ({}, None) if there is no such file."""
    file = fetch_file(source, name, **hub_options)
    if file is None:
        return {}, None
    try:
        return load_file(file), file
    except SafetensorError as error:
        raise UserError(f"{file} is damaged or incompletely downloaded ({error})") from error


def _resolve_config(unet: nn.Module, config: SkipScalingConfig, source: str | os.PathLike) -> SkipScalingConfig:
    """Resolve the config for this model, and check that the model has no other scaling."""
    name = type(unet).__name__
    is_scaled = isinstance(unet, SkipScalingMixin)
    if not is_scaled and scaled_class(type(unet)) is None:
        raise UserError(not_scalable_message(name))
    config = resolve_skip_scaling(unet, config)
    if is_scaled and unet.skip_scaler.config.method != "none" and unet.skip_scaler.config != config:
        raise UserError(
            f"this {name} already has the scaling {unet.skip_scaler.config}, but {source} has {config}: {_RIGHT_BASE}"
        )
    return config


def _check_gates(unet: nn.Module, config: SkipScalingConfig, gates: Weights, source: str | os.PathLike):
    expected = {_GATE_PREFIX + name: w.shape for name, w in build_skip_scaler(unet, config).state_dict().items()}
    found = {name: gate.shape for name, gate in gates.items()}
    if found == expected:
        return
    if not found:
        raise UserError(f"{source} is incomplete: its {SCALING_FILE} has gates, but there is no {GATES_FILE}")
    name = next(name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name))
    shape, needed = (tuple(shapes[name]) if name in shapes else "missing" for shapes in (found, expected))
    raise UserError(
        f"the gates of {source} do not fit this {type(unet).__name__}: the shape of {name} is {shape} there and "
        f"{needed} here; {_RIGHT_BASE}"
    )


def _check_lora(unet: nn.Module, lora: Weights, adapter_name: str | None, source: str | os.PathLike):
    """Check what diffusers would only notice after it changed the model."""
    if lora and not is_peft_available():
        raise UserError(NO_PEFT)
    if lora and adapter_name in adapter_names(unet):
        raise UserError(f"adapter_name={adapter_name!r} is the name of another LoRA of this {type(unet).__name__}")
    layers = dict(unet.named_modules())
    for name, weight in lora.items():
        layer, _, kind = name.removeprefix(_LORA_PREFIX).partition(".lora_")
        if not name.startswith(_LORA_PREFIX) or layer not in layers:
            raise UserError(
                f"the LoRA of {source} adapts {layer}, which this {type(unet).__name__} does not have: {_RIGHT_BASE}"
            )
        # A reads the input of the layer, and B adds to its output.
        axis = {"A.weight": 1, "B.weight": 0}.get(kind)
        if axis is not None and weight.shape[axis] != layers[layer].weight.shape[axis]:
            raise UserError(
                f"the LoRA of {source} adapts {layer} of width {weight.shape[axis]}, but in this "
                f"{type(unet).__name__} its width is {layers[layer].weight.shape[axis]}: {_RIGHT_BASE}"
            )


@contextmanager
def _undone_on_error(pipe: DiffusionPipeline, unet: nn.Module):
    """Restore the pipeline if the code in the block fails halfway."""
    was_scaled = isinstance(unet, SkipScalingMixin)
    config = unet.skip_scaler.config if was_scaled else None
    gates = {name: gate.clone() for name, gate in unet.skip_scaler.state_dict().items()} if was_scaled else {}
    adapters = adapter_names(unet)
    active = unet.active_adapters() if adapters else []
    trained = {name for name, parameter in unet.named_parameters() if parameter.requires_grad}
    try:
        yield
    except BaseException:
        if adapters:
            unet.set_adapter(active)
            unet.delete_adapters([name for name in adapter_names(unet) if name not in adapters])
        elif isinstance(unet, PeftAdapterMixin):
            unet.unload_lora()
        if was_scaled:
            apply_skip_scaling(pipe, config)
            unet.skip_scaler.load_state_dict(gates)
        elif isinstance(unet, SkipScalingMixin):
            remove_skip_scaling(pipe)
        for name, parameter in unet.named_parameters():
            parameter.requires_grad_(name in trained)
        raise
