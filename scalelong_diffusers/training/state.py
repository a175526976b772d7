"""Save and load the state of a run: weights and EMA weights, mostly as model folders, optimizer, and progress."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.hub.adapters import adapter_names
from scalelong_diffusers.training.step import is_fused


if TYPE_CHECKING:
    from scalelong_diffusers.training.run import TrainingRun

# Raised when a checkpoint of an older version cannot be resumed exactly.
FORMAT_VERSION = 2

_STATE_FILE = "state.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
_TRAINED_FILE = "trained.safetensors"


def save_state(run: "TrainingRun", folder: Path):
    """Write everything that is needed to resume a run."""
    for name, module in run.modules.items():
        _save_weights(module, folder / name)
        if run.ema is not None:
            with run.evaluating():
                _save_weights(module, folder / f"{name}_ema")
    tensors, numbers = _optimizer_state(run)
    save_file(tensors, folder / _OPTIMIZER_FILE)
    scaler = run.accelerator.scaler
    state = {
        "format_version": FORMAT_VERSION,
        "step": run.global_step,
        "settings": run.settings,
        "optimizer": numbers,
        "ema_steps": None if run.ema is None else run.ema.optimization_step,
        "scaler": None if scaler is None else scaler.state_dict(),
        "progress": run.progress.to_dict(),
    }
    (folder / _STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    """Return the settings and numbers of a checkpoint."""
    state = json.loads((folder / _STATE_FILE).read_text())
    if state.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{folder} was written by another version of scalelong-diffusers (format {state.get('format_version', 1)},"
            f" this version reads {FORMAT_VERSION}): resume it with that version; its unet folders load as models"
        )
    return state


def load_state(run: "TrainingRun", folder: Path, state: dict[str, Any]):
    """Restore a run from a checkpoint."""
    for name, module in run.modules.items():
        if run.ema is not None:
            # If the checkpoint has no EMA weights, the average starts from its weights.
            _load_weights(module, folder / (name if state["ema_steps"] is None else f"{name}_ema"))
    if run.ema is not None:
        run.ema.shadow_params = [parameter.detach().clone() for parameter in run.optimizer_step.parameters]
        run.ema.optimization_step = state["ema_steps"] or 0
    for name, module in run.modules.items():
        _load_weights(module, folder / name)
    _load_optimizer_state(run, load_file(folder / _OPTIMIZER_FILE), state["optimizer"])
    if run.accelerator.scaler is not None and state["scaler"] is not None:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    run.global_step = state["step"]
    run.progress = type(run.progress)(**state["progress"])
    run.optimizer_step.set_nonfinite_in_a_row(run.progress.nonfinite_in_a_row)


def _save_weights(module: nn.Module, folder: Path):
    """Save a model as `from_pretrained` loads it, or only the trained weights of one with an adapter."""
    if adapter_names(module):
        folder.mkdir()
        save_file(_trained_weights(module), folder / _TRAINED_FILE)
    else:
        module.save_pretrained(folder)


def _load_weights(module: nn.Module, folder: Path):
    if adapter_names(module):
        trained = load_file(folder / _TRAINED_FILE)
        if missing := _trained_weights(module).keys() ^ trained.keys():
            raise UserError(f"{folder} was trained with another adapter: only one of them has {sorted(missing)[0]}")
        module.load_state_dict(trained, strict=False)
        return
    module.load_state_dict(type(module).from_pretrained(folder, dtype=module.dtype).state_dict())


def _trained_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().contiguous() for name, p in module.named_parameters() if p.requires_grad}


def _optimizer_state(run: "TrainingRun") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the optimizer's tensors and its other values, by the names of their parameters."""
    names = {id(parameter): name for name, parameter in run.optimizer_step.named_parameters.items()}
    tensors, numbers, written = {}, {}, set()
    for parameter, entries in run.optimizer_step.optimizer.state.items():
        for key, value in entries.items():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.data_ptr() in written:
                value = value.clone()  # 8-bit Adam shares tables between parameters, and safetensors refuses that
            if is_tensor:
                written.add(value.data_ptr())
            (tensors if is_tensor else numbers)[f"{names[id(parameter)]}/{key}"] = value
    return tensors, numbers


def _load_optimizer_state(run: "TrainingRun", tensors: dict[str, torch.Tensor], numbers: dict[str, Any]):
    optimizer = run.optimizer_step.optimizer
    for key, value in {**tensors, **numbers}.items():
        name, entry = key.rsplit("/", 1)
        parameter = run.optimizer_step.named_parameters[name]
        # The fused AdamW counts steps on the device, other optimizers of torch on the CPU.
        on_device = isinstance(value, torch.Tensor) and (entry != "step" or is_fused(optimizer))
        optimizer.state[parameter][entry] = value.to(parameter.device) if on_device else value
