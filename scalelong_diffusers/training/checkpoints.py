"""
The `checkpoint-<step>` folders of a run: written atomically, and verified before they are trusted.

A checkpoint holds weights and EMA weights, mostly as model folders, the optimizer's state, and the run's progress.
With FSDP2, each process writes its shards of all tensors instead, unless accelerate is configured for a full state
dict. Any run resumes from either.
"""

import dataclasses
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import nn

from scalelong_diffusers.download import load_model
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import PARTIAL, checksum, read_json_file, sync, write_json
from scalelong_diffusers.hub.adapters import LORA_FILE, SCALING_FILE, adapter_names
from scalelong_diffusers.processes import full, processes, run_on_main_process
from scalelong_diffusers.training.monitoring import METRICS_FILE
from scalelong_diffusers.training.power_ema import SNAPSHOTS_FOLDER, PowerEMA
from scalelong_diffusers.training.settings import SETTINGS_FILE
from scalelong_diffusers.training.sharding import fill
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

        If a process is killed at any point, all earlier checkpoints are still complete. All processes call this, and
        `write` is called in all of them.
        """
        partial, final = self.folder / f"{PARTIAL}{step}", self.path(step)
        try:
            run_on_main_process(lambda: partial.mkdir(parents=True))
            write(partial)
            run_on_main_process(lambda: _complete(partial, final))
        except BaseException:
            if processes().is_main_process:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        run_on_main_process(lambda: self._remove_beyond_limit(final))
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


def _complete(partial: Path, final: Path):
    """Write the checksums of a checkpoint, sync it and give it its name."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    checksums = {path.relative_to(partial).as_posix(): checksum(path) for path in files}
    write_json(partial / CHECKSUMS_FILE, checksums)
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    replace_folder(partial, final)


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
_SHARDS_FOLDER = "shards"
_OPTIMIZER_PREFIX = "optimizer/"
_POWER_EMA_FILE = "power_ema.safetensors"


def save_state(run: "TrainingRun", folder: Path):
    """Write everything that resuming a run needs. All processes call this."""
    tensors, numbers = _optimizer_state(run)
    if run.writes_shards:
        tensors = {f"{_OPTIMIZER_PREFIX}{key}": tensor for key, tensor in tensors.items()}
        _write_shards({**_sharded_state(run, run.ema is not None), **tensors}, folder / _SHARDS_FOLDER)
    else:
        _write_models(run, folder)
        tensors = _gathered(tensors)
        run_on_main_process(lambda: _save_tensors(tensors, folder / _OPTIMIZER_FILE))
    if run.optimizer_step.power_ema is not None:
        averages = run.optimizer_step.power_ema.state()
        run_on_main_process(lambda: _save_tensors(averages, folder / _POWER_EMA_FILE))
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
    run_on_main_process(lambda: (folder / _STATE_FILE).write_text(json.dumps(state, indent=2) + "\n"))


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
    read = _read_shards if (folder / _SHARDS_FOLDER).is_dir() else _read_models
    read(run, folder, state)
    if run.ema is not None:
        run.ema.optimization_step = state["ema_steps"] or 0
    if run.optimizer_step.power_ema is not None:
        _load_power_ema(run.optimizer_step.power_ema, folder / _POWER_EMA_FILE, state["step"])
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


# Whole models


def _gathered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the whole tensors in the main process, and nothing in the others."""
    whole = {}
    for name, tensor in tensors.items():
        tensor = full(tensor)
        if processes().is_main_process:
            whole[name] = tensor.cpu()
    return whole


def _write_models(run: "TrainingRun", folder: Path):
    """Let the main process write each model, and each model with EMA weights, as `from_pretrained` loads it."""

    def write(suffix: str):
        for name, module in run.modules.items():
            _save_weights(module, folder / f"{name}{suffix}")

    with run.evaluating(with_ema=False):
        run_on_main_process(lambda: write(""))
    if run.ema is not None:
        with run.evaluating():
            run_on_main_process(lambda: write("_ema"))


def _read_models(run: "TrainingRun", folder: Path, state: dict[str, Any]):
    if run.ema is not None:
        # If the checkpoint has no EMA weights, the average starts from its weights.
        for name in run.modules:
            _load_weights(run, name, folder / (name if state["ema_steps"] is None else f"{name}_ema"))
        run.ema.shadow_params = run.optimizer_step.copy_parameters()
    for name in run.modules:
        _load_weights(run, name, folder / name)
    _load_optimizer_state(run, load_file(folder / _OPTIMIZER_FILE), state["optimizer"])


def _save_weights(module: nn.Module, folder: Path):
    """Save a model as `from_pretrained` loads it, or only the trained weights of one with an adapter."""
    if adapter_names(module):
        folder.mkdir()
        _save_tensors(_trained_weights(module), folder / _TRAINED_FILE)
    else:
        module.save_pretrained(folder)


def _load_weights(run: "TrainingRun", name: str, folder: Path):
    module, trained = run.modules[name], run.trained[name]
    if adapter_names(module):
        weights, expected = load_file(folder / _TRAINED_FILE), _trained_weights(trained)
        if missing := expected.keys() ^ weights.keys():
            raise UserError(f"{folder} was trained with another adapter: only one of them has {sorted(missing)[0]}")
    else:
        saved = load_model(type(module), folder, f"the {folder.name} of {folder.parent}", dtype=module.dtype)
        weights, expected = saved.state_dict(), trained.state_dict()
    for key, tensor in expected.items():
        fill(tensor, weights[key])


def _trained_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def _save_tensors(tensors: dict[str, torch.Tensor], file: Path):
    written = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in written:
            tensor = tensor.clone()  # 8-bit Adam shares tables between parameters, and safetensors refuses that
        written.add(tensor.data_ptr())
        tensors[name] = tensor.contiguous()  # safetensors refuses other memory formats
    save_file(tensors, file)


# Shards, with torch's distributed checkpoints in safetensors files


def _sharded_state(run: "TrainingRun", with_ema: bool) -> dict[str, torch.Tensor]:
    """Return weights and EMA weights by the names that they have in shards."""
    tensors = {}
    for name, model in run.trained.items():
        weights = _trained_weights(model) if adapter_names(run.modules[name]) else model.state_dict()
        tensors |= {f"{name}/{key}": tensor for key, tensor in weights.items()}
    if with_ema:
        tensors |= {f"ema/{key}": t for key, t in zip(run.optimizer_step.named_parameters, run.ema.shadow_params)}
    return tensors


def _write_shards(tensors: dict[str, torch.Tensor], folder: Path):
    try:
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except dcp.CheckpointException as error:  # in all processes
        rank, (reason, _) = next(iter(error.failures.items()))
        raise OSError(f"process {rank}: {reason}") from error


def _read_shards(run: "TrainingRun", folder: Path, state: dict[str, Any]):
    reader = dcp.HuggingFaceStorageReader(str(folder / _SHARDS_FOLDER))
    stored = reader.read_metadata().state_dict_metadata
    has_ema = run.ema is not None and state["ema_steps"] is not None
    weights = _sharded_state(run, has_ema)
    if missing := weights.keys() - stored.keys():
        raise UserError(f"{folder} was trained with another adapter: it does not have {min(missing)}")
    optimizer = {
        key: _empty_optimizer_entry(run, key, entry.size, entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith(_OPTIMIZER_PREFIX)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process
        dcp.load({**weights, **optimizer}, storage_reader=reader)
    if run.ema is not None and not has_ema:  # the average starts from the weights
        run.ema.shadow_params = run.optimizer_step.copy_parameters()
    tensors = {key.removeprefix(_OPTIMIZER_PREFIX): tensor for key, tensor in optimizer.items()}
    _load_optimizer_state(run, tensors, state["optimizer"])


def _empty_optimizer_entry(run: "TrainingRun", key: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor for an entry of the optimizer's state, sharded like its parameter if it has its shape."""
    parameter = run.optimizer_step.named_parameters[key.removeprefix(_OPTIMIZER_PREFIX).rpartition("/")[0]]
    return torch.empty_like(parameter, dtype=dtype) if size == parameter.shape else torch.empty(size, dtype=dtype)


def _optimizer_state(run: "TrainingRun") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the other values in the optimizer's state, by parameter name and key."""
    names = {id(parameter): name for name, parameter in run.optimizer_step.named_parameters.items()}
    tensors, numbers = {}, {}
    for parameter, entries in run.optimizer_step.optimizer.state.items():
        for key, value in entries.items():
            (tensors if isinstance(value, torch.Tensor) else numbers)[f"{names[id(parameter)]}/{key}"] = value
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
                value = fill(torch.empty_like(parameter, dtype=value.dtype), value)  # in its memory format
        optimizer.state[parameter][entry] = value
