"""Command-line flags that the commands and the training scripts share."""

import argparse
import sys
from typing import Any, NoReturn

from scalelong_diffusers.errors import did_you_mean
from scalelong_diffusers.scaling import METHODS


class ArgumentParser(argparse.ArgumentParser):
    """argparse with errors of one line, which name the flag that was probably meant."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None):
        arguments, unknown = self.parse_known_args(args, namespace)
        self.refuse_unknown(unknown)
        return arguments

    def refuse_unknown(self, unknown: list[str]):
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            self.error(f"unknown argument {unknown[0]!r}{did_you_mean(unknown[0].split('=')[0], flags)}")

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} ({self.prog} --help lists what is accepted)", file=sys.stderr)
        sys.exit(2)


class CommandParser(ArgumentParser):
    """Of one of several commands, which knows best what was meant by a flag that it does not know."""

    def parse_known_args(self, args=None, namespace=None):
        arguments, unknown = super().parse_known_args(args, namespace)
        self.refuse_unknown(unknown)
        return arguments, unknown


_FIELD_FLAGS = {
    "reverse": (bool, "of cs: k_i = kappa^(N-i+1)"),
    "shared": (bool, "of ls: one gate for all skips of a width, or one for each skip"),
    "reduction": (int, "of ls: the gate's hidden width is the skip's divided by this"),
    "activation": (str, "of ls: relu, elu or mish"),
    "gate": (str, "of ls: se or ie"),
    "gate_axis": (str, "of ls: auto, channels or tokens"),
    "init": (str, "of ls: paper or identity"),
    "strength": (float, "in [0, 1]: every factor becomes 1 + strength (k - 1)"),
}


def add_skip_scaling_arguments(parser: argparse.ArgumentParser):
    """`--skip_scaling METHOD`, `--kappa`, and `--skip_scaling_<field>` for every other field of the config."""
    group = parser.add_argument_group("skip scaling")
    group.add_argument(*_spellings("skip_scaling"), metavar="METHOD", help=f"one of {', '.join(METHODS)}")
    group.add_argument("--kappa", type=_number_or_auto, help="of constant and cs: in (0, 1], or 'auto'")
    for name, (kind, explanation) in _FIELD_FLAGS.items():
        flags = _spellings(f"skip_scaling_{name}")
        if kind is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=explanation)
        else:
            group.add_argument(*flags, type=kind, metavar=kind.__name__.upper(), help=explanation)


def skip_scaling_fields(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """What the flags say of the scaling, as the dict that a `SkipScalingConfig` is made of; None without a method."""
    names = {"kappa": "kappa"} | {name: f"skip_scaling_{name}" for name in _FIELD_FLAGS}
    fields = {field: value for field, name in names.items() if (value := getattr(arguments, name)) is not None}
    if arguments.skip_scaling is None:
        if fields:
            given = names[next(iter(fields))]
            raise ValueError(f"--{given} needs --skip_scaling METHOD; accepted: {', '.join(METHODS)}")
        return None
    return {"method": arguments.skip_scaling, **fields}


def _spellings(name: str) -> list[str]:
    return [f"--{name}", f"--{name.replace('_', '-')}"]


def _number_or_auto(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be 'auto' or a number in (0, 1], got {text!r}") from None
