"""Scale the long skips of an existing model or pipeline, remove the scaling, and list the skips."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from diffusers import DiffusionPipeline, ModularPipeline
from torch import nn

# Importing these modules registers the scaled classes.
import scalelong_diffusers.models.unets
import scalelong_diffusers.models.uvit  # noqa: F401
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.internals import is_compiled, write_config_entry
from scalelong_diffusers.models.fusing import plan_compensation, plan_fusing
from scalelong_diffusers.models.mixin import (
    SkipScalingMixin,
    check_plain_class_suffices,
    plan_skip_scaling,
    scaled_class,
    skip_layout,
    unscale,
)
from scalelong_diffusers.models.skip_init import SKIP_INITS, check_untrained, start_layers
from scalelong_diffusers.options import Option, check_arguments
from scalelong_diffusers.scaling import SkipScalingConfig


Model = TypeVar("Model", bound=nn.Module)
Pipeline = DiffusionPipeline | ModularPipeline
ModelOrPipeline = TypeVar("ModelOrPipeline", nn.Module, DiffusionPipeline, ModularPipeline)


@check_arguments
def apply_skip_scaling(
    model_or_pipeline: ModelOrPipeline,
    config: SkipScalingConfig | Mapping[str, Any] | str,
    preserve_output: Annotated[bool, Option()] = False,
) -> ModelOrPipeline:
    """
    Scale the long skips of a diffusers model, or of the models in a pipeline, in place. Return the argument.

    The model becomes its ScaleLong subclass, so that saving and loading keep the scaling. Applying the same config
    again keeps trained gates; another config replaces them. An error leaves all models unchanged.

    Args:
        preserve_output: divide the weights that read the skips by the factors, so that a trained model still computes
            the same. This needs constant factors, and layers that are linear in the skips: a U-ViT has them, and a
            U-Net, which reads its skips behind a norm, does not. Gates (`"ls"`) preserve the output by themselves.

    ```python
    pipe = StableDiffusionPipeline.from_pretrained("some/sd")
    apply_skip_scaling(pipe, "ls")
    pipe.save_pretrained("out")
    ```
    """
    config = SkipScalingConfig.parse(config)
    models = scalable_models(model_or_pipeline)
    for model in models:
        check_loaded(model)
        if not isinstance(model, SkipScalingMixin):
            check_not_compiled(model, "the scaling")
    plans = [plan_skip_scaling(model, config) for model in models]
    for compensate in [plan_compensation(plan) for plan in plans] if preserve_output else ():
        compensate()
    for plan in plans:
        plan.apply()
    _refresh_components(model_or_pipeline, models)
    return model_or_pipeline


@check_arguments
def apply_skip_init(
    model: Model,
    skip_init: Annotated[str, Option(choices=SKIP_INITS)],
    zero_init_residual: Annotated[bool, Option()] = False,
) -> Model:
    """
    Initialize the layers that read the long skips of an untrained model, in place. Return the model.

    Call it after `apply_skip_scaling`, because the start depends on the factors. Models with trained weights are
    refused; they are recognized by norms that are not in their initial state.

    Args:
        skip_init: what the decoder receives at the start, where h is the hidden state, s the skip and k its factor:
            `"zero"`: h; `"sum"`: h + k s, as in the paper's equation (1); `"balanced"`: (h + k s) / sqrt(1 + k^2),
            which keeps the magnitude. `"reference"` leaves the model's own, random init.
        zero_init_residual: also start the last layer of each residual branch at zero, as DDPM does, so that at the
            start the model consists of its residual path.

    ```python
    unet = apply_skip_init(UNet2DModel(sample_size=32), "zero", zero_init_residual=True)
    ```
    """
    check_loaded(model)
    check_untrained(model)
    start_layers(model, skip_init, zero_init_residual)
    return model


def remove_skip_scaling(model_or_pipeline: ModelOrPipeline) -> ModelOrPipeline:
    """
    Turn scaled models back into plain diffusers models, in place. Return the argument.

    A `UViTModel` keeps its class and gets the method `"none"`.
    """
    models = [model for model in scalable_models(model_or_pipeline) if "skip_scaling" in model.config]
    _check_any_scaled(models, model_or_pipeline)
    for model in models:
        check_plain_class_suffices(model)
    for model in models:
        unscale(model)
    _refresh_components(model_or_pipeline, models)
    return model_or_pipeline


def fuse_skip_scaling(model_or_pipeline: ModelOrPipeline) -> ModelOrPipeline:
    """
    Multiply the weights that read the long skips by the constant factors, and remove the scaling. Return the argument.

    The output stays the same, and the result is a plain diffusers model whose files every tool can read. This works
    for layers that are linear in the skips; see `preserve_output` of [`apply_skip_scaling`], which is the inverse.

    ```python
    uvit = UViTModel.from_pretrained("out/unet")  # trained with "cs"
    fuse_skip_scaling(uvit).save_pretrained("fused")
    ```
    """
    models = [model for model in scalable_models(model_or_pipeline) if isinstance(model, SkipScalingMixin)]
    _check_any_scaled(models, model_or_pipeline)
    for fuse in [plan_fusing(model) for model in models]:
        fuse()
    return remove_skip_scaling(model_or_pipeline)


def set_skip_scaling_strength(model_or_pipeline: ModelOrPipeline, strength: float) -> ModelOrPipeline:
    """
    Set the strength of the scaling: every factor becomes 1 + strength * (k - 1). Return the argument.

    Fine-tuning that raises the strength from 0 to 1 starts from the unchanged model. The strength is stored in the
    model's config, so a checkpoint reproduces its output.
    """
    if strength is None:  # a config would replace it by 1
        raise UserError("strength must be a number in [0, 1], got None")
    models = [model for model in scalable_models(model_or_pipeline) if isinstance(model, SkipScalingMixin)]
    _check_any_scaled(models, model_or_pipeline)
    configs = [dataclasses.replace(model.skip_scaler.config, strength=strength) for model in models]
    for model, config in zip(models, configs):
        model.skip_scaler.set_config(config)
        write_config_entry(model, "skip_scaling", config.to_dict())
    return model_or_pipeline


@dataclass(frozen=True)
class SkipConnection:
    """
    A long skip of a model: its number, the layer that consumes it, its width, and what multiplies it.

    `factor` is set for a constant, `hidden_factor` if the hidden state is multiplied as well, and `gate` for a module
    with this name.
    """

    i: int
    where: str
    width: int
    factor: float | None
    hidden_factor: float
    gate: str | None
    parameters: int

    @property
    def scaling(self) -> str:
        if self.factor is None:
            return f"{self.gate} ({self.parameters:,})"
        hidden = "" if self.hidden_factor == 1.0 else f", hidden state {self.hidden_factor:.6g}"
        return f"{self.factor:.6g}{hidden}"


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
            rows.append((str(skip.i), skip.where, str(skip.width), skip.scaling))
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


def skip_connections(model_or_pipeline: nn.Module | Pipeline) -> SkipConnections:
    """
    Return the long skips of a model, or of the scalable model of a pipeline, with their factors or gates.

    The list shows the factors that the model applies. A plain class ignores a `skip_scaling` entry in its config.
    """
    models = scalable_models(model_or_pipeline)
    if len(models) > 1:
        names = ", ".join(type(model).__name__ for model in models)
        raise UserError(f"{type(model_or_pipeline).__name__} has several models ({names}): pass one of them")
    model = models[0]
    skips = skip_layout(model).find(model)
    note = ""
    if isinstance(model, SkipScalingMixin):
        scaler = model.skip_scaler
    else:
        scaler = skip_layout(model).build_scaler(SkipScalingConfig("none"), skips)
        if "skip_scaling" in model.config:
            note = (
                f"; its config has the method {model.config['skip_scaling']['method']!r}, which the plain class "
                f"{type(model).__name__} ignores: load it with {scaled_class(type(model)).__name__}"
            )
    rows = []
    for skip in skips:
        i = skip.index
        hidden_factor, factor = scaler.constant_weights(i) or (1.0, None)
        parameters = sum(p.numel() for p in scaler.method(i).parameters())
        gate = None if factor is not None else scaler.gate_names[i - 1]
        rows.append(SkipConnection(i, skip.where, skip.width, factor, hidden_factor, gate, parameters))
    return SkipConnections(rows, scaler.config, sum(p.numel() for p in scaler.parameters()), note)


def scalable_models(model_or_pipeline: nn.Module | Pipeline) -> list[nn.Module]:
    """Return the model, or the models of a pipeline, whose long skips can be scaled."""
    models = [model_or_pipeline]
    if isinstance(model_or_pipeline, Pipeline):
        modules = {n: c for n, c in model_or_pipeline.components.items() if isinstance(c, nn.Module)}
        distinct = {id(module): module for module in modules.values()}.values()
        models = [module for module in distinct if any(map(_is_scalable, module.modules()))]
        if not models:
            components = ", ".join(f"{component} ({type(module).__name__})" for component, module in modules.items())
            name = type(model_or_pipeline).__name__
            raise UserError(f"{name} has no model that can be scaled; it has: {components}")
    for model in models:
        if not isinstance(model, nn.Module):
            raise UserError(f"expected a model or a pipeline, got {model!r}; load it with from_pretrained first")
        _check_scalable(model)
    return models


def check_loaded(model: nn.Module):
    """Check that the weights of a model are in memory."""
    if any(parameter.is_meta for parameter in model.parameters()):
        name = type(model).__name__
        raise UserError(
            f"the weights of this {name} are on the meta device: load them first, and patch before offloading"
        )


def check_not_compiled(model: nn.Module, patch: str):
    """Check that no compiled graph would ignore a patch."""
    if is_compiled(model):
        name = type(model).__name__
        raise UserError(f"this {name} is compiled, and its graph would ignore {patch}: patch before compiling")


def _check_any_scaled(models: list[nn.Module], model_or_pipeline: nn.Module | Pipeline):
    if not models:
        raise UserError(f"this {type(model_or_pipeline).__name__} has no skip scaling; apply_skip_scaling adds it")


def _is_scalable(module: nn.Module) -> bool:
    return isinstance(module, SkipScalingMixin) or scaled_class(type(module)) is not None


def _check_scalable(model: nn.Module):
    name, advice = type(model).__name__, None
    if _is_scalable(model):
        return
    if inner := next(filter(_is_scalable, model.modules()), None):
        advice = f"{name} wraps a {type(inner).__name__}: patch before wrapping"
    elif base := next(filter(None, map(scaled_class, type(model).__mro__)), None):
        advice = (
            f"{name} has no scaled class; define `class ScaleLong{name}(SkipScalingMixin, {name})` with "
            f"`skip_layout = {base.__name__}.skip_layout`"
        )
    if advice is not None:
        raise UserError(advice)
    skip_layout(model)  # rejects a class without long skips


def _refresh_components(model_or_pipeline: nn.Module | Pipeline, models: list[nn.Module]):
    """Assign changed components to their pipeline again, because a pipeline records their classes on assignment."""
    if isinstance(model_or_pipeline, DiffusionPipeline):
        for name, component in model_or_pipeline.components.items():
            if any(component is model for model in models):
                setattr(model_or_pipeline, name, component)
    elif isinstance(model_or_pipeline, ModularPipeline):
        for name, component in model_or_pipeline.components.items():
            if any(component is model for model in models):
                model_or_pipeline.update_components(**{name: None})  # it ignores a component that it has
                model_or_pipeline.update_components(**{name: component})
