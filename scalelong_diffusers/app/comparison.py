"""Sample one model with and without skip scaling, from the same noise."""

import dataclasses
import os
from collections.abc import Callable
from threading import Lock
from typing import Any

from PIL.Image import Image
from torch import nn

from scalelong_diffusers.models.mixin import SkipScalingMixin
from scalelong_diffusers.patching import SkipConnections, apply_skip_scaling, skip_connections
from scalelong_diffusers.pipelines.class_conditional import ScaleLongClassConditionalPipeline
from scalelong_diffusers.pipelines.loading import load_pipeline
from scalelong_diffusers.pipelines.sampling import SampleConfig, Sampler, choose_device, fitting_schedulers
from scalelong_diffusers.pipelines.text_to_image import ScaleLongTextToImagePipeline
from scalelong_diffusers.scaling import SkipScalingConfig


# Methods whose factors the slider for kappa sets.
_METHODS = ("cs", "linear", "constant")


@dataclasses.dataclass(frozen=True)
class Pair:
    """
    Images of the same noise and conditions.

    Args:
        labels: the classes or prompts, empty for an unconditional model.
        skips: the long skips with the factors of the scaled images.
    """

    plain: list[Image]
    scaled: list[Image]
    labels: list[str]
    skips: SkipConnections


class Comparison:
    """
    A pipeline whose skip scaling can be changed before each sampling.

    Attributes:
        own: the scaling that the model was loaded with.
        methods: methods that it can be sampled with, its own first.
        schedulers: names of the schedulers that can replace its own.
    """

    def __init__(self, source: str | os.PathLike, device: str | None = None):
        self.source = os.fspath(source)
        self.pipe = load_pipeline(source).to(choose_device(device))
        self.pipe.set_progress_bar_config(disable=True)
        if not isinstance(self._model, SkipScalingMixin):
            apply_skip_scaling(self.pipe, "none")  # a stock model becomes its scaled class
        self.own: SkipScalingConfig = self._model.skip_scaler.config
        self._gates = {name: value.clone() for name, value in self._model.skip_scaler.state_dict().items()}
        self._scheduler = self.pipe.scheduler
        self.schedulers = list(fitting_schedulers(self._scheduler))
        self._plain: tuple[Any, list[Image]] = None, []
        self._lock = Lock()  # the scaling and the scheduler are parts of the pipeline
        own = [] if self.own.method == "none" else [self.own.method]
        possible = _METHODS if len(skip_connections(self._model)) > 1 else _METHODS[-1:]  # others keep the outermost
        self.methods = [*own, *(method for method in possible if method not in own)]

    @property
    def _model(self) -> nn.Module:
        return self.pipe.unet

    @property
    def is_text(self) -> bool:
        return isinstance(self.pipe, ScaleLongTextToImagePipeline)

    @property
    def is_class(self) -> bool:
        return isinstance(self.pipe, ScaleLongClassConditionalPipeline)

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, or their numbers. Empty for a model without classes."""
        if not self.is_class:
            return []
        return [self.pipe.class_title(k) for k in range(self.pipe.num_classes)]

    @property
    def has_guidance(self) -> bool:
        return self.is_text or (self.is_class and self.pipe.config.null_class is not None)

    @property
    def guidance_scale(self) -> float:
        """The guidance scale to start with."""
        if not self.has_guidance:
            return 1.0
        return 7.5 if self.is_text else 2.0

    def scaling(self, method: str, kappa: float, strength: float) -> SkipScalingConfig:
        """Return the model's own scaling, or another one, with this kappa (if it has one) and strength."""
        base = self.own if method == self.own.method else SkipScalingConfig(method)
        changes = {} if base.kappa is None else {"kappa": kappa}
        return dataclasses.replace(base, strength=strength, **changes)

    def skips(self, scaling: SkipScalingConfig) -> SkipConnections:
        """Return the long skips as this scaling weights them."""
        with self._lock:
            self._scale(scaling)
            return skip_connections(self._model)

    def sample(
        self,
        config: SampleConfig,
        num_images: int,
        scaling: SkipScalingConfig,
        on_step: Callable[[float], None] = lambda done: None,
    ) -> Pair:
        """
        Make the images that `scalelong sample` makes with this config, without scaling and with the given one.

        Call `on_step` after each step with the fraction of the work that is done. The images without scaling are kept
        until the config changes.
        """
        numbers = range(num_images)
        with self._lock:
            self.pipe.scheduler = self._scheduler
            sampler = Sampler(self.pipe, config, num_images)
            is_kept = self._plain[0] == (config, num_images)
            if not is_kept:
                self._scale(SkipScalingConfig("none"))
                self._plain = (config, num_images), sampler.make(numbers, lambda done: on_step(done / 2))
            self._scale(scaling)
            scaled = sampler.make(numbers, on_step if is_kept else lambda done: on_step((1 + done) / 2))
            names = self.class_names
            labels = [names[value] if self.is_class else value for value in sampler.values]
            labels = [labels[k % len(labels)] for k in numbers] if labels else []
            return Pair(self._plain[1], scaled, labels, skip_connections(self._model))

    def _scale(self, scaling: SkipScalingConfig):
        apply_skip_scaling(self.pipe, scaling)
        if scaling.equals_except_strength(self.own):
            self._model.skip_scaler.load_state_dict(self._gates)  # another method has replaced the trained gates
