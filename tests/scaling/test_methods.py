"""The methods other than CS and LS compute the formulas of their sources, and users can register their own."""

import math

import pytest
import torch
from torch import nn

from scalelong_diffusers import LongSkip, SkipFactor, SkipMix, SkipScalingConfig, UserError, register_skip_method
from scalelong_diffusers.scaling import METHODS, SkipScaler


def scaler(method, hidden_width=8, width=4, count=3, channel_dim=1, **fields):
    skips = [LongSkip(i, count, "", "", width, hidden_width, channel_dim) for i in range(1, count + 1)]
    return SkipScaler(SkipScalingConfig(method, **fields).resolve(count, "channels"), skips)


def tensors(hidden_width=8, width=4):
    torch.manual_seed(0)
    return torch.randn(2, hidden_width, 5, 5), torch.randn(2, width, 5, 5)


def magnitude(hidden, skip):
    return torch.cat([hidden, skip], dim=1).square().mean().sqrt()


@pytest.mark.parametrize("widths", [(8, 8), (12, 4)], ids=str)
def test_compensated_cs_changes_the_mix_and_keeps_the_magnitude(widths):
    hidden, skip = (t / t.square().mean().sqrt() for t in tensors(*widths))
    found = scaler("compensated_cs", *widths, kappa=0.5)
    for i, k in ((1, 1.0), (2, 0.5), (3, 0.25)):
        new_hidden, new_skip = found.combine(hidden, skip, i)
        scale = math.sqrt(sum(widths) / (widths[0] + k**2 * widths[1]))
        torch.testing.assert_close(new_hidden, scale * hidden)
        torch.testing.assert_close(new_skip, scale * k * skip)
        torch.testing.assert_close(magnitude(new_hidden, new_skip), torch.tensor(1.0))
    assert found.is_identity(1)
    assert not found.is_identity(2)


@pytest.mark.parametrize("balance", [0.5, 0.3])
def test_mp_cat_gives_each_side_its_share_whatever_its_width(balance):
    hidden, skip = (t / t.square().mean().sqrt() for t in tensors(12, 4))
    new_hidden, new_skip = scaler("mp_cat", 12, 4, balance=balance).combine(hidden, skip, 2)
    energy = new_hidden.square().sum() + new_skip.square().sum()
    torch.testing.assert_close(
        new_skip.square().sum() / energy, torch.tensor(balance**2 / (balance**2 + (1 - balance) ** 2))
    )
    torch.testing.assert_close(magnitude(new_hidden, new_skip), torch.tensor(1.0))


def test_mp_cat_of_equal_widths_in_balance_is_a_plain_concatenation():
    hidden, skip = tensors(8, 8)
    for old, new in zip((hidden, skip), scaler("mp_cat", 8, 8).combine(hidden, skip, 1)):
        torch.testing.assert_close(old, new)


def test_lerp_starts_halfway_and_learns():
    hidden, skip = tensors()
    found = scaler("lerp")
    new_hidden, new_skip = found.combine(hidden, skip, 2)
    assert torch.equal(new_hidden, hidden / 2)
    assert torch.equal(new_skip, skip / 2)
    with torch.no_grad():
        found.method(2).value.fill_(0.75)
    torch.testing.assert_close(found.combine(hidden, skip, 2), (0.75 * hidden, 0.25 * skip))


@pytest.mark.parametrize("channel_dim", [1, 3])
def test_normalized_skips_have_mean_0_and_variance_1_over_the_channels_of_both(channel_dim):
    hidden, skip = (t.movedim(1, channel_dim) for t in tensors())
    both = torch.cat(scaler("normalized", channel_dim=channel_dim).combine(3 * hidden + 1, skip, 1), dim=channel_dim)
    assert both.mean(channel_dim).abs().max() < 1e-6
    torch.testing.assert_close(both.var(channel_dim, correction=0), torch.ones(2, 5, 5), atol=1e-4, rtol=0)


def test_token_gates_start_at_one_and_gate_each_position():
    _, skip = tensors()
    found = scaler("token_gates")
    assert torch.equal(found.factor(skip, 1), torch.ones(2, 1, 5, 5))
    linear = found.method(1).linear
    with torch.no_grad():
        linear.weight.normal_()
    z = torch.einsum("bchw,c->bhw", skip, linear.weight[0])
    torch.testing.assert_close(found.scale(skip, 1), skip * 2 * torch.sigmoid(z)[:, None])


@pytest.mark.parametrize("method", ["compensated_cs", "mp_cat", "lerp", "normalized"])
def test_strength_goes_from_the_plain_concatenation_to_the_method(method):
    hidden, skip = tensors()
    full = scaler(method).combine(hidden, skip, 2)
    off = scaler(method, strength=0.0).combine(hidden, skip, 2)
    half = scaler(method, strength=0.5).combine(hidden, skip, 2)
    for plain, none, middle, whole in zip((hidden, skip), off, half, full):
        assert torch.equal(none, plain)
        torch.testing.assert_close(middle, (plain + whole) / 2)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_method_keeps_the_dtype(method, dtype):
    hidden, skip = (t.to(dtype) for t in tensors(32, 32))
    found = scaler(method, 32, 32)
    if found.changes_hidden(2):
        assert {t.dtype for t in found.combine(hidden, skip, 2)} == {dtype}
    else:
        assert found.scale(skip, 2).dtype == dtype


def test_registered_method_is_a_method_like_any_other(channel_factors):
    config = SkipScalingConfig.parse({"method": "channel_factors", "start": 0.5})
    assert config == SkipScalingConfig("channel_factors", options={"start": 0.5})
    assert config.to_dict() == {"version": 1, "method": "channel_factors", "start": 0.5, "strength": 1.0}
    assert SkipScalingConfig.parse(config.to_dict()) == config
    assert repr(config) == "SkipScalingConfig(method='channel_factors', start=0.5, strength=1.0)"
    assert SkipScalingConfig("channel_factors").options == {"start": 1.0}
    assert config.has_gates
    found = scaler("channel_factors", options={"start": 0.5})
    assert list(found.state_dict()) == [f"gates.channel_factors_{i}.values" for i in (1, 2, 3)]
    _, skip = tensors()
    torch.testing.assert_close(found.scale(skip, 2), skip / 2)
    assert METHODS["channel_factors"].summary == "One learned factor per channel."
    register_skip_method("channel_factors")(channel_factors)  # again, as in a notebook cell that is run twice


def test_rejects_bad_methods(channel_factors):
    with pytest.raises(UserError, match=r"'cs' is already registered, by scalelong_diffusers.scaling.constants"):
        register_skip_method("cs")(channel_factors)

    class NoDefault(SkipMix):
        def __init__(self, skip, start):
            super().__init__(skip)

    with pytest.raises(UserError, match="'mine' needs a default for its field 'start'"):
        register_skip_method("mine")(NoDefault)

    class NoReset(SkipFactor):
        def __init__(self, skip):
            super().__init__(skip)
            self.value = nn.Parameter(torch.empty(1))

    register_skip_method("forgetful")(NoReset)
    with pytest.raises(NotImplementedError, match="NoReset has parameters, so it must define reset_parameters"):
        scaler("forgetful")
    with pytest.raises(UserError, match=r"must be an identifier, got 'my.method'"):
        register_skip_method("my.method")(channel_factors)
    for name, key in (("mine", "skip"), ("skip", None)):
        with pytest.raises(UserError, match=f"key 'skip' of the skip scaling method '{name}' belongs to another"):
            register_skip_method(name, key=key)(channel_factors)

    class Weak(SkipMix):
        def __init__(self, skip, strength=1.0):
            super().__init__(skip)

    with pytest.raises(UserError, match="cannot have a field with the name 'strength'"):
        register_skip_method("weak")(Weak)
    with pytest.raises(UserError, match=r"unknown skip_scaling field 'strat' \(did you mean 'start'\?\)"):
        SkipScalingConfig.parse({"method": "channel_factors", "strat": 0.5})
    with pytest.raises(
        UserError, match=r"kappa=0.5 is not used by method 'channel_factors'; its fields: start, strength"
    ):
        SkipScalingConfig("channel_factors", kappa=0.5)
    with pytest.raises(UserError, match="fields of method 'channel_factors' must be JSON values"):
        SkipScalingConfig("channel_factors", options={"start": torch.ones(1)})
