"""`SkipScalingMixin` turns a diffusers model into one whose long skips are scaled, and keeps it a diffusers model."""

import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any

from diffusers.configuration_utils import FrozenDict

from scalelong_diffusers.errors import did_you_mean
from scalelong_diffusers.models.hub_mixin import HubMixin
from scalelong_diffusers.models.skips import SKIP_LAYOUTS, SkipLayout, add_skip_hooks, remove_skip_hooks
from scalelong_diffusers.scaling import SkipScaler, SkipScalingConfig


class SkipScalingMixin(HubMixin):
    """
    Put it in front of a diffusers model that has a row in `SKIP_LAYOUTS`, or of a subclass of one:

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
        patterns = cls._skip_layerwise_casting_patterns or ()
        cls._skip_layerwise_casting_patterns = [*(p for p in patterns if p != "skip_scaler"), "skip_scaler"]
        if SkipScalingMixin in cls.__bases__ and "__init__" not in cls.__dict__:
            cls.__init__ = _init_with_skip_scaling(plain_class(cls))
        if cls.__module__.startswith("scalelong_diffusers."):
            # Pipelines record where a class is imported from; the package is to be the only place of that name.
            cls.__module__ = "scalelong_diffusers"

    @classmethod
    def from_config(cls, config=None, return_unused_kwargs: bool = False, **kwargs):
        if isinstance(config, (str, os.PathLike)):
            config, kwargs = cls.load_config(config, return_unused_kwargs=True, **kwargs)
        # diffusers drops a keyword that it does not know: a misspelt `skip_scaling` would give a plain model.
        if not return_unused_kwargs:
            accepted = {*cls._get_init_keys(cls), *cls._deprecated_kwargs, "dtype"} - {"self"}
            for name in kwargs:
                if name not in accepted:
                    raise TypeError(f"{cls.__name__} takes no argument {name!r}{did_you_mean(name, accepted)}")
        return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        source = pretrained_model_name_or_path
        stored = SkipScalingConfig.parse(cls.load_config(source, **kwargs).get("skip_scaling", "none"))
        if "skip_scaling" in kwargs:
            _check_gates_can_serve(stored, SkipScalingConfig.parse(kwargs["skip_scaling"]), source)
        output_loading_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(source, output_loading_info=True, **kwargs)
        _check_nothing_is_missing(model, info, gates_expected=stored.has_gates, source=source)
        return (model, info) if output_loading_info else model

    @classmethod
    def from_single_file(cls, *args, **kwargs):
        plain = plain_class(cls).__name__
        raise ValueError(
            f"{cls.__name__} can not be loaded from a single file, which knows nothing of skip scaling: load "
            f"{plain}.from_single_file(...) and give it to apply_skip_scaling"
        )

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

    def register_to_config(self, **kwargs):
        super().register_to_config(**kwargs)
        # The load hooks of training scripts take over the config of a checkpoint this way. What is stored is always
        # what runs.
        if "skip_scaling" in kwargs and hasattr(self, "skip_scaler"):
            config = resolve_skip_scaling(self, SkipScalingConfig.parse(kwargs["skip_scaling"]))
            if config != self.skip_scaler.config:
                self._change_skip_scaling(config, new_skip_scaler(self, config))

    def __setstate__(self, state):
        super().__setstate__(state)
        # torch files hooks under numbers that it counts in each process: those of an unpickled model would be
        # overwritten by the next hook that somebody adds.
        self._add_skip_hooks()

    def _add_skip_hooks(self):
        # Also for "none": a compiled model would not see hooks that are added later.
        layout = skip_layout(type(self))
        remove_skip_hooks(self)
        if layout.argument is not None:
            add_skip_hooks(self, self.skip_scaler, layout.find(self), layout.argument)

    def _install_skip_scaling(self, scaler: SkipScaler):
        """Give this model its scaler and the hooks that go through it."""
        self.skip_scaler = scaler
        self._add_skip_hooks()
        self._record_skip_scaling()

    def _change_skip_scaling(self, config: SkipScalingConfig, scaler: SkipScaler | None):
        """Take over a resolved config, and the scaler that was made for it if the present one can not serve."""
        if scaler is not None:
            self.skip_scaler.adopt(scaler)
        self.skip_scaler.set_config(config)
        self._record_skip_scaling()

    def _switch_skip_scaling_off(self):
        none = SkipScalingConfig("none")
        self._change_skip_scaling(none, new_skip_scaler(self, none))

    def _remove_skip_scaling(self):
        """Become the plain diffusers class again."""
        remove_skip_hooks(self)
        del self.skip_scaler
        self.__class__ = plain_class(type(self))
        forget_skip_scaling(self)

    def _record_skip_scaling(self):
        """Write the scaling into the config, which is what saving and loading go by."""
        config = {**self.config, "skip_scaling": self.skip_scaler.config.to_dict()}
        if "_use_default_values" in config:  # diffusers leaves out what is named there when it builds from a config
            config["_use_default_values"] = [name for name in config["_use_default_values"] if name != "skip_scaling"]
        self.register_to_config(**_with_class_name(config, self))


def plain_class(model_class: type) -> type:
    """The class that a scaled class stands on: the one behind the mixins."""
    return model_class.__mro__[model_class.__mro__.index(HubMixin) + 1]


def scaled_class(model_class: type) -> type | None:
    """The scaled class for a plain one that has a row in `SKIP_LAYOUTS`."""
    if not any(base.__name__ in SKIP_LAYOUTS for base in model_class.__mro__):
        return None
    return next((c for c in SkipScalingMixin.__subclasses__() if plain_class(c) is model_class), None)


def skip_layout(model_class: type) -> SkipLayout:
    return next(SKIP_LAYOUTS[base.__name__] for base in model_class.__mro__ if base.__name__ in SKIP_LAYOUTS)


def resolve_skip_scaling(model, config: SkipScalingConfig) -> SkipScalingConfig:
    """The config with every `"auto"` replaced by what it means for this model; an error where it does not fit."""
    layout = skip_layout(type(model))
    return layout.resolve(config, layout.find(model))


def build_skip_scaler(model, config: SkipScalingConfig) -> SkipScaler:
    """A scaler that fits the long skips of `model`, which is not changed."""
    layout = skip_layout(type(model))
    skips = layout.find(model)
    if not skips:
        raise ValueError(f"this {type(model).__name__} has no long skip connections")
    config = layout.resolve(config, skips)
    return SkipScaler(config, *layout.gate_shape(config, skips))


def new_skip_scaler(model, config: SkipScalingConfig) -> SkipScaler | None:
    """
    The scaler that `model` needs for a resolved config, on its device and in its dtype. None where the one it has can
    serve, as the configs differ in strength alone: its gates stay, with what they have learned.
    """
    if isinstance(model, SkipScalingMixin) and config.equals_except_strength(model.skip_scaler.config):
        return None
    return build_skip_scaler(model, config).to(model.device, model.dtype)


def forget_skip_scaling(model):
    """Drop the entry from the config of a plain model. `register_to_config` can only add, so the dict is made anew."""
    config = {name: value for name, value in model.config.items() if name != "skip_scaling"}
    model._internal_dict = FrozenDict(_with_class_name(config, model))


def not_scalable_message(class_name: str) -> str:
    known = ", ".join(SKIP_LAYOUTS)
    return f"{class_name} has no long skips that this package knows; models that can be scaled: {known}"


def _with_class_name(config: dict[str, Any], model) -> dict[str, Any]:
    """A loaded model carries the name of its class in its config; one made by hand does not."""
    return {**config, "_class_name": type(model).__name__} if "_class_name" in config else config


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


def _check_gates_can_serve(stored: SkipScalingConfig, wanted: SkipScalingConfig, source: Any):
    """Gates that were learned as one function are not loaded as another, though their keys may be the same."""
    if not (stored.has_gates and wanted.has_gates):
        return
    if not wanted.resolve(num_skips=1, gate_axis=stored.gate_axis).equals_except_strength(stored):
        raise ValueError(
            f"{source} was saved with the gates of {stored}, which can not serve {wanted}; load it as it is, and "
            "apply_skip_scaling gives it new gates"
        )


def _check_nothing_is_missing(model, loading_info: dict[str, Any], gates_expected: bool, source: Any):
    """
    diffusers warns of weights that a checkpoint lacks, and leaves them without memory. The gates of a plain checkpoint
    are the exception: they are to be missing, all of them, and keep their own init.
    """
    missing = sorted(loading_info.get("missing_keys", ()))
    gates = {f"skip_scaler.{name}" for name, _ in model.skip_scaler.named_parameters()}
    if gates.issubset(missing) and not gates_expected:
        missing = [key for key in missing if key not in gates]
    if missing:
        raise ValueError(
            f"{source} lacks {len(missing)} weights of this {type(model).__name__} with {model.skip_scaler.config}, "
            f"such as {missing[0]}; it was saved from another model"
        )
