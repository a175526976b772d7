"""The config checks itself, goes to a dict and back, and says what is wrong in a sentence."""

import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong_diffusers import SkipScalingConfig
from scalelong_diffusers.scaling.config import FORMAT_VERSION, METHODS


FIELDS = {
    "kappa": st.floats(0, 1, exclude_min=True) | st.just("auto"),
    "reverse": st.booleans(),
    "shared": st.booleans(),
    "reduction": st.integers(1, 64),
    "activation": st.sampled_from(["relu", "elu", "mish"]),
    "gate": st.just("se"),
    "gate_axis": st.sampled_from(["auto", "channels", "tokens"]),
    "init": st.sampled_from(["paper", "identity"]),
    "strength": st.floats(0, 1),
}


@st.composite
def configs(draw):
    method = draw(st.sampled_from(sorted(METHODS)))
    given_fields = draw(st.sets(st.sampled_from(METHODS[method]))) if METHODS[method] else set()
    return SkipScalingConfig(method, **{name: draw(FIELDS[name]) for name in sorted(given_fields)})


@given(configs())
def test_a_config_survives_json_pickle_and_its_own_repr(config):
    assert SkipScalingConfig.parse(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert eval(repr(config), {"SkipScalingConfig": SkipScalingConfig}) == config
    assert SkipScalingConfig.parse(config) is config


@given(configs(), st.integers(2, 40))
def test_a_resolved_config_is_complete_and_resolving_again_changes_nothing(config, num_skips):
    resolved = config.resolve(num_skips, gate_axis="channels")
    entry = resolved.to_dict()
    assert set(entry) <= {"version", "method", *METHODS[config.method]}
    assert "auto" not in entry.values()
    assert None not in entry.values()
    assert resolved.resolve(num_skips, gate_axis="tokens") == resolved


@given(configs())
def test_only_the_fields_of_the_method_are_set(config):
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)[1:]}
    assert {name for name, value in values.items() if value is not None} == set(METHODS[config.method])


def test_defaults_are_the_papers():
    assert SkipScalingConfig("cs").to_dict() == {
        "version": 1, "method": "cs", "kappa": 0.9, "reverse": False, "strength": 1.0,
    }  # fmt: skip
    assert SkipScalingConfig("ls").to_dict() == {
        "version": 1, "method": "ls", "shared": True, "reduction": 16, "activation": "relu", "gate": "se",
        "gate_axis": "auto", "init": "paper", "strength": 1.0,
    }  # fmt: skip
    assert SkipScalingConfig("none").to_dict() == {"version": 1, "method": "none"}
    assert str(SkipScalingConfig("cs", kappa=1)) == (
        "SkipScalingConfig(method='cs', kappa=1.0, reverse=False, strength=1.0)"
    )


def test_a_config_can_not_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SkipScalingConfig("cs").kappa = 0.5


BAD = {
    "kappa 0": (("cs",), {"kappa": 0}, r"kappa must be 'auto' or a number in \(0, 1\], got 0"),
    "kappa negative": (("cs",), {"kappa": -0.5}, r"kappa must be 'auto' or a number in \(0, 1\], got -0.5"),
    "kappa above 1": (("constant",), {"kappa": 1.01}, r"kappa must be .* got 1.01"),
    "kappa nan": (("cs",), {"kappa": float("nan")}, r"kappa must be .* got nan"),
    "kappa text": (("cs",), {"kappa": "0.9"}, r"kappa must be .* got '0.9'"),
    "kappa bool": (("cs",), {"kappa": True}, r"kappa must be .* got True"),
    "strength": (("cs",), {"strength": 1.5}, r"strength must be a number in \[0, 1\], got 1.5"),
    "method": (("learned",), {}, r"method 'learned' \(did you mean 'learnable'\?\); accepted: none, inv_sqrt2"),
    "method in capitals": (("CS",), {}, r"unknown skip scaling method 'CS' \(did you mean 'cs'\?\)"),
    "kappa huge": (("cs",), {"kappa": 10**400}, r"kappa must be 'auto' or a number in \(0, 1\], got 1000"),
    "identity of one scalar": (("learnable",), {"init": "identity"}, r"not used by method 'learnable'; its fields"),
    "method not text": ((3,), {}, r"unknown skip scaling method 3; accepted"),
    "method a list": ((["cs"],), {}, r"unknown skip scaling method \['cs'\]"),
    "field": (("cs",), {"kapa": 0.9}, r"unknown skip scaling field 'kapa' \(did you mean 'kappa'\?\); accepted"),
    "reduction 0": (("ls",), {"reduction": 0}, r"reduction must be a whole number of at least 1, got 0"),
    "reduction half": (("ls",), {"reduction": 1.5}, r"reduction must be a whole number of at least 1, got 1.5"),
    "activation": (("ls",), {"activation": "rleu"}, r"activation must be one of .*got 'rleu' \(did you mean 'relu'"),
    "gate": (("ls",), {"gate": ["se"]}, r"gate must be one of 'se', 'ie', got \['se'\]"),
    "shared": (("ls",), {"shared": "no"}, r"shared must be True or False, got 'no'"),
    "unused": (("cs",), {"reduction": 8}, r"reduction=8 is not used by method 'cs'; its fields: kappa, reverse"),
    "unused kappa": (("inv_sqrt2",), {"kappa": 0.7}, r"kappa=0.7 is not used by method 'inv_sqrt2'"),
    "unused by none": (("none",), {"strength": 0.5}, r"strength=0.5 is not used by method 'none'; its fields: none"),
    "unused by the gate": (("ls",), {"gate": "ie", "reduction": 8}, r"reduction=8 is not used by gate='ie'"),
    "identity": (("cs",), {"init": "identity"}, r"it has no gates: to start a model without a jump, raise `strength`"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_named_with_what_is_accepted(name):
    args, fields, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        SkipScalingConfig(*args, **fields)
    assert "\n" not in str(error.value)


def test_a_dict_names_its_method():
    with pytest.raises(ValueError, match=r"skip_scaling \{'kappa': 0.9\} names no method; accepted: none"):
        SkipScalingConfig.parse({"kappa": 0.9})


@pytest.mark.parametrize("value", [None, 0.9, ["cs"]])
def test_anything_but_a_config_a_dict_or_a_name_is_refused(value):
    with pytest.raises(TypeError, match="must be a SkipScalingConfig, a dict or the name of a method"):
        SkipScalingConfig.parse(value)


def test_fields_of_a_newer_version_are_refused_with_its_number():
    entry = {"version": FORMAT_VERSION + 1, "method": "cs", "kappa": 0.9, "decay": "linear"}
    with pytest.raises(ValueError, match=r"format version 2, .*reads version 1: upgrade .*'decay'"):
        SkipScalingConfig.parse(entry)
    with pytest.raises(ValueError, match=r"format version 2, .*upgrade .*unknown skip scaling method 'cosine'"):
        SkipScalingConfig.parse({"version": 2, "method": "cosine"})
    with pytest.raises(ValueError, match="version of skip_scaling must be a whole number of at least 1, got 'x'"):
        SkipScalingConfig.parse({"version": "x", "method": "cs"})
    del entry["decay"]
    assert SkipScalingConfig.parse(entry) == SkipScalingConfig("cs", kappa=0.9)


def test_cs_of_a_single_skip_would_scale_nothing():
    with pytest.raises(ValueError, match=r"leaves the outermost skip as it is .* use 'constant'"):
        SkipScalingConfig("cs").resolve(1, gate_axis="channels")
    assert SkipScalingConfig("cs", reverse=True).resolve(1, gate_axis="channels").kappa == 0.9
