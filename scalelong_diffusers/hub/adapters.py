"""What fine-tuning with LoRA has learned, LoRA and skip scaling, as one small folder beside the base pipeline."""

import json
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
LORA_FILE = "pytorch_lora_weights.safetensors"  # where `load_lora_weights` looks

NO_PEFT = "LoRA needs the package peft: pip install 'scalelong-diffusers[lora]'"

_GATE_PREFIX = "skip_scaler."
_LORA_PREFIX = "unet."

Weights = dict[str, torch.Tensor]


def save_adapter(
    pipe_or_unet: DiffusionPipeline | nn.Module, folder: str | os.PathLike, adapter_name: str | None = None
) -> None:
    """
    Save the skip scaling of a U-Net, with its gates, and its LoRA, where it has one, without the U-Net itself.

    `pipe.load_lora_weights(folder)` of diffusers reads the LoRA alone; [`load_adapter`] applies all of it. Of several
    LoRAs `adapter_name` is saved.
    """
    unet = _unet_of(pipe_or_unet)
    if not isinstance(unet, SkipScalingMixin):
        raise ValueError(f"this {type(unet).__name__} has no skip scaling to save; its LoRA is saved by diffusers")
    adapter_name = _adapter_to_save(unet, adapter_name)
    gates = {_GATE_PREFIX + name: weight.contiguous() for name, weight in unet.skip_scaler.state_dict().items()}
    os.makedirs(folder, exist_ok=True)
    for name in (LORA_FILE, GATES_FILE):  # of an adapter that was here before
        Path(folder, name).unlink(missing_ok=True)
    if adapter_name is not None:
        _save_lora(unet, folder, adapter_name)
    if gates:
        save_file(gates, Path(folder, GATES_FILE), metadata={"format": "pt"})
    entry = {"skip_scaling": unet.skip_scaler.config.to_dict()}
    Path(folder, SCALING_FILE).write_text(json.dumps(entry, indent=2) + "\n", encoding="utf-8")


def load_adapter(
    pipe: DiffusionPipeline, source: str | os.PathLike, adapter_name: str | None = None, **hub_options
) -> DiffusionPipeline:
    """
    Apply what [`save_adapter`] saved to the base pipeline it was trained on, in place, and return the pipeline. Where
    that fails, the pipeline is left as it was.

    `adapter_name` is what diffusers is to call the LoRA; `hub_options` are `revision`, `token`, `cache_dir`,
    `local_files_only` and `force_download`. `pipe.unload_lora_weights()` and `remove_skip_scaling(pipe)` take it off.

    ```python
    pipe = StableDiffusionPipeline.from_pretrained("some/sd")
    load_adapter(pipe, "user/my-adapter")
    ```
    """
    unet = _unet_of(pipe)
    config = _read_config(source, hub_options)
    gates, _ = _read_weights(source, GATES_FILE, hub_options)
    lora, lora_file = _read_weights(source, LORA_FILE, hub_options)
    config = _check_scaling(unet, config, source)
    _check_gates(unet, config, gates, source)
    _check_lora(unet, lora, adapter_name, source)
    with _undone_on_error(pipe, unet):
        apply_skip_scaling(pipe, config)
        unet.skip_scaler.load_state_dict({name.removeprefix(_GATE_PREFIX): gate for name, gate in gates.items()})
        if lora:
            _load_lora(unet, lora_file, adapter_name)
    return pipe


def adapter_names(unet: nn.Module) -> list[str]:
    """The LoRAs that a model of diffusers has."""
    return list(unet.peft_config) if isinstance(unet, PeftAdapterMixin) and unet._hf_peft_config_loaded else []


def _unet_of(pipe_or_unet: DiffusionPipeline | nn.Module) -> nn.Module:
    is_pipeline = isinstance(pipe_or_unet, DiffusionPipeline)
    if is_pipeline and "unet" not in pipe_or_unet.components:
        raise ValueError(f"{type(pipe_or_unet).__name__} has no unet, which adapters are made for")
    return unwrap_model(pipe_or_unet.unet if is_pipeline else pipe_or_unet)


def _adapter_to_save(unet: nn.Module, adapter_name: str | None) -> str | None:
    names = adapter_names(unet)
    if adapter_name is None and len(names) < 2:
        return names[0] if names else None
    if adapter_name not in names:
        there = f"one of the LoRAs that there are ({', '.join(names)})" if names else "None, as there is no LoRA"
        raise ValueError(f"adapter_name must be {there}, got {adapter_name!r}")
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
    except TypeError as error:  # of the config that is stored with the weights
        raise ValueError(
            f"{file} was written with another peft than the one that is installed: {error.__cause__ or error}"
        ) from error


def _read_config(source: str | os.PathLike, hub_options: dict[str, Any]) -> SkipScalingConfig:
    entry = read_json(source, SCALING_FILE, **hub_options)
    if entry is not None and isinstance(entry.get("skip_scaling"), Mapping):
        return SkipScalingConfig.parse(entry["skip_scaling"])
    if entry is not None:
        raise ValueError(f"the {SCALING_FILE} of {source} has no entry skip_scaling, which save_adapter writes")
    if fetch_file(source, LORA_FILE, **hub_options) is not None:
        raise ValueError(f"{source} is a LoRA without skip scaling: pipe.load_lora_weights loads it")
    raise ValueError(f"{source} has no adapter: there is no {SCALING_FILE}, which save_adapter writes")


def _read_weights(source: str | os.PathLike, name: str, hub_options: dict[str, Any]) -> tuple[Weights, str | None]:
    """The weights of a file, and where it is on disk; none where there is no such file."""
    file = fetch_file(source, name, **hub_options)
    if file is None:
        return {}, None
    try:
        return load_file(file), file
    except SafetensorError as error:
        raise OSError(f"{file} is damaged, or was not downloaded to its end ({error})") from error


def _check_scaling(unet: nn.Module, config: SkipScalingConfig, source: str | os.PathLike) -> SkipScalingConfig:
    """The config resolved for this model, which must have no other scaling."""
    name = type(unet).__name__
    is_scaled = isinstance(unet, SkipScalingMixin)
    if not is_scaled and scaled_class(type(unet)) is None:
        raise ValueError(not_scalable_message(name))
    config = resolve_skip_scaling(unet, config)
    present = unet.skip_scaler.config if is_scaled else config
    if present.method != "none" and present != config:
        raise ValueError(
            f"this {name} is scaled already, by {present}, and {source} by {config}: load it into the base that it "
            "was trained on"
        )
    return config


def _check_gates(unet: nn.Module, config: SkipScalingConfig, gates: Weights, source: str | os.PathLike):
    expected = {_GATE_PREFIX + name: w.shape for name, w in build_skip_scaler(unet, config).state_dict().items()}
    found = {name: gate.shape for name, gate in gates.items()}
    if found == expected:
        return
    if not found:
        raise ValueError(f"{source} is not whole: its {SCALING_FILE} has gates, and there is no {GATES_FILE}")
    name = next(name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name))
    shapes = [tuple(shapes[name]) if name in shapes else "nothing" for shapes in (found, expected)]
    raise ValueError(
        f"the gates of {source} do not fit this {type(unet).__name__}: {name} has {shapes[0]}, and {shapes[1]} is "
        "needed; load it into the base that it was trained on"
    )


def _check_lora(unet: nn.Module, lora: Weights, adapter_name: str | None, source: str | os.PathLike):
    """What diffusers would find out only in the middle of changing the model."""
    if lora and not is_peft_available():
        raise ImportError(NO_PEFT)
    if lora and adapter_name in adapter_names(unet):
        raise ValueError(f"adapter_name={adapter_name!r} is taken by another LoRA of this {type(unet).__name__}")
    layers = dict(unet.named_modules())
    for name, weight in lora.items():
        layer, _, kind = name.removeprefix(_LORA_PREFIX).partition(".lora_")
        if not name.startswith(_LORA_PREFIX) or layer not in layers:
            raise ValueError(
                f"the LoRA of {source} adapts {layer}, which this {type(unet).__name__} does not have: load it into "
                "the base that it was trained on"
            )
        # A takes the features of the layer, and B gives them.
        axis = {"A.weight": 1, "B.weight": 0}.get(kind)
        if axis is not None and weight.shape[axis] != layers[layer].weight.shape[axis]:
            raise ValueError(
                f"the LoRA of {source} adapts {layer} with {weight.shape[axis]} features, and this "
                f"{type(unet).__name__} has {layers[layer].weight.shape[axis]} there: load it into the base that it "
                "was trained on"
            )


@contextmanager
def _undone_on_error(pipe: DiffusionPipeline, unet: nn.Module):
    """Leave the pipeline as it was when what is done to it fails half way."""
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
