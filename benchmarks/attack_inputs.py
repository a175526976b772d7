"""Pass random configs, flags and arguments. They must work, or end with a `UserError` of one printable line."""

import contextlib
import copy
import functools
import inspect
import io
import json
import math
import random
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attack_commands import COMMANDS, cli_command, to_words
from attack_flips import TARGETS, change_file
from attack_parts import UVIT
from attack_sandbox import Case, Command, Failure, check_message, time_limit
from diffusers import DDIMScheduler, DiffusionPipeline

from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline,
    SkipScalingConfig,
    UserError,
    UViTModel,
    apply_skip_init,
    apply_skip_scaling,
    get_preset,
    load_adapter,
    load_pipeline,
    set_skip_scaling_strength,
)
from scalelong_diffusers.cli.diagnose import DiagnoseConfig
from scalelong_diffusers.cli.evaluate import EvaluateConfig
from scalelong_diffusers.cli.inspect import model_skeleton
from scalelong_diffusers.data import DataConfig, load_training_data
from scalelong_diffusers.evaluation import FeatureStatistics, load_features
from scalelong_diffusers.hub.model_card import CardFacts, make_card
from scalelong_diffusers.image_files import read_image
from scalelong_diffusers.options import nested_config, options_of
from scalelong_diffusers.pipelines.sampling import SampleConfig
from scalelong_diffusers.pipelines.text_encoding import load_text_encoder
from scalelong_diffusers.scaling import METHODS
from scalelong_diffusers.train.precompute_latents import PrecomputeConfig
from scalelong_diffusers.training import RunConfig, TrainingConfig, make_config
from scalelong_diffusers.training.models import load_vae


SECONDS = 20
ESCAPE = "\x1b[31m"
NOTHING = object()
# The large ones are larger than any machine's memory.
NUMBERS = (0, 1, 2, 3, -1, 2**40, 2**64, 10**400, 0.5, 1.5, -0.0, 1e-300, 1e30, -1e30, math.inf, -math.inf, math.nan)
TEXTS = (
    *("", " ", "none", "auto", "0", "-1", "1e30", "inf", "nan", "9" * 5000, f"{ESCAPE}red", "a\nb", "a\rb"),
    *("\u202eabc", "\udcff", "\u00e9" * 300, ".", "..", "../up", "~", "a/b", "a/b/c", "/dev/zero", "{}", "%s"),
)
JSON_VALUES = (*NUMBERS, *TEXTS, None, True, False, [], {}, [1, "a"], {"a": 1}, [[]] * 3)
OBJECTS = (*JSON_VALUES, (), b"a", 1j, object(), np.float32(math.inf), torch.ones(1))
# Large values take long, need much memory or start many processes, which is what was requested.
_COUNTS = re.compile(
    r"(--)?(\w+_steps|num_train_epochs|num_\w*images\w*|num_samples|num_shapes|\w*batch_size|\w+_workers)"
)
RUN_CONFIGS = (*RunConfig.__subclasses__(), *TrainingConfig.__subclasses__())
CONFIGS = (*RUN_CONFIGS, PrecomputeConfig, SampleConfig, EvaluateConfig, DiagnoseConfig, SkipScalingConfig)
_OPTIONS = [(flag, details) for config in CONFIGS for flag, _, details in options_of(config)]
WORDS = sorted({word for flag, details in _OPTIONS for word in (flag, *(details.choices or ()))})


def attack(case: Case):
    """Make one call with random arguments."""
    call = case.random.choices(list(CALLS), CALLS.values())[0]
    case.note(call.__name__)
    try:
        with time_limit(SECONDS):
            call(case)
    except UserError as error:
        check_message(str(error))


def odd_text(generator: random.Random) -> str:
    """Return a number or text that hardly any argument accepts, or that looks almost like an accepted one."""
    kind = generator.randrange(3)
    if kind == 0:
        number = generator.choice(NUMBERS)
        return str(number) if abs(number) != 10**400 else "1" + 400 * "0"  # Python converts no long integers
    return near_miss(generator.choice(WORDS), generator) if kind == 1 else generator.choice(TEXTS)


def near_miss(word: str, generator: random.Random) -> str:
    """Return a word with one letter changed, doubled or lost, or in capitals."""
    place = generator.randrange(len(word))
    letters = [word[place].upper(), "", 2 * word[place], "x", "-"]
    return word[:place] + generator.choice(letters) + word[place + 1 :]


def odd_values(case: Case, names: Iterable[str], values: Sequence[Any] = OBJECTS) -> dict[str, Any]:
    """Return odd values for one to three of the names."""
    names = sorted(names)
    chosen = case.random.sample(names, min(len(names), case.random.randint(1, 3)))
    arguments = {name: case.random.choice((*values, odd_text(case.random))) for name in chosen}
    case.note(describe(arguments))
    return arguments


def odd_arguments(case: Case, function: Callable) -> dict[str, Any]:
    """Return odd values of the right type for some arguments of a function. A wrong type may raise a TypeError."""
    hints = typing.get_type_hints(function)
    values = {name: odd_of_type(hint, case.random) for name, hint in hints.items() if name != "return"}
    possible = {name: value for name, value in values.items() if value is not NOTHING}
    chosen = case.random.sample(sorted(possible), min(len(possible), case.random.randint(1, 3)))
    arguments = {name: possible[name] for name in chosen}
    for name in filter(_COUNTS.fullmatch, arguments):
        arguments[name] = min(arguments[name], 3)
    case.note(describe(arguments))
    return arguments


def odd_of_type(hint: Any, generator: random.Random) -> Any:
    """Return an odd value of a type such as `int | list[str] | None`, or `NOTHING` for types without odd values."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        values = [odd_of_type(part, generator) for part in parts]
        return generator.choice([value for value in values if value is not NOTHING] or [NOTHING])
    if origin is not None and issubclass(origin, Mapping):
        return {odd_text(generator): odd_text(generator)}
    if origin is not None and issubclass(origin, Iterable):
        element = odd_of_type(parts[0], generator) if parts else NOTHING
        return NOTHING if element is NOTHING else [element] * generator.randrange(4)
    numbers = {int: [n for n in NUMBERS if isinstance(n, int)], float: NUMBERS, bool: (True, False)}
    if hint is str:
        return odd_text(generator)
    return generator.choice(numbers[hint]) if hint in numbers else NOTHING


def describe(arguments: dict[str, Any]) -> str:
    """Return a short description. Python refuses to print very long integers."""
    return ", ".join(f"{name}={shorten(value)}" for name, value in arguments.items())


def shorten(value: Any) -> str:
    try:
        return ascii(value)[:80]
    except ValueError:
        return "10**400"


# Command lines

_COMMANDS = {
    **{name: (attacked.main, attacked.flags) for name, attacked in COMMANDS.items()},
    "inspect": (cli_command("inspect"), {"": "{parts}/model"}),
    "kappa": (cli_command("kappa"), {"skips": 6}),
    "presets": (cli_command("presets"), {"": "cifar10-uvit-s-2"}),
    "convert": (cli_command("convert"), {"": "{parts}/reference_checkpoint", " ": "{output_dir}"}),
    "ema": (cli_command("ema"), {"": "{parts}/unconditional", "sigma_rel": 0.1, "output_dir": "{output_dir}"}),
    "paper": (cli_command("paper"), {"": "lemma3.2", "quick": True, "output_dir": "{output_dir}"}),
}
_SHORT = {"max_train_steps": 2, "lr_warmup_steps": 1, "validation_steps": 1, "sample_steps": 2}


def pass_flags(case: Case):
    """Run a command with odd values of the flags that its `--help` lists."""
    name = case.random.choice(list(_COMMANDS))
    main, flags = _COMMANDS[name]
    flags = {**flags, **(_SHORT if "max_train_steps" in flags else {})}
    if name in COMMANDS:
        flags["output_dir"] = "{output_dir}"
    words = to_words(flags, parts=case.parts, output_dir=case.folder / "out")
    if "" in flags and case.random.random() < 0.2:
        words[0] = odd_text(case.random)
    odd = [word for _ in range(case.random.randint(1, 3)) for word in odd_flag(case.random, flags_in_help(name))]
    case.note(f"{name} {words[:1]!a:.100} {odd!a:.300}")
    process = Command(main, [*words, *odd], case.folder / "output")
    if process.finish() not in (0, 1, 2):
        raise Failure(f"exit code {process.code}: {process.text[-600:]!r}")
    if process.code:
        process.message()
    if ESCAPE in process.text:
        raise Failure("an escape sequence reaches the terminal")


def odd_flag(generator: random.Random, flags: list[str]) -> list[str]:
    """Return a flag with an odd value, an almost right flag, or a flag without a value."""
    flag, value, kind = generator.choice(flags), odd_text(generator), generator.random()
    if _COUNTS.fullmatch(flag) and value.isdecimal():
        value = value[:1]
    return [near_miss(flag, generator), value] if kind < 0.1 else [flag] if kind < 0.2 else [f"{flag}={value}"]


@functools.cache
def flags_in_help(name: str) -> list[str]:
    """Return all flags of a command, except for the slow `--compile`."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
        for flag in ("--help", "--help-all"):  # the second is only of scripts
            with contextlib.suppress(SystemExit):
                _COMMANDS[name][0]([flag])
    return sorted({*re.findall(r"--[a-z][a-z0-9_-]+", shown.getvalue())} - {"--compile", "--no-compile"})


# Configs


def make_run_config(case: Case):
    """Make the config of a run with odd values by flag."""
    config = case.random.choice(RUN_CONFIGS)
    names = [flag for flag, _, _ in options_of(config)]
    values = odd_values(case, [*names, near_miss(case.random.choice(names), case.random)])
    make_config(config, **{**_required(config), **values})


def make_single_config(case: Case):
    """Make one of all configs with odd values by field."""
    config = case.random.choice(_config_classes())
    config(**{**_required(config), **odd_values(case, [field.name for field in fields(config)])})


def _required(config: type) -> dict[str, str]:
    return {field.name: "a" for field in fields(config) if field.default is field.default_factory is MISSING}


@functools.cache
def _config_classes() -> list[type]:
    """Return all config classes and the classes of their fields."""
    nested = {nested_config(config, field) for config in CONFIGS for field in fields(config)}
    return sorted({*CONFIGS, *nested} - {None}, key=lambda config: config.__name__)


def parse_scaling(case: Case):
    """Parse an odd entry of a model's config."""
    entry = {"method": case.random.choice(list(METHODS)), **odd_values(case, _SCALING_FIELDS, JSON_VALUES)}
    SkipScalingConfig.parse(entry)


_SCALING_FIELDS = ["version", "other", *(field.name for field in fields(SkipScalingConfig))]


def change_json(case: Case):
    """Change an entry of a JSON file and read the file."""
    targets = [target for target in TARGETS if any((case.parts / target.source).glob("**/*.json"))]
    target = case.random.choice(targets)
    change_file(case, replace(target, files=("**/*.json",)), _with_odd_entry)


def _with_odd_entry(content: bytes, generator: random.Random) -> tuple[bytes, str]:
    tree = json.loads(content)
    places = list(_places(tree))
    node, key = generator.choice(places) if places else ([tree], 0)
    value = generator.choice(JSON_VALUES)
    if isinstance(node, dict) and generator.random() < 0.2:
        node[near_miss(str(key), generator)] = node.pop(key)
        how = f"misspelled {key!r:.50}"
    else:
        node[key] = value
        how = f"{key!r:.50} = {shorten(value)}"
    return json.dumps(tree).encode(), how


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all (container, key) of a JSON value."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


# Functions


def build_model(case: Case):
    """Build a U-ViT with odd fields and run it."""
    names = set(inspect.signature(UViTModel.__init__).parameters) - {"self"}
    model = UViTModel(**{**UVIT, **odd_values(case, names, JSON_VALUES)})
    model(torch.zeros(1, model.config.in_channels, 8, 8), 0)


def scale_model(case: Case):
    """Scale a model, set its strength and start its skip layers with odd arguments."""
    model = copy.deepcopy(_model())
    scaling = {"method": case.random.choice(list(METHODS)), **odd_values(case, _SCALING_FIELDS, JSON_VALUES)}
    strength, start = case.random.choice(NUMBERS), odd_text(case.random)
    calls = ((apply_skip_scaling, scaling), (set_skip_scaling_strength, strength), (apply_skip_init, start))
    function, argument = case.random.choice(calls)
    case.note(function.__name__)
    function(model, argument)


def call_pipeline(case: Case):
    """Sample with odd arguments."""
    conditions = {"unconditional": {}, "class_conditional": {"class_labels": 0}, "text_to_image": {"prompt": "a"}}
    name = case.random.choice(list(conditions))
    pipe = _pipeline(case.parts / name)
    pipe(**{**conditions[name], "num_inference_steps": 2, **odd_arguments(case, type(pipe).__call__)})


def make_pipeline(case: Case):
    """Make a pipeline with odd arguments."""
    arguments = odd_arguments(case, ScaleLongClassConditionalPipeline.__init__)
    ScaleLongClassConditionalPipeline(_model_of_classes(), DDIMScheduler(), **arguments)(0, num_inference_steps=1)


def load_something(case: Case):
    """Load an odd source."""
    functions = (
        *(load_pipeline, load_features, load_text_encoder, FeatureStatistics.load, get_preset, model_skeleton),
        lambda source: load_adapter(_pipeline(case.parts / "fine_tuning"), source),
        lambda source: load_vae(source, torch.device("cpu")),
        lambda source: read_image(source, "it"),
        lambda source: load_training_data(
            DataConfig(train_data_dir=source), channels=3, needs_labels=False, needs_captions=False, seed=0
        ),
    )
    source = case.random.choice(TEXTS)
    number = case.random.randrange(len(functions))
    case.note(f"function {number}, {source!a:.100}")
    functions[number](source)


def write_card(case: Case):
    """Write a model card with odd facts."""
    facts = CardFacts(**odd_arguments(case, CardFacts.__init__))
    previous = case.random.choice((None, *TEXTS))
    case.note(f"{previous=!a:.80}")
    make_card(_model(), case.random.choice(("a/b", *TEXTS)), facts, previous)


@functools.cache
def _model() -> UViTModel:
    return UViTModel(**UVIT, skip_scaling="cs")


@functools.cache
def _model_of_classes() -> UViTModel:
    return UViTModel(**UVIT, num_class_embeds=3)


@functools.cache
def _pipeline(folder: Path) -> DiffusionPipeline:
    pipe = load_pipeline(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


# How often each kind of call is made. Commands take a hundred times longer than the others.
CALLS = {pass_flags: 3, make_run_config: 3, make_single_config: 3, parse_scaling: 1, change_json: 3, build_model: 3,
         scale_model: 2, call_pipeline: 3, make_pipeline: 1, load_something: 1, write_card: 1}  # fmt: skip
