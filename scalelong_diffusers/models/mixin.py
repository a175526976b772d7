"""`SkipScalingMixin` adds skip scaling to a diffusers model class."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import ModelMixin
from diffusers.loaders import FromOriginalModelMixin

import scalelong_diffusers
from scalelong_diffusers.download import check_json_files, damaged_file_errors
from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.internals import write_config_entry
from scalelong_diffusers.models.skips import SkipLayout
from scalelong_diffusers.scaling import LongSkip, SkipScaler, SkipScalingConfig


_SCALED_CLASSES: dict[type, type] = {}


class HubMixin:
    """Mixin with which a diffusers model or pipeline pushes a model card that describes its skip scaling."""

    # `scalelong_diffusers.hub` depends on models and pipelines, so it is looked up through the package.

    def push_to_hub(self, repo_id: str, *args, **options) -> str:
        """Push to the Hub. See [`scalelong_diffusers.push_to_hub`] for the options."""
        return scalelong_diffusers.push_to_hub(self, repo_id, *args, **options)

    def _upload_folder(self, working_dir, repo_id, token=None, **options):
        # diffusers' `save_pretrained(push_to_hub=True)` calls this after it wrote its own card.
        scalelong_diffusers.write_model_card(self, working_dir, repo_id, token=token)
        return super()._upload_folder(working_dir, repo_id, token=token, **options)


class SkipScalingMixin(HubMixin):
    """
    Mixin that adds `skip_scaling` to a diffusers model class. The layout says where the class keeps its long skips:

    ```python
    class ScaleLongMyUNet(SkipScalingMixin, MyUNet):
        skip_layout = UpBlockSkips(argument="res_hidden_states_tuple")
    ```

    The new class takes `skip_scaling` (a [`SkipScalingConfig`], a dict of its fields, or a method) and stores it in
    its config. With `"none"`, the default, it equals the plain class. `apply_skip_scaling` turns models of the plain
    class into models of the new one.

    A class with its own `__init__` takes `skip_scaling` there and calls `_init_skip_scaling` at the end. It has no
    plain class.
    """

    skip_layout: SkipLayout
    # More options of `__init__`, and functions that add their parts to a new model.
    added_parts: Mapping[str, Callable[[ModelMixin], None]] = {}
    _plain_class: type

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        patterns = cls._skip_layerwise_casting_patterns or ()
        cls._skip_layerwise_casting_patterns = [*(p for p in patterns if p != "skip_scaler"), "skip_scaler"]
        if SkipScalingMixin in cls.__bases__:
            cls._plain_class = cls
            if "__init__" in cls.__dict__:
                # diffusers reads the entries of a config from the signature, where **kwargs would hide them.
                cls.__init__.__signature__ = inspect.Signature(_init_parameters(cls))
            else:
                cls._plain_class = next(base for base in cls.__bases__ if issubclass(base, ModelMixin))
                cls.__init__ = _init_with_skip_scaling(cls._plain_class, cls.added_parts)
            registered = _SCALED_CLASSES.get(cls._plain_class)
            # Another class of the user's for a plain class of ours must not change what apply_skip_scaling returns.
            if registered is None or registered.__module__ != "scalelong_diffusers":
                _SCALED_CLASSES[cls._plain_class] = cls
        if cls.__module__.startswith("scalelong_diffusers."):
            # Pipelines record the module of a class. This must not change when a file moves.
            cls.__module__ = "scalelong_diffusers"

    @classmethod
    def from_config(cls, config=None, return_unused_kwargs: bool = False, **kwargs):
        if isinstance(config, (str, os.PathLike)):
            config, kwargs = cls.load_config(config, return_unused_kwargs=True, **kwargs)
        accepted = inspect.signature(cls.__init__).parameters
        unknown = [name for name in kwargs if name not in accepted]
        if unknown and not return_unused_kwargs:  # diffusers would ignore it
            raise UserError(f"{cls.__name__} has no argument {unknown[0]!r}{did_you_mean(unknown[0], accepted)}")
        return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)

    @classmethod
    def extract_init_dict(cls, config_dict, **kwargs):
        if config_dict.get("_class_name") in (None, cls.__name__, cls._plain_class.__name__):
            _check_entries(cls, config_dict, kwargs)
        return super().extract_init_dict(config_dict, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        source = pretrained_model_name_or_path
        if os.path.isdir(source):
            check_json_files(Path(source, kwargs.get("subfolder") or ""))
        with damaged_file_errors(source):
            stored = SkipScalingConfig.parse(cls.load_config(source, **kwargs).get("skip_scaling", "none"))
        wanted = SkipScalingConfig.parse(kwargs.get("skip_scaling", stored))
        # Other gates can have the same keys and compute another function.
        have_gates = stored.has_gates and wanted.has_gates
        if have_gates and not wanted.resolve(1, gate_axis=stored.gate_axis).equals_except_strength(stored):
            raise UserError(
                f"{source} has the gates of {stored}, got {wanted}: load it without skip_scaling, and pass the model "
                "to apply_skip_scaling to replace its gates"
            )
        output_loading_info = kwargs.pop("output_loading_info", False)
        with damaged_file_errors(source):
            model, info = super().from_pretrained(source, output_loading_info=True, **kwargs)
        # diffusers only warns of missing weights. A checkpoint without gates may lack all of them.
        missing = set(info["missing_keys"])
        gates = {f"skip_scaler.{name}" for name in model.skip_scaler.state_dict()}
        if gates <= missing and not stored.has_gates:
            missing -= gates
        if missing:
            raise UserError(
                f"{source} lacks {len(missing)} weights of this {cls.__name__} with {model.skip_scaler.config}, for "
                f"example {min(missing)}; it was saved from another model"
            )
        return (model, info) if output_loading_info else model

    @classmethod
    def from_single_file(
        cls, *args, skip_scaling: SkipScalingConfig | Mapping[str, Any] | str | None = None, **kwargs
    ):
        """
        Load a model from one file in its original layout. Takes the arguments of the plain class.

        `skip_scaling` replaces the entry of the config, which is plain unless you pass your own.
        """
        plain = cls._plain_class
        if not issubclass(plain, FromOriginalModelMixin):
            raise UserError(
                f"{cls.__name__} cannot be loaded from a single file; `scalelong convert` turns the .pth of a U-ViT "
                "into a folder"
            )
        model = plain.from_single_file(*args, **kwargs)
        wanted = model.config.get("skip_scaling", "none") if skip_scaling is None else skip_scaling
        plan_skip_scaling(model, SkipScalingConfig.parse(wanted)).apply()
        return model

    @classmethod
    def from_preset(cls, name: str, **overrides):
        """
        Build the untrained model of a preset, which `scalelong presets` lists. `overrides` replace config entries.
        """
        preset = scalelong_diffusers.get_preset(name)
        if not issubclass(cls, preset.model_class):
            right = preset.model_class.__name__
            raise UserError(f"preset {name!r} is not for {cls.__name__}; use {right}.from_preset({name!r})")
        return cls.from_config(preset.config, **overrides)

    def register_to_config(self, **kwargs):
        # The load hooks of diffusers' training scripts pass the config of a checkpoint to this method. The model runs
        # what its config stores, so a new entry is applied.
        entry = kwargs.pop("skip_scaling", None) if hasattr(self, "skip_scaler") else None
        super().register_to_config(**kwargs)
        if entry is not None:
            plan_skip_scaling(self, SkipScalingConfig.parse(entry)).apply()

    def _init_skip_scaling(self, skip_scaling: SkipScalingConfig | Mapping[str, Any] | str):
        """Scale the skips of a model that is being built."""
        skips = self.skip_layout.find(self)
        scaler = self.skip_layout.build_scaler(SkipScalingConfig.parse(skip_scaling), skips)
        SkipScalingPlan(self, skips, scaler).apply()


def scaled_class(model_class: type) -> type[SkipScalingMixin] | None:
    """Return the scaled class for a plain class, or None."""
    return _SCALED_CLASSES.get(model_class)


def scaled_class_by_name(name: str) -> type[SkipScalingMixin] | None:
    """Return the scaled class if this is the name of the class or of its plain class, or None."""
    return next((c for plain, c in _SCALED_CLASSES.items() if name in (c.__name__, plain.__name__)), None)


def scaled_class_of(config: Mapping[str, Any], source: str) -> type[SkipScalingMixin]:
    """Return the scaled class for the config of a model. `source` names the config in the error message."""
    name = config.get("_class_name")
    model_class = scaled_class_by_name(name) if isinstance(name, str) else None
    if model_class is None:
        found = name or "a model without a _class_name"
        raise UserError(f"{source}: {found} has no long skip connections that can be scaled")
    return model_class


def skip_layout(model: ModelMixin) -> SkipLayout:
    """Return the layout of a scaled model, or of a plain one that can be scaled."""
    model_class = type(model) if isinstance(model, SkipScalingMixin) else scaled_class(type(model))
    if model_class is None:
        accepted = ", ".join(plain.__name__ for plain in _SCALED_CLASSES)
        raise UserError(
            f"{type(model).__name__} has no long skips that this package knows; models that can be scaled: {accepted}"
        )
    return model_class.skip_layout


def resolve_skip_scaling(model: ModelMixin, config: SkipScalingConfig) -> SkipScalingConfig:
    """Return the config for this model, with every `"auto"` replaced by its value."""
    layout = skip_layout(model)
    return layout.resolve(config, layout.find(model))


@dataclass(frozen=True)
class SkipScalingPlan:
    """A model and the scaler that it will use. Making a plan can fail; applying it cannot."""

    model: ModelMixin
    skips: list[LongSkip]
    scaler: SkipScaler

    def apply(self):
        """Apply the scaling to the model, and store it in the model's config."""
        model = self.model
        if not isinstance(model, SkipScalingMixin):
            model.__class__ = scaled_class(type(model))
        if hasattr(model, "skip_scaler"):
            model.skip_scaler.adopt(self.scaler)
        else:
            model.skip_scaler = self.scaler
            # Also for "none": a compiled model would ignore hooks that are added later.
            model._skip_hooks = model.skip_layout.add_hooks(model, self.scaler, self.skips)
        write_config_entry(model, "skip_scaling", self.scaler.config.to_dict())


def plan_skip_scaling(model: ModelMixin, config: SkipScalingConfig) -> SkipScalingPlan:
    """
    Plan to scale the long skips of a complete model, without changing it.

    New gates get the device and dtype of the model. If only the strength changes, the model keeps its gates.
    """
    layout = skip_layout(model)
    skips = layout.find(model)
    config = layout.resolve(config, skips)
    if isinstance(model, SkipScalingMixin) and config.equals_except_strength(model.skip_scaler.config):
        return SkipScalingPlan(model, skips, model.skip_scaler.with_config(config))
    return SkipScalingPlan(model, skips, layout.build_scaler(config, skips, model.device, model.dtype))


def check_plain_class_suffices(model: ModelMixin):
    """Raise a `UserError` if a model has a part that its plain class does not have."""
    for name in getattr(model, "added_parts", ()):
        if model.config.get(name):
            raise UserError(
                f"this {type(model).__name__} has {name}, which {model._plain_class.__name__} does not have: "
                'apply_skip_scaling(model, "none") turns off the scaling only'
            )


def unscale(model: ModelMixin):
    """Turn a scaled model into its plain class, and remove the entry from its config."""
    if not isinstance(model, SkipScalingMixin):  # a plain class keeps the entry after loading a scaled folder
        write_config_entry(model, "skip_scaling", None)
    elif issubclass(model._plain_class, SkipScalingMixin):  # for example a UViTModel
        plan_skip_scaling(model, SkipScalingConfig("none")).apply()
    else:
        for handle in model._skip_hooks:
            handle.remove()
        del model._skip_hooks, model.skip_scaler
        model.__class__ = model._plain_class
        write_config_entry(model, "skip_scaling", None)


def _check_entries(model_class: type[SkipScalingMixin], config: Mapping[str, Any], overrides: Mapping[str, Any]):
    """
    Raise a `UserError` if an unknown entry of a config is a misspelled argument, which diffusers would ignore.

    A config that diffusers wrote has all arguments. Other entries belong to something else, such as an EMA. The config
    of a stock class can also come from another version of diffusers, with other arguments.
    """
    accepted = [parameter.name for parameter in _init_parameters(model_class)]
    missing = [name for name in accepted[1:] if name not in config and name not in overrides]
    is_stock = not issubclass(model_class._plain_class, SkipScalingMixin)
    for name in config:
        if name in accepted or name.startswith("_") or name == "quantization_config":
            continue
        advice = did_you_mean(name, missing)
        if advice or (missing and not is_stock):
            raise UserError(
                f"the config of {model_class.__name__} has the unknown entry {name!r}{advice}; accepted: "
                f"{', '.join(accepted[1:])}"
            )


def _init_with_skip_scaling(plain: type, parts: Mapping[str, Callable[[ModelMixin], None]]):
    """Return the `__init__` of a plain class with the keywords `skip_scaling` and the names of `parts`."""

    @functools.wraps(plain.__init__)
    def __init__(self, *args, skip_scaling: SkipScalingConfig | Mapping[str, Any] | str = "none", **kwargs):
        config = SkipScalingConfig.parse(skip_scaling)
        switches = {name: kwargs.pop(name, False) for name in parts}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise UserError(f"{name} must be True or False, got {value!r}")
        plain.__init__(self, *args, **kwargs)
        for name in filter(switches.get, switches):
            parts[name](self)
            write_config_entry(self, name, True)
        self._init_skip_scaling(config)

    # diffusers reads from the signature which entries of a config belong to the model.
    own = inspect.signature(__init__, follow_wrapped=False).parameters["skip_scaling"]
    switches = [own.replace(name=name, default=False, annotation=bool) for name in parts]
    __init__.__signature__ = inspect.Signature([*_init_parameters(plain), own, *switches])
    return __init__


def _init_parameters(model_class: type) -> list[inspect.Parameter]:
    """Return the parameters of `__init__`, with `**kwargs` replaced by the parameters that the next class accepts."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in (base for base in model_class.__mro__ if "__init__" in base.__dict__):
        own = inspect.signature(base.__init__).parameters
        if not parameters:
            parameters = {name: p for name, p in own.items() if p.kind is not p.VAR_KEYWORD}
        for name, p in own.items():
            if name not in parameters and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                parameters[name] = p.replace(kind=p.KEYWORD_ONLY)
        if all(p.kind is not p.VAR_KEYWORD for p in own.values()):
            break
    return list(parameters.values())
