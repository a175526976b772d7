"""`SkipScalingConfig` describes how the long skips of a model are scaled. It is stored in the model's config."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.options import build_config, check_options, option, options_of
from scalelong_diffusers.scaling.factors import UPPER_NOISE_RATIO, solve_kappa


# Raise this number when a stored entry gets a field that an older package would misread.
FORMAT_VERSION = 1

# The fields of each method. Fields of other methods stay None and must not be set.
METHODS = {
    "none": (),
    "inv_sqrt2": ("strength",),
    "constant": ("kappa", "strength"),
    "cs": ("kappa", "reverse", "strength"),
    "ls": ("shared", "reduction", "activation", "gate", "gate_axis", "init", "strength"),
    "learnable": ("strength",),
}
_UNUSED_BY_GATE = {"ie": ("reduction", "activation")}

# The paper does not fix kappa. The gate defaults follow docs/which_method.md; the paper's gates are shared=True,
# init="paper".
_DEFAULTS = {
    "kappa": 0.9,
    "reverse": False,
    "shared": False,
    "reduction": 16,
    "activation": "relu",
    "gate": "se",
    "gate_axis": "auto",
    "init": "identity",
    "strength": 1.0,
}


def _field(name: str, help: str, **details) -> Any:
    help = f"{help} (default: {_DEFAULTS[name]})"
    return option(None, help, **{"flag": f"skip_scaling_{name}", "on_resume": "fixed", **details})


@dataclass(frozen=True, repr=False)
class SkipScalingConfig:
    """
    How the long skip connections of a model are scaled. Skips are numbered as in the paper: i = 1 is the outermost.

    Args:
        method: `"none"`; `"inv_sqrt2"`: k_i = 2**-0.5; `"constant"`: k_i = kappa; `"cs"`: k_i = kappa**(i-1)
            (equation 8); `"ls"`: a small gate predicts k_i from the skip (equation 9); `"learnable"`: one learned
            scalar per skip, which starts at 1.
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
        strength: every factor becomes 1 + strength * (k - 1). 1 by default; 0 turns the scaling off.

    ```python
    >>> SkipScalingConfig("cs", kappa=0.7)
    SkipScalingConfig(method='cs', kappa=0.7, reverse=False, strength=1.0)
    ```
    """

    method: str = option(
        dataclasses.MISSING,
        f"method: one of {', '.join(METHODS)}",
        flag="skip_scaling",
        choices=METHODS,
        metavar="METHOD",
        on_resume="fixed",
    )
    kappa: float | Literal["auto"] | None = _field(
        "kappa", "for cs and constant: in (0, 1], or 'auto', which solves S = 5", flag="kappa", above=0, at_most=1
    )
    reverse: bool | None = _field("reverse", "for cs: k_i = kappa^(N-i+1)")
    shared: bool | None = _field("shared", "for ls: one gate for all skips of the same width")
    reduction: int | None = _field(
        "reduction", "for ls: ratio of a skip's width to its gate's hidden width", at_least=1
    )
    activation: str | None = _field("activation", "for ls: activation of the gates", choices=("relu", "elu", "mish"))
    gate: str | None = _field("gate", "for ls: squeeze-and-excitation or instance enhancement", choices=("se", "ie"))
    gate_axis: str | None = _field(
        "gate_axis", "for ls: axis that a gate scales", choices=("auto", "channels", "tokens")
    )
    init: str | None = _field(
        "init", "for ls: start factors at exactly 1 (identity) or near 0.5 (paper)", choices=("paper", "identity")
    )
    strength: float | None = _field(
        "strength", "every factor becomes 1 + strength (k - 1)", at_least=0, at_most=1, on_resume="same"
    )

    def __post_init__(self):
        check_options(self)
        used = self._used_fields()
        if unused := [name for name in _DEFAULTS if getattr(self, name) is not None and name not in used]:
            name = unused[0]
            user = f"gate {self.gate!r}" if name in METHODS[self.method] else f"method {self.method!r}"
            raise UserError(
                f"{name}={getattr(self, name)!r} is not used by {user}; its fields: {', '.join(used) or 'none'}"
            )
        for name in used:
            value = _DEFAULTS[name] if getattr(self, name) is None else getattr(self, name)
            if name in ("kappa", "strength") and value != "auto":
                value = float(value)
            object.__setattr__(self, name, value)

    def _used_fields(self) -> tuple[str, ...]:
        return tuple(name for name in METHODS[self.method] if name not in _UNUSED_BY_GATE.get(self.gate, ()))

    def resolve(self, num_skips: int, gate_axis: str) -> "SkipScalingConfig":
        """Return the config for a model with `num_skips` skips, with every `"auto"` replaced by its value."""
        if self.method == "cs" and num_skips == 1 and not self.reverse:
            raise UserError("method 'cs' cannot scale a model with one long skip, as k_1 = 1; use 'constant'")
        changes = {}
        if self.kappa == "auto":
            changes["kappa"] = solve_kappa(UPPER_NOISE_RATIO, num_skips, self.method, self.reverse)
        if self.gate_axis == "auto":
            changes["gate_axis"] = gate_axis
        return dataclasses.replace(self, **changes)

    @property
    def has_gates(self) -> bool:
        """Whether the method has learnable parameters."""
        return self.method in ("ls", "learnable")

    def equals_except_strength(self, other: "SkipScalingConfig") -> bool:
        return self.method == other.method and dataclasses.replace(self, strength=other.strength) == other

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a model's config: the format version, the method and its fields."""
        fields = {name: getattr(self, name) for name in self._used_fields()}
        return {"version": FORMAT_VERSION, "method": self.method, **fields}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "SkipScalingConfig":
        """Return the config from an entry that [`to_dict`] wrote, or from some of its fields."""
        fields = {"method": None, **entry}
        version = fields.pop("version", FORMAT_VERSION)
        try:
            accepted = ("method", *_DEFAULTS)
            if unknown := [name for name in fields if name not in accepted]:
                raise UserError(
                    f"unknown skip_scaling field {unknown[0]!r}{did_you_mean(unknown[0], accepted)}; accepted: "
                    f"{', '.join(accepted)}"
                )
            return cls(**fields)
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
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("method", *self._used_fields()))
        return f"SkipScalingConfig({fields})"
