"""One optimizer step: backward, clipping, AdamW, learning rate and EMA, without waiting for the device."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import nn

from scalelong_diffusers.models.mup import param_groups
from scalelong_diffusers.processes import full
from scalelong_diffusers.training.config import OptimizationConfig
from scalelong_diffusers.training.power_ema import PowerEMA


class StepStatistics(NamedTuple):
    """Statistics of all processes since they were last read."""

    loss_sum: float
    finite_steps: int
    nonfinite_in_a_row: int  # up to now
    longest_nonfinite_run: int
    grad_norm: float
    interrupted: bool


class OptimizerStep:
    """
    The optimizer of a run, with its learning rate and EMA weights.

    A step with a non-finite loss or gradient does not change the weights or the optimizer's state: a non-finite loss
    makes all gradients NaN in every process, and the fused optimizer reads `found_inf` on the device. The EMA weights
    and the learning rate advance as usual. Only `read_statistics` and `nonfinite_weights` wait for the device.
    """

    def __init__(
        self,
        config: OptimizationConfig,
        accelerator: Accelerator,
        named_parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        num_steps: int,
    ):
        self.config = config
        self.accelerator = accelerator
        self.named_parameters = named_parameters
        self.parameters = list(named_parameters.values())
        self.optimizer = optimizer
        self.ema = EMAModel(self.parameters, decay=config.ema_decay, foreach=True) if config.use_ema else None
        self.power_ema = PowerEMA(named_parameters) if config.ema_snapshot_steps else None
        scheduler = get_scheduler(
            config.lr_scheduler,
            self.optimizer,
            num_warmup_steps=config.lr_warmup_steps,
            num_training_steps=num_steps,
            num_cycles=config.lr_num_cycles,
            power=config.lr_power,
        )
        # A pure function of the step: it has no state to save, and accelerate cannot step it once per process.
        self._lr_factor, self._base_lrs = scheduler.lr_lambdas[0], scheduler.base_lrs
        device = self.parameters[0].device
        # Sums of fp32 losses are exact in float64, so that a run logs the same after any interruption.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._step_loss = torch.zeros((), dtype=dtype, device=device)
        self._grad_norm = torch.zeros_like(self._step_loss)
        # Loss sum, finite steps, non-finite steps in a row, and the longest such run.
        self._statistics = torch.zeros(4, dtype=dtype, device=device)

    def set_learning_rate(self, step: int):
        """Set the learning rate of the step with this number, counted from 0."""
        for group, base in zip(self.optimizer.param_groups, self._base_lrs):
            group["lr"] = base * self._lr_factor(step)

    @property
    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def backward(self, loss: torch.Tensor):
        """Add the gradients of one of the step's losses. A non-finite loss makes them NaN."""
        # x - x is NaN for NaN and infinities, otherwise 0.
        self.accelerator.backward(loss * (1 + (loss - loss).detach()))
        self._step_loss += loss.detach() / self.config.gradient_accumulation_steps

    def update(self):
        """Update the parameters and the EMA weights from the gradients of the step."""
        scaler = self.accelerator.scaler
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        norm = full(nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
        is_finite = norm.isfinite() & self._step_loss.isfinite()
        if self.config.max_grad_norm:
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.max_grad_norm, norm)
        if scaler is not None:
            scaler.step(self.optimizer)
            scaler.update()
        elif is_fused(self.optimizer):
            self.optimizer.grad_scale, self.optimizer.found_inf = None, (~is_finite).float()
            self.optimizer.step()
        elif is_finite:  # a custom optimizer, which cannot skip a step on the device
            self.optimizer.step()
        for parameter in self.parameters:  # also of those that a custom optimizer leaves out
            parameter.grad = None
        if self.ema is not None:
            self.ema.step(self.parameters)
        if self.power_ema is not None:
            self.power_ema.update()
        self._count(is_finite, norm)

    def _count(self, is_finite: torch.Tensor, norm: torch.Tensor):
        loss_sum, finite_steps, in_a_row, longest = self._statistics.unbind()
        in_a_row = torch.where(is_finite, 0.0, in_a_row + 1)
        self._statistics = torch.stack(
            [
                loss_sum + torch.where(is_finite, self._step_loss, 0.0),
                finite_steps + is_finite,
                in_a_row,
                torch.maximum(longest, in_a_row),
            ]
        )
        self._grad_norm = norm
        self._step_loss = torch.zeros_like(self._step_loss)

    def read_statistics(self, is_stopping: bool = False) -> StepStatistics:
        """Wait for the device, return the statistics of all processes and reset them."""
        mine = torch.cat(
            [self._statistics, self._grad_norm.to(self._statistics)[None], self._statistics.new_tensor([is_stopping])]
        )
        rows = self.accelerator.gather(mine[None]).tolist()
        loss_sum = math.fsum(row[0] for row in rows) / len(rows)
        _, finite_steps, in_a_row, longest, grad_norm, interrupted = map(max, zip(*rows))
        self.set_nonfinite_in_a_row(int(in_a_row))
        return StepStatistics(loss_sum, int(finite_steps), int(in_a_row), int(longest), grad_norm, interrupted > 0)

    def set_nonfinite_in_a_row(self, count: int):
        """Reset the statistics, but continue to count consecutive non-finite steps from `count`."""
        self._statistics = self._statistics.new_tensor([0, 0, count, 0])

    def copy_parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def scaler_can_help(self) -> bool:
        """Return whether fp16's gradient scaler can still avoid overflows by a smaller scale."""
        scaler = self.accelerator.scaler
        return scaler is not None and scaler.get_scale() > 1

    @torch.no_grad()
    def nonfinite_weights(self) -> list[str]:
        """Return the names of the first three parameters with a non-finite entry. All processes must call this."""
        # Not the largest entry, because torch finds none in the empty part of a sharded parameter.
        if full(nn.utils.get_total_norm(self.parameters)).isfinite():
            return []
        return [name for name, weight in self.named_parameters.items() if not full(weight).isfinite().all()][:3]


def optimizer_groups(
    config: OptimizationConfig,
    modules: Iterable[nn.Module],
    parameters: Iterable[nn.Parameter],
    skip_lr_scale: float | None = None,
) -> list[dict[str, Any]]:
    """Return the parameters in groups of equal settings. The learning rate of the first group is logged."""
    settings = config.learning_rate, config.adam_weight_decay, config.adam_epsilon
    return param_groups(modules, parameters, *settings, skip_lr_scale)


def adamw(config: OptimizationConfig, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    """Return the AdamW of a config. It is fused, because only a fused optimizer can skip a step on the device."""
    return torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), fused=True)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer reads `found_inf`. A fused SGD does, but starts its momentum in a skipped step."""
    return isinstance(optimizer, torch.optim.Adam) and all(group.get("fused") for group in optimizer.param_groups)
