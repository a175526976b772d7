"""`SkipScalingConfig`: what is done to the long skips, checked when it is made and stored with the model."""

import dataclasses
import functools
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scalelong_diffusers.errors import did_you_mean
from scalelong_diffusers.scaling.factors import UPPER_NOISE_RATIO, solve_kappa


# Bumped when a stored entry gets a field that an older package would not understand.
FORMAT_VERSION = 1

# Which fields each method reads. A field that a method does not read stays None and may not be given.
METHODS = {
    "none": (),
    "inv_sqrt2": ("strength",),
    "constant": ("kappa", "strength"),
    "cs": ("kappa", "reverse", "strength"),
    "ls": ("shared", "reduction", "activation", "gate", "gate_axis", "init", "strength"),
    "learnable": ("strength",),
}
_NOT_OF_GATE = {"se": (), "ie": ("reduction", "activation")}

# The paper's, but for kappa, which it leaves open. By docs/which_method.md, where runs are measured, kappa 0.7 and 0.9
# differ little; gates are best with one for each skip (shared=False) that starts at 1 (identity).
_DEFAULTS = {
    "kappa": 0.9,
    "reverse": False,
    "shared": True,
    "reduction": 16,
    "activation": "relu",
    "gate": "se",
    "gate_axis": "auto",
    "init": "paper",
    "strength": 1.0,
}
_CHOICES = {
    "activation": ("relu", "elu", "mish"),
    "gate": ("se", "ie"),
    "gate_axis": ("auto", "channels", "tokens"),
    "init": ("paper", "identity"),
}


@dataclass(frozen=True, repr=False)
class SkipScalingConfig:
    """
    How the long skip connections of a model are scaled. Skips are numbered as in the paper: i = 1 is the outermost.

    Args:
        method: `"none"`; `"inv_sqrt2"`, every k_i = 2**-0.5; `"constant"`, every k_i = kappa; `"cs"`,
            k_i = kappa**(i-1) (equation 8); `"ls"`, k_i predicted from the skip by a small gate (equation 9);
            `"learnable"`, one scalar for each skip, starting at 1.
        kappa: in (0, 1], 0.9 by default, or `"auto"`: the kappa for which sum k_i^2 is 5, the paper's upper estimate.
        reverse: of `cs`: k_i = kappa**(N-i+1), the paper's ablation (Table 4).
        shared: of `ls`: one gate for all skips of a width (the paper's default), or one for each skip.
        reduction: of `ls`: the gate's hidden width is the skip's divided by this.
        activation: of `ls`: `"relu"`, `"elu"` or `"mish"`.
        gate: of `ls`: `"se"` (squeeze-excite) or `"ie"` (a per-channel affine map).
        gate_axis: of `ls`: `"channels"`, `"tokens"`, or `"auto"`, the paper's: channels of a U-Net, tokens of a U-ViT.
        init: of `ls`: `"paper"`, k = sigmoid(z) with torch's Linear init, or `"identity"`, k = 2 sigmoid(z) with a
            last layer of zeros, which is exactly 1 at the start and learns.
        strength: every factor becomes 1 + strength * (k - 1); 1 by default, 0 leaves the model as it was.

    ```python
    >>> SkipScalingConfig("cs", kappa=0.7)
    SkipScalingConfig(method='cs', kappa=0.7, reverse=False, strength=1.0)
    ```
    """

    method: Literal["none", "inv_sqrt2", "constant", "cs", "ls", "learnable"]
    kappa: float | Literal["auto"] | None = None
    reverse: bool | None = None
    shared: bool | None = None
    reduction: int | None = None
    activation: Literal["relu", "elu", "mish"] | None = None
    gate: Literal["se", "ie"] | None = None
    gate_axis: Literal["auto", "channels", "tokens"] | None = None
    init: Literal["paper", "identity"] | None = None
    strength: float | None = None

    def __post_init__(self):
        if self.method not in tuple(METHODS):
            raise ValueError(
                f"unknown skip scaling method {self.method!r}{did_you_mean(self.method, METHODS)}; accepted: "
                f"{', '.join(METHODS)}"
            )
        self._refuse_unused_fields()
        for name in self._used_fields():
            if getattr(self, name) is None:
                object.__setattr__(self, name, _DEFAULTS[name])
            object.__setattr__(self, name, _checked(name, getattr(self, name)))

    def _used_fields(self) -> tuple[str, ...]:
        unused = _NOT_OF_GATE.get(self.gate, ()) if isinstance(self.gate, str) else ()
        return tuple(name for name in METHODS[self.method] if name not in unused)

    def _refuse_unused_fields(self):
        used = self._used_fields()
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value is None or field.name in used:
                continue
            what = f"gate={self.gate!r}" if field.name in METHODS[self.method] else f"method {self.method!r}"
            needs_strength = (field.name, value) == ("init", "identity") and "strength" in used and not self.has_gates
            advice = (
                "; it has no gates: to start a model without a jump, raise `strength` from 0" if needs_strength else ""
            )
            raise ValueError(
                f"{field.name}={value!r} is not used by {what}{advice}; its fields: {', '.join(used) or 'none'}"
            )

    def resolve(self, num_skips: int, gate_axis: str) -> "SkipScalingConfig":
        """The config for a model with `num_skips` skips, with every `"auto"` replaced by what it stands for."""
        changes = {}
        if self.kappa == "auto":
            changes["kappa"] = solve_kappa(UPPER_NOISE_RATIO, num_skips, self.method, self.reverse)
        if self.gate_axis == "auto":
            changes["gate_axis"] = gate_axis
        if self.method == "cs" and num_skips == 1 and not self.reverse:
            raise ValueError(
                "method 'cs' leaves the outermost skip as it is (k_1 = 1) and this model has only one; use 'constant'"
            )
        return dataclasses.replace(self, **changes)

    @property
    def has_gates(self) -> bool:
        """Whether there is something to learn."""
        return self.method in ("ls", "learnable")

    def equals_except_strength(self, other: "SkipScalingConfig") -> bool:
        return self.method == other.method and dataclasses.replace(self, strength=other.strength) == other

    def to_dict(self) -> dict[str, Any]:
        """The entry that is stored in a model's config: the method, its fields, and the format's version."""
        return {
            "version": FORMAT_VERSION,
            "method": self.method,
            **{name: getattr(self, name) for name in self._used_fields()},
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "SkipScalingConfig":
        if "method" not in entry:
            raise ValueError(f"skip_scaling {dict(entry)!r} names no method; accepted: {', '.join(METHODS)}")
        version = entry.get("version", FORMAT_VERSION)
        fields = {name: value for name, value in entry.items() if name != "version"}
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise ValueError(f"the version of skip_scaling must be a whole number of at least 1, got {version!r}")
        try:
            return cls(**{str(name): value for name, value in fields.items()})
        except ValueError as error:
            if version <= FORMAT_VERSION:
                raise
            raise ValueError(
                f"skip_scaling was written in format version {version}, and this package reads version "
                f"{FORMAT_VERSION}: upgrade scalelong-diffusers ({error})"
            ) from error

    @classmethod
    def parse(cls, value: "SkipScalingConfig | Mapping[str, Any] | str") -> "SkipScalingConfig":
        """What is accepted wherever a config is: a config, a dict of its fields, or the bare name of a method."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if isinstance(value, str):
            return cls(value)
        raise TypeError(
            f"skip_scaling must be a SkipScalingConfig, a dict or the name of a method ({', '.join(METHODS)}), got "
            f"{value!r}"
        )

    def __repr__(self):
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("method", *self._used_fields()))
        return f"SkipScalingConfig({fields})"


_FIELDS = tuple(field.name for field in dataclasses.fields(SkipScalingConfig))


def _naming_unknown_fields(init):
    """Python's own message for a misspelt keyword does not name the field that was meant."""

    @functools.wraps(init)
    def checked_init(self, *args, **fields):
        for name in fields:
            if name not in _FIELDS:
                raise ValueError(
                    f"unknown skip scaling field {name!r}{did_you_mean(name, _FIELDS)}; accepted: {', '.join(_FIELDS)}"
                )
        init(self, *args, **fields)

    return checked_init


SkipScalingConfig.__init__ = _naming_unknown_fields(SkipScalingConfig.__init__)


def _checked(name: str, value: Any) -> Any:
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ValueError(
                f"{name} must be one of {', '.join(map(repr, _CHOICES[name]))}, got "
                f"{value!r}{did_you_mean(value, _CHOICES[name])}"
            )
        return value
    if name in ("reverse", "shared"):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
        return value
    if name == "reduction":
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"reduction must be a whole number of at least 1, got {value!r}")
        return int(value)
    if name == "kappa" and value == "auto":
        return value
    lowest, accepted = (0.0, "'auto' or a number in (0, 1]") if name == "kappa" else (None, "a number in [0, 1]")
    # written so that nan fails, too
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value <= 1 or value == lowest:
        raise ValueError(f"{name} must be {accepted}, got {value!r}")
    return float(value)
