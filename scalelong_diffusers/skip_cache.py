"""
A skip cache makes sampling faster: most steps run only the outer blocks, and reuse deep features of an earlier step.

After DeepCache (arXiv 2312.00858). Deep features change little from step to step, and long skips carry what changes
around them.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from types import MethodType
from typing import Annotated, Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.models.mixin import skip_layout
from scalelong_diffusers.options import Option, check_arguments
from scalelong_diffusers.patching import check_loaded, check_not_compiled, scalable_models


ModelOrPipeline = TypeVar("ModelOrPipeline")

# More calls with the same timestep belong to other runs, for example of a model that samples in one step.
_MAX_CALLS = 4


@check_arguments
def apply_skip_cache(
    model_or_pipeline: ModelOrPipeline,
    interval: Annotated[int, Option(at_least=1, at_most=1000)] = 3,
    depth: Annotated[int, Option(at_least=1, at_most=1000)] = 1,
) -> ModelOrPipeline:
    """
    Reuse deep features between the steps of sampling, in a model or in the models of a pipeline. Return the argument.

    Each `interval`-th step runs the whole model. The other steps run the blocks that make and read the `depth`
    outermost skips. Between them, they take the hidden state of the last whole step.

    The cache works only where gradients are off, so it changes no training. It is not saved with the model. A new run
    starts with a whole step. A run is new if the pipeline's scheduler has new timesteps, if the timestep rises, or if
    the input has another shape, dtype or device.

    ```python
    apply_skip_cache(pipe, interval=3)
    images = pipe("a red circle").images
    remove_skip_cache(pipe)
    ```
    """
    models = scalable_models(model_or_pipeline)
    has_schedule = not isinstance(model_or_pipeline, nn.Module) and "scheduler" in model_or_pipeline.components
    pipeline = weakref.ref(model_or_pipeline) if has_schedule else None
    caches = [_plan_cache(model, interval, depth, pipeline) for model in models]
    for model, cache in zip(models, caches):
        cache.attach(model)
    return model_or_pipeline


def remove_skip_cache(model_or_pipeline: ModelOrPipeline) -> ModelOrPipeline:
    """Undo `apply_skip_cache`, in place. Return the argument."""
    models = [model for model in scalable_models(model_or_pipeline) if _has_cache(model)]
    if not models:
        raise UserError(f"this {type(model_or_pipeline).__name__} has no skip cache; apply_skip_cache adds it")
    for model in models:
        model._skip_cache.detach(model)
    return model_or_pipeline


def _plan_cache(model: nn.Module, interval: int, depth: int, pipeline: weakref.ref | None) -> "SkipCache":
    name = type(model).__name__
    check_loaded(model)
    check_not_compiled(model, "the cache")
    if _has_cache(model):
        raise UserError(f"this {name} has a skip cache already: call remove_skip_cache first")
    layout = skip_layout(model)
    count = len(layout.find(model))
    if depth > count:
        raise UserError(f"depth must be at most {count}, the number of long skips of this {name}, got {depth}")
    inner = layout.inner_layers(model, depth)
    for layer in inner:
        if "forward" in vars(model.get_submodule(layer)):
            raise UserError(
                f"{layer} of this {name} has a forward that another library has replaced, for example to offload it: "
                "apply the skip cache before"
            )
    return SkipCache(interval, inner, pipeline)


def _has_cache(model: nn.Module) -> bool:
    return "_skip_cache" in vars(model)


@dataclass
class Features:
    """The outputs of the inner layers in a whole pass. They are complete when the pass has ended."""

    outputs: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False


class SkipCache:
    """
    The cache of one model.

    A model can be called several times with the same timestep, for example by Heun's method, or for the two inputs of
    guidance. The features of these calls are kept apart.

    Args:
        inner_layers: names of the layers that steps with cached features skip.
        pipeline: the pipeline that runs the model, if it is known. Its scheduler gets new timesteps in each run.
    """

    def __init__(self, interval: int, inner_layers: list[str], pipeline: weakref.ref | None = None):
        self.interval = interval
        self.inner_layers = inner_layers
        self.pipeline = pipeline
        self.handles: list[RemovableHandle] = []
        self._forget()

    def attach(self, model: nn.Module):
        hooks = self._before, self._after
        self.handles = [
            model.register_forward_pre_hook(hooks[0], prepend=True, with_kwargs=True),
            model.register_forward_hook(hooks[1]),
        ]
        for name in self.inner_layers:
            layer = model.get_submodule(name)
            layer.forward = CachedForward(self, layer, name)
        model._skip_cache = self

    def detach(self, model: nn.Module):
        for handle in self.handles:
            handle.remove()
        for name in self.inner_layers:
            del model.get_submodule(name).forward
        del model._skip_cache

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles start without features, and belong to no pipeline.
        state = vars(self).copy()
        fresh = SkipCache(self.interval, self.inner_layers)
        return {**state, **{name: value for name, value in vars(fresh).items() if name != "handles"}}

    def _forget(self):
        """Start a new run."""
        self.schedule: torch.Tensor | None = None
        self.inputs: tuple | None = None
        self.timestep = 0.0
        self.step = self.call = 0
        self.calls: list[Features] = []
        self.features: Features | None = None  # of the present call
        self.reuses = False

    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]):
        """Decide whether this call of the model reuses features."""
        sample, timestep, *_ = signature(type(model).forward).bind(model, *args, **kwargs).args[1:]
        low, high = (float(limit) for limit in torch.as_tensor(timestep).aminmax())
        if torch.is_grad_enabled() or low != high:  # not sampling
            self._forget()
            return
        self._count(low, (sample.shape, sample.dtype, sample.device))
        if self.call == len(self.calls):
            self.calls.append(Features())
        self.features = self.calls[self.call]
        self.reuses = self.step % self.interval != 0 and self.features.is_complete
        if not self.reuses:
            self.features.outputs, self.features.is_complete = {}, False

    def _count(self, timestep: float, inputs: tuple):
        """Update the numbers of the step and of the call in this step."""
        pipeline = None if self.pipeline is None else self.pipeline()
        schedule = None if pipeline is None else pipeline.scheduler.timesteps
        is_same_run = schedule is self.schedule and inputs == self.inputs and timestep <= self.timestep
        if not is_same_run or (timestep == self.timestep and self.call + 1 == _MAX_CALLS):
            self._forget()
        elif timestep == self.timestep:
            self.call += 1
        else:
            self.step, self.call = self.step + 1, 0
        self.schedule, self.inputs, self.timestep = schedule, inputs, timestep

    def _after(self, model: nn.Module, args: tuple, output: Any):
        if self.features is not None:
            self.features.is_complete = True  # not reached after an error
        self.features, self.reuses = None, False


class CachedForward:
    """
    The forward of an inner layer. It is an object and not a closure, so that models can be copied and pickled.

    In steps with cached features, only the output of the last inner layer matters. The others have the right shape,
    for example to add a ControlNet's outputs to them.
    """

    def __init__(self, cache: SkipCache, layer: nn.Module, name: str):
        self.cache = cache
        self.layer = layer
        self.name = name

    @property
    def __wrapped__(self) -> Callable:
        """The forward of the class, from which `inspect.signature` takes the arguments."""
        return MethodType(type(self.layer).forward, self.layer)

    def __call__(self, *args, **kwargs) -> Any:
        features = self.cache.features
        if self.cache.reuses:
            return _copy(features.outputs[self.name])
        output = self.__wrapped__(*args, **kwargs)
        if features is not None and self.cache.interval > 1:
            features.outputs[self.name] = _copy(output)
        return output


def _copy(output: Any) -> Any:
    """Copy the tensors of an output. Models may change them in place, as FreeU does."""
    if isinstance(output, tuple):
        return tuple(map(_copy, output))
    return output.clone() if isinstance(output, torch.Tensor) else output
