"""Options: one field says the default, the help, the bounds, and what happens on resume."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import pytest

from scalelong_diffusers.errors import UserError, did_you_mean
from scalelong_diffusers.options import (
    ArgumentParser,
    Option,
    add_options,
    as_flags,
    build_config,
    check_arguments,
    check_options,
    flat_options,
    option,
    options_of,
    parse_options,
)


@dataclass(frozen=True)
class Inner:
    rate: float = option(0.5, "a rate", above=0, at_most=1)
    steps: int | None = option(None, "steps", at_least=1, on_resume="free")

    def __post_init__(self):
        check_options(self)


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=lambda: Inner(rate=0.25))
    mode: str = option("fast", "100 % of a mode", choices=("fast", "slow"), flag="outer_mode")
    flip: bool = option(False, "flip")
    words: tuple[str, ...] | None = option(None, "words")

    def __post_init__(self):
        check_options(self)


def parse(*words, config_class=Outer):
    parser = ArgumentParser(prog="prog")
    add_options(parser, Outer, "outer")
    add_options(parser, Inner, "inner", defaults=Inner(rate=0.25))
    return parse_options(parser, config_class, words)


def test_defaults_come_from_the_fields():
    assert parse() == Outer() == build_config(Outer, {})
    assert Outer().inner.rate == 0.25  # the default of the outer field, not of the inner class


def test_flags_accept_hyphens_and_underscores():
    expected = Outer(Inner(rate=1.0, steps=3), "slow", True, ("a", "--b-c"[2:]))
    assert parse("--outer-mode", "slow", "--rate=1", "--steps", "3", "--flip", "--words", "a", "b-c") == expected
    assert parse("--outer_mode=slow", "--rate=1", "--steps=3", "--flip", "--words", "a", "b-c") == expected
    assert parse("--no-flip") == Outer()


def test_flat_options_rebuild_the_config():
    config = parse("--outer_mode", "slow", "--steps", "7")
    flat = flat_options(config)
    assert flat == {"rate": 0.25, "steps": 7, "outer_mode": "slow", "flip": False, "words": None}
    assert build_config(Outer, flat) == config
    assert {flag: details.on_resume for flag, _, details in options_of(Outer)}["steps"] == "free"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 0}, "rate must be a number, above 0 and at most 1, got 0"),
        ({"rate": math.nan}, "rate must be a number, above 0 and at most 1, got nan"),
        ({"rate": True}, "rate must be a number, above 0 and at most 1, got True"),
        ({"steps": 0}, "steps must be an integer, at least 1, got 0"),
        ({"steps": 1.5}, "steps must be an integer, at least 1, got 1.5"),
    ],
)
def test_rejects_values_out_of_bounds(changes, message):
    with pytest.raises(UserError) as error:
        Inner(**changes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "2"], "prog: --rate must be a number, above 0 and at most 1, got 2.0"),
        (["--outer_mode", "slwo"], "prog: --outer_mode must be one of fast, slow, got 'slwo' (did you mean 'slow'?)"),
        (["--stesp", "2"], "prog: unknown argument '--stesp' (did you mean '--steps'?)"),
        (["--steps", "two"], "prog: argument --steps: invalid int value: 'two'"),
    ],
)
def test_command_line_errors_are_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as exit:
        parse(*words)
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_choices_suggest_the_nearest():
    with pytest.raises(UserError, match=r"outer_mode must be one of fast, slow, got 'fsat' \(did you mean 'fast'\?\)"):
        dataclasses.replace(Outer(), mode="fsat")


def test_help_shows_defaults_and_escapes_percent_signs(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "100 % of a mode (default: fast)" in text
    assert "a rate (default: 0.25)" in text
    assert "flip (default: off)" in text


def test_messages_name_flags():
    assert as_flags("rate must be small", ["rate"]) == "--rate must be small"
    assert as_flags("something else", ["rate"]) == "something else"
    assert did_you_mean("kapa", ["kappa"]) == " (did you mean 'kappa'?)"
    assert did_you_mean("xyz", ["kappa"]) == ""


def test_converts_numpy_numbers_and_paths():
    config = Outer(inner=Inner(rate=np.float32(0.5), steps=np.int64(3)), words=("a",))
    assert json.loads(json.dumps(flat_options(config)))["steps"] == 3
    assert type(config.inner.steps) is int


def test_rejects_another_type_for_a_nested_config():
    with pytest.raises(UserError, match=r"inner must be a Inner, got \{'rate': 1\}"):
        Outer(inner={"rate": 1})


@check_arguments
def draw(
    size: Annotated[int | tuple[int, int], Option(at_least=1, at_most=1_000_000)],
    rate: Annotated[float | Literal["auto"] | None, Option(above=0, at_most=1)] = None,
    times: Annotated[list[float] | None, Option(at_least=0)] = None,
    flip: Annotated[bool, Option()] = False,
    anything=None,
):
    return size, rate


def test_checks_arguments_of_functions():
    assert draw(3, anything="x") == (3, None)
    assert draw((3, 4), rate="auto", times=[1, 0.5], flip=True) == ((3, 4), "auto")
    size = "size must be an integer, at least 1 and at most 1,000,000 or a pair of them, got "
    for arguments, message in (
        ({"size": 0}, f"{size}0"),
        ({"size": (3, 0)}, f"{size}(3, 0)"),
        ({"size": (3,)}, f"{size}(3,)"),
        ({"size": "3"}, f"{size}'3'"),
        ({"size": 3, "rate": "aut"}, "rate must be a number, above 0 and at most 1 or 'auto', got 'aut'"),
        ({"size": 3, "times": [1, -1]}, "times must be a list of numbers, at least 0, got [1, -1]"),
        ({"size": 3, "times": 1}, "times must be a list of numbers, at least 0, got 1"),
        ({"size": 3, "flip": "no"}, "flip must be True or False, got 'no'"),
    ):
        with pytest.raises(UserError) as error:
            draw(**arguments)
        assert str(error.value) == message
    with pytest.raises(TypeError, match="unexpected keyword argument 'sise'"):
        draw(sise=3)


def test_tuples_of_integers():
    @dataclass(frozen=True)
    class Steps:
        steps: tuple[int, ...] = option((1, 11), "steps", at_least=0, at_most=99)

        def __post_init__(self):
            check_options(self)

    parser = ArgumentParser()
    add_options(parser, Steps)
    assert parse_options(parser, Steps, ["--steps", "3", "50"]).steps == (3, 50)
    assert parse_options(parser, Steps, []).steps == (1, 11)
    assert "(default: 1 11)" in parser.format_help()
    for wrong in ((1, 100), (1.5,), 3, ("1",)):
        with pytest.raises(UserError, match="steps must be a list of integers, at least 0 and at most 99, got"):
            Steps(wrong)
