"""What a checkpoint holds: weights and their average, most as folders of models, the optimizer's, and numbers."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from scalelong_diffusers.hub.adapters import adapter_names


if TYPE_CHECKING:
    from scalelong_diffusers.training.loop import TrainingLoop

STATE_FILE = "state.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
_TRAINED_FILE = "trained.safetensors"


def save_state(loop: "TrainingLoop", folder: Path):
    for name, module in loop.modules.items():
        _save_weights(module, folder / name)
        if loop.ema is not None:
            with loop.evaluating():
                _save_weights(module, folder / f"{name}_ema")
    tensors, numbers = _optimizer_state(loop)
    save_file(tensors, folder / _OPTIMIZER_FILE)
    scaler = loop.accelerator.scaler
    state = {
        "step": loop.global_step,
        "settings": loop.settings,
        "optimizer": numbers,
        "lr_scheduler_steps": loop.lr_scheduler.last_epoch,
        "ema_steps": None if loop.ema is None else loop.ema.optimization_step,
        "scaler": None if scaler is None else scaler.state_dict(),
        "nonfinite_in_a_row": loop.nonfinite_in_a_row,
        "losses_to_log": loop.losses_to_log,
    }
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")


def load_state(loop: "TrainingLoop", folder: Path, state: dict[str, Any]):
    for name, module in loop.modules.items():
        if loop.ema is not None:
            # A run that begins to average now begins with the weights.
            _load_weights(module, folder / (name if state["ema_steps"] is None else f"{name}_ema"))
    if loop.ema is not None:
        loop.ema.shadow_params = [parameter.detach().clone() for parameter in loop.parameters]
        loop.ema.optimization_step = state["ema_steps"] or 0
    for name, module in loop.modules.items():
        _load_weights(module, folder / name)
    _load_optimizer_state(loop, load_file(folder / _OPTIMIZER_FILE), state["optimizer"])
    _set_rate(loop, state["lr_scheduler_steps"])
    if loop.accelerator.scaler is not None and state["scaler"] is not None:
        loop.accelerator.scaler.load_state_dict(state["scaler"])
    loop.global_step = loop.logged_at = state["step"]
    loop.nonfinite_in_a_row = state["nonfinite_in_a_row"]
    loop.losses_to_log = state["losses_to_log"]


def _save_weights(module: nn.Module, folder: Path):
    """As a model that can be loaded; of one with an adapter, which stands on a base, what is trained alone."""
    if adapter_names(module):
        folder.mkdir()
        save_file(_trained_weights(module), folder / _TRAINED_FILE)
    else:
        module.save_pretrained(folder)


def _load_weights(module: nn.Module, folder: Path):
    if adapter_names(module):
        trained = load_file(folder / _TRAINED_FILE)
        if missing := _trained_weights(module).keys() ^ trained.keys():
            raise ValueError(f"{folder} was trained with another adapter: {sorted(missing)[0]} is not in both")
        module.load_state_dict(trained, strict=False)
        return
    module.load_state_dict(type(module).from_pretrained(folder, dtype=module.dtype).state_dict())


def _trained_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().contiguous() for name, p in module.named_parameters() if p.requires_grad}


def _optimizer_state(loop: "TrainingLoop") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Its tensors by the name of their parameter, and what is no tensor."""
    names = {id(parameter): name for name, parameter in loop.named_parameters.items()}
    tensors, numbers, written = {}, {}, set()
    for parameter, entries in loop.optimizer.optimizer.state.items():
        for key, value in entries.items():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.data_ptr() in written:
                value = value.clone()  # 8-bit Adam has tables that all parameters share, and a file has no such thing
            if is_tensor:
                written.add(value.data_ptr())
            (tensors if is_tensor else numbers)[f"{names[id(parameter)]}/{key}"] = value
    return tensors, numbers


def _load_optimizer_state(loop: "TrainingLoop", tensors: dict[str, torch.Tensor], numbers: dict[str, Any]):
    optimizer = loop.optimizer.optimizer
    for key, value in {**tensors, **numbers}.items():
        name, entry = key.rsplit("/", 1)
        parameter = loop.named_parameters[name]
        # As torch keeps it: what has the parameter's shape is beside it, the count of steps is on the CPU.
        on_device = isinstance(value, torch.Tensor) and value.dim() > 0
        optimizer.state[parameter][entry] = value.to(parameter.device) if on_device else value


def _set_rate(loop: "TrainingLoop", steps: int):
    """The rate after so many steps, from the flags: they may have been changed on purpose."""
    scheduler = loop.lr_scheduler
    scheduler.last_epoch = steps
    scheduler._last_lr = [base * rate(steps) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
    for group, rate in zip(loop.optimizer.param_groups, scheduler._last_lr):
        group["lr"] = rate


def largest_gradients(named_parameters: dict[str, nn.Parameter], count: int = 3) -> list[str]:
    """The names of the parameters with the largest gradients, those that are not finite first."""
    norms = {name: float(p.grad.norm()) for name, p in named_parameters.items() if p.grad is not None}
    order = sorted(norms, key=lambda name: norms[name] if math.isfinite(norms[name]) else math.inf, reverse=True)
    return [f"{name} ({norms[name]:.3g})" for name in order[:count]]


def nonfinite_weights(named_parameters: dict[str, nn.Parameter], count: int = 3) -> list[str]:
    """The names of the first few parameters that have an entry that is not finite."""
    names = list(named_parameters)
    largest = torch.stack(torch._foreach_norm(list(named_parameters.values()), ord=math.inf)).tolist()
    return [name for name, value in zip(names, largest) if not math.isfinite(value)][:count]
