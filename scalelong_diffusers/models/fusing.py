"""Move constant factors of long skips into the weights of the layers that read the skips, or out of them."""

from collections.abc import Callable

import torch
from diffusers import ModelMixin

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.internals import adapter_names
from scalelong_diffusers.models.mixin import (
    SkipScalingMixin,
    SkipScalingPlan,
    check_plain_class_suffices,
    skip_layout,
)
from scalelong_diffusers.scaling import SkipScaler


def plan_fusing(model: SkipScalingMixin) -> Callable[[], None]:
    """Return a function that multiplies the weights by the factors of the model. Only this call can fail."""
    check_plain_class_suffices(model)
    count = len(skip_layout(model).find(model))
    return _plan_products(model, [_factors(model.skip_scaler, i) for i in range(1, count + 1)])


def plan_compensation(plan: SkipScalingPlan) -> Callable[[], None]:
    """Return a function that changes the weights so that the plan keeps the output. Only this call can fail."""
    old = plan.model.skip_scaler if isinstance(plan.model, SkipScalingMixin) else None
    ratios = []
    for skip in plan.skips:
        before = (1.0, 1.0) if old is None else _factors(old, skip.index)
        after = _factors(plan.scaler, skip.index)
        if 0.0 in after:
            raise UserError(f"the factor of skip {skip.index} is 0, so no weight can preserve the output")
        ratios.append(tuple(b / a for b, a in zip(before, after)))
    return _plan_products(plan.model, ratios)


def _factors(scaler: SkipScaler, index: int) -> tuple[float, float]:
    factors = scaler.constant_weights(index)
    if factors is None:
        raise UserError(f"only constant factors can move into weights; the factors of {scaler.config} are learned")
    return factors


def _plan_products(model: ModelMixin, factors: list[tuple[float, float]]) -> Callable[[], None]:
    """Return a function that multiplies the weights of hidden state and skip, for the skips from i = 1."""
    layout, name = skip_layout(model), type(model).__name__
    if adapters := adapter_names(model):
        raise UserError(
            f"this {name} has the LoRA {adapters[0]!r}, which reads the skips as well: call fuse_lora and unload_lora "
            "first, or delete it"
        )
    products = []
    for skip, pair in zip(layout.find(model), factors):
        for weights in layout.linear_weights(model, skip):
            products.extend((weight, factor) for weight, factor in zip(weights, pair) if factor != 1.0)
    for weight, _ in products:
        if type(weight) not in (torch.Tensor, torch.nn.Parameter) or not weight.is_floating_point():
            raise UserError(f"the weights of this {name} are quantized: use the model from before the quantization")

    @torch.no_grad()
    def multiply():
        for weight, factor in products:
            weight.mul_(factor)

    return multiply
