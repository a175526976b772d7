"""
The methods: what happens to a long skip, and to the hidden state it meets, before the layer that reads both.

A method is a small module that is built once per skip. Users add their own with [`register_skip_method`].
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from scalelong_diffusers.errors import UserError


@dataclass(frozen=True)
class LongSkip:
    """
    A long skip that the decoder consumes.

    Args:
        index: the paper's i, 1 for the outermost.
        count: the paper's N, the number of long skips of the model.
        block: name of the module that receives the skip.
        where: name of the layer that reads the hidden state and the skip.
        width: number of channels of the skip.
        hidden_width: number of channels of the hidden state.
        channel_dim: dimension of the channels.
        tokens: number of tokens, in a transformer with a fixed number.
    """

    index: int
    count: int
    block: str
    where: str
    width: int
    hidden_width: int
    channel_dim: int = 1
    tokens: int | None = None


class SkipMethod(nn.Module):
    """Base class of [`SkipFactor`] and [`SkipMix`], from which methods derive."""

    # The training scripts multiply the learning rate of the parameters by this number.
    learning_rate_scale: ClassVar[float] = 1.0
    has_weight_decay: ClassVar[bool] = True

    def __init__(self, skip: LongSkip):
        super().__init__()
        self.skip = skip

    def reset_parameters(self):
        """
        Initialize the parameters in place, without `torch.nn.init`, which diffusers disables while a model is loaded.
        """
        if next(self.parameters(), None) is not None:
            raise NotImplementedError(f"{type(self).__name__} has parameters, so it must define reset_parameters")

    def initial_weights(self) -> tuple[float, float]:
        """Return the factors of the hidden state and of the skip at the start of training."""
        return 1.0, 1.0

    def per_channel(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Reshape one value per channel so that it multiplies `like`."""
        return values.reshape(-1, *[1] * (like.ndim - 1 - self.skip.channel_dim))


class SkipFactor(SkipMethod):
    """Base class of the methods that multiply the skip by a factor and leave the hidden state as it is."""

    def forward(self, skip: torch.Tensor) -> float | torch.Tensor:
        """Return k_i: a number, or a tensor that broadcasts to the skip and is then cast to its dtype."""
        raise NotImplementedError


class SkipMix(SkipMethod):
    """Base class of the methods that need the hidden state or change it."""

    def forward(self, hidden: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden state and the skip that the decoder reads. They are then cast to their former dtypes."""
        raise NotImplementedError


@dataclass(frozen=True)
class RegisteredMethod:
    """
    An entry of [`METHODS`].

    Args:
        build: the class, or a function that returns the module of a [`LongSkip`].
        fields: names and defaults of the keyword arguments of `build`.
        has_parameters: whether the module has learnable parameters.
        key: the modules are called `<key>_<i>` in the state dict.
    """

    build: Callable[..., SkipMethod]
    fields: Mapping[str, Any]
    has_parameters: bool
    key: str

    @property
    def is_built_in(self) -> bool:
        return self.build.__module__.startswith("scalelong_diffusers.")

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring of `build`."""
        paragraphs = inspect.cleandoc(self.build.__doc__ or "").split("\n\n")
        return " ".join(paragraphs[0].split())


# Entries that are not passed to a method.
RESERVED_FIELDS = ("version", "method", "strength", "options")

# All methods, by the names that `skip_scaling` accepts.
METHODS: dict[str, RegisteredMethod] = {}

Build = TypeVar("Build", bound=Callable[..., SkipMethod])


def register_skip_method(name: str, has_parameters: bool = True, key: str | None = None) -> Callable[[Build], Build]:
    """
    Register a class, or a function that returns a module, as a method of skip scaling.

    The class or function is called with a [`LongSkip`] and the fields of the config as keyword arguments. Fields with
    the name of a built-in field have its type. A model with this method saves, loads and prints like any other; the
    module that registers the method must be imported before loading.

    ```python
    @register_skip_method("decay", has_parameters=False)
    def decay(skip: LongSkip, power: float = 0.5) -> ConstantFactor:
        \"""k_i = 1 / i^power.\"""
        return ConstantFactor(skip, skip.index**-power)


    apply_skip_scaling(model, {"method": "decay", "power": 1.0})
    ```
    """

    def register(build: Build) -> Build:
        known = METHODS.get(name)
        if known is not None and (known.build.__module__, known.build.__qualname__) != (
            build.__module__,
            build.__qualname__,
        ):
            raise UserError(f"the skip scaling method {name!r} is already registered, by {known.build.__module__}")
        if not name.isidentifier():
            raise UserError(f"the name of a skip scaling method must be an identifier, got {name!r}")
        if (key or name) in {other.key for other in METHODS.values()} - {known and known.key}:
            raise UserError(f"the key {key or name!r} of the skip scaling method {name!r} belongs to another method")
        _, *fields = inspect.signature(build).parameters.values()  # the first is the skip
        if missing := [field.name for field in fields if field.default is field.empty]:
            raise UserError(f"the skip scaling method {name!r} needs a default for its field {missing[0]!r}")
        if taken := [field.name for field in fields if field.name in RESERVED_FIELDS]:
            raise UserError(f"the skip scaling method {name!r} cannot have a field with the name {taken[0]!r}")
        defaults = MappingProxyType({field.name: field.default for field in fields})
        METHODS[name] = RegisteredMethod(build, defaults, has_parameters, key or name)
        return build

    return register
