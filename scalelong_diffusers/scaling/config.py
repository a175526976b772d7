"""`SkipScalingConfig` describes how the long skips of a model are scaled. It is stored in the model's config."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Importing these modules registers the built-in methods.
import scalelong_diffusers.scaling.constants
import scalelong_diffusers.scaling.gates  # noqa: F401
from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.options import build_config, check_options, option, options_of
from scalelong_diffusers.scaling.factors import UPPER_NOISE_RATIO, solve_kappa
from scalelong_diffusers.scaling.methods import METHODS


# Raise this number when a stored entry gets a field that an older package would misread.
FORMAT_VERSION = 1

_UNUSED_BY_GATE = {"ie": ("reduction", "activation")}


def _field(name: str, help: str, **details) -> Any:
    defaults = {"strength": 1.0} | {
        field: value for method in METHODS.values() for field, value in method.fields.items()
    }
    help = f"{help} (default: {defaults[name]})"
    return option(None, help, **{"flag": f"skip_scaling_{name}", "on_resume": "fixed", **details})


@dataclass(frozen=True, repr=False)
class SkipScalingConfig:
    """
    How the long skip connections of a model are scaled. Skips are numbered as in the paper: i = 1 is the outermost.

    Args:
        method: `"none"`; `"inv_sqrt2"`: k_i = 2**-0.5; `"constant"`: k_i = kappa; `"cs"`: k_i = kappa**(i-1)
            (equation 8); `"ls"`: a small gate predicts k_i from the skip (equation 9); `"learnable"`: one learned
            scalar per skip, which starts at 1. Not from the paper: `"compensated_cs"`, `"mp_cat"`, `"linear"`,
            `"normalized"`, `"lerp"`, `"token_gates"`, and the methods that were registered with
            [`register_skip_method`].
        kappa: a number in (0, 1], 0.9 by default. `"auto"` solves sum k_i^2 = 5, the paper's upper estimate.
        reverse: for `cs`: k_i = kappa**(N-i+1), the paper's ablation (Table 4).
        shared: for `ls`: one gate for all skips of the same width, as in the paper, instead of one per skip.
        reduction: for `ls`: the hidden width of a gate is the width of the skip divided by this number.
        activation: for `ls`: `"relu"`, `"elu"` or `"mish"`.
        gate: for `ls`: `"se"` (squeeze-and-excitation) or `"ie"` (a per-channel affine map).
        gate_axis: for `ls`: `"channels"`, `"tokens"`, or `"auto"`, which follows the paper: channels of a U-Net,
            tokens of a U-ViT.
        init: for `ls`: `"identity"`: k = 2 sigmoid(z) with a zero last layer, which starts at exactly 1; `"paper"`:
            k = sigmoid(z) with torch's Linear init.
        balance: for `mp_cat`: the weight of the skip, in (0, 1); the hidden state has 1 - balance.
        strength: every factor becomes 1 + strength * (k - 1). 1 by default; 0 turns the scaling off.
        options: the fields of a registered method.

    ```python
    >>> SkipScalingConfig("cs", kappa=0.7)
    SkipScalingConfig(method='cs', kappa=0.7, reverse=False, strength=1.0)
    ```
    """

    method: str = option(
        dataclasses.MISSING,
        f"method: one of {', '.join(METHODS)}",
        flag="skip_scaling",
        metavar="METHOD",
        common=True,
        on_resume="fixed",
    )
    kappa: float | Literal["auto"] | None = _field(
        "kappa",
        "for cs, constant, compensated_cs and linear: in (0, 1], or 'auto', which solves S = 5",
        flag="kappa",
        above=0,
        at_most=1,
        common=True,
    )
    reverse: bool | None = _field("reverse", "for cs: k_i = kappa^(N-i+1)")
    shared: bool | None = _field("shared", "for ls: one gate for all skips of the same width")
    reduction: int | None = _field(
        "reduction", "for ls: ratio of a skip's width to its gate's hidden width", at_least=1, at_most=65_536
    )
    activation: str | None = _field("activation", "for ls: activation of the gates", choices=("relu", "elu", "mish"))
    gate: str | None = _field("gate", "for ls: squeeze-and-excitation or instance enhancement", choices=("se", "ie"))
    gate_axis: str | None = _field(
        "gate_axis", "for ls: axis that a gate scales", choices=("auto", "channels", "tokens")
    )
    init: str | None = _field(
        "init", "for ls: start factors at exactly 1 (identity) or near 0.5 (paper)", choices=("paper", "identity")
    )
    balance: float | None = _field("balance", "for mp_cat: weight of the skip", above=0, below=1)
    strength: float | None = _field(
        "strength", "every factor becomes 1 + strength (k - 1)", at_least=0, at_most=1, on_resume="same"
    )
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self):
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise UserError(
                f"skip_scaling must be one of {', '.join(METHODS)}, got {self.method!r}"
                f"{did_you_mean(self.method, METHODS)}; import the file that registers a method of your own"
            )
        check_options(self)
        used = self._used_fields()
        given = {name: getattr(self, name) for name in _TYPED_FIELDS if getattr(self, name) is not None}
        given |= self.options
        if unused := [name for name in given if name not in used]:
            name = unused[0]
            user = f"gate {self.gate!r}" if name in METHODS[self.method].fields else f"method {self.method!r}"
            raise UserError(f"{name}={given[name]!r} is not used by {user}; its fields: {', '.join(used) or 'none'}")
        values = {name: given.get(name, default) for name, default in used.items()}
        for name in _TYPED_FIELDS & values.keys():
            value = values.pop(name)
            if name in ("kappa", "balance", "strength") and value != "auto":
                value = float(value)
            object.__setattr__(self, name, value)
        try:  # as they will be loaded from the model's config
            object.__setattr__(self, "options", json.loads(json.dumps(values, allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise UserError(f"the fields of method {self.method!r} must be JSON values: {error}") from error

    def _used_fields(self) -> dict[str, Any]:
        """Return the fields of the method with their defaults."""
        fields = {**METHODS[self.method].fields, **({} if self.method == "none" else {"strength": 1.0})}
        return {name: value for name, value in fields.items() if name not in _UNUSED_BY_GATE.get(self.gate, ())}

    def method_fields(self) -> dict[str, Any]:
        """Return the keyword arguments with which the method is built."""
        return {name: value for name, value in self._values().items() if name != "strength"}

    def _values(self) -> dict[str, Any]:
        """Return the values of all fields of the method."""
        return {n: self.options[n] if n in self.options else getattr(self, n) for n in self._used_fields()}

    def resolve(self, num_skips: int, gate_axis: str) -> "SkipScalingConfig":
        """Return the config for a model with `num_skips` skips, with every `"auto"` replaced by its value."""
        if self.method in ("cs", "compensated_cs", "linear") and num_skips == 1 and not self.reverse:
            raise UserError(
                f"method {self.method!r} cannot scale a model with one long skip, as k_1 = 1; use 'constant'"
            )
        changes: dict[str, Any] = {}
        if self.kappa == "auto":
            method = self.method.removeprefix("compensated_")
            changes["kappa"] = solve_kappa(UPPER_NOISE_RATIO, num_skips, method, self.reverse)
        if self.gate_axis == "auto":
            changes["gate_axis"] = gate_axis
        return dataclasses.replace(self, **changes)

    @property
    def has_gates(self) -> bool:
        """Whether the method has learnable parameters."""
        return METHODS[self.method].has_parameters

    def equals_except_strength(self, other: "SkipScalingConfig") -> bool:
        return self.method == other.method and dataclasses.replace(self, strength=other.strength) == other

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a model's config: the format version, the method and its fields."""
        return {"version": FORMAT_VERSION, "method": self.method, **self._values()}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "SkipScalingConfig":
        """Return the config from an entry that [`to_dict`] wrote, or from some of its fields."""
        fields = {"method": None, **entry}
        version = fields.pop("version", FORMAT_VERSION)
        try:
            own = METHODS[cls(fields["method"]).method].fields
            options = {name: fields.pop(name) for name in own if name in fields and name not in _TYPED_FIELDS}
            accepted = dict.fromkeys(("method", *sorted(_TYPED_FIELDS), *own))
            if unknown := [name for name in fields if name not in accepted]:
                raise UserError(
                    f"unknown skip_scaling field {unknown[0]!r}{did_you_mean(unknown[0], accepted)}; accepted: "
                    f"{', '.join(accepted)}"
                )
            return cls(**fields, options=options)
        except UserError as error:
            if version == FORMAT_VERSION:
                raise
            raise UserError(
                f"skip_scaling has format version {version!r}, but this package reads version {FORMAT_VERSION}: "
                f"upgrade scalelong-diffusers ({error})"
            ) from error

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> "SkipScalingConfig | None":
        """Return the config from values by flag, as in `vars(parser.parse_args())`, or None if no flag is set."""
        given = [flag for flag, _, _ in options_of(cls) if values.get(flag) is not None]
        if given and "skip_scaling" not in given:
            raise UserError(f"{given[0]} needs a method in skip_scaling; accepted: {', '.join(METHODS)}")
        return build_config(cls, values) if given else None

    @classmethod
    def parse(cls, value: "SkipScalingConfig | Mapping[str, Any] | str") -> "SkipScalingConfig":
        """Return the config for a config, a dict of its fields, or the name of a method."""
        if isinstance(value, cls):
            return value
        return cls.from_dict(value) if isinstance(value, Mapping) else cls(value)

    def __repr__(self):
        fields = ", ".join(f"{name}={value!r}" for name, value in {"method": self.method, **self._values()}.items())
        return f"SkipScalingConfig({fields})"


# The fields of the built-in methods. `options` holds the fields of registered methods.
_TYPED_FIELDS = {field.name for field in dataclasses.fields(SkipScalingConfig)} - {"method", "options"}
