"""
Post-hoc EMA: reconstruct averages of any length from the snapshots of a run.

The method is from Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models" (2023).
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from diffusers import DiffusionPipeline
from safetensors import SafetensorError, safe_open
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import PARTIAL, checksum, read_json_file, remove_leftovers, write_json
from scalelong_diffusers.locks import locked
from scalelong_diffusers.options import Option, check_arguments
from scalelong_diffusers.pipelines.loading import load_with_own_class
from scalelong_diffusers.training.checkpoints import replace_folder
from scalelong_diffusers.training.power_ema import KEPT_SIGMA_RELS, gamma_of, snapshot_files
from scalelong_diffusers.training.settings import SETTINGS_FILE


FACTS_FILE = "ema.json"
# The largest accepted distance between the reconstructed profile and the wanted one, relative to the wanted one.
_LARGEST_ERROR = 0.1


@dataclass(frozen=True)
class ReconstructedEMA:
    """
    A pipeline whose weights are an average of a run's weights.

    Args:
        step: the step after which the average is taken.
        profile_error: relative distance (L2) between the reconstructed profile and the exact one.
    """

    folder: str
    sigma_rel: float
    step: int
    num_snapshots: int
    profile_error: float


@check_arguments
def reconstruct_ema(
    run_folder: str,
    output_dir: str,
    sigma_rel: Annotated[list[float], Option(at_least=0.001, at_most=0.28)],
    step: Annotated[int | None, Option(at_least=1, at_most=10**9)] = None,
) -> list[ReconstructedEMA]:
    """
    Write a pipeline folder for each EMA length, from the snapshots of a finished run.

    ```python
    reconstruct_ema("runs/flowers", "runs/flowers-ema", sigma_rel=[0.05, 0.15])
    ```

    Args:
        sigma_rel: lengths of the averages: the standard deviation of their profile relative to the training time.
        step: the step after which the averages are taken, one with a snapshot; the last step by default.
    """
    source, target = Path(run_folder), Path(output_dir)
    files = _files_until(source, step)
    steps = list(files)
    factors, errors = reconstruction(steps, steps[-1], sigma_rel)
    _check_errors(steps, sigma_rel, errors)
    results = [
        ReconstructedEMA(str(target / f"sigma_rel-{sigma:g}"), sigma, steps[-1], len(steps), error)
        for sigma, error in zip(sigma_rel, errors.tolist())
    ]
    origin = {"run": run_folder, "last_snapshot": _fingerprint(files[steps[-1]])}
    facts = [{**origin, **asdict(result)} for result in results]
    missing = [k for k, entry in enumerate(facts) if not _is_complete(entry)]
    pipe = load_with_own_class(source)
    with locked(target):
        remove_leftovers(target)
        for k in missing:
            _set_weights(pipe, list(files.values()), factors[k])
            _save(pipe, facts[k])
    return results


def _files_until(run_folder: Path, step: int | None) -> dict[int, Path]:
    """
    Return the snapshots up to `step`, as a dict from step to file.

    Raise a `UserError` if the run has none or is not finished.
    """
    files = snapshot_files(run_folder)
    if not files:
        raise UserError(
            f"{run_folder} has no EMA snapshots: pass the output folder of a training with --ema_snapshot_steps"
        )
    if step is None:
        last = read_json_file(run_folder / SETTINGS_FILE).get("max_train_steps")
        if last not in files:
            raise UserError(
                f"{run_folder} is not finished: its last snapshot is of step {max(files)} of {last}; resume the "
                f"training, or pass step {max(files)}"
            )
        step = last
    if step not in files:
        raise UserError(f"step must be one with a snapshot, {_shorten(list(files))}, got {step}")
    return {number: file for number, file in files.items() if number <= step}


def _shorten(steps: Sequence[int]) -> str:
    shown = list(map(str, steps))
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-4:]])


def _check_errors(steps: Sequence[int], sigma_rels: Sequence[float], errors: torch.Tensor):
    """Raise a `UserError` if the snapshots are too few for an average."""
    refused = [sigma for sigma, error in zip(sigma_rels, errors.tolist()) if error > _LARGEST_ERROR]
    if not refused:
        return
    candidates = [round(k / 1000, 3) for k in range(1, 281)]
    _, errors = reconstruction(steps, steps[-1], candidates)
    possible = [sigma for sigma, error in zip(candidates, errors.tolist()) if error <= _LARGEST_ERROR]
    raise UserError(
        f"sigma_rel {refused[0]:g} cannot be reconstructed from {len(steps)} snapshots, which allow {min(possible):g} "
        f"to {max(possible):g}; more snapshots (--ema_snapshot_steps) allow more"
    )


def _is_complete(facts: Mapping[str, Any]) -> bool:
    """Return whether an interrupted command has written a folder. Raise a `UserError` if it holds something else."""
    folder = Path(facts["folder"])
    if not folder.exists():
        return False
    if (folder / FACTS_FILE).is_file() and read_json_file(folder / FACTS_FILE) == facts:
        return True
    raise UserError(f"{folder} already exists: remove it, or pass another --output_dir")


@torch.no_grad()
def _set_weights(pipe: DiffusionPipeline, files: Sequence[Path], factors: torch.Tensor):
    """Set the trained weights of a pipeline to a combination of snapshots."""
    modules = {name: module for name, module in pipe.components.items() if isinstance(module, nn.Module)}
    parameters = {f"{name}.{key}": p for name, module in modules.items() for key, p in module.named_parameters()}
    for name, average in _combine(files, factors).items():
        if name not in parameters:
            raise UserError(f"the pipeline of the run has no weight {name}, and the EMA snapshots do")
        parameters[name].copy_(average)


def _combine(files: Sequence[Path], factors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the sums of all averages times their factors, `(kept profile, snapshot)`, in float64."""
    totals: dict[str, torch.Tensor] = {}
    for k, file in enumerate(files):
        factor_of = dict(zip(map("{:g}".format, KEPT_SIGMA_RELS), factors[:, k].tolist()))
        for key, average in _read(file):
            sigma_rel, _, name = key.partition("/")
            if name not in totals:
                totals[name] = torch.zeros_like(average, dtype=torch.float64)
            totals[name].add_(average, alpha=factor_of[sigma_rel])
    return totals


def _read(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the averages in a snapshot, after a check of each one."""
    with _opened(file) as reader:
        checksums = reader.metadata() or {}
        for key in reader.keys():  # noqa: SIM118
            average = reader.get_tensor(key)
            if checksum(average) != checksums.get(key):
                raise UserError(f"{file} is damaged: {key} has changed since it was written")
            yield key, average


def _fingerprint(file: Path) -> str:
    """Return a checksum of the checksums in a snapshot. It changes if the run is trained again in the same folder."""
    with _opened(file) as reader:
        return checksum(json.dumps(reader.metadata(), sort_keys=True))


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def _save(pipe: DiffusionPipeline, facts: Mapping[str, Any]):
    """Write a pipeline to a temporary folder, and rename it."""
    folder = Path(facts["folder"])
    partial = folder.with_name(f"{PARTIAL}{folder.name}")
    try:
        pipe.save_pretrained(partial)
        write_json(partial / FACTS_FILE, facts)
        replace_folder(partial, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be written: {' '.join(str(error).split())}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def reconstruction(steps: Sequence[int], end: int, sigma_rels: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return how to combine snapshots into averages after step `end`, and how well that works.

    Returns:
        The factors of the snapshots, `(sigma_rel, kept profile, snapshot)`. They minimize the distance between the
        combined and the wanted profile in L2, and add up to 1, so that constant weights do not change.
        The relative distances that remain.
    """
    times = torch.tensor(steps, dtype=torch.float64).repeat(len(KEPT_SIGMA_RELS))
    kept = _gammas(KEPT_SIGMA_RELS).repeat_interleave(len(steps))
    wanted, end_time = _gammas(sigma_rels), torch.tensor(end, dtype=torch.float64)
    products = _inner_products(times[:, None], kept[:, None], times, kept)
    targets = _inner_products(times[:, None], kept[:, None], end_time, wanted)
    norms = products.diagonal().sqrt()  # all rows and columns get the same size, which keeps the solution accurate
    system = torch.zeros(len(times) + 1, len(times) + 1, dtype=torch.float64)
    system[:-1, :-1] = products / norms[:, None] / norms
    system[-1, :-1] = system[:-1, -1] = 1 / norms  # the multiplier of the condition that the factors add up to 1
    right = torch.cat([targets / norms[:, None], torch.ones(1, len(wanted), dtype=torch.float64)])
    factors = torch.linalg.solve(system, right)[:-1] / norms[:, None]
    wanted_squared = _inner_products(end_time, wanted, end_time, wanted)
    squared = wanted_squared - 2 * (factors * targets).sum(0) + (factors * (products @ factors)).sum(0)
    errors = (squared.clamp(min=0) / wanted_squared).sqrt()
    return factors.T.unflatten(1, (len(KEPT_SIGMA_RELS), -1)), errors


def _gammas(sigma_rels: Sequence[float]) -> torch.Tensor:
    return torch.tensor([gamma_of(sigma_rel) for sigma_rel in sigma_rels], dtype=torch.float64)


def _inner_products(
    time: torch.Tensor, gamma: torch.Tensor, other_time: torch.Tensor, other_gamma: torch.Tensor
) -> torch.Tensor:
    """Return the integrals of the products of profiles (gamma + 1) tau^gamma / t^(gamma + 1) on [0, t]."""
    first, last = torch.minimum(time, other_time), torch.maximum(time, other_time)
    gamma_of_last = torch.where(time > other_time, gamma, other_gamma)
    factor = (gamma + 1) * (other_gamma + 1) / (gamma + other_gamma + 1)
    return factor * (first / last) ** gamma_of_last / last
