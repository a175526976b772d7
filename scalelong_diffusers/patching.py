"""Scale the long skips of a model or pipeline that is already there, take the scaling away again, and look at it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from diffusers import DiffusionPipeline
from torch import nn

import scalelong_diffusers.models.unets
import scalelong_diffusers.models.uvit  # noqa: F401  these define the classes that `scaled_class` finds
from scalelong_diffusers.models.mixin import (
    SkipScalingMixin,
    forget_skip_scaling,
    new_skip_scaler,
    not_scalable_message,
    resolve_skip_scaling,
    scaled_class,
    skip_layout,
)
from scalelong_diffusers.models.skips import running_scaler
from scalelong_diffusers.scaling import SkipScaler, SkipScalingConfig


ModelOrPipeline = TypeVar("ModelOrPipeline", nn.Module, DiffusionPipeline)


def apply_skip_scaling(
    model_or_pipeline: ModelOrPipeline, config: SkipScalingConfig | Mapping[str, Any] | str
) -> ModelOrPipeline:
    """
    Scale the long skips of a diffusers model, or of the models in a pipeline, in place, and return what was given.

    The model becomes its ScaleLong subclass, so that saving and loading keep the scaling. The same config again keeps
    gates that were trained; another one replaces them.

    ```python
    pipe = StableDiffusionPipeline.from_pretrained("some/sd")
    apply_skip_scaling(pipe, SkipScalingConfig("ls", init="identity"))
    pipe.save_pretrained("out")
    ```
    """
    config = SkipScalingConfig.parse(config)
    models = _scalable_models(model_or_pipeline)
    for model in models:
        _check_patchable(model)
    # All that can fail comes first: a config that does not fit is to leave everything as it was.
    configs = [resolve_skip_scaling(model, config) for model in models]
    scalers = [new_skip_scaler(model, config) for model, config in zip(models, configs)]
    for model, config, scaler in zip(models, configs, scalers):
        if isinstance(model, SkipScalingMixin):
            model._change_skip_scaling(config, scaler)
        else:
            model.__class__ = scaled_class(type(model))
            model._install_skip_scaling(scaler)
    _refresh_components(model_or_pipeline, models)
    return model_or_pipeline


def remove_skip_scaling(model_or_pipeline: ModelOrPipeline) -> ModelOrPipeline:
    """
    Make the scaled models plain diffusers models again, in place, and return what was given. A `UViTModel` is one
    already, and stays one with the method `"none"`.
    """
    models = [model for model in _scalable_models(model_or_pipeline) if "skip_scaling" in model.config]
    _check_any(models, model_or_pipeline)
    for model in models:
        if isinstance(model, SkipScalingMixin):
            model._remove_skip_scaling()
        else:  # a plain class that was loaded from a scaled folder and kept the entry
            forget_skip_scaling(model)
    _refresh_components(model_or_pipeline, models)
    return model_or_pipeline


def set_skip_scaling_strength(model_or_pipeline: ModelOrPipeline, strength: float) -> ModelOrPipeline:
    """
    Set how much of the scaling is in force: every factor is 1 + strength * (k - 1). Fine-tuning that raises it from 0
    to 1 starts without a jump. It is part of the config, so that a checkpoint reloads with the output it had.
    """
    if strength is None:
        raise ValueError("strength must be a number in [0, 1], got None")
    models = [model for model in _scalable_models(model_or_pipeline) if isinstance(model, SkipScalingMixin)]
    _check_any(models, model_or_pipeline)
    configs = [dataclasses.replace(model.skip_scaler.config, strength=strength) for model in models]
    for model, config in zip(models, configs):
        model._change_skip_scaling(config, scaler=None)
    return model_or_pipeline


@dataclass(frozen=True)
class SkipConnection:
    """One long skip as it runs: its number, the layer that takes it, its channels, and its factor or its gate."""

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
        self.parameters = parameters  # shared gates counted once
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
    List the long skips of a model, scaled or not, with what happens to each of them. It looks at what runs, and not
    at what a config claims. Of a pipeline it lists the model whose long skips can be scaled.
    """
    models = _scalable_models(model_or_pipeline)
    if len(models) > 1:
        held = ", ".join(type(model).__name__ for model in models)
        raise ValueError(f"{type(model_or_pipeline).__name__} has several models ({held}): list them one by one")
    model = models[0]
    layout = skip_layout(type(model))
    skips = layout.find(model)
    scaler = running_scaler(model, layout)
    note = ""
    if scaler is None:
        scaler = SkipScaler(SkipScalingConfig("none"), [skip.width for skip in skips])
        if "skip_scaling" in model.config:
            note = (
                f"; its config asks for {model.config['skip_scaling']['method']!r}, which the plain class "
                f"{type(model).__name__} does not run: load it with {scaled_class(type(model)).__name__}"
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
    """The model, or the models of a pipeline, whose long skips can be scaled; an error where there is none."""
    if not isinstance(model_or_pipeline, DiffusionPipeline):
        _check_scalable(model_or_pipeline)
        return [model_or_pipeline]
    modules = {n: c for n, c in model_or_pipeline.components.items() if isinstance(c, nn.Module)}
    distinct = {id(module): module for module in modules.values()}.values()
    models = [module for module in distinct if _is_scalable(module) or _wrapped_model(module)]
    if not models:
        held = ", ".join(f"{name} ({type(module).__name__})" for name, module in modules.items())
        raise ValueError(
            f"{type(model_or_pipeline).__name__} has no component whose long skips can be scaled; it has: {held}"
        )
    for model in models:
        _check_scalable(model)
    return models


def _check_any(models: list[nn.Module], model_or_pipeline: nn.Module | DiffusionPipeline):
    if not models:
        name = type(model_or_pipeline).__name__
        raise ValueError(f"this {name} has no skip scaling; apply_skip_scaling gives it one")


def _is_scalable(module: nn.Module) -> bool:
    return isinstance(module, SkipScalingMixin) or scaled_class(type(module)) is not None


def _wrapped_model(module: nn.Module) -> nn.Module | None:
    return next((inner for inner in module.modules() if inner is not module and _is_scalable(inner)), None)


def _check_scalable(model: nn.Module):
    name = type(model).__name__
    if not _is_scalable(model):
        if not isinstance(model, nn.Module):
            raise TypeError(f"a model or a pipeline is needed, got {type(model).__name__}")
        if inner := _wrapped_model(model):
            raise ValueError(f"{name} wraps a {type(inner).__name__}: patch before wrapping")
        if base := next((c for c in type(model).__mro__[1:] if scaled_class(c) is not None), None):
            raise ValueError(
                f"{name} is a subclass of {base.__name__} and would lose its own methods; define "
                f"`class ScaleLong{name}(SkipScalingMixin, {name})` and use that"
            )
        raise ValueError(not_scalable_message(name))


def _check_patchable(model: nn.Module):
    name = type(model).__name__
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"the weights of this {name} are offloaded (on the meta device): patch before offloading")
    if not isinstance(model, SkipScalingMixin) and model._compiled_call_impl is not None:
        raise ValueError(f"this {name} is compiled, and its graph would not see the scaling: patch before compiling")


def _refresh_components(model_or_pipeline: nn.Module | DiffusionPipeline, models: list[nn.Module]):
    """A pipeline notes the class of a component when it is assigned, so those that changed are assigned again."""
    if isinstance(model_or_pipeline, DiffusionPipeline):
        for name, component in model_or_pipeline.components.items():
            if any(component is model for model in models):
                setattr(model_or_pipeline, name, component)
