"""Adapters: the skip scaling of a fine-tuned U-Net and its LoRA, saved in a small folder without the base model."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import PeftAdapterMixin, StableDiffusionLoraLoaderMixin
from diffusers.utils import is_peft_available
from safetensors.torch import load_file, save_file
from torch import nn

from scalelong_diffusers.download import damaged_file_errors, fetch_file, read_json
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import write_json
from scalelong_diffusers.internals import adapter_names
from scalelong_diffusers.models.mixin import (
    SkipScalingMixin,
    plan_skip_scaling,
    resolve_skip_scaling,
)
from scalelong_diffusers.patching import apply_skip_scaling, remove_skip_scaling
from scalelong_diffusers.pipelines.compatibility import unwrap_model
from scalelong_diffusers.scaling import SkipScalingConfig


SCALING_FILE = "skip_scaling.json"
GATES_FILE = "skip_scaling.safetensors"
LORA_FILE = "pytorch_lora_weights.safetensors"  # the default name of `load_lora_weights`


_GATE_PREFIX = "skip_scaler."

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
    names = adapter_names(unet)
    if adapter_name is None and len(names) == 1:
        adapter_name = names[0]
    if not isinstance(unet, SkipScalingMixin):
        raise UserError(
            f"this {type(unet).__name__} has no skip scaling to save; save its LoRA with pipe.save_lora_weights"
        )
    if adapter_name not in (names or [None]):
        raise UserError(f"adapter_name must be one of the LoRAs of the model, {names}, got {adapter_name!r}")
    gates = {_GATE_PREFIX + name: weight.contiguous() for name, weight in unet.skip_scaler.state_dict().items()}
    os.makedirs(folder, exist_ok=True)
    for name in (LORA_FILE, GATES_FILE):  # left from an earlier adapter in this folder
        Path(folder, name).unlink(missing_ok=True)
    lora: Weights = {}
    if adapter_name is not None:
        from peft import get_peft_model_state_dict  # optional

        # Without the metadata the LoRA would be loaded with alpha = rank.
        metadata = {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in unet.peft_config[adapter_name].to_dict().items()
        }
        lora = get_peft_model_state_dict(unet, adapter_name=adapter_name)
        StableDiffusionLoraLoaderMixin.save_lora_weights(
            folder, unet_lora_layers=lora, unet_lora_adapter_metadata=metadata
        )
    if gates:
        save_file(gates, Path(folder, GATES_FILE), metadata={"format": "pt"})
    # With the number, a lost LoRA is noticed: without it, the gates alone would be applied.
    content = {"skip_scaling": unet.skip_scaler.config.to_dict(), "num_lora_weights": len(lora)}
    write_json(Path(folder, SCALING_FILE), content)


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
    content = read_json(source, SCALING_FILE, **hub_options) or {}
    entry = content.get("skip_scaling")
    if entry is None:
        raise UserError(
            f"{source} is not an adapter: it has no {SCALING_FILE} with an entry skip_scaling, which save_adapter "
            "writes; load a LoRA without skip scaling with pipe.load_lora_weights"
        )
    config = resolve_skip_scaling(unet, SkipScalingConfig.parse(entry))
    gates, _ = _read_weights(source, GATES_FILE, hub_options)
    lora, lora_file = _read_weights(source, LORA_FILE, hub_options)
    expected = content.get("num_lora_weights", len(lora))  # earlier versions did not write it
    if len(lora) != expected:
        raise UserError(
            f"{source}: {LORA_FILE} must hold the {expected} LoRA weights that save_adapter wrote, but holds "
            f"{len(lora)}: save or copy the adapter again"
        )
    if problem := _misfit(unet, config, gates, lora):
        raise UserError(
            f"{source} does not fit this {type(unet).__name__}; it belongs to another base model: {problem}"
        )
    with _undone_on_error(pipe, unet):
        apply_skip_scaling(pipe, config)
        unet.skip_scaler.load_state_dict({name.removeprefix(_GATE_PREFIX): gate for name, gate in gates.items()})
        if lora:
            folder, name = os.path.split(lora_file)
            with damaged_file_errors(lora_file):
                unet.load_lora_adapter(folder, prefix="unet", weight_name=name, adapter_name=adapter_name)
    return pipe


def _unet_of(pipe_or_unet: DiffusionPipeline | nn.Module) -> nn.Module:
    is_pipeline = isinstance(pipe_or_unet, DiffusionPipeline)
    return unwrap_model(pipe_or_unet.unet if is_pipeline else pipe_or_unet)


def _read_weights(source: str | os.PathLike, name: str, hub_options: dict[str, Any]) -> tuple[Weights, str | None]:
    """Return the weights in a file and the path of the file, or ({}, None) if it does not exist."""
    file = fetch_file(source, name, **hub_options)
    if file is None:
        return {}, None
    with damaged_file_errors(file):
        return load_file(file), file


def _misfit(unet: nn.Module, config: SkipScalingConfig, gates: Weights, lora: Weights) -> str | None:
    """Say how an adapter contradicts the model, or return None. Weights of another shape would fail halfway."""
    present = unet.skip_scaler.config if isinstance(unet, SkipScalingMixin) else SkipScalingConfig("none")
    if present.method != "none" and present != config:
        return f"it already has the scaling {present}, but the adapter has {config}"
    expected = {
        _GATE_PREFIX + name: w.shape for name, w in plan_skip_scaling(unet, config).scaler.state_dict().items()
    }
    found = {name: gate.shape for name, gate in gates.items()}
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            shape, needed = (tuple(shapes[name]) if name in shapes else "missing" for shapes in (found, expected))
            return f"the shape of {name} is {shape} in the adapter and {needed} in the model"
    layers = dict(unet.named_modules())
    for name in lora:
        layer = name.removeprefix("unet.").partition(".lora_")[0]
        if not name.startswith("unet.") or layer not in layers:
            return f"its LoRA adapts {layer}, which the model does not have"
    return None


@contextmanager
def _undone_on_error(pipe: DiffusionPipeline, unet: nn.Module):
    """Restore the pipeline if the code in the block fails halfway."""
    was_scaled = isinstance(unet, SkipScalingMixin)
    if was_scaled:
        config = unet.skip_scaler.config
        gates = {name: gate.clone() for name, gate in unet.skip_scaler.state_dict().items()}
    adapters = adapter_names(unet)
    active = unet.active_adapters() if adapters else []
    trained = {name for name, parameter in unet.named_parameters() if parameter.requires_grad}
    try:
        yield
    except BaseException:
        if adapters:
            unet.set_adapter(active)
            unet.delete_adapters([name for name in adapter_names(unet) if name not in adapters])
        elif isinstance(unet, PeftAdapterMixin) and is_peft_available():
            unet.unload_lora()
        if was_scaled:
            apply_skip_scaling(pipe, config)
            unet.skip_scaler.load_state_dict(gates)
        elif isinstance(unet, SkipScalingMixin):
            remove_skip_scaling(pipe)
        for name, parameter in unet.named_parameters():
            parameter.requires_grad_(name in trained)
        raise
