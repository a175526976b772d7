"""
Config dataclasses whose fields describe options completely, and the flags derived from them.

```python
@dataclass(frozen=True)
class NoiseConfig:
    snr_gamma: float | None = option(None, "min-SNR weighting of the loss; 5 is usual", above=0)

    def __post_init__(self):
        check_options(self)


parser = ArgumentParser()
add_options(parser, NoiseConfig, "noise")
config = build_config(NoiseConfig, vars(parser.parse_args(["--snr_gamma", "5"])))
```
"""

import argparse
import dataclasses
import functools
import inspect
import math
import numbers
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import numpy as np
import yaml

from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.terminal import print_lines


Config = TypeVar("Config")
Function = TypeVar("Function", bound=Callable)
OnResume = Literal["same", "free", "fixed"]


@dataclass(frozen=True)
class Option:
    """
    Metadata of a config field or a function's argument, in addition to its name, type and default.

    Args:
        help: the text in `--help`.
        flag: the name of the flag and of the entry in `settings.json`; the field's name if empty.
        at_least, above, at_most, below: bounds of a number. All numbers must be finite.
        choices: accepted values.
        metavar: placeholder in `--help`.
        common: whether `--help` shows the flag. `--help-all` shows all flags.
        on_resume: `"same"`: a resumed run must have the same value unless `--allow_changed_settings` is given;
            `"free"`: the value may change; `"fixed"`: the value can never change, because the weights depend on it.
    """

    help: str = ""
    flag: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    common: bool = False
    on_resume: OnResume = "same"

    @property
    def bounds(self) -> str:
        """The accepted numbers in words."""
        names = ("at_least", "above", "at_most", "below")
        given = {name.replace("_", " "): getattr(self, name) for name in names if getattr(self, name) is not None}
        return " and ".join(f"{name} {number:,}" for name, number in given.items()) or "finite"

    def allows(self, number: float) -> bool:
        return (
            -math.inf < number < math.inf
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )


def option(default: Any, help: str, **details) -> Any:
    """Return a dataclass field with an [`Option`]. Pass `dataclasses.MISSING` for a required one."""
    if "choices" in details:
        details["choices"] = tuple(details["choices"])
    return dataclasses.field(default=default, metadata={"option": Option(help, **details)})


def options_of(config_class: type) -> Iterator[tuple[str, dataclasses.Field, Option]]:
    """Yield (flag, field, option) for each option of a config class and of the configs nested in it."""
    for field in dataclasses.fields(config_class):
        if nested := nested_config(config_class, field):
            yield from options_of(nested)
        elif details := field.metadata.get("option"):
            yield _flag_of(field), field, details


def check_options(config: Any):
    """Raise a `UserError` if a field of the config has a wrong type or is out of bounds."""
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        value, nested = getattr(config, field.name), nested_config(type(config), field)
        may_be_none = type(None) in _kinds(hints[field.name])
        if nested is not None and not isinstance(value, nested) and not (value is None and may_be_none):
            raise UserError(f"{field.name} must be a {nested.__name__}, got {value!r}")
        if isinstance(value, np.generic):  # JSON cannot store it
            object.__setattr__(config, field.name, value.item())
        if isinstance(value, os.PathLike):
            object.__setattr__(config, field.name, os.fspath(value))
    for field, details in _own_options(type(config)):
        _check_value(_flag_of(field), getattr(config, field.name), hints[field.name], details)


def check_arguments(function: Function) -> Function:
    """
    Decorate a function so that it raises a `UserError` for wrong values of arguments with an [`Option`].

    ```python
    @check_arguments
    def scale(image: torch.Tensor, factor: Annotated[float, Option(above=0, at_most=1)] = 1): ...
    ```
    """
    signature = inspect.signature(function)
    hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    checked = {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is Annotated}

    @functools.wraps(function)
    def call(*args, **kwargs):
        given = signature.bind_partial(*args, **kwargs).arguments
        for name, (hint, details) in checked.items():
            if name in given:
                _check_value(name, given[name], hint, details)
        return function(*args, **kwargs)

    return call


def _check_value(name: str, value: Any, hint: Any, details: Option):
    if value is None and type(None) in _kinds(hint):
        return
    if details.choices is not None:
        if value not in details.choices:
            accepted = ", ".join(details.choices)
            raise UserError(f"{name} must be one of {accepted}, got {value!r}{did_you_mean(value, details.choices)}")
    # An empty text is usually an unset variable of a shell script, and as a path it would be the current folder.
    elif (isinstance(value, str) and not value) or not _accepts(value, hint, details):
        raise UserError(f"{name} must be {_expected(hint, details)}, got {value!r}")


def _accepts(value: Any, hint: Any, details: Option) -> bool:
    """Return whether a value has the type of a hint, and its numbers are in bounds."""
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(_accepts(value, part, details) for part in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind in (tuple, list):
        if not isinstance(value, tuple | list):
            return False
        parts = parts if kind is tuple and ... not in parts else parts[:1] * len(value)
        return len(value) == len(parts) and all(_accepts(entry, part, details) for entry, part in zip(value, parts))
    if kind in (float, int):
        number = numbers.Real if kind is float else numbers.Integral
        return isinstance(value, number) and not isinstance(value, bool) and details.allows(value)
    return isinstance(value, kind)


def _expected(hint: Any, details: Option) -> str:
    kinds = _kinds(hint)
    literals = "".join(f" or {literal!r}" for literal in _literals(hint))
    if bool in kinds:
        return "True or False"
    if kinds & {float, int}:
        number = "a number" if float in kinds else "an integer"
        return f"{number}, {details.bounds}{' or a pair of them' if tuple in kinds else ''}{literals}"
    if list in kinds or int in _entry_kinds(hint):
        return f"a list of {'numbers' if list in kinds else 'integers'}, {details.bounds}"
    return "a list of strings" if tuple in kinds else "a string that is not empty"


@functools.lru_cache  # a config is also checked in each step of a warm-up
def _hints(config_class: type) -> dict[str, Any]:
    return typing.get_type_hints(config_class)


def _kinds(hint: Any) -> set[Any]:
    """Return the types of a hint such as `float | None` or `tuple[str, ...]`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*map(_kinds, typing.get_args(hint)))
    return {typing.get_origin(hint) or hint}


def _entry_kinds(hint: Any) -> set[Any]:
    """Return the types of the entries of a tuple, and nothing for other hints."""
    return set().union(*map(_kinds, typing.get_args(hint))) if typing.get_origin(hint) is tuple else set()


def _literals(hint: Any) -> tuple[str, ...]:
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else [hint]
    return tuple(word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part))


def nested_config(config_class: type, field: dataclasses.Field) -> type | None:
    """Return the config class of a field, or None for a field that is not a config."""
    kinds = _kinds(_hints(config_class)[field.name])
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)


def build_config(config_class: type[Config], values: Mapping[str, Any], **nested_configs) -> Config:
    """
    Build a config, and the configs nested in it, from values by flag. Flags of other configs are ignored.

    `nested_configs` are used unchanged. Other nested configs start from the default of their field.
    """
    fields = dict(nested_configs)
    for field in dataclasses.fields(config_class):
        nested = nested_config(config_class, field)
        if nested is not None and field.name not in fields:
            fields[field.name] = dataclasses.replace(_default_of(field), **_given_fields(nested, values))
    return config_class(**fields, **_given_fields(config_class, values))


def _given_fields(config_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are set, by field, without nested configs."""
    given = {}
    for field in dataclasses.fields(config_class):
        flag = _flag_of(field)
        if flag in values and nested_config(config_class, field) is None:
            value = values[flag]
            given[field.name] = tuple(value) if isinstance(value, list) else value
    return given


def _own_options(config_class: type) -> list[tuple[dataclasses.Field, Option]]:
    fields = dataclasses.fields(config_class)
    return [(field, field.metadata["option"]) for field in fields if "option" in field.metadata]


def _flag_of(field: dataclasses.Field) -> str:
    details = field.metadata.get("option")
    return field.name if details is None else details.flag or field.name


def _default_of(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def flat_options(config: Any) -> dict[str, Any]:
    """Return all values of a config and of the configs nested in it, by flag."""
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            values |= flat_options(value)
        elif "option" in field.metadata:
            values[_flag_of(field)] = value
    return values


class ArgumentParser(argparse.ArgumentParser):
    """
    An argparse parser with one-line errors that suggest similar flags.

    Flags can be spelled with hyphens or underscores.

    Args:
        common: the flags of a long list that `--help` shows; `--help-all` shows all. Such a parser also takes
            `--config FILE`.
    """

    def __init__(self, *args, common: Collection[str] | None = None, **kwargs):
        # A description of several lines, such as the docstring of a script, keeps its lines.
        keeps_lines = "\n" in (kwargs.get("description") or "")
        formatter = argparse.RawDescriptionHelpFormatter if keeps_lines else argparse.HelpFormatter
        super().__init__(*args, allow_abbrev=False, formatter_class=formatter, add_help=common is None, **kwargs)
        self.common = common
        if common is not None:
            hidden = {"nargs": 0, "default": argparse.SUPPRESS}
            self.add_argument("-h", "--help", action=_Help, **hidden, help="show the common flags and exit")
            self.add_argument("--help-all", action=_Help, **hidden, help="show all flags and exit")
            self.add_argument(
                "--config", metavar="FILE", default=argparse.SUPPRESS,
                help="YAML file with values by flag, such as 'learning_rate: 1e-4'; flags override it",
            )  # fmt: skip

    def parse_known_args(self, args=None, namespace=None):
        words = [_with_underscores(word) for word in (sys.argv[1:] if args is None else args)]
        if self.common is not None:
            words = [*self._configured_words(words), *words]
        arguments, unknown = super().parse_known_args(words, namespace)
        vars(arguments).pop("config", None)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            flag = unknown[0].split("=")[0]  # without its value, which may be a secret
            self.error(f"unknown argument {flag!r}{did_you_mean(flag, flags)}")
        return arguments, unknown

    def _configured_words(self, words: list[str]) -> list[str]:
        """Return the content of the `--config` file as flags. The command line comes after it and overrides it."""
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config", nargs="?")  # without a value, the main parser reports it
        file = finder.parse_known_args(words)[0].config
        try:
            return [] if file is None else _words_of_file(file, self._option_string_actions)
        except UserError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        print_lines(f"{self.prog}: {message} ({self.prog} --help lists what is accepted)", file=sys.stderr)
        sys.exit(2)


_ALWAYS_SHOWN = ("help", "help_all", "config")
# How YAML spells an entry without a value.
_NO_VALUE = ("", "~", "null", "Null", "NULL")


class _Help(argparse.Action):
    """Show the common flags, or all of them."""

    def __call__(self, parser, namespace, values, option_string=None):
        for action in parser._actions:
            if self.dest == "help" and action.dest not in (*_ALWAYS_SHOWN, *parser.common):
                action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


def _words_of_file(file: str, actions: Mapping[str, argparse.Action]) -> list[str]:
    """Return the entries of a YAML file as flags."""
    if not os.path.isfile(file):
        raise UserError(f"--config {file} is not a file")
    try:
        with open(file, encoding="utf-8") as opened:
            entries = yaml.load(opened, _TextLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"--config {file} cannot be read: {error}") from error
    if not isinstance(entries, dict):
        raise UserError(f"--config {file} must have lines such as 'learning_rate: 1e-4'")
    by_name = {action.dest: action for action in actions.values() if action.dest not in _ALWAYS_SHOWN}
    words = []
    for name, value in entries.items():
        if name not in by_name:
            raise UserError(f"--config {file}: unknown setting {name!r}{did_you_mean(name, by_name)}")
        words += _words_of_entry(file, name, value, by_name[name])
    return words


def _words_of_entry(file: str, name: str, value: Any, action: argparse.Action) -> list[str]:
    """Return the flag and the values of an entry. An entry without a value sets nothing."""
    if value in _NO_VALUE:
        return []
    if isinstance(action, argparse.BooleanOptionalAction):
        if value not in ("true", "false"):
            raise UserError(f"--config {file}: {name} must be true or false, got {value!r}")
        return [f"--{name}" if value == "true" else f"--no-{name}"]
    values = value if isinstance(value, list) and action.nargs == "+" else [value]
    if not values or not all(isinstance(entry, str) for entry in values):
        accepted = "a text or a list of texts" if action.nargs == "+" else "one value"
        raise UserError(f"--config {file}: {name} must be {accepted}, got {value!r}")
    return [f"--{name}", *values] if action.nargs == "+" else [f"--{name}={value}"]


class _TextLoader(yaml.BaseLoader):
    """A loader that leaves each value a text, as on the command line. YAML itself would take `1e-4` for a text."""


def _with_underscores(word: str) -> str:
    if word in ("--help-all", "--help_all"):
        return "--help-all"
    if not word.startswith("--"):
        return word
    flag, equals, value = word[2:].partition("=")
    negation = "no-" if flag.startswith("no-") else ""  # as argparse spells the negation of a switch
    return f"--{negation}{flag.removeprefix(negation).replace('-', '_')}{equals}{value}"


def add_options(
    parser: argparse.ArgumentParser,
    config_class: type,
    title: str | None = None,
    description: str | None = None,
    without: Collection[str] = (),
    optional: bool = False,
    defaults: Any = None,
):
    """
    Add a flag for each option of a config class.

    Args:
        without: flags to leave out.
        optional: require none of the flags.
        defaults: a config whose values are shown as defaults, instead of the defaults of the class.

    Parsing leaves out flags that were not given, so that `build_config(config_class, vars(arguments))` uses the
    defaults of the fields.
    """
    group = parser if title is None else parser.add_argument_group(title, description)
    hints = _hints(config_class)
    for field, details in _own_options(config_class):
        flag = _flag_of(field)
        if flag not in without:
            default = _default_of(field) if defaults is None else getattr(defaults, field.name)
            is_required = default is dataclasses.MISSING and not optional
            _add_flag(group, flag, default, is_required, hints[field.name], details)


def _add_flag(group, flag: str, default: Any, is_required: bool, hint: Any, details: Option):
    kinds = _kinds(hint)
    settings: dict[str, Any] = {
        "default": argparse.SUPPRESS,
        "help": _help(default, details),
        "required": is_required,
    }
    if bool in kinds:
        settings["action"] = argparse.BooleanOptionalAction
    else:
        # `check_options` rejects other choices and suggests the nearest one.
        shown = "{" + ",".join(details.choices) + "}" if details.choices else _metavar(flag, kinds)
        settings["metavar"] = details.metavar or shown
        settings["type"] = _parser_of(hint)
        if tuple in kinds:
            settings["nargs"] = "+"
    group.add_argument(f"--{flag}", **settings)


def _metavar(flag: str, kinds: set[Any]) -> str:
    if float in kinds:
        return "X"
    return "N" if int in kinds else flag.split("_")[-1].upper()


def _help(default: Any, details: Option) -> str:
    if default is None or default is dataclasses.MISSING or default == ():
        return details.help.replace("%", "%%")
    shown = ("on" if default else "off") if isinstance(default, bool) else default
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else shown
    return f"{details.help} (default: {shown})".replace("%", "%%")


def _parser_of(hint: Any):
    kinds, literals = _kinds(hint) | _entry_kinds(hint), _literals(hint)
    number = float if float in kinds else int if int in kinds else None
    if number is None:
        return str

    def parse(text: str) -> float | str:
        return text if text in literals else number(text)

    parse.__name__ = number.__name__  # argparse shows it: "invalid float value"
    return parse


def parse_options(parser: ArgumentParser, config_class: type[Config], argv: Sequence[str] | None = None) -> Config:
    """Parse flags into a config. Invalid values end the program with one line and exit code 2."""
    arguments = vars(parser.parse_args(argv))
    try:
        return build_config(config_class, arguments)
    except UserError as error:
        parser.error(as_flags(str(error), [flag for flag, _, _ in options_of(config_class)]))


def as_flags(message: str, flags: Collection[str]) -> str:
    """Add `--` to a message that begins with the name of a flag."""
    return f"--{message}" if message.split()[0].split("=")[0] in flags else message
