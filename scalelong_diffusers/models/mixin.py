"""`SkipScalingMixin` turns a diffusers model into one whose long skips are scaled, and keeps it a diffusers model."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from diffusers.configuration_utils import FrozenDict

from scalelong_diffusers.hub import HubMixin
from scalelong_diffusers.messages import near_miss
from scalelong_diffusers.models.long_skips import SKIP_LAYOUTS, SkipLayout, add_skip_hooks, remove_skip_hooks
from scalelong_diffusers.scaling import SkipScaler, SkipScalingConfig


class SkipScalingMixin(HubMixin):
    """
    Put it in front of a diffusers model that has a row in `SKIP_LAYOUTS`:

    ```python
    class ScaleLongUNet3DConditionModel(SkipScalingMixin, UNet3DConditionModel):
        pass
    ```

    The class then takes `skip_scaling` (a [`SkipScalingConfig`], its fields as a dict, or the name of a method), keeps
    it in its config, and is equal to the plain class where it is `"none"`, the default. A model with an `__init__` of
    its own takes `skip_scaling` there, and its forward goes through its `skip_scaler`.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._skip_layerwise_casting_patterns = [*(cls._skip_layerwise_casting_patterns or ()), "skip_scaler"]
        if "__init__" not in cls.__dict__:
            cls.__init__ = _init_with_skip_scaling(plain_class(cls))
        if cls.__module__.startswith("scalelong_diffusers."):
            # Pipelines record where a class is imported from; the package is to be the only place of that name.
            cls.__module__ = "scalelong_diffusers"

    @classmethod
    def from_config(cls, config=None, return_unused_kwargs: bool = False, **kwargs):
        # diffusers drops a keyword that it does not know: a misspelt `skip_scaling` would give a plain model.
        if isinstance(config, Mapping) and not return_unused_kwargs:
            accepted = {*cls._get_init_keys(cls), *cls._deprecated_kwargs, "dtype"} - {"self"}
            for name in kwargs:
                if name not in accepted:
                    raise TypeError(f"{cls.__name__} takes no argument {name!r}{near_miss(name, accepted)}")
        return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        output_loading_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, output_loading_info=True, **kwargs)
        _check_loaded_gates(model.skip_scaler, info, pretrained_model_name_or_path)
        _check_nothing_is_missing(model, info, pretrained_model_name_or_path)
        return (model, info) if output_loading_info else model

    @classmethod
    def from_preset(cls, name: str, **overrides):
        """
        The model of one of the paper's experiments, freshly initialised; `overrides` go before the preset's config.
        `scalelong presets` lists them.
        """
        from scalelong_diffusers.presets import get_preset  # presets stand on the models

        preset = get_preset(name)
        if not issubclass(cls, preset.model_class):
            right = preset.model_class.__name__
            raise ValueError(f"preset {name!r} is no {cls.__name__}: use {right}.from_preset({name!r})")
        return cls.from_config(preset.config, **overrides)

    def _install_skip_scaling(self, scaler: SkipScaler):
        """Give this model its scaler and the hooks that go through it."""
        layout = skip_layout(type(self))
        self.skip_scaler = scaler
        # Hooks are added for "none" too: a compiled model would not see those that are added later.
        add_skip_hooks(self, scaler, layout.find(self), layout.argument)
        self._record_skip_scaling()

    def _replace_skip_scaling(self, scaler: SkipScaler):
        """Take over another scaling; one that differs in strength alone keeps the gates and what they have learned."""
        if scaler.config.equals_but_for_strength(self.skip_scaler.config):
            self.skip_scaler.set_config(scaler.config)
        else:
            self.skip_scaler.adopt(scaler)
        self._record_skip_scaling()

    def _remove_skip_scaling(self):
        """Become the plain diffusers class again."""
        remove_skip_hooks(self)
        del self.skip_scaler
        self.__class__ = plain_class(type(self))
        # `register_to_config` can only add, so the dict behind the config is made anew.
        config = {name: value for name, value in self.config.items() if name != "skip_scaling"}
        self._internal_dict = FrozenDict(_with_class_name(config, self))

    def _record_skip_scaling(self):
        """Write the scaling into the config, which is what saving and loading go by."""
        config = {**self.config, "skip_scaling": self.skip_scaler.config.to_dict()}
        if "_use_default_values" in config:  # diffusers leaves out what is named there when it builds from a config
            config["_use_default_values"] = [name for name in config["_use_default_values"] if name != "skip_scaling"]
        self.register_to_config(**_with_class_name(config, self))


def not_scalable(class_name: str) -> str:
    known = ", ".join(SKIP_LAYOUTS)
    return f"{class_name} has no long skips that this package knows; models that can be scaled: {known}"


def build_skip_scaler(model, config: SkipScalingConfig) -> SkipScaler:
    """A scaler that fits the long skips of `model`, which is not changed."""
    layout = skip_layout(type(model))
    skips = layout.find(model)
    if not skips:
        raise ValueError(f"this {type(model).__name__} has no long skip connections")
    return SkipScaler(*layout.scaler_arguments(config, skips))


def _with_class_name(config: dict[str, Any], model) -> dict[str, Any]:
    """A loaded model carries the name of its class in its config; one made by hand does not."""
    return {**config, "_class_name": type(model).__name__} if "_class_name" in config else config


def plain_class(model_class: type) -> type | None:
    """The diffusers class that a scaled class stands on."""
    return next((base for base in model_class.__mro__ if base.__name__ in SKIP_LAYOUTS), None)


def scaled_class(model_class: type) -> type | None:
    """The scaled class for a diffusers class."""
    return next((c for c in SkipScalingMixin.__subclasses__() if plain_class(c) is model_class), None)


def skip_layout(model_class: type) -> SkipLayout:
    return SKIP_LAYOUTS[plain_class(model_class).__name__]


def _init_with_skip_scaling(base: type):
    """
    The `__init__` of `base` with the keyword `skip_scaling`. diffusers reads an `__init__`'s signature to learn what
    belongs into the config, so it is spelt out: a bare `**kwargs` would build the default architecture.
    """

    @functools.wraps(base.__init__)
    def __init__(self, *args, skip_scaling: SkipScalingConfig | Mapping[str, Any] | str = "none", **kwargs):
        config = SkipScalingConfig.parse(skip_scaling)
        base.__init__(self, *args, **kwargs)
        self._install_skip_scaling(build_skip_scaler(self, config))

    signature = inspect.signature(base.__init__)
    own = inspect.signature(__init__, follow_wrapped=False).parameters["skip_scaling"]
    __init__.__signature__ = signature.replace(parameters=[*signature.parameters.values(), own])
    return __init__


def _check_loaded_gates(scaler: SkipScaler, loading_info: dict[str, Any], source: Any):
    """A checkpoint brings all gates of the model, or none: then it is a plain one, and they keep their own init."""
    if not scaler.gates:
        return
    expected = sum(1 for _ in scaler.parameters())
    missing = sorted(key for key in loading_info.get("missing_keys", ()) if key.startswith("skip_scaler."))
    others = sorted(key for key in loading_info.get("unexpected_keys", ()) if key.startswith("skip_scaler."))
    if missing and (others or len(missing) < expected):
        instead = f" and has others, such as {others[0]}" if others else ""
        raise ValueError(
            f"{source} lacks {len(missing)} of the {expected} gate weights of {scaler.config}, such as {missing[0]}"
            f"{instead}; load it with the skip_scaling that it was saved with"
        )


def _check_nothing_is_missing(model, loading_info: dict[str, Any], source: Any):
    """diffusers warns of weights that a checkpoint lacks, and leaves them without memory: the model can not run."""
    weights = model.state_dict()
    missing = sorted(key for key in loading_info.get("missing_keys", ()) if key in weights and weights[key].is_meta)
    if missing:
        raise ValueError(
            f"{source} lacks {len(missing)} weights of this {type(model).__name__}, such as {missing[0]}; it was "
            "saved from a model with another config"
        )
