"""Every number that a config or a checked function takes has bounds on both sides, and no other number is accepted."""

import dataclasses
import importlib
import inspect
import math
import pkgutil
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import pytest

import scalelong_diffusers.pipelines
import scalelong_diffusers.train
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.options import Option


class Number(NamedTuple):
    """A field of a config or an argument of a function. `pass_value` makes the config or calls the function."""

    owner: str
    name: str
    hint: Any
    bounds: Option
    pass_value: Callable[[Any], object]


def types_in(hint: Any) -> set[Any]:
    """Return the types in a hint such as `list[float] | None`."""
    return {typing.get_origin(hint) or hint}.union(*map(types_in, typing.get_args(hint)))


def classes_and_functions() -> Iterator[type | Callable]:
    for package in (scalelong_diffusers, scalelong_diffusers.pipelines, scalelong_diffusers.train):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                for value in vars(importlib.import_module(module.name)).values():
                    if getattr(value, "__module__", "").startswith("scalelong_diffusers") and callable(value):
                        yield value


def fields_of(config_class: type) -> Iterator[Number]:
    hints = typing.get_type_hints(config_class)
    required = {
        field.name: {"method": "ls", "skips": 3}.get(field.name, "some")
        for field in dataclasses.fields(config_class)
        if field.default is field.default_factory is dataclasses.MISSING
    }
    for field in dataclasses.fields(config_class):
        if bounds := field.metadata.get("option"):
            make = lambda value, name=field.name: config_class(**{**required, name: value})  # noqa: E731
            yield Number(config_class.__name__, bounds.flag or field.name, hints[field.name], bounds, make)


def arguments_of(function: Callable, call: Callable) -> Iterator[Number]:
    for name, parameter in inspect.signature(function).parameters.items():
        if typing.get_origin(parameter.annotation) is Annotated:
            hint, bounds = typing.get_args(parameter.annotation)
            yield Number(function.__qualname__, name, hint, bounds, lambda value, name=name: call(**{name: value}))


def options() -> Iterator[Number]:
    for owner in dict.fromkeys(classes_and_functions()):
        if dataclasses.is_dataclass(owner):
            yield from fields_of(owner)
        if inspect.isfunction(owner):
            yield from arguments_of(owner, owner)
        for function in filter(inspect.isfunction, vars(owner).values()) if isinstance(owner, type) else ():
            # Arguments are checked before the function uses `self`.
            call = owner if function.__name__ == "__init__" else lambda f=function, **values: f(None, **values)
            yield from arguments_of(function, call)


NUMBERS = [option for option in options() if types_in(option.hint) & {int, float}]


def test_finds_numbers_of_configs_and_functions():
    names = {f"{number.owner}.{number.name}" for number in NUMBERS}
    assert names > {
        *(
            "OptimizationConfig.learning_rate",
            "FineTuningConfig.lora_rank",
            "SampleConfig.height",
            "KappaConfig.skips",
        ),
        *("UViTModel.__init__.num_layers", "SamplingPipeline.set_guidance.guidance_scale"),
        "ScaleLongUnconditionalPipeline.__call__.eta",
    }


def test_all_arguments_of_a_uvit_are_checked():
    parameters = inspect.signature(scalelong_diffusers.UViTModel.__init__).parameters
    unchecked = [name for name, p in parameters.items() if typing.get_origin(p.annotation) is not Annotated]
    assert unchecked == ["self", "skip_scaling"]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{number.owner}.{number.name}")
def test_numbers_are_finite_and_in_bounds(number):
    bounds = number.bounds
    low = bounds.above if bounds.at_least is None else bounds.at_least
    high = bounds.below if bounds.at_most is None else bounds.at_most
    assert -math.inf < low < high < math.inf
    edges = {low: bounds.at_least is None, high: bounds.at_most is None}
    outside = [low - 1, high + 1, *(edge for edge, is_refused in edges.items() if is_refused)]
    for value in (math.nan, math.inf, -math.inf, *outside):
        with pytest.raises(UserError, match=f"^{number.name} must be .*, got "):
            number.pass_value([value] if list in types_in(number.hint) else value)
