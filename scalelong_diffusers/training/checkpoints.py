"""
The `checkpoint-<step>` folders of a run: written atomically, and verified before they are trusted.

A checkpoint holds weights and EMA weights, mostly as model folders, the optimizer's state, and the run's progress.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import nn

from scalelong_diffusers.download import load_model
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import PARTIAL, checksum, read_json_file, sync, write_json
from scalelong_diffusers.hub.adapters import LORA_FILE, SCALING_FILE, adapter_names
from scalelong_diffusers.training.monitoring import METRICS_FILE
from scalelong_diffusers.training.power_ema import SNAPSHOTS_FOLDER, PowerEMA
from scalelong_diffusers.training.settings import SETTINGS_FILE
from scalelong_diffusers.training.step import is_fused


if TYPE_CHECKING:
    from scalelong_diffusers.training.run import TrainingRun


CHECKSUMS_FILE = "checksums.json"
LATEST = "latest"
_PREFIX = "checkpoint-"
_OLD = f"{PARTIAL}old-"
# The folders of pipelines' components.
_COMPONENTS = ("unet", "vae", "scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


class Checkpoints:
    """The checkpoints of a run in `folder`. Only the latest `limit` are kept."""

    def __init__(self, folder: Path, limit: int | None = None):
        self.folder = folder
        self.limit = limit

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """
        Write a checkpoint to a temporary folder, sync and rename it, and remove the oldest ones beyond the limit.

        If the process is killed at any point, all earlier checkpoints are still complete.
        """
        partial = self.folder / f"{PARTIAL}{step}"
        try:
            partial.mkdir(parents=True)
            write(partial)
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            checksums = {path.relative_to(partial).as_posix(): checksum(path) for path in files}
            write_json(partial / CHECKSUMS_FILE, checksums)
            for path in [*partial.rglob("*"), partial]:
                sync(path)
            final = self.path(step)
            replace_folder(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._remove_beyond_limit(final)
        return final

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in order, complete or not."""
        names = [path.name.removeprefix(_PREFIX) for path in self.folder.glob(f"{_PREFIX}*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step}"

    def find(self, which: str) -> tuple[Path, list[str]]:
        """Return the path of a checkpoint ("latest", a name or a path), and the reasons why others were skipped."""
        if which != LATEST:
            path = next((path for path in (self.folder / which, Path(which)) if path.is_dir()), None)
            if path is None:
                raise UserError(f"there is no checkpoint {which}; {self._list_steps()}")
            if broken := damage(path):
                raise UserError(f"cannot resume from {path}: {broken}; {self._list_steps()}")
            self._check_is_latest(path)
            return path, []
        skipped = []
        for path in map(self.path, reversed(self.steps())):
            broken = damage(path)
            if broken is None:
                return path, skipped
            skipped.append(f"skipped {path}: {broken}")
        if skipped:
            raise UserError(
                f"{self.folder} has no complete checkpoint: {'; '.join(skipped)}; remove them to start again, or pass "
                "another folder"
            )
        raise UserError(f"{self.folder} has no checkpoint to resume from; omit the flag to start a new run")

    def _remove_beyond_limit(self, newest: Path):
        if self.limit is None:
            return
        others = [self.path(step) for step in self.steps() if self.path(step) != newest]
        for path in others[: max(0, len(others) - (self.limit - 1))]:
            # Renamed first, so that a half-removed checkpoint does not look like one.
            old = path.with_name(f"{_OLD}{path.name}")
            os.rename(path, old)
            shutil.rmtree(old)

    def _check_is_latest(self, path: Path):
        """Raise a `UserError` if there are later checkpoints, with which a resumed run would mix its own."""
        number = path.name.removeprefix(_PREFIX)
        later = [self.path(step) for step in self.steps() if number.isdecimal() and step > int(number)]
        if complete := [other.name for other in later if damage(other) is None]:
            raise UserError(
                f"{self.folder} has later checkpoints than {path.name}: move {', '.join(complete)} away first"
            )

    def _list_steps(self) -> str:
        names = ", ".join(self.path(step).name for step in self.steps())
        return f"{self.folder} has {names or 'no checkpoints'}"


def damage(checkpoint: Path) -> str | None:
    """Describe the damage of a checkpoint, or return None if every file has its original content."""
    try:
        checksums = read_json_file(checkpoint / CHECKSUMS_FILE)
    except UserError as error:
        return str(error)
    if _STATE_FILE not in checksums:
        return f"{CHECKSUMS_FILE} does not list {_STATE_FILE}"
    for name, expected in checksums.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if checksum(file) != expected:
            return f"{name} has changed since it was written"
    return None


def replace_folder(new: Path, final: Path):
    """Rename a folder. An existing folder is moved aside first, since folders cannot be exchanged atomically."""
    old = final.with_name(f"{_OLD}{final.name}")
    if final.exists():
        os.rename(final, old)
    os.rename(new, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def check_folder(checkpoints: Checkpoints, is_new: bool):
    """Raise a `UserError` if the folder of a run cannot be written or holds something else."""
    folder = checkpoints.folder
    try:
        _check_writable(folder)
    except OSError as error:
        raise UserError(f"cannot write to --output_dir {folder}: {error}") from error
    if not is_new:
        return
    if checkpoints.steps():
        raise UserError(
            f"--output_dir {folder} holds another run: pass --resume_from_checkpoint latest to resume it, or another "
            "folder"
        )
    contents = {DiffusionPipeline.config_name: "a pipeline", SCALING_FILE: "an adapter", LORA_FILE: "an adapter"}
    logs = () if _is_run(folder) else (SETTINGS_FILE, METRICS_FILE, SNAPSHOTS_FOLDER)
    contents |= {name: f"{name}, which the run would replace" for name in (*logs, *_COMPONENTS)}
    for name, what in contents.items():
        if (folder / name).exists():
            raise UserError(f"--output_dir {folder} holds {what}: pass another folder")


def _is_run(folder: Path) -> bool:
    """Return whether a run has begun in the folder. If it has no checkpoint, it can only be started again."""
    try:
        return "data_fingerprint" in read_json_file(folder / SETTINGS_FILE)
    except UserError:
        return False


def _check_writable(folder: Path):
    """Try to write into a folder, and remove the created folders: a rejected run leaves nothing behind."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    finally:
        for path in created:
            with suppress(OSError):  # another run may have started in the same parent
                path.rmdir()


# To be increased if checkpoints of the present version could not be resumed exactly.
FORMAT_VERSION = 2

_STATE_FILE = "state.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
_TRAINED_FILE = "trained.safetensors"
_POWER_EMA_FILE = "power_ema.safetensors"


def save_state(run: "TrainingRun", folder: Path):
    """Write everything that resuming a run needs."""
    for name, module in run.modules.items():
        _save_weights(module, folder / name)
        if run.ema is not None:
            with run.evaluating():
                _save_weights(module, folder / f"{name}_ema")
    tensors, numbers = _optimizer_state(run)
    save_file(tensors, folder / _OPTIMIZER_FILE)
    if run.optimizer_step.power_ema is not None:
        save_file(run.optimizer_step.power_ema.state(), folder / _POWER_EMA_FILE)
    scaler = run.accelerator.scaler
    state = {
        "format_version": FORMAT_VERSION,
        "step": run.global_step,
        "settings": run.settings,
        "optimizer": numbers,
        "ema_steps": None if run.ema is None else run.ema.optimization_step,
        "scaler": None if scaler is None else scaler.state_dict(),
        "progress": dataclasses.asdict(run.progress),
    }
    (folder / _STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    """Return the settings and numbers of a checkpoint."""
    state = read_json_file(folder / _STATE_FILE)
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
    if run.optimizer_step.power_ema is not None:
        _load_power_ema(run.optimizer_step.power_ema, folder / _POWER_EMA_FILE, state["step"])
    for name, module in run.modules.items():
        _load_weights(module, folder / name)
    _load_optimizer_state(run, load_file(folder / _OPTIMIZER_FILE), state["optimizer"])
    if run.accelerator.scaler is not None and state["scaler"] is not None:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    run.global_step = state["step"]
    run.progress = type(run.progress)(**state["progress"])
    run.optimizer_step.set_nonfinite_in_a_row(run.progress.nonfinite_in_a_row)


def _load_power_ema(averages: PowerEMA, file: Path, step: int):
    if not file.is_file():
        raise UserError(
            f"{file.parent} has no averages for --ema_snapshot_steps, which must be kept from the first step: omit "
            "the flag, or start a new run"
        )
    averages.load(load_file(file), step)


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
    saved = load_model(type(module), folder, f"the {folder.name} of {folder.parent}", dtype=module.dtype)
    module.load_state_dict(saved.state_dict())


def _trained_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().contiguous() for name, p in module.named_parameters() if p.requires_grad}


def _optimizer_state(run: "TrainingRun") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the other values in the optimizer's state, by parameter name and key."""
    names = {id(parameter): name for name, parameter in run.optimizer_step.named_parameters.items()}
    tensors, numbers, written = {}, {}, set()
    for parameter, entries in run.optimizer_step.optimizer.state.items():
        for key, value in entries.items():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.data_ptr() in written:
                value = value.clone()  # 8-bit Adam shares tables between parameters, and safetensors refuses that
            if is_tensor:
                written.add(value.data_ptr())
                value = value.contiguous()  # safetensors refuses other memory formats
            (tensors if is_tensor else numbers)[f"{names[id(parameter)]}/{key}"] = value
    return tensors, numbers


def _load_optimizer_state(run: "TrainingRun", tensors: dict[str, torch.Tensor], numbers: dict[str, Any]):
    optimizer = run.optimizer_step.optimizer
    for key, value in {**tensors, **numbers}.items():
        name, entry = key.rsplit("/", 1)
        parameter = run.optimizer_step.named_parameters[name]
        # The fused AdamW counts steps on the device, other optimizers of torch on the CPU.
        if isinstance(value, torch.Tensor) and (entry != "step" or is_fused(optimizer)):
            value = value.to(parameter.device)
            if value.shape == parameter.shape:
                value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # in its memory format
        optimizer.state[parameter][entry] = value
