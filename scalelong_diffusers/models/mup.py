"""
Maximal update parametrization (muP): the best learning rate of a narrow model is also right for a wide one.

With m = width / base width, Adam's settings and the init of a parameter depend on its role:

| role | its shape | init std | learning rate | weight decay | eps |
|---|---|---|---|---|---|
| input | grows with the width where it writes: embeddings, biases, gains | | | | / m |
| hidden | grows where it reads and where it writes | / sqrt(m) | / m | * m | / m |
| output | grows where it reads | / m | / m | * m | / m |
| fixed | does not grow | | | | |

Often the output layer keeps its init and learning rate, and divides its input by m. This is the same training, but
then the output of saved weights depends on m. AdamW's decay per step, learning rate * weight decay, does not depend on
m. Gradients shrink like 1 / m, and so must eps; `MupOutput` divides the gradient that does not shrink by itself.

Depth: with c = base depth / depth, the residual branches are multiplied by c, as in CompleteP, and so is the learning
rate of the skip layers, through which the hidden state passes one after the other.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from diffusers import ModelMixin
from diffusers.models.attention_processor import Attention
from torch import nn

from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.models.mixin import SkipScalingMixin
from scalelong_diffusers.models.skip_init import skip_layer_parameters
from scalelong_diffusers.scaling import SkipMethod
from scalelong_diffusers.scaling.gates import GateLinear


Role = Literal["input", "hidden", "output", "fixed"]


@dataclass(frozen=True)
class ParameterScale:
    """Factors of a parameter's settings, relative to the base model. `ratio` is m, and `depth` is c or 1."""

    role: Role
    ratio: float = 1.0
    depth: float = 1.0

    @property
    def init_std(self) -> float:
        return {"hidden": 1 / math.sqrt(self.ratio), "output": 1 / self.ratio}.get(self.role, 1.0)

    @property
    def learning_rate(self) -> float:
        return self.depth / self._fan_in_ratio

    @property
    def weight_decay(self) -> float:
        return self._fan_in_ratio

    @property
    def _fan_in_ratio(self) -> float:
        return self.ratio if self.role in ("hidden", "output") else 1.0

    @property
    def eps(self) -> float:
        return 1 / self.ratio


class MupOutput(nn.Linear):
    """
    A last layer whose weight gets 1 / m of its gradient.

    Adam would learn the same from the whole gradient, but its norm grows with the width, and with it the norm of all
    gradients, which is clipped.
    """

    def __init__(self, in_features: int, out_features: int, ratio: float):
        super().__init__(in_features, out_features)
        self.ratio = ratio  # m

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.ratio != 1:
            weight = torch.lerp(weight.detach(), weight, 1 / self.ratio)  # the same values
        return F.linear(hidden_states, weight, self.bias)


def has_mup(model: ModelMixin) -> bool:
    return any(model.config.get(name) is not None for name in ("mup_base_width", "mup_base_depth"))


def mup_scales(model: ModelMixin, base_config: Mapping[str, Any] | None = None) -> dict[str, ParameterScale]:
    """
    Return the scale of each parameter by name. It is empty for a model without a base model.

    Args:
        base_config: the base model of a U-Net; see [`mup_param_groups`].
    """
    if base_config is not None:
        base, wider = _base_unet(model, base_config), model
    elif has_mup(model):
        base, wider = model.mup_skeleton(1), model.mup_skeleton(2)
    else:
        return {}
    depth = model.mup_branch_scale if has_mup(model) else 1.0
    skip_layers = set(skip_layer_parameters(model)) if has_mup(model) else set()
    parameters, smaller, larger = (list(m.named_parameters()) for m in (model, base, wider))
    if len(parameters) != len(smaller):
        raise UserError(
            f"muP compares models that differ in width only, but this {type(model).__name__} has {len(parameters)} "
            f"parameters and its base model {len(smaller)}: train adapters with a usual optimizer"
        )
    _check_fixed_widths(model, base)
    scales = {}
    # By order: the name of a shared gate contains the width.
    for (name, parameter), (_, small), (_, large) in zip(parameters, smaller, larger):
        grown = [d for d, (a, b) in enumerate(zip(small.shape, large.shape)) if a != b]
        ratio = parameter.shape[grown[-1]] / small.shape[grown[-1]] if grown else 1.0
        scales[name] = ParameterScale(_role(model, name, grown), ratio, depth if parameter in skip_layers else 1.0)
    return scales


def _base_unet(model: ModelMixin, base_config: Mapping[str, Any]) -> ModelMixin:
    """Return the base model of a U-Net on the meta device."""
    config = {name: value for name, value in model.config.items() if name != "_use_default_values"}  # they may change
    for name in base_config.keys() - config.keys():
        hint = did_you_mean(name, config)
        raise UserError(f"base_config has an entry {name!r}, which {type(model).__name__} does not have{hint}")
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):  # gates draw their weights on the CPU
            return type(model).from_config({**config, **base_config})
    except (TypeError, ValueError) as error:
        raise UserError(f"{type(model).__name__} does not take base_config={dict(base_config)}: {error}") from error


def _check_fixed_widths(model: ModelMixin, base: ModelMixin):
    for (name, module), smaller in zip(model.named_modules(), base.modules()):
        width, base_width = _fixed_width(module), _fixed_width(smaller)
        if width != base_width:
            raise UserError(
                f"with muP, the groups of norms and the heads of attention keep their width, but {name} has {width} "
                f"channels in each, and {base_width} in the base model: set norm_num_groups and attention_head_dim"
            )


def _fixed_width(module: nn.Module) -> int | None:
    """Return the width of a part of a layer that must not grow with the model."""
    if isinstance(module, nn.GroupNorm):
        return module.num_channels // module.num_groups
    return module.inner_dim // module.heads if isinstance(module, Attention) else None


def _role(model: nn.Module, name: str, grown: list[int]) -> Role:
    """Return the role of a parameter whose shape has these growing dimensions."""
    if not grown:
        return "fixed"
    owner = model.get_submodule(name.rpartition(".")[0])
    is_vector = model.get_parameter(name).ndim == 1
    if is_vector or isinstance(owner, nn.Embedding) or name in getattr(model, "mup_inputs", ()):
        return "input"
    if isinstance(owner, nn.Linear | nn.Conv2d | GateLinear):
        return "hidden" if grown == [0, 1] else ("input" if grown == [0] else "output")
    raise UserError(
        f"muP has no rule for the parameter {name} of a {type(owner).__name__}: build the module from nn.Linear or "
        "from vectors"
    )


@torch.no_grad()
def start_mup(model: ModelMixin):
    """Scale the initial weights of a new model. Scaling methods start in proportion to their width by themselves."""
    for name, scale in mup_scales(model).items():
        if scale.init_std != 1 and not name.startswith("skip_scaler."):
            model.get_parameter(name).mul_(scale.init_std)


def mup_param_groups(
    model: ModelMixin,
    learning_rate: float,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    base_config: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """
    Return the parameters of a model in groups for Adam or AdamW, with the settings of muP.

    Args:
        model: a U-ViT with `mup_base_width` or `mup_base_depth`, or a U-Net with `base_config`.
        learning_rate, weight_decay, eps: the settings of the base model. Schedulers of torch multiply the learning
            rate of each group.
        base_config: the entries of a U-Net's config that differ in the base model. Groups of norms and heads of
            attention must be as wide as in the U-Net. Start the last layer of all widths at zero.

    ```python
    model = UViTModel(hidden_size=512, num_attention_heads=8, mup_base_width=128)
    optimizer = torch.optim.AdamW(mup_param_groups(model, learning_rate=2e-3, weight_decay=0.03))

    unet = UNet2DModel(block_out_channels=(256, 512, 512, 512))
    torch.nn.init.zeros_(unet.conv_out.weight)
    base = {"block_out_channels": (64, 128, 128, 128), "norm_num_groups": 8}
    optimizer = torch.optim.AdamW(mup_param_groups(unet, learning_rate=2e-3, base_config=base))
    ```
    """
    if not isinstance(model, ModelMixin):
        raise UserError(f"muP is for models of diffusers, got {type(model).__name__}: pass the model without wrappers")
    if base_config is None and not has_mup(model):
        raise UserError(
            f"this {type(model).__name__} has no base model: build a UViTModel with mup_base_width, or pass the "
            "base_config of a U-Net"
        )
    if base_config is not None and hasattr(model, "mup_skeleton"):
        raise UserError(f"base_config is for U-Nets: build the {type(model).__name__} with mup_base_width")
    return param_groups([model], model.parameters(), learning_rate, weight_decay, eps, base_config=base_config)


def param_groups(
    models: Iterable[nn.Module],
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    weight_decay: float,
    eps: float,
    skip_lr_scale: float | None = None,
    base_config: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the parameters in groups of equal settings. The first group has the learning rate that is passed."""
    factors = {}
    for model in models:
        factors |= _setting_factors(model, skip_lr_scale, base_config)
    groups: dict[tuple[float, float, float], list[nn.Parameter]] = {(1.0, 1.0, 1.0): []}
    for parameter in parameters:
        groups.setdefault(factors.get(parameter, (1.0, 1.0, 1.0)), []).append(parameter)
    return [
        {"params": group, "lr": learning_rate * lr, "weight_decay": weight_decay * decay, "eps": eps * eps_factor}
        for (lr, decay, eps_factor), group in groups.items()
        if group
    ]


def mixes_mup_settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer trains parameters with equal settings that muP trains with different ones."""
    try:
        scales = mup_scales(model) if isinstance(model, ModelMixin) else {}
    except UserError:  # of adapters, for which muP has no rules
        return False
    settings = {model.get_parameter(n): (s.learning_rate, s.weight_decay, s.eps) for n, s in scales.items()}
    return any(len({settings[p] for p in group["params"] if p in settings}) > 1 for group in optimizer.param_groups)


def _setting_factors(
    model: nn.Module, skip_lr_scale: float | None, base_config: Mapping[str, Any] | None
) -> dict[nn.Parameter, tuple[float, float, float]]:
    """Return the factors of learning rate, weight decay and eps of muP, skip layers and scaling methods."""
    scales = mup_scales(model, base_config) if isinstance(model, ModelMixin) else {}
    is_slow = skip_lr_scale is not None and isinstance(model, SkipScalingMixin)
    slow = set(skip_layer_parameters(model)) if is_slow else set()
    methods = {p: m for m in model.modules() if isinstance(m, SkipMethod) for p in m.parameters()}
    factors = {}
    for name, parameter in model.named_parameters():
        scale, method = scales.get(name, ParameterScale("fixed")), methods.get(parameter, SkipMethod)
        lr = scale.learning_rate * method.learning_rate_scale * (skip_lr_scale if parameter in slow else 1.0)
        factors[parameter] = (lr, scale.weight_decay * method.has_weight_decay, scale.eps)
    return factors
