"""Scale the long skips of an existing model or pipeline, remove the scaling, and list the skips."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from diffusers import DiffusionPipeline
from torch import nn

# Importing these modules registers the scaled classes.
import scalelong_diffusers.models.unets
import scalelong_diffusers.models.uvit  # noqa: F401
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.internals import is_compiled, write_config_entry
from scalelong_diffusers.models.mixin import (
    SkipScalingMixin,
    not_scalable_message,
    plan_skip_scaling,
    scaled_class,
    skip_layout,
    unscale,
)
from scalelong_diffusers.scaling import SkipScaler, SkipScalingConfig


ModelOrPipeline = TypeVar("ModelOrPipeline", nn.Module, DiffusionPipeline)


def apply_skip_scaling(
    model_or_pipeline: ModelOrPipeline, config: SkipScalingConfig | Mapping[str, Any] | str
) -> ModelOrPipeline:
    """
    Scale the long skips of a diffusers model, or of the models in a pipeline, in place. Return the argument.

    The model becomes its ScaleLong subclass, so that saving and loading keep the scaling. Applying the same config
    again keeps trained gates; another config replaces them. An error leaves all models unchanged.

    ```python
    pipe = StableDiffusionPipeline.from_pretrained("some/sd")
    apply_skip_scaling(pipe, "ls")
    pipe.save_pretrained("out")
    ```
    """
    config = SkipScalingConfig.parse(config)
    models = _scalable_models(model_or_pipeline)
    for model in models:
        _check_patchable(model)
    for plan in [plan_skip_scaling(model, config) for model in models]:
        plan.apply()
    _refresh_components(model_or_pipeline, models)
    return model_or_pipeline


def remove_skip_scaling(model_or_pipeline: ModelOrPipeline) -> ModelOrPipeline:
    """
    Turn scaled models back into plain diffusers models, in place. Return the argument.

    A `UViTModel` keeps its class and gets the method `"none"`.
    """
    models = [model for model in _scalable_models(model_or_pipeline) if "skip_scaling" in model.config]
    _check_any_scaled(models, model_or_pipeline)
    for model in models:
        unscale(model)
    _refresh_components(model_or_pipeline, models)
    return model_or_pipeline


def set_skip_scaling_strength(model_or_pipeline: ModelOrPipeline, strength: float) -> ModelOrPipeline:
    """
    Set the strength of the scaling: every factor becomes 1 + strength * (k - 1). Return the argument.

    Fine-tuning that raises the strength from 0 to 1 starts from the unchanged model. The strength is stored in the
    model's config, so a checkpoint reproduces its output.
    """
    models = [model for model in _scalable_models(model_or_pipeline) if isinstance(model, SkipScalingMixin)]
    _check_any_scaled(models, model_or_pipeline)
    configs = [dataclasses.replace(model.skip_scaler.config, strength=strength) for model in models]
    for model, config in zip(models, configs):
        model.skip_scaler.set_config(config)
        write_config_entry(model, "skip_scaling", config.to_dict())
    return model_or_pipeline


@dataclass(frozen=True)
class SkipConnection:
    """A long skip as the model runs it: its number, the layer that takes it, its channels, its factor or its gate."""

    i: int
    where: str
    width: int
    factor: float | None
    gate: str | None
    parameters: int


class SkipConnections(list[SkipConnection]):
    """The long skips of a model from i = 1, the outermost. Prints as a table."""

    def __init__(self, skips: list[SkipConnection], config: SkipScalingConfig, parameters: int, note: str = ""):
        super().__init__(skips)
        self.config = config
        self.parameters = parameters  # counts shared gates once
        self.note = note

    def __str__(self) -> str:
        rows = [("i", "where", "width", "factor")]
        for skip in self:
            scaling = f"{skip.factor:.6g}" if skip.gate is None else f"{skip.gate} ({skip.parameters:,})"
            rows.append((str(skip.i), skip.where, str(skip.width), scaling))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            f"{i:>{widths[0]}}  {where:<{widths[1]}}  {width:>{widths[2]}}  {scaling}"
            for i, where, width, scaling in rows
        ]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        factors = [skip.factor for skip in self]
        energy = "" if None in factors else f", S = {sum(k * k for k in factors):.4g}"
        return f"N = {len(self)}, {self.config}{energy}, {self.parameters:,} parameters added{self.note}"

    __repr__ = __str__


def skip_connections(model_or_pipeline: nn.Module | DiffusionPipeline) -> SkipConnections:
    """
    Return the long skips of a model, or of the scalable model of a pipeline, with their factors or gates.

    The list shows what the model runs. The config of a plain class can have a `skip_scaling` that the class ignores.
    """
    models = _scalable_models(model_or_pipeline)
    if len(models) > 1:
        names = ", ".join(type(model).__name__ for model in models)
        raise UserError(f"{type(model_or_pipeline).__name__} has several models ({names}): pass one of them")
    model = models[0]
    skips = skip_layout(model).find(model)
    note = ""
    if isinstance(model, SkipScalingMixin):
        scaler = model.skip_scaler
    else:
        scaler = SkipScaler(SkipScalingConfig("none"), [skip.width for skip in skips])
        if "skip_scaling" in model.config:
            note = (
                f"; its config has the method {model.config['skip_scaling']['method']!r}, which the plain class "
                f"{type(model).__name__} ignores: load it with {scaled_class(type(model)).__name__}"
            )
    rows = [_skip_connection(scaler, skip.index, skip.where, skip.width) for skip in skips]
    return SkipConnections(rows, scaler.config, sum(p.numel() for p in scaler.parameters()), note)


def _skip_connection(scaler: SkipScaler, i: int, where: str, width: int) -> SkipConnection:
    gate = scaler.gate(i)
    if gate is None:
        return SkipConnection(i, where, width, scaler.factors[i - 1], None, 0)
    parameters = sum(p.numel() for p in gate.parameters())
    return SkipConnection(i, where, width, None, scaler.gate_names[i - 1], parameters)


def _scalable_models(model_or_pipeline: nn.Module | DiffusionPipeline) -> list[nn.Module]:
    """Return the model, or the models of a pipeline, whose long skips can be scaled."""
    if not isinstance(model_or_pipeline, DiffusionPipeline):
        _check_scalable(model_or_pipeline)
        return [model_or_pipeline]
    modules = {n: c for n, c in model_or_pipeline.components.items() if isinstance(c, nn.Module)}
    distinct = {id(module): module for module in modules.values()}.values()
    models = [module for module in distinct if _is_scalable(module) or _wrapped_model(module)]
    if not models:
        components = ", ".join(f"{name} ({type(module).__name__})" for name, module in modules.items())
        raise UserError(f"{type(model_or_pipeline).__name__} has no model that can be scaled; it has: {components}")
    for model in models:
        _check_scalable(model)
    return models


def _check_any_scaled(models: list[nn.Module], model_or_pipeline: nn.Module | DiffusionPipeline):
    if not models:
        name = type(model_or_pipeline).__name__
        raise UserError(f"this {name} has no skip scaling; apply_skip_scaling adds it")


def _is_scalable(module: nn.Module) -> bool:
    return isinstance(module, SkipScalingMixin) or scaled_class(type(module)) is not None


def _wrapped_model(module: nn.Module) -> nn.Module | None:
    return next((inner for inner in module.modules() if inner is not module and _is_scalable(inner)), None)


def _check_scalable(model: nn.Module):
    if not isinstance(model, nn.Module):
        raise UserError(f"expected a model or a pipeline, got {model!r}")
    if _is_scalable(model):
        return
    name = type(model).__name__
    if inner := _wrapped_model(model):
        raise UserError(f"{name} wraps a {type(inner).__name__}: patch before wrapping")
    if base := next(filter(None, map(scaled_class, type(model).__mro__)), None):
        raise UserError(
            f"{name} has no scaled class; define `class ScaleLong{name}(SkipScalingMixin, {name})` with "
            f"`skip_layout = {base.__name__}.skip_layout`"
        )
    raise UserError(not_scalable_message(name))


def _check_patchable(model: nn.Module):
    name = type(model).__name__
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(f"the weights of this {name} are offloaded (on the meta device): patch before offloading")
    if not isinstance(model, SkipScalingMixin) and is_compiled(model):
        raise UserError(f"this {name} is compiled, and its graph would ignore the scaling: patch before compiling")


def _refresh_components(model_or_pipeline: nn.Module | DiffusionPipeline, models: list[nn.Module]):
    """Assign changed components to their pipeline again: it records their class when they are assigned."""
    if isinstance(model_or_pipeline, DiffusionPipeline):
        for name, component in model_or_pipeline.components.items():
            if any(component is model for model in models):
                setattr(model_or_pipeline, name, component)
