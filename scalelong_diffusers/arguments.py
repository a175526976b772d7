"""Command-line flags that the commands and the training scripts share."""

import argparse
import dataclasses
import sys
from typing import NoReturn

from scalelong_diffusers.messages import near_miss
from scalelong_diffusers.scaling import METHODS, SkipScalingConfig


class ArgumentParser(argparse.ArgumentParser):
    """argparse with errors of one line, which name the flag that was probably meant."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None):
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown argument {unknown[0]!r}{near_miss(unknown[0].split('=')[0], self._known_flags())}")
        return arguments

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} ({self.prog} --help lists what is accepted)", file=sys.stderr)
        sys.exit(2)

    def _known_flags(self) -> list[str]:
        parsers = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers.extend(action.choices.values())
        return [flag for parser in parsers for action in parser._actions for flag in action.option_strings]


def add_skip_scaling_arguments(parser: argparse.ArgumentParser):
    """`--skip_scaling METHOD`, `--kappa`, and `--skip_scaling_<field>` for every other field of the config."""
    group = parser.add_argument_group("skip scaling")
    group.add_argument(*_spellings("skip_scaling"), metavar="METHOD", help=f"one of {', '.join(METHODS)}")
    group.add_argument("--kappa", type=_number_or_auto, help="of constant and cs: in (0, 1], or 'auto'")
    for field in dataclasses.fields(SkipScalingConfig)[2:]:
        flags = _spellings(f"skip_scaling_{field.name}")
        if "bool" in str(field.type):
            group.add_argument(*flags, action=argparse.BooleanOptionalAction)
        else:
            kind = int if "int" in str(field.type) else float if "float" in str(field.type) else str
            group.add_argument(*flags, type=kind, help=argparse.SUPPRESS)


def skip_scaling_from_arguments(arguments: argparse.Namespace) -> SkipScalingConfig | None:
    """The config that the flags ask for, None where they name no method."""
    names = {"kappa": "kappa"} | {f.name: f"skip_scaling_{f.name}" for f in dataclasses.fields(SkipScalingConfig)[2:]}
    fields = {field: value for field, name in names.items() if (value := getattr(arguments, name)) is not None}
    if arguments.skip_scaling is None:
        if fields:
            given = names[next(iter(fields))]
            raise ValueError(f"--{given} needs --skip_scaling METHOD; accepted: {', '.join(METHODS)}")
        return None
    return SkipScalingConfig(arguments.skip_scaling, **fields)


def _spellings(name: str) -> list[str]:
    return [f"--{name}", f"--{name.replace('_', '-')}"]


def _number_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)
