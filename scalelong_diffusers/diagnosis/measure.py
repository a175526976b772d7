"""The measurements of a diagnosis: skips and gradients, the data, sensitivity to noise, and numerical headroom."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import ModelMixin
from torch import nn

from scalelong_diffusers.diagnosis.figures import BINS, DEPTHS, NOISE_LEVELS, Bin, DataFigures, SkipFigures, Spread
from scalelong_diffusers.diagnosis.observer import QUANTITIES, SkipStatistics
from scalelong_diffusers.models.mixin import skip_layout
from scalelong_diffusers.models.uvit import UViTModel
from scalelong_diffusers.noise import NoiseProcess
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.scaling.factors import UPPER_NOISE_RATIO, solve_kappa


_GOLDEN = (math.sqrt(5) - 1) / 2
# Quantities that not every layout and method has.
_OPTIONAL = ("skip_share", "factor", "factor_square")

Advance = Callable[[int], object]  # is called with the number of samples that have run


def ignore_progress(count: int):
    """Report no progress."""


@dataclass(frozen=True)
class Samples:
    """
    Clean images or latents, with the noise and timestep of each.

    Args:
        uniform: positions in the training schedule, in [0, 1).
        perturbation: more noise, which changes the model's input.
        conditions: the model's other inputs, such as `class_labels`: tensors, or dicts of tensors.
    """

    clean: torch.Tensor
    noise: torch.Tensor
    uniform: torch.Tensor
    perturbation: torch.Tensor
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.clean)

    def first(self, count: int) -> "Samples":
        """Return the first samples."""
        tensors = (self.clean, self.noise, self.uniform, self.perturbation, self.conditions)
        return Samples(*(_first(tensor, count) for tensor in tensors))


def _first(value: torch.Tensor | Mapping[str, Any], count: int) -> torch.Tensor | dict[str, Any]:
    if isinstance(value, Mapping):
        return {name: _first(part, count) for name, part in value.items()}
    return value[:count]


def spread_positions(first: int, count: int) -> torch.Tensor:
    """Return positions in [0, 1) that cover the interval evenly, whatever their number."""
    return ((torch.arange(first, first + count, dtype=torch.float64) + 0.5) * _GOLDEN % 1).float()


class LargestActivations:
    """
    Records the largest |output| of the layers in each block of a model, for each sample.

    A block is a child of the model that has weights, or an entry of a child that is a list. Attention scores are not
    seen.
    """

    def __init__(self, model: nn.Module):
        self.blocks: dict[str, nn.Module] = {}
        for name, child in model.named_children():
            if isinstance(child, nn.ModuleList):
                self.blocks |= {f"{name}.{k}": block for k, block in enumerate(child)}
            elif name != "skip_scaler" and any(True for _ in child.parameters()):
                self.blocks[name] = child
        self.values: dict[str, torch.Tensor] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        handles = []
        for name, block in self.blocks.items():
            layers = {module for module in block.modules() if next(module.parameters(recurse=False), None) is not None}
            hook = self._hook(name)
            handles += [module.register_forward_hook(hook) for module in (layers | {block})]
        self.values = {}
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable:
        @torch.no_grad()
        def record(module: nn.Module, args: tuple, output):
            output = output[0] if isinstance(output, tuple) else output
            dims = tuple(range(1, output.ndim))
            largest = torch.linalg.vector_norm(output, math.inf, dims, dtype=torch.float32)
            known = self.values.get(name)
            self.values[name] = largest if known is None else torch.maximum(known, largest)

        return record


@dataclass(frozen=True)
class SkipTable:
    """
    The measured values of all samples.

    Args:
        values: (quantity, skip, sample) in the order of QUANTITIES.
        largest: (block, sample), the largest |activation|.
        losses: the loss of each sample.
    """

    values: torch.Tensor
    blocks: list[str]
    largest: torch.Tensor
    losses: torch.Tensor

    def __getitem__(self, quantity: str) -> torch.Tensor:
        return self.values[list(QUANTITIES).index(quantity)]

    def count_nonfinite(self) -> int:
        """Return the number of samples whose loss or gradients are not finite."""
        numbers = torch.cat([self["hidden_gradient"], self["skip_gradient"], self.losses[None]])
        return int((~numbers.isfinite()).any(0).sum())


def measure_skips(
    model: ModelMixin, batches: Sequence[Samples], noising: NoiseProcess, advance: Advance = ignore_progress
) -> SkipTable:
    """Run the model on all samples, forward and as far back as the skips, and return what was measured."""
    statistics, activations = SkipStatistics(model), LargestActivations(model)
    tables, largest, losses = [], [], []
    with statistics.attached(), activations.attached(), torch.enable_grad():
        for batch in batches:
            activations.values = {}
            batch_losses = sample_losses(model, batch, noising)
            torch.autograd.grad(batch_losses.sum(), statistics.tensors)
            losses.append(batch_losses.detach().cpu())
            tables.append(statistics.table().cpu())
            largest.append(torch.stack(list(activations.values.values())).cpu())
            advance(len(batch))
    blocks = list(activations.values)
    return SkipTable(torch.cat(tables, 2), blocks, torch.cat(largest, 1), torch.cat(losses))


def sample_losses(model: ModelMixin, samples: Samples, noising: NoiseProcess) -> torch.Tensor:
    """Return the unweighted training loss of each sample."""
    timesteps = noising.timesteps(samples.uniform)
    # A gradient for the input lets autograd record the pass even if all weights are frozen.
    noisy = noising.add_noise(samples.clean, samples.noise, timesteps).requires_grad_()
    prediction = model(noisy, timesteps, **samples.conditions).sample
    prediction = prediction[:, : samples.clean.shape[1]]  # a learned variance follows
    target = noising.target(samples.clean, samples.noise, timesteps)
    return (prediction - target).square().flatten(1).mean(1)


def skip_figures(model: ModelMixin, table: SkipTable) -> list[SkipFigures]:
    """Return the figures of each skip."""
    figures = []
    for k, skip in enumerate(skip_layout(model).find(model)):
        means = {name: table[name][k].mean().item() for name in QUANTITIES}
        means |= {name: None for name in _OPTIONAL if math.isnan(means[name])}
        std = None if means["factor"] is None else max(0.0, means["factor_square"] - means["factor"] ** 2) ** 0.5
        gradients = {name: Spread.of(table[name][k]) for name in ("hidden_gradient", "skip_gradient")}
        figures.append(SkipFigures(skip.index, skip.where, skip.width, factor_std=std, **{**means, **gradients}))
    return figures


@torch.no_grad()
def data_figures(
    batches: Sequence[Samples], noising: NoiseProcess, table: SkipTable, skips: Sequence[SkipFigures]
) -> tuple[DataFigures, list[Bin]]:
    """Return what the data says about S, and the figures of each tenth of the training schedule."""
    clean = torch.cat([batch.clean.flatten(1).cpu() for batch in batches])
    noise = torch.cat([batch.noise.flatten(1).cpu() for batch in batches])
    positions = torch.cat([batch.uniform.cpu() for batch in batches])
    mean_square = clean.square().mean().item()
    ones, zeros = torch.ones(len(clean), 1), torch.zeros(len(clean), 1)
    power, ratio, alpha, sigma, timestep = [], [], [], [], []
    for k in range(BINS):
        steps = noising.timesteps((spread_positions(0, len(clean)) + k) / BINS)
        noisy = noising.add_noise(clean, noise, steps)
        power.append(noisy.square().mean(1))
        ratio.append(noise.square().sum(1) / noisy.square().sum(1))
        alpha.append(noising.add_noise(ones, zeros, steps).square().mean().item())
        sigma.append(noising.add_noise(zeros, ones, steps).square().mean().item())
        timestep.append(steps.float().mean().item())
    ratios = torch.stack(ratio)
    expected, of_lemma = ([m * a + s for a, s in zip(alpha, sigma)] for m in (mean_square, 1 / 3))  # Lemma 3.2
    squares = [skip.factor_square for skip in skips]
    target = ratios.mean().item()
    data = DataFigures(
        mean_square=mean_square,
        power=torch.stack(power).mean().item(),
        expected_power=sum(expected) / BINS,
        lemma_power=sum(of_lemma) / BINS,
        noise_ratio=target,
        highest_noise_ratio=ratios.max().item(),
        skip_energy=None if None in squares else sum(squares),
        kappa=_kappa_for(target, len(skips)),
        upper_kappa=_kappa_for(UPPER_NOISE_RATIO, len(skips)),
    )
    bins = [
        Bin(timestep[k], power[k].mean().item(), expected[k], ratio[k].mean().item(), _largest_of(table, positions, k))
        for k in range(BINS)
    ]
    return data, bins


def _kappa_for(target: float, num_skips: int) -> float | None:
    return solve_kappa(target, num_skips) if 1 < target < num_skips else None


def _largest_of(table: SkipTable, positions: torch.Tensor, k: int) -> float | None:
    mine = table.largest[:, (positions * BINS).long() == k]
    return mine.max().item() if mine.numel() else None


@torch.no_grad()
def noise_sensitivity(
    model: ModelMixin, samples: Samples, noising: NoiseProcess, advance: Advance = ignore_progress
) -> list[float]:
    """
    Return the root mean square of the output's change for input perturbations N(0, s^2), for each s of NOISE_LEVELS.

    This is what Theorem 3.4 bounds.
    """
    timesteps = noising.timesteps(samples.uniform)
    noisy = noising.add_noise(samples.clean, samples.noise, timesteps)
    before = model(noisy, timesteps, **samples.conditions).sample
    advance(len(samples))
    changes = []
    for level in NOISE_LEVELS:
        after = model(noisy + level * samples.perturbation, timesteps, **samples.conditions).sample
        changes.append((after - before).square().mean().sqrt().item())
        advance(len(samples))
    return changes


@contextmanager
def with_skip_scaling(model: ModelMixin, config: SkipScalingConfig | None) -> Iterator[None]:
    """
    Run a scaled model with another skip scaling, None for its own.

    Its scaling, gates and config are unchanged afterwards.
    """
    if config is None:
        yield
        return
    layout, scaler = skip_layout(model), model.skip_scaler
    skips = layout.find(model)
    own = layout.build_scaler(SkipScalingConfig("none"), skips)
    own.adopt(scaler)  # so that it keeps the model's gates
    scaler.adopt(layout.build_scaler(config, skips, model.device, model.dtype))
    try:
        yield
    finally:
        scaler.adopt(own)


@torch.no_grad()
def largest_by_depth(
    model: ModelMixin, samples: Samples, noising: NoiseProcess, advance: Advance = ignore_progress
) -> dict[int, float]:
    """Return the largest |activation| of untrained models like this U-ViT with other numbers of layers."""
    found = {}
    timesteps = noising.timesteps(samples.uniform)
    noisy = noising.add_noise(samples.clean, samples.noise, timesteps)
    for layers in DEPTHS if isinstance(model, UViTModel) else ():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            other = type(model).from_config(dict(model.config), num_layers=layers).to(model.device).eval()
        activations = LargestActivations(other)
        with activations.attached():
            other(noisy, timesteps, **samples.conditions)
        found[layers] = torch.stack(list(activations.values.values())).max().item()
        advance(len(samples) * layers // model.config.num_layers)
    return found
