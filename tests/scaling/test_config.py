"""The config validates itself, converts to and from dicts and flags, and names what is accepted."""

import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong_diffusers import SkipScalingConfig, UserError
from scalelong_diffusers.options import ArgumentParser, add_options, options_of
from scalelong_diffusers.scaling import METHODS
from scalelong_diffusers.scaling.config import FORMAT_VERSION


FIELDS = {
    "kappa": st.floats(0, 1, exclude_min=True) | st.just("auto"),
    "reverse": st.booleans(),
    "shared": st.booleans(),
    "reduction": st.integers(1, 64),
    "activation": st.sampled_from(["relu", "elu", "mish"]),
    "gate": st.just("se"),
    "gate_axis": st.sampled_from(["auto", "channels", "tokens"]),
    "init": st.sampled_from(["paper", "identity"]),
    "balance": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "strength": st.floats(0, 1),
}


def fields_of(method):
    return {*METHODS[method].fields, *(() if method == "none" else ("strength",))}


@st.composite
def fields(draw):
    method = draw(st.sampled_from(sorted(METHODS)))
    names = draw(st.sets(st.sampled_from(sorted(fields_of(method))))) if fields_of(method) else set()
    return {"method": method, **{name: draw(FIELDS[name]) for name in sorted(names)}}


configs = fields().map(lambda values: SkipScalingConfig(**values))


@given(configs)
def test_survives_json_pickle_and_repr(config):
    assert SkipScalingConfig.parse(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert eval(repr(config), {"SkipScalingConfig": SkipScalingConfig}) == config
    assert SkipScalingConfig.parse(config) is config


@given(configs, st.integers(2, 14))  # with more skips, S of linear factors is above 5
def test_resolved_config_is_complete_and_stays_the_same(config, num_skips):
    resolved = config.resolve(num_skips, gate_axis="channels")
    entry = resolved.to_dict()
    assert set(entry) == {"version", "method", *fields_of(config.method)}
    assert not {"auto", None} & set(entry.values())
    assert resolved.resolve(num_skips, gate_axis="tokens") == resolved


@given(configs)
def test_sets_only_the_fields_of_the_method(config):
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)[1:-1]}
    assert config.options == {}
    assert {name for name, value in values.items() if value is not None} == fields_of(config.method)


@given(fields())
def test_builds_the_same_config_from_flags(values):
    flag_of = {field.name: flag for flag, field, _ in options_of(SkipScalingConfig)}
    words = []
    for name, value in values.items():
        flag = flag_of[name]
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    parser = ArgumentParser()
    add_options(parser, SkipScalingConfig, "skip scaling")
    parsed = vars(parser.parse_args(words))
    assert SkipScalingConfig.from_flags({"learning_rate": 1, **parsed}) == SkipScalingConfig(**values)


def test_flags_without_a_method():
    assert SkipScalingConfig.from_flags({"skip_scaling": None, "kappa": None, "seed": 0}) is None
    for flag in ("kappa", "skip_scaling_init"):
        with pytest.raises(
            UserError, match=f"^{flag} needs a method in skip_scaling; accepted: none, inv_sqrt2, constant, cs"
        ):
            SkipScalingConfig.from_flags({flag: "x"})


def test_only_the_strength_can_change_on_resume():
    options = {flag: details.on_resume for flag, _, details in options_of(SkipScalingConfig)}
    assert options.pop("skip_scaling_strength") == "same"
    assert options.keys() >= {"skip_scaling", "kappa", "skip_scaling_reverse", "skip_scaling_init"}
    assert set(options.values()) == {"fixed"}


def test_defaults():
    assert SkipScalingConfig("cs").to_dict() == {
        "version": 1, "method": "cs", "kappa": 0.9, "reverse": False, "strength": 1.0,
    }  # fmt: skip
    assert SkipScalingConfig("ls").to_dict() == {
        "version": 1, "method": "ls", "shared": False, "reduction": 16, "activation": "relu", "gate": "se",
        "gate_axis": "auto", "init": "identity", "strength": 1.0,
    }  # fmt: skip
    assert SkipScalingConfig("none").to_dict() == {"version": 1, "method": "none"}
    assert str(SkipScalingConfig("cs", kappa=1)) == (
        "SkipScalingConfig(method='cs', kappa=1.0, reverse=False, strength=1.0)"
    )


def test_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SkipScalingConfig("cs").kappa = 0.5


BAD = [
    ({"method": "cs", "kappa": 0}, r"kappa must be a number, above 0 and at most 1 or 'auto', got 0"),
    ({"method": "cs", "kappa": -0.5}, "kappa must be .* got -0.5"),
    ({"method": "constant", "kappa": 1.01}, "kappa must be .* got 1.01"),
    ({"method": "cs", "kappa": float("nan")}, "kappa must be .* got nan"),
    ({"method": "cs", "kappa": 10**400}, "kappa must be .* got 1000"),
    ({"method": "cs", "kappa": "0.9"}, "kappa must be .* got '0.9'"),
    ({"method": "cs", "kappa": True}, "kappa must be .* got True"),
    ({"method": "cs", "strength": 1.5}, "strength must be a number, at least 0 and at most 1, got 1.5"),
    ({"method": "learned"}, r"skip_scaling must be one of none, .* got 'learned' \(did you mean 'learnable'\?\)"),
    ({"method": "CS"}, r"skip_scaling must be one of .* got 'CS' \(did you mean 'cs'\?\)"),
    ({"method": 3}, "skip_scaling must be one of .* got 3"),
    ({"method": ["cs"]}, r"skip_scaling must be one of .* got \['cs'\]"),
    ({"method": None}, "skip_scaling must be one of .* got None"),
    ({"method": "ls", "reduction": 0}, "reduction must be an integer, at least 1 and at most 65,536, got 0"),
    ({"method": "ls", "reduction": 1.5}, "reduction must be an integer, at least 1 and at most 65,536, got 1.5"),
    ({"method": "ls", "activation": "rleu"}, r"activation must be one of relu, .* \(did you mean 'relu'"),
    ({"method": "ls", "gate": ["se"]}, r"gate must be one of se, ie, got \['se'\]"),
    ({"method": "ls", "shared": "no"}, "shared must be True or False, got 'no'"),
    ({"method": "cs", "reduction": 8}, "reduction=8 is not used by method 'cs'; its fields: kappa, reverse, strength"),
    ({"method": "cs", "init": "identity"}, "init='identity' is not used by method 'cs'"),
    ({"method": "inv_sqrt2", "kappa": 0.7}, "kappa=0.7 is not used by method 'inv_sqrt2'"),
    ({"method": "learnable", "init": "identity"}, "not used by method 'learnable'; its fields: strength"),
    ({"method": "none", "strength": 0.5}, "strength=0.5 is not used by method 'none'; its fields: none"),
    ({"method": "ls", "gate": "ie", "reduction": 8}, "reduction=8 is not used by gate 'ie'"),
    ({"method": "cs", "kapa": 0.9}, r"unknown skip_scaling field 'kapa' \(did you mean 'kappa'\?\); accepted: method"),
    ({"method": "linear", "rho": 0.5}, "unknown skip_scaling field 'rho'; accepted: method, .* kappa, .*, strength$"),
    ({"kappa": 0.9}, "skip_scaling must be one of none, inv_sqrt2, .* got None"),
    (None, "skip_scaling must be one of none, .* got None"),
    (["cs"], r"skip_scaling must be one of none, .* got \['cs'\]"),
    ({"version": "x", "method": "cosine"}, "format version 'x', .* reads version 1: upgrade .*"),
    ({"version": 2, "method": "cosine"}, "format version 2, .* reads version 1: upgrade .*skip_scaling must be one"),
    ({"version": 2, "method": "cs", "decay": "linear"}, "format version 2, .* reads version 1: upgrade .*'decay'"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
def test_rejects_bad_values(value, message):
    with pytest.raises(UserError, match=message) as error:
        SkipScalingConfig.parse(value)
    assert "\n" not in str(error.value)


def test_reads_a_newer_version_with_known_fields():
    entry = {"version": FORMAT_VERSION + 1, "method": "cs", "kappa": 0.9}
    assert SkipScalingConfig.parse(entry) == SkipScalingConfig("cs", kappa=0.9)


@pytest.mark.parametrize("method", ["cs", "compensated_cs", "linear"])
def test_rejects_cs_for_a_single_skip(method):
    message = f"method '{method}' cannot scale a model with one long skip, as k_1 = 1; use 'constant'"
    with pytest.raises(UserError, match=message):
        SkipScalingConfig(method).resolve(1, gate_axis="channels")


def test_reversed_cs_scales_a_single_skip():
    assert SkipScalingConfig("cs", reverse=True).resolve(1, gate_axis="channels").kappa == 0.9
